"""The section ``[network]``: how a server treats clients that it reaches only by messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError


@dataclass(frozen=True)
class Limits(CheckedFields):
    """Limits on what a server accepts from a client over the network.

    Attributes:
        max_bytes: largest size of an encoded upload; None for twice the expected size and 64 KiB.
        update_ratio: largest length of an update as a multiple of the median of the round and of past rounds (the
            formula is in :mod:`fedlowrank.network.validation.norms`); a longer update is shortened to that. 0 for no
            bound. Rules of run.robust other than the mean bound updates themselves, and nothing is shortened.
        strikes: number of updates longer than update_ratio allows, among a client's last ten, at which its updates
            are bounded by the median itself; 0 for never.
        refuse_ratio: multiple of the median beyond which an update's reply is refused for its round; such replies do
            not count for ban_after; 0 for never.
        max_norm: largest Euclidean norm of all floating-point numbers of an upload together; None for any.
        examples_ratio: largest weight of a client's reply, which is its number of training examples, as a multiple of
            the median of all registered clients; 0 for no bound. The update of a client above the median may be
            shorter in proportion. If network.examples promises the counts, these are the bound instead.
        max_examples: largest number of examples that a client may claim; None for any number.
        ban_after: number of refused replies after which a client is banned from the run; 0 for never.
    """

    section = "limits"

    max_bytes: int | None = None
    update_ratio: float = 3.0
    strikes: int = 3
    refuse_ratio: float = 30.0
    max_norm: float | None = None
    examples_ratio: float = 3.0
    max_examples: int | None = None
    ban_after: int = 3

    def __post_init__(self) -> None:
        bounds = {"max_bytes": ">= 1", "max_norm": "> 0", "max_examples": ">= 1", "ban_after": ">= 0"}
        bounds["strikes"] = ">= 0"
        check_bounds(self, bounds, "limits")
        for name in ("update_ratio", "refuse_ratio", "examples_ratio"):
            ratio = getattr(self, name)
            if not (ratio == 0 or 1 <= ratio < math.inf):
                raise ConfigError(f"limits: {name} must be >= 1, or 0 for no bound; it is {ratio}")
        if 0 < self.refuse_ratio < self.update_ratio:
            raise ConfigError(
                f"limits: refuse_ratio = {self.refuse_ratio:g} refuses updates that update_ratio = "
                f"{self.update_ratio:g} allows; raise the one or lower the other"
            )


@dataclass(frozen=True)
class NetworkSettings(CheckedFields):
    """How a server treats clients that it reaches only by messages.

    Attributes:
        clients: number of clients; by default that of partition.clients.
        min_clients: number of registered clients at which the run begins; by default all. Later ones join as they
            come.
        wait: seconds for which the server waits for clients before the run begins, and which a registration may take.
        deadline: seconds a round may take; a client that has not replied by then is left out of the round, and keeps
            the state of before.
        grace: time limit for the remaining replies once there are min_replies good ones, in medians of past reply
            times since the orders were sent; it is at least a minute and at most the deadline. 0 for the whole
            deadline.
        min_replies: number of good replies without which a round does not count. Such a round is repeated, and then
            the run stops. 0 accepts rounds without any reply. Under secure sums it is the number of clients that begin
            a round, if it is above their threshold.
        attempts: number of times that a round is requested.
        silent_after: number of consecutive orders without a reply until the deadline after which a client sits out a
            round, then two, four, ...; 0 for never.
        max_fall: largest fall of the clients' validation accuracy below the best earlier round before the run pauses
            (the median over clients; for models without an accuracy, the largest rise of the loss as a share of the loss
            before training); 0 for never. Under run.privacy clients send no evaluations, and no run pauses.
        examples: number of training examples that each client promised to have; a client that registers more is
            rejected.
        forgotten: treatment of a client that lost the state it should build on: leave it out, or let it start from the beginning.
        limits: limits on what a server accepts from a client.
    """

    section = "network"

    clients: int | None = None
    min_clients: int | None = None
    wait: float = 600.0
    deadline: float = 3600.0
    min_replies: int = 1
    attempts: int = 3
    grace: float = 5.0
    max_fall: float = 0.2
    silent_after: int = 2
    examples: tuple[int, ...] = ()
    forgotten: Literal["leave", "begin"] = "leave"
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name, minimum in (("clients", 1), ("min_clients", 1), ("min_replies", 0), ("attempts", 1),
                            ("silent_after", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"network.{name} must be >= {minimum}; it is {value}")
        for name in ("wait", "deadline"):
            if not 0 < (seconds := getattr(self, name)) < float("inf"):
                raise ConfigError(f"network.{name} is a number of seconds above 0; it is {seconds}")
        if not 0 <= self.max_fall <= 1:
            raise ConfigError(f"network.max_fall is a share in [0, 1], 0 for never; it is {self.max_fall}")
        if not (self.grace == 0 or 1 <= self.grace < math.inf):
            raise ConfigError(f"network.grace must be >= 1, or 0 for the whole deadline; it is {self.grace}")
        if any(count < 1 for count in self.examples):
            raise ConfigError(
                f"network.examples promises at least 1 example of every client; it is {list(self.examples)}"
            )
        if self.clients is not None and (self.min_clients or 1) > self.clients:
            raise ConfigError(f"network.min_clients is {self.min_clients}, but there are {self.clients}")

    def min_registered(self, client_count: int) -> int:
        """Number of registered clients at which the run begins."""
        return min(self.min_clients or client_count, client_count)
