"""Convert a small Llama in the format of llama2.c ("legacy v0") to a folder of ``transformers``.

    python examples/llama2c.py MODEL.bin TOKENIZER.bin FOLDER

`experiments/fedhl/cpu` uses stories260K, converted by `python examples/llama2c.py stories260K.bin tok512.bin
models/stories260K`.
"""

from __future__ import annotations

import argparse
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlowrank.core.errors import DataError

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_FIRST_BYTE_ID = 3
_VERSION_MAGIC = 0x616B3432
"""First four bytes of files of version 1 and later, as an integer: "ak42"."""


@dataclass(frozen=True)
class Shape:
    """Header of a model file: widths and counts; ``tied`` is True if the output layer is the embedding."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    tied: bool

    @property
    def blocks(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the arrays of a model file, in their order; matrices are [out, in]."""
        d, n, h = self.dim, self.layers, self.hidden
        kv, half = d // self.heads * self.kv_heads, d // self.heads // 2
        blocks: list[tuple[str, tuple[int, ...]]] = [
            ("embedding", (self.vocabulary, d)),
            ("attention_norm", (n, d)),
            ("wq", (n, d, d)),
            ("wk", (n, kv, d)),
            ("wv", (n, kv, d)),
            ("wo", (n, d, d)),
            ("ffn_norm", (n, d)),
            ("w1", (n, h, d)),
            ("w2", (n, d, h)),
            ("w3", (n, h, d)),
            ("norm", (d,)),
            ("cos", (self.length, half)),
            ("sin", (self.length, half)),
        ]
        return blocks if self.tied else [*blocks, ("output", (self.vocabulary, d))]


