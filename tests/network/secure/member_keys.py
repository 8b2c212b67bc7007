"""The keys of the members of a secure sum."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedlowrank.network.secure.signing import MemberKeys

KEYS = [ec.generate_private_key(ec.SECP384R1()) for _ in range(7)]


ROSTER = MemberKeys.read({
    c: key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for c, key in enumerate(KEYS)
})  # fmt: skip
