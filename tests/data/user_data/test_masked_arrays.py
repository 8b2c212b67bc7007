"""Masked values of NumPy arrays are missing, so they are refused and never trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Federation, simulate
from fedlowrank.core.errors import DataError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
MASKED_X, MASKED_Y = np.ma.array(X, mask=False), np.ma.array(Y, mask=False)
MASKED_X[[5, 7], 2] = np.ma.masked
MASKED_Y[[4, 8, 9]] = np.ma.masked

INPUTS = (
    r"masked value in the inputs, in 2 of 12 examples, first in example 5 .*leave such examples out, or fill"
)
LABELS = r"masked value in the labels of client 1{}, in 3 of 12 examples, first in example 4 .*leave such"


class RowPairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.pairs = list(zip(x, y, strict=True))

    def __getitem__(self, i: int) -> Any:
        return self.pairs[i]

    def __len__(self) -> int:
        return len(self.pairs)


@pytest.mark.parametrize(
    ("client", "says"),
    [
        ((MASKED_X, Y), rf"client 1: there is a {INPUTS}"),
        (((X, Y), (MASKED_X, Y)), rf"client 1 \(test\): there is a {INPUTS}"),
        ((list(MASKED_X), Y), rf"client 1: there is a {INPUTS}"),
        ((X, MASKED_Y), LABELS.format("")),
        ((X, list(MASKED_Y)), LABELS.format("")),
        ((X, np.ma.array(["a", "b", "c"] * 4, mask=MASKED_Y.mask)), LABELS.format("")),
        ({"train": (X, Y), "val": (X, MASKED_Y)}, LABELS.format(r" \(val\)")),
        (RowPairs(MASKED_X, Y), "client 1: the input of example 5 has a masked value; leave such"),
        (RowPairs(X, MASKED_Y), "client 1: the target of example 4 has a masked value; leave such"),
    ],
)
def test_masked_values_are_refused(client: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Federation.from_arrays([(X, Y), client], nn.Linear(4, 3))


def test_masked_named_inputs_and_targets_are_refused() -> None:
    class Named(nn.Linear):
        def forward(self, table: Tensor) -> Tensor:
            return super().forward(table)

    with pytest.raises(DataError, match=r"client 0: there is a masked value in input 'table', in 2 of 12"):
        Federation.from_arrays([({"table": MASKED_X}, Y)], lambda: Named(4, 3))
    with pytest.raises(DataError, match=r"masked value in the labels of client 0, in 2 of 12 examples"):
        Federation.from_arrays([(X, MASKED_X)], nn.Linear(4, 4))


def test_masked_arrays_without_a_masked_value_are_arrays() -> None:
    model = nn.Linear(4, 3)
    actual = Federation.from_arrays([(np.ma.array(X), np.ma.array(Y, mask=np.zeros(12, bool)))] * 2, model)
    assert actual.fingerprint() == Federation.from_arrays([(X, Y)] * 2, model).fingerprint()


def test_predictions_of_masked_inputs_are_refused() -> None:
    result = simulate("fedavg", Federation.from_arrays([(X, Y)] * 2, nn.Linear(4, 3)), rounds=1)
    with pytest.raises(DataError, match=f"^there is a {INPUTS}"):
        result.predict(0, MASKED_X)
    assert torch.equal(result.predict(0, np.ma.array(X)), result.predict(0, X))
