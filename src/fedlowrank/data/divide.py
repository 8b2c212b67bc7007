"""From a data set to what each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..core.errors import DataError
from ..core.key import Key
from .counting import Index
from .dataset import ClientData, Dataset, Examples
from .partition import Partition
from .split import Pool, Split


def divide(dataset: Dataset, partition: Partition, split: Split, key: Key) -> list[ClientData]:
    """Share out a data set among clients and divide each client's examples.

    Args:
        dataset: the data set.
        partition: which examples a client gets.
        split: which of them are for training, validation and test.
        key: randomness; equal keys give equal clients.

    Returns:
        The data of each client, in tensors of their own and in the order of the partition. Clients who are tested on
        the whole test part share its tensors. ``notes`` say what deserves a look, e.g. that there is a single class.

    Raises:
        DataError: if the data set lacks a test part that the split needs, if the partition cannot be made, or if a
            client would have no training data; the message names the client.
    """
    if split.official_test in ("shared", "whole") and dataset.test is None:
        raise DataError(
            f"data set {dataset.name!r} has no official test part, which this split needs. Use split 'local'."
        )
    pool = Pool(dataset)
    clients = []
    for client, own in enumerate(_parts(pool, partition, split, key / "partition")):
        if len(own) == 0:
            raise DataError(f"client {client} has no examples. Use fewer clients or a partition that is less skewed.")
        cut = split.cut(pool, own, client, key / "split" / client)
        if len(cut.train) == 0:
            raise DataError(f"client {client} has no training data. Give it more examples, or less to val and test.")
        held = [pool.names[c] for c in np.unique(pool.labels[own])] if pool.names else []
        single = (f"client {client}: a single class, {held[0]!r}",) if len(held) == 1 else ()
        train, val, test = (_gather(pool, index) for index in (cut.train, cut.val, cut.test))
        clients.append(ClientData(train, val, test, (*single, *cut.notes)))
    return clients


def keep(clients: Sequence[ClientData], share: float, at_least: int, key: Key) -> list[ClientData]:
    """Clients with fewer training examples, as if they had collected less; validation and test stay whole.

    Args:
        clients: data of each client, in the order of the federation.
        share: of a client's training examples that it keeps, above 0 and at most 1.
        at_least: examples that it keeps whatever the share, if it has so many.
        key: randomness; each client draws from a key of its own.

    Returns:
        The clients in the same order; the n training examples of each reduced to max(at_least, round(share·n)), but no
        more than n, at random and in their old order.
    """
    out = []
    for client, data in enumerate(clients):
        n = len(data.train)
        kept = min(n, max(at_least, round(share * n)))
        if kept < n:
            index = np.sort((key / client).numpy().permutation(n)[:kept])
            data = replace(data, train=data.train.take(index))
        out.append(data)
    return out


def _parts(pool: Pool, partition: Partition, split: Split, key: Key) -> list[Index]:
    """Sorted positions of each client's examples, of the official test part too where the split has it shared out."""
    n, classes, use = pool.train_size, len(pool.names), split.official_test
    if use == "merged":
        return partition.split(pool.labels, classes, key, pool.natural)
    parts = partition.split(pool.labels[:n], classes, key, _numpy(pool.dataset.natural))
    if use != "shared":
        return parts
    if not partition.repeatable:
        raise DataError(
            f"split 'test_share' shares out the test part as the partition does the training part, which "
            f"{type(partition).__name__} cannot: each of its clients has a mixture of its own. Use partition 'iid' or "
            "'label_groups', or split 'matched' (for 'natural': 'own_test')."
        )
    try:
        tests = partition.split(pool.labels[n:], classes, key / "test")
    except DataError as error:
        raise DataError(f"split 'test_share', the official test part: {error}") from error
    return [np.concatenate([own, test + n]) for own, test in zip(parts, tests, strict=True)]


def _gather(pool: Pool, index: Index) -> Examples:
    """Examples at sorted positions, without a joined copy of the official parts."""
    dataset, n = pool.dataset, pool.train_size
    if dataset.test is None or len(index) == 0 or index[-1] < n:
        return dataset.train.take(index)
    if index is pool.test:
        # A copy for every client would multiply the memory of the test part by the number of clients.
        return dataset.test
    if index[0] >= n:
        return dataset.test.take(index - n)
    at = int(np.searchsorted(index, n))
    first, second = dataset.train.take(index[:at]), dataset.test.take(index[at:] - n)
    y = torch.cat([first.y, second.y])
    one, other = first.inputs, second.inputs
    if isinstance(one, dict) and isinstance(other, dict):
        return Examples({name: torch.cat([t, other[name]]) for name, t in one.items()}, y)
    if isinstance(one, dict) or isinstance(other, dict):
        raise DataError(f"data set {dataset.name!r} has named inputs in one part only.")
    return Examples(torch.cat([one, other]), y)


def _numpy(values: torch.Tensor | None) -> Index | None:
    if values is None:
        return None
    array: Index = values.numpy()
    return array
