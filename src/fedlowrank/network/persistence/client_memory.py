"""A client's states in a run, on its disk: acknowledged ones, and one that is not acknowledged yet.

    RUN/000004.tree   the client's state after 4 completed rounds, and the reply that it sent then

A client builds on a state once a later order names its stamp; until then the previous state stays
beside it. Some older acknowledged states stay, too, for a server that goes back to an earlier checkpoint. A
file is written atomically, before the reply is sent. Its first line is JSON: digest and branch of the order
that was answered, header of the answer, and sizes and digests of state and upload, which follow.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...core import tree
from ...core.errors import CheckpointError
from ...core.io.atomic_files import as_checkpoint_error, write_atomically
from ...storage.digest import check_seal, digest_of, seal


class ForgottenError(CheckpointError):
    """The server expects a client to build on a state that is missing."""


class ClientMemory:
    """The states of one client in one run.

    Args:
        folder: folder of the run, made if it does not exist.
        keep: number of acknowledged states to keep.

    Attributes:
        stamps: stamps of the stored states, ascending; the last may not be acknowledged yet.

    Raises:
        CheckpointError: if the folder cannot be made.
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder, self.keep = folder, keep
        with as_checkpoint_error(f"cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self.stamps = sorted(int(p.stem) for p in folder.glob("*.tree") if p.stem.isdecimal())

    @property
    def branch(self) -> int:
        """Branch of the last answered order; 0 if there is none."""
        if not self.stamps:
            return 0
        with _open_state(self._path(self.stamps[-1])) as (header, _):
            return int(header["branch"])

    def find_answer(self, order_digest: str) -> tuple[str, bytes] | None:
        """Header and upload of the answer to the order with a digest, or None if it was not answered."""
        if not self.stamps:
            return None
        path = self._path(self.stamps[-1])
        with _open_state(path) as (header, file):
            if header["order"] != order_digest:
                return None
            file.seek(header["state"], os.SEEK_CUR)
            upload = file.read()
        _check(upload, header["digests"][1], path)
        return header["answer"], upload

    def read_state(self, stamp: int) -> Any | None:
        """Read the state with a stamp (None for stamp 0), and remove old states.

        Raises:
            ForgottenError: if there is no state with that stamp.
            CheckpointError: if the state cannot be read.
        """
        if stamp == 0:
            # the client starts from the initial state again, whatever was acknowledged before
            return None
        if stamp not in self.stamps:
            stamps = " and ".join(map(str, self.stamps)) or "none"
            raise ForgottenError(
                f"the server expects the state after round {stamp}, but those kept here are of round: "
                f"{stamps}; {self.folder} was lost or is of another machine"
            )
        path = self._path(stamp)
        with _open_state(path) as (header, file):
            encoded_state = file.read(header["state"])
        _check(encoded_state, header["digests"][0], path)
        self._keep([*self._acknowledged(stamp), *(s for s in self.stamps if s > stamp)])
        return tree.decode(encoded_state)

    def propose(
        self,
        base_stamp: int,
        stamp: int,
        state: Any,
        upload: bytes,
        order_digest: str,
        answer: str,
        branch: int = 0,
    ) -> None:
        """Store a state and a reply beside the state that it builds on, until the server acknowledges it.

        Args:
            base_stamp: stamp of the state that it builds on; 0 if the client starts, possibly again: then the oldest
                states stay.
            stamp: number of completed rounds once the reply is accepted.
            state: new state of the client.
            upload: bytes of the reply.
            order_digest: digest of the order that the reply answers.
            answer: header of the reply.
            branch: branch of the order.

        Raises:
            CheckpointError: if the disk is full; nothing has changed then.
        """
        encoded_state = tree.encode(state)
        header = {
            "order": order_digest,
            "answer": answer,
            "state": len(encoded_state),
            "upload": len(upload),
            "branch": branch,
            "digests": [digest_of(encoded_state), digest_of(upload)],
        }
        line = json.dumps(seal(header)).encode() + b"\n"
        # states between base and stamp were never acknowledged, or the server went back to a state before them
        retained_stamps = self._acknowledged(base_stamp) if base_stamp else self.stamps[: self.keep]
        write_atomically(self._path(stamp), [line, encoded_state, upload])
        self.stamps = sorted({*self.stamps, stamp})
        self._keep(sorted({*retained_stamps, stamp}))

    def _acknowledged(self, stamp: int) -> list[int]:
        """Stamps of the newest acknowledged states, up to the given one."""
        return [s for s in self.stamps if s <= stamp][-self.keep :]

    def _keep(self, stamps: list[int]) -> None:
        """Remove all other states and partial files; errors are ignored, because the next call tries again."""
        removed_paths = [self._path(s) for s in self.stamps if s not in stamps]
        for path in [*removed_paths, *self.folder.glob("*.part")]:
            with contextlib.suppress(OSError):
                path.unlink()
        self.stamps = stamps

    def _path(self, stamp: int) -> Path:
        return self.folder / f"{stamp:06d}.tree"


@contextlib.contextmanager
def _open_state(path: Path) -> Iterator[tuple[dict[str, Any], IO[bytes]]]:
    """Open a state's file and read its first line."""
    with as_checkpoint_error(f"cannot read {path}"), path.open("rb") as file:
        try:
            header: dict[str, Any] = json.loads(file.readline())
            check_seal(header, path)
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        yield header, file


def _check(content: bytes, digest: str, path: Path) -> None:
    if digest_of(content) != digest:
        raise CheckpointError(
            f"{path} is damaged: its digest is not the one in its first line. Restore the file from a copy, "
            "or remove it: the client is then left out, or starts again if the server has "
            "network.forgotten = 'begin'."
        )
