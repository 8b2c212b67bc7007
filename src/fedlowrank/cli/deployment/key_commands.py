"""The command ``fedlowrank keys``, and the use of keys by ``serve`` and ``join``."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from rich.table import Table

from ...core.errors import ConfigError, FedlowrankError
from ...network.deploy.keys import (
    ClientKeys,
    add_client,
    find_expired_clients,
    make_keys,
    renew_server,
    revoke_client,
)
from ...network.enrollment.accept import PUBLIC_FILES, accept_request, prolong_client
from ...network.enrollment.key_files import read_certificate
from ...network.enrollment.key_request import (
    PASSPHRASE_VARIABLE,
    REQUEST_FILE,
    load_client_key,
    needs_passphrase,
    request_key,
)
from ...network.enrollment.roster import ROSTER_FILE, KeyRoster, compute_fingerprint
from ..terminal import OUT, say

logger = logging.getLogger(__name__)

LOOK = 60.0
"""Seconds between two checks for expired keys."""


def keys(
    folder: Path,
    clients: int,
    hosts: Sequence[str],
    days: int,
    add: int | None,
    revoke: int | None,
    renew: bool,
    request: int | None = None,
    passphrase: bool = False,
    accept: Path | None = None,
    fingerprint: str = "",
    roster: bool = False,
    prolong: int | None = None,
) -> int:
    """Make, request, accept, prolong, revoke, renew or show keys."""
    values_by_option = {
        "--add": add,
        "--revoke": revoke,
        "--prolong": prolong,
        "--request": request,
        "--accept": accept,
    }
    options = [name for name, value in values_by_option.items() if value is not None]
    options += [name for name, value in {"--renew": renew, "--roster": roster}.items() if value]
    if len(options) > 1:
        raise ConfigError(f"{' and '.join(options)} exclude each other; give one at a time")
    for name, value, required_option in (
        ("--passphrase", passphrase, "--request"),
        ("--fingerprint", fingerprint, "--accept"),
    ):
        if value and options != [required_option]:
            raise ConfigError(f"{name} does nothing without {required_option}")
    if request is not None:
        _request(folder, request, passphrase)
    elif accept is not None:
        _accept(folder, accept, days, fingerprint)
    elif roster:
        _show_roster(folder)
    elif add is not None:
        is_entered = add_client(folder, add, days)
        say(f"{folder / f'client-{add}'}: give it to client {add} alone; restart `fedlowrank serve`")
        _say_unsigned(is_entered, f"--add {add}")
    elif revoke is not None:
        revoked_path, is_entered = revoke_client(folder, revoke)
        say(
            f"{revoked_path}: the key of client {revoke} is revoked: a server that reads this folder refuses it from now on"
        )
        _say_unsigned(is_entered, f"--revoke {revoke}")
    elif prolong is not None:
        prolong_client(folder, prolong, days)
        say(
            f"the key of client {prolong} lives {days} days from now on; bring {folder / 'server' / ROSTER_FILE} to the server"
        )
    elif renew:
        renew_server(folder, hosts, days)
        say(f"{folder / 'server'}: has a new certificate for {days} days; clients notice nothing; "
            "restart `fedlowrank serve`, with --resume if its run goes on")  # fmt: skip
    else:
        _make(folder, clients, hosts, days)
    return 0


def _make(folder: Path, client_count: int, hosts: Sequence[str], days: int) -> None:
    make_keys(folder, client_count, hosts, days)
    say(f"{folder / 'ca.key'}: stays with you; it enters clients and renews the server's certificate")
    say(
        f"{folder / 'server'}: stays with the server (fedlowrank serve --keys {shlex.quote(str(folder / 'server'))})"
    )
    say(
        f"the authority's fingerprint, for every client to compare: {_authority(folder / 'server' / 'ca.crt')}"
    )
    if not client_count:
        say(f"a client makes its key by `fedlowrank keys client-N --request N` and sends {REQUEST_FILE}; enter it by "
            f"`fedlowrank keys {shlex.quote(str(folder))} --accept {REQUEST_FILE}`")  # fmt: skip
        return
    say(f"{folder / 'client-0'} ... client-{client_count - 1}: give each to its client alone")
    say(
        "for a trial: the clients' private keys were made here, so whoever has or had this folder can act as every "
        "client. Organizations make their own: `fedlowrank keys FOLDER --clients 0`, then --request and --accept"
    )


def _request(folder: Path, client_id: int, asks_passphrase: bool) -> None:
    passphrase = _new_passphrase() if asks_passphrase else ""
    path_of_request = request_key(folder, client_id, passphrase)
    say(f"{folder / 'client.key'}: your private key; it never leaves this machine")
    say(f"{folder / REQUEST_FILE}: send it to the operator of the server, by any way")
    say(f"read your key's fingerprint aloud to the operator: {path_of_request.fingerprint}")
    say(f"then put what the operator gives you ({', '.join(PUBLIC_FILES)}) into {folder}, and compare the authority's "
        f"fingerprint aloud: `fedlowrank keys {shlex.quote(str(folder))} --roster`")  # fmt: skip


def _accept(folder: Path, path: Path, days: int, expected_fingerprint: str) -> None:
    request, certificate = accept_request(folder, path, days, expected_fingerprint)
    say(
        f"client {request.client} is entered for {days} days; its key has the fingerprint {request.fingerprint}"
    )
    if not expected_fingerprint:
        say(f"let client {request.client} read its fingerprint aloud. If it differs: "
            f"`fedlowrank keys {shlex.quote(str(folder))} --revoke {request.client}`")  # fmt: skip
    say(
        f"{certificate}: give these files to client {request.client}; they are public, and belong beside its client.key"
    )
    say(f"{folder / 'server'}: bring {ROSTER_FILE} and clients/{request.client}.pub in it to the server, and restart "
        "`fedlowrank serve`, with --resume if its run goes on")  # fmt: skip
    say(f"the authority's fingerprint, for the client to compare: {_authority(folder / 'server' / 'ca.crt')}")


def _say_unsigned(is_entered: bool, option: str) -> None:
    if not is_entered:
        say(f"the roster is as before, for `ca.key` is not here: do {option} also where it lies")


def _show_roster(folder: Path) -> None:
    """Print the roster in the folder of an operator, a server or a client."""
    key_folder = folder / "server" if (folder / "server").is_dir() else folder
    authority = key_folder / "ca.crt"
    for path in (authority, key_folder / ROSTER_FILE):
        if not path.is_file():
            raise ConfigError(f"{key_folder} has no {path.name}; the server's operator gives it to you")
    key_roster = KeyRoster.read(key_folder / ROSTER_FILE, authority)
    table = Table("client", "fingerprint of its key", "ends (UTC)")
    for client_id, entry in sorted(key_roster.clients.items()):
        expiry_text = f"{entry.expires:%Y-%m-%d %H:%M}{' (ended)' if entry.has_expired() else ''}"
        table.add_row(str(client_id), entry.fingerprint, expiry_text)
    OUT.print(table)
    say(
        "all sites compare by phone, and find the same digits if they have the same authority and the same keys:"
    )
    say(f"authority: {_authority(authority)}")
    say(f"roster: {key_roster.number}")


def _authority(path: Path) -> str:
    """Fingerprint of the authority's key."""
    key = read_certificate(path).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is a certificate of another kind; make keys by `fedlowrank keys`")
    return compute_fingerprint(key)


