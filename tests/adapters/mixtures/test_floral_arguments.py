"""Floral: batch normalizations in a mode of their own, numbers of clusters, and predicates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Floral
from fedlowrank.core.errors import ConfigError

torch.set_num_threads(1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def mixed() -> Any:
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
    model = Floral(base, 2, 3, reparameterize=False)
    draw = torch.Generator().manual_seed(6)
    for p in model.adaptors.parameters():
        nn.init.normal_(p, std=0.3, generator=draw)
    return model


def test_a_frozen_normalization_of_a_training_model_keeps_its_statistics() -> None:
    model, x = mixed(), randn(8, 4)
    model.train()
    model(randn(8, 4) * 3)
    model.base[1].eval()
    before = {n: b.clone() for n, b in model.named_buffers()}
    y = model(x)
    # an example's output does not depend on the others
    torch.testing.assert_close(model(torch.cat([x[:1], 9 * x[1:]]))[0], y[0])
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    torch.testing.assert_close(y, model.merge().eval()(x))


def test_a_training_normalization_of_a_model_in_evaluation_sees_the_batch() -> None:
    model, x = mixed().eval(), randn(8, 4)
    model.base[1].train()
    before = model.adaptors.get_submodule("1").weight.running_mean.clone()
    node, beta = model.adaptors.get_submodule("1").weight, model.adaptors.get_submodule("1").bias
    w = dict(model.base.named_parameters())
    pairs, shares = model.adapted(), model.pi
    update = torch.einsum("c,cik,cjk->ij", shares, pairs["0.weight"].u, pairs["0.weight"].v)
    h = x @ (w["0.weight"] + update).T + w["0.bias"] + shares @ pairs["0.bias"]
    scaled = (h - h.mean(0)) / (h.var(0, unbiased=False) + model.base[1].eps).sqrt()
    slope, shift = w["1.weight"] + shares @ node.offset, w["1.bias"] + shares @ beta.offset
    torch.testing.assert_close(model(x), slope * scaled + shift)
    assert not torch.equal(before, node.running_mean)


@pytest.mark.parametrize(
    "cluster", [np.int64(1), np.array(1), torch.tensor(1), np.int8(1), torch.tensor(1).int()]
)
def test_a_number_of_numpy_or_torch_is_a_cluster(cluster: Any) -> None:
    model, x = mixed().eval(), randn(5, 4)
    model.route(1)
    expected = model(x)
    model.route(None)
    model.route(cluster)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.route(None)
    torch.testing.assert_close(model.merge(cluster)(x), model.merge(1)(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "cluster", [3, np.int64(3), torch.tensor(-1), True, torch.tensor(1.0), torch.tensor(True)]
)
def test_what_is_no_cluster_is_refused(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"there is no cluster|a mixture must be 3 numbers"):
        mixed().route(cluster)


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_list_is_no_predicate(argument: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"Floral.{argument} must be a function.*lambda name, layer: name in"
    ):
        Floral(nn.Linear(3, 3), 1, 3, **{argument: ["0"]})  # type: ignore[arg-type]


def test_a_word_is_no_route() -> None:
    for call in (mixed().route, mixed().merge):
        with pytest.raises(ConfigError, match="must be the index of a cluster or 3 shares; it is 'first'"):
            call("first")
