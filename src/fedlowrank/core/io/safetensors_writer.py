"""Tensors as the bytes of a safetensors file in one buffer, so that a large message is not in memory three times.

``safetensors.torch.save`` gives the same bytes, but copies every tensor before it copies all of them into its result.
The format: https://github.com/huggingface/safetensors (length of the header, header as JSON, data).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import torch
from torch import Tensor

TYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in the format, in the order of the library: the widest first, so that all are aligned."""


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Encode tensors as a safetensors file.

    Args:
        tensors: tensors by name; contiguous, on the CPU. Tensors that share memory are each written.
        metadata: texts of the header by name.

    Raises:
        KeyError: if a tensor has a type that the format does not know.
    """
    rank = {dtype: i for i, dtype in enumerate(TYPES)}
    order = sorted(tensors, key=lambda name: (rank[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        t = tensors[name]
        size = t.numel() * t.element_size()
        header[name] = {
            "dtype": TYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out = io.BytesIO()
    # allocate the whole size at once, because a growing buffer is copied
    out.seek(8 + len(text) + offset - 1)
    out.write(b"\0")
    out.seek(0)
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)
    for name in order:
        t = tensors[name].detach()
        # torch calls a tensor of one element contiguous whatever its strides, but then cannot view it as bytes
        out.write(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data)
    return out.getvalue()
