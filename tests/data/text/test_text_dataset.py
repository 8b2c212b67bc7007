"""Labels of tokens and strata in data sets, and what partitions see of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.clients import make_clients
from fedlowrank.data.dataset import Dataset, Examples, draw_subset, normalize
from fedlowrank.data.partitioning.partition import Dirichlet, Iid, Natural, Pathological
from fedlowrank.data.partitioning.rank_skew import RankSkew
from fedlowrank.data.partitioning.split import LocalSplit, Pool, WholeTest

KEY = Key((0,))


def part(n: int, start: int = 0) -> Examples:
    """Example i is the tokens i, i + 1, i + 2; the last two are learnt."""
    ids = start + torch.arange(n)[:, None] + torch.arange(3)
    y = ids.clone()
    y[:, 0] = -100
    return Examples({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, y)


def made(**more: Any) -> Dataset:
    fields: dict[str, Any] = {"strata": torch.arange(40) % 4, "strata_test": torch.arange(10) % 2}
    fields["strata_names"] = ("p", "q", "r", "s")
    return Dataset("toy", part(40), part(10, 1000), (), **{**fields, **more})


def plain(**more: Any) -> Dataset:
    return made(strata=None, strata_test=None, strata_names=(), **more)


def test_labels_of_tokens_are_a_form_of_their_own() -> None:
    data = made()
    assert (data.train.has_token_labels, data.train.is_regression, data.outputs) == (True, False, 0)
    taken = data.train.take(torch.tensor([3, 1]))
    assert taken.y.tolist() == [[-100, 4, 5], [-100, 2, 3]]
    assert taken.has_token_labels
    assert normalize(data, "none") is data
    with pytest.raises(ConfigError, match="needs one input tensor"):
        normalize(data, "scale")


def test_a_subset_takes_strata_along() -> None:
    some = draw_subset(replace(made(), natural=torch.arange(40)), 9)
    first = some.train.x["input_ids"][:, 0]
    assert torch.equal(some.strata, first % 4)
    assert torch.equal(some.natural, first)
    assert some.strata_names == ("p", "q", "r", "s")


def test_partitions_see_strata_else_nothing_to_go_by() -> None:
    assert np.array_equal(Pool(made()).labels, np.concatenate([np.arange(40) % 4, np.arange(10) % 2]))
    nothing = Pool(plain()).labels
    assert nothing.shape == (50, 1)
    assert nothing.dtype.kind == "f"
    assert not nothing.any()
    assert np.array_equal(Pool(made()).test, np.arange(40, 50))
    x = torch.arange(6.0)[:, None]
    real = Dataset(
        "r", Examples(x, x), None, (), strata=torch.tensor([0, 0, 1, 1, 0, 1]), strata_names=("p", "q")
    )
    assert Pool(real).labels.tolist() == [0, 0, 1, 1, 0, 1]
    assert Pool(replace(real, strata=None, strata_names=())).labels.tolist() == x.tolist()


@pytest.mark.parametrize(
    ("partition", "split"),
    [(Iid(4), WholeTest(0.0)), (Iid(4), LocalSplit(pool="all")), (Natural(), LocalSplit())],
)
def test_texts_without_categories_are_divided(partition: Any, split: Any) -> None:
    clients = make_clients(plain(natural=torch.arange(40) % 4), partition, split, KEY)
    held = [int(i) for c in clients for p in (c.train, c.val) for i in p.x["input_ids"][:, 0]]
    assert len(set(held)) == len(held)
    for c in clients:
        assert c.notes == ()
        for each in (c.train, c.val, c.test):
            assert torch.equal(each.y[:, 1:], each.x["input_ids"][:, 1:])
            assert bool((each.y[:, 0] == -100).all())


@pytest.mark.parametrize(
    "partition", [Pathological(4, 2), Dirichlet(4, 0.5, 3), RankSkew(4, (2, 1), min_size=3)]
)
def test_texts_are_divided_by_categories(partition: Any) -> None:
    clients = make_clients(made(), partition, WholeTest(0.0), KEY)
    held = [c.train.x["input_ids"][:, 0].tolist() for c in clients]
    joined = [i for own in held for i in own]
    assert len(held) == 4
    assert len(set(joined)) == len(joined)
    if isinstance(partition, Pathological):
        # two of the four categories each
        assert [len({i % 4 for i in own}) for own in held] == [2] * 4


def test_texts_without_categories_are_not_divided_by_labels() -> None:
    with pytest.raises(DataError, match="needs class labels"):
        make_clients(plain(), Dirichlet(4), LocalSplit(), KEY)
