"""Batch normalization where a client has one example, or a batch of one: errors that can be acted on."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.core.errors import SingleValueError, TaskError
from fedlowrank.engines.engine import ClientJob
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import FedAvg
from fedlowrank.methods.fedala import FedALA


def vectors(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(norm, nn.ReLU()), nn.Linear(6, 3))


def federation(
    sizes: list[int], module: nn.Module | None = None, shape: tuple[int, ...] = (4,)
) -> Federation:
    g = torch.Generator().manual_seed(0)
    data = []
    for n in sizes:
        x, y = torch.randn(n, *shape, generator=g), torch.arange(n) % 3
        data.append({"train": (x, y), "test": (x.repeat(2, *[1] * len(shape)), y.repeat(2))})
    return Federation.from_arrays(data, module or vectors(nn.BatchNorm1d(6)), classes=3)


@pytest.mark.parametrize("never", [False, True])
def test_a_client_with_one_example_is_named_before_the_first_round(never: bool) -> None:
    on = federation([12, 9, 1, 8])
    settings: dict[str, Any] = {"participation": 0.25} if never else {}
    expected = r"client 2 has 1 training example: .*'1\.0'.*partition.min_size"
    with pytest.raises(TaskError, match=expected):
        simulate(FedAvg(batch_size=4), on, rounds=1, **settings)


@pytest.mark.full
def test_a_last_batch_of_one_is_named_and_each_advice_helps() -> None:
    on = federation([12, 9, 17])
    with pytest.raises(
        TaskError, match=r"client 1 has 9 .*batches of 4 .*as at 1 other client: .*'1\.0'"
    ) as error:
        simulate(FedAvg(batch_size=4), on, rounds=1)
    assert "drop_last = true" in str(error.value)
    size = re.search(r"batch_size = (\d+)", str(error.value))
    assert size is not None
    # 3 leaves none: 12, 9 = 3 · 3, 17 = 5 · 3 + 2
    assert int(size[1]) in (3, 5)
    for method in (FedAvg(batch_size=int(size[1])), FedAvg(batch_size=4, drop_last=True)):
        assert len(simulate(method, on, rounds=1).rounds) == 2


def test_a_share_of_the_examples_may_be_one() -> None:
    with pytest.raises(TaskError, match=r"client 0 has 12 .*pass 'weights'"):
        simulate(FedALA(batch_size=4, data_share=0.1), federation([12, 12]), rounds=1)


def test_batches_of_one_have_another_advice_than_drop_last() -> None:
    with pytest.raises(TaskError, match="batch_size = 2") as error:
        simulate(FedAvg(batch_size=1), federation([4, 6]), rounds=1)
    assert "drop_last" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (vectors(nn.GroupNorm(2, 6)), (4,)),
        (nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)), (1, 3, 3)),
    ],
)
def test_one_example_is_enough_where_it_gives_several_values(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    result = simulate(FedAvg(batch_size=4), federation([5, 1], module, shape), rounds=1)
    assert result.rounds[-1].steps == 3


@pytest.mark.parametrize("tracked", [True, False])
def test_a_client_elsewhere_is_named_where_it_trains(tracked: bool) -> None:
    on = federation([12, 5], vectors(nn.BatchNorm1d(6, track_running_stats=tracked)))
    method, task, info = FedAvg(batch_size=4), on.task(1), on.infos[1]
    job = ClientJob(None, method.server_init(task), info)
    with pytest.raises(
        SingleValueError, match=r"client 1 with 5 training examples: .*'1\.0'.*drop_last"
    ) as error:
        list(Sequential().run(method, on, task, 0, [job]))
    # a worker's error crosses to the main process
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # noqa: S301


def test_a_test_set_of_one_names_the_client_where_a_batch_is_normalized_by_itself() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 4, generator=g), torch.arange(9) % 3
    data = [{"train": (x[:8], y[:8]), "test": (x[k:], y[k:])} for k in (6, 8)]
    on = Federation.from_arrays(data, vectors(nn.BatchNorm1d(6, track_running_stats=False)), classes=3)
    with pytest.raises(TaskError, match=r"client 1, .*'1\.0'"):
        simulate(FedAvg(batch_size=4), on, rounds=1)
