"""Files of keys: finds required files, reads the authority, writes atomically."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ...core.errors import ConfigError
from ...core.io.atomic_files import as_checkpoint_error, sync_folder
from ...core.io.private_files import refuse_readable

AUTHORITY_DAYS = 3650
"""Lifetime of the authority in days, and thus the longest lifetime of a certificate or client's key that it signs."""

PRIVATE_MODE = 0o600
"""Mode of a file that only its owner may read."""


def find_key_files(folder: Path, *names: str) -> list[Path]:
    """Absolute paths of files in a folder; raises ConfigError if one is missing."""
    paths = [folder.absolute() / name for name in names]
    missing_names = [path.name for path in paths if not path.is_file()]
    if missing_names:
        raise ConfigError(
            f"{folder} has no file {', '.join(missing_names)}. The keys of a server are the folder `server`, "
            "those of client 3 the folder `client-3` of what was made for the federation. Keys of an earlier "
            "release lack orders.key and orders.pub: make new ones by `fedlowrank keys`."
        )
    return paths


def read_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Read key and certificate of the authority; raises ConfigError if a file is missing, or they do not match."""
    (key_path,) = find_key_files(folder, "ca.key")
    (path,) = find_key_files(folder / "server", "ca.crt")
    refuse_readable(key_path)
    key, certificate = read_key_and_certificate(key_path, path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_path} is no key of an elliptic curve. Restore it from a copy.")
    return key, certificate


def read_key_and_certificate(
    key_path: Path, certificate_path: Path
) -> tuple[PrivateKeyTypes, x509.Certificate]:
    """Read a private key and its certificate.

    Raises:
        ConfigError: if a file holds something else, or the two do not belong together; the message names both files.
        CheckpointError: if a file cannot be read.
    """
    with as_checkpoint_error(f"cannot read {key_path}"):
        content = key_path.read_bytes()
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{key_path} is no private key that can be read ({error}). Restore it from a copy."
        ) from error
    certificate = read_certificate(certificate_path)
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"{key_path} is not the key of {certificate_path}. Put the two of one make together."
        )
    return key, certificate


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate.

    Raises:
        ConfigError: if the file is no certificate; the message names it.
        CheckpointError: if the file cannot be read.
    """
    with as_checkpoint_error(f"cannot read {path}"):
        content = path.read_bytes()
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no certificate that can be read ({error}). Restore it from a copy, or ask the server's operator for it."
        ) from error


def check_days(days: int) -> None:
    """Refuse a lifetime that is not between 1 day and that of the authority."""
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ConfigError(f"a certificate or key lives between 1 and {AUTHORITY_DAYS} days; days is {days}")


def write_key_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically, with its final mode from the beginning; it is on the disk on return."""
    temporary_path = path.with_name(f"{path.name}.new")
    with as_checkpoint_error(f"cannot write {path}"):
        temporary_path.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
        sync_folder(path.parent)
