"""The time for which the server waits for the last replies of a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

MIN_WAIT_SECONDS = 60.0
"""Shortest waiting time in seconds: a restarted client, or a busy machine, needs that long."""

MAX_REPLY_TIMES = 100
"""Number of last replies whose times are stored."""


@dataclass
class Grace:
    """Waits for a multiple of the median reply time instead of the whole deadline.

    Attributes:
        factor: multiple of the median; 0 for the whole deadline.
        seconds: seconds from the order to each of the past replies, the newest last.
    """

    factor: float
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Store the time that a reply took."""
        self.seconds.append(round(seconds, 3))
        del self.seconds[:-MAX_REPLY_TIMES]

    def limit(self, deadline: float) -> float:
        """Seconds after the orders from which enough replies suffice."""
        if not self.factor or not self.seconds:
            return deadline
        return min(deadline, max(MIN_WAIT_SECONDS, self.factor * median(self.seconds)))
