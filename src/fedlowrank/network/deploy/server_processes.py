"""The SuperLink of the server and the SuperNode of a client.

Flower's commands are called for their JSON output; nothing here imports Flower.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...core.io.atomic_files import write_atomically, write_json
from ..messages import to_one_line
from . import guard
from .address_checks import make_listen_error
from .flower_app import Value, as_toml
from .flower_process import (
    FlowerProcess,
    NewLines,
    ProcessError,
    describe_full_disk,
    find_free_port,
    listen,
)
from .keys import ClientKeys, ServerKeys

WORKING_FILE = "working"
"""Name of a file in a node's home that exists while the node answers a message."""
NO_MESSAGES = "the server gives no messages"
"""Start of a node's log message about a server that does not let it fetch messages."""
_PROBLEM = re.compile(
    r"\d\d:\d\d:\d\d "
    rf"((?:{NO_MESSAGES}|its folder cannot be read or written|failed: CheckpointError|no reason is sent): .*)"
)
"""Lines of a node's log that a person of its site must see. Other errors may contain data, and stay in the private folder."""
_FULL_DISK_TEXTS = ("disk is full", "No space left on device")
"""Texts of SQLite and of the operating system."""
_CONNECTION = "federation"
_REFUSAL = re.compile(
    r"Failed to initialize the connection to the SuperLink\.\n(.*?)\n+The SuperNode could not", re.DOTALL
)
_ANSWER_SECONDS = 120
_NOT_YET_VALID = 9
"""X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL."""


class RunStatus(NamedTuple):
    """The status of a run, such as running or finished:failed, and its reason in Flower's words."""

    status: str
    details: str

    @property
    def is_finished(self) -> bool:
        """Whether the run is over."""
        return self.status.startswith("finished")

    @property
    def is_completed(self) -> bool:
        """Whether the run ended without an error."""
        return self.status == "finished:completed"


