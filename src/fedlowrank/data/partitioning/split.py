"""Splits: rules that give each client training, validation and test examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError
from ...core.io.text import format_count
from ...core.key import Key
from ..dataset import Dataset
from .apportion import IntArray, round_shares


@dataclass(frozen=True)
class Pool(CheckedFields):
    """The examples of both official parts as positions; test positions follow training positions."""

    dataset: Dataset

    @cached_property
    def labels(self) -> npt.NDArray[Any]:
        """Values of all examples that partitions use: strata [n] if there are any, else labels [n].

        For a regression they are its targets [n, d]. Labels of pixels or tokens, which no partition can use, become
        zeros [n, 1].
        """
        train, test = self.dataset.train, self.dataset.test
        if self.dataset.strata is not None:
            return _concatenate(self.dataset.strata, self.dataset.strata_test)
        if train.is_dense:
            return np.zeros((len(train) + (0 if test is None else len(test)), 1))
        return _concatenate(train.y, None if test is None else test.y)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes or strata that :attr:`labels` number; empty if there are neither."""
        return (() if self.dataset.train.is_dense else self.dataset.classes) or self.dataset.strata_names

    @cached_property
    def natural(self) -> IntArray | None:
        """Natural clients of all examples, [n]; None unless every part has them."""
        train, test = self.dataset.natural, self.dataset.natural_test
        if train is None or (test is None and self.dataset.test is not None):
            return None
        return _concatenate(train, test)

    @property
    def train_size(self) -> int:
        """Number of training examples, which is the position of the first test example."""
        return len(self.dataset.train)

    @cached_property
    def test(self) -> IntArray:
        """Positions of the official test part."""
        return np.arange(self.train_size, len(self.labels))


TestUse: TypeAlias = Literal["unused", "merged", "shared", "whole"]
"""Use of the official test part.

``unused``: it is not used. ``merged``: the partition assigns it together with the training part, if there is one.
``shared``: the partition assigns it separately, by the same rule. ``whole``: every client sees all of it. The last
two need a test part.
"""


class TooFewExamplesError(DataError):
    """A client has too few examples for the parts of a split.

    Args:
        owner: the client.
        lack: number of its examples, and of the parts.
        advice: advice on what to do in a simulation.
    """

    def __init__(self, owner: str, lack: str, advice: str) -> None:
        super().__init__(f"{owner} has {lack}. {advice}")
        self.owner, self.lack, self.advice = owner, lack, advice

    def __reduce__(self) -> tuple[type[TooFewExamplesError], tuple[str, str, str]]:
        return type(self), (self.owner, self.lack, self.advice)


class Positions(NamedTuple):
    """Sorted positions of one client's examples in the pool, and warnings for the reader."""

    train: IntArray
    val: IntArray
    test: IntArray
    notes: tuple[str, ...] = ()


class Split(Protocol):
    """A rule that gives each client training, validation and test examples."""

    @property
    def official_test(self) -> TestUse:
        """Use of the official test part."""
        ...

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:
        """Divide the examples of one client.

        Args:
            pool: pool of the whole data set.
            positions: sorted positions that the partition assigned to the client, including test examples if the
                official test part is merged or shared.
            client_id: number of the client, for messages.
            key: key of this client's randomness.

        Raises:
            DataError: if the client has too few examples; the message names it.
        """
        ...


