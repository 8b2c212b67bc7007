"""Benchmarks use names and arguments of the package that exist: what a rename leaves behind is found before a run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNKNOWN = re.compile(r"^benchmarks/\S+: error: .*\[(?:attr-defined|call-arg|name-defined)\]$", re.MULTILINE)


def find_unknown_names(*files: str, cache: Path) -> list[str]:
    """Errors of mypy about names, attributes and arguments in these files."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--no-error-summary", *files]
    return UNKNOWN.findall(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_benchmarks_use_names_that_exist(tmp_path: Path) -> None:
    assert find_unknown_names("benchmarks", cache=tmp_path) == []


def test_an_unknown_name_is_found() -> None:
    output = 'benchmarks/a/b.py:3: error: "Run" has no attribute "draws"  [attr-defined]\nsrc/x.py:1: error: y  [arg-type]'
    assert len(UNKNOWN.findall(output)) == 1
