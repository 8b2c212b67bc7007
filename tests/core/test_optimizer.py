"""Optimizers against those of torch, step by step, and schedules against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Rates, Schedule, clip

SHAPES = ((3, 4), (5,), (), (2, 3, 2, 2))


def start(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in SHAPES]


def gradients(steps: int) -> list[list[Tensor]]:
    return [start(100 + i) for i in range(steps)]


def ours(optimizer: Any, rates: Rates, steps: int) -> list[Tensor]:
    params, memory = start(), []
    for count, grads in enumerate(gradients(steps)):
        kept = [g.clone() for g in grads]
        optimizer.step(params, grads, memory, rates, count)
        assert all(torch.equal(a, b) for a, b in zip(kept, grads, strict=True))
    return params


def theirs(make: Any, rates: Rates, steps: int) -> list[Tensor]:
    params = [nn.Parameter(p) for p in start()]
    groups = [
        {"params": [p], "lr": lr, "weight_decay": wd}
        for p, lr, wd in zip(params, rates.lr, rates.weight_decay, strict=True)
    ]
    optimizer = make(groups)
    for grads in gradients(steps):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def assert_close(a: list[Tensor], b: list[Tensor], atol: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


RATES = [
    Rates([0.1] * 4, [0.0] * 4),
    Rates([0.1] * 4, [0.05] * 4),
    Rates([0.1, 0.2, 0.1, 0.3], [0.0] * 4),
    Rates([0.1, 0.0, 0.2, 0.3], [0.0, 0.3, 0.1, 0.0]),
    Rates([0.0, 0.1, 0.1, 0.1], [0.3, 0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
def test_sgd_is_that_of_torch(momentum: float, nesterov: bool, rates: Rates) -> None:
    actual = ours(SGD(momentum=momentum, nesterov=nesterov), rates, 6)
    expected = theirs(lambda g: torch.optim.SGD(g, lr=9.0, momentum=momentum, nesterov=nesterov), rates, 6)
    assert_close(actual, expected)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.999, 1e-8), (0.5, 0.9, 1e-2), (0.0, 0.0, 1e-3)])
def test_adamw_is_that_of_torch(beta1: float, beta2: float, eps: float, rates: Rates) -> None:
    actual = ours(AdamW(beta1=beta1, beta2=beta2, eps=eps), rates, 6)
    expected = theirs(lambda g: torch.optim.AdamW(g, lr=9.0, betas=(beta1, beta2), eps=eps), rates, 6)
    assert_close(actual, expected)


@pytest.mark.parametrize("bound", [0.01, 1.0, 5.0, 1e6, math.inf])
def test_clipping_is_that_of_torch(bound: float) -> None:
    grads = start(3)
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    nn.utils.clip_grad_norm_(params, bound)
    assert_close(clip(grads, bound), [p.grad for p in params])


def test_clipping_bounds_the_norm_of_all_gradients_together() -> None:
    actual = clip([torch.full((4,), 3.0), torch.full((9,), 4.0)], 1.0)
    assert float(torch.cat(actual).norm()) == pytest.approx(1.0, abs=1e-5)
    assert all(torch.equal(t, torch.zeros(2)) for t in clip([torch.zeros(2)], 1.0))


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_an_infinite_bound_is_no_clipping(make: type[SGD] | type[AdamW]) -> None:
    assert make(clip=INF) == make(clip=None)
    with pytest.raises(ConfigError, match="clip"):
        make(clip=-INF)


# -- schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", range(12))
def test_schedules_follow_their_formulas(t: int) -> None:
    assert Schedule().scale(t) == 1.0
    assert Schedule("exponential", factor=0.9).scale(t) == pytest.approx(0.9**t)
    assert (
        Schedule("step", factor=0.5, every=3).scale(t)
        == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125][t]
    )
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * t / 8)) / 2 if t < 8 else 0.1
    assert Schedule("cosine", rounds=8, floor=0.1).scale(t) == pytest.approx(expected)


def test_warmup_grows_linearly_before_the_schedule_begins() -> None:
    schedule = Schedule("exponential", factor=0.5, warmup=3)
    assert [schedule.scale(t) for t in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5, 0.25])


def test_the_learning_rate_of_a_round_is_scaled_by_the_schedule_for_all_groups() -> None:
    optimizer = SGD(lr=0.4, schedule=Schedule("step", factor=0.5, every=2), groups={"head": Group(lr=1.0)})
    rates = optimizer.rates(["/head/weight", "/body/weight"], 5)
    assert rates.lr == pytest.approx([0.25, 0.1])
    assert optimizer.learning_rate(5) == pytest.approx(0.1)


# -- groups --------------------------------------------------------------------------------------------------


def test_groups_match_whole_components_and_the_longest_wins() -> None:
    groups = {"a": Group(lr=1.0), "a/b": Group(lr=2.0, weight_decay=0.5), "c/0": Group(weight_decay=0.0)}
    optimizer = SGD(lr=0.1, weight_decay=0.2, groups=groups)
    rates = optimizer.rates(["/a/x", "/a/b/x", "/a/b", "/ab/x", "/c/0", "/c/01", "/x/a"], 0)
    assert rates.lr == [1.0, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1]
    assert rates.weight_decay == [0.2, 0.5, 0.5, 0.2, 0.0, 0.2, 0.2]


def test_a_group_of_rate_zero_is_not_taken_for_no_setting() -> None:
    rates = AdamW(lr=0.1, weight_decay=0.2, groups={"a": Group(lr=0.0, weight_decay=0.0)}).rates(
        ["/a", "/b"], 0
    )
    assert (rates.lr, rates.weight_decay) == ([0.0, 0.1], [0.0, 0.2])


def test_a_group_that_matches_nothing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\['hed'\].*\['body', 'head'\]"):
        SGD(groups={"hed": Group(lr=1.0), "head": Group(lr=1.0)}).rates(["/head/w", "/body/w"], 0)


# -- settings ------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -0.1}, {"lr": NAN}, {"lr": INF}, {"weight_decay": -1.0}, {"weight_decay": NAN}, {"clip": 0.0}, {"clip": -1.0},
        {"clip": NAN}, {"groups": {"a": Group(lr=-1.0)}}, {"groups": {"a": Group(lr=NAN)}},
        {"groups": {"a": Group(weight_decay=-1.0)}},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(momentum=1.0),
        lambda: SGD(momentum=-0.1),
        lambda: SGD(momentum=NAN),
        lambda: SGD(nesterov=True),
        lambda: AdamW(beta1=1.0),
        lambda: AdamW(beta2=-0.1),
        lambda: AdamW(eps=0.0),
        lambda: AdamW(eps=INF),
        lambda: Schedule(factor=0.0),
        lambda: Schedule(factor=NAN),
        lambda: Schedule(every=0),
        lambda: Schedule(rounds=0),
        lambda: Schedule("cosine"),
        lambda: Schedule(floor=1.5),
        lambda: Schedule(floor=NAN),
        lambda: Schedule(warmup=-1),
    ],
)
def test_settings_of_one_kind_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError):
        Schedule("cosin", rounds=10)


def test_a_learning_rate_of_zero_is_allowed_and_moves_nothing() -> None:
    for optimizer in (SGD(lr=0.0, momentum=0.9), AdamW(lr=0.0)):
        assert_close(ours(optimizer, Rates([0.0] * 4, [0.1] * 4), 3), start(), atol=0)
