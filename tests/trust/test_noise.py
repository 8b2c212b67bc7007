"""The law of the noise and where it comes from."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.trust.privacy.noise import NoiseSource, discrete_gaussian, gaussian

KEY = Key((11,)) / "noise" / 3
SOURCES = pytest.mark.parametrize("source", [KEY, "system"])
COUNT = 200_000


@SOURCES
def test_the_law_is_normal(source: NoiseSource) -> None:
    std = 2.5
    drawn = gaussian({"w": torch.empty(400, COUNT // 400)}, std, source)["w"].double().numpy().ravel()
    # n s² / σ² is chi-square of n degrees; system noise fails one time in 10⁸
    statistic = float(np.sum(drawn**2) / std**2)
    assert stats.chi2.ppf(5e-9, COUNT) < statistic < stats.chi2.isf(5e-9, COUNT)
    assert stats.kstest(drawn, "norm", args=(0, std)).pvalue > 1e-8
    assert abs(drawn.mean()) < 6 * std / math.sqrt(COUNT)


@SOURCES
def test_tensors_and_entries_are_independent(source: NoiseSource) -> None:
    drawn = gaussian({"a": torch.empty(COUNT), "b": torch.empty(COUNT)}, 1.0, source)
    assert abs(torch.corrcoef(torch.stack([drawn["a"], drawn["b"]]))[0, 1]) < 6 / math.sqrt(COUNT)
    shifted = torch.stack([drawn["a"][1:], drawn["a"][:-1]])
    assert abs(torch.corrcoef(shifted)[0, 1]) < 6 / math.sqrt(COUNT)


def test_a_key_gives_the_same_noise_in_any_order() -> None:
    a, b = torch.empty(3, 4), torch.empty(5)
    first = gaussian({"a": a, "b": b}, 1.0, KEY)
    second = gaussian({"b": b, "a": a}, 1.0, KEY)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["b"], gaussian({"b": b}, 1.0, KEY / "other")["b"])


def test_system_noise_ignores_every_seed() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        return gaussian({"w": torch.empty(1000)}, 1.0, "system")["w"]

    assert (draw() != draw()).sum() > 990


def test_system_noise_has_256_bits_of_the_operating_system_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    seeds = iter([bytes(32), bytes(16) + b"\x01" + bytes(15), bytes(32)])

    def urandom(count: int) -> bytes:
        asked.append(count)
        return next(seeds)

    monkeypatch.setattr("os.urandom", urandom)
    drawn = gaussian({name: torch.empty(4) for name in "abc"}, 1.0, "system")
    assert asked == [32, 32, 32]
    assert not torch.equal(drawn["a"], drawn["b"])
    assert torch.equal(drawn["a"], drawn["c"])
    # all 256 bits enter the generator
    expected = np.random.default_rng(np.random.SeedSequence(0, pool_size=8)).standard_normal(4)
    assert torch.equal(drawn["a"], torch.from_numpy(expected).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_noise_is_drawn_in_float64_and_rounded(dtype: torch.dtype) -> None:
    exact = gaussian({"w": torch.empty(7, 2, dtype=torch.float64)}, 3.0, KEY)["w"]
    drawn = gaussian({"w": torch.empty(7, 2, dtype=dtype)}, 3.0, KEY)["w"]
    assert not torch.equal(exact, exact.float().double())
    assert drawn.dtype == dtype
    assert drawn.shape == (7, 2)
    assert torch.equal(drawn, exact.to(dtype))


def test_shapes_without_entries_or_axes() -> None:
    drawn = gaussian({"scalar": torch.tensor(1.0), "none": torch.empty(0, 3)}, 1.0, KEY)
    assert drawn["scalar"].shape == ()
    assert drawn["scalar"].dtype == torch.float32
    assert drawn["none"].shape == (0, 3)
    assert gaussian({}, 1.0, KEY) == {}


def test_no_noise_is_zeros_and_the_tensors_stay_as_they_are() -> None:
    like = {"w": torch.ones(5)}
    assert torch.equal(gaussian(like, 0.0, KEY)["w"], torch.zeros(5))
    assert torch.equal(like["w"], torch.ones(5))


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_wrong_standard_deviations(std: float) -> None:
    with pytest.raises(ConfigError, match="standard deviation"):
        gaussian({"w": torch.empty(2)}, std, KEY)


def test_wrong_tensors_and_sources() -> None:
    with pytest.raises(ConfigError, match="only floating"):
        gaussian({"n": torch.empty(2, dtype=torch.int64)}, 1.0, KEY)
    with pytest.raises(ConfigError, match="a key or 'system'"):
        gaussian({"w": torch.empty(2)}, 1.0, "seeded")  # type: ignore[arg-type]


@pytest.mark.parametrize("std", [1.0, 1.5, 3.7])
def test_the_probabilities_are_those_of_the_discrete_gaussian(std: float) -> None:
    count, k = 200_000, np.arange(-8, 9)
    drawn = discrete_gaussian(count, std)
    weights = np.exp(-(np.arange(-400, 401) ** 2) / (2 * std * std))
    inside = np.exp(-(k**2) / (2 * std * std)) / weights.sum()
    seen = np.array([(drawn == i).sum() for i in k])
    expected = np.append(inside, 1 - inside.sum()) * count
    keep = expected > 5
    observed = np.append(seen, count - seen.sum())
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    # fails one time in 10⁸
    assert statistic < stats.chi2.isf(1e-8, keep.sum())


def test_large_discrete_noise_is_normal_and_drawn_afresh() -> None:
    first, other = (discrete_gaussian(100_000, 3e7) for _ in range(2))
    assert stats.kstest(first / 3e7, "norm").pvalue > 1e-8
    assert abs(np.corrcoef(first, other)[0, 1]) < 6 / math.sqrt(100_000)


@pytest.mark.parametrize("std", [0.5, math.nan, math.inf])
def test_discrete_noise_needs_a_standard_deviation(std: float) -> None:
    with pytest.raises(ConfigError, match="on integers must be at least 1"):
        discrete_gaussian(3, std)
