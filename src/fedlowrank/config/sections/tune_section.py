"""The section ``[tune]``: the settings that ``fedlowrank tune`` tries, and how it chooses among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError

_SECTIONS = ("data", "defaults", "lora", "methods", "model", "partition", "run", "split")
"""Names of sections that may prefix a method's field by mistake."""


@dataclass(frozen=True)
class TuneSettings(CheckedFields):
    """A grid search: every method is tuned on its own grid by validation, then tested with other seeds.

    Attributes:
        seeds: seeds of the tuning runs; the choice is made by their mean.
        test_seeds: seeds of the runs with the chosen settings; none of them may be a tuning seed.
        measure: measure by which settings are chosen; validation is the mean over clients of the validation accuracy,
            or of the validation loss for models without an accuracy (regressions, language models that predict tokens).
        at: round at which the measure is taken: last, or best for the best of all evaluated rounds after the start.
        series: series of models that is measured, such as "server"; by default each method's first series. A method
            without that series is measured by its first.
        rounds: number of rounds of a tuning run; by default run.rounds.
        grid: fields of every method and the values to try, such as "optimizer.lr" = [0.01, 0.1].
        methods: fields of single methods and the values to try, combined with those of the grid above.
    """

    seeds: tuple[int, ...] = (100, 101)
    test_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    measure: Literal["validation"] = "validation"
    at: Literal["last", "best"] = "last"
    series: str | None = None
    rounds: int | None = None
    grid: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, seeds in (("seeds", self.seeds), ("test_seeds", self.test_seeds)):
            if not seeds or len(set(seeds)) < len(seeds):
                raise ConfigError(f"tune.{name} must list different seeds, at least one; it is {list(seeds)}")
        if shared_seeds := sorted({*self.seeds} & {*self.test_seeds}):
            raise ConfigError(
                f"tune.seeds and tune.test_seeds both hold {', '.join(map(str, shared_seeds))}. A result on the "
                "seeds of the choice would be too good: list other seeds in tune.test_seeds."
            )
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"tune.rounds must be >= 1; it is {self.rounds}")
        for path, fields in (
            ("grid", self.grid),
            *((f"methods.{n}", method_fields) for n, method_fields in self.methods.items()),
        ):
            for name in flatten_grid(fields, f"tune.{path}"):
                if name.partition(".")[0] in _SECTIONS:
                    raise ConfigError(
                        f"tune.{path}.{name}: a grid holds fields of methods, such as mu or optimizer.lr, "
                        "without a section before them. Vary settings of other sections in a comparison: "
                        f'vary = ["{name}=..."]'
                    )

    def grid_of(self, method: str) -> dict[str, list[Any]]:
        """Grid of a method: values by field. A field of its own table replaces the one for all methods."""
        method_grid = flatten_grid(self.methods.get(method, {}), f"tune.methods.{method}")
        return {**flatten_grid(self.grid, "tune.grid"), **method_grid}


def flatten_grid(tables: Mapping[str, Any], path: str) -> dict[str, list[Any]]:
    """Turn a grid of nested tables into values by dotted field; ``a.b = [1]`` equals ``"a.b" = [1]``.

    Args:
        tables: nested tables of the grid.
        path: path of the grid in the file, for messages.

    Raises:
        ConfigError: if a field has no list of different values.
    """
    flattened: dict[str, list[Any]] = {}
    for name, values in tables.items():
        field_path = f"{path}.{name}"
        if isinstance(values, Mapping):
            inner = {
                f"{name}.{inner_name}": inner_values
                for inner_name, inner_values in flatten_grid(values, field_path).items()
            }
            if shared_names := sorted({*inner} & {*flattened}):
                raise ConfigError(f"{path}.{shared_names[0]} is in the grid twice; leave one of the two out")
            flattened |= inner
            continue
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(
                f"{field_path}: a list of values is needed, such as [0.03, 0.1]; it is {values!r}"
            )
        if repeated_texts := [text for text, n in Counter(map(repr, values)).items() if n > 1]:
            raise ConfigError(f"{field_path} lists {repeated_texts[0]} twice")
        if name in flattened:
            raise ConfigError(f"{field_path} is in the grid twice; leave one of the two out")
        flattened[name] = list(values)
    return flattened
