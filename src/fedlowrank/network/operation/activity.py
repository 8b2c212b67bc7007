"""A server's record of its clients' last replies, for a person who monitors the run."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

MAX_DESCRIBED_ROUNDS = 20
"""Number of last rounds whose updates are described."""


@dataclass(frozen=True)
class LastReply:
    """The last reply of a client.

    Attributes:
        round: number of the round of the reply, from 1.
        time: time at which the reply arrived (UTC).
        bytes: number of bytes of header and payload.
        seconds: seconds from the order to the reply.
        is_used: whether the reply was used.
    """

    round: int
    time: str
    bytes: int
    seconds: float
    is_used: bool

    @classmethod
    def now(cls, round: int, bytes: int, seconds: float, is_used: bool) -> LastReply:
        """Make the record of a reply that has just arrived."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(round, time, bytes, float(f"{seconds:.3g}"), is_used)


@dataclass(frozen=True)
class UpdateShape:
    """Length and direction of an update.

    Attributes:
        length: norm of its longest part divided by the usual norm; None if the usual norm is unknown.
        cosine: cosine with the mean of the other clients' updates, each at unit length; None if there is none.
    """

    length: float | None
    cosine: float | None

    def describe(self) -> str:
        """Describe length and direction in words."""
        length = "of unknown length" if self.length is None else f"{self.length:.2g} times the usual length"
        if self.cosine is None:
            return length
        return f"{length}, cosine {self.cosine:.2f} with the mean of the others"
