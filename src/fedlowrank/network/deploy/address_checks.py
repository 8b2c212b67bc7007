"""Finds the process that uses a run folder or a port. Run it before slow imports, so that the error comes at once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import psutil

from ...core.errors import ConfigError
from ...storage.lock import FolderInUseError, is_in_use, read_holder
from .flower_process import ProcessError, listen

PORT_COUNT = 1 << 16
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/@\[\]]+):([0-9]{1,5})")


def refuse_second(run_path: Path | None, host: str, port: int) -> None:
    """Refuse to serve if another server already uses the run folder or the port.

    Args:
        run_path: path of the run folder, if it is already known.
        host: address to listen on.
        port: port to listen on.

    Raises:
        FolderInUseError: if a server of this run folder is running.
        ProcessError: if the port is in use, except by processes of a killed server, which the next start ends; or if
            there is no such port or address.
    """
    if not 0 < port < PORT_COUNT:
        raise ProcessError(f"--port {port}: ports go from 1 to {PORT_COUNT - 1}")
    if not host:
        raise ProcessError(
            "--host is empty: give the address of a network interface, or leave the option out"
        )
    if run_path is not None and (pid := _find_server(flower_home(run_path))) is not None:
        raise FolderInUseError(
            f"{run_path} is served by process {pid}. Wait until that ends, or end it (`kill {pid}`), and start this "
            "again."
        )
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _describe_listener(port) is not None:
            raise make_listen_error(host, port, error) from error


def make_listen_error(host: str, port: int, error: OSError) -> ProcessError:
    """Make the error for an address that cannot be listened on, naming the process that uses it."""
    # name resolution has negative codes of its own, and create_server makes a plain OSError of its errors
    is_name = (error.errno or 0) < 0
    reason = (error.strerror or "").partition(" (while ")[0] if is_name else os.strerror(error.errno or 0)
    problem = f"cannot listen on {host}, port {port}: {reason}"
    if error.errno != errno.EADDRINUSE:
        return ProcessError(f"{problem}. Give another by --host or --port.")
    holder = _describe_listener(port)
    return ProcessError(f"{problem}{holder or ''}. Choose another by --port, or end the program that has it.")


def check_address(address: str) -> None:
    """Refuse a text that is not the address of a server.

    Raises:
        ConfigError: if it is not HOST:PORT, with brackets around an IPv6 address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[1]) < PORT_COUNT:
        raise ConfigError(
            f"--server {address!r} is no address. Write HOST:PORT, such as fl.example.org:8000 or [::1]:8000, with a "
            f"port from 1 to {PORT_COUNT - 1} and without https://"
        )


def flower_home(run_path: Path) -> Path:
    """The folder of Flower's processes, beside a run folder."""
    return run_path.with_name(f"{run_path.name}.flower")


def _describe_listener(port: int) -> str | None:
    """Describe the process that listens on a port, as the end of a sentence; None if it is a server that was killed."""
    # psutil shows processes of other users only to root
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid is not None
            ):
                command = psutil.Process(connection.pid).cmdline()
                if "--database" not in command:
                    return f" by process {connection.pid} (`{' '.join(command)[:100]}`)"
                process_folder = Path(command[command.index("--database") + 1]).parent
                server_pid = _find_server(process_folder)
                run_path = process_folder.with_name(process_folder.name.removesuffix(".flower"))
                return None if server_pid is None else f" by process {server_pid}, which serves {run_path}"
    return " by a process of another user"


def _find_server(process_folder: Path) -> int | None:
    """Find the living process that uses the folder of a server; None if there is none."""
    holder = read_holder(process_folder)
    return int(holder["pid"]) if holder and is_in_use(process_folder) else None
