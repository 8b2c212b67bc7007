"""Finds models whose scores of an example depend on other examples, so that a batch cannot be split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.contract import EngineModel
from ..core.key import Key
from ..core.tree import Params
from .architecture import Architecture
from .statistics.normalization import batch_normalizations

_PROBE_KEY = Key(("coupling",))
_PROBE_TOKENS = 8
_PROBE_TRIALS = 3
"""Number of trials with random numbers, because a module may mix each example with a randomly drawn one."""


def find_coupling(model: Architecture) -> str | None:
    """Find the reason why gradients of parts of a batch do not add up to that of the batch; None if there is none.

    Batch normalization is known to couple examples. For other modules two batches that differ in
    half of their examples are scored in training mode with equal random draws, and one of them again with the buffers
    that its first forward pass has left. A real buffer that a forward pass changes is a reason, too. Two cases are
    not detected: a loss that couples examples, and a module that does so only after some steps or for certain inputs.
    Random draws themselves are made for each part, and are no reason.

    Args:
        model: architecture whose code is called a few times, with copies of its parameters and buffers.
    """
    for name, layer in batch_normalizations(model.module).items():
        if layer not in model.frozen:
            return f"the batch normalization {name!r} couples the examples of a batch"
    if rope_type := model.padded_rope:
        return f"with rope_type {rope_type!r} the scores of a text depend on the longest text of its batch"
    example = _shorten(model.example)
    repeated_batch, mixed_batch = _repeat_example(example), _mix_batch(example)
    for trial in range(_PROBE_TRIALS):
        key = _PROBE_KEY / trial
        (first_scores, second_scores), changed_buffers = _scores(model, [repeated_batch, repeated_batch], key)
        if any(t.is_floating_point() for t in changed_buffers.values()) or not _is_close(
            first_scores, second_scores
        ):
            return f"forward passes change the buffers {sorted(changed_buffers)}, and a part of a batch takes one each"
        if not _is_close(first_scores[:2], _scores(model, [mixed_batch], key)[0][0][:2]):
            return "its scores of an example depend on the other examples of the batch"
    return None


def mixes_examples(model: EngineModel) -> bool:
    """Whether a model's inference scores of an example depend on the other examples of the batch.

    A batch normalization without running statistics couples them, as in PyTorch; a module with nonstandard layers is
    tested once by a trial of two batches.

    Args:
        model: model whose code is called twice.
    """
    if "mixes examples" not in model.cache:
        layers = batch_normalizations(model.module).values()
        is_mixing = any(layer.running_mean is None for layer in layers)
        if not is_mixing and not model.is_standard:
            with torch.inference_mode():
                example = _shorten(model.example)
                repeated_scores, mixed_scores = (
                    model.probe(make(example)) for make in (_repeat_example, _mix_batch)
                )
            is_mixing = not _is_close(repeated_scores[:2], mixed_scores[:2])
        model.cache["mixes examples"] = is_mixing
    return bool(model.cache["mixes examples"])


def _scores(model: Architecture, batches: list[Any], key: Key) -> tuple[list[Tensor], Params]:
    """Compute scores of consecutive batches in training mode, each with the same draws, and the changed buffers."""
    model_copy = model.with_buffers({})
    # not the initial parameters, with which a moving average of them would stay the same
    params = {n: (0.99 * p).requires_grad_() for n, p in model.initial.items()}
    scores = []
    model.set_training(True)
    try:
        for x in batches:
            # with gradients, as in a step, because a module may check whether they are enabled
            with torch.enable_grad(), key.global_generators(next(iter(params.values())).device):
                scores.append(model_copy.apply(params, x).detach())
    finally:
        model.set_training(False)
    return scores, model_copy.changed_buffers


def _shorten(x: Any) -> Any:
    """Take the first tokens of texts, which suffice: scores of whole texts over a large vocabulary take gigabytes."""
    if not isinstance(x, dict) or "attention_mask" not in x:
        return x
    shape = x["attention_mask"].shape
    return {n: t[..., :_PROBE_TOKENS] if t.shape == shape else t for n, t in x.items()}


def _repeat_example(x: Any) -> Any:
    if isinstance(x, dict):
        return {n: _repeat_example(t) for n, t in x.items()}
    return torch.cat([x[:1]] * 4)


def _mix_batch(x: Any) -> Any:
    """Make a batch of an example twice, and twice with other numbers: real ones plus 1, named whole ones in reverse order.

    Other whole numbers, in float32, too, may be rows of a table, which has none beyond the largest: they become one less.
    """
    if isinstance(x, dict):
        return {n: _mix_batch(t) if t.is_floating_point() else _twice(t, _reverse(t)) for n, t in x.items()}
    example = x[:1]
    if x.dtype == torch.bool:
        return _twice(example, ~example)
    if x.is_complex() or (x.is_floating_point() and not torch.equal(example, example.round())):
        return _twice(example, example + 1)
    changes = [example.clamp(min=1) - 1, _reverse(example), example + 1]
    return _twice(example, next((change for change in changes if not torch.equal(change, example)), example))


def _reverse(x: Tensor) -> Tensor:
    return x[:1].flip([*range(1, x.ndim)])


def _twice(example: Tensor, changed_example: Tensor) -> Tensor:
    return torch.cat([example[:1], example[:1], changed_example, changed_example])


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
