"""The type in which a model gets its inputs: one rule for all sources, for training and for prediction.

An array of unsigned bytes holds pixels: it becomes float32 and is divided by 255. All other numbers become
float32 with their values unchanged, also those of 16 bits, signed bytes and truth values. Three kinds of bytes
are no pixels: columns of single numbers in a table or data frame; ids ``[n]`` or ``[n, T]`` that the model
looks up, which stay whole; and named inputs with fewer than three axes, such as masks of tokens.

Named inputs (a dict) follow the same rule, each by itself. Their truth values and bytes with fewer than three
axes stay as they are where the model takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import DataError, warn_user
from .partitioning.checks import split_rows

_MIN_IMAGE_AXES = 3
"""From [n, height, width] on, bytes are pixels even where a model looks up whole numbers."""


def convert_inputs(x: Tensor, *, ids: bool = False) -> Tensor:
    """Inputs ``[n, ...]`` in the type that a model gets.

    Args:
        x: numbers of any real type.
        ids: whether the model looks up whole numbers.

    Returns:
        float32, or with ``ids`` int64 where x holds whole numbers. The same tensor where nothing changes.
    """
    if x.dtype == torch.uint8 and not (ids and x.ndim < _MIN_IMAGE_AXES):
        return x.to(torch.float32).div_(255)
    wanted = torch.int64 if ids and is_whole(x) else torch.float32
    # the call alone, which does nothing, takes longer than the question
    return x if x.dtype == wanted else x.to(wanted)


_WIDE_TYPES = (torch.float64, torch.int32, torch.int64)
"""Types with more digits than float32."""

_MIN_DISTINCT_VALUES = 1000
"""Values of float32 that the range of an input should span."""


def warn_of_rounding(x: NDArray[Any], where: str) -> None:
    """Warn of an input whose values float32 cannot tell apart: seconds since 1970, or long identifiers.

    Args:
        x: real numbers ``[n, ...]`` that become float32.
        where: what they are.
    """
    if x.dtype.itemsize < 4 or x.dtype == np.float32 or not x.size:
        return
    columns = x.reshape(len(x), -1).astype(np.float64)
    low, high = columns.min(0), columns.max(0)
    narrow = are_rounded(columns)
    if narrow.any():
        place = int(narrow.argmax())
        name = "the inputs" if columns.shape[1] == 1 else f"the inputs of column {place}"
        warn_user(
            f"{where}: {name} lie between {low[place]:.15g} and {high[place]:.15g}. Models compute in float32, which has at most "
            f"{_MIN_DISTINCT_VALUES} numbers there. Subtract {low[place]:.15g} from all first"
        )


def are_rounded(columns: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether float32 has fewer than 1000 numbers in the range of a column ``[n, columns]``, by column."""
    low, high = columns.min(0), columns.max(0)
    with np.errstate(invalid="ignore", over="ignore"):
        span, largest = high - low, np.maximum(np.abs(low), np.abs(high))
        narrow: NDArray[np.bool_] = (span > 0) & (
            span < _MIN_DISTINCT_VALUES * np.finfo(np.float32).eps * largest
        )
    return narrow


def convert_named_input(x: Tensor, whole: torch.dtype | None = None) -> Tensor:
    """One of several named inputs: real numbers and images of bytes as :func:`convert_inputs` makes them.

    Args:
        x: numbers of any real type.
        whole: the type of other bytes, whole numbers and truth values, if it holds their values; None leaves
            them as they are.
    """
    if x.is_floating_point() or is_image(x):
        return convert_inputs(x)
    is_wide = whole in (torch.int64, torch.float32)
    return x.to(whole) if whole is not None and (is_wide or x.dtype == torch.bool) else x


def is_image(x: Tensor) -> bool:
    """Whether these are bytes ``[n, height, width]`` or more."""
    return x.dtype == torch.uint8 and x.ndim >= _MIN_IMAGE_AXES


