"""The command ``fedlowrank poc``: a server and some sites as processes on this machine, for a trial in one command."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.errors import CheckpointError, ConfigError
from ...core.io.atomic_files import as_checkpoint_error
from ...network.deploy.flower_process import ProcessError, find_free_port
from ...network.deploy.keys import make_keys
from ...network.operation.start_checks import check_network_experiment
from ..one_run import show_run
from ..terminal import OUT, say
from .network_commands import interrupted_once, read_experiment
from .status import clients_table

logger = logging.getLogger(__name__)

EXPERIMENT = """name = "poc"
method = "fedavg"

[data]
source = "iris"
normalize = "standard"

[partition]
kind = "iid"
clients = 3

[model]
names = ["mlp"]
hidden = [16]

[defaults]
epochs = 5
batch_size = 8
optimizer = { lr = 0.1 }

[run]
rounds = 3
representations = 0
"""

SITES = 3
"""Default number of sites."""

PATIENCE = 60.0
"""Seconds that sites may take to end after the server has ended."""


def poc(file: Path | None, clients: int | None, out: Path | None) -> int:
    """Run an experiment with a server and sites on this machine, with TLS and keys of their own.

    Each process starts as ``fedlowrank serve`` and ``fedlowrank join`` do at a real site, and ends with this command,
    however that ends. The keys are only for this trial.

    Args:
        file: path of the experiment file; None for a small built-in experiment.
        clients: number of sites; None for three.
        out: folder to keep, which must not exist yet; None for a temporary one.
    """
    with contextlib.ExitStack() as stack:
        if out is None:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedlowrank-poc-")))
        else:
            base = out.absolute()
            if base.exists():
                raise CheckpointError(f"{out} exists already; choose another folder by -o, or remove it")
            with as_checkpoint_error(f"cannot make {out}"):
                base.mkdir(parents=True, mode=0o700)
        if file is None:
            file = base / "experiment.toml"
            file.write_text(EXPERIMENT, encoding="utf-8")
        overrides = choose_clients(file, clients)
        count = check_network_experiment(read_experiment(file, overrides, None))
        make_keys(base / "keys", count, ["localhost"], 1)
        python = [sys.executable, "-m", "fedlowrank"]
        port, start_time = find_free_port(), time.monotonic()
        server = [
            *python,
            "serve",
            str(file),
            *overrides,
            "--keys",
            str(base / "keys" / "server"),
            "--port",
            str(port),
        ]
        sites = [
            [*python, "join", str(file), *overrides, "--client", str(i), "--keys", str(base / "keys" / f"client-{i}"),
             "--server", f"localhost:{port}", "--folder", str(base / "sites" / str(i))]
            for i in range(count)
        ]  # fmt: skip
        run = base / "run"
        say(f"a server and {count} sites in {base}; Ctrl-C ends all of them")
        with interrupted_once(), run_processes([[*server, "-o", str(run)], *sites]) as processes:
            exit_code = processes[0].wait()
            deadline = time.monotonic() + PATIENCE
            for site in processes[1:] if exit_code == 0 else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    site.wait(max(0.1, deadline - time.monotonic()))
        if exit_code:
            raise ProcessError(f"the server ended with the exit code {exit_code}; its last lines are above")
        show_run(run)
        if (table := clients_table(run)) is not None:
            OUT.print(table)
        models = sorted((base / "sites").glob("*/*/model/model.safetensors"))
        message = (
            f"everything is in {base}" if out is not None else "its folder is removed; keep it by -o FOLDER"
        )
        say(f"{count} sites, {len(models)} models, {time.monotonic() - start_time:.0f} s; {message}")
    return 0


def choose_clients(file: Path, client_count: int | None) -> list[str]:
    """Overrides that give an experiment ``client_count`` clients; raises ConfigError if it cannot have so many."""
    experiment = read_experiment(file, [], None)
    if client_count is not None and client_count < 1:
        raise ConfigError(f"--clients {client_count}: a federation has at least one site")
    if hasattr(experiment.partition, "clients"):
        overrides = [f"partition.clients={client_count or SITES}"]
        return (
            [*overrides, f"network.clients={client_count or SITES}"]
            if experiment.network.clients
            else overrides
        )
    if client_count is not None:
        raise ConfigError(
            f"--clients {client_count}: in {file} the data say how many clients there are; leave the option out"
        )
    return []


@contextlib.contextmanager
def run_processes(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start commands, the server first, and print their lines; all processes end with the block, whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for i, command in enumerate(commands):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # Ctrl-C reaches only this command, which ends the others in order
                start_new_session=True,
            )
            processes.append(process)
            name = "server" if i == 0 else f"site {i - 1}"
            readers.append(threading.Thread(target=_pass_on, args=(process, name), daemon=True))
            readers[-1].start()
        yield processes
    finally:
        # the sites first, so that none of them searches for a server that has ended
        for process in [*processes[1:], *processes[:1]]:
            _end(process)
        for reader in readers:
            # a process that outlives its parent would keep the pipe open
            reader.join(5)


def _pass_on(process: subprocess.Popen[str], name: str) -> None:
    assert process.stdout is not None, "it is a pipe"
    with process.stdout as lines:
        for line in lines:
            if text := line.rstrip():
                logger.info(f"{name:>8} | {text}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process as Ctrl-C would, so that it ends its child processes; kill it if it takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
