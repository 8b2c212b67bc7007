"""Certificates and keys of a federation: which clients may join, and how the server proves its identity.

The server shows a certificate, signed by an authority that is made here and given to every client. A client
proves its identity by a signature: its public key is registered at the server. Its private key is made on its
own machine (:mod:`..enrollment`) and never leaves it, or, for a trial, is made here with all others. The
authority also signs the roster, which tells all clients each other's keys and their expiry dates.

FOLDER/ca.key         signs certificates of the server, and the roster; stays with the person who made the folder
FOLDER/server/        for the server's machine: ca.crt, server.pem, server.key, clients/3.pub for client 3,
                      roster.json, and orders.key, which signs orders to clients, with its public half orders.pub
FOLDER/client-3/      for the machine of client 3: ca.crt, orders.pub, roster.json; client.key if made here
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...core.errors import ConfigError
from ...core.io.atomic_files import as_checkpoint_error
from ...core.io.private_files import refuse_readable
from ..enrollment.key_files import (
    AUTHORITY_DAYS,
    PRIVATE_MODE,
    check_days,
    find_key_files,
    read_authority,
    read_key_and_certificate,
    write_key_file,
)
from ..enrollment.roster import ROSTER_FILE, KeyRoster, strip_key_comment, update_roster

logger = logging.getLogger(__name__)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True)
class ServerKeys:
    """Paths of the files on the machine that runs the server.

    Attributes:
        authority: certificate of the authority that signed the server's certificate.
        certificate: certificate of the server.
        key: private key of the certificate.
        clients: public key of every client that may join, by client.
        orders: private key that signs orders to clients.
    """

    authority: Path
    certificate: Path
    key: Path
    clients: dict[int, Path]
    orders: Path

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """Find the files in the folder ``server``.

        Keys that have expired according to the roster are left out. Without a roster, no key expires.

        Raises:
            ConfigError: if a file is missing or misnamed, others can read the folder or a private key in it, the server's
                key and certificate do not belong together, or the roster is not signed by the authority or has another
                key of a client.
        """
        names = ("ca.crt", "server.pem", "server.key", "orders.key")
        authority, certificate, key, order_key = find_key_files(folder, *names)
        refuse_readable(folder, key, order_key)
        # after half a copy, the web server would report it by a traceback
        read_key_and_certificate(key, certificate)
        public_keys = sorted((folder.absolute() / "clients").glob("*.pub"))
        misnamed_path = next(
            (path for path in public_keys if not re.fullmatch(r"0|[1-9][0-9]*", path.stem)), None
        )
        if misnamed_path is not None:
            raise ConfigError(
                f"{misnamed_path} is not named by the number of a client, as in 3.pub. Rename or remove it."
            )
        key_paths = {int(path.stem): path for path in sorted(public_keys, key=lambda path: int(path.stem))}
        roster_path = folder / ROSTER_FILE
        entries = KeyRoster.read(roster_path, authority).clients if roster_path.exists() else {}
        for client_id, path in [*key_paths.items()]:
            entry = entries.get(client_id)
            if entry is None:
                if entries:
                    logger.info("%s is in no roster: other clients cannot know of it", path)
            elif entry.key != strip_key_comment(path.read_text(encoding="utf-8")):
                raise ConfigError(
                    f"{path} is not the key of client {client_id} in {roster_path}. Revoke the client and enter it again "
                    "where `ca.key` lies, and bring the folder `server` from there."
                )
            elif entry.has_expired():
                end_date = f"{entry.expires:%Y-%m-%d}"
                logger.info(
                    f"the key of client {client_id} ended on {end_date}; it is refused until it is prolonged"
                )
                del key_paths[client_id]
        return cls(authority, certificate, key, key_paths, order_key)


@dataclass(frozen=True)
class ClientKeys:
    """Paths of the files on the machine that runs one client.

    Attributes:
        authority: certificate of the authority that signed the server's certificate.
        key: private key of the client.
        orders: public key that verifies the server's orders.
    """

    authority: Path
    key: Path
    orders: Path

    @property
    def roster(self) -> Path:
        """The roster beside the key, if there is one."""
        return self.key.with_name(ROSTER_FILE)

    @classmethod
    def read(cls, folder: Path) -> ClientKeys:
        """Find the files in a folder such as ``client-3``.

        Raises:
            ConfigError: if a file is missing, or others can read the folder or its private key.
        """
        authority, key, order_key = find_key_files(folder, "ca.crt", "client.key", "orders.pub")
        refuse_readable(folder, key)
        return cls(authority, key, order_key)


def make_keys(folder: Path, client_count: int, hosts: Sequence[str], days: int = 365) -> None:
    """Make the keys of a federation with clients 0, 1, ..., for a trial: the caller knows all private keys.

    Args:
        folder: folder to make; the module's description lists its files.
        client_count: number of clients; 0 if each makes its own key (:mod:`..enrollment.key_request`).
        hosts: names and IP addresses of the server, without a port; localhost, 127.0.0.1 and ::1 are always
            added.
        days: lifetime of the server's certificate and of the clients' keys in days, at most :data:`AUTHORITY_DAYS`.

    Raises:
        ConfigError: if the folder exists, or an argument is not as described. Nothing is written then.
        CheckpointError: if the disk is full; the folder is then removed.
    """
    if client_count < 0:
        raise ConfigError(f"a federation cannot have {client_count} clients; 0 if each makes its own key")
    names = _parse_hosts(hosts)
    check_days(days)
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already, and keys are never overwritten. Choose another folder; to add a "
            "client or to renew the server's certificate, say so."
        )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, mode=0o700)
    try:
        _fill_folder(folder, client_count, names, days)
    except BaseException:
        # a part of the keys is of no use, and would be in the way of the next attempt
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fill_folder(folder: Path, client_count: int, names: list[x509.GeneralName], days: int) -> None:
    """Write the keys of a federation into an empty folder."""
    with as_checkpoint_error(f"cannot make {folder / 'server'}"):
        (folder / "server").mkdir(mode=0o700)
        (folder / "server" / "clients").mkdir()
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedlowrank authority")])
    authority = (
        _build_certificate(subject, subject, key, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_key_file(folder / "ca.key", _to_pem(key), PRIVATE_MODE)
    write_key_file(folder / "server" / "ca.crt", authority.public_bytes(Encoding.PEM))
    order_key = ed25519.Ed25519PrivateKey.generate()
    write_key_file(folder / "server" / "orders.key", _to_pem(order_key), PRIVATE_MODE)
    write_key_file(folder / "server" / "orders.pub", _to_openssh(order_key))
    _certify(folder, key, authority, names, days)
    for client_id in range(client_count):
        _make_client_key(folder, client_id)
    update_roster(folder, dict.fromkeys(range(client_count), days))


def add_client(folder: Path, client_id: int, days: int = 365) -> bool:
    """Make the key of one more client, read at the server's next start.

    Args:
        folder: folder made by :func:`make_keys`.
        client_id: identifier of the client.
        days: lifetime of the key in days.

    Returns:
        Whether the client was entered into the roster, which needs ``ca.key``.

    Raises:
        ConfigError: if the client already has a key, or an argument is not as described.
    """
    check_days(days)
    if client_id < 0:
        raise ConfigError(f"clients are numbered from 0; client is {client_id}")
    _make_client_key(folder, client_id)
    return update_roster(folder, {client_id: days})


def _make_client_key(folder: Path, client_id: int) -> None:
    authority, order_key = find_key_files(folder / "server", "ca.crt", "orders.pub")
    client_folder, public_path = (
        folder / f"client-{client_id}",
        folder / "server" / "clients" / f"{client_id}.pub",
    )
    existing_path = next((path for path in (client_folder, public_path) if path.exists()), None)
    if existing_path is not None:
        raise ConfigError(
            f"{existing_path} exists already, and keys are never overwritten. Remove it to give the client a new key"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    with as_checkpoint_error(f"cannot make {client_folder}"):
        client_folder.mkdir(mode=0o700)
        public_path.parent.mkdir(exist_ok=True)
    write_key_file(client_folder / "ca.crt", authority.read_bytes())
    write_key_file(client_folder / "orders.pub", order_key.read_bytes())
    private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_key_file(client_folder / "client.key", private_bytes, PRIVATE_MODE)
    write_key_file(public_path, _to_openssh(key))


def revoke_client(
    folder: Path, client_id: int, reason: Literal["revoked", "expired"] = "revoked"
) -> tuple[Path, bool]:
    """Move a client's public key away, so that the server refuses the client from now on, even if it is running.

    Args:
        folder: folder made by :func:`make_keys`, or its subfolder ``server``.
        client_id: identifier of the client. :func:`add_client` makes a new key once the client's old folder is removed.
        reason: name of the folder to which the key is moved. A key that was revoked is never accepted again.

    Returns:
        The new path of the public key, and whether the client was removed from the roster, which needs ``ca.key``.

    Raises:
        ConfigError: if the server has no key of the client.
        CheckpointError: if the key cannot be moved.
    """
    server_folder = folder / "server" if (folder / "server").is_dir() else folder
    public_path = server_folder / "clients" / f"{client_id}.pub"
    if not public_path.is_file():
        client_ids = sorted(int(p.stem) for p in public_path.parent.glob("*.pub") if p.stem.isdigit())
        raise ConfigError(
            f"{server_folder} has no public key of client {client_id}. It has keys of clients {client_ids}."
        )
    target_folder = server_folder / reason
    number = next(i for i in range(1, 10**6) if not (target_folder / f"{client_id}-{i}.pub").exists())
    with as_checkpoint_error(f"cannot move {public_path}"):
        target_folder.mkdir(exist_ok=True)
        new_path = public_path.rename(target_folder / f"{client_id}-{number}.pub")
    return new_path, update_roster(folder)


def find_expired_clients(folder: Path) -> list[int]:
    """Clients whose public keys are in the folder ``server`` and have expired according to its roster."""
    if not (folder / ROSTER_FILE).exists():
        return []
    entries = KeyRoster.read(folder / ROSTER_FILE, folder / "ca.crt").clients
    client_ids = {int(path.stem) for path in (folder / "clients").glob("*.pub") if path.stem.isdigit()}
    return [
        client_id
        for client_id, entry in sorted(entries.items())
        if client_id in client_ids and entry.has_expired()
    ]


def name_revoked(server_folder: Path, key: str) -> str:
    """Name the client of a revoked public key, for logs; ``server_folder`` is the server's part of the keys."""
    for path in (server_folder / "revoked").glob("*.pub"):
        if path.read_text(encoding="utf-8").strip() == key:
            return f"client {path.stem.partition('-')[0]}"
    return "a client whose public key was removed"