def is_whole(x: Tensor) -> bool:
    """Whether a tensor holds whole numbers by its type."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


@dataclass
class InputTypes:
    """Converts the inputs of all parts of a data set or federation, and checks that they fit together.

    Attributes:
        ids: whether the model looks up whole numbers.
        named: types of those named inputs that are no real numbers.
    """

    ids: bool = False
    named: Mapping[str, torch.dtype] = field(default_factory=dict)
    _scaled: dict[str, tuple[str, int]] = field(default_factory=dict, init=False)
    _others: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict, init=False)

    @property
    def scaled(self) -> frozenset[str]:
        """Names of the inputs that were unsigned bytes and are divided by 255; a single input has the empty name."""
        return frozenset(self._scaled)

    def convert(self, x: Tensor, where: str, name: str = "") -> Tensor:
        """Inputs in the type that a model gets; see :func:`convert_inputs`.

        Args:
            x: the inputs.
            where: which part they are, for messages.
            name: of the input, where there are several.
        """
        converted = convert_named_input(x, self.named.get(name)) if name else convert_inputs(x, ids=self.ids)
        if converted.dtype == torch.float32 and x.dtype in _WIDE_TYPES:
            warn_of_rounding(x.detach().cpu().numpy(), where)
        if is_image(x) or (not name and x.dtype == torch.uint8 and converted.dtype == torch.float32):
            first, largest = self._scaled.get(name, (where, 0))
            self._scaled[name] = first, max(largest, int(x.max()) if x.numel() else 0)
        else:
            self._others.setdefault(name, []).append((where, converted))
        return converted

    def choices(self, inputs: Tensor | Mapping[str, Tensor] | None) -> list[str]:
        """Sentences on the inputs whose type was changed, and why.

        Args:
            inputs: the first inputs as the user passed them, or a dict of them by name.
        """
        named = inputs if isinstance(inputs, Mapping) else {} if inputs is None else {"": inputs}
        sentences = []
        for name, x in named.items():
            unscaled = self._others.get(name)
            if x.is_floating_point() or (unscaled and unscaled[0][1].dtype == x.dtype):
                continue
            if name in self._scaled:
                how = "float32 and divided by 255, for unsigned bytes are pixels"
            elif unscaled and unscaled[0][1].dtype != torch.float32:
                how = f"{unscaled[0][1].dtype}, for the model looks them up"
            else:
                how = "float32 with the same values, for the model does not look them up"
            whose = f"The inputs {name!r}" if name else "The inputs"
            sentences.append(f"{whose} were converted from {x.dtype} to {how}.".replace("torch.", ""))
        return sentences

    def warning(self) -> str | None:
        """What a user should know of the conversion, or None.

        Raises:
            DataError: if some parts are bytes, which were scaled, and others have another scale; or if only
                some parts hold whole numbers that the model looks up.
        """
        for name, (scaled, _) in self._scaled.items():
            for where, x in self._others.get(name, []):
                if x.dtype != torch.float32 or any(
                    bool((rows.amin() < 0) | (rows.amax() > 1)) for _, rows in split_rows(x) if rows.numel()
                ):
                    raise DataError(
                        f"the inputs of {scaled} are unsigned bytes, which are divided by 255, but those of "
                        f"{where} are not and have values outside 0 to 1. Give all of them the same type and "
                        "scale."
                    )
        for name, unscaled in self._others.items():
            by_type = {x.dtype: where for where, x in reversed(unscaled)}
            if len(by_type) > 1 and (name or self.ids):
                real = by_type.pop(torch.float32, "")
                title = f"inputs {name!r}" if name else "inputs"
                if not real:
                    described = " and ".join(
                        f"{kind} at {where}" for kind, where in reversed(by_type.items())
                    )
                    raise DataError(
                        f"the {title} are {described}; give all of them as one type".replace("torch.", "")
                    )
                raise DataError(
                    f"the {title} of {next(iter(by_type.values()))} are whole numbers, which the model looks up, but "
                    f"those of {real} are real numbers. Give all of them as whole numbers."
                )
        if any(largest == 1 for _, largest in self._scaled.values()):
            return (
                "the inputs are unsigned bytes, which are pixels and so divided by 255, but none is above 1. If "
                "they are features that are 0 or 1, give them as float32."
            )
        return None


def scale_bytes(values: np.ndarray, out: Tensor | None = None) -> Tensor:
    """Convert uint8 of any shape to float32 in [0, 1], written to ``out`` if that is given."""
    if out is None:
        out = torch.empty(values.shape, dtype=torch.float32)
    # numpy casts while it writes; torch would first need a writable copy.
    out.numpy()[...] = values
    return out.div_(255)
