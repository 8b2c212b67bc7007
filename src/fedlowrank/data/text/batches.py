"""Batches of texts of similar length, and truncation of the padding that all texts of a batch share."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW_BATCHES = 50
"""Number of batches within which examples are sorted by length."""

WIDTH_MULTIPLE = 8
"""The width of a batch is a multiple of this number of tokens, for fewer shapes and aligned memory."""


_LARGE_MASK = 1 << 22
"""Largest number of entries of a mask that are measured at once."""


def draw_length_buckets(lengths: Tensor, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Batches of one epoch with examples of similar length.

    The examples are shuffled, sorted by length within windows of `WINDOW_BATCHES` batches, cut into batches, and the
    batches shuffled. Each example occurs once. All batches but one are full.

    Args:
        lengths: number of tokens of each example, integers [n].
        batch_size: examples per batch, at least 1.
        generator: randomness, on the CPU.

    Returns:
        Positions of the examples of each batch, int64 [batch_size], or fewer in one of them; none for n = 0.
    """
    lengths = lengths.cpu()
    order = torch.randperm(len(lengths), generator=generator)
    batches: list[Tensor] = []
    for start in range(0, len(order), WINDOW_BATCHES * batch_size):
        window = order[start : start + WINDOW_BATCHES * batch_size]
        batches += torch.split(window[lengths[window].sort(stable=True).indices], batch_size)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def trim_padding(x: dict[str, Tensor], y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Cut off the last columns that are padding in every example of a batch.

    The number of remaining columns is rounded up to a multiple of `WIDTH_MULTIPLE`.

    Args:
        x: token inputs by name, each [..., T], among them ``attention_mask``, 0 for padding. Inputs of
            another shape than the mask stay unchanged.
        y: token labels [..., T], which are cut as well; or class labels, which stay unchanged.
    """
    return truncate_columns(x, y, round_up_width(int(measure_lengths(x["attention_mask"]).max())))


def measure_lengths(mask: Tensor) -> Tensor:
    """Position after the last token of each example, int64 [...], of an attention mask [..., T]."""
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    if mask.ndim > 1 and mask.numel() > _LARGE_MASK:
        # a temporary of the mask's size would not fit beside tokens on disk
        row_count = max(1, _LARGE_MASK // mask[0].numel())
        return torch.cat([(chunk != 0).mul(positions).amax(-1) for chunk in mask.split(row_count)])
    return (mask != 0).mul(positions).amax(-1)


def round_up_width(length: int) -> int:
    """Width of a batch whose longest example has this length: the next multiple of `WIDTH_MULTIPLE`."""
    return -(-max(1, length) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def truncate_columns(x: dict[str, Tensor], y: Tensor, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """Views of the first columns of token inputs and token labels; see :func:`trim_padding`."""
    shape = x["attention_mask"].shape
    truncated_inputs = {name: t[..., :width] if t.shape == shape else t for name, t in x.items()}
    return truncated_inputs, y[..., :width] if y.shape == shape else y
