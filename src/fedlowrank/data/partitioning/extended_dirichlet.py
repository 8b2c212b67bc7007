"""A partition that limits the classes of each client and draws its share of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError
from ...core.key import Key
from .apportion import IntArray, Parts, deal_classes, redraw_until_large, shuffle_classes, spread_classes
from .checks import check_labels, check_positive

# ruff: noqa: ARG002 - the rule ignores natural clients


@dataclass(frozen=True)
class ExtendedDirichlet(CheckedFields):
    """Clients with few classes of unequal size: each draws k classes, and a Dirichlet distribution divides every class.

    - Each client draws its classes uniformly without replacement. All clients draw again until every class that occurs
      belongs to at least one of them.
    - Each class is spread only over its clients, in proportions drawn from a symmetric Dirichlet distribution. All
      classes are spread again until every client is large enough.

    All examples are used. A small ``alpha`` may give a client no example of one of its classes. Source: Li & Lyu,
    "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data" (NeurIPS 2023, arXiv:2311.03154),
    where it is ExDir(C, α); both redraws are additions of this package.

    Attributes:
        clients: number of clients, at least 1.
        classes_per_client: number k of classes of each client (C of the paper), from 1 to the number of classes;
            ``clients`` times k must be at least the number of classes.
        alpha: concentration α, above 0; small: one of its clients gets most of a class; large: equal parts.
        min_size: smallest number of examples of a client, at least 1.
        max_redraws: number of draws of classes, and of proportions, before giving up, at least 1.
    """

    repeatable: ClassVar[bool] = False

    clients: int = 10
    classes_per_client: int = 2
    alpha: float = 0.5
    min_size: int = 10
    max_redraws: int = 100

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        for name in ("clients", "classes_per_client", "min_size", "max_redraws"):
            check_minimum(name, getattr(self, name), 1)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See :meth:`fedlowrank.data.partitioning.partition.Partition.assign`."""
        check_labels(labels, class_count, self.clients)
        totals = np.bincount(labels, minlength=class_count)
        is_owner = self._draw_owners(np.flatnonzero(totals), class_count, (key / "owners").numpy())
        generator = (key / "proportions").numpy()

        def draw() -> IntArray:
            shares = np.zeros((class_count, self.clients))
            for c in np.flatnonzero(totals):
                shares[c, is_owner[:, c]] = generator.dirichlet(np.full(is_owner[:, c].sum(), self.alpha))
            return spread_classes(shares, totals)

        counts = redraw_until_large(
            draw, len(labels), self.clients, self.min_size, self.max_redraws, self.alpha
        )
        return deal_classes(shuffle_classes(labels, class_count, (key / "order").numpy()), counts)

    def _draw_owners(
        self, nonempty_classes: IntArray, class_count: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Draw whether each client has each class, bool [clients, classes]."""
        k, nonempty_count = self.classes_per_client, len(nonempty_classes)
        if k > nonempty_count:
            raise DataError(
                f"partition.classes_per_client is {k}, but only {nonempty_count} classes have examples."
            )
        if self.clients * k < nonempty_count:
            raise DataError(
                f"{self.clients} clients with {k} classes each cannot have all {nonempty_count} classes. Raise "
                "partition.clients or partition.classes_per_client."
            )
        for _ in range(self.max_redraws):
            order = generator.permuted(np.tile(np.arange(nonempty_count), (self.clients, 1)), axis=1)[:, :k]
            is_owner = np.zeros((self.clients, class_count), dtype=bool)
            is_owner[np.arange(self.clients)[:, None], nonempty_classes[order]] = True
            if is_owner[:, nonempty_classes].any(axis=0).all():
                return is_owner
        raise DataError(
            f"in none of {self.max_redraws} draws did every class belong to one of {self.clients} clients with {k} "
            "classes each. Raise partition.classes_per_client, partition.clients or partition.max_redraws."
        )
