"""Batches by length, and padding cut off, checked by counting."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.key import Key
from fedlowrank.data.text.batches import draw_length_buckets, trim_padding


@given(
    lengths=st.lists(st.integers(0, 30), max_size=300),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 2**20),
)
def test_every_example_is_in_one_batch(lengths: list[int], batch_size: int, seed: int) -> None:
    batches = draw_length_buckets(
        torch.tensor(lengths, dtype=torch.int64), batch_size, Key((seed,)).generator()
    )
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
    sizes = sorted((len(batch) for batch in batches), reverse=True)
    full, rest = divmod(len(lengths), batch_size)
    assert sizes == [batch_size] * full + ([rest] if rest else [])


@pytest.mark.full
@given(lengths=st.lists(st.integers(0, 1000), min_size=2, max_size=200), seed=st.integers(0, 99))
def test_within_a_window_the_batches_do_not_overlap_in_length(lengths: list[int], seed: int) -> None:
    # at most 50 batches of 4, one window: sorted by their shortest, no batch begins before another ends
    batches = draw_length_buckets(torch.tensor(lengths), 4, Key((seed,)).generator())
    spans = sorted(
        (min(lengths[i] for i in b.tolist()), max(lengths[i] for i in b.tolist())) for b in batches
    )
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_batches_are_narrow_in_random_order_and_drawn_from_the_generator() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(1, 500, 4000))
    batches, again, other = (draw_length_buckets(lengths, 8, Key((seed,)).generator()) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(batches, other, strict=True))
    spread = np.mean([float(lengths[b].max() - lengths[b].min()) for b in batches])
    # 400 examples a window over 500 lengths: 8 neighbors span about 8·500/400; 8 at random about 500·7/9
    assert spread < 20
    means = np.array([float(lengths[b].double().mean()) for b in batches])
    # sorted batches would have a correlation of nearly 1 between place and length
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2
    # 4000 examples are ten windows: which examples meet is random across them
    assert max(int(b.max() - b.min()) for b in batches) > 2000


@pytest.mark.full
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), width=st.integers(1, 45))
def test_trim_cuts_padding_alone(lengths: list[int], width: int) -> None:
    lengths = [min(n, width) for n in lengths]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, 1 + torch.arange(width), 0)
    x = {"input_ids": ids, "attention_mask": mask.long(), "extra": torch.ones(9)}
    cut, y = trim_padding(x, torch.where(mask, ids, -100))
    keep = cut["attention_mask"].shape[1]
    assert y.shape == (len(lengths), keep)
    # nothing is lost ...
    assert int(cut["attention_mask"].sum()) == int((y != -100).sum()) == sum(lengths)
    assert torch.equal(cut["input_ids"], ids[:, :keep])
    # ... and less than eight columns of padding are left
    assert keep - max(*lengths, 1) < 8
    assert keep == width or keep % 8 == 0
    assert len(cut["extra"]) == 9


def test_trim_leaves_class_labels_and_padding_on_the_left_alone() -> None:
    mask = torch.tensor([[1] * 3 + [0] * 17, [1] * 10 + [0] * 10])
    y = torch.tensor([0, 1])
    cut, same = trim_padding({"input_ids": torch.ones(2, 20), "attention_mask": mask}, y)
    assert same is y
    assert cut["input_ids"].shape == (2, 16)
    left = mask.flip(1)
    assert trim_padding({"input_ids": left, "attention_mask": left}, y)[0]["input_ids"].shape == (2, 20)
    stacked = mask.expand(3, 2, 20)
    assert trim_padding({"attention_mask": stacked}, y)[0]["attention_mask"].shape == (3, 2, 16)
