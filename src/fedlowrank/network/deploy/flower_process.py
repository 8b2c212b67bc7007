"""A subprocess that runs one of Flower's commands in its own session, and ends with its process tree."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ...core.errors import CheckpointError, FedlowrankError
from ...core.io.atomic_files import as_checkpoint_error, write_json
from ...core.io.private_files import make_private_folder
from ...storage.lock import exclusive, identify_process, is_alive
from . import process_tree

logger = logging.getLogger(__name__)

FULL_DISK_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class ProcessError(FedlowrankError):
    """A command of Flower did not start, ended, or failed."""


def make_environment(process_folder: Path) -> dict[str, str]:
    """Make the environment that keeps Flower's processes quiet, private and offline; HOME is their folder."""
    environment = os.environ
    # processes on one machine communicate over loopback, which no proxy reaches; if both spellings are set, the
    # first is used
    direct_hosts = environment.get("no_proxy") or environment.get("NO_PROXY")
    no_proxy = ",".join(filter(None, [direct_hosts, "localhost", "127.0.0.1", "::1"]))
    overrides = {
        "FLWR_HOME": str(process_folder.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # otherwise the server installs the app's dependencies from the internet for every run
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # otherwise the server listens on two more ports, which have no guard
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        # Flower's processes start one another by name
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)]),
        # the log should contain what a process printed before it was killed
        "PYTHONUNBUFFERED": "1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
    }
    # the second variable is the pause in seconds between two polls for work, which delays every message; its
    # default is 1
    return {"OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5", **environment, **overrides}


def listen(host: str, port: int, seconds: float = 0.0) -> socket.socket:
    """Open a listening socket (port 0: a free port), waiting up to ``seconds`` for a port that is in use."""
    deadline = time.monotonic() + seconds
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def find_free_port(host: str = "127.0.0.1") -> int:
    """Find a port of this machine that is not in use."""
    with listen(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def describe_full_disk(folder: Path) -> str:
    """Say that the disk of a folder is full; "" if it is not, or its free bytes are unknown."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < FULL_DISK_BYTES:
            return f"the disk of {folder} is full: less than {FULL_DISK_BYTES >> 20} MiB is free"
    return ""


class NewLines:
    """Reads the lines that are appended to a file.

    Args:
        path: path of the file, which may not exist yet.
        offset: number of bytes that are not read.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self) -> Iterator[bytes]:
        """Read the complete lines that were added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                yield line


class FlowerProcess:
    """A subprocess that runs one of Flower's commands.

    Args:
        process_folder: folder of the process's log and of Flower's files, readable only by its owner.
        name: name of the command, which is also the name of the log.
        address: address of the server. A child of the server's process has it on its command line.
        variables: environment variables of the process and its process tree, in addition to :func:`make_environment`.
    """

    def __init__(
        self, process_folder: Path, name: str, address: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.process_folder = process_folder.absolute()
        self.name = name
        self.address = address
        self.log = self.process_folder / f"{name}.log"
        self.variables = {**make_environment(self.process_folder), **(variables or {})}
        self.ended_orphans = False
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0
        self._record = self.process_folder / f"{name}.process.json"
        self._lock: contextlib.ExitStack | None = None

    @property
    def pid(self) -> int | None:
        """Identifier of the process, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the last process, negative for a signal; None while it runs or if it was never started."""
        return None if self._process is None else self._process.poll()

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self.code is None

    def tail(self, line_count: int = 20) -> str:
        """The last lines of the log since the last start, without empty ones."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - 200 * line_count))
            text = _COLORS.sub("", file.read().decode(errors="replace"))
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-line_count:])

    def kill(self) -> None:
        """Kill the process and its process tree; raises ProcessError if a process survives."""
        self._end(signal.SIGKILL, 0)
        self._release()

    def close(self, seconds: float = 10.0) -> None:
        """Terminate the process, and kill its process tree after ``seconds``; raises the same errors as :meth:`kill`."""
        self._end(signal.SIGTERM, seconds)
        self._release()

    def reserve(self) -> None:
        """Make and lock the process's home, and end remaining processes of an earlier start; :meth:`close` unlocks it.

        Raises:
            FolderInUseError: if another process holds the lock.
            ConfigError: if other users can read the home.
            CheckpointError: if the home cannot be written.
        """
        make_private_folder(self.process_folder)
        if self._lock is None:
            lock = contextlib.ExitStack()
            lock.enter_context(exclusive(self.process_folder))
            self._lock = lock
            self._end_orphans()

    def _prepare(self) -> None:
        """End the last process, and lock the home."""
        if self.alive():
            raise ProcessError(f"{self.name} runs already, as process {self.pid}")
        self._end(signal.SIGKILL, 0)
        self.reserve()

    def _release(self) -> None:
        """Remove the record of the process and unlock the home."""
        self._record.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _end_orphans(self) -> None:
        """End the processes that a killed process started in this home; the lock shows that it is gone."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            pid, address = int(record["pid"]), str(record["address"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return
        groups = _find_groups(pid, address, is_alive(record))
        if groups:
            self.ended_orphans = True
            logger.info("%s of an earlier start, process %d, was left running; it is ended", self.name, pid)
            if survivors := process_tree.end_groups(groups):
                raise ProcessError(f"processes of an earlier start cannot be ended: {sorted(survivors)}")

    def _launch(self, command: Sequence[str]) -> None:
        with (
            as_checkpoint_error(f"cannot start {self.name} in {self.process_folder}"),
            self.log.open("ab") as log,
        ):
            self._begin = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.variables,
                start_new_session=True,
            )
            try:
                write_json(self._record, {**identify_process(self._process.pid), "address": self.address})
            except CheckpointError:
                self.kill()
                raise
        logger.info("%s started as process %d; it writes to %s", self.name, self._process.pid, self.log)

    def _wait_until(self, is_ready: Callable[[], bool], event: str, seconds: float) -> None:
        """Wait until a condition holds; kill the process if that fails."""
        deadline = time.monotonic() + seconds
        try:
            while not is_ready():
                if not self.alive():
                    raise ProcessError(
                        f"{self.name} ended with code {self.code} before {event}. {self._read_log_end()}"
                    )
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"{self.name} took more than {seconds:g} s until {event}. {self._read_log_end()}"
                    )
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def _read_log_end(self) -> str:
        return f"The end of {self.log}:\n{self.tail()}"

    def _end(self, sent_signal: signal.Signals, seconds: float) -> None:
        if self._process is None:
            return
        if self.alive() and sent_signal == signal.SIGKILL:
            # stopped first, so that it starts no more processes while its children are listed
            self._process.send_signal(signal.SIGSTOP)
        groups = _find_groups(self._process.pid, self.address, self.alive())
        if self.alive():
            self._process.send_signal(sent_signal)
        if survivors := process_tree.end_groups(groups, seconds):
            raise ProcessError(f"{self.name} left processes that cannot be ended: {sorted(survivors)}")
        self._process.wait()


def _find_groups(pid: int, address: str, is_running: bool) -> set[int]:
    """Process groups of a process tree, without its root's group if the root has ended, as its number may be reused."""
    # a child that outlives the root forms one group with its own tree
    child_arguments = f" --runtime-api-address {address} --parent-pid {pid} "
    groups = {
        p.group for p in process_tree.list_living_processes().values() if child_arguments in f"{p.command} "
    }
    if is_running:
        groups |= {pid, *(p.group for p in process_tree.find_descendants(pid).values())}
    return groups
