"""The commands ``list`` and ``check``: what there is, and whether a method keeps the contract."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from ..config.experiment import TAGGED, method_class
from ..config.field_help import list_fields
from ..core.errors import ConfigError
from ..data.sources import SOURCES
from ..data.text.sources import TEXT_SOURCES
from ..methods import METHODS
from ..models.zoo import MODELS
from ..testing.check import check_method
from .terminal import OUT


def show_list(method: str | None) -> int:
    """Print every method, model and source of data, or the paper and the fields of one method."""
    if method is not None:
        if ":" in method:
            raise ConfigError(f"list imports no code; test {method!r} by `fedlowrank check`")
        cls = method_class(method)
        OUT.print(inspect.getdoc(sys.modules[cls.__module__]) or "", highlight=False)
        table = Table("field", "default", "meaning", title=f"[methods.{method}]", title_justify="left")
        for f in list_fields(cls):
            table.add_row(f"{f.name}: {f.type}", f.default, f.meaning)
        OUT.print(table)
        return 0
    table = Table("method", "", "models", "source", title="Methods")
    for name, cls in METHODS.items():
        table.add_row(name, _first_line(cls), "any" if cls.heterogeneous else "equal", cls.citation)
    OUT.print(table)
    known: dict[str, Mapping[str, object]] = {
        "Models (model.names)": MODELS,
        "Data (data.source)": SOURCES,
        "Texts (data.source, with [language])": TEXT_SOURCES,
        **{f"{section.title()}s ({section}.kind)": kinds for section, (kinds, _) in TAGGED.items()},
    }
    for title, entries in known.items():
        table = Table("name", "", title=title)
        for name, entry in entries.items():
            table.add_row(name, entry if isinstance(entry, str) else _first_line(entry))
        OUT.print(table)
    OUT.print("`fedlowrank list METHOD` shows a method's paper, algorithm and fields.")
    return 0


def _first_line(cls: object) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def check(name: str) -> int:
    """Test a method against the contract, and print what was found."""
    cls = method_class(name)
    try:
        method = cls()
    except TypeError as error:
        raise ConfigError(f"{name} needs arguments; give every field a default: {error}") from error
    findings = check_method(method)
    table = Table("check", "", "detail", title=f"{method.title}: the contract")
    for finding in findings:
        verdict = Text("ok", "green") if finding.ok else Text("FAILED", "red")
        table.add_row(finding.name, verdict, finding.detail)
    OUT.print(table)
    return 0 if all(finding.ok for finding in findings) else 1
