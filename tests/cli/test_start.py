"""What starts at once imports nothing heavy; the catalog that ``list`` prints is up to date."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest

import fedlowrank
import fedlowrank.methods.ifca
from fedlowrank.cli.catalog import build_catalog
from fedlowrank.cli.listing import CATALOG

HEAVY = {"scipy", "sklearn", "pandas", "matplotlib", "pydantic", "flwr", "transformers", "datasets", "jinja2"}
IMPORTED = "import sys, json; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"


def imported(code: str) -> set[str]:
    """Packages in memory after some code was run by a fresh interpreter."""
    command = [sys.executable, "-c", f"{code}\n{IMPORTED}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(found.stdout.splitlines()[-1]))


CALL = "from fedlowrank.cli.main import main\ntry: main({!r})\nexcept SystemExit: pass"


@pytest.mark.parametrize("code", ["import fedlowrank", CALL.format(["--help"]), CALL.format(["list"])])
def test_nothing_heavy_is_imported_for_what_needs_no_torch(code: str) -> None:
    assert not imported(code) & {*HEAVY, "torch", "numpy"}


def test_simulations_import_torch_and_nothing_else_that_is_heavy() -> None:
    assert not imported("from fedlowrank import Federation, simulate") & HEAVY


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fedlowrank", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == f"fedlowrank {fedlowrank.__version__}\n"


def test_every_public_name_is_found() -> None:
    assert all(getattr(fedlowrank, name) is not None for name in fedlowrank.__all__)
    assert {*fedlowrank.__all__} <= {*dir(fedlowrank)}
    with pytest.raises(AttributeError, match="has no attribute 'Flora'"):
        _ = fedlowrank.Flora  # type: ignore[attr-defined]


def test_the_catalog_is_up_to_date() -> None:
    assert json.loads(CATALOG.read_text()) == build_catalog(), "run `make catalog`"


def test_the_algorithm_of_a_method_keeps_its_lines_on_a_narrow_terminal() -> None:
    command = [sys.executable, "-m", "fedlowrank", "list", "ifca"]
    narrow = {**os.environ, "COLUMNS": "80"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=narrow).stdout
    algorithm = inspect.getdoc(fedlowrank.methods.ifca)
    assert algorithm is not None
    assert algorithm in printed
