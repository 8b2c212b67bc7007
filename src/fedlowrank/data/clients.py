"""The data of each client: a data set partitioned among clients and split into parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..core.arguments.shares import multiply_share
from ..core.contract.task import client_title
from ..core.errors import DataError
from ..core.key import Key
from .dataset import ClientData, Dataset, Examples
from .partitioning.apportion import IntArray, Parts
from .partitioning.own_partition import PartitionFunction, as_partition
from .partitioning.partition import Partition
from .partitioning.split import OwnTest, Pool, Split


def make_clients(
    dataset: Dataset, partition: Partition | PartitionFunction, split: Split, key: Key
) -> list[ClientData]:
    """Partition a data set among clients and split each client's examples into training, validation and test.

    Args:
        dataset: data set whose examples are assigned.
        partition: rule that assigns examples to clients, or a function of your own; see
            :class:`.partitioning.own_partition.OwnPartition`.
        split: rule that splits each client's examples.
        key: key of the randomness.

    Returns:
        The data of each client in the order of the partition, in separate tensors. Clients that are tested on the
        whole test part share its tensors. ``notes`` carry warnings, e.g. of a single class; those of the first client
        also report how many examples belong to no client. Clients that equal natural clients have their names.

    Raises:
        DataError: if the split needs a test part that the data set lacks, if the partition fails, or if a client
            would have no training data; the message names the client.
    """
    if split.official_test in ("shared", "whole") and dataset.test is None:
        raise DataError(
            f"data set {dataset.name!r} has no official test part, which this split needs. Name one (data.test, or "
            "the test file of a site), or use split.kind = 'local'."
        )
    pool, rule = Pool(dataset), as_partition(partition)
    parts = _assign(pool, rule, split, key / "partition")
    names = _name_clients(pool, parts)
    clients = []
    test_mask = np.zeros(len(pool.labels), dtype=bool)
    for client_id, client_positions in enumerate(parts):
        if len(client_positions) == 0:
            raise DataError(
                f"client {client_id} has no examples. Use fewer clients or a less skewed partition."
            )
        try:
            positions = split.divide(pool, client_positions, client_id, key / "split" / client_id)
        except DataError as error:
            if not names[client_id]:
                raise
            raise DataError(f"{error} It is {names[client_id]!r}.") from error
        if len(positions.train) == 0:
            raise DataError(
                f"{client_title(client_id, names[client_id])} has no training data. Raise its number of examples."
            )
        test_mask[positions.test] = True
        notes = positions.notes
        if (
            pool.names
            and (labels := pool.labels[client_positions]).min() == (first_label := labels[0]) == labels.max()
        ):
            title = client_title(client_id, names[client_id])
            notes = (f"{title}: a single class, {pool.names[first_label]!r}", *notes)
        train, val, test = (
            _take_examples(pool, index) for index in (positions.train, positions.val, positions.test)
        )
        clients.append(ClientData(train, val, test, notes, name=names[client_id]))
    if unused_notes := _describe_unused(pool, parts, split, test_mask):
        clients[0] = replace(clients[0], notes=(*unused_notes, *clients[0].notes))
    return clients


def subsample_training(clients: list[ClientData], share: float, minimum: int, key: Key) -> list[ClientData]:
    """Keep a random share of each client's training examples; validation and test parts stay complete.

    It keeps min(n, max(minimum, round(share·n))) of n examples. Each client draws with its own key.
    """
    subsampled_clients = []
    for client_id, data in enumerate(clients):
        n = len(data.train)
        size = min(n, max(minimum, round(multiply_share(share, n))))
        if size < n:
            index = np.sort((key / client_id).numpy().permutation(n)[:size])
            data = replace(data, train=data.train.take(index))
        subsampled_clients.append(data)
    return subsampled_clients


def _assign(pool: Pool, partition: Partition, split: Split, key: Key) -> Parts:
    """Sorted positions of each client, including test examples if the split assigns those to clients."""
    n, class_count = pool.train_size, len(pool.names)
    if split.official_test == "merged":
        return partition.assign(pool.labels, class_count, key, pool.natural)
    natural_clients = pool.dataset.natural
    parts = partition.assign(
        pool.labels[:n], class_count, key, None if natural_clients is None else natural_clients.numpy()
    )
    if split.official_test != "shared":
        return parts
    if not partition.repeatable:
        raise DataError(
            f"split 'test_share' partitions the test part by the rule of the training part, which "
            f"{type(partition).__name__} cannot: each of its clients may have its own mixture. Use partition "
            "'iid' or 'label_groups', or split 'matched' (for 'natural': 'own_test')."
        )
    try:
        test_parts = partition.assign(pool.labels[n:], class_count, key / "test")
    except DataError as error:
        raise DataError(f"split 'test_share', the official test part: {error}") from error
    return [np.concatenate([positions, test + n]) for positions, test in zip(parts, test_parts, strict=True)]


def _name_clients(pool: Pool, parts: Parts) -> list[str]:
    """Names of the clients if each is one natural client, else empty names."""
    natural_clients, names = pool.dataset.natural, pool.dataset.natural_names
    nameless = [""] * len(parts)
    if natural_clients is None or not names or names == tuple(map(str, range(len(names)))):
        return nameless
    ids = natural_clients.numpy()
    # the split reports a client without training examples
    ids_of_parts = [np.unique(ids[positions[positions < pool.train_size]]) for positions in parts]
    if any(len(part_ids) != 1 or part_ids[0] < 0 for part_ids in ids_of_parts):
        return nameless
    if len({int(part_ids[0]) for part_ids in ids_of_parts}) < len(parts):
        return nameless
    return [names[int(part_ids[0])] for part_ids in ids_of_parts]


def _describe_unused(pool: Pool, parts: Parts, split: Split, test_mask: np.ndarray) -> list[str]:
    """Note the number of examples that belong to no client; ``test_mask`` marks the positions of all test parts."""
    n, is_assigned = pool.train_size, np.zeros(len(pool.labels), dtype=bool)
    for positions in parts:
        is_assigned[positions] = True
    masks = {"training": is_assigned[:n]}
    if split.official_test == "merged":
        masks = {"": is_assigned}
    elif isinstance(split, OwnTest):
        masks["test"] = test_mask[n:]
    return [
        f"{unused_count} of {len(mask)} {part_name} examples belong to no client".replace("  ", " ")
        for part_name, mask in masks.items()
        if (unused_count := int((~mask).sum()))
    ]


def _take_examples(pool: Pool, index: IntArray) -> Examples:
    """Take the examples at sorted positions, without concatenating the official parts."""
    train, test, n = pool.dataset.train, pool.dataset.test, pool.train_size
    if test is None or len(index) == 0 or index[-1] < n:
        return train.take(index)
    if index is pool.test:
        # all clients share the test part, because a copy per client would multiply its memory
        return test
    if index[0] >= n:
        return test.take(index - n)
    boundary = int(np.searchsorted(index, n))
    first, second = train.take(index[:boundary]), test.take(index[boundary:] - n)
    y = torch.cat([first.y, second.y])
    a, b = first.inputs, second.inputs
    if isinstance(a, dict) and isinstance(b, dict):
        return Examples({name: torch.cat([t, b[name]]) for name, t in a.items()}, y)
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return Examples(torch.cat([a, b]), y)
