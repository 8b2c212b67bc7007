"""The section ``[reference]``: a paper's numbers, shown beside those of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError
from ..reading.merging import parse_value, parse_variation

PaperNumber = float | str | list[float | str]


@dataclass(frozen=True)
class Reference(CheckedFields):
    """A paper's numbers, shown beside those of a run.

    The numbers are given by method, or by ``method.series``; a list holds one for each value of the varied field.

    Attributes:
        label: place of the numbers in the paper, such as ``pFedLoRA, Table 2, CIFAR-10, N=10``.
        accuracy: accuracies in percent; ``"-"`` if the paper marks a failure to converge.
        communication: communication of the whole session, both ways and all clients, in GB.
        parameters: parameters of a client's model, in millions.
        metric: name of the metric that ``score`` holds, in words.
        score: scores in percent of an evaluation that ``fedlowrank score`` makes after a run.
    """

    label: str
    accuracy: Mapping[str, PaperNumber] = field(default_factory=dict)
    communication: Mapping[str, PaperNumber] = field(default_factory=dict)
    parameters: Mapping[str, PaperNumber] = field(default_factory=dict)
    metric: str = ""
    score: Mapping[str, PaperNumber] = field(default_factory=dict)

    def describe(self, vary: Sequence[str], tables: Mapping[str, Any]) -> dict[str, Any]:
        """Choose the numbers of one run, in the form that reports read.

        Args:
            vary: fields that the experiment varies.
            tables: tables of the experiment with the values of this run.

        Raises:
            ConfigError: if a list does not have a number for each value of one varied field.
        """
        description: dict[str, Any] = {"label": self.label}
        if self.score:
            description["metric"] = self.metric
        for field_name in ("accuracy", "communication", "parameters", *(("score",) if self.score else ())):
            numbers: Mapping[str, PaperNumber] = getattr(self, field_name)
            run_numbers = {
                k: _choose(v, f"reference.{field_name}.{k}", vary, tables) for k, v in numbers.items()
            }
            # null marks a failure to converge; numbers that the paper lacks are left out
            description[field_name] = {
                k: None if isinstance(v, str) else v for k, v in run_numbers.items() if v is not None
            }
        return description


def _choose(number: PaperNumber, field_path: str, vary: Sequence[str], tables: Mapping[str, Any]) -> Any:
    """Choose the number for the value that the varied field has in these tables."""
    if not isinstance(number, list):
        return number
    if len(vary) != 1:
        raise ConfigError(f"{field_path} holds a list, which needs one varied field; vary is {tuple(vary)!r}")
    name, texts = parse_variation(vary[0])
    values = [parse_value(text) for text in texts]
    if len(number) != len(values):
        raise ConfigError(
            f"{field_path} holds {len(number)} numbers, but vary has {len(values)} values: {values}"
        )
    value: Any = tables
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return number[values.index(value)] if value in values else None
