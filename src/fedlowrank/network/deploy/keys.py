"""Certificates and keys of a federation: who may join, and how the server proves its identity.

The server shows a certificate, signed by an authority that is made here and given to every client. A client
proves its identity by a signature: its public key is registered at the server, and its private key never
leaves its machine. Client keys are not signed, so only a new certificate of the server needs the authority.

FOLDER/ca.key         signs certificates of the server; stays with the person who made the folder
FOLDER/server/        for the server's machine: ca.crt, server.pem, server.key, clients/3.pub for client 3
FOLDER/client-3/      for the machine of client 3: ca.crt, client.key
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...core.errors import ConfigError
from ...core.files import as_checkpoint_error

AUTHORITY_DAYS = 3650
"""Life of the authority, and so the longest life of a certificate that it signs."""
_PRIVATE = 0o600
_LOCAL = ("localhost", "127.0.0.1", "::1")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True)
class ServerKeys:
    """Files of the machine that runs the server.

    Attributes:
        authority: certificate that vouches for the server's.
        certificate: of the server.
        key: private key of the certificate.
        clients: public key of every client that may join, by the client's number.
    """

    authority: Path
    certificate: Path
    key: Path
    clients: dict[int, Path]

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """Find the files in the folder ``server``; raises ConfigError if one is missing or misnamed."""
        authority, certificate, key = _files(folder, "ca.crt", "server.pem", "server.key")
        public_keys = sorted((folder.absolute() / "clients").glob("*.pub"))
        strange = next((path for path in public_keys if not re.fullmatch(r"0|[1-9][0-9]*", path.stem)), None)
        if strange is not None:
            raise ConfigError(
                f"{strange} is not named by the number of a client, as in 3.pub. Rename or remove it."
            )
        clients = {int(path.stem): path for path in sorted(public_keys, key=lambda path: int(path.stem))}
        return cls(authority, certificate, key, clients)


@dataclass(frozen=True)
class ClientKeys:
    """Files of the machine that runs one client.

    Attributes:
        authority: certificate that vouches for the server's.
        key: private key of the client.
    """

    authority: Path
    key: Path

    @classmethod
    def read(cls, folder: Path) -> ClientKeys:
        """Find the files in a folder such as ``client-3``; raises ConfigError if one is missing."""
        return cls(*_files(folder, "ca.crt", "client.key"))


def make_keys(folder: Path, clients: int, hosts: Sequence[str], days: int = 365) -> None:
    """Make the keys of a federation with clients 0, 1, ...

    Args:
        folder: made by this; the module's description lists its files.
        clients: number of clients.
        hosts: names and IP addresses of the server, without a port; localhost, 127.0.0.1 and ::1 are always
            added.
        days: life of the server's certificate, at most :data:`AUTHORITY_DAYS`. Client keys do not expire.

    Raises:
        ConfigError: if the folder exists, or an argument is not as described. Nothing is written then.
        CheckpointError: if the disk is full.
    """
    if clients < 1:
        raise ConfigError(f"a federation needs at least 1 client; clients is {clients}")
    names = _names(hosts)
    _check_days(days)
    if folder.exists():
        raise ConfigError(
            f"{folder} exists already, and keys are never overwritten. Choose another folder; to add a "
            "client or to renew the server's certificate, say so."
        )
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "server" / "clients").mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedlowrank authority")])
    authority = (
        _certificate(subject, subject, key, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write(folder / "ca.key", _pem(key), _PRIVATE)
    _write(folder / "server" / "ca.crt", authority.public_bytes(Encoding.PEM))
    _certify(folder, key, authority, names, days)
    for client in range(clients):
        add_client(folder, client)


def add_client(folder: Path, client: int) -> None:
    """Make the key of one more client, read at the server's next start; ConfigError if it has one."""
    if client < 0:
        raise ConfigError(f"clients are numbered from 0; client is {client}")
    (authority,) = _files(folder / "server", "ca.crt")
    own, public = folder / f"client-{client}", folder / "server" / "clients" / f"{client}.pub"
    taken = next((path for path in (own, public) if path.exists()), None)
    if taken is not None:
        raise ConfigError(
            f"{taken} exists already, and keys are never overwritten. Remove it to give the client a new key"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    with as_checkpoint_error(f"cannot make {own}"):
        own.mkdir(mode=0o700)
        public.parent.mkdir(exist_ok=True)
    _write(own / "ca.crt", authority.read_bytes())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    _write(own / "client.key", private, _PRIVATE)
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def revoke_client(folder: Path, client: int) -> Path:
    """Move a client's public key away, so that the server rejects the client from its next start on.

    Args:
        folder: made by :func:`make_keys`, or its part ``server``.
        client: whose key it is. :func:`add_client` makes a new one once the client's old folder is removed.

    Returns:
        Where the public key is now.

    Raises:
        ConfigError: if the server has no key of the client.
        CheckpointError: if it cannot be moved.
    """
    server = folder / "server" if (folder / "server").is_dir() else folder
    public = server / "clients" / f"{client}.pub"
    if not public.is_file():
        known = sorted(int(p.stem) for p in public.parent.glob("*.pub") if p.stem.isdigit())
        raise ConfigError(f"{server} has no public key of client {client}. It has keys of clients {known}.")
    revoked = server / "revoked"
    number = next(i for i in range(1, 10**6) if not (revoked / f"{client}-{i}.pub").exists())
    with as_checkpoint_error(f"cannot move {public}"):
        revoked.mkdir(exist_ok=True)
        return public.rename(revoked / f"{client}-{number}.pub")


def renew_server(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Replace the server's certificate and key by new ones of the same authority; clients need no change.

    Args:
        folder: made by :func:`make_keys`, its ``ca.key`` included.
        hosts: names and IP addresses of the server; empty for the old ones.
        days: life of the certificate.

    Raises:
        ConfigError: if a file is missing, an argument is not as described, or the authority has expired.
    """
    _check_days(days)
    (key_path,) = _files(folder, "ca.key")
    (authority_path,) = _files(folder / "server", "ca.crt")
    key = load_pem_private_key(key_path.read_bytes(), None)
    authority = x509.load_pem_x509_certificate(authority_path.read_bytes())
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise ConfigError(f"{key_path} is not the key of {authority_path}. Put the two of one make together.")
    if authority.not_valid_after_utc <= _now():
        raise ConfigError(
            f"the authority of {folder} ended on {authority.not_valid_after_utc:%Y-%m-%d}. Make new keys, "
            "and give every client its new folder."
        )
    names = _names(hosts) if hosts else _names_of(folder / "server" / "server.pem")
    _certify(folder, key, authority, names, days)


def _names_of(path: Path) -> list[x509.GeneralName]:
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
    left = (authority.not_valid_after_utc - _now()).total_seconds() / 86400
    certificate = (
        _certificate(subject, authority.subject, key, signer, min(days, left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA384())
    )
    # the two belong together, so each replaces its predecessor whole, and the certificate last
    _write(folder / "server" / "server.key", _pem(key), _PRIVATE)
    _write(folder / "server" / "server.pem", certificate.public_bytes(Encoding.PEM))


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # clocks of organizations differ
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
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


def _names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """The hosts as names and IP addresses, without repetition."""
    return [_name(host) for host in dict.fromkeys([*_LOCAL, *hosts])]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        # what looks like an address but is none would pass as a name that nothing can ever reach
        labels = host.split(".")
        if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
            raise ConfigError(
                f"{host!r} is neither the name of a machine nor an IP address. Give names and addresses as "
                "in fl.example.org, 192.0.2.7 or 2001:db8::7, without scheme or port."
            ) from None
        return x509.DNSName(host)


def _check_days(days: int) -> None:
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ConfigError(f"a certificate lives between 1 and {AUTHORITY_DAYS} days; days is {days}")


def _files(folder: Path, *names: str) -> list[Path]:
    paths = [folder.absolute() / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{folder} has no file {', '.join(missing)}. The keys of a server are the folder `server`, "
            "those of client 3 the folder `client-3` of what was made for the federation."
        )
    return paths


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically, with a mode that it has from the beginning."""
    temporary = path.with_name(f"{path.name}.new")
    with as_checkpoint_error(f"cannot write {path}"):
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        temporary.replace(path)
