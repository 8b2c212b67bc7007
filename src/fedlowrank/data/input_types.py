"""The type in which a model gets its inputs: one rule for all sources, for training and for prediction.

An array of unsigned bytes holds pixels: it becomes float32 and is divided by 255. All other numbers become float32
with their values unchanged, including 16-bit numbers, signed bytes and booleans. Three kinds of bytes are no pixels:
columns of single numbers in a table or data frame; ids ``[n]`` or ``[n, T]`` that the model looks up, which stay
whole numbers; and named inputs with fewer than three axes, such as masks of tokens. Other bytes without a value above 63,
which may be no pixels, are divided, too, with a warning.

Named inputs (a dict) follow the same rule, each separately. Booleans and bytes with fewer than three axes stay
unchanged if the model accepts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import DataError, warn_user
from .partitioning.checks import split_rows

_MIN_IMAGE_AXES = 3
"""Number of axes, as in [n, height, width], from which bytes are pixels even if a model looks up whole numbers."""

_MIN_PIXEL = 64
"""Smallest maximum of unsigned bytes that gives no warning."""


def convert_inputs(x: Tensor, *, ids: bool = False) -> Tensor:
    """Convert inputs ``[n, ...]`` to the type that a model gets.

    Args:
        x: inputs of any real type.
        ids: whether the model looks up whole numbers.

    Returns:
        float32, or int64 if ``ids`` is set and x holds whole numbers. An unchanged input is the same tensor.
    """
    if x.dtype == torch.uint8 and not (ids and x.ndim < _MIN_IMAGE_AXES):
        return x.to(torch.float32).div_(255)
    dtype = torch.int64 if ids and is_integer(x) else torch.float32
    # calling .to, even without effect, takes longer than the comparison
    return x if x.dtype == dtype else x.to(dtype)


WIDE_TYPES = (torch.float64, torch.int32, torch.int64)
"""Types with more digits than float32."""

_MIN_DISTINCT_VALUES = 1000
"""Number of float32 values that the range of an input should span."""


def warn_of_rounding(x: NDArray[Any], title: str, role: Literal["inputs", "targets"] = "inputs") -> None:
    """Warn of an input or target whose values float32 cannot distinguish: seconds since 1970, or long identifiers.

    Args:
        x: real numbers ``[n, ...]`` that become float32.
        title: description of the numbers.
        role: what the numbers are, for the message.
    """
    if x.dtype.itemsize < 4 or x.dtype == np.float32 or not x.size:
        return
    columns = x.reshape(len(x), -1).astype(np.float64)
    low, high = columns.min(0), columns.max(0)
    is_narrow = are_rounded(columns)
    if is_narrow.any():
        index = int(is_narrow.argmax())
        name = f"the {role}" if columns.shape[1] == 1 else f"the {role} of column {index}"
        warn_user(
            f"{title}: {name} lie between {low[index]:.15g} and {high[index]:.15g}. Models compute in float32, which has at most "
            f"{_MIN_DISTINCT_VALUES} numbers there. Subtract {low[index]:.15g} from all first"
        )


def are_rounded(columns: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether float32 has fewer than 1000 numbers in the range of a column ``[n, columns]``, by column."""
    low, high = columns.min(0), columns.max(0)
    with np.errstate(invalid="ignore", over="ignore"):
        span, max_magnitude = high - low, np.maximum(np.abs(low), np.abs(high))
        is_narrow: NDArray[np.bool_] = (span > 0) & (
            span < _MIN_DISTINCT_VALUES * np.finfo(np.float32).eps * max_magnitude
        )
    return is_narrow


