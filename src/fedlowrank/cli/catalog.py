"""The catalog of methods, models and data sources, the fields of a method, and the command ``check`` of the contract."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from ..config.experiment import TAGGED, method_class
from ..config.reading.field_help import list_fields
from ..core.errors import ConfigError
from ..core.learning.losses import KINDS
from ..data.partitioning.own_partition import OwnPartition
from ..data.sources import SOURCES
from ..data.text.text_sources import TEXT_SOURCES
from ..methods import METHODS
from ..models.zoo import MODELS
from ..results.client_metrics import METRICS
from ..testing.check import check_method, small_federation
from ..trust.abilities import ABILITIES, abilities
from .terminal import OUT, strip_markup


def build_catalog() -> list[dict[str, Any]]:
    """Build the tables of ``fedlowrank list``: title, columns and rows of each, and whether ``--trust`` shows it."""
    methods = [
        [
            name,
            _first_line(cls),
            "any" if cls.heterogeneous else "equal",
            "classes" if cls.needs_classes else "any",
            cls.citation,
        ]
        for name, cls in METHODS.items()
    ]
    tables = [_table("Methods", ["method", "", "models", "targets", "source"], methods)]
    own_kinds = {"partition": {"module:function": OwnPartition}}
    entries_by_title: dict[str, Mapping[str, object]] = {
        "Models (model.names)": MODELS,
        "Data (data.source)": SOURCES,
        "Texts (data.source, with [language])": TEXT_SOURCES,
        **{
            f"{name.title()}s ({name}.kind)": {**kinds, **own_kinds.get(name, {})}
            for name, (kinds, _) in TAGGED.items()
        },
        "Losses (loss)": KINDS,
        "Metrics (run.metrics)": {name: metric.about for name, metric in METRICS.items()},
    }
    for title, entries in entries_by_title.items():
        rows = [[n, entry if isinstance(entry, str) else _first_line(entry)] for n, entry in entries.items()]
        tables.append(_table(title, ["name", ""], rows))
    return [*tables, build_trust_table()]


def build_trust_table() -> dict[str, Any]:
    """Build the table of ``fedlowrank list --trust``: for each method and ability yes, or the reason why not."""
    rows = []
    for name, cls in METHODS.items():
        method_abilities = abilities(cls(), small_federation(cls.heterogeneous).task(1))
        rows.append(
            [name, *("yes" if reason is None else f"no: {reason}" for reason in method_abilities.values())]
        )
    title = "What can be done with the updates of a method"
    return _table(title, ["method", *ABILITIES.values()], rows, trust=True)


def _table(title: str, columns: list[str], rows: list[list[str]], *, trust: bool = False) -> dict[str, Any]:
    return {"title": title, "trust": trust, "columns": columns, "rows": rows}


def show_method(name: str) -> int:
    """Print the paper and the fields of a method."""
    if ":" in name:
        raise ConfigError(f"list imports no code; test {name!r} by `fedlowrank check`")
    cls = method_class(name)
    text = strip_markup(inspect.getdoc(sys.modules[cls.__module__]) or "")
    OUT.print(text, highlight=False, markup=False, soft_wrap=True)
    table = Table("field", "default", "meaning", title=f"[methods.{name}]", title_justify="left")
    for f in list_fields(cls):
        table.add_row(f"{f.name}: {f.type}", f.default, strip_markup(f.meaning))
    OUT.print(table)
    return 0


def _first_line(cls: object) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def check(name: str) -> int:
    """Test a method against the contract, and print the findings."""
    if name.endswith(".toml"):
        raise ConfigError(
            f"check tests a method, such as my_method:Own, and {name} is an experiment file. To try a file: "
            f"`fedlowrank run {name} run.rounds=1`"
        )
    cls = method_class(name)
    no_default = dataclasses.MISSING
    for f in dataclasses.fields(cls):
        if f.init and f.default is no_default and f.default_factory is no_default:
            raise ConfigError(
                f"{name}: {f.name} has no default, and the check makes the method without arguments. Give it one, such "
                f"as {f.name}: {f.type if isinstance(f.type, str) else f.type.__name__} = ..."
            )
    try:
        method = cls()
    except TypeError as error:
        raise ConfigError(f"{name} needs arguments; give every field a default: {error}") from error
    findings = check_method(method)
    table = Table("check", "", "detail", title=f"{method.title}: the contract")
    printed_details: set[str] = set()
    for finding in findings:
        verdict = Text("ok", "green") if finding.ok else Text("FAILED", "red")
        # one mistake can fail every check
        detail = "as above" if finding.detail and finding.detail in printed_details else finding.detail
        printed_details.add(finding.detail)
        table.add_row(finding.name, verdict, detail)
    OUT.print(table)
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    print(json.dumps(build_catalog(), indent=1, ensure_ascii=False))
