"""References of docstrings and comments lead somewhere: every ``:func:``, ``:class:`` and the like names a thing."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FILES = sorted((SOURCE / "fedlowrank").rglob("*.py"))
REFERENCE = re.compile(r":(func|class|meth|mod|attr|data|exc|obj):`~?([^`]+)`", re.DOTALL)


def module_name(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_attribute(owner: Any, names: list[str]) -> bool:
    """Whether a dotted name leads from an object to another; fields of dataclasses count."""
    for name in names:
        if name in getattr(owner, "__dataclass_fields__", {}) or name in getattr(
            owner, "__annotations__", {}
        ):
            return name == names[-1]
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def find_absolute(target: str) -> bool:
    """Whether an absolute dotted name is a module, or something in one."""
    names = target.split(".")
    for length in range(len(names), 0, -1):
        name = ".".join(names[:length])
        try:
            actual = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if actual is not None:
            return length == len(names) or find_attribute(importlib.import_module(name), names[length:])
    return False


def resolves(target: str, module: ModuleType, owner: str | None) -> bool:
    """Whether a reference in a module, perhaps within a class, names something.

    A name with a leading dot is relative as in an import statement. A bare name belongs to the class, the module or
    Python.
    """
    if target.startswith("."):
        return find_absolute(importlib.util.resolve_name(target, module.__package__))
    names = target.split(".")
    if owner is not None and f"self.{names[0]}" in inspect.getsource(getattr(module, owner)):
        return len(names) == 1
    owners = [module, builtins] if owner is None else [getattr(module, owner, None), module, builtins]
    return any(find_attribute(o, names) for o in owners if o is not None) or find_absolute(target)


def references(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Line, target and enclosing class of every reference of a file."""
    classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
    for actual in REFERENCE.finditer(text):
        line = text.count("\n", 0, actual.start()) + 1
        inside = [c.name for c in classes if c.lineno <= line <= (c.end_lineno or c.lineno)]
        yield line, re.sub(r"\s+", "", actual[2]), inside[0] if inside else None


# of packages that the extras import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_references_lead_somewhere() -> None:
    wrong = []
    for path in FILES:
        for line, target, owner in references(path.read_text()):
            if not resolves(target, importlib.import_module(module_name(path)), owner):
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("fedlowrank.core.contract.method.Method.download", True),
        ("fedlowrank.core.contract.method.Method.parts", False),
        ("..tree.encode", True),
        ("..tree.no_such_name", False),
        (".no_such_file", False),
        ("Method.download", True),
        ("download", True),
        ("uploads", False),
        ("torch.nn.Linear", True),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(target: str, found: bool) -> None:
    module = importlib.import_module("fedlowrank.core.contract.method")
    assert resolves(target, module, "Method") is found
