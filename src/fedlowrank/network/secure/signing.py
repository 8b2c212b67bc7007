"""Signatures with the keys of the roster, which prove to a client that a message comes from another client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ..enrollment.roster import KeyRoster, parse_public_key

_ALGORITHM = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Session:
    """Context to which a signature and a ciphertext are bound: one round of one run.

    Attributes:
        run: identifier of the run.
        branch: number of times that the run went back to an earlier checkpoint.
        round: number of completed rounds.
    """

    run: str
    branch: int
    round: int

    def message(self, step: str, *fields: Any) -> bytes:
        """Encode the bytes that are signed or authenticated in one step of the round."""
        values = ["fedlowrank secure sum", step, self.run, self.branch, self.round]
        return json.dumps([*values, *(p.hex() if isinstance(p, bytes) else p for p in fields)]).encode()


class MemberKeys:
    """The public keys of all clients, which are the same at all sites.

    Args:
        keys: elliptic-curve public keys by client.
    """

    def __init__(self, keys: Mapping[int, ec.EllipticCurvePublicKey]) -> None:
        self._keys = dict(keys)

    @classmethod
    def read(cls, keys: Mapping[int, str]) -> MemberKeys:
        """Read public keys in OpenSSH's format; raises ConfigError if one cannot be read."""
        return cls({c: parse_public_key(text, f"the key of client {c}") for c, text in keys.items()})

    @classmethod
    def of(cls, roster: KeyRoster) -> MemberKeys:
        """The keys of a roster that have not expired."""
        return cls.read({c: entry.key for c, entry in roster.clients.items() if not entry.has_expired()})

    def __contains__(self, client_id: object) -> bool:
        """Whether a client has a key."""
        return client_id in self._keys

    def verify(self, client_id: int, message: bytes, signature: bytes) -> bool:
        """Whether a client signed a message."""
        key = self._keys.get(client_id)
        if key is None:
            return False
        try:
            key.verify(signature, message, _ALGORITHM)
        except InvalidSignature:
            return False
        return True


class MemberSigner:
    """Signs with a client's private key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key

    def sign(self, message: bytes) -> bytes:
        """Sign a message."""
        return self._key.sign(message, _ALGORITHM)
