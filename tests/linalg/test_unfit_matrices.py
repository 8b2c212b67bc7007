"""What matrix functions refuse, complex numbers, and weights of clients without examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.linalg.delta import DeltaForm, initial_deltas, update_deltas
from fedlowrank.linalg.factored import compress_update, compute_svd, rank_of_energy, truncate_svd
from fedlowrank.linalg.pair import Pair, keep_first_components, zero_pad_pair
from fedlowrank.linalg.svt import soft_threshold, threshold_all, threshold_dense, threshold_singular_values
from fedlowrank.linalg.truncation import truncate_update
from fedlowrank.methods.shared.effective_delta import Weighing


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "w",
    [randn(4, 3, dtype=torch.complex64), randn(2, 3, 4), randn(3), torch.ones(3, 3, dtype=torch.int64)],
    ids=["complex", "three dimensions", "one dimension", "integers"],
)
def test_only_real_matrices_are_decomposed(w: Tensor) -> None:
    with pytest.raises(TaskError, match=r"takes matrices \[m, n\] of real floating-point numbers"):
        threshold_singular_values(w, 0.1)
    with pytest.raises(TaskError, match="threshold_all takes matrices"):
        threshold_all([randn(4, 3), w], 0.1)
    with pytest.raises(TaskError, match="truncate_update takes matrices"):
        truncate_update(w, 1)
    with pytest.raises(TaskError, match="truncate_update takes matrices"):
        truncate_update(Pair(w, w), 1)


def test_complex_thresholds() -> None:
    w, c = randn(4, 3, dtype=torch.complex128), 0.7
    z = w.numpy()
    size = np.abs(z)
    expected = z / size * np.maximum(size - c, 0)
    np.testing.assert_allclose(soft_threshold(w, c).numpy(), expected, atol=1e-15)
    assert soft_threshold(torch.zeros(2, dtype=torch.complex64), c).tolist() == [0, 0]
    u, s, vt = np.linalg.svd(z, full_matrices=False)
    np.testing.assert_allclose(threshold_dense(w, c).numpy(), (u * np.maximum(s - c, 0)) @ vt, atol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    w = randn(9, 9)
    w[2, 3] = value
    for function in (
        lambda: truncate_update(w, 1),
        lambda: truncate_update(Pair(w, randn(9, 9)), 1),
        lambda: truncate_update(Pair(randn(9, 9), w), 1),
        lambda: compress_update({"a": randn(9, 9), "b": w}, 0.9),
    ):
        with pytest.raises(TaskError, match=r"a matrix of shape \[9, 9\] holds a NaN or an infinity"):
            function()
    with pytest.raises(TaskError, match="the 2 singular values hold a NaN or an infinity"):
        rank_of_energy(torch.tensor([value, 1.0]), 0.9)
    # of these nothing is decomposed
    assert compress_update({"b": w}, 1.0)["b"] is w


def test_energies_out_of_range_and_no_values() -> None:
    with pytest.raises(TaskError, match="there are no singular values"):
        rank_of_energy(torch.zeros(0), 0.9)
    for energy in (-1.0, 0.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="compress_update: energy must be above 0 and at most 1; it is"):
            compress_update({"a": randn(9, 9)}, energy)
    for energy in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="rank_of_energy: energy must be a share"):
            rank_of_energy(torch.ones(3), energy)


def test_replies_without_examples_have_no_weights_by_examples() -> None:
    pair = Pair(randn(8, 6), torch.eye(6, dtype=torch.float64))
    deltas = update_deltas(initial_deltas({"x": (8, 6)}, DeltaForm("exact"), 9), {"x": [(1.0, pair)]})
    for per_layer in (False, True):
        with pytest.raises(TaskError, match="the 2 replies of this round have 0"):
            Weighing(by_examples=True, per_layer=per_layer).weigh(deltas, [1, 2], [0, 0], {"x": 6})
    with pytest.raises(TaskError, match="the 2 replies of this round have 0"):
        Weighing(by="examples").weigh(deltas, [1, 2], [0, 0], {"x": 6})
    assert Weighing(by="examples").weigh(deltas, [1, 2], [0, 3], {"x": 6}).weights == {"x": [0.0, 1.0]}
    assert Weighing(by_examples=True).weigh(deltas, [1, 2], [3, 0], {"x": 6}).weights == {"x": [1.0, 0.0]}
    assert sum(Weighing().weigh(deltas, [1, 2], [0, 0], {"x": 6}).weights["x"]) == pytest.approx(1)


def test_factors_beyond_float32_are_refused() -> None:
    with pytest.raises(TaskError, match=r"factors are float32, .* singular value 1e\+80 has larger ones"):
        truncate_update(torch.diag(torch.tensor([1e80, 1e79], dtype=torch.float64)), 1)
    large = truncate_update(torch.diag(torch.tensor([1e60, 1e59], dtype=torch.float64)), 2)
    assert large.pair.b.isfinite().all()
    assert large.energy == pytest.approx(1.01e120)


def test_factors_that_do_not_match_are_refused() -> None:
    # B and A in the order of LoRA's names
    pair = Pair(randn(2, 5), randn(4, 2))
    for function in (truncate_update, keep_first_components, zero_pad_pair):
        with pytest.raises(
            TaskError, match=rf"{function.__name__}: B \[2, 5\] and A \[4, 2\] are no factors"
        ):
            function(pair, 1)
    with pytest.raises(ConfigError, match="rank must be a whole number of at least 0; it is -1"):
        keep_first_components(Pair(pair.a, pair.b), -1)
    with pytest.raises(ConfigError, match="rank must be a whole number of at least 0; it is -1"):
        truncate_svd(compute_svd(randn(4, 4)), -1)


def test_other_types_and_algorithms_are_refused() -> None:
    for w in (torch.ones(9, 9).long(), randn(9, 9, dtype=torch.complex64)):
        with pytest.raises(TaskError, match="compress_update, of 'a', takes matrices"):
            compress_update({"a": w}, 0.5)
    with pytest.raises(ConfigError, match="'foo' is no algorithm"):
        threshold_singular_values(randn(4, 3), 0.1, "foo")  # type: ignore[arg-type]
