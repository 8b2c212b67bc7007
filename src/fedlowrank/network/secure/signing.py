"""Signatures by the keys of the roster: a client knows that a message comes from another client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from ...core.errors import ConfigError

_ALGORITHM = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Session:
    """What a signature and a ciphertext are bound to: one round of one run.

    Attributes:
        run: identifier of the run.
        branch: how often the run went back to an earlier checkpoint.
        round: completed rounds.
    """

    run: str
    branch: int
    round: int

    def message(self, step: str, *parts: Any) -> bytes:
        """The bytes that are signed or authenticated in one step of the round."""
        values = ["fedlowrank secure sum", step, self.run, self.branch, self.round]
        return json.dumps([*values, *(p.hex() if isinstance(p, bytes) else p for p in parts)]).encode()


class MemberKeys:
    """The public key of every client, which all sites have in common.

    Args:
        keys: elliptic-curve public keys by client.
    """

    def __init__(self, keys: Mapping[int, ec.EllipticCurvePublicKey]) -> None:
        self._keys = dict(keys)

    @classmethod
    def read(cls, keys: Mapping[int, bytes]) -> MemberKeys:
        """Make a roster of public keys in OpenSSH's format.

        Raises:
            ConfigError: if a key cannot be read.
        """
        found = {}
        for client, text in keys.items():
            try:
                key = load_ssh_public_key(text)
            except ValueError as error:
                raise ConfigError(f"the public key of client {client} cannot be read: {error}") from error
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ConfigError(f"the public key of client {client} is not one of an elliptic curve")
            found[client] = key
        return cls(found)

    def __contains__(self, client: object) -> bool:
        """Whether a client has a key."""
        return client in self._keys

    def verify(self, client: int, message: bytes, signature: bytes) -> bool:
        """Whether a client signed a message."""
        key = self._keys.get(client)
        if key is None:
            return False
        try:
            key.verify(signature, message, _ALGORITHM)
        except InvalidSignature:
            return False
        return True


class MemberSigner:
    """Signs by a client's private key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """The signature of a message."""
        return self._key.sign(message, _ALGORITHM)
