"""Overrides that nothing reads: settings of methods that do not run, and of other commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...core.errors import ConfigError
from .merging import LayeredTables

TUNE = "`fedlowrank tune` alone reads the section [tune]."
SEVERAL_RUNS = {
    "seeds": "one run has one seed. Write run.seed=..., or use `fedlowrank compare`.",
    "vary": "one run varies nothing. Use `fedlowrank compare`.",
    "tune": TUNE,
}
"""Top-level overrides that a command with a single run does not read, with the reason."""
COMPARED = {
    "method": "the methods that are compared are named by --methods or compare = [...]. Use one of these.",
    "compare": "--methods names the methods. Leave one of the two out.",
    "seeds": "--seeds names the seeds. Leave one of the two out.",
    "run.seed": "the seeds are named by --seeds or seeds = [...]. Write --seeds, such as --seeds 0,1.",
    "vary": "--vary names what is varied. Leave one of the two out.",
}
"""Overrides that a comparison does not read if an option replaces them, with the reason."""
NOT_VARIED = {
    "method": "the methods are named by --methods or compare = [...]",
    "compare": "the methods are named by --methods or compare = [...]",
    "seeds": "the seeds are named by --seeds or seeds = [...]",
    "vary": "every varied field has a --vary of its own",
    "tune": TUNE,
    "name": "all runs of a comparison have one name",
    "title": "all runs of a comparison have one title",
    "paper": "no run reads it",
    "reference": "no run reads it",
}
"""Top-level fields and sections that cannot be varied, because no single run reads them, with the reason."""


def refuse_overrides_of_other_methods(
    overrides: Mapping[str, Any], methods: Mapping[str, Collection[str]], names: Collection[str]
) -> None:
    """Refuse overrides of methods that do not run, and of defaults that every method replaces by its own value.

    Args:
        overrides: nested tables of the overrides.
        methods: names of the fields that each table ``[methods.NAME]`` of the experiment sets.
        names: names of the methods that run.

    Raises:
        ConfigError: if there is such an override; the message names it and what to type instead.
    """
    for name in overrides.get("methods", {}):
        if name not in names:
            raise ConfigError(
                f"methods.{name}: nothing reads this override, for the methods that run are "
                f"{', '.join(names)}. Name {name} among them, or set methods.{next(iter(names))}."
            )
    for name in overrides.get("defaults", {}):
        owners = [method for method in names if name in methods.get(method, ())]
        if owners and len(owners) == len(names):
            raise ConfigError(
                f"defaults.{name}: nothing reads this override, for {', '.join(owners)} has its own in the table "
                f"methods.{owners[0]}. Write methods.{owners[0]}.{name}=... instead."
            )


def refuse_unread_overrides(config_tables: LayeredTables, reasons: Mapping[str, str]) -> None:
    """Refuse overrides that a command does not read.

    Args:
        config_tables: tables and overrides of the experiment.
        reasons: for each path of a field or table that is not read, the reason and what to type instead.

    Raises:
        ConfigError: if there is such an override; the message names the first one.
    """
    for path, reason in reasons.items():
        if config_tables.overrides_field(path):
            raise ConfigError(f"{path}: nothing reads this override: {reason}")
