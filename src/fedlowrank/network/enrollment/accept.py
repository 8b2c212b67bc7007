"""The operator's part of keys that sites make themselves: registers public keys, and extends their lifetime."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ...core.errors import ConfigError
from ...core.io.private_files import make_private_folder
from .key_files import check_days, find_key_files, write_key_file
from .key_request import KeyRequest
from .roster import ROSTER_FILE, strip_key_comment, update_roster

PUBLIC_FILES = ("ca.crt", "orders.pub", ROSTER_FILE)
"""Names of the files that a client needs beside its private key; all are public."""


def accept_request(
    folder: Path, path: Path, days: int = 365, expected_fingerprint: str = ""
) -> tuple[KeyRequest, Path]:
    """Register the public key of a request, or extend its lifetime if the client already has this key.

    Args:
        folder: folder made by :func:`..deploy.keys.make_keys`, with its ``ca.key``.
        path: path of the request.
        days: lifetime of the key in days.
        expected_fingerprint: fingerprint as the client read it aloud; "" skips the comparison.

    Returns:
        The request, and the folder of the files to give to the client.

    Raises:
        ConfigError: if the request is invalid or has another fingerprint, or the client has another key. Nothing is
            written then.
        CheckpointError: if a file cannot be written.
    """
    check_days(days)
    find_key_files(folder, "ca.key")
    server_folder = folder / "server"
    find_key_files(server_folder, *PUBLIC_FILES[:2])
    request = KeyRequest.read(path)
    if expected_fingerprint and re.sub(r"\D", "", expected_fingerprint) != request.fingerprint.replace(
        " ", ""
    ):
        raise ConfigError(
            f"{path} has the fingerprint {request.fingerprint}, not {expected_fingerprint}: it is not the request that the "
            "client made. Ask for it by another way."
        )
    public_path, client_folder = (
        server_folder / "clients" / f"{request.client}.pub",
        folder / f"client-{request.client}",
    )
    if public_path.exists() and strip_key_comment(public_path.read_text(encoding="utf-8")) != request.key:
        raise ConfigError(
            f"client {request.client} has another key, {public_path}. If it is to get this one instead, revoke that: "
            f"`fedlowrank keys {shlex.quote(str(folder))} --revoke {request.client}`"
        )
    for key_path in server_folder.glob("revoked/*.pub"):
        if strip_key_comment(key_path.read_text(encoding="utf-8")) == request.key:
            raise ConfigError(
                f"{path} has a key that was revoked, {key_path}. Ask client {request.client} to make another one, in "
                "another folder"
            )
    for key_path in server_folder.glob("clients/*.pub"):
        if key_path != public_path and strip_key_comment(key_path.read_text(encoding="utf-8")) == request.key:
            raise ConfigError(f"{path} has the key of client {key_path.stem}; a key belongs to one client")
    if (client_folder / "client.key").exists():
        raise ConfigError(
            f"{client_folder} holds a private key that was made here. Remove that folder, and revoke the key if it was used"
        )
    make_private_folder(client_folder)
    write_key_file(public_path, request.key.encode() + b"\n")
    update_roster(folder, {request.client: days})
    for name in PUBLIC_FILES:
        write_key_file(client_folder / name, (server_folder / name).read_bytes())
    return request, client_folder


def prolong_client(folder: Path, client_id: int, days: int) -> None:
    """Let a client's key expire ``days`` from now; raises ConfigError if there is no such key, or no ``ca.key``."""
    check_days(days)
    find_key_files(folder, "ca.key")
    server_folder = folder / "server"
    public_path = server_folder / "clients" / f"{client_id}.pub"
    if not public_path.is_file():
        revoked_keys = {path.read_text(encoding="utf-8") for path in server_folder.glob("revoked/*.pub")}
        expired_paths = sorted(
            (
                path
                for path in server_folder.glob(f"expired/{client_id}-*.pub")
                if path.read_text(encoding="utf-8") not in revoked_keys
            ),
            key=lambda path: path.stat().st_mtime,
        )
        advice = ""
        if expired_paths:
            advice = (
                f": it has expired, and a running server moved it to {expired_paths[-1]}. Move it back to {public_path}, "
                f"repeat --prolong {client_id}, and restart `fedlowrank serve`"
            )
        raise ConfigError(f"{server_folder} has no public key of client {client_id}{advice}")
    update_roster(folder, {client_id: days})
