"""The section ``[network]``: how a server deals with clients that it can only reach by messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError


@dataclass(frozen=True)
class Limits(CheckedFields):
    """What is taken from a client over the network.

    Attributes:
        max_bytes: of an upload as it comes; None for twice what is expected and 64 KiB.
        update_ratio: an update may be as long as this times the median of the round and of past rounds (the
            formula is in :mod:`fedlowrank.network.validation.norms`); a longer one is shortened to that. 0 for no
            bound. Rules of run.robust other than the mean bound updates themselves, and nothing is shortened.
        strikes: of its last ten updates so many were longer than that, and a client is held to the median itself;
            0 for never.
        refuse_ratio: a reply is refused for its round if its update is longer than this times the median; such
            replies do not count for ban_after; 0 for never.
        max_norm: largest Euclidean norm of all floating-point numbers of an upload together; None for any.
        examples_ratio: a client's reply is weighted by its training examples, but by at most this times the
            median of all registered clients; 0 for no bound. The update of a client above the median may be
            shorter in proportion. Where network.examples promises the counts, those are the bound instead.
        max_examples: that a client may claim to hold; None for any number.
        ban_after: a client of whom so many replies were refused takes no further part; 0 for never.
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
    """How a server deals with clients that it can only reach by messages.

    Attributes:
        clients: how many there are; by default as many as partition.clients says.
        min_clients: the run begins once so many have introduced themselves; by default all. Later ones join
            as they come.
        wait: seconds for which they are waited for before the run begins, and which a registration may take.
        deadline: seconds a round; who has not replied by then is left out of it, and keeps the state of
            before.
        grace: once there are min_replies good replies, the others are waited for until so many medians of past reply
            times have passed since the orders were sent, but at least a minute and at most the deadline; 0 for the
            whole deadline.
        min_replies: good replies without which a round does not count. It is asked for again, and then the
            run stops. 0 accepts rounds without any reply.
        attempts: how often a round is asked for.
        silent_after: a client that let so many orders in a row pass without a reply until the deadline sits
            out a round, then two, four, ...; 0 for never.
        max_fall: the run pauses if the validation accuracy of the clients falls by more than this below the best
            earlier round (the median over clients; of a regression the loss must rise by more than this share of the
            loss before training); 0 for never. Under run.privacy clients send no evaluations, and no run pauses.
        examples: training examples that each client promised to have; a client that registers more is
            rejected.
        forgotten: what to do with a client that lost the state it should build on: leave it out, or let it
            begin anew.
        limits: what is taken from a client.
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
        """With how many clients the run begins."""
        return min(self.min_clients or client_count, client_count)
