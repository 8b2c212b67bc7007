"""A partition whose label and size skew grow with the ranks of the clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError
from ...core.key import Key
from .apportion import FloatArray, IntArray, Parts, deal_classes, round_shares, shuffle_classes
from .checks import check_labels, check_positive

# ruff: noqa: ARG002 - the rule ignores natural clients

# The iterative fit stops after this many iterations, or once all sizes have this relative error. Missing
# whole examples are added afterwards.
_MAX_ITERATIONS = 500
_MAX_RELATIVE_ERROR = 1e-4

# share of the data's mixture in every client's mixture, so that sizes and class totals can be met together
_MIN_PRIOR_SHARE = 1e-9


@dataclass(frozen=True)
class RankSkew(CheckedFields):
    """Clients of larger rank get more examples and a more skewed class mixture. Uses all examples.

    Source: Peng et al., "FedHL", Section VI-A, Case 2: 100 clients, Dirichlet with 0.3, ranks scaled to them with
        mean 16; "clients with larger LoRA ranks are assigned more data and a more skewed local distribution". The
        paper gives no formula; the rule here is:

    - Client k of K has rank r_k = ranks[floor(k·len(ranks)/K)]. The mean is kept if len(ranks) divides K.
    - Its size n_k is proportional to r_k^size_exponent, rounded by the largest remainder to add up to n.
    - Its mixture of the C classes that occur is drawn from Dir(α_k·C·prior), where the prior is the share of
      each class in the data and α_k = alpha·(mean rank / r_k)^skew. For classes of equal size this is the
      symmetric Dir(α_k).
    - The table of counts, clients by classes, starts at n_k times the mixture. Its rows are scaled to the
      sizes and its columns to the class totals in turn (iterative proportional fitting), and it is rounded to
      integers with exactly these sums. No client is therefore limited to examples that the others left.
    - The examples of a class are assigned at random.

    Attributes:
        clients: number of clients K, at least the number of ranks.
        ranks: ranks in the order of the clients, each at least 1; repeated evenly over the clients.
        alpha: concentration of the mixture at the mean rank, above 0; small: few classes per client.
        size_exponent: exponent of the growth of sizes with the rank, at least 0; 1: in proportion; 0: equal sizes.
        skew: exponent of the fall of the concentration with the rank, at least 0; 1: in inverse proportion; 0: no
            fall.
        min_size: smallest number of examples of a client, at least 1.
    """

    repeatable: ClassVar[bool] = False

    clients: int = 100
    ranks: tuple[int, ...] = (32, 24, 20, 16, 16, 12, 12, 12, 8, 8)
    alpha: float = 0.3
    size_exponent: float = 1.0
    skew: float = 1.0
    min_size: int = 1

    def __post_init__(self) -> None:
        check_minimum("clients", self.clients, 1)
        check_positive("alpha", self.alpha)
        check_minimum("min_size", self.min_size, 1)
        check_positive("partition.size_exponent", self.size_exponent, allow_zero=True)
        check_positive("partition.skew", self.skew, allow_zero=True)
        assign_ranks(self.ranks, self.clients)

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See `Partition.assign`."""
        n = check_labels(labels, class_count, self.clients)
        ranks = np.array(assign_ranks(self.ranks, self.clients), dtype=np.float64)
        sizes = round_shares((ranks / ranks.max()) ** self.size_exponent, n)
        if sizes.min() < self.min_size:
            raise DataError(
                f"{n} examples give the clients of rank {int(ranks[sizes.argmin()])} {sizes.min()} each, "
                f"less than partition.min_size = {self.min_size}. Lower partition.clients, "
                "partition.size_exponent or partition.min_size."
            )
        totals = np.bincount(labels, minlength=class_count)
        counts = _fit_counts(self._draw_mixtures(ranks, totals, key / "mixture"), sizes, totals)
        return deal_classes(shuffle_classes(labels, class_count, (key / "order").numpy()), counts)

    def _draw_mixtures(self, ranks: FloatArray, totals: IntArray, key: Key) -> FloatArray:
        """Draw the class mixture of each client, [clients, classes]; rows add up to 1."""
        nonempty_classes = np.flatnonzero(totals)
        prior = totals[nonempty_classes] / totals.sum()
        alphas = self.alpha * (ranks.mean() / ranks) ** self.skew
        mixtures = np.zeros((len(ranks), len(totals)))
        for client_id, alpha in enumerate(alphas):
            draw = (key / client_id).numpy().dirichlet(alpha * len(nonempty_classes) * prior)
            mixtures[client_id, nonempty_classes] = (1 - _MIN_PRIOR_SHARE) * draw + _MIN_PRIOR_SHARE * prior
        return mixtures


def assign_ranks(ranks: Sequence[int], client_count: int) -> list[int]:
    """Rank of each client: client k has ``ranks[floor(k·len(ranks)/clients)]``."""
    if not ranks:
        raise ConfigError("partition.ranks must name at least one rank.")
    for index, rank in enumerate(ranks):
        check_minimum(f"partition.ranks, value {index}", rank, 1)
    if len(ranks) > client_count:
        raise ConfigError(f"partition.ranks names {len(ranks)} ranks for {client_count} clients; name fewer.")
    return [ranks[k * len(ranks) // client_count] for k in range(client_count)]


def _fit_counts(mixtures: FloatArray, sizes: IntArray, totals: IntArray) -> IntArray:
    """Fit integers [clients, classes] to the mixtures, with the sizes as row sums and the totals as column sums."""
    table = mixtures * sizes[:, None]
    is_nonempty = totals > 0
    for _ in range(_MAX_ITERATIONS):
        table[:, is_nonempty] *= totals[is_nonempty] / table[:, is_nonempty].sum(0)
        row_sums = table.sum(1)
        if (np.abs(row_sums - sizes) <= _MAX_RELATIVE_ERROR * sizes).all():
            break
        table *= (sizes / row_sums)[:, None]
    # no sum may exceed its target, so that examples need only be added
    table *= np.minimum(1, sizes / table.sum(1))[:, None]
    table[:, is_nonempty] *= np.minimum(1, totals[is_nonempty] / table[:, is_nonempty].sum(0))
    counts: IntArray = np.floor(table).astype(np.int64)
    return _add_missing(counts, table - counts, sizes, totals)


def _add_missing(counts: IntArray, fractions: FloatArray, sizes: IntArray, totals: IntArray) -> IntArray:
    """Add examples, the largest fractions first, until rows and columns have their sums."""
    missing_by_client, missing_by_class = sizes - counts.sum(1), totals - counts.sum(0)

    def add(client_id: int, label: int, count: int) -> None:
        counts[client_id, label] += count
        missing_by_client[client_id] -= count
        missing_by_class[label] -= count

    for cell in np.argsort(-fractions, axis=None, kind="stable"):
        client_id, label = divmod(int(cell), counts.shape[1])
        if missing_by_client[client_id] > 0 and missing_by_class[label] > 0:
            add(client_id, label, 1)
    # one more example per cell may not be enough; if a client lacks examples, so does a class
    while missing_by_client.any():
        client_id, label = int(missing_by_client.argmax()), int(missing_by_class.argmax())
        add(client_id, label, min(missing_by_client[client_id], missing_by_class[label]))
    return counts
