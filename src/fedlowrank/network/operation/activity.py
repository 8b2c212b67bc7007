"""What a server remembers of its clients' last replies, for a person who watches the run."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

MAX_DESCRIBED_ROUNDS = 20
"""Number of last rounds whose updates are described."""


@dataclass(frozen=True)
class LastReply:
    """The last reply of a client.

    Attributes:
        round: of the reply, from 1.
        time: at which it arrived, UTC.
        bytes: of its header and payload.
        seconds: from the order to the reply.
        is_used: whether it was used.
    """

    round: int
    time: str
    bytes: int
    seconds: float
    is_used: bool

    @classmethod
    def now(cls, round: int, bytes: int, seconds: float, is_used: bool) -> LastReply:
        """One that has just arrived."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(round, time, bytes, float(f"{seconds:.3g}"), is_used)


@dataclass(frozen=True)
class UpdateShape:
    """Length and direction of an update.

    Attributes:
        length: norm of its longest part over what is usual; None if nothing tells what is usual.
        cosine: with the mean of the other clients' updates, each at unit length; None if there is none.
    """

    length: float | None
    cosine: float | None

    def describe(self) -> str:
        """Both in words."""
        length = "of unknown length" if self.length is None else f"{self.length:.2g} times the usual length"
        if self.cosine is None:
            return length
        return f"{length}, cosine {self.cosine:.2f} with the mean of the others"