class SuperLink(FlowerProcess):
    """The server's process, to which clients connect. As a context manager it is started and closed.

    Its clients, runs and pending messages are stored in its home, so that it can be restarted. Calls other
    than clients' need a token that only this object and its subprocesses have; see :mod:`.guard`.

    Args:
        process_folder: folder of the process.
        keys: keys for TLS and registered clients; None for trials on one machine, in which everyone may join and
            everything is readable.
        host: address to listen on; ``0.0.0.0`` for all addresses of this machine.
        port: port to listen on, or None for a free one.
        variables: environment variables of the process and of the ServerApp.
    """

    def __init__(
        self,
        process_folder: Path,
        keys: ServerKeys | None,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = keys
        self.host = host
        self.port = find_free_port(host) if port is None else port
        # address at which a process of this machine reaches it
        local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        address = f"[{local_host}]:{self.port}" if ":" in local_host else f"{local_host}:{self.port}"
        super().__init__(process_folder, "superlink", address, variables)
        # only its subprocesses get the token
        self.variables[guard.TOKEN_VARIABLE] = secrets.token_hex(32)
        self._database = self.process_folder / "superlink.db"
        self._registered = self.process_folder / "registered.json"
        self._keys_changed = 0
        if keys is not None:
            self.variables[guard.CLIENT_KEYS] = str(keys.authority.absolute().parent / "clients")
            self.variables[guard.CLIENT_NODES] = str(self._registered)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, seconds: float = 60.0) -> None:
        """Start the process and wait until it answers, at most ``seconds``.

        Raises:
            ProcessError: if it does not start, or its port is in use.
            CheckpointError: if its home cannot be written.
        """
        self._prepare()
        try:
            # the system frees the port of a killed process a moment later
            listen(self.host, self.port, 20.0 if self.ended_orphans else 0.0).close()
        except OSError as error:
            raise make_listen_error(self.host, self.port, error) from error
        if not self._database.exists():
            self._registered.unlink(missing_ok=True)
        security: dict[str, Value] = {"insecure": True}
        command = [*guard.make_command("flower-superlink"), "--database", str(self._database)]
        command += ["--host", self.host, "--port", str(self.port)]
        if self.keys is None:
            command += ["--insecure"]
        else:
            security = {"root-certificates": str(self.keys.authority)}
            command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(self.keys.authority)]
            command += ["--ssl-certfile", str(self.keys.certificate), "--ssl-keyfile", str(self.keys.key)]
        # the path at which Flower's commands look for it
        config_text = f"[superlink.{_CONNECTION}]\n{as_toml({'address': self.address, **security})}"
        write_atomically(self.process_folder / "config.toml", config_text.encode())
        self._launch(command)
        self._wait_until(self._is_answering, "it answered", seconds)

    def register(self, public_key: Path) -> int:
        """Register a client by the file of its public key, if it is not registered yet.

        Returns:
            Flower's number of the client.

        Raises:
            ProcessError: if Flower refuses the client.
        """
        key, node_ids = public_key.read_text(encoding="utf-8").strip(), self._read_known_keys()
        if key not in node_ids:
            node_ids[key] = int(self._flwr("supernode", "register", str(public_key.absolute()))["node-id"])
            write_json(self._registered, node_ids)
        return node_ids[key]

    def keep_only(self, public_keys: Iterable[Path]) -> list[str]:
        """Unregister all clients except those with these public keys; returns the keys of the unregistered ones."""
        node_ids, allowed_keys = self._read_known_keys(), set()
        for path in public_keys:
            # a key may be revoked meanwhile
            with contextlib.suppress(FileNotFoundError):
                allowed_keys.add(path.read_text(encoding="utf-8").strip())
        removed_keys = sorted(node_ids.keys() - allowed_keys)
        for key in removed_keys:
            self._flwr("supernode", "unregister", str(node_ids.pop(key)))
            write_json(self._registered, node_ids)
        return removed_keys

    def unregister_revoked(self) -> list[str]:
        """Unregister the clients whose public keys were removed since the last call; returns these keys.

        The guard refuses them as soon as they are revoked. Unregistering them keeps rounds from waiting for them.
        """
        if self.keys is None:
            return []
        change_time = (self.keys.authority.parent / "clients").stat().st_mtime_ns
        if change_time == self._keys_changed:
            return []
        removed_keys = self.keep_only(self.keys.clients.values())
        self._keys_changed = change_time
        return removed_keys

    def _read_known_keys(self) -> dict[str, int]:
        """Flower's number of every registered public key."""
        node_ids: dict[str, int] = (
            json.loads(self._registered.read_text(encoding="utf-8")) if self._registered.exists() else {}
        )
        return node_ids

    def submit(self, app_folder: Path) -> int:
        """Start a run of an app (:func:`.flower_app.write_app`); returns Flower's number of the run."""
        return int(self._flwr("run", str(app_folder.absolute()))["run-id"])

    def status(self, run_id: int) -> RunStatus:
        """The status of a run. The call takes a second of processor time.

        After a kill the SuperLink considers a run running for about a minute; stop such a run.
        """
        fields = self._flwr("list", "--run-id", str(run_id))["runs"][0]
        details = fields["status-details"]
        return RunStatus(fields["status"], "" if details == "N/A" else details)

    def stop(self, run_id: int) -> None:
        """Stop a run; raises ProcessError if there is no such run or it has ended."""
        self._flwr("stop", str(run_id))

    def read_disk_error(self) -> str:
        """Say that the disk of the process is full, by its free bytes or its log; "" if neither shows it."""
        # the run's own lines may quote what clients say about their disks
        lines = [
            line
            for line in self.tail(500).splitlines()
            if any(text in line for text in _FULL_DISK_TEXTS) and not line.startswith("fedlowrank: ")
        ]
        quote = f"{self.log} reports a full disk: {to_one_line(lines[-1])}" if lines else ""
        return describe_full_disk(self.process_folder) or quote

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Call one of Flower's commands and return its JSON output."""
        if not self.alive():
            raise ProcessError(f"the SuperLink does not run, so it cannot be asked. {self._read_log_end()}")
        try:
            completed_process = subprocess.run(
                [*guard.make_command("flwr"), *arguments, _CONNECTION, "--format", "json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self.variables,
                timeout=_ANSWER_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ProcessError(f"`flwr {arguments[0]}` had no answer within {_ANSWER_SECONDS} s") from None
        try:
            answer: dict[str, Any] = json.loads(completed_process.stdout)
        except ValueError:
            output = (completed_process.stdout + completed_process.stderr).strip()[-2000:]
            raise ProcessError(f"`flwr {arguments[0]}` gave no answer that can be read: {output}") from None
        if not answer.get("success"):
            raise ProcessError(
                f"`flwr {arguments[0]}` failed: {str(answer.get('error-message', answer)).strip()}"
            )
        return answer

    def _is_answering(self) -> bool:
        """Whether the process answers, with its guard."""
        host, _, port = self.address.rpartition(":")
        server_address = (host.strip("[]"), int(port))
        connection = http.client.HTTPConnection(*server_address, timeout=5)
        if self.keys is not None:
            tls_context = ssl.create_default_context(cafile=self.keys.authority)
            connection = http.client.HTTPSConnection(*server_address, timeout=5, context=tls_context)
        try:
            connection.request(
                "GET", guard.PROBE_PATH, headers={guard.TOKEN_HEADER: self.variables[guard.TOKEN_VARIABLE]}
            )
            status = connection.getresponse().status
        except ssl.SSLCertVerificationError as error:
            advice = "Make one with this host (`fedlowrank keys FOLDER --renew --host NAME`)."
            if error.verify_code == _NOT_YET_VALID:
                advice = "Set the clock of this machine, or of the one that made the certificate, and make it again there."
            raise ProcessError(
                f"the server's certificate is not good for {self.address}: {error.verify_message}. {advice}"
            ) from error
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if status != 204:
            raise ProcessError(
                f"the SuperLink at {self.address} would let everyone register clients and start runs: its "
                "guard is not installed, perhaps because this package does not know this release of Flower."
            )
        return True


class SuperNode(FlowerProcess):
    """A client's process, which connects to the server and answers messages; see :mod:`.node`.

    Args:
        process_folder: folder of the process.
        address: address of the server, such as ``fl.example.org:8000``.
        folder: folder of the client, made by :func:`..client.prepare`.
        keys: keys for TLS, and to prove the client's identity to the server; None for trials on one machine.
    """

    def __init__(
        self,
        process_folder: Path,
        address: str,
        folder: Path,
        keys: ClientKeys | None,
    ) -> None:
        super().__init__(process_folder, "supernode", address)
        self.folder = folder.absolute()
        self.keys = keys
        self._new_lines = NewLines(self.log)

    def start(self) -> None:
        """Start the process, even before the server: it connects when it can. Raises the errors of :meth:`SuperLink.start`."""
        self._prepare()
        command = [sys.executable, "-P", "-m", "fedlowrank.network.deploy.node", "--server", self.address]
        command += ["--folder", str(self.folder), "--home", str(self.process_folder)]
        if self.keys is not None:
            command += ["--authority", str(self.keys.authority), "--key", str(self.keys.key)]
        self._launch(command)

    def read_node_id(self) -> int | None:
        """Read the node's number at the server; None until it has connected."""
        if self.pid is None:
            return None
        with self.log.open("rb") as file:
            file.seek(self._begin)
            match = re.search(rb"SuperNode ID: (\d+)\s", file.read(1 << 16))
        return int(match[1]) if match else None

    def read_refusal(self) -> str:
        """Read why the last start reached no server; "" if the log has no reason."""
        if self.pid is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            match = _REFUSAL.search(file.read(1 << 16).decode(errors="replace"))
        if match is None:
            return ""
        reason = _explain_certificate(to_one_line(match[1]))
        if reason.endswith("Failed to activate SuperNode."):
            return f"{reason} Another process uses this key, on this machine or another, or one was killed less than a minute ago"
        return reason

    def read_problems(self) -> list[str]:
        """Read the problems that the node has logged since the last call, or since its start."""
        if self.pid is None:
            return []
        self._new_lines.offset = max(self._new_lines.offset, self._begin)
        lines = [line.decode(errors="replace").rstrip() for line in self._new_lines.read()]
        return [
            _explain_certificate(to_one_line(match[1], 1000))
            for line in lines
            if (match := _PROBLEM.fullmatch(line))
        ]

    def is_working(self) -> bool:
        """Whether the node is answering a message now."""
        return self.alive() and (self.process_folder / WORKING_FILE).exists()


def _explain_certificate(reason: str) -> str:
    """Add what to do to the reason of an error of TLS, if the server's certificate is refused."""
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return reason
    if "not yet valid" in reason:
        return f"{reason}. The clock of this machine, or of the one that made the server's certificate, is wrong: set it"
    return (
        f"{reason}. The authority of --keys did not sign the certificate of this server, or the certificate is for "
        "another host or has expired: check --server, and ask the server's operator for the current ca.crt"
    )
