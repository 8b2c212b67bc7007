"""Tokens of texts as padded arrays, and the numbers of their categories and clients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.errors import DataError
from ..arrays import encode_labels
from .on_disk.lazy_records import LazyRecords, RecordFacts, list_facts
from .text_records import Record

T = TypeVar("T")


def pad_rows(rows: Sequence[Sequence[int]], width: int, value: int) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, and their mask (0 for padding), both int64 [n, width]."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    out = torch.full((len(rows), width), value)
    out[mask] = torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())))
    return out, mask.long()


def choose_pad_token(tokenizer: Any, notes: list[str]) -> int:
    """The id that pads; a note says so if the tokenizer has no padding token."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    notes.append(f"the tokenizer has no padding token: {'token 0' if eos is None else 'EOS'} pads")
    return 0 if eos is None else int(eos)


def number_strata(
    name: str, parts: Sequence[Sequence[Record]]
) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Category number of each record in each part, int64 [n], and the names of the categories."""
    categories = [_find_facts(part).categories.tolist() for part in parts]
    missing_count = sum(value is None for part in categories for value in part)
    if missing_count == sum(map(len, categories)):
        return [None] * len(parts), ()
    if missing_count:
        raise DataError(f"{missing_count} records of {name!r} have no category, but others have one.")
    return encode_labels([np.array(part) for part in categories], f"the categories of {name!r}")


def number_clients(
    parts: Sequence[Sequence[Record]],
) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Client number of each record in each part, int64 [n], -1 for none, and the names of the clients.

    A part without clients has None for its numbers.
    """
    clients = [_find_facts(part).clients.tolist() for part in parts]
    names = tuple(sorted({client for part in clients for client in part if client is not None}))
    number_by_name: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    client_ids = [torch.tensor([number_by_name.get(client, -1) for client in part]) for part in clients]
    return [part if bool((part >= 0).any()) else None for part in client_ids], names


def _find_facts(records: Sequence[Record]) -> RecordFacts:
    return records.facts if isinstance(records, LazyRecords) else list_facts(records)


def split_parts(parts: Sequence[T]) -> tuple[T, T | None]:
    """The values of the training part and of the test part, None if there is none."""
    return parts[0], parts[1] if len(parts) > 1 else None
