"""Who takes part in a round, by draws that are the same for every method."""

from __future__ import annotations

import os

import torch

from ..core.errors import ConfigError
from ..core.key import Key
from ..trust.accounting import Sampling
from .settings import RunSettings


class Participants:
    """Draws the clients of each round.

    Args:
        clients: of the federation.
        settings: of the run.
        key: of the federation.
        secret: draw from the operating system, for privacy is amplified only by draws that no client can
            foresee.

    Attributes:
        unseen: identifiers of clients that never train.
        seen: identifiers of the others.
        sampling: how clients are drawn from those.
        expected: clients that are expected in a round.

    Raises:
        ConfigError: if no client is left to train.
    """

    def __init__(self, clients: int, settings: RunSettings, key: Key, *, secret: bool = False) -> None:
        self._share, self._key = settings.participation, key / "participants"
        self._secret, self._last = secret, (-1, list[int]())
        count = round_half_up(settings.unseen * clients)
        if count >= clients:
            raise ConfigError(f"run.unseen = {settings.unseen} leaves no client of {count} to train")
        order = (key / "unseen").numpy().permutation(clients)
        self.unseen = frozenset(order[:count].tolist())
        self.seen = [i for i in range(clients) if i not in self.unseen]
        self.sampling = _sampling(settings, len(self.seen))
        self.expected = float(self.sampling.count or len(self.seen) * self._share)

    def draw(self, round: int) -> list[int]:
        """The clients of a round, by identifier; with Poisson sampling there may be none."""
        if not self._secret:
            return self._drawn((self._key / round).generator())
        if self._last[0] != round:
            seed = int.from_bytes(os.urandom(8), "little") >> 1
            self._last = round, self._drawn(torch.Generator().manual_seed(seed))
        return self._last[1]

    def _drawn(self, generator: torch.Generator) -> list[int]:
        if self.sampling.kind == "poisson":
            draws = torch.rand(len(self.seen), generator=generator).tolist()
            return [i for i, u in zip(self.seen, draws, strict=True) if u < self._share]
        count = max(1, round_half_up(self._share * len(self.seen)))
        order = torch.randperm(len(self.seen), generator=generator)
        return sorted(self.seen[i] for i in order[:count].tolist())


def _sampling(settings: RunSettings, clients: int) -> Sampling:
    """How the clients of a round are drawn from those that may train."""
    if settings.sampling == "poisson":
        return Sampling("poisson", clients, rate=settings.participation)
    count = max(1, round_half_up(settings.participation * clients))
    return Sampling("all", clients) if count == clients else Sampling("fixed", clients, count=count)


def round_half_up(x: float) -> int:
    """Nearest whole number; halves go up, so that 10 % of 25 clients are 3."""
    return int(x + 0.5)
