"""Partitions: rules that assign the examples of a data set to clients.

A partition sees labels and natural client ids, never inputs. It returns positions, so it can be tested, plotted and
compared without the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError
from ...core.key import Key
from .apportion import (
    FloatArray,
    IntArray,
    Parts,
    deal_classes,
    redraw_until_large,
    round_shares,
    shuffle_classes,
    spread_classes,
)
from .checks import check_labels, check_positive
from .extended_dirichlet import ExtendedDirichlet
from .rank_skew import RankSkew

# ruff: noqa: ARG002 - rules ignore the arguments that they do not need


class Partition(Protocol):
    """A rule that assigns examples to clients.

    Attributes:
        repeatable: whether the rule can assign further examples, which requires that no client draws a class mixture.
    """

    repeatable: ClassVar[bool]

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """Assign n examples to clients.

        Args:
            labels: label of each example, integers [n] in 0..classes-1, or the targets [n, d] of a regression.
            class_count: number of classes; 0 for a regression, which only ``iid`` and ``natural`` accept.
            key: key of the randomness.
            natural_clients: natural client of each example, integers [n], or None. A negative id means no client.

        Returns:
            The sorted positions of each client's examples; no position occurs twice.

        Raises:
            DataError: if the rule cannot assign these examples.
        """
        ...


@dataclass(frozen=True)
class Iid(CheckedFields):
    """Random assignment: every client sees the same distribution. Uses all examples.

    Attributes:
        clients: number of clients, at least 1. Their sizes differ by at most one example.
    """

    repeatable: ClassVar[bool] = True

    clients: int = 10

    def __post_init__(self) -> None:
        check_minimum("clients", self.clients, 1)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        n = check_labels(labels, class_count, self.clients, ignores_labels=True)
        order = (key / "order").numpy().permutation(n)
        return [np.sort(part) for part in np.array_split(order, self.clients)]


@dataclass(frozen=True)
class Dirichlet(CheckedFields):
    """Label skew: each class is spread over the clients in proportions drawn from a Dirichlet distribution.

    Clients differ in size as well as in labels. All examples are used. The whole partition is drawn again
    until every client is large enough. Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning
    of Neural Networks" (ICML 2019).

    Attributes:
        clients: number of clients, at least 1.
        alpha: concentration, above 0; small: few classes per client; large: all clients alike.
        min_size: smallest number of examples of a client, at least 1.
        max_redraws: number of partitions to draw before giving up, at least 1.
    """

    repeatable: ClassVar[bool] = False

    clients: int = 10
    alpha: float = 0.5
    min_size: int = 10
    max_redraws: int = 100

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        for name in ("clients", "min_size", "max_redraws"):
            check_minimum(name, getattr(self, name), 1)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        n = check_labels(labels, class_count, self.clients)
        totals = np.bincount(labels, minlength=class_count)
        generator = (key / "proportions").numpy()

        def draw() -> IntArray:
            return spread_classes(
                generator.dirichlet(np.full(self.clients, self.alpha), size=class_count), totals
            )

        counts = redraw_until_large(draw, n, self.clients, self.min_size, self.max_redraws, self.alpha)
        return deal_classes(shuffle_classes(labels, class_count, (key / "order").numpy()), counts)


@dataclass(frozen=True)
class EqualDirichlet(CheckedFields):
    """Label skew between clients of equal size: each client draws its own mixture of the classes.

    The mixture is drawn from Dir(alpha * prior), where the prior is the share of each class in the data. The
    client draws its examples from that mixture without replacement. When a class runs out, the mixture is
    renormalized over the rest, so the last clients get the remaining examples. Fewer than ``clients``
    examples stay unused. Source: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification" (2019).

    Attributes:
        clients: number of clients, at least 1; each gets floor(n / clients) examples.
        alpha: concentration, above 0; small: one class per client; large: all clients alike.
    """

    repeatable: ClassVar[bool] = False

    clients: int = 10
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_minimum("clients", self.clients, 1)
        check_positive("alpha", self.alpha)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        n = check_labels(labels, class_count, self.clients)
        remaining_counts = np.bincount(labels, minlength=class_count)
        prior = remaining_counts / n
        nonempty_classes = np.flatnonzero(remaining_counts)
        counts = np.zeros((self.clients, class_count), dtype=np.int64)
        for client_id in range(self.clients):
            generator = (key / "client" / client_id).numpy()
            mixture = np.zeros(class_count)
            mixture[nonempty_classes] = generator.dirichlet(self.alpha * prior[nonempty_classes])
            counts[client_id] = self._draw_counts(
                mixture, self.alpha * prior, remaining_counts, n // self.clients, generator
            )
            remaining_counts = remaining_counts - counts[client_id]
        class_positions = shuffle_classes(labels, class_count, (key / "order").numpy())
        return deal_classes([positions[::-1] for positions in class_positions], counts)

    @staticmethod
    def _draw_counts(
        mixture: FloatArray,
        concentration: FloatArray,
        available_counts: IntArray,
        size: int,
        generator: np.random.Generator,
    ) -> IntArray:
        """Draw ``size`` examples without replacement and count them by class, [classes].

        Draws beyond the remaining examples of a class are repeated, which gives the distribution of single draws. If
        the mixture of all remaining classes underflows, it is redrawn from their Dirichlet distribution, in log
        space: the renormalized mixture of some classes does not depend on the others.
        """
        counts, log_gammas = np.zeros_like(available_counts), None
        while (missing_count := size - int(counts.sum())) > 0:
            weights = np.where(available_counts > counts, mixture, 0.0)
            if weights.sum() <= 0:
                log_gammas = _draw_log_gamma(concentration, generator) if log_gammas is None else log_gammas
                log_weights = np.where(available_counts > counts, log_gammas, -np.inf)
                weights = np.exp(log_weights - log_weights.max())
            counts = np.minimum(
                counts + generator.multinomial(missing_count, weights / weights.sum()), available_counts
            )
        return counts


def _draw_log_gamma(shape: FloatArray, generator: np.random.Generator) -> FloatArray:
    """Draw logarithms of gamma variates: log G(a) = log G(a + 1) + log(U) / a, at least the smallest float64."""
    minimum = np.finfo(np.float64).min
    logs = np.full(len(shape), minimum)
    a = shape[shape > 0]
    with np.errstate(over="ignore"):
        logs[shape > 0] = np.log(generator.gamma(a + 1)) + np.log(generator.random(len(a))) / a
    return np.maximum(logs, minimum)


@dataclass(frozen=True)
class Pathological(CheckedFields):
    """Every client has exactly k classes, and the owners of a class share its examples in similar parts.

    Clients take in turn the k classes with the most free slots, with random ties, so the numbers of owners
    of two classes differ by at most one. An owner's weight within a class is drawn from U(0.4, 0.6). All
    examples of classes with an owner are used; with fewer than ``classes / k`` clients, some classes have no
    owner. Source: Shamsian et al., "Personalized Federated Learning using Hypernetworks" (pFedHN, ICML 2021).

    Attributes:
        clients: number of clients, at least 1.
        classes_per_client: number k of classes of each client, from 1 to the number of classes.
    """

    repeatable: ClassVar[bool] = False

    clients: int = 10
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        check_minimum("clients", self.clients, 1)
        check_minimum("classes_per_client", self.classes_per_client, 1)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        check_labels(labels, class_count, self.clients)
        totals = np.bincount(labels, minlength=class_count)
        nonempty_classes = np.flatnonzero(totals)
        if self.classes_per_client > len(nonempty_classes):
            raise DataError(
                f"partition.classes_per_client is {self.classes_per_client}, but only {len(nonempty_classes)} classes "
                "have examples."
            )
        is_owner = self._draw_owners(nonempty_classes, class_count, (key / "owners").numpy())
        weight_generator, order_generator = (key / "weights").numpy(), (key / "order").numpy()
        counts = np.zeros((self.clients, class_count), dtype=np.int64)
        class_positions = [np.empty(0, dtype=np.int64)] * class_count
        for c in np.flatnonzero(is_owner.any(axis=0)):
            owners = np.flatnonzero(is_owner[:, c])
            if totals[c] < len(owners):
                raise DataError(
                    f"class {c} has {totals[c]} examples for {len(owners)} clients. "
                    "Lower partition.clients or partition.classes_per_client."
                )
            # with at least as many examples as owners, every owner gets one: weights differ by a factor below
            # 1.5, so a share below 1 has a larger remainder than any share above 1
            counts[owners, c] = round_shares(weight_generator.uniform(0.4, 0.6, len(owners)), int(totals[c]))
            class_positions[c] = order_generator.permutation(np.flatnonzero(labels == c))
        return deal_classes(class_positions, counts)

    def _draw_owners(
        self, nonempty_classes: IntArray, class_count: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Draw whether each client owns each class, bool [clients, classes]."""
        slots, extra = divmod(self.clients * self.classes_per_client, len(nonempty_classes))
        free_slots = np.full(len(nonempty_classes), slots)
        free_slots[generator.permutation(len(nonempty_classes))[:extra]] += 1
        is_owner = np.zeros((self.clients, class_count), dtype=bool)
        for client_id in range(self.clients):
            ties = generator.random(len(nonempty_classes))
            # free slots differ by at most one at any time, so k classes always have one
            class_indices = np.lexsort((ties, -free_slots))[: self.classes_per_client]
            free_slots[class_indices] -= 1
            is_owner[client_id, nonempty_classes[class_indices]] = True
        return is_owner


