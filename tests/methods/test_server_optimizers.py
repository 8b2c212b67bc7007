"""Optimizers of servers: their steps are those of PyTorch's, and their groups, clipping and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.core.learning.server_optimizer import (
    ServerOptimizerState,
    initial_optimizer_state,
    server_step,
)

from .cluster_setting import draw_tree
from .comparisons import assert_trees_close


def assert_steps_equal_torch(optimizer: Any, made: Any, rounds: int = 6, scheduler: Any = None) -> None:
    """The same pseudo-gradients through :func:`server_step` and through an optimizer of torch."""
    g = torch.Generator().manual_seed(0)
    value: Any = {
        "a": torch.randn(4, 3, generator=g, dtype=torch.float64),
        "b": [torch.ones(2, dtype=torch.float64)],
    }
    params = [t.clone().requires_grad_() for _, t in tree.leaves(value)]
    theirs, memory = made(params), initial_optimizer_state()
    for t in range(rounds):
        mean = tree.map_leaves(lambda x: x + torch.randn(x.shape, generator=g, dtype=torch.float64), value)
        before, kept = tree.encode(value), tree.encode(memory)
        for p, (_, m) in zip(params, tree.leaves(mean), strict=True):
            p.grad = p.detach() - m
        theirs.step()
        if scheduler is not None:
            theirs.param_groups[0]["lr"] *= scheduler
        new, after = server_step(optimizer, value, mean, memory, t)
        assert (before, kept) == (tree.encode(value), tree.encode(memory))
        assert after.count == t + 1
        value, memory = new, after
        for p, (_, actual) in zip(params, tree.leaves(value), strict=True):
            torch.testing.assert_close(actual, p.detach(), rtol=0, atol=1e-12)


def test_the_servers_adam_is_that_of_torch() -> None:
    settings = {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}
    assert_steps_equal_torch(
        AdamW(beta1=0.8, beta2=0.95, **settings),
        lambda p: torch.optim.AdamW(p, betas=(0.8, 0.95), **settings),
    )
    halved = Schedule(kind="exponential", factor=0.5)
    assert_steps_equal_torch(
        AdamW(schedule=halved, **settings), lambda p: torch.optim.AdamW(p, **settings), scheduler=0.5
    )


def test_the_servers_sgd_is_that_of_torch() -> None:
    for settings in ({"lr": 0.4}, {"lr": 1.0, "momentum": 0.7}, {"lr": 1.0, "weight_decay": 0.1}):
        assert_steps_equal_torch(SGD(**settings), lambda p, s=settings: torch.optim.SGD(p, **s))


def test_a_plain_step_of_one_is_the_mean_itself() -> None:
    old, mean = draw_tree(0), draw_tree(1)
    memory = initial_optimizer_state()
    actual, after = server_step(SGD(lr=1.0), old, mean, memory, 3)
    assert all(a is b for a, b in zip(tree.tensors(actual), tree.tensors(mean), strict=True))
    assert after is memory
    # and so it is up to rounding by the long way
    other, _ = server_step(SGD(lr=1.0, nesterov=False, schedule=Schedule(warmup=1)), old, mean, memory, 3)
    assert_trees_close(other, mean)


def test_groups_of_a_servers_optimizer_are_paths_of_its_tree() -> None:
    old, mean = draw_tree(0), draw_tree(1)
    actual, _ = server_step(SGD(lr=1.0, groups={"w": Group(lr=0.0)}), old, mean, initial_optimizer_state(), 0)
    assert tree.equal(actual["w"], old["w"])
    assert_trees_close(actual["b"], mean["b"])
    with pytest.raises(
        ConfigError, match=r"groups: \['x'\] match no parameter; the tree begins with \['b', 'w'\]"
    ):
        server_step(SGD(lr=1.0, groups={"x": Group(lr=0.0)}), old, mean, initial_optimizer_state(), 0)


def test_a_servers_optimizer_clips() -> None:
    old, mean = draw_tree(0), draw_tree(1)
    actual, _ = server_step(SGD(lr=0.5, clip=0.01), old, mean, initial_optimizer_state(), 0)
    moved = sum(
        float((a - b).square().sum()) for (_, a), (_, b) in zip(*map(tree.leaves, (old, actual)), strict=True)
    )
    assert moved**0.5 == pytest.approx(0.005, rel=1e-3)


def test_the_memory_of_a_server_survives_its_bytes() -> None:
    old, mean = draw_tree(0), draw_tree(1)
    _, memory = server_step(AdamW(lr=0.1), old, mean, initial_optimizer_state(), 0)
    assert isinstance(memory, ServerOptimizerState)
    assert tree.equal(tree.decode(tree.encode(memory)), memory)
    assert len(memory.tensors) == 2
