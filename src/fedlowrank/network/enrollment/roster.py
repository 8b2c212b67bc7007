"""The roster of a federation: public key, fingerprint and expiry date of every client, signed by the authority.

``roster.json`` lies beside the keys of the server and of every client. Sites that compare its number, or the
fingerprints in it, over a channel that the operator does not control, know that they were shown the same keys.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from ...core.errors import ConfigError
from ...core.io.atomic_files import read_json
from .key_files import read_authority, read_certificate, write_key_file

ROSTER_FILE = "roster.json"
"""Name of the file in the folders ``server`` and ``client-3``."""

_SIGNED_PREFIX = b"fedlowrank roster 1\n"


def compute_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Thirty digits in groups of five, to be read aloud; those of two keys are equal with a probability of 10⁻³⁰."""
    return group_digits(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def group_digits(content: bytes) -> str:
    """Thirty digits of the SHA-256 of bytes, in groups of five."""
    digits = f"{int.from_bytes(hashlib.sha256(content).digest()) % 10**30:030d}"
    return " ".join(digits[i : i + 5] for i in range(0, 30, 5))


def parse_public_key(text: str, source: object) -> ec.EllipticCurvePublicKey:
    """Parse a public key in OpenSSH's format; raises ConfigError, which names the source, if it is something else."""
    try:
        key = load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{source} is no public key that can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"{source} is a key of another kind; make keys by `fedlowrank keys`")
    return key


def strip_key_comment(text: str) -> str:
    """A public key in OpenSSH's format, without a comment."""
    return " ".join(text.split()[:2])


@dataclass(frozen=True)
class RosterEntry:
    """A client that may join.

    Attributes:
        key: public key of the client, in OpenSSH's format.
        expires: time at which the key expires (UTC).
    """

    key: str
    expires: datetime.datetime

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public key."""
        return compute_fingerprint(parse_public_key(self.key, "the roster"))

    def has_expired(self) -> bool:
        """Whether the key has expired, by the clock of this machine."""
        return self.expires <= datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class KeyRoster:
    """The clients that may join, by identifier."""

    clients: dict[int, RosterEntry]

    @property
    def number(self) -> str:
        """Thirty digits that are equal if all identifiers, keys and expiry dates are equal."""
        return group_digits(self._encode_content())

    def sign(self, authority: ec.EllipticCurvePrivateKey) -> bytes:
        """Sign the roster, and return the content of the file."""
        signature = authority.sign(_SIGNED_PREFIX + self._encode_content(), ec.ECDSA(hashes.SHA384()))
        return (
            json.dumps({"clients": self._make_table(), "signature": signature.hex()}, indent=1) + "\n"
        ).encode()

    @classmethod
    def read(cls, path: Path, authority: Path) -> KeyRoster:
        """Read a roster.

        Args:
            path: path of the file.
            authority: path of the certificate of the authority that signed it.

        Raises:
            ConfigError: if the file is not signed by the authority, is no roster, or the certificate is none.
            CheckpointError: if the file cannot be read.
        """
        table: dict[str, Any] = read_json(path, dict)
        key = read_certificate(authority).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{authority} is a certificate of another kind")
        try:
            roster = cls(
                {
                    int(n): _parse_entry(fields, f"{path}, client {n}")
                    for n, fields in table["clients"].items()
                }
            )
            signature = bytes.fromhex(table["signature"])
            key.verify(signature, _SIGNED_PREFIX + roster._encode_content(), ec.ECDSA(hashes.SHA384()))
            if table["clients"] != roster._make_table():
                raise ValueError("a fingerprint is not that of its key")
        except InvalidSignature:
            raise ConfigError(
                f"{path} is not signed by {authority}: it was changed, or the two are of different federations. Ask "
                "the server's operator for both files, and compare the fingerprints by phone."
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is no roster that can be read ({error}). Ask the operator for it."
            ) from error
        return roster

    def _encode_content(self) -> bytes:
        return json.dumps(self._make_table(), sort_keys=True, separators=(",", ":")).encode()

    def _make_table(self) -> dict[str, dict[str, str]]:
        return {
            str(number): {
                "key": entry.key,
                "fingerprint": entry.fingerprint,
                "expires": entry.expires.isoformat(timespec="seconds"),
            }
            for number, entry in sorted(self.clients.items())
        }


def _parse_entry(fields: dict[str, str], source: str) -> RosterEntry:
    parse_public_key(fields["key"], source)
    expiry_time = datetime.datetime.fromisoformat(fields["expires"])
    if expiry_time.tzinfo is None:
        raise ValueError("an end has no time zone")
    return RosterEntry(fields["key"], expiry_time)


def update_roster(folder: Path, days: Mapping[int, int] | None = None) -> bool:
    """Sign the roster of all clients whose public keys the server has, and write it to their folders here.

    Args:
        folder: folder made by :func:`..deploy.keys.make_keys`.
        days: new lifetimes of keys in days from now, by client; other expiry dates stay, and a key without one expires with
            the authority.

    Returns:
        Whether the roster was signed; only the folder with ``ca.key`` can do that.

    Raises:
        ConfigError: if a file is missing or invalid.
    """
    if not (folder / "ca.key").is_file():
        return False
    key, certificate = read_authority(folder)
    server_folder, latest_end = folder / "server", certificate.not_valid_after_utc
    path, current_time = (
        server_folder / ROSTER_FILE,
        datetime.datetime.now(datetime.UTC).replace(microsecond=0),
    )
    stored_entries = KeyRoster.read(path, server_folder / "ca.crt").clients if path.exists() else {}
    entries = {}
    for public_path in sorted((server_folder / "clients").glob("*.pub")):
        client_id, line = int(public_path.stem), strip_key_comment(public_path.read_text(encoding="utf-8"))
        parse_public_key(line, public_path)
        stored_entry, life = stored_entries.get(client_id), (days or {}).get(client_id)
        if life is not None:
            expiry_time = min(latest_end, current_time + datetime.timedelta(days=life))
        else:
            expiry_time = (
                stored_entry.expires if stored_entry is not None and stored_entry.key == line else latest_end
            )
        entries[client_id] = RosterEntry(line, expiry_time)
    content = KeyRoster(entries).sign(key)
    write_key_file(path, content)
    for client_id in entries:
        if (client_folder := folder / f"client-{client_id}").is_dir():
            write_key_file(client_folder / ROSTER_FILE, content)
    return True
