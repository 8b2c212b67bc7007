"""Overrides that nothing reads: settings of methods that do not run, and of other commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
    "run.target": "it changes no run. Name the accuracy whose cost is reported by --target",
}
"""Fields and sections that cannot be varied, because no single run reads them or its results need them, with the reason."""


def refuse_overrides_of_other_methods(
    config_tables: LayeredTables, methods: Mapping[str, Collection[str]], names: Collection[str]
) -> list[str]:
    """Refuse overrides of methods that do not run, and of defaults that methods replace by their own values.

    An override of a default is refused if every method has its own value. A varied default is refused if one method
    has, because its runs would be equal and bear the names of different values.

    Args:
        config_tables: tables and overrides of the experiment.
        methods: names of the fields that each table ``[methods.NAME]`` of the experiment sets.
        names: names of the methods that run.

    Returns:
        A line for each override of a default that some of the methods do not read.

    Raises:
        ConfigError: if there is such an override; the message names it and what to type instead.
    """
    lines = []
    for name in config_tables.overrides.get("methods", {}):
        if name not in names:
            raise ConfigError(
                f"methods.{name}: nothing reads this override, for the methods that run are "
                f"{', '.join(names)}. Name {name} among them, or set methods.{next(iter(names))}."
            )
    for name in config_tables.overrides.get("defaults", {}):
        owners = [method for method in names if name in methods.get(method, ())]
        if not owners:
            continue
        if field := next((f for f in config_tables.varied if f.split(".")[:2] == ["defaults", name]), ""):
            raise ConfigError(
                f"{field} is varied, and {', '.join(owners)} would not read it, for the table methods.{owners[0]} has its "
                f"own {name}. Remove {name} from this table, or vary a field of the method: "
                f"methods.{owners[0]}.{field.removeprefix('defaults.')}=..."
            )
        if len(owners) == len(names):
            raise ConfigError(
                f"defaults.{name}: nothing reads this override, for {', '.join(owners)} has its own in the table "
                f"methods.{owners[0]}. Write methods.{owners[0]}.{name}=... instead."
            )
        lines.append(
            f"defaults.{name}: {', '.join(owners)} {'does' if len(owners) == 1 else 'do'} not read this override, for the "
            f"table methods.{owners[0]} has its own {name}. methods.{owners[0]}.{name}=... overrides it"
        )
    return lines


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
