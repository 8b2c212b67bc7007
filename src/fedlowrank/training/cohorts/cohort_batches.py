"""The batches of a cohort: one batch with the rows of all clients for each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.contract import Batch
from ...core.learning.losses import IGNORE_INDEX, Loss
from ...data.pixels import Pixels
from ...models.standard import channels_last
from ..client_tensors.client_tensor import NoRuleError
from ..local_data import LocalData, gather


class BufferPool:
    """Reused memory for batches, because allocating new pages takes as long as copying a batch."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def like(self, purpose: str, t: Tensor, *shape: int) -> Tensor:
        """Return an uninitialized buffer of a tensor's type; it overwrites the last buffer of the same purpose."""
        key = purpose, t.dtype, t.device
        if key not in self._buffers or self._buffers[key].numel() < math.prod(shape):
            self._buffers[key] = t.new_empty(math.prod(shape))
        return self._buffers[key][: math.prod(shape)].view(shape)


class CohortBatches:
    """The batches of a cohort's clients, step by step.

    If the examples of all clients are rows of one tensor, a batch of all clients is one selection of its rows, and the indices
    of these rows are computed once for the pass. If not, the rows of each client are copied into a reused buffer.
    A batch is valid until the next one is requested.

    Args:
        data: training data of the clients.
        name: name of the pass.
        pool: buffers for batches.
    """

    def __init__(self, data: Sequence[LocalData], name: str, pool: BufferPool) -> None:
        self._pool = pool
        self._loss = data[0].loss
        require_like_inputs([d.examples.x for d in data])
        is_augmented = any(d.augment.is_active for d in data)
        self._rows = None if is_augmented else _shared_rows(data, name)
        if self._rows is not None:
            return
        self._examples = [d.examples for d in data]
        self._orders = [d.indices(name) for d in data]
        self._columns = None if is_augmented or data[0].width is None else [d.columns(name) for d in data]
        self._batches_of_clients = [d.batches(name) for d in data]
        # images of a batch have another memory layout
        self._can_copy_rows = not is_augmented and all(
            not isinstance(d.examples.x, dict) and d.examples.x.ndim != 4 for d in data
        )

    def batch(self, step: int, active_count: int) -> Batch:
        """Return the batch of the first ``active_count`` clients at a step; steps must be requested in order."""
        if self._rows is not None:
            return self._rows.batch(step)
        examples, index = (
            self._examples[:active_count],
            [order[step] for order in self._orders[:active_count]],
        )
        if self._columns is not None:
            # all texts get the width of the widest; after its end a text has the tokenizer's padding
            columns = max(client_columns[step] or 0 for client_columns in self._columns[:active_count])
            pairs = zip(examples, index, strict=True)
            return join_batches([gather(e, i, step, columns, self._loss) for e, i in pairs])
        if not self._can_copy_rows:
            return join_batches([next(batches) for batches in self._batches_of_clients[:active_count]])
        if any(len(i) != len(index[0]) for i in index):
            return join_batches(
                [gather(e, i, step, loss=self._loss) for e, i in zip(examples, index, strict=True)]
            )
        x, y = (
            self._copy_rows(field_name, [getattr(e, field_name) for e in examples], index)
            for field_name in ("x", "y")
        )
        return Batch(x, y, step=step, loss=self._loss)

    def _copy_rows(self, field_name: str, tensors: Sequence[Any], index: Sequence[Tensor]) -> Tensor:
        """Copy the same number of rows of each tensor into ``[clients, b, ...]``."""
        first_tensor: Any = tensors[0]
        if isinstance(first_tensor, Pixels):
            if all(p.table is first_tensor.table for p in tensors):
                return first_tensor.images(self._copy_rows(field_name, [p.codes for p in tensors], index))
            return torch.stack([p.index_select(0, i) for p, i in zip(tensors, index, strict=True)])
        out = self._pool.like(
            field_name, first_tensor, len(tensors), index[0].numel(), *first_tensor.shape[1:]
        )
        for row, t, i in zip(out.unbind(), tensors, index, strict=True):
            torch.index_select(t, 0, i, out=row)
        return out


