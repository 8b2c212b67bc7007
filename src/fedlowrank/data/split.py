"""How the examples of each client are divided into training, validation and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..core.errors import ConfigError, DataError
from ..core.key import Key
from .counting import Index, at_least, largest_remainder
from .dataset import Dataset, Examples


@dataclass(frozen=True)
class Pool:
    """What a split may look at. Positions count through the official training part and go on through the test part.

    Attributes:
        dataset: the data set.
    """

    dataset: Dataset

    @cached_property
    def labels(self) -> npt.NDArray[Any]:
        """What partitions go by, of all examples: strata [n], where there are some; else labels [n].

        Else of a regression its targets [n, d], and of labels of tokens, by which no partition could go, zeros [n, 1].
        """
        strata = [s for s in (self.dataset.strata, self.dataset.strata_test) if s is not None]
        if strata:
            return _joined(strata)
        if self.dataset.train.tokens:
            return np.zeros((sum(len(part) for part in self.parts), 1))
        return _joined([part.y for part in self.parts])

    @property
    def names(self) -> tuple[str, ...]:
        """What :attr:`labels` number: classes, or strata; empty where there are neither."""
        return self.dataset.classes or self.dataset.strata_names

    @cached_property
    def natural(self) -> Index | None:
        """Natural clients of all examples, [n], or None unless every part has them."""
        ids = [self.dataset.natural, self.dataset.natural_test][: len(self.parts)]
        known = [i for i in ids if i is not None]
        if len(known) < len(ids):
            return None
        joined: Index = _joined(known)
        return joined

    @property
    def parts(self) -> list[Examples]:
        """The official parts."""
        return [part for part in (self.dataset.train, self.dataset.test) if part is not None]

    @property
    def train_size(self) -> int:
        """Number of examples of the training part; the position of the first test example."""
        return len(self.dataset.train)

    @cached_property
    def test(self) -> Index:
        """Positions of the official test part."""
        return np.arange(self.train_size, len(self.labels))


Use: TypeAlias = Literal["unused", "merged", "shared", "whole"]


class Positions(NamedTuple):
    """Positions of one client's examples in the pool, with notes for the reader."""

    train: Index
    val: Index
    test: Index
    notes: tuple[str, ...] = ()


class Split(Protocol):
    """A way to give each client training, validation and test examples."""

    @property
    def official_test(self) -> Use:
        """What becomes of the official test part.

        ``unused``: nothing. ``merged``: the partition shares it out together with the training part, if there is one.
        ``shared``: the partition shares it out by itself, by the same rule as the training part. ``whole``: every client
        sees all of it. The last two need one.
        """
        ...

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:
        """Divide the examples of one client.

        Args:
            pool: the whole data set.
            own: sorted positions that the partition gave to the client; of test examples, too, if the official test
                part is merged or shared.
            client: its number, for messages.
            key: randomness of this client.

        Raises:
            DataError: if the client has too few examples; the message names it.
        """
        ...


@dataclass(frozen=True)
class Local:
    """Each client's own examples, divided at random.

    Attributes:
        train: share for training, above 0.
        val: share for validation; with 0 there is none.
        test: share for the test, above 0. The three add up to 1. A client has at least one example in each part whose
            share is above 0.
        pool: ``train`` shares out the official training part and leaves the official test part unused; ``all`` shares
            out both together.
    """

    train: float = 0.8
    val: float = 0.1
    test: float = 0.1
    pool: Literal["train", "all"] = "train"

    def __post_init__(self) -> None:
        shares = (self.train, self.val, self.test)
        if not all(math.isfinite(s) and s >= 0 for s in shares) or self.train <= 0 or self.test <= 0:
            raise ConfigError(f"the shares train, val, test must be numbers from 0 to 1, val alone may be 0: {shares}.")
        if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise ConfigError(f"the shares train, val, test must add up to 1: {shares} add up to {sum(shares):g}.")
        if self.pool not in ("train", "all"):
            raise ConfigError(f"split.pool must be 'train' or 'all', not {self.pool!r}.")

    @property
    def official_test(self) -> Use:
        """See `Split.official_test`."""
        return "merged" if self.pool == "all" else "unused"

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:  # noqa: ARG002
        """Divide the examples of one client; see `Split.cut`."""
        shares = np.array([self.train, self.val, self.test])
        least = (shares > 0).astype(np.int64)
        if len(own) < least.sum():
            raise DataError(
                f"client {client} has {len(own)} examples, too few for one in each of {least.sum()} parts. "
                "Raise the smallest size of a client in the partition, or lower the number of clients."
            )
        counts = largest_remainder(shares, len(own))
        while (missing := counts < least).any():
            counts[np.argmax(missing)] += 1
            counts[np.argmax(counts)] -= 1
        order = (key / "order").numpy().permutation(own)
        train, val, test = np.split(order, np.cumsum(counts)[:-1])
        return Positions(np.sort(train), np.sort(val), np.sort(test))


