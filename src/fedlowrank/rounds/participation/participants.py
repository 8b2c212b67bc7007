"""Draws the participants of each round, by draws that are the same for every method."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from ...core.arguments.shares import multiply_share, round_half_up
from ...core.errors import ConfigError
from ...core.key import Key
from ...trust.privacy.accounting import Sampling
from ..run_settings import RunSettings
from .unequal_sampling import choose_by_loss, draw_by_size, weights_by_size


def draw_unseen(client_count: int, share: float, key: Key) -> frozenset[int]:
    """Draw the clients that never train.

    Args:
        client_count: number of clients in the federation.
        share: share of them, ``run.unseen``.
        key: root key of the federation's randomness.

    Raises:
        ConfigError: if no client is left to train, or the share rounds to none.
    """
    count = round_half_up(multiply_share(share, client_count))
    if share and not count:
        raise ConfigError(
            f"run.unseen = {share} of {client_count} clients rounds to no client. Set it to "
            f"{1 / client_count:.3g}, which is one client, or leave it out"
        )
    if count >= client_count:
        raise ConfigError(f"run.unseen = {share} leaves no client of {count} to train")
    order = (key / "unseen").numpy().permutation(client_count)
    return frozenset(order[:count].tolist())


class Participants:
    """Draws the clients of each round.

    Args:
        client_count: number of clients in the federation.
        settings: settings of the run.
        key: root key of the federation's randomness.
        secret: whether to draw from the operating system, because privacy is amplified only by draws that no client
            can foresee.

    Attributes:
        unseen: identifiers of clients that never train.
        seen: identifiers of the clients that may train.
        sampling: procedure that draws participants from ``seen``.
        expected: expected number of participants in a round.

    Raises:
        ConfigError: if no client is left to train, or a share of unseen clients rounds to none.
    """

    def __init__(self, client_count: int, settings: RunSettings, key: Key, *, secret: bool = False) -> None:
        self._share, self._key = settings.participation, key / "participants"
        self._secret, self._last = secret, (-1, list[int]())
        self.unseen = draw_unseen(client_count, settings.unseen, key)
        self.seen = [i for i in range(client_count) if i not in self.unseen]
        self.sampling = _sampling(settings, len(self.seen))
        self._kind, self._count = settings.sampling, count_participants(self._share, len(self.seen))
        is_poisson = self.sampling.kind == "poisson"
        self.expected = len(self.seen) * self._share if is_poisson else float(self._count)
        trainable_count = len(self.seen)
        self._candidates = (
            min(2 * self._count, trainable_count) if settings.candidates is None else settings.candidates
        )
        if not self._count <= self._candidates <= trainable_count:
            raise ConfigError(
                f"run.candidates = {self._candidates} must be at least the {self._count} clients of a round and at most "
                f"the {trainable_count} that may train"
            )

    def draw(
        self, round: int, sizes: Sequence[int] = (), losses: Mapping[int, float] | None = None
    ) -> list[int]:
        """Draw the clients of a round, by identifier; with Poisson sampling there may be none.

        Args:
            round: index of the round, from 0.
            sizes: numbers of training examples of all clients, for a draw by size or loss.
            losses: last known training losses by client, for a draw by loss.
        """
        if self._kind in ("size", "loss"):
            return self._drawn_by_size((self._key / round).generator(), sizes, losses or {})
        if not self._secret:
            return self._drawn((self._key / round).generator())
        if self._last[0] != round:
            seed = int.from_bytes(os.urandom(8), "little") >> 1
            self._last = round, self._drawn(torch.Generator().manual_seed(seed))
        return self._last[1]

    def weights(self, sizes: Sequence[int]) -> dict[int, int]:
        """Weight of each client that may train, in a mean by examples after a draw by size."""
        return dict(zip(self.seen, weights_by_size([sizes[i] for i in self.seen], self._count), strict=True))

    def _drawn_by_size(
        self, generator: torch.Generator, sizes: Sequence[int], losses: Mapping[int, float]
    ) -> list[int]:
        trainable_sizes = [sizes[i] for i in self.seen]
        if self._kind == "size":
            return [self.seen[i] for i in draw_by_size(trainable_sizes, self._count, generator)]
        candidates = [self.seen[i] for i in draw_by_size(trainable_sizes, self._candidates, generator)]
        order = torch.randperm(len(candidates), generator=generator).tolist()
        return choose_by_loss([candidates[i] for i in order], losses, self._count)

    def _drawn(self, generator: torch.Generator) -> list[int]:
        if self.sampling.kind == "poisson":
            draws = torch.rand(len(self.seen), generator=generator).tolist()
            return [i for i, u in zip(self.seen, draws, strict=True) if u < self._share]
        order = torch.randperm(len(self.seen), generator=generator)
        return sorted(self.seen[i] for i in order[: self._count].tolist())


def _sampling(settings: RunSettings, client_count: int) -> Sampling:
    """Make the sampling that draws the clients of a round from those that may train."""
    if settings.sampling == "poisson":
        return Sampling("poisson", client_count, rate=settings.participation)
    count = count_participants(settings.participation, client_count)
    return (
        Sampling("all", client_count)
        if count == client_count
        else Sampling("fixed", client_count, count=count)
    )


def count_participants(share: float, client_count: int) -> int:
    """Number of clients in a round of fixed size: the share of those that may train, rounded, and at least one."""
    return max(1, round_half_up(multiply_share(share, client_count)))
