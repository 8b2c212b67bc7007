"""Which process has a folder or a port: asked before anything slow is imported, so that the answer comes at once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from pathlib import Path

import psutil

from ...core.errors import ConfigError
from ...storage.lock import FolderInUseError, is_alive, read_holder
from .flower_process import ProcessError, listen

PORTS = 1 << 16
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/@\[\]]+):([0-9]{1,5})")


def refuse_second(out: Path | None, host: str, port: int) -> None:
    """Refuse to serve where another server does.

    Args:
        out: run folder, if it is known yet.
        host: address to listen on.
        port: to listen on.

    Raises:
        FolderInUseError: if a server of this run folder lives.
        ProcessError: if the port is in use, unless by what a killed server left, which the next start ends; or if
            there is no such port or address.
    """
    if not 0 < port < PORTS:
        raise ProcessError(f"--port {port}: ports go from 1 to {PORTS - 1}")
    if out is not None and (server := _server_of(home_of(out))) is not None:
        raise FolderInUseError(
            f"{out} is served by process {server}. Wait until that ends, or end it (`kill {server}`), and start this "
            "again."
        )
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _listener(port) is not None:
            raise listen_error(host, port, error) from error


def listen_error(host: str, port: int, error: OSError) -> ProcessError:
    """The error of an address that cannot be listened on, with the process that has it."""
    # the numbers of errors of names are not those of the system
    is_name = isinstance(error, socket.gaierror)
    why = error.strerror if is_name else os.strerror(error.errno or 0)
    what = f"cannot listen on {host}, port {port}: {why}"
    if error.errno != errno.EADDRINUSE:
        return ProcessError(f"{what}. Give another by --host or --port.")
    who = _listener(port)
    return ProcessError(f"{what}{who or ''}. Choose another by --port, or end the program that has it.")


def check_address(address: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        ConfigError: unless it is HOST:PORT, with brackets around an IPv6 address.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[1]) < PORTS:
        raise ConfigError(
            f"--server {address!r} is no address. Write HOST:PORT, such as fl.example.org:8000 or [::1]:8000, with a "
            f"port from 1 to {PORTS - 1} and without https://"
        )


def home_of(out: Path) -> Path:
    """The folder of Flower's processes, beside a run folder."""
    return out.with_name(f"{out.name}.flower")


def _listener(port: int) -> str | None:
    """The process that listens on a port, as the end of a sentence; None if it is a server that was killed."""
    # which names processes of other users to root only
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None:
                command = psutil.Process(one.pid).cmdline()
                if "--database" not in command:
                    return f" by process {one.pid} (`{' '.join(command)[:100]}`)"
                home = Path(command[command.index("--database") + 1]).parent
                server = _server_of(home)
                run = home.with_name(home.name.removesuffix(".flower"))
                return None if server is None else f" by process {server}, which serves {run}"
    return " by a process of another user"


def _server_of(home: Path) -> int | None:
    """The living process that has the folder of a server, or None."""
    holder = read_holder(home)
    return int(holder["pid"]) if is_alive(holder) else None
