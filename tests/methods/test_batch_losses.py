"""Losses of distillation are means over the examples of a batch, padding left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlowrank.core.contract import Batch
from fedlowrank.core.learning.batch_losses import kl_divergence, soft_cross_entropy, square_error
from tests.golden import reference


def test_divergences_are_means_over_examples_and_not_over_classes() -> None:
    rng = np.random.default_rng(0)
    t, s = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    p, q = reference.softmax(t), reference.softmax(s)
    batch = Batch(torch.zeros(5), torch.zeros(5, dtype=torch.int64))
    actual = kl_divergence(torch.tensor(t), torch.tensor(s), batch)
    assert float(actual) == pytest.approx(float((p * np.log(p / q)).sum() / 5), abs=1e-14)
    actual = soft_cross_entropy(torch.tensor(s), torch.tensor(p))
    np.testing.assert_allclose(actual.numpy(), -(p * np.log(q)).sum(1), atol=1e-14)
    assert float(square_error(torch.tensor(t), torch.tensor(s), batch)) == pytest.approx(
        float(((t - s) ** 2).mean()), abs=1e-14
    )


def test_padding_counts_in_no_mean() -> None:
    values = torch.tensor([1.0, 2.0, torch.inf])
    batch = Batch(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.tensor([True, True, False]))
    assert float(batch.mean(values)) == 1.5
    assert batch.sum(torch.stack([values, values], 1)).tolist() == [3.0, 3.0]
    empty = Batch(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))
    assert float(empty.mean(values)) == 0.0