@dataclass(frozen=True)
class Matched:
    """Test examples from the official test part, with the mixture of classes of the client's own examples.

    A client's test examples differ from each other, but two clients may have some in common. The mixture is that of
    all the examples that the client holds for training and validation, rounded by the largest remainder. This is how
    FedSLR tests personalized models.

    Attributes:
        val: share of the client's examples for validation, from 0 to below 1; above 0 it is at least one example.
        test_per_client: number of test examples of each client, at least 1; fewer if the test part has too few of a
            class, which the client's notes then say.
    """

    val: float = 0.1
    test_per_client: int = 100

    def __post_init__(self) -> None:
        _check_val(self.val)
        at_least("test_per_client", self.test_per_client, 1)

    @property
    def official_test(self) -> Use:
        """See `Split.official_test`."""
        return "whole"

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:
        """Divide the examples of one client; see `Split.cut`."""
        names = pool.names
        if not names:
            raise DataError(
                "split 'matched' draws test examples by class labels, but these data have none. Use split "
                "'local', 'whole_test' or 'own_test'."
            )
        train, val = _hold_out(own, self.val, client, key)
        wanted = largest_remainder(np.bincount(pool.labels[own], minlength=len(names)), self.test_per_client)
        draws = (key / "test").numpy()
        test, notes = [], []
        for c in np.flatnonzero(wanted):
            there = pool.test[pool.labels[pool.test] == c]
            if len(there) < wanted[c]:
                notes.append(
                    f"client {client}: {len(there)} test examples of class {names[c]!r} instead of {wanted[c]}; "
                    "the official test part has no more"
                )
            test.append(draws.permutation(there)[: wanted[c]])
        found = np.sort(np.concatenate(test))
        if len(found) == 0:
            raise DataError(f"client {client} gets no test example: the test part has none of its classes.")
        return Positions(train, val, found, tuple(notes))


@dataclass(frozen=True)
class WholeTest:
    """Every client is tested on the whole official test part.

    Attributes:
        val: share of the client's examples for validation, from 0 to below 1; above 0 it is at least one example.
    """

    val: float = 0.1

    def __post_init__(self) -> None:
        _check_val(self.val)

    @property
    def official_test(self) -> Use:
        """See `Split.official_test`."""
        return "whole"

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:
        """Divide the examples of one client; see `Split.cut`."""
        return Positions(*_hold_out(own, self.val, client, key), pool.test)


@dataclass(frozen=True)
class OwnTest:
    """Every natural client is tested on its own examples of the official test part. Goes with partition ``natural``.

    Attributes:
        val: share of the client's examples for validation, from 0 to below 1; above 0 it is at least one example.
    """

    val: float = 0.1

    def __post_init__(self) -> None:
        _check_val(self.val)

    @property
    def official_test(self) -> Use:
        """See `Split.official_test`."""
        return "whole"

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:
        """Divide the examples of one client; see `Split.cut`."""
        if pool.natural is None:
            raise DataError("split 'own_test' needs natural clients in both the training part and the test part.")
        ids = np.unique(pool.natural[own])
        if len(ids) != 1:
            raise DataError(f"client {client} mixes natural clients; split 'own_test' needs partition 'natural'.")
        test = pool.test[pool.natural[pool.test] == ids[0]]
        if len(test) == 0:
            raise DataError(f"client {client} (natural client {ids[0]}) has no example in the test part.")
        return Positions(*_hold_out(own, self.val, client, key), test)


@dataclass(frozen=True)
class TestShare:
    """The official test part is shared out among the clients by the rule that shares out the training part.

    No test example occurs twice. It goes with the partitions whose rule draws no mixture of classes at random, ``iid``
    and ``label_groups``; ``own_test`` does the same for ``natural``.

    Attributes:
        val: share of the client's training examples for validation, from 0 to below 1; above 0 it is at least one.
    """

    __test__: ClassVar[bool] = False  # pytest would take it for a class of tests

    val: float = 0.0

    def __post_init__(self) -> None:
        _check_val(self.val)

    @property
    def official_test(self) -> Use:
        """See `Split.official_test`."""
        return "shared"

    def cut(self, pool: Pool, own: Index, client: int, key: Key) -> Positions:
        """Divide the examples of one client; see `Split.cut`."""
        mine = own < pool.train_size
        return Positions(*_hold_out(own[mine], self.val, client, key), own[~mine])


SPLITS: dict[str, type] = {
    "local": Local,
    "matched": Matched,
    "whole_test": WholeTest,
    "own_test": OwnTest,
    "test_share": TestShare,
}
"""Splits by name."""


def _check_val(val: float) -> None:
    if not 0 <= val < 1:
        raise ConfigError(f"split.val must be a share from 0 to below 1, not {val!r}.")


def _hold_out(own: Index, val: float, client: int, key: Key) -> tuple[Index, Index]:
    """Positions for training and for validation."""
    if val == 0:
        return own, own[:0]
    if len(own) < 2:
        raise DataError(
            f"client {client} has {len(own)} examples, too few for training and validation. Set split.val to 0, or "
            "raise the smallest size of a client in the partition."
        )
    held = int(np.clip(largest_remainder([1 - val, val], len(own))[1], 1, len(own) - 1))
    order = (key / "order").numpy().permutation(own)
    return np.sort(order[held:]), np.sort(order[:held])


def _joined(parts: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    joined: npt.NDArray[Any] = torch.cat(list(parts)).numpy()
    return joined