def renew_server(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Replace the server's certificate and key by new ones of the same authority; clients need no change.

    Args:
        folder: folder made by :func:`make_keys`, including ``ca.key``.
        hosts: names and IP addresses of the server; empty to keep the old ones.
        days: lifetime of the certificate in days.

    Raises:
        ConfigError: if a file is missing, an argument is not as described, or the authority has expired.
    """
    check_days(days)
    key, authority = read_authority(folder)
    if authority.not_valid_after_utc <= _now():
        raise ConfigError(
            f"the authority of {folder} ended on {authority.not_valid_after_utc:%Y-%m-%d}. Make new keys, "
            "and give every client its new folder."
        )
    names = _parse_hosts(hosts) if hosts else _read_names(folder / "server" / "server.pem")
    _certify(folder, key, authority, names, days)


def _read_names(path: Path) -> list[x509.GeneralName]:
    """Names and IP addresses of a certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"{path} does not say for which hosts it is ({error}); name them by --host"
        ) from error


def _certify(
    folder: Path,
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    names: list[x509.GeneralName],
    days: int,
) -> None:
    """Write a new key and certificate of the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedlowrank server")])
    days_left = (authority.not_valid_after_utc - _now()).total_seconds() / 86400
    certificate = (
        _build_certificate(subject, authority.subject, key, signer, min(days, days_left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA384())
    )
    # key and certificate belong together, so each replaces its predecessor atomically, and the certificate comes last
    write_key_file(folder / "server" / "server.key", _to_pem(key), PRIVATE_MODE)
    write_key_file(folder / "server" / "server.pem", certificate.public_bytes(Encoding.PEM))


def _build_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.CertificateBuilder:
    issue_time = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # the clocks of organizations differ
        .not_valid_before(issue_time - datetime.timedelta(days=1))
        .not_valid_after(issue_time + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _make_key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _parse_hosts(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Parse the hosts into names and IP addresses, without duplicates."""
    return [_parse_host(host) for host in dict.fromkeys([*_LOCAL_HOSTS, *hosts])]


def _parse_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        # a text that resembles an address but is none would pass as a name that can never be reached
        labels = host.split(".")
        if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
            raise ConfigError(
                f"{host!r} is neither the name of a machine nor an IP address. Give names and addresses as "
                "in fl.example.org, 192.0.2.7 or 2001:db8::7, without scheme or port."
            ) from None
        return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _to_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _to_openssh(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """The public half of a key as one line, in OpenSSH's format."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