@dataclass(frozen=True)
class Natural(CheckedFields):
    """The clients that the data come from: writers, speakers, hospitals.

    Attributes:
        clients: number of clients to draw among those with enough examples; None for all of them.
        min_examples: smallest number of examples of a client, at least 1.
    """

    repeatable: ClassVar[bool] = False

    clients: int | None = None
    min_examples: int = 1

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_minimum("clients", self.clients, 1)
        check_minimum("min_examples", self.min_examples, 1)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`; clients are in the order of their ids."""
        check_labels(labels, class_count, 1, ignores_labels=True)
        if natural_clients is None:
            raise DataError(
                "the data set has no natural clients. Name the column of the clients in data.client (of source 'text': "
                "data.client_column, or set data.client_by_file; in an .npz file: save an array 'client'), or use another "
                "partition, e.g. 'dirichlet'."
            )
        ids, counts = np.unique(natural_clients[natural_clients >= 0], return_counts=True)
        ids = ids[counts >= self.min_examples]
        client_count = len(ids) if self.clients is None else self.clients
        if len(ids) == 0 or client_count > len(ids):
            raise DataError(
                f"{len(ids)} natural clients have at least {self.min_examples} examples, but "
                f"{max(client_count, 1)} are required. Lower partition.clients or partition.min_examples."
            )
        client_ids = np.sort((key / "clients").numpy().permutation(ids)[:client_count])
        order = np.argsort(natural_clients, kind="stable")
        starts, ends = (
            np.searchsorted(natural_clients[order], client_ids, side=side) for side in ("left", "right")
        )
        return [order[i:j] for i, j in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class LabelGroups(CheckedFields):
    """Groups of clients with disjoint classes; random assignment within a group. Uses all examples.

    The classes are divided into groups of equal size, in order: with 100 classes and 10 groups, classes 0 to 9 are
    group 0. Clients k with k mod groups = g share the examples of group g. Use it with concept ``natural`` and as
    many clusters. FLoRAL partitions CIFAR-100 in this way.

    Attributes:
        groups: number of groups, at least 1; it must divide the number of classes.
        clients: number of clients, at least one per group. Sizes within a group differ by at most one.
    """

    repeatable: ClassVar[bool] = True

    groups: int = 10
    clients: int = 100

    def __post_init__(self) -> None:
        check_minimum("groups", self.groups, 1)
        check_minimum("clients", self.clients, 1)
        if self.clients < self.groups:
            raise ConfigError(
                f"partition.clients is {self.clients}, too few for one in each of {self.groups} groups of "
                "labels. Raise partition.clients or lower partition.groups."
            )

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        check_labels(labels, class_count, self.clients)
        if class_count % self.groups:
            raise DataError(
                f"{class_count} classes cannot be divided into {self.groups} groups of equal size. "
                "Set partition.groups to a divisor of the number of classes."
            )
        group_ids = labels // (class_count // self.groups)
        parts: list[IntArray] = [np.empty(0, dtype=np.int64)] * self.clients
        for g in range(self.groups):
            members = range(g, self.clients, self.groups)
            positions = (key / "order" / g).numpy().permutation(np.flatnonzero(group_ids == g))
            if len(positions) < len(members):
                raise DataError(
                    f"the {len(members)} clients of group {g} cannot share the {len(positions)} examples of its "
                    "classes. Lower partition.clients."
                )
            for client_id, part in zip(members, np.array_split(positions, len(members)), strict=True):
                parts[client_id] = np.sort(part)
        return parts


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "equal_dirichlet": EqualDirichlet,
    "pathological": Pathological,
    "natural": Natural,
    "label_groups": LabelGroups,
    "rank_skew": RankSkew,
    "extended_dirichlet": ExtendedDirichlet,
}
"""Partitions by name."""