def _new_passphrase() -> str:
    if passphrase := os.environ.get(PASSPHRASE_VARIABLE):
        return passphrase
    if not sys.stdin.isatty():
        raise ConfigError(f"--passphrase asks on a terminal, and there is none; set {PASSPHRASE_VARIABLE}")
    passphrase = getpass.getpass("passphrase of the key: ")
    if not passphrase or getpass.getpass("again: ") != passphrase:
        raise ConfigError("the two differ, or are empty; no key was made")
    return passphrase


def check_own_key(keys: ClientKeys, client_id: int) -> str:
    """Read the private key of a client, and compare it with the roster in the same folder.

    Returns:
        The passphrase of the key, which is asked for; "" if the key needs none.

    Raises:
        ConfigError: if the key cannot be read, the roster is not the authority's, or it has another key for the
            client.
    """
    passphrase = ""
    if needs_passphrase(keys.key.read_bytes()):
        passphrase = os.environ.get(PASSPHRASE_VARIABLE, "")
        if not passphrase and sys.stdin.isatty():
            passphrase = getpass.getpass(f"passphrase of {keys.key}: ")
    key = load_client_key(keys.key, passphrase)
    roster = keys.roster
    if not roster.exists():
        return passphrase
    key_roster = KeyRoster.read(roster, keys.authority)
    fingerprint = compute_fingerprint(key.public_key())
    entry = key_roster.clients.get(client_id)
    if entry is None or entry.fingerprint != fingerprint:
        client_ids = [
            n for n, other_entry in key_roster.clients.items() if other_entry.fingerprint == fingerprint
        ]
        owner_text = f"is that of client {client_ids[0]}" if client_ids else "is not in it"
        raise ConfigError(
            f"{roster} has no such key of client {client_id}: the key here {owner_text}. Pass the number and the folder of the "
            "same client, or ask the server's operator for the roster of now"
        )
    if entry.has_expired():
        logger.info(
            f"by {roster} the key of client {client_id} ended on {entry.expires:%Y-%m-%d}; ask the operator to prolong it"
        )
    logger.info(f"authority: {_authority(keys.authority)}; roster: {key_roster.number}")
    return passphrase


@contextlib.contextmanager
def refusing_expired(folder: Path | None) -> Iterator[None]:
    """Revoke keys that expire within the block; ``folder`` is None if keys are not checked."""
    stop = threading.Event()

    def look() -> None:
        assert folder is not None
        while not stop.wait(LOOK):
            try:
                for client_id in find_expired_clients(folder):
                    revoked_path, _ = revoke_client(folder, client_id, "expired")
                    logger.info(
                        f"the key of client {client_id} has ended; it is refused, and lies in {revoked_path}"
                    )
            except FedlowrankError as error:
                # the operator may be copying new files; the next check finds them
                logger.info(f"keys that have ended cannot be taken away: {error}")

    if folder is None:
        yield
        return
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
