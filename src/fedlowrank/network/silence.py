"""Clients that are there and do not answer: they sit out rounds, so that not every round waits for them until its deadline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LONGEST = 10
"""The longest pause is 2 to this power, in rounds."""


@dataclass
class Silence:
    """Orders in a row that clients let pass without a reply.

    A client that let ``after`` of them pass sits out one round and is asked again; then two, four, eight, ... rounds, until it
    replies. So the rounds that wait for a client which never replies grow with the logarithm of the rounds only, and a client
    that was slow for a while takes part again.

    Attributes:
        after: orders in a row after which a client sits out; 0 for never.
        counts: orders in a row without a reply, by client.
        until: completed rounds from which a client is asked again.
    """

    after: int
    counts: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def missed(self, client: int, round: int) -> int:
        """Count an order without a reply.

        Args:
            client: who did not reply.
            round: rounds completed.

        Returns:
            How many rounds the client sits out now.
        """
        count = self.counts[client] = self.counts.get(client, 0) + 1
        if not self.after or count < self.after:
            return 0
        pause: int = 2 ** min(count - self.after, LONGEST)
        self.until[client] = round + 1 + pause
        return pause

    def heard(self, client: int) -> None:
        """A client replied."""
        self.counts.pop(client, None)
        self.until.pop(client, None)

    def sits_out(self, client: int, round: int) -> bool:
        """Whether a client gets no order after so many rounds."""
        return round < self.until.get(client, 0)

    def to_json(self) -> dict[str, int]:
        """The counts, to be stored. Pauses are not: a server that is started again asks everybody."""
        return {str(client): count for client, count in sorted(self.counts.items())}

    @classmethod
    def from_json(cls, after: int, stored: Mapping[str, int]) -> Silence:
        """Inverse of :meth:`to_json`."""
        return cls(after, {int(client): int(count) for client, count in stored.items()})