def convert_named_input(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert one of several named inputs: real numbers and images of bytes as :func:`convert_inputs` does.

    Args:
        x: input of any real type.
        dtype: type for other bytes, whole numbers and booleans, if it can represent their values; None leaves them
            unchanged.
    """
    if x.is_floating_point() or is_image(x):
        return convert_inputs(x)
    is_wide = dtype in (torch.int64, torch.float32)
    return x.to(dtype) if dtype is not None and (is_wide or x.dtype == torch.bool) else x


def is_image(x: Tensor) -> bool:
    """Whether a tensor holds image bytes ``[n, height, width]`` or with more axes."""
    return x.dtype == torch.uint8 and x.ndim >= _MIN_IMAGE_AXES


def is_integer(x: Tensor) -> bool:
    """Whether the type of a tensor is an integer type."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


@dataclass
class InputTypes:
    """Converts the inputs of all parts of a data set or federation, and checks that they fit together.

    Attributes:
        looks_up_ids: whether the model looks up whole numbers.
        named_dtypes: types of the named inputs that are no real numbers.
    """

    looks_up_ids: bool = False
    named_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    _scaled: dict[str, tuple[str, int]] = field(default_factory=dict, init=False)
    _unscaled: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict, init=False)

    @property
    def scaled(self) -> frozenset[str]:
        """Names of the inputs that were unsigned bytes and are divided by 255; a single input has the empty name."""
        return frozenset(self._scaled)

    def convert(self, x: Tensor, description: str, name: str = "") -> Tensor:
        """Convert inputs to the type that a model gets; see :func:`convert_inputs`.

        Args:
            x: inputs to convert.
            description: description of the part that the inputs belong to, for messages.
            name: name of the input, if there are several.
        """
        inputs = (
            convert_named_input(x, self.named_dtypes.get(name))
            if name
            else convert_inputs(x, ids=self.looks_up_ids)
        )
        if inputs.dtype == torch.float32 and x.dtype in WIDE_TYPES:
            warn_of_rounding(x.detach().cpu().numpy(), description)
        if is_image(x) or (not name and x.dtype == torch.uint8 and inputs.dtype == torch.float32):
            first_description, max_value = self._scaled.get(name, (description, 0))
            max_value = max(max_value, int(x.max()) if x.numel() else 0)
            self._scaled[name] = first_description, max_value
        else:
            self._unscaled.setdefault(name, []).append((description, inputs))
        return inputs

    def choices(self, inputs: Tensor | Mapping[str, Tensor] | None) -> list[str]:
        """Describe in sentences which inputs were converted to another type, and why.

        Args:
            inputs: the first inputs as the user passed them, or a dict of them by name.
        """
        named_inputs = inputs if isinstance(inputs, Mapping) else {} if inputs is None else {"": inputs}
        sentences = []
        for name, x in named_inputs.items():
            unscaled_inputs = self._unscaled.get(name)
            if x.is_floating_point() or (unscaled_inputs and unscaled_inputs[0][1].dtype == x.dtype):
                continue
            if name in self._scaled:
                conversion = "float32 and divided by 255, for unsigned bytes are pixels"
            elif unscaled_inputs and unscaled_inputs[0][1].dtype != torch.float32:
                conversion = f"{unscaled_inputs[0][1].dtype}, for the model looks them up"
            else:
                conversion = "float32 with the same values, for the model does not look them up"
            title = f"The inputs {name!r}" if name else "The inputs"
            sentences.append(f"{title} were converted from {x.dtype} to {conversion}.".replace("torch.", ""))
        return sentences

    def warning(self) -> str | None:
        """Warn of a conversion that the user may not want; None without a warning.

        Raises:
            DataError: if some parts are bytes, which were scaled, and others have another scale; or if only some
                parts hold whole numbers that the model looks up.
        """
        for name, (scaled_description, _) in self._scaled.items():
            for description, x in self._unscaled.get(name, []):
                if x.dtype != torch.float32 or any(
                    bool((rows.amin() < 0) | (rows.amax() > 1)) for _, rows in split_rows(x) if rows.numel()
                ):
                    raise DataError(
                        f"the inputs of {scaled_description} are unsigned bytes, which are divided by 255, but those of "
                        f"{description} are not and have values outside 0 to 1. Give all of them the same type and "
                        "scale."
                    )
        for name, unscaled_inputs in self._unscaled.items():
            descriptions = {x.dtype: description for description, x in reversed(unscaled_inputs)}
            if len(descriptions) > 1 and (name or self.looks_up_ids):
                float_description = descriptions.pop(torch.float32, "")
                title = f"inputs {name!r}" if name else "inputs"
                if not float_description:
                    types_text = " and ".join(
                        f"{dtype} at {description}" for dtype, description in reversed(descriptions.items())
                    )
                    raise DataError(
                        f"the {title} are {types_text}; give all of them as one type".replace("torch.", "")
                    )
                raise DataError(
                    f"the {title} of {next(iter(descriptions.values()))} are whole numbers, which the model looks up, but "
                    f"those of {float_description} are real numbers. Give all of them as whole numbers."
                )
        for name, (_, max_value) in self._scaled.items():
            if 0 < max_value < _MIN_PIXEL:
                title = f"inputs {name!r}" if name else "inputs"
                return (
                    f"the {title} are unsigned bytes up to {max_value}, which are divided by 255 as if they were pixels from 0 "
                    "to 255. If they are not, give them as float32, whose values stay unchanged."
                )
        return None


def scale_bytes(values: np.ndarray, out: Tensor | None = None) -> Tensor:
    """Convert uint8 of any shape to float32 in [0, 1], written to ``out`` if it is given."""
    if out is None:
        out = torch.empty(values.shape, dtype=torch.float32)
    # numpy converts while it writes; torch would first need a writable copy
    out.numpy()[...] = values
    return out.div_(255)