@dataclass(frozen=True)
class LocalSplit(CheckedFields):
    """Each client's own examples, divided at random.

    Attributes:
        train: share for training, above 0.
        val: share for validation; 0 for no validation part.
        test: share for the test, above 0. The three shares add up to 1. A client has at least one example in each
            part whose share is above 0.
        pool: ``train`` partitions the official training part and leaves the official test part unused; ``all``
            partitions both together.
    """

    train: float = 0.8
    val: float = 0.1
    test: float = 0.1
    pool: Literal["train", "all"] = "train"

    def __post_init__(self) -> None:
        shares = (self.train, self.val, self.test)
        if not all(math.isfinite(s) and s >= 0 for s in shares) or self.train <= 0 or self.test <= 0:
            raise ConfigError(f"train, val, test must be shares from 0 to 1, val alone may be 0: {shares}.")
        if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise ConfigError(f"train, val, test must add up to 1: {shares} add up to {sum(shares):g}.")

    @property
    def official_test(self) -> TestUse:
        """See `Split.official_test`."""
        return "merged" if self.pool == "all" else "unused"

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:  # noqa: ARG002 - Split
        """See `Split.divide`."""
        part_count = sum(share > 0 for share in (self.train, self.val, self.test))
        if len(positions) < part_count:
            raise TooFewExamplesError(
                f"client {client_id}",
                f"{format_count(len(positions), 'example')}, too few for one in each of {part_count} parts",
                "Raise the smallest size of a client in the partition, or lower the number of clients.",
            )
        order = (key / "order").numpy().permutation(positions)
        train_end, val_end = self._find_ends(len(positions))
        return Positions(
            np.sort(order[:train_end]), np.sort(order[train_end:val_end]), np.sort(order[val_end:])
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - clients of one size are divided alike; a split is small
    def _find_ends(self, size: int) -> tuple[int, int]:
        """Positions at which training and validation examples end, among ``size`` examples in random order."""
        shares = np.array([self.train, self.val, self.test])
        counts, min_counts = round_shares(shares, size), shares > 0
        while (is_missing := counts < min_counts).any():
            counts[np.argmax(is_missing)] += 1
            counts[np.argmax(counts)] -= 1
        return int(counts[0]), int(counts[:2].sum())


@dataclass(frozen=True)
class _OfficialTest(CheckedFields):
    """Tests on the official test part; a share of the client's own examples is for validation.

    Attributes:
        val: share of the client's training examples for validation, from 0 to below 1; above 0 at least one example.
    """

    official_test: ClassVar[TestUse] = "whole"

    val: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.val < 1:
            raise ConfigError(f"split.val must be a share from 0 to below 1, not {self.val!r}.")

    def _hold_out(self, positions: IntArray, client_id: int, key: Key) -> tuple[IntArray, IntArray]:
        """Split sorted positions into those for training and for validation."""
        val = self.val
        if val == 0:
            return positions, positions[:0]
        if len(positions) < 2:
            raise TooFewExamplesError(
                f"client {client_id}",
                f"{format_count(len(positions), 'example')}, too few for two parts",
                "Set split.val to 0, or raise the smallest size of a client in the partition.",
            )
        size = int(np.clip(round_shares([1 - val, val], len(positions))[1], 1, len(positions) - 1))
        order = (key / "order").numpy().permutation(positions)
        return np.sort(order[size:]), np.sort(order[:size])


@dataclass(frozen=True)
class Matched(_OfficialTest):
    """Test examples from the official test part, in the class mixture of the client's own examples.

    The test examples of one client are distinct, but two clients may have some in common. The mixture is that of all
    training and validation examples of the client, rounded by the largest remainder. FedSLR tests personalized models
    in this way.

    Attributes:
        test_per_client: number of test examples of each client, at least 1; fewer if the test part has too few of a
            class, which the client's notes then report.
    """

    test_per_client: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("test_per_client", self.test_per_client, 1)

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:
        """See `Split.divide`."""
        names = pool.names
        if not names:
            raise DataError(
                "split 'matched' draws test examples by class labels, but these data have none. Use split "
                "'local', 'whole_test' or 'own_test'."
            )
        train, val = self._hold_out(positions, client_id, key)
        test_counts = round_shares(
            np.bincount(pool.labels[positions], minlength=len(names)), self.test_per_client
        )
        generator = (key / "test").numpy()
        test, notes = [], []
        for c in np.flatnonzero(test_counts):
            candidates = pool.test[pool.labels[pool.test] == c]
            if len(candidates) < test_counts[c]:
                notes.append(
                    f"client {client_id}: {len(candidates)} test examples of class {names[c]!r} instead of "
                    f"{test_counts[c]}; the official test part has no more"
                )
            test.append(generator.permutation(candidates)[: test_counts[c]])
        test_positions = np.sort(np.concatenate(test))
        if len(test_positions) == 0:
            raise DataError(
                f"client {client_id} gets no test example: the test part has none of its classes."
            )
        return Positions(train, val, test_positions, tuple(notes))


@dataclass(frozen=True)
class WholeTest(_OfficialTest):
    """Every client is tested on the whole official test part."""

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:
        """See `Split.divide`."""
        return Positions(*self._hold_out(positions, client_id, key), pool.test)


@dataclass(frozen=True)
class OwnTest(_OfficialTest):
    """Every natural client is tested on its own part of the official test set; for ``natural``."""

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:
        """See `Split.divide`."""
        if pool.natural is None:
            raise DataError("split 'own_test' needs natural clients in both the training and the test part.")
        ids = np.unique(pool.natural[positions])
        if len(ids) != 1:
            raise DataError(
                f"client {client_id} mixes natural clients; 'own_test' needs partition 'natural'."
            )
        test = pool.test[pool.natural[pool.test] == ids[0]]
        if len(test) == 0:
            raise DataError(f"client {client_id} (natural client {ids[0]}) has no example in the test part.")
        return Positions(*self._hold_out(positions, client_id, key), test)


@dataclass(frozen=True)
class TestShare(_OfficialTest):
    """The official test part is partitioned among the clients by the rule that partitions the training part.

    No test example occurs twice. It works with the partitions that draw no class mixtures, ``iid`` and
    ``label_groups``; ``own_test`` does the same for ``natural``.
    """

    __test__: ClassVar[bool] = False  # pytest would collect it as a test class
    official_test: ClassVar[TestUse] = "shared"

    val: float = 0.0

    def divide(self, pool: Pool, positions: IntArray, client_id: int, key: Key) -> Positions:
        """See `Split.divide`."""
        is_train = positions < pool.train_size
        return Positions(*self._hold_out(positions[is_train], client_id, key), positions[~is_train])


SPLITS: dict[str, type] = {
    "local": LocalSplit,
    "matched": Matched,
    "whole_test": WholeTest,
    "own_test": OwnTest,
    "test_share": TestShare,
}
"""Splits by name."""


def _concatenate(train: torch.Tensor, test: torch.Tensor | None) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = torch.cat([train] if test is None else [train, test]).numpy()
    return values
