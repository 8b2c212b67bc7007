"""How long the last replies of a round are waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

MIN_WAIT_SECONDS = 60.0
"""Least waiting time in seconds: a restarted client, or a busy machine, takes that long."""

MAX_REPLY_TIMES = 100
"""Number of last replies whose times are stored."""


@dataclass
class Grace:
    """Waits for some medians of past reply times instead of the whole deadline.

    Attributes:
        factor: how many medians; 0 for the whole deadline.
        seconds: that past replies took from the order on, the newest last.
    """

    factor: float
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Remember how long a reply took."""
        self.seconds.append(round(seconds, 3))
        del self.seconds[:-MAX_REPLY_TIMES]

    def limit(self, deadline: float) -> float:
        """Seconds from the orders on after which enough replies suffice."""
        if not self.factor or not self.seconds:
            return deadline
        return min(deadline, max(MIN_WAIT_SECONDS, self.factor * median(self.seconds)))
