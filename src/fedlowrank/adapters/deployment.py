"""Low-rank and sparse models for inference, with thin layers and few bytes, and their file format.

The weight is w + p: w as factors left · right of its scheme-2 matrix, p sparse. The cheapest form is used:

    dense              w + p: numel values
    factors            x → right → left: r (rows + columns) values
    factors, sparse    and p: its values and positions, an index of 4 bytes each and 4 bytes a row, or a
                       bitmask of the weight if that is smaller. Rank 0 is sparse alone

In memory a sparse tensor always has indices, with which it computes. Bitmasks are used only in the file, whose
bytes :func:`measure_size` counts.

For the computation of thin layers and its cost see :mod:`fedlowrank.adapters.thin_layers`.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError, ConfigError, TaskError, did_you_mean
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..core.tree import Params, TreeError, decode, encode, nbytes
from ..linalg.matricize import LowRank, Sparse, Weights, matrix_shape, unmatricize
from ..models.fused_inference import find_bypassed_layer
from ..models.module_copy import copy_module
from .lora.lora_layers import merge_lora_
from .thin_layers import (
    KINDS,
    CompressedLayer,
    compress_layer,
    compressed_tensors,
    copy_row_major,
    count_index_bytes,
    count_multiplications,
    sparse_indices,
)

Layout = Literal["small", "fast"]
FORMAT = "fedlowrank.deployed.2"
"""Format name that a file carries."""
SPARSE = 4
"""Number of dense multiplications that cost as much as one of a sparse linear layer; 2 to 4 measured at batch 20."""


def _cost(layer: nn.Module, rank: int, sparse_part: Tensor, layout: Layout) -> int:
    """Cost, in bytes or in work, of factors of the given rank and a sparse tensor."""
    nonzero_count = int(sparse_part.count_nonzero())
    if layout == "fast":
        return count_multiplications(layer, rank) + (
            SPARSE * nonzero_count
            if isinstance(layer, nn.Linear)
            else sparse_part.numel() * (nonzero_count > 0)
        )
    index_bytes = min(count_index_bytes(nonzero_count, sparse_part.shape))
    return (
        sparse_part.element_size() * (rank * sum(matrix_shape(sparse_part.shape)) + nonzero_count)
        + index_bytes
    )


def _choose_form(
    layer: nn.Module, w: Tensor | LowRank, p: Tensor | None, merged: Tensor, layout: Layout
) -> Params | None:
    """Build the parts of the cheapest form; None if that is the dense one."""
    rows, columns = matrix_shape(merged.shape)
    forms = [(LowRank(merged.new_empty(rows, 0), merged.new_empty(0, columns)), merged)]
    if isinstance(w, LowRank):
        forms.append((w, torch.zeros_like(merged) if p is None else p))
    costs = [_cost(layer, f.rank, sparse_part, layout) for f, sparse_part in forms]
    dense_cost = merged.numel() * (merged.element_size() if layout == "small" else 1)
    return compressed_tensors(*forms[costs.index(min(costs))]) if min(costs) < dense_cost else None


def deploy(
    module: nn.Module, weights: Weights, sparse: Params | None = None, layout: Layout = "small"
) -> nn.Module:
    """Copy a module for inference, with other parameters, each in its cheapest form.

    ``nn.Linear``, ``nn.Conv1d`` and ``nn.Conv2d`` may become :class:`CompressedLayer`. All other parameters are dense:
    vectors, embeddings, complex weights, layers of a subclass or with their own ``forward``, and weights that several
    modules share, which stay shared. Layers of :func:`~fedlowrank.adapters.lora.lora_layers.add_lora` are merged: plain
    layers with the weight W + s·B A.

    Args:
        module: module to copy, which is not changed; the copy is in evaluation mode and needs no gradient.
        weights: new parameters by name, and buffers that differ from the module's, such as the statistics of batch
            normalizations; also a whole state dict. All others, such as frozen parameters, are those of the module.
        sparse: tensors to add to all or some of ``weights``, by name.
        layout: ``small`` for the form with the fewest bytes; or ``fast`` for that with the least work, measured by
            ``TRANSFER_COST`` and :data:`SPARSE`, in which no convolution with a sparse part is thin. Ties are
            dense.

    Raises:
        ConfigError: if the layout is unknown.
        TaskError: if the module does not have a name, or a tensor, its factors or its sparse part differ from the
            module's tensor in shape or type; if the weights have another LoRA scale than the module; or if PyTorch's fused
            inference would not call a layer that has its own ``forward``, such as a layer of PEFT.
    """
    if layout not in ("small", "fast"):
        raise ConfigError(f"deploy: {layout!r} is no layout. {did_you_mean(str(layout), ('small', 'fast'))}")
    _refuse_bypassed_layers(module)
    deployed = copy_module(module).eval().requires_grad_(False)
    weights = _take_other_state(deployed, weights)
    _check_weights(deployed, weights, sparse or {})
    layers = _compressible_layers(deployed)
    for name, param in list(deployed.named_parameters()):
        if name not in weights and not (sparse and name in sparse):
            continue
        w, p, layer = weights.get(name, param), (sparse or {}).get(name), layers.get(id(param))
        # zeros are counted below, in whatever form the tensor was given
        w = w.dense() if isinstance(w, Sparse) else w
        dense_weight = unmatricize(w.dense(), param.shape) if isinstance(w, LowRank) else w
        merged_weight = dense_weight if p is None else dense_weight + p
        tensors = None if layer is None else _choose_form(layer, w, p, merged_weight, layout)
        if tensors is None:
            # only the data of a parameter is replaced, so shared parameters stay shared
            param.data = copy_row_major(merged_weight, param.device)
        else:
            compress_layer(layer, tensors)
    for name, buffer in deployed.named_buffers():
        buffer_value = weights.get(name)
        if isinstance(buffer_value, Tensor):
            buffer.data = copy_row_major(buffer_value, buffer.device)
    merge_lora_(deployed)
    return deployed


def _take_other_state(module: nn.Module, weights: Weights) -> Weights:
    """Load the entries of a state dict that are no parameters or buffers, such as the scale of LoRA; return the others."""
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    names = module.state_dict().keys() - {name for name, _ in tensors}
    module.load_state_dict({n: w for n, w in weights.items() if n in names}, strict=False)
    return {n: w for n, w in weights.items() if n not in names}


def _refuse_bypassed_layers(module: nn.Module) -> None:
    """Refuse layers in ``nn.TransformerEncoderLayer`` that are called in training but not in evaluation."""
    if layer := find_bypassed_layer(module):
        raise TaskError(
            f"deploy: layer {layer} is of nn.TransformerEncoderLayer and has its own forward. In evaluation PyTorch's fused "
            "inference reads weights and does not call the layer, so scores would be other than in training. If the layer is one "
            "of PEFT, load the state of result.personal into the module and merge it with merge_and_unload(). Otherwise call "
            "layer.register_forward_pre_hook(lambda *_: None); PyTorch then calls all layers"
        )


def _check_weights(module: nn.Module, weights: Weights, sparse: Params) -> None:
    """Refuse names that the module does not have, and tensors that do not match its own."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    first_names = {id(t): name for name, t in (*parameters.items(), *buffers.items())}
    aliases = {
        name: first_names[id(t)]
        for name, t in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    all_tensors = {**parameters, **buffers}
    for argument, entries in (("weights", weights), ("sparse", sparse)):
        module_tensors = parameters if argument == "sparse" else all_tensors
        for name, w in entries.items():
            canonical_name = aliases.get(name, "")
            if canonical_name not in module_tensors:
                kind = "parameter" if argument == "sparse" else "parameter or buffer"
                raise TaskError(
                    f"deploy: {argument} names {name!r}, which is no {kind} of the module. "
                    f"{did_you_mean(name, module_tensors)}"
                )
            if name != canonical_name and canonical_name not in entries:
                raise TaskError(
                    f"deploy: {argument} names {name!r}, which the module shares with {canonical_name!r}; give it by that "
                    "name"
                )
            _check_tensor(f"deploy: {name!r} in {argument}", w, module_tensors[canonical_name])


def _check_tensor(title: str, w: Tensor | LowRank | Sparse, expected: Tensor) -> None:
    """Refuse a tensor, factors or nonzero entries that differ in shape or type from the module's own tensor."""
    if isinstance(w, LowRank):
        rows, columns = matrix_shape(expected.shape) if expected.ndim > 1 else (-1, -1)
        left, right = ([*t.shape] for t in (w.left, w.right))
        if expected.ndim < 2 or left != [rows, w.rank] or right != [w.rank, columns]:
            requirement = (
                f"it needs [{rows}, r] and [r, {columns}]" if expected.ndim > 1 else "it takes no factors"
            )
            raise TaskError(
                f"{title} has factors of the shapes {left} and {right}; for the module's shape {[*expected.shape]} {requirement}"
            )
        dtypes = {w.left.dtype, w.right.dtype}
    else:
        shape, dtype = (w.mask.shape, w.values.dtype) if isinstance(w, Sparse) else (w.shape, w.dtype)
        if shape != expected.shape:
            raise TaskError(f"{title} has the shape {[*shape]}, but the module's has {[*expected.shape]}")
        dtypes = {dtype}
    for wrong_dtype in dtypes - {expected.dtype}:
        raise TaskError(
            f"{title} is of {wrong_dtype}, but the module's is of {expected.dtype}; convert it with .to({expected.dtype})"
        )


def _compressible_layers(module: nn.Module) -> dict[int, nn.Module]:
    """The layers that can be compressed, by the ``id`` of their weights."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for m in module.modules():
        for name, p in m.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(p), []).append((name, m))
    sole_owners = {i: entries[0] for i, entries in owners.items() if len(entries) == 1}
    return {
        i: m
        for i, (name, m) in sole_owners.items()
        if name == "weight"
        and type(m) in KINDS
        and "forward" not in vars(m)
        and not m.get_parameter("weight").is_complex()
    }


def save_deployed(deployed: nn.Module, path: Path | str) -> None:
    """Write a deployed module's state to a safetensors file, shared tensors once, without its code.

    The metadata (JSON) list the compressed layers and contain a checksum.

    Raises:
        CheckpointError: if the file cannot be written; an existing file is then unchanged.
        TaskError: if the module has state that is not a tensor.
    """
    layers = {n: [*m.shape] for n, m in deployed.named_modules() if isinstance(m, CompressedLayer)}
    body = {"layers": layers, "state": _state(deployed)}
    write_atomically(Path(path), encode({"format": FORMAT, "sha256": _digest(body), "body": body}))


def load_deployed(module: nn.Module | Callable[[], nn.Module], path: Path | str) -> nn.Module:
    """Rebuild a deployed module from its file, with outputs that are equal bit for bit.

    Args:
        module: plain module of the same architecture, which is not changed; or a factory of such modules.
        path: path of a file that :func:`save_deployed` wrote.

    Raises:
        CheckpointError: if the file cannot be read, is damaged, or has another format.
        TaskError: if the file is of another architecture.
    """
    with as_checkpoint_error(f"cannot read {path}"):
        data = Path(path).read_bytes()
    try:
        content = decode(data)
        body = content["body"]
        layers, state, is_intact = body["layers"], body["state"], content["sha256"] == _digest(body)
    except (TreeError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged, or is no deployed model: {error!r}") from error
    if not is_intact or content["format"] != FORMAT:
        raise CheckpointError(f"{path} is damaged, or not of the format {FORMAT}")
    with torch.random.fork_rng(devices=[]):  # the factory's random initial values are overwritten
        deployed = copy_module(module) if isinstance(module, nn.Module) else module()
    merge_lora_(deployed)
    deployed, modules = deployed.eval().requires_grad_(False), dict(deployed.named_modules())
    for name, shape in layers.items():
        layer: Any = modules.get(name)
        if type(layer) not in KINDS or [*layer.weight.shape] != shape:
            raise TaskError(
                f"{path} does not fit the model, which has no plain layer {name!r} with a weight {shape}"
            )
        compress_layer(layer, _take_tensors(state, name))
    model_state = _state(deployed, compressed=False)
    for name in sorted(model_state.keys() | state.keys()):
        file_shape, model_shape = ([*d[name].shape] if name in d else "missing" for d in (state, model_state))
        if file_shape != model_shape:
            raise TaskError(
                f"{path} does not fit the model: {name} is {file_shape} in the file and {model_shape} in the model"
            )
        model_state[name].data = state[name].to(model_state[name].device)
    return deployed


def _digest(body: Any) -> str:
    return hashlib.sha256(encode(body)).hexdigest()


def _take_tensors(state: Params, layer: str) -> Params:
    """Take the tensors of a compressed layer out of a file's state; its indices are int32 or a bitmask."""

    def take(name: str) -> Tensor:
        return state.pop(f"{layer}.{name}".lstrip("."))

    tensors = {n: take(n) for n in ("left", "right", "values")}
    if f"{layer}.mask".lstrip(".") not in state:
        return {**tensors, "indices": take("indices"), "starts": take("starts")}
    return {**tensors, **sparse_indices(take("mask"))}


def _state(module: nn.Module, compressed: bool = True) -> Params:
    """Parameters and persistent buffers, each under the first of its names.

    The indices of compressed layers, if included, have the smaller form.
    """
    state: dict[int, tuple[str, Tensor]] = {}
    for name, t in module.state_dict(keep_vars=True).items():
        if not isinstance(t, Tensor):
            raise TaskError(
                f"{name!r} in the state of the model is a {type(t).__name__}; only tensors can be kept"
            )
        state.setdefault(id(t), (name, t))
    tensors = dict(state.values())
    for name, layer in module.named_modules():
        if not isinstance(layer, CompressedLayer):
            continue
        tensor_names = {n: f"{name}.{n}".lstrip(".") for n in CompressedLayer.__annotations__ if n != "shape"}
        index_bytes, mask_bytes = count_index_bytes(len(layer.values), layer.shape)
        omitted_names = (
            [*tensor_names] if not compressed else ["indices", "starts"] if mask_bytes < index_bytes else []
        )
        for n in omitted_names:
            del tensors[tensor_names[n]]
        if compressed and omitted_names:
            tensors[f"{name}.mask".lstrip(".")] = layer.mask()
    return tensors


@dataclass(frozen=True)
class Size:
    """The size of a module, with shared tensors counted once.

    Attributes:
        parameters: number of values of all parameters; a sparse tensor counts its stored values.
        nonzeros: number of these values that are not zero.
        nbytes: bytes of parameters and persistent buffers as :func:`save_deployed` writes them, without the file's
            header.
    """

    parameters: int
    nonzeros: int
    nbytes: int


def measure_size(module: nn.Module) -> Size:
    """Measure parameter count and bytes of any module."""
    parameters = [*module.parameters()]
    return Size(
        sum(p.numel() for p in parameters),
        sum(int(p.count_nonzero()) for p in parameters),
        nbytes(_state(module)),
    )


@dataclass(frozen=True)
class Latency:
    """CPU time of a call in milliseconds: first quartile, median, third quartile."""

    lower: float
    median: float
    upper: float


def compare_latency(modules: Mapping[str, nn.Module], x: Any, repeats: int = 30) -> dict[str, Latency]:
    """Measure the CPU time of a call of each module, on one thread and without gradients, after two warm-up calls.

    The modules take turns, so that other load affects all of them; CPU time excludes waiting for a core.
    The input ``x`` may be a dict of keyword arguments.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be >= 1; it is {repeats}")
    threads, times = torch.get_num_threads(), {name: [0.0] * repeats for name in modules}
    torch.set_num_threads(1)
    try:
        # a forward may compute gradients itself, which inference mode does not allow
        with torch.no_grad():
            for i, (name, module) in itertools.product(range(-2, repeats), modules.items()):
                start = time.process_time()
                module(**x) if isinstance(x, dict) else module(x)
                times[name][max(i, 0)] = 1000 * (time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: Latency(*np.percentile(t, (25, 50, 75)).tolist()) for name, t in times.items()}
