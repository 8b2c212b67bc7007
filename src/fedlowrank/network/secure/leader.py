"""The server's side of a secure sum: it passes messages on, adds masked vectors, and finally removes the masks.

It checks what it can, so that a faulty client is left out by name before others build on its messages:
signatures, keys of low order, missing shares, the length of a vector, and secrets rebuilt from wrong shares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ...trust.secure_sums import KeyPair, Vector, combine, expand
from .member import (
    BOX_BYTES,
    SHARE_BYTES,
    Announcement,
    SecureSumError,
    check_keys,
    commit,
    is_signed,
    min_participants,
)
from .signing import MemberKeys, Session

MAX_TRIALS = 1000
"""Largest number of sets of shares that are tried if some are wrong."""


class SumLeader:
    """The server in one secure sum.

    Args:
        client_count: number of all clients.
        session: session of the round.
        roster: public keys of all clients.

    Attributes:
        announced: announcement of each client of U1, by client.
        replied: identifiers of the clients whose masked vectors arrived, in order of arrival (U3).
        signatures: signatures of the list of clients that replied, by client.
    """

    def __init__(self, client_count: int, session: Session, roster: MemberKeys) -> None:
        self.min_clients, self._session, self._roster = min_participants(client_count), session, roster
        self.announced: dict[int, Announcement] = {}
        self.replied: list[int] = []
        self.signatures: dict[int, bytes] = {}
        self._boxes: dict[int, Mapping[int, bytes]] = {}
        self._shares: dict[int, Mapping[int, bytes]] = {}
        self._sum: Vector | None = None
        self._honest: tuple[int, ...] = ()
        self._down: bytes | None = None

    def announce(self, client_id: int, announcement: Announcement) -> None:
        """Step 1: take a client's keys; raises SecureSumError if they cannot be used."""
        *keys, _, _ = announcement
        if not is_signed(client_id, announcement, self._session, self._roster):
            raise SecureSumError("its keys are not signed by its key in the roster")
        check_keys(client_id, announcement)
        announced_keys = {key for entry in self.announced.values() for key in entry[:2]}
        if len({*keys}) < 2 or announced_keys.intersection(keys):
            raise SecureSumError("its keys are those of another client, or equal")
        self.announced[client_id] = announcement

    def share(self, client_id: int, boxes: Mapping[int, bytes]) -> None:
        """Step 2: take the shares that a client encrypted; raises SecureSumError if some are missing."""
        if boxes.keys() != self.announced.keys() - {client_id}:
            raise SecureSumError("it did not share its secrets with all clients")
        if any(len(box) != BOX_BYTES for box in boxes.values()):
            raise SecureSumError(
                f"it encrypted something else than pairs of shares, which have {BOX_BYTES} bytes"
            )
        self._boxes[client_id] = boxes

    @property
    def sharers(self) -> list[int]:
        """The clients that shared their secrets (U2)."""
        return sorted(self._boxes)

    def boxes_for(self, client_id: int) -> dict[int, bytes]:
        """Shares that the other clients of U2 encrypted for a client."""
        return {
            sender: boxes[client_id] for sender, boxes in sorted(self._boxes.items()) if sender != client_id
        }

    def bind(self, download_digest: bytes) -> None:
        """Record the digest of a client's download; raises SecureSumError if it differs from that of others."""
        if self._down not in (None, download_digest):
            raise SecureSumError("clients get different downloads, so that their masks would not cancel")
        self._down = download_digest

    def add(self, client_id: int, masked_vector: Vector) -> None:
        """Step 3: add a masked vector ``[size]``; raises SecureSumError if its size differs from earlier ones."""
        if client_id in self.replied or client_id not in self._boxes:
            raise SecureSumError("it takes no part in this step")
        if self._sum is not None and masked_vector.shape != self._sum.shape:
            raise SecureSumError(
                f"its vector has {masked_vector.size} numbers, and others have {self._sum.size}"
            )
        self._sum = masked_vector.copy() if self._sum is None else self._sum + masked_vector
        self.replied.append(client_id)

    def agree(self, client_id: int, signature: bytes) -> None:
        """Step 4: take the signature of the list; raises SecureSumError if it is invalid."""
        message = self._session.message("replied", sorted(self.replied))
        if client_id not in self.replied or not self._roster.verify(client_id, message, signature):
            raise SecureSumError("it did not sign the list of those that replied")
        self.signatures[client_id] = signature

    def reveal(self, client_id: int, shares: Mapping[int, bytes]) -> None:
        """Step 5: take the shares that a client reveals; raises SecureSumError if some are missing."""
        if client_id not in self.signatures or shares.keys() != self._boxes.keys():
            raise SecureSumError("it did not reveal its shares of all clients")
        if any(len(share) != SHARE_BYTES for share in shares.values()):
            raise SecureSumError(f"it revealed something else than shares, which have {SHARE_BYTES} bytes")
        self._shares[client_id] = shares

    def check(self, count: int, step: str) -> None:
        """Raise SecureSumError if too few clients took a step."""
        if count < self.min_clients:
            raise SecureSumError(f"{count} clients {step}, and {self.min_clients} must")

    def compute_total(self) -> Vector:
        """Compute the sum of the vectors of the clients that replied.

        Raises:
            SecureSumError: if too few clients revealed their shares, or the shares do not match the announcements.
        """
        self.check(len(self._shares), "revealed their shares")
        assert self._sum is not None, "clients reveal after vectors have arrived"
        total = self._sum.copy()
        for client_id in self.sharers:
            if client_id in self.replied:
                total -= expand(self._rebuild(client_id, self._is_seed), total.size)
                continue
            pair = KeyPair(client_id, self._rebuild(client_id, self._is_masking_secret))
            for neighbor_id in self.replied:
                total += pair.mask(neighbor_id, self.announced[neighbor_id][1], total.size, self._down or b"")
        return total

    def _is_seed(self, client_id: int, secret: bytes) -> bool:
        return commit(secret) == self.announced[client_id][2]

    def _is_masking_secret(self, client_id: int, secret: bytes) -> bool:
        return KeyPair(client_id, secret).public_key == self.announced[client_id][1]

    def _rebuild(self, client_id: int, is_expected: Callable[[int, bytes], bool]) -> bytes:
        """Rebuild the secret of a client, from the first set of shares that gives the expected one."""
        for holders in self._draw_holders():
            try:
                secret = combine([self._shares[holder][client_id] for holder in holders])
            except ValueError:
                continue
            if is_expected(client_id, secret):
                self._honest = holders
                return secret
        raise SecureSumError(
            f"the shares of the secrets of client {client_id} are wrong: it shared wrong ones, or others lie"
        )

    def _draw_holders(self) -> Iterator[tuple[int, ...]]:
        """Yield sets of share holders: those whose shares were correct before, then others that may each avoid a liar."""
        holders = sorted(self._shares)
        yield self._honest or tuple(holders[: self.min_clients])
        # the choice of sets need not be secret
        draws = random.Random(0)
        for _ in range(MAX_TRIALS if len(holders) > self.min_clients else 0):
            yield tuple(draws.sample(holders, self.min_clients))


def vector_to_bytes(vector: Vector) -> bytes:
    """Encode a vector as it is sent, 8 bytes for each number."""
    return vector.astype("<u8", copy=False).tobytes()


def vector_from_bytes(content: bytes) -> Vector:
    """Inverse of :func:`vector_to_bytes`; raises SecureSumError if the length is not a multiple of 8."""
    if len(content) % 8:
        raise SecureSumError("its masked vector is cut short")
    return np.frombuffer(content, "<u8").astype(np.uint64, copy=False)
