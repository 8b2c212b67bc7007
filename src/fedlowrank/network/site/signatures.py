"""Signatures of the server's messages; a client with keys answers only signed messages.

Flower does not sign what it delivers, and a client cannot see who submitted a message. Therefore the server
signs every message with a key of the federation (Ed25519): ``orders.key`` among the server's files, whose
public half ``orders.pub`` is among the files of every client. The signature covers the kind of the message, the identifier
of the client, the header, which names run, round and branch, and a digest of the payload. A message to one
client is thus of no use for another client, run or round.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ..messages import RefusedOrderError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True)
class OrderSigner:
    """Signs the messages of a server.

    Attributes:
        key: private key of the federation's orders.
    """

    key: Ed25519PrivateKey

    @classmethod
    def read(cls, path: Path) -> OrderSigner:
        """Read the private key from a file (PEM); raises ConfigError if it contains none."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{path} is no private key that can be read: {error}. Make keys by `fedlowrank keys`."
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                f"{path} is a key of another kind than Ed25519. Make keys by `fedlowrank keys`."
            )
        return cls(key)

    def sign(self, kind: str, client_id: int, header: str, digest: str) -> str:
        """Sign a message; returns the signature as hexadecimal digits.

        Args:
            kind: kind of the message.
            client_id: identifier of the client that receives the message.
            header: header as it is sent.
            digest: digest of the payload, see :func:`payload_digest`.
        """
        return self.key.sign(_signed_text(kind, client_id, header, digest)).hex()


def payload_digest(payload: bytes) -> str:
    """BLAKE2b of a payload, 256 bits as hexadecimal digits."""
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


def read_public_key(path: Path) -> str:
    """Read a public key from a file in OpenSSH's format, as hexadecimal digits; raises ConfigError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} is no public key that can be read: {error}. Ask the server's operator for the file."
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"{path} is a key of another kind than Ed25519. Ask the server's operator for the file."
        )
    return key.public_bytes_raw().hex()


def check_signature(
    public_key: str, kind: str, client_id: int, header: str, payload: bytes, signature: str
) -> None:
    """Verify the signature of a message.

    Args:
        public_key: public key of the server, see :func:`read_public_key`.
        kind: kind of the message.
        client_id: identifier of the client that received the message.
        header: header of the message.
        payload: payload of the message.
        signature: signature that came with the message.

    Raises:
        RefusedOrderError: if the server did not sign exactly this message.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not signature:
        raise RefusedOrderError(
            f"the message ({kind}) is not signed: another client sent it, or the server runs an older release "
            "or without keys"
        )
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    try:
        key.verify(bytes.fromhex(signature), _signed_text(kind, client_id, header, payload_digest(payload)))
    except (InvalidSignature, ValueError) as error:
        raise RefusedOrderError(
            f"the message ({kind}) is not signed by the server whose orders.pub client {client_id} has, or not "
            "for this client"
        ) from error


def _signed_text(kind: str, client_id: int, header: str, digest: str) -> bytes:
    # a JSON list separates the parts unambiguously
    return json.dumps(["fedlowrank", kind, client_id, header, digest]).encode()
