"""One of Flower's programs as a process of ours: started in a session of its own, watched, ended with all it started."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...core.errors import CheckpointError, ConfigError, FedlowrankError
from ...core.files import as_checkpoint_error, write_json
from ...simulation.lock import exclusive, identify, is_alive
from . import process_tree as family

Say = Callable[[str], None]
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class ProcessError(FedlowrankError):
    """One of Flower's programs did not start, ended, or refused what it was asked."""


def environment(home: Path) -> dict[str, str]:
    """Variables for every process of Flower: this process's own, and what keeps Flower quiet, private and offline.

    Args:
        home: folder for what Flower keeps: its connections, and the apps that it unpacks.
    """
    own = os.environ
    forced = {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # or the server installs the app's dependencies from the internet for every run
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # or the server would listen on two more ports, which have no guard
        "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
        "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        # programs start one another by name
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), own.get("PATH", os.defpath)]),
        # what a program printed before it was killed should be in the log
        "PYTHONUNBUFFERED": "1",
    }
    # programs of one machine talk over loopback, which no proxy reaches; where both spellings are set, the first counts
    direct = own.get("no_proxy") or own.get("NO_PROXY")
    forced["no_proxy"] = forced["NO_PROXY"] = ",".join(
        filter(None, [direct, "localhost", "127.0.0.1", "::1"])
    )
    # the second is the pause in seconds between two looks for work, which every message waits for; it is 1 by default
    return {"OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5", **own, **forced}


def find_program(name: str) -> str:
    """The path of one of Flower's commands.

    Args:
        name: of the command.

    Raises:
        ConfigError: if Flower is not installed beside this package.
    """
    found = shutil.which(name, path=environment(Path())["PATH"])
    if found is None:
        raise ConfigError(f"there is no command {name}: Flower is missing. Install fedlowrank[network].")
    return found


def listen(host: str, port: int, seconds: float = 0.0) -> socket.socket:
    """A socket that listens, which shows that nobody else does.

    Args:
        host: address of this machine.
        port: or 0 for a free one.
        seconds: to wait at most for a port that is in use.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(0.2)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine on which nobody listens at present.

    Args:
        host: address of this machine.
    """
    with listen(host, 0) as found:
        port: int = found.getsockname()[1]
        return port


class Program:
    """One of Flower's programs.

    Args:
        home: folder of its log and of what Flower keeps; made if it does not exist, and readable by its owner only.
        name: of the program, which also names the log.
        variables: for its environment and that of everything it starts, in addition to :func:`environment`.
        say: is told in a line when something of note happens.
    """

    def __init__(self, home: Path, name: str, variables: Mapping[str, str] | None, say: Say | None) -> None:
        self.home = home.absolute()
        self.name = name
        self.log = self.home / f"{name}.log"
        self.variables = {**environment(self.home), **(variables or {})}
        self.say: Say = say or (lambda _: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0
        self._record = self.home / f"{name}.process.json"
        self._lock: contextlib.ExitStack | None = None
        self.ended_orphans = False

    @property
    def pid(self) -> int | None:
        """Number of its process, or None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code of its last process, negative for a signal; None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 20) -> str:
        """The end of what it has said since its last start.

        Args:
            lines: at most so many; empty ones are left out.
        """
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - 200 * lines))
            text = _COLORS.sub("", file.read().decode(errors="replace"))
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])

    def kill(self) -> None:
        """End it and all it started at once, without a word to anyone.

        Raises:
            ProcessError: if a process withstands that.
        """
        self._end(signal.SIGKILL, 0)
        self._release()

    def close(self, seconds: float = 10.0) -> None:
        """Ask it to end, and see to it that it does.

        Args:
            seconds: after which it is killed, with all it started.

        Raises:
            ProcessError: if a process withstands that.
        """
        self._end(signal.SIGTERM, seconds)
        self._release()

    def _own_address(self) -> str | None:
        """Where its children reach it, if it has any."""
        return None

    def _prepare(self) -> None:
        """Make and lock its home; and if it was started before, by whomever, end what is left of that."""
        if self.alive():
            raise ProcessError(f"{self.name} runs already, as process {self.pid}")
        self._end(signal.SIGKILL, 0)
        with as_checkpoint_error(f"cannot make {self.home}"):
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._lock is None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(exclusive(self.home))
                self._lock = stack.pop_all()
            self._end_orphans()

    def _release(self) -> None:
        """Let others start it in the same home."""
        self._record.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _end_orphans(self) -> None:
        """End what was started in this home by a process that was killed; the lock shows that it is gone."""
        try:
            found = json.loads(self._record.read_text())
            pid, address = int(found["pid"]), str(found["address"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return
        lives = is_alive(found)
        groups = self._groups_of(pid, address, lives)
        if groups:
            self.ended_orphans = True
            self.say(f"{self.name} of an earlier start, process {pid}, was left running; it is ended")
            left = family.kill(groups)
            if left:
                raise ProcessError(f"processes of an earlier start cannot be ended: {sorted(left)}")

    def _launch(self, command: Sequence[str]) -> None:
        with as_checkpoint_error(f"cannot start {self.name} in {self.home}"), self.log.open("ab") as log:
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
                write_json(self._record, {**identify(self._process.pid), "address": str(self._own_address())})
            except CheckpointError:
                self.kill()
                raise
        self.say(f"{self.name} started as process {self.pid}; it writes to {self.log}")

    def _await(self, is_ready: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until something is so. If it never comes to that, nothing is left of the program."""
        deadline = time.monotonic() + seconds
        try:
            while not is_ready():
                if not self.alive():
                    raise ProcessError(
                        f"{self.name} ended with code {self.code} before {what}. {self._last_words()}"
                    )
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"{self.name} took more than {seconds:g} s until {what}. {self._last_words()}"
                    )
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def _last_words(self) -> str:
        return f"The end of {self.log}:\n{self.tail()}"

    def _end(self, how: signal.Signals, seconds: float) -> None:
        if self._process is None:
            return
        if self.alive() and how == signal.SIGKILL:
            # so that it starts nothing more while its children are listed
            self._process.send_signal(signal.SIGSTOP)
        groups = self._groups()
        if self.alive():
            self._process.send_signal(how)
        family.await_end(groups, seconds)
        left = family.kill(groups)
        if left:
            raise ProcessError(f"{self.name} left processes that cannot be ended: {sorted(left)}")
        self._process.wait()

    def _groups(self) -> set[int]:
        """Process groups of all that it started, and its own while it runs; the number of one that ended may be another's."""
        if self._process is None:
            return set()
        return self._groups_of(self._process.pid, str(self._own_address()), self.alive())

    def _groups_of(self, pid: int, address: str, lives: bool) -> set[int]:
        # a child that outlives it, and all that this child started, are one group
        child = f" --runtime-api-address {address} --parent-pid {pid} "
        found = [process for process in family.processes().values() if child in f"{process.command} "]
        if lives:
            found += family.descendants(pid).values()
            return {pid} | {process.group for process in found}
        return {process.group for process in found}
