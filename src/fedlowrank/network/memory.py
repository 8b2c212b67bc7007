"""What a client remembers on its own disk: the state the server has acknowledged, and one that it has not yet.

    RUN/manifest.json       the commit point: which files count
    RUN/state-000004.tree   the client's state after the round by which 4 were completed
    RUN/upload-000004.tree  what it sent then, to be sent again if the server asks again
    RUN/sizes.json          training examples of all clients

A state becomes the one to build on only when a later order names its stamp, for methods with duals break otherwise. Every file
is written whole or not at all, and is on the disk before the reply leaves.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import tree
from ..errors import CheckpointError
from ..record import as_checkpoint_error, write_atomically, write_json


class ForgottenError(CheckpointError):
    """The server expects a client to build on a state that it has not got."""


@dataclass(frozen=True)
class Offer:
    """A reply that was sent and is not acknowledged.

    Attributes:
        stamp: rounds completed once it is accepted.
        order: digest of the order that it answers.
        answer: its words.
    """

    stamp: int
    order: str
    answer: str


class Memory:
    """One client's memory of one run.

    Args:
        folder: of the run; made if it does not exist.

    Raises:
        CheckpointError: if the folder cannot be made, or its manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with as_checkpoint_error(f"cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self.stamp, self.offer = 0, None
        path = folder / "manifest.json"
        if path.exists():
            try:
                found = json.loads(path.read_text())
                self.stamp = int(found["stamp"])
                self.offer = None if found["offer"] is None else Offer(**found["offer"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise CheckpointError(f"{path} is damaged: {error!r}") from error

    stamp: int
    offer: Offer | None

    def answered(self, order: str) -> tuple[str, bytes] | None:
        """The words and the upload by which an order of that digest was answered before, or None."""
        if self.offer is None or self.offer.order != order:
            return None
        return self.offer.answer, self._read("upload", self.offer.stamp)

    def at(self, stamp: int) -> Any | None:
        """The state with that stamp, None for stamp 0. What was offered becomes the state if the stamp is its, else is dropped.

        Raises:
            ForgottenError: if there is no such state.
            CheckpointError: if it cannot be read, or the disk cannot be written.
        """
        if stamp == 0:
            # so it is for the server, whatever was acknowledged here before it was told to begin anew
            return None
        if self.offer is not None and self.offer.stamp == stamp:
            self._commit(stamp)
        if self.stamp != stamp:
            raise ForgottenError(
                f"the server expects the state after round {stamp}, but the last one acknowledged here is of round "
                f"{self.stamp}: {self.folder} was lost or is of another machine"
            )
        try:
            return tree.decode(self._read("state", stamp))
        except tree.TreeError as error:
            raise CheckpointError(f"{self._path('state', stamp)} is damaged: {error}") from error

    def propose(self, stamp: int, state: Any, upload: bytes, order: str, answer: str) -> None:
        """Keep a state and a reply until the server acknowledges it; the state before stays what counts.

        Raises:
            CheckpointError: if the disk is full; nothing has changed then.
        """
        before, self.offer = self.offer, Offer(stamp, order, answer)
        try:
            write_atomically(self._path("state", stamp), tree.encode(state))
            write_atomically(self._path("upload", stamp), upload)
            self._write()
        except CheckpointError:
            self.offer = before
            raise
        self._tidy()

    def sizes(self) -> tuple[int, ...] | None:
        """Training examples of all clients as the server told; None if it never did, or that is damaged: it tells again."""
        try:
            return tuple(map(int, json.loads((self.folder / "sizes.json").read_text())))
        except (OSError, ValueError, TypeError):
            return None

    def learn_sizes(self, sizes: tuple[int, ...]) -> None:
        """Keep what the server told of the other clients."""
        write_json(self.folder / "sizes.json", sizes)

    def _commit(self, stamp: int) -> None:
        before = self.stamp, self.offer
        self.stamp, self.offer = stamp, None
        try:
            self._write()
        except CheckpointError:
            self.stamp, self.offer = before
            raise
        self._tidy()

    def _write(self) -> None:
        offer = None if self.offer is None else vars(self.offer)
        write_json(self.folder / "manifest.json", {"stamp": self.stamp, "offer": offer})

    def _tidy(self) -> None:
        """Remove what the manifest does not name; what cannot be removed now is removed the next time."""
        kept = {self._path("state", self.stamp)}
        if self.offer is not None:
            kept |= {self._path("state", self.offer.stamp), self._path("upload", self.offer.stamp)}
        for path in self.folder.glob("*.tree*"):
            if path not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, kind: str, stamp: int) -> Path:
        return self.folder / f"{kind}-{stamp:06d}.tree"

    def _read(self, kind: str, stamp: int) -> bytes:
        with as_checkpoint_error(f"cannot read {self._path(kind, stamp)}"):
            return self._path(kind, stamp).read_bytes()
