"""The parameter budget of mixture adaptors, by layer (FLoRAL, arXiv:2410.03497, §3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .adapted_parameters import AdaptedParameter, Include, kind_of


@dataclass(frozen=True)
class BudgetRow:
    """The parameters that the adaptors of one parameter add.

    Attributes:
        name: name of the parameter.
        parameter: adapted parameter, with layer, kind, shape, rank and the parameter count of an adaptor.
        added: parameter count of all C adaptors.
        share: ratio of one adaptor's parameter count to that of the parameter.
    """

    name: str
    parameter: AdaptedParameter
    added: int
    share: float


@dataclass(frozen=True)
class ParameterBudget:
    """The parameters that adaptors add to a module; prints as a table.

    Attributes:
        rows: one row for each adapted parameter.
        unadapted_shapes: shape of each parameter that is not adapted, by name.
        clusters: number C of clusters.
    """

    rows: tuple[BudgetRow, ...]
    unadapted_shapes: dict[str, tuple[int, ...]]
    clusters: int

    @property
    def base(self) -> int:
        """Parameter count of the base."""
        shapes = [row.parameter.shape for row in self.rows] + list(self.unadapted_shapes.values())
        return sum(torch.Size(shape).numel() for shape in shapes)

    @property
    def adaptor_size(self) -> int:
        """Parameter count of one cluster's adaptors."""
        return sum(row.parameter.parameter_count for row in self.rows)

    @property
    def added(self) -> int:
        """Parameter count of all adaptors."""
        return self.clusters * self.adaptor_size

    def __str__(self) -> str:
        header = ("parameter", "kind", "shape", "rank", "an adaptor", f"all {self.clusters}", "share", "note")
        lines = [header]
        for row in self.rows:
            s = row.parameter
            rank = str(s.rank) if s.rank else ""
            counts = (f"{s.parameter_count:,}", f"{row.added:,}", f"{row.share:.1%}")
            lines.append((row.name, s.kind, _format_shape(s.shape), rank, *counts, s.note))
        lines.append(
            (
                "total",
                "",
                "",
                "",
                f"{self.adaptor_size:,}",
                f"{self.added:,}",
                f"{self.adaptor_size / self.base:.1%}",
                "",
            )
        )
        width = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def cell(text: str, i: int) -> str:
            return text.rjust(width[i]) if 3 <= i <= 6 else text.ljust(width[i])

        table = ["  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines]
        unadapted_list = ", ".join(
            f"{name} ({_format_shape(shape)})" for name, shape in self.unadapted_shapes.items()
        )
        return "\n".join(
            [*table, f"The base has {self.base:,} numbers. Not adapted: {unadapted_list or 'none'}."]
        )


def compute_budget(
    module: nn.Module, adapted_parameters: Mapping[str, AdaptedParameter], cluster_count: int
) -> ParameterBudget:
    """Compute the parameters that C adaptors of each adapted parameter add to a module."""
    rows = [
        BudgetRow(name, s, cluster_count * s.parameter_count, s.parameter_count / torch.Size(s.shape).numel())
        for name, s in adapted_parameters.items()
    ]
    unadapted_shapes = {
        name: tuple(p.shape) for name, p in module.named_parameters() if name not in adapted_parameters
    }
    return ParameterBudget(tuple(rows), unadapted_shapes, cluster_count)


def adaptor_warnings(module: nn.Module, adapted_parameters: Mapping[str, AdaptedParameter]) -> list[str]:
    """The notes on adapted parameters with their names, and :func:`unadapted_warning`."""
    names_by_note = {
        note: [n for n, parameter in adapted_parameters.items() if parameter.note == note]
        for note in (s.note for s in adapted_parameters.values())
        if note
    }
    warning = unadapted_warning(module, adapted_parameters)
    return [
        *(f"{note} (in {', '.join(names)})" for note, names in names_by_note.items()),
        *([warning] if warning else []),
    ]


def unadapted_warning(
    module: nn.Module, adapted_parameters: Mapping[str, AdaptedParameter], include: Include | None = None
) -> str | None:
    """Build the warning that names weight matrices without adaptors and their share; None if there are none.

    Args:
        module: any module.
        adapted_parameters: adapted parameters by name.
        include: predicate of the layers that were to be adapted; by default all.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    layers: dict[str, str] = {}
    parameter_count = 0
    for path, layer in module.named_modules():
        for attribute, p in layer.named_parameters(recurse=False):
            name, is_matrix = names[id(p)], sum(size > 1 for size in p.shape) > 1
            is_unadapted = (
                is_matrix and name not in adapted_parameters and kind_of(layer, attribute, p) is None
            )
            if is_unadapted and name not in layers and (include is None or include(path, layer)):
                layers[name], parameter_count = type(layer).__name__, parameter_count + p.numel()
    if not layers:
        return None
    total = sum(p.numel() for p in module.parameters())
    layer_list = ", ".join(f"{name} ({layer})" for name, layer in layers.items())
    return f"no adaptors for {layer_list}: {parameter_count / total:.1%} of the parameters"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"
