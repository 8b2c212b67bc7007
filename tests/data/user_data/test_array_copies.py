"""A later change of the user's arrays changes no federation, and no array is copied twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank import Federation, simulate

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


class NamedInput(nn.Linear):
    def forward(self, a: Tensor) -> Tensor:
        return super().forward(a)


@pytest.mark.parametrize("kind", ["numpy", "torch", "gradient", "named", "random split"])
def test_later_changes_of_arrays_change_nothing(kind: str) -> None:
    x: Any = X.copy() if kind in ("numpy", "random split") else torch.from_numpy(X.copy())
    y: Any = Y.copy() if kind in ("numpy", "random split") else torch.from_numpy(Y.copy())
    if kind == "gradient":
        x.requires_grad_()
    pair = ({"a": x} if kind == "named" else x, y)
    model = (NamedInput if kind == "named" else nn.Linear)(4, 3)
    data = [pair, pair] if kind == "random split" else [(pair, pair), {"train": pair, "val": pair}]
    actual, reference = (Federation.from_arrays(data, model) for _ in range(2))
    before, truth = actual.fingerprint(), simulate("fedavg", reference, rounds=1).predict(0)
    with torch.no_grad():
        x -= 5.0
        y[:] = 0
    assert actual.fingerprint() == before
    for part in (actual.clients[0].test, actual.clients[1].train) if kind != "random split" else ():
        inputs = part.x["a"] if isinstance(part.x, dict) else part.x
        np.testing.assert_array_equal(inputs, X)
        np.testing.assert_array_equal(part.y, Y)
    assert torch.equal(simulate("fedavg", actual, rounds=1).predict(0), truth)


class _CloneCounter(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("dtype", "copies"), [(np.float32, 4 + 4), (np.float64, 4)])
def test_an_array_of_several_clients_is_copied_once(dtype: Any, copies: int) -> None:
    x, y = X.astype(dtype), Y.copy()
    # slices are new objects of the same memory
    data = [((x[i : i + 3], y[i : i + 3]), (x[:], y[:])) for i in (0, 3, 6)]
    data.append(((x, y), (x, y)))
    model = nn.Linear(4, 3)
    with _CloneCounter() as counter:
        actual = Federation.from_arrays(data, model)
    for array in (array for parts in data for pair in parts for array in pair):
        # torch needs writable memory, so these are copied by numpy
        array.flags.writeable = False
    with _CloneCounter() as model_counter:
        Federation.from_arrays(data, model)
    assert counter.count - model_counter.count == copies
    for client, i in zip(actual.clients, (0, 3, 6), strict=False):
        np.testing.assert_array_equal(client.train.x, X[i : i + 3])  # type: ignore[arg-type]
        assert client.test.y is actual.clients[3].train.y
        if dtype == np.float32:
            assert client.test.x is actual.clients[3].train.x


def test_arrays_with_other_strides_are_copied_apart() -> None:
    square = np.arange(9, dtype=np.float32).reshape(3, 3)
    parts = {"train": (square, Y[:3]), "test": (torch.from_numpy(square).T, Y[:3])}
    actual = Federation.from_arrays([parts], nn.Linear(3, 3)).clients[0]
    np.testing.assert_array_equal(actual.train.x, square)  # type: ignore[arg-type]
    np.testing.assert_array_equal(actual.test.x, square.T)  # type: ignore[arg-type]
