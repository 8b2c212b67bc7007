"""Batches of a cohort against those of each client, and how many operations its steps take."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank import Federation
from fedlowrank.core.contract import ClientInfo, Pass
from fedlowrank.core.key import Key
from fedlowrank.data.dataset import Examples
from fedlowrank.data.pixels import Pixels, pack_images
from fedlowrank.engines import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.cohorts import cohort_trainer
from fedlowrank.training.cohorts.cohort_batches import BufferPool, CohortBatches, common_base
from fedlowrank.training.local_data import LocalData

SIZES = (7, 7, 5)


def data(x: Any, y: Tensor) -> list[LocalData]:
    """Three clients whose examples are consecutive rows of one tensor."""
    bounds = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    passes = {"local": Pass(2, 3)}
    rows = [x[s] if isinstance(x, Tensor) else Pixels(x.codes[s], x.table) for s in parts]
    return [
        LocalData(ClientInfo(c, len(y[s]), "model"), Examples(rows[c], y[s]), passes, Key((c,)))
        for c, s in enumerate(parts)
    ]


def inputs(kind: str) -> Any:
    rows = sum(SIZES)
    g = torch.Generator().manual_seed(0)
    if kind == "bytes":
        whole = torch.randint(0, 200, (rows, 2, 3, 3), generator=g) / 7.0
        return pack_images([whole])[0]
    return torch.randn(rows, *((2, 3, 3) if kind == "images" else (4,)), generator=g)


def copied_inputs(x: Any) -> Any:
    return Pixels(x.codes.clone(), x.table) if isinstance(x, Pixels) else x.clone()


@pytest.mark.parametrize("kind", ["rows", "images", "bytes"])
@pytest.mark.parametrize("shared", [True, False])
def test_batches_are_those_of_each_client(kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = data(inputs(kind), torch.arange(sum(SIZES)))
    if not shared:
        clients = [
            LocalData(d.info, Examples(copied_inputs(d.examples.x), d.examples.y), d.passes, d.key)
            for d in clients
        ]
    alone = [list(d.batches("local")) for d in clients]
    copied: list[int] = []
    indices = LocalData.indices
    monkeypatch.setattr(LocalData, "indices", lambda d, name: copied.append(d.info.id) or indices(d, name))
    feed = CohortBatches(clients, "local", BufferPool())
    # rows of one tensor need no order of each client on the device
    assert copied == ([] if shared else [0, 1, 2])
    for step in range(len(alone[0])):
        active = sum(step < len(batches) for batches in alone)
        actual = feed.batch(step, active)
        assert actual.x.shape[:2] == actual.y.shape
        for k, batches in enumerate(alone[:active]):
            n = len(batches[step])
            assert torch.equal(actual.x[k, :n], batches[step].x)
            assert torch.equal(actual.y[k, :n], batches[step].y)
            if actual.mask is None:
                assert n == actual.y.shape[1]
            else:
                assert actual.mask[k].tolist() == [i < n for i in range(actual.y.shape[1])]


def test_the_common_base_of_tensors() -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    base, starts = common_base([whole[2:4], whole[5:6]]) or (None, [])
    assert base is not None
    assert torch.equal(base, whole)
    assert starts == [2, 5]
    assert common_base([whole[:2], whole[2:4].clone()]) is None
    assert common_base([whole[::2], whole[1:3]]) is None
    assert common_base([whole.flatten()[1:4].reshape(1, 3), whole[:2]]) is None


class Launches(TorchDispatchMode):
    """Counts operations that are no views: what a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the order of the examples is drawn on the host
        if not func.is_view and "randperm" not in str(func):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["fedavg", "pfedlora", "scaffold"])
def test_the_operations_of_the_steps_do_not_grow_with_the_clients(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 20, 6, generator=g), torch.randint(3, (50, 20), generator=g)
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    if method == "pfedlora":
        from fedlowrank.models.architectures.mlp import MLP

        model = lambda: MLP(6, (5,), 3)  # noqa: E731
    made = Federation.from_arrays([{"train": pair} for pair in zip(x, y, strict=True)], model, classes=3)
    train, mode = cohort_trainer.train_cohort, Launches()

    def counted(*arguments: Any, **more: Any) -> Any:
        with mode:
            return train(*arguments, **more)

    totals = []
    for participation in (0.2, 0.8):
        run = Run(
            METHODS[method](batch_size=5),
            made,
            RunSettings(rounds=3, participation=participation),
            Vectorized(),
        )
        run.step()
        monkeypatch.setattr(cohort_trainer, "train_cohort", counted)
        mode.counts.clear()
        run.step()
        monkeypatch.setattr(cohort_trainer, "train_cohort", train)
        totals.append(sum(mode.counts.values()))
        assert mode.counts["aten._local_scalar_dense.default"] == 0
    assert totals[1] <= 1.1 * totals[0]


@pytest.mark.parametrize("kind", ["rows", "bytes"])
def test_data_on_a_device_are_rows_of_one_tensor(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 9, (5, 2, 3, 3), generator=g).float(), torch.arange(5) % 3
    data = [
        {
            "train": (torch.randint(0, 9, (4 + c, 2, 3, 3), generator=g).float(), torch.arange(4 + c) % 3),
            "test": shared,
        }
        for c in range(3)
    ]
    made = Federation.from_arrays(data, nn.Sequential(nn.Flatten(), nn.Linear(18, 3)), classes=3)
    made = made.pack_images() if kind == "bytes" else made
    # another name of the processor, which counts as another device
    moved = made.to("cpu:0")
    for here, there in zip(made.clients, moved.clients, strict=True):
        for a, b in ((here.train, there.train), (here.val, there.val), (here.test, there.test)):
            assert torch.equal(a.inputs, b.inputs)  # type: ignore[arg-type]
            assert torch.equal(a.y, b.y)
    inputs = [c.train.x.codes if isinstance(c.train.x, Pixels) else c.train.x for c in moved.clients]
    base, starts = common_base(inputs) or (None, [])  # type: ignore[arg-type]
    assert base is not None
    assert all(torch.equal(base[s : s + len(x)], x) for s, x in zip(starts, inputs, strict=True))  # type: ignore[arg-type]
    assert all(c.test.y.data_ptr() == moved.clients[0].test.y.data_ptr() for c in moved.clients)
