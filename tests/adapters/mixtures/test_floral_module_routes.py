"""Routes of Floral, what it refuses, and what it says about itself."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank import Floral
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.config.reading.parsing import build
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.methods.floral import FederatedFloral
from tests.adapters.mixtures.floral_networks import TOLERANCES, build_network, draw_normal, draw_parameters


def test_the_router() -> None:
    model = Floral(nn.Linear(4, 3), rank=1, num_clusters=3, router=Router(temperature=2.0, top=2))
    # of equal ones the first two
    assert model.pi.tolist() == [0.5, 0.5, 0.0]
    assert not model.pi.requires_grad
    with torch.no_grad():
        model.theta.copy_(torch.tensor([2.0, 0.0, 1.0]))
    e = torch.tensor([1.0, 0.5]).exp()
    assert model.pi.tolist() == pytest.approx([float(e[0] / e.sum()), 0.0, float(e[1] / e.sum())])
    groups = Floral(nn.Linear(4, 3).requires_grad_(False), router=Router(lr=0.7)).parameter_groups()
    assert (groups[1]["lr"], groups[1]["weight_decay"], len(groups[0]["params"])) == (0.7, 0.0, 3)


def test_noise_is_of_training_alone_and_of_torchs_generator_as_dropout() -> None:
    x = draw_normal(2, 4)
    router = Router(noise=1.0)
    model = draw_parameters(Floral(nn.Linear(4, 3).double(), rank=1, num_clusters=3, router=router))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outs = [model(x) for _ in range(3)]
        assert not torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[1], outs[2])
        torch.manual_seed(0)
        assert torch.equal(model(x), outs[0])
        # noise on θ of the standard deviation asked for: of many draws, by hand
        noises = torch.stack([model._shares(True).detach().log() for _ in range(2000)]).diff(dim=1)
        assert float(noises.std(0).mean()) == pytest.approx(2**0.5, rel=0.05)
        before = torch.get_rng_state()
        assert torch.equal(model.eval()(x), model(x))
        Floral(copy.deepcopy(model.base), router=router, seed=1)
        assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)
    # a fixed route has nothing to be noisy about
    model.train().route(1)
    assert torch.equal(model(x), model(x))


def test_routes() -> None:
    model = draw_parameters(Floral(nn.Linear(4, 3).double(), rank=1, num_clusters=3))
    x = draw_normal(2, 4)
    learned = model(x)
    for c in range(3):
        model.route(c)
        assert model.pi.tolist() == [float(i == c) for i in range(3)]
        torch.testing.assert_close(model(x), model.merge(c)(x), **TOLERANCES)
    model.zero_grad()
    model(x).sum().backward()
    assert model.theta.grad is None
    u = model.adapted()["weight"].u.grad
    assert u is not None
    assert [bool(u[c].any()) for c in range(3)] == [False, False, True]
    for mixture in ([0.5, 0.25, 0.25], torch.tensor([0.5, 0.25, 0.25])):
        model.route(mixture)
        torch.testing.assert_close(model(x), model.merge([0.5, 0.25, 0.25])(x), **TOLERANCES)
    model.route(None)
    assert torch.equal(model(x), learned)
    bad: list[Any] = [3, -1, True, [0.5, 0.5], [0.5, 0.6, 0.5], [1.5, -0.5, 0.0], [float("nan"), 0.5, 0.5]]
    for wrong in bad:
        with pytest.raises(ConfigError, match=r"no cluster|numbers >= 0"):
            model.route(wrong)
        with pytest.raises(ConfigError, match=r"no cluster|numbers >= 0"):
            model.merge(wrong)
    known = Floral(nn.Linear(4, 3), router=Router(routing="optimal"))
    with pytest.raises(TaskError, match=r"route\(cluster\)"):
        known(torch.ones(1, 4))
    known.route(0)
    known(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"num_clusters": 0},
            ConfigError,
            r"^Floral\.num_clusters must be a whole number of at least 1; it is 0$",
        ),
        (
            {"num_clusters": 2.5},
            ConfigError,
            r"^Floral\.num_clusters: input should be a valid integer, got a number with a fractional part; it is 2\.5$",
        ),
        ({"alpha": 0.0}, ConfigError, r"^Floral\.alpha must be > 0; it is 0\.0$"),
        ({"alpha": float("inf")}, ConfigError, r"^Floral\.alpha must be > 0; it is inf$"),
        (
            {"router": Router(update="mfl")},
            ConfigError,
            "^router: update = 'mfl' needs the losses of all clusters ",
        ),
        ({"exclude": lambda *_: True}, TaskError, "predicates"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Floral(build_network(), **options)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    # as in a file, where clusters = 2.0 is 2
    model = Floral(nn.Linear(4, 3), rank=1, num_clusters=2.0)  # type: ignore[arg-type]
    assert (model.clusters, type(model.clusters)) == (2, int)
    assert build(FederatedFloral, {"clusters": 2.0}, "methods.floral") == FederatedFloral(clusters=2)
    with pytest.raises(ConfigError) as error:
        build(FederatedFloral, {"clusters": 2.5}, "methods.floral")
    says = ".clusters: input should be a valid integer, got a number with a fractional part; it is 2.5"
    assert str(error.value) == f"methods.floral{says}"
    with pytest.raises(ConfigError) as error:
        FederatedFloral(clusters=2.5)  # type: ignore[arg-type]
    assert str(error.value) == f"FederatedFloral{says}"


def test_modules_that_cannot_be_wrapped() -> None:
    with pytest.raises(TaskError, match="given function"):
        Floral(build_network)
    shared = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    shared[1].weight = shared[0].weight
    Floral(shared)
    with pytest.raises(TaskError, match=r"layer 0 .*reparameterize=True"):
        Floral(shared, reparameterize=False)


def test_the_example_runs_as_written() -> None:
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(
        Floral, globs={"torch": torch, "nn": nn, "Floral": Floral}
    ):
        runner.run(example)
    assert runner.tries > 4
    assert runner.failures == 0
