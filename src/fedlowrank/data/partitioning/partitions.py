"""Partitions of a data set made by flwr-datasets or the library ``datasets``, one for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import DataError, did_you_mean, warn_user
from ...core.key import Key
from ...core.learning.losses import OF_LABELS, OF_REAL_TARGETS, Loss
from ..datasets.huggingface import HuggingFace
from ..user_data.user_arrays import HUB_WARNING, ArrayPair, are_whole_classes, find_target_warning

_SPLITS = ("train", "val", "test")


def read_partitions(
    partitions: Any,
    label: str,
    features: Sequence[str],
    split: str,
    size: int | None,
    channels: int,
    loss: Loss,
    key: Key,
) -> tuple[list[ArrayPair | Mapping[str, ArrayPair]], tuple[str, ...]]:
    """Read the arrays of each partition, and the names of the classes; see ``Federation.from_partitions``.

    Returns:
        A pair of inputs and labels for each client, or a dict of such pairs by split; and the names of the classes, none for
        real targets.

    Raises:
        DataError: if ``datasets`` is missing or a partition does not fit the others.
    """
    try:
        import datasets as library
    except ImportError as error:
        raise DataError(
            "partitions need the library datasets: pip install 'fedlowrank[huggingface]'"
        ) from error
    client_partitions = _load_partitions(partitions, split)
    # classes are numbered over all parts of all clients together
    keys: list[tuple[int, str]] = []
    parts: list[Any] = []
    for client_id, partition in enumerate(client_partitions):
        splits = _list_splits(library, partition, client_id)
        keys += [(client_id, name) for name in splits]
        parts += splits.values()
    reader = HuggingFace(
        "the partitions", features=tuple(features), label=label, size=size, channels=channels
    )
    learns_numbers = loss.kind in OF_REAL_TARGETS and loss.kind not in OF_LABELS
    examples, classes, notes = reader.read_parts(library, parts, learns_numbers=learns_numbers, key=key)
    targets = [part.y for part in examples]
    # from_arrays warns of zeros and ones
    if loss.kind == "auto" and are_whole_classes(targets) and not find_target_warning(targets):
        notes = (*notes, HUB_WARNING)
    for note in notes:
        warn_user(note)
    clients: list[Any] = [{} for _ in client_partitions]
    for (client_id, name), part in zip(keys, examples, strict=True):
        if name:
            clients[client_id][name] = (part.inputs, part.y)
        else:
            clients[client_id] = (part.inputs, part.y)
    return clients, classes


def _load_partitions(partitions: Any, split: str) -> list[Any]:
    """List the partitions; those of a ``FederatedDataset`` are loaded one after the other."""
    if not hasattr(partitions, "load_partition"):
        if isinstance(partitions, Mapping) or not isinstance(partitions, Sequence):
            raise DataError(
                "expected a list of datasets.Dataset, one for each client, or a FederatedDataset of "
                f"flwr-datasets, not a {type(partitions).__name__}."
            )
        client_partitions = list(partitions)
    elif hasattr(partitions, "partitioners"):
        partitioners = partitions.partitioners
        if split not in partitioners:
            raise DataError(
                f"the FederatedDataset has no partitioner of {split!r}. {did_you_mean(split, partitioners)}"
            )
        # the number may be known only once the partitioner has its data
        first_partition = partitions.load_partition(0, split)
        indices = range(1, partitioners[split].num_partitions)
        client_partitions = [first_partition, *(partitions.load_partition(i, split) for i in indices)]
    else:
        client_partitions = [partitions.load_partition(i) for i in range(partitions.num_partitions)]
    if not client_partitions:
        raise DataError("a federation needs at least one partition.")
    return client_partitions


def _list_splits(library: Any, partition: Any, client_id: int) -> dict[str, Any]:
    """Splits of a partition by name; a single data set has the empty name."""
    if isinstance(partition, library.Dataset):
        return {"": partition}
    if not isinstance(partition, library.DatasetDict):
        raise DataError(f"client {client_id}: expected a datasets.Dataset, not a {type(partition).__name__}.")
    if "train" not in partition or (unknown := sorted(set(partition) - set(_SPLITS))):
        split_names = sorted(partition) if "train" not in partition else unknown
        raise DataError(
            f"client {client_id}: splits are 'train' and optionally 'val' and 'test', not {split_names}."
        )
    return dict(partition)
