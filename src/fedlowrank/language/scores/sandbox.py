"""A Python program run in a process of its own, with limits. Not a security boundary.

The limits keep a wrong program from hanging, filling the disk or the memory, or leaving processes behind.
They do not stop one that means harm: it can read what its user can read. Run programs of unknown origin in a
container or a virtual machine that has nothing to lose.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ...core.errors import ConfigError, TaskError

_LAUNCH = Path(__file__).with_name("launch.py")
_TAIL = 1 << 16


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use.

    Attributes:
        seconds: of wall-clock time; and of processor time, rounded up, for each process that nothing else may
            stop.
        memory: bytes of address space.
        file_size: bytes of any one file, its output included.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    file_size: int = 1 << 24

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or self.memory < 1 << 26 or self.file_size < 1 << 12:
            raise ConfigError(
                f"limits must be finite and leave Python itself at least {1 << 26} bytes of memory and "
                f"{1 << 12} bytes a file; they are {self.seconds} s, {self.memory} and {self.file_size} bytes"
            )


@dataclass(frozen=True)
class Isolation:
    """Isolation of a program, beside the limits on time, memory and files, which are always in force.

    Attributes:
        network: it had a network namespace of its own, hence no network.
        contained: it had a process namespace of its own: nothing of it lived on.
        single: it could start no other process or thread.
        user: as whom it ran: ``the caller``; or, where that is root, ``nobody``, and ``nobody, reading as
            root`` if only root can read the interpreter.
    """

    network: bool
    contained: bool
    single: bool
    user: str

    def describe(self) -> str:
        """One line that names what was in force and what was not."""
        states = {
            "no network": self.network,
            "own process namespace": self.contained,
            "no further processes": self.single,
        }
        active = ", ".join(words for words, held in states.items() if held)
        missing = ", ".join(words for words, held in states.items() if not held)
        absent = f"; not in force: {missing}" if missing else ""
        return f"in force: {active or 'none'}{absent}; as user: {self.user}"


@dataclass(frozen=True)
class ProgramRun:
    """How a program ended.

    Attributes:
        outcome: passed, if it ran to its end; timed out, by the wall clock; else failed.
        message: the last line that it wrote to standard error, or how it ended.
        isolation: None if the program was over before that was known.
    """

    outcome: Literal["passed", "failed", "timed out"]
    message: str
    isolation: Isolation | None

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.outcome == "passed"


def run_program(program: str, limits: ProgramLimits) -> ProgramRun:
    """Run a program on this machine to see whether it comes to its end without an error.

    The limits are no security boundary: the program can read what its user can read. It runs under ``python
    -I -S`` in a new session, with an empty environment and no input, in a temporary folder of its own. Time
    is up when the wall clock says so, and then the whole process group is killed. A program that ends early,
    even without an error, has not passed: a mark after its last line must be reached.

    Args:
        program: Python source.
        limits: what it may use.

    Raises:
        ConfigError: if the machine does not run Linux.
        TaskError: if the machine does not let a program be started so.
    """
    if platform.system() != "Linux":
        raise ConfigError(
            f"programs are only run on Linux, whose limits are used; this is {platform.system()}."
        )
    # the program cannot hold its own digest, so it cannot print the mark by chance
    mark = hashlib.blake2b(program.encode("utf-8", "replace"), digest_size=16).hexdigest()
    source = f"{program}\n\n__import__('os').write(1, b'\\n{mark}\\n')\n"
    # what a program left behind may resist removal; it is in a folder for such things
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        path = Path(folder) / "program.py"
        path.write_text(source, encoding="utf-8", errors="replace")
        path.chmod(0o644)
        code, isolation = _run(path, limits, out, err)
        printed, complaints = _tail(out), _tail(err).strip()
    if code is None:
        return ProgramRun("timed out", f"exceeded {limits.seconds:g} s", isolation)
    if code == 0 and mark in printed:
        return ProgramRun("passed", "", isolation)
    if code == 0:
        return ProgramRun("failed", "ended before its last line", isolation)
    last = complaints.splitlines()[-1] if complaints else f"ended with code {code}"
    return ProgramRun("failed", last[:500], isolation)


def _run(
    program: Path, limits: ProgramLimits, out: IO[bytes], err: IO[bytes]
) -> tuple[int | None, Isolation | None]:
    """The exit code, or None if time ran out; and its isolation."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    limit_arguments = [math.ceil(limits.seconds), limits.memory, limits.file_size, writer]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_LAUNCH), *map(str, limit_arguments), str(program)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=program.parent,
            env={},
            pass_fds=[writer],
            start_new_session=True,
        )
        try:
            over = _wait(process.pid, time.monotonic() + limits.seconds)
        finally:
            # not yet reaped, so the number still names this group; whatever it started ends here
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        try:
            report = os.read(reader, 4096)
        except BlockingIOError:
            report = b""
    finally:
        os.close(reader)
        os.close(writer)
    known, _, problem = report.decode().partition("\n")
    if problem or (over and not known):
        raise TaskError(
            "a program could not be started under limits: "
            f"{problem or _tail(err).strip()[-500:] or f'code {code}'}. Raise the limits, or run this on a "
            "machine that allows them."
        )
    return code if over else None, Isolation(**json.loads(known)) if known else None


def _wait(pid: int, deadline: float) -> bool:
    """Whether the process ended in time; it stays to be reaped."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read().decode("utf-8", "replace")
