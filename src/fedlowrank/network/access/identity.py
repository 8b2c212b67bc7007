"""Identification of callers: registered clients, and the signature of a call, checked before its body is read."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

MAX_CLOCK_ERROR = 300.0
"""Largest difference in seconds between the clocks of a client and of the server, in either direction."""

MIN_SETTLED_AGE = 0.1
"""Age in seconds of a file's change beyond which a second change has another time stamp."""


class Caller(NamedTuple):
    """A client whose signature is valid.

    Attributes:
        client: identifier of the client; None on a server without keys.
        node: Flower's number of its node, for which alone it may act; None on a server without keys.
        key: public key of the client in PEM.
    """

    client: int | None
    node: int | None
    key: bytes

    def __str__(self) -> str:
        """The caller's name in logs."""
        return "a client" if self.client is None else f"client {self.client}"


class RefusedCallerError(Exception):
    """A call is refused; the text gives the reason.

    Args:
        reason: text for the caller, who has not proven an identity yet.
        client_id: identifier of the client that owns the key, or None if the key is unknown.
    """

    def __init__(self, reason: str, client_id: int | None = None) -> None:
        super().__init__(reason)
        self.client = client_id


class Member(NamedTuple):
    """A registered client: its identifier, Flower's number of its node, and its public key."""

    client: int
    node: int
    key: ec.EllipticCurvePublicKey


class Roster:
    """The registered clients, read again whenever a file changes, so that a removed key is refused at once.

    Args:
        folder: folder of the public keys, with a file ``3.pub`` for client 3.
        nodes_path: path of a JSON file with Flower's numbers of the public keys.
    """

    def __init__(self, folder: Path, nodes_path: Path) -> None:
        self.folder, self.nodes = folder, nodes_path
        self._members: dict[bytes, Member] = {}
        self._state: tuple[int, int] | None = None

    def get(self, key: bytes) -> Member | None:
        """Look up the client with a public key in PEM; None if no client has the key."""
        state = (_read_change_time(self.folder), _read_change_time(self.nodes))
        if state != self._state:
            self._members = self._read()
            # a second change in the same tick of the file system's clock would otherwise be missed
            self._state = state if max(state) < time.time_ns() - MIN_SETTLED_AGE * 1e9 else None
        return self._members.get(key)

    def _read(self) -> dict[bytes, Member]:
        members = {}
        node_ids = json.loads(self.nodes.read_text(encoding="utf-8")) if self.nodes.exists() else {}
        for path in self.folder.glob("*.pub"):
            # a key may be revoked while it is read or not registered yet, and a file may hold no key; neither admits a client
            with contextlib.suppress(OSError, ValueError, LookupError):
                line = path.read_text(encoding="utf-8").strip()
                key = load_ssh_public_key(line.encode())
                if isinstance(key, ec.EllipticCurvePublicKey):
                    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
                    members[pem] = Member(int(path.stem), int(node_ids[line]), key)
        return members


def allow_clocks() -> None:
    """Make Flower, which checks signatures too, accept clocks that differ by up to :data:`MAX_CLOCK_ERROR` seconds."""
    from flwr.superlink.routers.fleet import node_auth

    for name, seconds in (("SYSTEM_TIME_TOLERANCE", MAX_CLOCK_ERROR), ("TIMESTAMP_TOLERANCE", 0)):
        if not hasattr(node_auth, name):
            raise RuntimeError(f"this release of Flower has no {name}; install the one of constraints.txt")
        setattr(node_auth, name, seconds)


def _read_change_time(path: Path) -> int:
    """Time of the last change of a file or folder, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def identify_caller(headers: Iterable[tuple[bytes, bytes]], roster: Roster | None) -> Caller:
    """Check the signature of a call in the same way as Flower does after reading the body.

    Args:
        headers: headers of the call: a public key, a time, and the signature of the time.
        roster: registered clients; None if every key is accepted.

    Raises:
        RefusedCallerError: if a header is missing, the key is not registered, the clock differs too much, or
            the signature is wrong.
    """
    fields = {bytes(name).lower().decode("latin-1"): bytes(value) for name, value in headers}
    try:
        pem = b64decode(fields[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(fields[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        stamp = fields[TIMESTAMP_HEADER]
        signed_at = datetime.datetime.fromisoformat(stamp.decode("ascii"))
        member = None if roster is None else roster.get(pem)
        key = load_pem_public_key(pem) if roster is None else member and member.key
    except (KeyError, ValueError, UnsupportedAlgorithm) as error:
        raise RefusedCallerError("the call is not signed") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or signed_at.tzinfo is None:
        raise RefusedCallerError(
            "this server has no such key. It was revoked, or never accepted, or the server is still starting. "
            "Ask the server's operator whether the key is in `keys/server/clients`."
        )
    client_id = None if member is None else member.client
    try:
        key.verify(signature, stamp, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise RefusedCallerError("the signature is wrong", client_id) from None
    clock_error = (signed_at - datetime.datetime.now(datetime.UTC)).total_seconds()
    # checked last, so that callers without a key do not learn the server's time
    if abs(clock_error) >= MAX_CLOCK_ERROR:
        direction = "ahead of" if clock_error > 0 else "behind"
        raise RefusedCallerError(
            f"the clock of this client is {abs(clock_error):.0f} s {direction} the server's; {MAX_CLOCK_ERROR:.0f} s are "
            "allowed. Set it right, for instance by NTP, and start again.",
            client_id,
        )
    return Caller(client_id, None if member is None else member.node, pem)
