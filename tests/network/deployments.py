"""Experiments that are deployed, and the commands of server and clients as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlowrank.network.deploy import process_tree
from fedlowrank.storage.run_files import RECORDS_FILE, read_lines

COMMAND = [sys.executable, "-m", "fedlowrank.cli.main"]


def make_deployment_tables(method: str, **run: Any) -> dict[str, Any]:
    """Irises for three clients of unequal ranks."""
    return {
        "name": "t",
        "method": method,
        "data": {"source": "iris", "normalize": "standard"},
        "partition": {"kind": "iid", "clients": 3},
        "model": {"names": ["mlp"], "hidden": [8]},
        "lora": {"ranks": [3, 2, 1]},
        "run": {"rounds": 2, "representations": 0, **run},
        # shortened updates have other bits than in the run that is the truth here
        "network": {"deadline": 60.0, "wait": 240.0, "limits": {"update_ratio": 0.0}},
    }


def write_tables(path: Path, value: dict[str, Any]) -> Path:
    """The tables as a file; every value of theirs but a table is written in JSON as in TOML."""

    def toml(v: Any) -> str:
        inner = ", ".join(f"{k} = {toml(x)}" for k, x in v.items()) if isinstance(v, dict) else ""
        return f"{{{inner}}}" if isinstance(v, dict) else json.dumps(v)

    lines = [f"{k} = {json.dumps(v)}" for k, v in value.items() if not isinstance(v, dict)]
    for section, fields in value.items():
        if isinstance(fields, dict):
            lines += [f"[{section}]", *(f"{k} = {toml(v)}" for k, v in fields.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


class CommandProcess:
    """A command of ours as a process, with all it starts."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log, self.arguments = log, arguments
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "COLUMNS": "200"},
            )

    def kill(self) -> None:
        """Everything at once, as a loss of power would."""
        for pid in (self.process.pid, *process_tree.find_descendants(self.process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


def wait_while_running(what: Callable[[], bool], seconds: float, *watched: CommandProcess) -> None:
    end = time.monotonic() + seconds
    while not what():
        ended = [p for p in watched if p.process.poll() is not None]
        assert not ended, ended[0].log.read_text()[-3000:]
        assert time.monotonic() < end, "\n".join(p.log.read_text()[-2000:] for p in watched)
        time.sleep(0.2)


def count_rounds(out: Path) -> int:
    return len(read_lines(out)) - 1 if (out / RECORDS_FILE).exists() else -1
