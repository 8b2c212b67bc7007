"""From a data set to what each client holds."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import DataError
from ..key import Key
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
    if split.needs_test and dataset.test is None:
        raise DataError(
            f"data set {dataset.name!r} has no official test part, which this split needs. Use split 'local'."
        )
    pool = Pool(dataset)
    shared = len(pool.labels) if split.merges_test else pool.train_size
    natural = pool.natural if shared > pool.train_size else _numpy(dataset.natural)
    parts = partition.split(
        pool.labels[:shared], len(dataset.classes), key / "partition", None if natural is None else natural[:shared]
    )
    clients = []
    for client, own in enumerate(parts):
        if len(own) == 0:
            raise DataError(f"client {client} has no examples. Use fewer clients or a partition that is less skewed.")
        cut = split.cut(pool, own, client, key / "split" / client)
        if len(cut.train) == 0:
            raise DataError(f"client {client} has no training data. Give it more examples, or less to val and test.")
        held = np.unique(pool.labels[own])
        single = (f"client {client}: a single class, {dataset.classes[held[0]]!r}",) if len(held) == 1 else ()
        train, val, test = (_gather(pool, index) for index in (cut.train, cut.val, cut.test))
        clients.append(ClientData(train, val, test, (*single, *cut.notes)))
    return clients


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
    if isinstance(first.x, dict) and isinstance(second.x, dict):
        other = second.x
        return Examples({name: torch.cat([t, other[name]]) for name, t in first.x.items()}, y)
    if isinstance(first.x, dict) or isinstance(second.x, dict):
        raise DataError(f"data set {dataset.name!r} has named inputs in one part only.")
    return Examples(torch.cat([first.x, second.x]), y)


def _numpy(values: torch.Tensor | None) -> Index | None:
    if values is None:
        return None
    array: Index = values.numpy()
    return array
