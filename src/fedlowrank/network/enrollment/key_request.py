"""A key that a site makes itself: the private key never leaves its machine; a request carries the public key.

FOLDER/client.key      private key, encrypted if a passphrase was given
FOLDER/request.json    for the operator: identifier of the client, public key, and a signature by the private key
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from ...core.errors import ConfigError
from ...core.io.atomic_files import as_checkpoint_error, read_json
from ...core.io.private_files import make_private_folder
from .key_files import PRIVATE_MODE, write_key_file
from .roster import compute_fingerprint, parse_public_key

REQUEST_FILE = "request.json"
"""Name of the file for the operator."""

PASSPHRASE_VARIABLE = "FEDLOWRANK_PASSPHRASE"
"""Name of the environment variable that holds the passphrase of a client's key."""

_SIGNED_PREFIX = b"fedlowrank request 1\n"


@dataclass(frozen=True)
class KeyRequest:
    """A site's request to register its public key.

    Attributes:
        client: identifier of the client.
        key: public key of the client, in OpenSSH's format.
    """

    client: int
    key: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public key."""
        return compute_fingerprint(parse_public_key(self.key, "the request"))

    @classmethod
    def read(cls, path: Path) -> KeyRequest:
        """Read a request; raises ConfigError if it is invalid, or not signed with the private key."""
        table: dict[str, Any] = read_json(path, dict)
        try:
            request = cls(table["client"], table["key"])
            if not isinstance(request.client, int) or isinstance(request.client, bool) or request.client < 0:
                raise ValueError("the number of the client is none")
            key, signature = parse_public_key(request.key, path), bytes.fromhex(table["signature"])
            key.verify(signature, request._encode_content(), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise ConfigError(
                f"{path} is not signed by the key in it; ask the client for another request"
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no request of a client ({error}); clients make it by "
                              "`fedlowrank keys FOLDER --request N`") from error  # fmt: skip
        return request

    def _encode_content(self) -> bytes:
        return _SIGNED_PREFIX + json.dumps([self.client, self.key]).encode()


def request_key(folder: Path, client_id: int, passphrase: str = "") -> KeyRequest:
    """Make the key of a client on its own machine, and a request for the operator.

    Args:
        folder: folder of the client's keys, made by this function.
        client_id: identifier of the client.
        passphrase: passphrase that encrypts the private key; "" leaves its protection to the mode of the file.

    Raises:
        ConfigError: if the folder already has a key, or the identifier is invalid.
        CheckpointError: if the folder cannot be written.
    """
    if client_id < 0:
        raise ConfigError(f"clients are numbered from 0; client is {client_id}")
    make_private_folder(folder)
    if (folder / "client.key").exists():
        raise ConfigError(
            f"{folder / 'client.key'} exists already, and keys are never overwritten. Send the operator "
            f"{folder / REQUEST_FILE} again, or choose another folder for a new key"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    if passphrase:
        encryption = BestAvailableEncryption(passphrase.encode())
        private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    else:
        private_bytes = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public_key = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    request = KeyRequest(client_id, public_key)
    signature = key.sign(request._encode_content(), ec.ECDSA(hashes.SHA384())).hex()
    content = {"client": client_id, "key": public_key, "signature": signature}
    # the request last, so that it is only sent when the key is on disk
    write_key_file(folder / "client.key", private_bytes, PRIVATE_MODE)
    write_key_file(folder / REQUEST_FILE, (json.dumps(content, indent=1) + "\n").encode())
    return request


def load_key_pair(
    path: Path, passphrase: str = ""
) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """Read the private key of a client and its public half, as Flower needs them; raises as :func:`load_client_key`."""
    key = load_client_key(path, passphrase)
    return key, key.public_key()


def load_client_key(path: Path, passphrase: str = "") -> ec.EllipticCurvePrivateKey:
    """Read the private key of a client.

    Args:
        path: path of the key file.
        passphrase: passphrase of an encrypted key; not needed for an unencrypted one.

    Raises:
        ConfigError: if the file is no such key, or the passphrase is missing or wrong.
        CheckpointError: if the file cannot be read.
    """
    with as_checkpoint_error(f"cannot read {path}"):
        content = path.read_bytes()
    is_encrypted = needs_passphrase(content)
    if is_encrypted and not passphrase:
        raise ConfigError(
            f"{path} needs its passphrase: `fedlowrank join` asks for it on a terminal; elsewhere set {PASSPHRASE_VARIABLE}"
        )
    try:
        load_key = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
        key = load_key(content, passphrase.encode() if is_encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = "the passphrase is wrong" if is_encrypted else f"{error}"
        raise ConfigError(f"{path} is no private key that can be read: {reason}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is a key of another kind; make keys by `fedlowrank keys`")
    return key


def needs_passphrase(content: bytes) -> bool:
    """Whether the content of a key's file is encrypted."""
    return b"BEGIN ENCRYPTED PRIVATE KEY" in content
