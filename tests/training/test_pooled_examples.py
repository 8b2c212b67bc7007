"""The examples of all clients lie in one tensor where they are few and of one form, and are the examples that they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedlowrank.data.dataset import Examples
from fedlowrank.data.pixels import Pixels
from fedlowrank.training.cohorts import pooled_examples
from fedlowrank.training.cohorts.cohort_batches import common_base
from fedlowrank.training.cohorts.pooled_examples import pool_examples


def examples(n: int, seed: int, shape: tuple[int, ...] = (4,)) -> Examples:
    g = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(n, *shape, generator=g), torch.arange(n) % 3)


def base_of(tensors: list[Tensor]) -> bool:
    return common_base(tensors) is not None


def test_examples_become_views_of_one_tensor() -> None:
    parts = [examples(n, n) for n in (3, 0, 5)]
    actual = pool_examples(parts)
    for a, b in zip(actual, parts, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.y, b.y)
    assert base_of([part.x for part in actual])  # type: ignore[misc]  # tensors
    # those that lie in one tensor already are not copied
    assert all(a.x is b.x for a, b in zip(pool_examples(actual), actual, strict=True))


def test_images_as_bytes_keep_their_table() -> None:
    table = torch.linspace(-1, 1, 256)[None]
    codes = [torch.randint(0, 256, (n, 1, 2, 2), dtype=torch.uint8) for n in (2, 4)]
    parts = [Examples(Pixels(c, table), torch.zeros(len(c), dtype=torch.int64)) for c in codes]
    actual = [part.x for part in pool_examples(parts)]
    assert base_of([x.codes for x in actual])  # type: ignore[union-attr]
    assert all(x.table is table for x in actual)  # type: ignore[union-attr]
    assert all(torch.equal(x.codes, c) for x, c in zip(actual, codes, strict=True))  # type: ignore[union-attr]
    other = Examples(Pixels(codes[0], table.clone()), parts[0].y)
    assert pool_examples([parts[1], other])[1] is other


@pytest.mark.parametrize(
    "parts",
    [
        [examples(3, 0), examples(3, 1, (5,))],
        [examples(3, 0), Examples(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))],
        [Examples({"a": torch.zeros(2, 3)}, torch.zeros(2, dtype=torch.int64))] * 2,
    ],
    ids=["shapes", "types", "named"],
)
def test_inputs_of_several_forms_stay_as_they_are(parts: list[Examples]) -> None:
    assert all(a is b for a, b in zip(pool_examples(parts), parts, strict=True))


def test_many_examples_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [examples(3, 0), examples(3, 1)]
    size = sum(part.inputs.nbytes + part.y.nbytes for part in parts)
    monkeypatch.setattr(pooled_examples, "MAX_POOLED_BYTES", size - 1)
    assert all(a is b for a, b in zip(pool_examples(parts), parts, strict=True))
    monkeypatch.setattr(pooled_examples, "MAX_POOLED_BYTES", size)
    assert not any(a is b for a, b in zip(pool_examples(parts), parts, strict=True))
