"""Columns of data frames are matched by name between clients, parts and predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.errors import DataError
from fedlowrank.methods import FedAvg

RANDOM = np.random.default_rng(0)
NAMES = ["age", "bp"]


def site(n: int = 60) -> pandas.DataFrame:
    frame = pandas.DataFrame(RANDOM.normal(size=(n, 2)).astype("float32"), columns=NAMES)
    return frame.assign(ill=(frame.age > 0).astype(int))


A, B = site(), site()
SWAPPED = B[["bp", "ill", "age"]]


@pytest.mark.parametrize(
    ("clients", "options"),
    [
        ({"north": A, "south": SWAPPED}, {"target": "ill"}),
        ([(A[NAMES], A.ill), (B[["bp", "age"]], B.ill)], {}),
        ([{"train": A, "test": SWAPPED}, {"train": B, "test": B}], {"target": "ill"}),
    ],
    ids=["frames", "pairs", "parts"],
)
def test_frames_of_another_order(clients: Any, options: Any) -> None:
    made = Federation.from_arrays(clients, lambda: nn.Linear(2, 2), **options)
    assert made.feature_names == {"": ("age", "bp")}
    for data in made.clients:
        for part in (data.train, data.val, data.test):
            # the label follows from the first column, age
            assert isinstance(part.inputs, torch.Tensor)
            assert torch.equal(part.y, (part.inputs[:, 0] > 0).long())


def test_named_inputs_and_several_targets_of_another_order() -> None:
    class Sum(nn.Linear):
        def forward(self, table: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return super().forward(table + more)

    pairs = [
        ({"table": f[NAMES], "more": f[NAMES].to_numpy()}, pandas.DataFrame({"a": f.age, "b": f.bp})[order])
        for f, order in ((A, ["a", "b"]), (SWAPPED, ["b", "a"]))
    ]
    made = Federation.from_arrays(pairs, lambda: Sum(2, 2))
    assert made.feature_names == {"table": ("age", "bp")}
    for data in made.clients:
        assert isinstance(data.train.inputs, dict)
        assert torch.equal(data.train.y, data.train.inputs["table"])
    result = simulate("fedavg", made, rounds=1)
    both = [{"table": frame, "more": B[NAMES].to_numpy()} for frame in (B[NAMES], B[["bp", "age"]])]
    assert torch.equal(result.predict(0, both[0]), result.predict(0, both[1]))
    with pytest.raises(DataError, match=r"'table' have the columns \['ill'\]"):
        result.predict(0, {"table": B, "more": B[NAMES].to_numpy()})


def test_predictions_match_columns_by_name() -> None:
    made = Federation.from_arrays({"north": A, "south": B}, lambda: nn.Linear(2, 2), target="ill")
    result = simulate(FedAvg(epochs=2, batch_size=10, optimizer=SGD(lr=0.5)), made, rounds=1)
    new = site(30)
    scores = result.predict("north", new[NAMES])
    assert torch.equal(scores, result.predict("north", new[NAMES].to_numpy()))
    assert torch.equal(scores, result.predict("north", new[["bp", "age"]]))
    for frame, says in (
        (new, r"have the columns \['ill'\] besides.*frame\.drop\(columns=\['ill'\]\)"),
        (new[["age"]], r"lack the columns \['bp'\]"),
        (
            new[NAMES].rename(columns={"bp": "weight"}),
            r"lack the columns \['bp'\] and have the columns \['weight'\]",
        ),
    ):
        with pytest.raises(DataError, match=says):
            result.predict("north", frame)


def test_frames_with_other_columns() -> None:
    wards = [pandas.DataFrame({"ward": list(names) * 20, "ill": [0, 1] * 20}) for names in ("ab", "bc")]
    dummies = [pandas.get_dummies(frame, columns=["ward"], dtype=float) for frame in wards]
    with pytest.raises(DataError, match="in one frame of all clients"):
        Federation.from_arrays(wards, nn.Linear(2, 2), target="ill")
    with pytest.raises(
        DataError, match=r"client 1: .*lack .*\['ward_a'\] and have .*\['ward_c'\].*one frame of all clients"
    ):
        Federation.from_arrays(dummies, nn.Linear(2, 2), target="ill")
    # of one pair the names are those of the frame, of arrays there are none
    twice = pandas.DataFrame(np.ones((4, 2)), columns=["a", "a"])
    with pytest.raises(DataError, match="several columns 'a'"):
        Federation.from_arrays([(twice, [0, 1, 0, 1])], nn.Linear(2, 2))
    plain = Federation.from_arrays([(f[NAMES].to_numpy(), f.ill) for f in (A, B)], nn.Linear(2, 2))
    assert plain.feature_names == {}
