"""Batches of texts of like length, and the padding that they do without."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import ConfigError, DataError
from ..counting import at_least

WINDOW = 50
"""Batches within which examples are sorted by length."""

MULTIPLE = 8
"""Batches are as wide as a multiple of so many tokens: fewer shapes, and aligned ones."""


def length_buckets(lengths: Tensor, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """The batches of an epoch, with examples of like length together.

    The examples are shuffled, sorted by length within windows of `WINDOW` batches, cut into batches, and the batches
    shuffled. Each example occurs once. All batches are full but one, if the number of examples is no multiple.

    Args:
        lengths: number of tokens of each example, integers [n].
        batch_size: examples of a batch, at least 1.
        generator: randomness, on the CPU.

    Returns:
        Positions of the examples of each batch, int64 [batch_size], or fewer in one of them; none for n = 0.

    Raises:
        ConfigError: if the batch size is not a whole number above 0, or the lengths are not integers [n].
    """
    at_least("batch_size", batch_size, 1)
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.is_complex():
        raise ConfigError(f"lengths must be whole numbers [n], not {lengths.dtype} {list(lengths.shape)}.")
    lengths = lengths.cpu()
    order = torch.randperm(len(lengths), generator=generator)
    batches: list[Tensor] = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = order[start : start + WINDOW * batch_size]
        window = window[lengths[window].sort(stable=True).indices]
        batches += [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def trim(x: dict[str, Tensor], y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Cut off the last columns, where they are padding in every example of a batch.

    The columns that are kept are rounded up to a multiple of `MULTIPLE`, or all are kept.

    Args:
        x: token inputs by name, each [..., T], among them ``attention_mask``, 0 for padding. Inputs of another shape
            than the mask's are left alone.
        y: token labels [..., T], cut as well; or labels of classes, which are left alone.

    Returns:
        Views of the first columns.

    Raises:
        DataError: if there is no attention mask.
    """
    mask = x.get("attention_mask")
    if mask is None:
        raise DataError(
            f"padding is found by an input 'attention_mask'; there are {', '.join(map(repr, x)) or 'none'}."
        )
    return cut(x, y, columns(int(ends(mask).max())))


def ends(mask: Tensor) -> Tensor:
    """Where the last token of each example ends, from its attention mask [..., T]: int64 [...], 0 without a token."""
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (mask != 0).mul(places).amax(-1)


def columns(last: int) -> int:
    """Columns that are kept of examples of which the longest :func:`ends` there."""
    return -(-max(1, last) // MULTIPLE) * MULTIPLE


def cut(x: dict[str, Tensor], y: Tensor, keep: int) -> tuple[dict[str, Tensor], Tensor]:
    """The first columns of token inputs and token labels, as :func:`trim`; beyond their width, the whole.

    Args:
        x: see :func:`trim`; there must be an attention mask.
        y: likewise.
        keep: how many columns.
    """
    shape = x["attention_mask"].shape
    short = {name: t[..., :keep] if t.shape == shape else t for name, t in x.items()}
    return short, y[..., :keep] if y.shape == shape else y
