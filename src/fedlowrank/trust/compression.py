"""Compression of an update in stages, with error feedback.

Stages (:mod:`.stages`) run from left to right and are undone from right to left. All computation is on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..adapters.wire_format import DTYPES
from ..core import tree
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.key import Key
from ..core.tree import Params, TreeError
from .stages import BFloat16, Int8, LowRankStage, Stage, TopK

_STAGES: dict[str, tuple[Any, Any, int, str]] = {
    "low_rank": (LowRankStage, int, 0, "low_rank:RANK with a whole number of at least 1, such as low_rank:4"),
    "top_k": (TopK, float, 1, "top_k:SHARE with a share in (0, 1], such as top_k:0.05"),
    "bfloat16": (BFloat16, None, 2, "bfloat16"),
    "int8": (Int8, None, 2, "int8"),
}
"""Description of each stage by its name: the class, the type of its parameter, its position, and its written form."""


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse stages from a text such as ``"top_k:0.05 + int8"``; an empty text gives none.

    Raises:
        ConfigError: if a name is unknown, a number is missing, superfluous or out of range, or a stage cannot
            follow the one before it.
    """
    stages: list[Stage] = []
    last_name, last_position = "", -1
    for stage_text in text.split("+") if text.strip() else []:
        name, colon, number = stage_text.strip().partition(":")
        if name not in _STAGES:
            raise ConfigError(f"compression: {name!r} is no stage. {did_you_mean(name, _STAGES)}")
        stage_class, convert, position, usage = _STAGES[name]
        try:
            if bool(colon) != (convert is not None):
                raise ValueError
            stages.append(stage_class(convert(number)) if convert else stage_class())
        except (ValueError, ConfigError):
            raise ConfigError(f"compression: {stage_text.strip()!r} is no stage; write {usage}") from None
        if position <= last_position:
            order = "low_rank, top_k, then bfloat16 or int8, each at most once"
            raise ConfigError(f"compression: {name} cannot follow {last_name}. The order is {order}")
        last_name, last_position = name, position
    return tuple(stages)


@tree.tree_dataclass
class Compressed:
    """An update in compressed form, as it is sent.

    Attributes:
        values: tensors that the last stage returned, by path.
        sides: side information that each stage needs for decoding, in the order of stages.
    """

    values: Params
    sides: list[Any]


def compress(stages: tuple[Stage, ...], update: Params, key: Key) -> Compressed:
    """Compress an update.

    Args:
        stages: stages from :func:`parse_stages`.
        update: finite tensors in float64, float32, bfloat16 or float16, of any shape.
        key: key of this update's random numbers.

    Raises:
        TaskError: if a tensor is of another type, or a value is not finite or too large for a stage.
    """
    *_, compressed = _encode(stages, update, key)
    return compressed


def stage_bytes(stages: tuple[Stage, ...], update: Params, key: Key) -> dict[str, int]:
    """Count the bytes of the encoded update: uncompressed as ``"update"``, then after each stage, by its name.

    Raises TaskError as :func:`compress` does.
    """
    names = ["update", *(stage.name for stage in stages)]
    _, *steps = _encode(stages, update, key)
    return dict(zip(names, map(tree.encoded_size, [update, *steps]), strict=True))


def _encode(stages: tuple[Stage, ...], update: Params, key: Key) -> Iterator[Compressed]:
    """Yield the update before the first stage and after each stage."""
    for path, x in update.items():
        if not isinstance(x, Tensor) or x.dtype not in DTYPES.values():
            type_name = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TaskError(f"the update of {path!r} is of type {type_name}; known are {', '.join(DTYPES)}")
    step = Compressed({path: update[path].detach().cpu() for path in sorted(update)}, [])
    for stage in (None, *stages):
        if stage is not None:
            values, side = stage.encode(step.values, key)
            step = Compressed(values, [*step.sides, side])
        bad_path = tree.not_finite(step.values)
        if bad_path is not None:
            problem = f"too large for {stage.name}" if stage else "not finite"
            raise TaskError(
                f"the update has values at {bad_path} that are {problem}; lower the learning rate, or clip"
            )
        yield step


