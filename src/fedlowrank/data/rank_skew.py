"""Label and size skew that grow with the ranks of the clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import ConfigError, DataError
from ..core.key import Key
from .counting import Float, Index, at_least, check_labels, deal, largest_remainder, positive

# The fit to sizes and class totals ends after so many rounds, or once sizes are met to this relative error. What is
# still missing then is repaired in whole examples.
_ROUNDS = 500
_CLOSE = 1e-4

# Share of the data's own mixture in every client's, so that sizes and class totals can always be met at once.
_FLOOR = 1e-9


@dataclass(frozen=True)
class RankSkew:
    """Clients of larger rank get more examples, and a mixture of the classes that is more skewed. Covers all examples.

    Source: Peng et al., "FedHL", Section VI-A, Case 2: 100 clients, Dirichlet with 0.3, ranks scaled to them with mean
    16; "clients with larger LoRA ranks are assigned more data and a more skewed local distribution". The paper gives no
    formula; the rule here is:

    - Client k of K has rank r_k = ranks[floor(k·len(ranks)/K)]. The mean of ``ranks`` is kept if len(ranks) divides K.
    - Its size n_k is in proportion to r_k^size_exponent, rounded by the largest remainder to add up to n.
    - Its mixture of the C classes that occur is drawn from Dir(α_k·C·prior), where the prior is the share of each class
      in the data, with α_k = alpha·(mean rank / r_k)^skew. For classes of equal size this is the symmetric Dir(α_k).
    - The table of counts, clients by classes, starts at n_k times the mixture. Its rows are scaled to the sizes and its
      columns to the class totals in turn (iterative proportional fitting), and it is rounded to whole numbers with
      these very sums. So no client has to take what the others left, as when they draw one after the other.
    - A client's examples of a class are drawn at random among those of the class.

    Attributes:
        clients: number of clients K, at least the number of ranks.
        ranks: ranks in the order of the clients, each at least 1; stretched evenly over the clients.
        alpha: concentration of the mixture at the mean rank, above 0; small: few classes a client.
        size_exponent: how sizes grow with the rank, at least 0; 1: in proportion; 0: equal sizes.
        skew: how the concentration falls with the rank, at least 0; 1: in inverse proportion; 0: the same for all.
        min_size: smallest number of examples that a client may have, at least 1.
    """

    clients: int = 100
    ranks: tuple[int, ...] = (32, 24, 20, 16, 16, 12, 12, 12, 8, 8)
    alpha: float = 0.3
    size_exponent: float = 1.0
    skew: float = 1.0
    min_size: int = 1

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        positive("alpha", self.alpha)
        at_least("min_size", self.min_size, 1)
        for name in ("size_exponent", "skew"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"partition.{name} must be a number of at least 0, not {value!r}.")
        client_ranks(self.ranks, self.clients)

    @property
    def repeatable(self) -> bool:
        """See `Partition.repeatable`."""
        return False

    def split(self, labels: np.ndarray, classes: int, key: Key, natural: np.ndarray | None = None) -> list[Index]:  # noqa: ARG002
        """Share out the examples; see `Partition.split`."""
        n = check_labels(labels, classes, self.clients)
        ranks = np.array(client_ranks(self.ranks, self.clients), dtype=np.float64)
        sizes = largest_remainder((ranks / ranks.max()) ** self.size_exponent, n)
        if sizes.min() < self.min_size:
            raise DataError(
                f"{n} examples give the clients of rank {int(ranks[sizes.argmin()])} {sizes.min()} each, less than "
                f"partition.min_size = {self.min_size}. Lower partition.clients, partition.size_exponent or "
                "partition.min_size."
            )
        totals = np.bincount(labels, minlength=classes)
        counts = _fit(self._mixtures(ranks, totals, key / "mixture"), sizes, totals)
        order = (key / "order").numpy()
        pieces = []
        for c in range(classes):
            own = order.permutation(np.flatnonzero(labels == c))
            pieces.append(np.split(own, np.cumsum(counts[:, c])[:-1]))
        return deal(pieces, self.clients)

    def _mixtures(self, ranks: Float, totals: Index, key: Key) -> Float:
        """Mixture of each client, [clients, classes]; rows add up to 1."""
        present = np.flatnonzero(totals)
        prior = totals[present] / totals.sum()
        alphas = self.alpha * (ranks.mean() / ranks) ** self.skew
        mixtures = np.zeros((len(ranks), len(totals)))
        for client, alpha in enumerate(alphas):
            drawn = (key / client).numpy().dirichlet(alpha * len(present) * prior)
            mixtures[client, present] = (1 - _FLOOR) * drawn + _FLOOR * prior
        return mixtures


def client_ranks(ranks: Sequence[int], clients: int) -> list[int]:
    """Rank of each client: the list stretched evenly, so that client k has ``ranks[floor(k·len(ranks)/clients)]``.

    Args:
        ranks: ranks in the order of the clients.
        clients: number of clients; where len(ranks) does not divide it, some ranks have a client more than others.

    Raises:
        ConfigError: if there are no ranks, more of them than clients, or one below 1.
    """
    if not ranks:
        raise ConfigError("partition.ranks must name at least one rank.")
    for rank in ranks:
        at_least("every rank of partition.ranks", rank, 1)
    if len(ranks) > clients:
        raise ConfigError(
            f"partition.ranks names {len(ranks)} ranks for {clients} clients. Name fewer, or raise partition.clients."
        )
    return [ranks[k * len(ranks) // clients] for k in range(clients)]


def _fit(mixtures: Float, sizes: Index, totals: Index) -> Index:
    """Whole counts [clients, classes] with these sizes as sums of rows and these totals as sums of columns."""
    table = mixtures * sizes[:, None]
    with_any = totals > 0
    for _ in range(_ROUNDS):
        table[:, with_any] *= totals[with_any] / table[:, with_any].sum(0)
        rows = table.sum(1)
        if (np.abs(rows - sizes) <= _CLOSE * sizes).all():
            break
        table *= (sizes / rows)[:, None]
    # Both kinds of sums at most what they should be, so that only whole examples are to be added.
    table *= np.minimum(1, sizes / table.sum(1))[:, None]
    table[:, with_any] *= np.minimum(1, totals[with_any] / table[:, with_any].sum(0))
    counts: Index = np.floor(table).astype(np.int64)
    return _add_missing(counts, table - counts, sizes, totals)


def _add_missing(counts: Index, fractions: Float, sizes: Index, totals: Index) -> Index:
    """Add examples, those of the largest fractions first, until rows and columns have the sums that they should have."""
    by_client, by_class = sizes - counts.sum(1), totals - counts.sum(0)
    for cell in np.argsort(-fractions, axis=None, kind="stable"):
        k, c = divmod(int(cell), counts.shape[1])
        if by_client[k] > 0 and by_class[c] > 0:
            counts[k, c] += 1
            by_client[k] -= 1
            by_class[c] -= 1
    # One more in a cell was not always enough: a client and a class that both still miss some are always there.
    while by_client.any():
        k, c = int(by_client.argmax()), int(by_class.argmax())
        more = min(by_client[k], by_class[c])
        counts[k, c] += more
        by_client[k] -= more
        by_class[c] -= more
    return counts
