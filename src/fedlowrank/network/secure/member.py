"""A client's side of a secure sum, in five steps; a client that disappears after any of them harms no one.

With n clients, the threshold is t = ⌊2n/3⌋ + 1; U1 ⊇ U2 ⊇ U3 are the clients that took steps 1, 2, 3.

1. ``announce``: two public keys of X25519, one to encrypt and one to mask, and a commitment to b_i, signed by
   the key of the roster.
2. ``share``: Shamir shares of its masking secret s_i and of the seed b_i of its own mask, any t of which
   rebuild them, encrypted for each client of U1.
3. ``mask``: y_i = x_i + PRG(b_i) + Σ_{j > i} PRG(s_ij, d) - Σ_{j < i} PRG(s_ij, d), j in U2, d the digest
   of the download. The masks of clients to whom a server sent different models do not cancel (Pasquini et
   al., *Eluding Secure Aggregation in Federated Learning via Model Inconsistency*, CCS 2022).
4. ``agree``: a signature of the list U3 that the server shows.
5. ``reveal``: given t signatures of the same list, its shares of b_j for j in U3, and of s_j for
   j in U2 without U3.

More than n/3 clients would have to collude with the server to give it two lists signed by t clients, and
with them both secrets of one client. Secrets live in memory, for one round.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...core.errors import FedlowrankError
from ...trust.secure_sums import SECRET_BYTES, MaskingClient, Vector
from .signing import MemberKeys, MemberSigner, Session

Announcement = tuple[bytes, bytes, bytes, bytes]
"""Public keys to encrypt and to mask, the commitment to the seed (32 bytes each), and their signature."""

MAX_CLIENTS = 20
"""Largest number of clients of a secure sum over a network, as each exchanges messages with all others."""

SHARE_BYTES = 4 + SECRET_BYTES + 1
"""Number of bytes of a share: its index, and a share of the padded secret."""

BOX_BYTES = 2 * SHARE_BYTES + 16
"""Number of bytes of an encrypted pair of shares."""

_NONCE = bytes(12)  # a key encrypts one message


class SecureSumError(FedlowrankError):
    """A client leaves a secure sum, because what the server sent cannot be trusted."""


def min_participants(client_count: int) -> int:
    """The least number of clients that must take each step: more than two thirds of all."""
    return 2 * client_count // 3 + 1


def commit(seed: bytes) -> bytes:
    """Commit to the seed of a mask, so that the server notices wrong shares."""
    return hashlib.sha256(b"fedlowrank commitment" + seed).digest()


def is_signed(client_id: int, announcement: Announcement, session: Session, roster: MemberKeys) -> bool:
    """Whether a client signed its announcement."""
    *content, signature = announcement
    return roster.verify(client_id, session.message("keys", client_id, *content), signature)


def check_keys(client_id: int, announcement: Announcement) -> None:
    """Raise SecureSumError if the keys that a client announced cannot be used."""
    if [len(field) for field in announcement[:3]] != [32, 32, 32]:
        raise SecureSumError(f"the keys of client {client_id} do not have 32 bytes")
    try:
        for key in announcement[:2]:
            # raises an error for keys of low order
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise SecureSumError(f"the keys of client {client_id} are no keys of X25519") from error


class SumMember:
    """One client in one secure sum.

    Args:
        client_id: identifier of the client.
        client_count: number of all clients.
        session: session of the round.
        roster: public keys of all clients.
        signer: signer with the client's private key.
    """

    def __init__(
        self, client_id: int, client_count: int, session: Session, roster: MemberKeys, signer: MemberSigner
    ) -> None:
        if not 2 <= client_count <= MAX_CLIENTS:
            raise SecureSumError(
                f"secure sums over a network are for 2 to {MAX_CLIENTS} clients; there are {client_count}"
            )
        self.client, self.session = client_id, session
        self.min_clients = min_participants(client_count)
        self._clients, self._roster, self._signer = client_count, roster, signer
        self._private, seed = X25519PrivateKey.generate(), secrets.token_bytes(SECRET_BYTES)
        self._secrets = MaskingClient(client_id, seed, secrets.token_bytes(SECRET_BYTES), self.min_clients)
        self._announced_keys = (
            self._private.public_key().public_bytes_raw(),
            self._secrets.keys.public_key,
            commit(seed),
        )
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        self._sharers: tuple[int, ...] = ()
        self._step = 0
        self._agreed: tuple[int, ...] = ()

    def announce(self) -> Announcement:
        """Step 1: make the client's keys and commitment, and their signature."""
        self._advance(1)
        return *self._announced_keys, self._signer.sign(
            self.session.message("keys", self.client, *self._announced_keys)
        )

    def share(self, announcements: Mapping[int, Announcement]) -> dict[int, bytes]:
        """Step 2: make an encrypted pair of shares for each other client.

        Args:
            announcements: announcement of each client of U1.

        Raises:
            SecureSumError: if there are too few announcements, a signature is wrong, or a key occurs twice.
        """
        self._advance(2)
        if len(announcements) < self.min_clients:
            raise SecureSumError(
                f"{len(announcements)} clients announced keys, and {self.min_clients} of {self._clients} must"
            )
        for client_id, announcement in announcements.items():
            if not 0 <= client_id < self._clients or not is_signed(
                client_id, announcement, self.session, self._roster
            ):
                raise SecureSumError(
                    f"client {client_id} did not sign the keys that the server says are its own"
                )
            check_keys(client_id, announcement)
        if self.client not in announcements or announcements[self.client][:3] != self._announced_keys:
            raise SecureSumError("the server lists other keys for this client")
        if len({key for keys in announcements.values() for key in keys[:2]}) < 2 * len(announcements):
            raise SecureSumError("two clients have a key in common")
        self._keys = {c: (keys[0], keys[1]) for c, keys in sorted(announcements.items())}
        shares = dict(zip(self._keys, self._secrets.share(len(self._keys), self.min_clients), strict=True))
        self._secrets.shares[self.client] = shares[self.client]
        return {
            receiver_id: self._make_cipher(self.client, receiver_id).encrypt(
                _NONCE, b"".join(pair), self._associated_data(self.client, receiver_id)
            )
            for receiver_id, pair in shares.items()
            if receiver_id != self.client
        }

    def mask(self, vector: Vector, boxes: Mapping[int, bytes], download_digest: bytes = b"") -> Vector:
        """Step 3: make the masked vector y ``[size]``.

        Args:
            vector: x ``[size]``, the vector to mask.
            boxes: pair of shares that each other client of U2 encrypted for this one, by client.
            download_digest: digest of the download, which all clients must have in common.

        Raises:
            SecureSumError: if there are too few pairs of shares, or one was changed on the way.
        """
        self._advance(3)
        sharers = sorted({*boxes, self.client})
        if len(sharers) < self.min_clients:
            raise SecureSumError(
                f"{len(sharers)} clients shared secrets, and {self.min_clients} of {self._clients} must"
            )
        for sender_id, box in boxes.items():
            if sender_id == self.client or sender_id not in self._keys:
                raise SecureSumError(f"client {sender_id} shares secrets, but it announced no keys")
            try:
                plaintext = self._make_cipher(sender_id, self.client).decrypt(
                    _NONCE, box, self._associated_data(sender_id, self.client)
                )
            except InvalidTag as error:
                raise SecureSumError(f"the shares of client {sender_id} were changed on the way") from error
            if len(plaintext) != 2 * SHARE_BYTES:
                raise SecureSumError(f"client {sender_id} encrypted something else than a pair of shares")
            self._secrets.shares[sender_id] = plaintext[:SHARE_BYTES], plaintext[SHARE_BYTES:]
        self._sharers = tuple(sharers)
        neighbors = {c: self._keys[c][1] for c in sharers if c != self.client}
        return self._secrets.mask(vector, neighbors, download_digest)

    def agree(self, replied_ids: Collection[int]) -> bytes:
        """Step 4: sign U3, the clients whose masked vectors the server claims to have.

        Raises:
            SecureSumError: if there are too few clients, or the list is impossible.
        """
        self._advance(4)
        client_ids = tuple(sorted(replied_ids))
        if len(client_ids) < self.min_clients or len(set(client_ids)) < len(client_ids):
            raise SecureSumError(
                f"{len(set(client_ids))} clients replied, and {self.min_clients} of {self._clients} must"
            )
        if self.client not in client_ids or not set(client_ids) <= set(self._sharers):
            raise SecureSumError("the server's list of those that replied cannot be")
        self._agreed = client_ids
        return self._signer.sign(self.session.message("replied", list(client_ids)))

    def reveal(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Step 5: reveal the shares by owner: of b if the owner replied, of s otherwise.

        Args:
            signatures: signatures of the list, by client.

        Raises:
            SecureSumError: if fewer than t clients signed the list that this client signed.
        """
        self._advance(5)
        message = self.session.message("replied", list(self._agreed))
        signer_ids = [
            c for c in signatures if c in self._agreed and self._roster.verify(c, message, signatures[c])
        ]
        if len(signer_ids) < self.min_clients:
            raise SecureSumError(
                f"{len(signer_ids)} clients signed the list of those that replied, and {self.min_clients} must"
            )
        return self._secrets.reveal(set(self._agreed))

    def _advance(self, step: int) -> None:
        """Go to the next step; raises SecureSumError unless each step comes once and in order."""
        if step != self._step + 1:
            raise SecureSumError(f"the server asks for step {step} of a secure sum after step {self._step}")
        self._step = step

    def _associated_data(self, sender: int, receiver: int) -> bytes:
        """Return the associated data of a ciphertext (AEAD): the round, the sender and the receiver."""
        return self.session.message("shares", sender, receiver)

    def _make_cipher(self, sender: int, receiver: int) -> ChaCha20Poly1305:
        partner_id = receiver if sender == self.client else sender
        secret = self._private.exchange(X25519PublicKey.from_public_bytes(self._keys[partner_id][0]))
        kdf = HKDF(hashes.SHA256(), 32, salt=None, info=self._associated_data(sender, receiver))
        return ChaCha20Poly1305(kdf.derive(secret))
