"""Exponential backoff for clients that are connected but do not reply."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PAUSE_EXPONENT = 10
"""Exponent of the longest pause: it is 2 to this power, in rounds."""


@dataclass
class Backoff:
    """Counts orders without a reply and pauses the clients that missed too many.

    A client that missed ``after`` orders in a row is paused for one round and asked again; then it is paused for two,
    four, eight, ... rounds, until it replies.

    Attributes:
        after: number of missed orders in a row after which a client is paused; 0 for never.
        counts: number of missed orders in a row, by client.
        until: number of completed rounds from which a paused client is asked again, by client; a restarted server asks
            every client.
    """

    after: int
    counts: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def record_timeout(self, client_id: int, round: int) -> int:
        """Count a missed order after ``round`` completed rounds; returns the length of the client's pause in rounds."""
        count = self.counts[client_id] = self.counts.get(client_id, 0) + 1
        if not self.after or count < self.after:
            return 0
        pause: int = 2 ** min(count - self.after, MAX_PAUSE_EXPONENT)
        self.until[client_id] = round + 1 + pause
        return pause

    def record_reply(self, client_id: int) -> None:
        """End a client's pause and reset its count."""
        self.counts.pop(client_id, None)
        self.until.pop(client_id, None)

    def list_paused(self, round: int) -> set[int]:
        """Identifiers of the clients that get no order after ``round`` completed rounds."""
        return {client_id for client_id, until in self.until.items() if round < until}