@functools.lru_cache(maxsize=256)
def _forms(stages: tuple[Stage, ...], form: Any) -> list[Compressed]:
    """Results of :func:`_encode` for an update of a form, as tensors that take no memory."""
    zeros = {path: torch.zeros(shape, dtype=dtype) for path, dtype, shape in form}
    steps = list(_encode(stages, zeros, Key(())))
    return [tree.map_leaves(lambda t: t.new_zeros(()).expand(t.shape), step) for step in steps]


def decompress(stages: tuple[Stage, ...], compressed: Compressed, template: Params) -> Params:
    """Undo :func:`compress`, for a message that may come from an untrusted peer.

    Args:
        stages: stages with which the update was compressed.
        compressed: decoded message.
        template: tensors by path with the dtypes, shapes and devices of the update.

    Returns:
        The update, a dict like ``template``, with the same bits on every machine.

    Raises:
        TreeError: if the message does not have the form of such an update, or holds impossible positions
            or numbers that are not finite.
    """
    forms = _forms(
        stages, tuple([(path, template[path].dtype, template[path].shape) for path in sorted(template)])
    )
    _check_form(forms[-1], compressed)
    _check_finite(compressed)
    values = compressed.values
    for stage, side, step in zip(stages[::-1], compressed.sides[::-1], forms[-2::-1], strict=True):
        values = stage.decode(values, side, step.values)
    _check_finite(values)
    return {path: values[path].to(x.device) for path, x in template.items()}


def _check_form(expected: Any, actual: Any) -> None:
    ordered_tree = tree.map_leaves(lambda _, t: t, expected, actual)
    for (path, a), b in zip(tree.leaves(expected), tree.tensors(ordered_tree), strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            expected_form, actual_form = (f"{str(t.dtype)[6:]} {list(t.shape)}" for t in (a, b))
            raise TreeError(f"{path} is {actual_form} where {expected_form} is expected")


def _check_finite(value: Any) -> None:
    path = tree.not_finite(value)
    if path is not None:
        raise TreeError(f"a compressed update has numbers at {path} that are not finite")


def with_feedback(
    stages: tuple[Stage, ...],
    update: Params,
    residual: Params | None,
    key: Key,
    reference: Params | None = None,
) -> tuple[Compressed, Params]:
    """Compress an update plus the residual of earlier ones, e ← D + e - decode(encode(D + e)).

    Source: Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019.

    Args:
        stages: stages from :func:`parse_stages`.
        update: D, the update by path.
        residual: e, the residual in the form of the update; None in the first round.
        key: key of this update's random numbers.
        reference: tensors by path to which the receiver adds the update, in the dtypes in which it is sent;
            None if the update is sent in its own dtypes and is added to nothing.

    Returns:
        The message and the next residual, which takes effect once the message has been accepted. The residual of
        half-precision tensors is in float32 and includes rounding errors, too: of the message to its dtype, and of the
        reference plus the update.

    Raises:
        TaskError: if :func:`compress` raises it.
        TreeError: if the residual does not have the form of the update.
    """
    template = update if reference is None else reference
    total = tree.canonical(tree.widen(update))
    if residual is not None:
        _check_form(total, residual)
        total = tree.add(total, residual)
    rounded_total = tree.cast_like(total, template)
    compressed = compress(stages, rounded_total, key)
    decoded_update = decompress(stages, compressed, rounded_total)
    if reference is not None:
        decoded_update = {path: _received(d, reference[path]) for path, d in decoded_update.items()}
    return compressed, tree.sub(total, decoded_update)


def _received(update: Tensor, reference: Tensor) -> Tensor:
    """The change that an update makes to a reference of its dtype; in half precision their sum is rounded."""
    if tree.wide_type(update.dtype) == update.dtype:
        return update
    return tree.widen(reference + update) - tree.widen(reference)
