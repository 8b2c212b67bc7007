"""A small experiment for the tests of the command line, and what every error must look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlowrank.cli.main import main

SMALL = """
name = "small"
method = "fedavg"
compare = ["standalone", "fedavg"]
[data]
source = "iris"
[partition]
kind = "iid"
clients = 3
[model]
names = ["mlp"]
hidden = [4]
[run]
rounds = 2
representations = 0
[defaults]
optimizer = { kind = "sgd", lr = 0.1 }
"""


def write(folder: Path, text: str = SMALL, name: str = "small.toml") -> str:
    (folder / name).write_text(text)
    return name


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; its one message."""
    capsys.readouterr()
    code = main(list(arguments))
    said = capsys.readouterr()
    assert code == 1, f"exit code {code}: {said.out[-500:]}{said.err}"
    shown, mark, message = said.err.rpartition("error: ")
    assert mark, said.err
    # a progress bar may stand before it, where the error came in the middle of a run
    assert "rror" not in shown, said.err
    assert "Traceback" not in said.err + said.out
    return message


def done(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must succeed; what it printed."""
    capsys.readouterr()
    code = main(list(arguments))
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out