def require_like_inputs(inputs: Sequence[Any]) -> None:
    """Refuse inputs that differ in shape between clients, because padding would change them; texts have their own padding.

    Raises:
        NoRuleError: if the shapes differ.
    """
    shapes = {tuple(x.shape[1:]) for x in inputs if not isinstance(x, dict)}
    if len(shapes) > 1:
        raise NoRuleError("clients whose inputs differ in shape")


@dataclass(frozen=True)
class _SharedRows:
    """Batches of clients whose examples are rows of one tensor.

    Attributes:
        inputs: inputs of all clients, ``[rows, ...]``, possibly encoded.
        labels: labels of all clients, ``[rows, ...]``.
        decode: function that turns rows of ``inputs`` into inputs.
        row_indices: indices of the rows of ``inputs`` and of ``labels`` in the batch of each step, each ``[clients,
            b]``.
        masks: mask of the rows of each step's batch that are examples; None where all are.
        loss: loss of the task.
    """

    inputs: Tensor
    labels: Tensor
    decode: Callable[[Tensor], Tensor]
    row_indices: list[tuple[Tensor, Tensor]]
    masks: list[Tensor | None]
    loss: Loss

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        x_rows, y_rows = self.row_indices[step]
        x = channels_last(self.decode(self.inputs.index_select(0, x_rows.flatten())))
        y = self.labels.index_select(0, y_rows.flatten())
        shape = x_rows.shape
        x, y = x.unflatten(0, shape), y.unflatten(0, shape)
        return Batch(x, y, self.masks[step], step, loss=self.loss)


def _as_stored(rows: Tensor) -> Tensor:
    """Return rows that need no decoding."""
    return rows


def _shared_rows(data: Sequence[LocalData], name: str) -> _SharedRows | None:
    """Build the batches of a pass if the examples of all clients are rows of one tensor; None if they are not.

    Clients with the most steps come first. A client with fewer examples in a step repeats its first example,
    masked.
    """
    inputs: list[Any] = [d.examples.x for d in data]
    decode: Callable[[Tensor], Tensor] = _as_stored
    if isinstance(inputs[0], Pixels):
        decode = inputs[0].images
        inputs = [x.codes for x in inputs if x.table is inputs[0].table]
    if len(inputs) < len(data) or any(isinstance(x, dict) for x in inputs):
        return None
    x, y = common_base(inputs), common_base([d.examples.y for d in data])
    if x is None or y is None or y[0].ndim > 2 or (y[0].ndim == 2 and not y[0].is_floating_point()):
        return None
    orders = [d.order(name) for d in data]
    indices = torch.cat([index for order in orders for index in order]).numpy() if orders[0] else np.empty(0)
    step_counts = np.array([len(order) for order in orders])
    # batch sizes of clients and steps [K, S], 0 where a client has ended
    sizes = np.zeros((len(orders), len(orders[0])), dtype=np.int64)
    for k, order in enumerate(orders):
        sizes[k, : len(order)] = [index.numel() for index in order]
    starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
    offsets = [np.array(first_rows)[:, None] for _, first_rows in (x, y)]
    row_indices: list[list[Any]] = [[], []]
    masks: dict[int, Any] = {}
    for step in range(sizes.shape[1]):
        client_count = np.count_nonzero(step_counts > step)
        step_sizes = sizes[:client_count, step, None]
        columns = np.arange(step_sizes.max())
        is_example = columns < step_sizes
        if not is_example.all():
            masks[step] = is_example
        step_indices = indices[starts[:client_count, step, None] + np.where(is_example, columns, 0)]
        for rows, first_rows in zip(row_indices, offsets, strict=True):
            rows.append(step_indices + first_rows[:client_count])
    device = y[0].device
    x_rows, y_rows = (_to_device(steps, device) for steps in row_indices)
    masks_on_device = dict(zip(masks, _to_device(list(masks.values()), device), strict=True))
    masks_of_steps = [masks_on_device.get(step) for step in range(len(x_rows))]
    rows_of_steps = list(zip(x_rows, y_rows, strict=True))
    return _SharedRows(x[0], y[0], decode, rows_of_steps, masks_of_steps, data[0].loss)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in one transfer and return them as tensors."""
    if not arrays:
        return []
    values = torch.from_numpy(np.concatenate([a.ravel() for a in arrays])).to(device)
    tensors = torch.split(values, [a.size for a in arrays])
    return [tensor.view(a.shape) for tensor, a in zip(tensors, arrays, strict=True)]


def common_base(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """Find the tensor of which all tensors are rows, and the first row of each; None if there is no such tensor."""
    first_tensor = tensors[0]
    width = math.prod(first_tensor.shape[1:])
    storage = first_tensor.untyped_storage()
    if width == 0 or first_tensor.dtype == torch.bool:
        return None
    for t in tensors:
        is_inside = t.untyped_storage().data_ptr() == storage.data_ptr() and t.is_contiguous()
        has_form = t.shape[1:] == first_tensor.shape[1:] and t.dtype == first_tensor.dtype
        if not is_inside or not has_form or t.storage_offset() % width:
            return None
    rows = storage.nbytes() // first_tensor.element_size() // width
    base = first_tensor.as_strided(
        (rows, *first_tensor.shape[1:]), _contiguous_strides(first_tensor.shape[1:]), 0
    )
    return base, [t.storage_offset() // width for t in tensors]


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor ``[rows, *shape]``."""
    return [math.prod(shape[i:]) for i in range(len(shape) + 1)]