def convert_llama2c(model: Path, tokenizer: Path, folder: Path) -> Path:
    """Write a ``LlamaForCausalLM`` and its fast tokenizer from a model and a tokenizer of llama2.c.

    llama2.c rotates adjacent pairs of a head's coordinates, (0, 1), (2, 3), ...; transformers rotates the
    first half against the second. The rows of the query and key projections are reordered accordingly, which
    changes no score. The tokenizer gives the tokens of llama2.c, except that "<s>", "</s>" and "<unk>" in a
    text are special tokens, as in every tokenizer of transformers.

    Args:
        model: the weights, such as ``stories260K.bin``: 7 little-endian int32 (dim, hidden, layers, heads, kv
            heads, vocabulary, length; a negative vocabulary means that the output layer is not the
            embedding), then float32.
        tokenizer: the vocabulary, such as ``tok512.bin``: int32 longest piece, then for each token float32
            score, int32 length, and its bytes.
        folder: created if it does not exist.

    Returns:
        The folder.

    Raises:
        DataError: if a file is not of the format.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, arrays = _read_model(model)
    pieces = _read_tokenizer(tokenizer, shape.vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=shape.tied,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama: Any = LlamaForCausalLM(config)
    llama.load_state_dict(_name_weights(shape, arrays))
    folder.mkdir(parents=True, exist_ok=True)
    llama.save_pretrained(folder)
    _make_fast_tokenizer(pieces, shape.length).save_pretrained(folder)
    return folder


def _read_model(path: Path) -> tuple[Shape, dict[str, np.ndarray]]:
    """Read the header of a model file, and its float32 arrays by the names of :attr:`Shape.blocks`."""
    data = _read(path)
    if len(data) < 28:
        raise DataError(f"{path} has {len(data)} bytes, too few for the header of a llama2.c model")
    if struct.unpack_from("<I", data)[0] == _VERSION_MAGIC:
        raise DataError(
            f"{path} is a llama2.c model of a later version; only the legacy format (version 0) is read. "
            "Export it with llama2.c's export.py --version 0."
        )
    dim, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack_from("<7i", data)
    sizes = (dim, hidden, layers, heads, kv_heads, abs(vocabulary), length)
    if min(sizes) < 1 or dim % heads or heads % kv_heads or dim // heads % 2:
        raise DataError(f"{path} is no llama2.c model: its header reads {sizes}")
    shape = Shape(dim, hidden, layers, heads, kv_heads, abs(vocabulary), length, vocabulary > 0)
    counts = [int(np.prod(s, dtype=np.int64)) for _, s in shape.blocks]
    expected = 28 + 4 * sum(counts)
    if len(data) != expected:
        raise DataError(
            f"{path} has {len(data)} bytes; by its header {sizes} a llama2.c model has {expected}"
        )
    arrays = np.split(np.frombuffer(data, "<f4", offset=28), np.cumsum(counts)[:-1])
    blocks = zip(shape.blocks, arrays, strict=True)
    return shape, {name: array.reshape(block).astype(np.float32) for (name, block), array in blocks}


def _read_tokenizer(path: Path, size: int) -> list[tuple[str, float]]:
    """Read pieces and scores of a vocabulary file, in the order of token ids; a space in a piece is a space."""
    data = _read(path)
    at = 4
    tokens: list[tuple[str, float]] = []
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            piece = data[at + 8 : at + 8 + length]
            if length < 0 or len(piece) != length:
                raise DataError(
                    f"{path} ends within token {len(tokens)}; it is no llama2.c tokenizer, or cut short"
                )
            tokens.append((piece.decode(), float(score)))
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no llama2.c tokenizer: token {len(tokens)}: {error}") from error
    if len(tokens) != size:
        raise DataError(f"{path} has {len(tokens)} tokens, but the model has {size}")
    if size < _FIRST_BYTE_ID + 256 or any(
        tokens[_FIRST_BYTE_ID + b][0] != f"<0x{b:02X}>" for b in range(256)
    ):
        raise DataError(f"{path} has not the 256 byte tokens at ids 3 to 258, so it is no llama2.c tokenizer")
    # ids 0 to 2 are <unk>, <s> and </s>; llama2.c stores the last two with line breaks around them
    named = [*((name, 0.0) for name in _SPECIAL_TOKENS), *tokens[len(_SPECIAL_TOKENS) :]]
    if len({piece for piece, _ in named}) != size:
        raise DataError(f"{path} has a token twice")
    return named


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _name_weights(shape: Shape, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Name the weights as in ``LlamaForCausalLM``, and reorder the rows of queries and keys."""

    def reorder_rows(w: np.ndarray, heads: int) -> np.ndarray:
        """Reorder the rows of each head from (0, 1, 2, 3, ...) to (0, 2, ..., 1, 3, ...)."""
        rows, columns = w.shape
        pairs: np.ndarray = w.reshape(heads, rows // heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)

    weights = {
        "model.embed_tokens.weight": arrays["embedding"],
        "model.norm.weight": arrays["norm"],
        "lm_head.weight": arrays["embedding" if shape.tied else "output"],
    }
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": arrays["attention_norm"][i],
            f"{layer}.post_attention_layernorm.weight": arrays["ffn_norm"][i],
            f"{layer}.self_attn.q_proj.weight": reorder_rows(arrays["wq"][i], shape.heads),
            f"{layer}.self_attn.k_proj.weight": reorder_rows(arrays["wk"][i], shape.kv_heads),
            f"{layer}.self_attn.v_proj.weight": arrays["wv"][i],
            f"{layer}.self_attn.o_proj.weight": arrays["wo"][i],
            f"{layer}.mlp.gate_proj.weight": arrays["w1"][i],
            f"{layer}.mlp.down_proj.weight": arrays["w2"][i],
            f"{layer}.mlp.up_proj.weight": arrays["w3"][i],
        }
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}


def _make_fast_tokenizer(pieces: list[tuple[str, float]], length: int) -> Any:
    """Make a BPE tokenizer whose merges are ranked by the score of the merged piece, as in SentencePiece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    mergeable = {p for p, i in vocabulary.items() if i >= _FIRST_BYTE_ID + 256}
    ranked = sorted(mergeable, key=lambda p: (-pieces[vocabulary[p]][1], vocabulary[p]))
    merges = [(p[:i], p[i:]) for p in ranked for i in range(1, len(p)) if {p[:i], p[i:]} <= mergeable]
    bpe = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=_SPECIAL_TOKENS[0], byte_fallback=True, fuse_unk=False)
    )
    bpe.normalizer = normalizers.Prepend(" ")
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, model_max_length=length, clean_up_tokenization_spaces=False, **names
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a model of llama2.c to a folder of transformers.")
    parser.add_argument("model", type=Path, help="weights, such as stories260K.bin")
    parser.add_argument("tokenizer", type=Path, help="vocabulary, such as tok512.bin")
    parser.add_argument("folder", type=Path, help="made if it does not exist")
    arguments = parser.parse_args()
    try:
        print(convert_llama2c(arguments.model, arguments.tokenizer, arguments.folder))
    except DataError as error:
        parser.error(str(error))
