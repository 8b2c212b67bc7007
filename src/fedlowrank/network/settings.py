"""The section ``[network]`` of an experiment: how a server deals with clients it can only reach by messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..choices import check_choices
from ..errors import ConfigError
from .trust import Limits


@dataclass(frozen=True)
class NetworkSettings:
    """How a server deals with clients that it can only reach by messages.

    Attributes:
        clients: how many there are; by default as many as partition.clients says.
        min_clients: the run begins once so many have introduced themselves; by default all. Later ones join as they come.
        wait: seconds for which they are waited for before the run begins, and which a registration may take.
        deadline: seconds a round; who has not replied by then is left out of it, and keeps the state of before.
        min_replies: good replies without which a round does not count. It is asked for again, and then the run stops. 0
            lets rounds pass in which nobody replies.
        attempts: how often a round is asked for.
        silent_after: a client that let so many orders in a row pass without a reply until the deadline sits out a round, then
            two, four, ...; 0 for never.
        examples: training examples that each client promised to have; a client that registers more is rejected.
        forgotten: what to do with a client that lost the state it should build on: leave it out, or let it begin anew.
        limits: what is taken from a client.
    """

    clients: int | None = None
    min_clients: int | None = None
    wait: float = 600.0
    deadline: float = 3600.0
    min_replies: int = 1
    attempts: int = 3
    silent_after: int = 2
    examples: tuple[int, ...] = ()
    forgotten: Literal["leave", "begin"] = "leave"
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (("clients", 1), ("min_clients", 1), ("min_replies", 0), ("attempts", 1),
                            ("silent_after", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"network.{name} must be >= {least}; it is {value}")
        for name in ("wait", "deadline"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"network.{name} is a number of seconds above 0; it is {getattr(self, name)}")
        if any(count < 1 for count in self.examples):
            raise ConfigError(
                f"network.examples promises at least 1 example of every client; it is {list(self.examples)}"
            )
        if self.clients is not None and (self.min_clients or 1) > self.clients:
            raise ConfigError(f"network.min_clients is {self.min_clients}, but there are {self.clients} clients")

    def enough(self, clients: int) -> int:
        """With how many clients the run begins."""
        return min(self.min_clients or clients, clients)