def flatten_batch(batch: Batch) -> Batch:
    """Turn a batch of all clients ``[K, b, ...]`` into one of their rows ``[K·b, ...]``."""
    x = (
        {n: t.flatten(0, 1) for n, t in batch.x.items()}
        if isinstance(batch.x, dict)
        else batch.x.flatten(0, 1)
    )
    mask = None if batch.mask is None else batch.mask.flatten()
    return Batch(x, batch.y.flatten(0, 1), mask, batch.step, len(batch.y), batch.loss)


def join_batches(batches: list[Batch]) -> Batch:
    """Join a batch of each client into one ``[K, b, ...]``; shorter batches are zero-padded and masked."""
    sizes = [len(b) for b in batches]
    max_size = max(sizes)

    def join(tensors: list[Tensor], fill: int = 0) -> Tensor:
        if all(t.shape == tensors[0].shape for t in tensors):
            return torch.stack(tensors)
        # texts of unequal length also differ in their second dimension
        shape = [max(ns) for ns in zip(*(t.shape for t in tensors), strict=True)]
        out = tensors[0].new_full((len(tensors), *shape), fill)
        for row, t in zip(out, tensors, strict=True):
            row[tuple(slice(n) for n in t.shape)] = t
        return out

    x = [b.x for b in batches]
    inputs = (
        {n: join([client_inputs[n] for client_inputs in x]) for n in x[0]}
        if isinstance(x[0], dict)
        else join(x)
    )
    labels = join([b.y for b in batches], _padding(batches))
    mask = None
    if min(sizes) != max_size:
        # created on the device: a copy from the host would wait for the previous steps
        mask = torch.ones(len(sizes), max_size, dtype=torch.bool, device=batches[0].y.device)
        for i, size in enumerate(sizes):
            if size < max_size:
                mask[i, size:].fill_(False)
                if labels.ndim == 2:
                    # a label of the client: a label of another class may have an infinite loss
                    labels[i, size:] = labels[i, 0]
                if isinstance(inputs, dict):
                    # a text without tokens attends to none
                    for t in inputs.values():
                        t[i, size:] = t[i, 0]
    return Batch(inputs, labels, mask, batches[0].step, loss=batches[0].loss)


def _padding(batches: Sequence[Batch]) -> int:
    """The label of the tokens that pad shorter texts, which the loss ignores."""
    batch = batches[0]
    if batch.y.ndim < 2:
        return 0
    if batch.y.is_floating_point():
        if len({b.y.shape[1:] for b in batches}) > 1:
            raise NoRuleError("real targets of unequal widths")
        return 0
    return IGNORE_INDEX if batch.weights is not None else batch.loss.ignore_index
