"""How the examples of a data set are shared out among clients.

A partition sees labels and the clients' natural ids, never inputs. It returns positions, so that it can be tested,
drawn and compared without the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..core.errors import ConfigError, DataError
from ..core.key import Key
from .counting import Float, Index, at_least, check_labels, deal, largest_remainder, positive
from .rank_skew import RankSkew


class Partition(Protocol):
    """A way to share out examples."""

    @property
    def repeatable(self) -> bool:
        """Whether further examples can be shared out by the same rule: no client's mixture is drawn at random."""
        ...

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:
        """Share out n examples.

        Args:
            labels: label of each example, integers [n] in 0..classes-1; of a regression its targets [n, d].
            classes: number of classes; 0 for a regression, which only ``iid`` and ``natural`` can share out.
            key: the randomness of the partition.
            natural: natural client of each example, integers [n], or None. A negative id belongs to no client.

        Returns:
            For each client the sorted positions of its examples; no position occurs twice.

        Raises:
            DataError: if these examples cannot be shared out as asked.
        """
        ...


@dataclass(frozen=True)
class Iid:
    """Examples dealt out at random: every client sees the same distribution. Covers all examples.

    Attributes:
        clients: number of clients, at least 1. Their sizes differ by at most one example.
    """

    clients: int = 10

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return True

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        n = check_labels(labels, classes, self.clients, regression=True)
        order = (key / "order").numpy().permutation(n)
        return [np.sort(part) for part in np.array_split(order, self.clients)]


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: each class is spread over the clients in proportions drawn from a Dirichlet distribution.

    Clients differ in size as well as in labels. All examples are used. The whole partition is drawn again until every
    client is large enough. Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks"
    (ICML 2019).

    Attributes:
        clients: number of clients, at least 1.
        alpha: concentration, above 0; small: few classes a client; large: all clients alike.
        min_size: smallest number of examples that a client may have, at least 1.
        max_redraws: partitions to draw before giving up, at least 1.
    """

    clients: int = 10
    alpha: float = 0.5
    min_size: int = 10
    max_redraws: int = 100

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        positive("alpha", self.alpha)
        at_least("min_size", self.min_size, 1)
        at_least("max_redraws", self.max_redraws, 1)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return False

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        n = check_labels(labels, classes, self.clients)
        if self.clients * self.min_size > n:
            raise DataError(
                f"{n} examples cannot give {self.clients} clients {self.min_size} each. "
                "Lower partition.clients or partition.min_size."
            )
        totals = np.bincount(labels, minlength=classes)
        draws = (key / "proportions").numpy()
        best = -1
        for _ in range(self.max_redraws):
            shares = draws.dirichlet(np.full(self.clients, self.alpha), size=classes)
            # Rounding the cumulated shares keeps every class whole: nothing is lost and nothing is given twice.
            cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * totals[:, None]).astype(np.int64)
            sizes = np.diff(cuts, axis=1, prepend=0, append=totals[:, None]).sum(axis=0)
            best = max(best, int(sizes.min()))
            if sizes.min() >= self.min_size:
                break
        else:
            raise DataError(
                f"none of {self.max_redraws} draws of the partition gave each of {self.clients} clients at least "
                f"{self.min_size} examples; in the best one the smallest client had {best}. Raise partition.alpha "
                f"(now {self.alpha:g}) or partition.max_redraws, or lower partition.clients or partition.min_size."
            )
        order = (key / "order").numpy()
        return deal(
            [np.split(order.permutation(np.flatnonzero(labels == c)), cuts[c]) for c in range(classes)], self.clients
        )


@dataclass(frozen=True)
class EqualDirichlet:
    """Label skew between clients of equal size: each client draws its own mixture of the classes.

    The mixture is drawn from Dir(alpha * prior), where the prior is the share of each class in the data, and the
    client's examples from that mixture without replacement. When a class runs out, the mixture is renormalized over
    the rest, so the last clients get what the others left. Fewer than ``clients`` examples stay unused. Source: Hsu et
    al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (2019).

    Attributes:
        clients: number of clients, at least 1; each gets floor(n / clients) examples.
        alpha: concentration, above 0; small: one class a client; large: all clients alike.
    """

    clients: int = 10
    alpha: float = 0.5

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        positive("alpha", self.alpha)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return False

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        n = check_labels(labels, classes, self.clients)
        size = n // self.clients
        left = np.bincount(labels, minlength=classes)
        prior = left / n
        present = np.flatnonzero(left)
        order = (key / "order").numpy()
        queues = [order.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
        parts = []
        for client in range(self.clients):
            draws = (key / "client" / client).numpy()
            mixture = np.zeros(classes)
            mixture[present] = draws.dirichlet(self.alpha * prior[present])
            counts = self._draw(mixture, left, size, draws)
            left = left - counts
            # What is left of a class is the head of its queue, so a client takes from behind that head.
            parts.append(np.concatenate([queues[c][left[c] : left[c] + counts[c]] for c in range(classes)]))
        return [np.sort(part) for part in parts]

    @staticmethod
    def _draw(mixture: Float, left: Index, size: int, draws: np.random.Generator) -> Index:
        """Counts of each class among ``size`` draws without replacement, [classes].

        Draws beyond what is left of a class are thrown away and made again from the other classes, which has the
        distribution of drawing one example at a time.
        """
        counts = np.zeros_like(left)
        while (missing := size - int(counts.sum())) > 0:
            weights = np.where(left > counts, mixture, 0.0)
            if weights.sum() <= 0:
                # The mixture gives all that remains a weight that underflows: the limit is to take what is there.
                weights = (left - counts).astype(np.float64)
            counts = np.minimum(counts + draws.multinomial(missing, weights / weights.sum()), left)
        return counts


@dataclass(frozen=True)
class Pathological:
    """Every client has exactly k classes, and the owners of a class share its examples in similar parts.

    Clients take in turn the k classes with the most places left, ties broken at random, so the numbers of owners of
    two classes differ by at most one. An owner's weight within a class is drawn from U(0.4, 0.6). All examples of
    classes with an owner are used; with fewer than ``classes / k`` clients, some classes stay without one. Source:
    Shamsian et al., "Personalized Federated Learning using Hypernetworks" (pFedHN, ICML 2021).

    Attributes:
        clients: number of clients, at least 1.
        classes_per_client: number k of classes of each client, from 1 to the number of classes.
    """

    clients: int = 10
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        at_least("classes_per_client", self.classes_per_client, 1)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return False

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        check_labels(labels, classes, self.clients)
        totals = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(totals)
        if self.classes_per_client > len(present):
            raise DataError(
                f"partition.classes_per_client is {self.classes_per_client}, but only {len(present)} classes have "
                "examples."
            )
        owners = self._owners(present, classes, (key / "owners").numpy())
        weights, order = (key / "weights").numpy(), (key / "order").numpy()
        pieces = []
        for c in range(classes):
            mine = owners[c]
            if totals[c] < len(mine):
                raise DataError(
                    f"class {c} has {totals[c]} examples for {len(mine)} clients. "
                    "Lower partition.clients or partition.classes_per_client."
                )
            piece = [np.empty(0, dtype=np.int64)] * self.clients
            if mine:
                # With at least as many examples as owners, no owner goes without: weights differ by a factor below 1.5,
                # so a share below 1 has a larger remainder than any share above 1.
                counts = largest_remainder(weights.uniform(0.4, 0.6, len(mine)), int(totals[c]))
                shuffled = order.permutation(np.flatnonzero(labels == c))
                for client, part in zip(mine, np.split(shuffled, np.cumsum(counts)[:-1]), strict=True):
                    piece[client] = part
            pieces.append(piece)
        return deal(pieces, self.clients)

    def _owners(self, present: Index, classes: int, draws: np.random.Generator) -> list[list[int]]:
        """Clients that own each class."""
        places, more = divmod(self.clients * self.classes_per_client, len(present))
        left = np.full(len(present), places)
        left[draws.permutation(len(present))[:more]] += 1
        owners: list[list[int]] = [[] for _ in range(classes)]
        for client in range(self.clients):
            ties = draws.random(len(present))
            # Places differ by at most one at any time, so k classes with a free place are always there.
            chosen = np.lexsort((ties, -left))[: self.classes_per_client]
            left[chosen] -= 1
            for c in present[chosen]:
                owners[c].append(client)
        return owners


@dataclass(frozen=True)
class Natural:
    """The clients that the data come from: writers, speakers, hospitals.

    Attributes:
        clients: number of clients to choose at random among those with enough examples; None takes them all.
        min_examples: examples that a client needs to be chosen, at least 1.
    """

    clients: int | None = None
    min_examples: int = 1

    def __post_init__(self) -> None:
        if self.clients is not None:
            at_least("clients", self.clients, 1)
        at_least("min_examples", self.min_examples, 1)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return False

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:
        """Share out the examples, clients in the order of their ids; see `Partition.split`."""
        check_labels(labels, classes, 1, regression=True)
        if natural is None:
            raise DataError("the data set has no natural clients; use another partition, e.g. 'dirichlet'.")
        if natural.shape != (len(labels),):
            raise DataError(f"there are {len(labels)} labels, but natural clients of {len(natural)} examples.")
        ids, counts = np.unique(natural[natural >= 0], return_counts=True)
        ids = ids[counts >= self.min_examples]
        wanted = len(ids) if self.clients is None else self.clients
        if len(ids) == 0 or wanted > len(ids):
            raise DataError(
                f"{len(ids)} natural clients have at least {self.min_examples} examples, {max(wanted, 1)} are asked "
                "for. Lower partition.clients or partition.min_examples."
            )
        chosen = np.sort((key / "clients").numpy().permutation(ids)[:wanted])
        order = np.argsort(natural, kind="stable")
        first = np.searchsorted(natural[order], chosen, side="left")
        last = np.searchsorted(natural[order], chosen, side="right")
        return [order[i:j] for i, j in zip(first, last, strict=True)]


@dataclass(frozen=True)
class LabelGroups:
    """Groups of clients with classes of their own; within a group examples are dealt out at random.

    The classes are divided into groups of equal size, in order: with 100 classes and 10 groups, classes 0 to 9 are group
    0. Clients k with k mod groups = g share group g's examples. Covers all examples. Goes with concept ``natural`` and
    as many clusters. This is how FLoRAL divides CIFAR-100.

    Attributes:
        groups: number of groups, at least 1; it must divide the number of classes.
        clients: number of clients, at least one a group. Sizes within a group differ by at most one example.
    """

    groups: int = 10
    clients: int = 100

    def __post_init__(self) -> None:
        at_least("groups", self.groups, 1)
        at_least("clients", self.clients, 1)
        if self.clients < self.groups:
            raise ConfigError(
                f"partition.clients is {self.clients}, too few for one in each of {self.groups} groups of labels. "
                "Raise partition.clients or lower partition.groups."
            )

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return True

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        check_labels(labels, classes, self.clients)
        if classes % self.groups:
            raise DataError(
                f"{classes} classes cannot be divided into {self.groups} groups of equal size. "
                "Set partition.groups to a divisor of the number of classes."
            )
        group = labels // (classes // self.groups)
        parts: list[Index] = [np.empty(0, dtype=np.int64)] * self.clients
        for g in range(self.groups):
            members = range(g, self.clients, self.groups)
            own = (key / "order" / g).numpy().permutation(np.flatnonzero(group == g))
            if len(own) < len(members):
                raise DataError(
                    f"the {len(members)} clients of group {g} cannot share the {len(own)} examples of its classes. "
                    "Lower partition.clients."
                )
            for client, part in zip(members, np.array_split(own, len(members)), strict=True):
                parts[client] = np.sort(part)
        return parts


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "equal_dirichlet": EqualDirichlet,
    "pathological": Pathological,
    "natural": Natural,
    "label_groups": LabelGroups,
    "rank_skew": RankSkew,
}
"""Partitions by name."""
