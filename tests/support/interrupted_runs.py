"""Runs in processes of their own, which tests kill and resume."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from fedlowrank import Federation
from fedlowrank.cli.main import main
from fedlowrank.data.federation import Federation as FederationType
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.run_files import RECORDS_FILE, read_lines

EXPERIMENT = """
name = "small"
method = "pfedlora"
[data]
source = "digits"
[partition]
kind = "pathological"
clients = 6
classes_per_client = 3
[model]
names = ["mlp"]
hidden = [12]
[run]
rounds = 10
checkpoint_every = 1
participation = 0.5
representations = 30
[methods.pfedlora]
width = 6
[defaults]
batch_size = 32
optimizer = { kind = "sgd", lr = 0.1, momentum = 0.5 }
"""


def write_experiment(folder: Path, text: str = EXPERIMENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.toml"
    path.write_text(text)
    return path


def start_command(*arguments: object, log: Path) -> int:
    """Run a command in a process of its own, forked so that it need not import everything anew; its process
    id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = os.fork()
    if process:
        return process
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main([str(a) for a in arguments])
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def wait_for_exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def count_lines(folder: Path) -> int:
    return len(read_lines(folder)) if (folder / RECORDS_FILE).exists() else 0


def wait_for_round(folder: Path, rounds: int, process: int | None = None, seconds: float = 60) -> bool:
    """Wait until the record of that round is written; False if the process ended before."""
    limit = time.monotonic() + seconds
    while count_lines(folder) <= rounds or not (folder / "run.json").exists():
        if process is not None:
            actual, _ = os.waitpid(process, os.WNOHANG)
            if actual:
                return False
        assert time.monotonic() < limit, f"no round {rounds} in {folder}"
        time.sleep(0.002)
    return True


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    return [r.untimed() for r in RunRecord.load(folder).rounds]


class SplitNetwork(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.body(x)))
        return out


def make_tiny_federation(shift: float = 0.0, seed: int = 0) -> FederationType:
    generator = torch.Generator().manual_seed(3)
    data = []
    for i in range(3):
        x = torch.randn(10, 4, generator=generator)
        data.append((x + (shift if i == 1 else 0.0), (x[:, 0] > 0).long()))
    return Federation.from_arrays(data, SplitNetwork, classes=2, seed=seed)
