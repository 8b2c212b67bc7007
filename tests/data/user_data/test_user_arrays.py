"""Arrays, models and methods from Python that cannot work: each error says what to pass instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.errors import ConfigError, DataError, NonFiniteError, TaskError
from fedlowrank.data.arrays import Arrays
from fedlowrank.data.user_data.user_arrays import make_examples
from fedlowrank.methods import FedAvg, FederatedFloral, PFedLoRA

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
ONE_HOT = torch.nn.functional.one_hot(LABELS, 3)


def federation(y: Any, x: Any = X, model: Any = None, **more: Any) -> Federation:
    return Federation.from_arrays([(x, y), (x, y)], nn.Linear(4, 3) if model is None else model, **more)


@pytest.mark.parametrize(
    "y", [LABELS.float() + 0.5, LABELS.double(), LABELS.float().numpy(), (LABELS + 0.5).tolist()]
)
def test_real_targets_without_a_width_are_no_classes(y: Any) -> None:
    with pytest.raises(
        DataError, match=r"client 0: the targets are float\d\d \[12\]\. .*y\.long\(\).*\[n, 1\], y\[:, None\]"
    ):
        federation(y)


def test_real_targets_without_a_width_in_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=LABELS.float().numpy())
    with pytest.raises(DataError, match=r"a\.npz.*float32 \[12\].*\[n, 1\]"):
        Arrays(str(tmp_path / "a.npz")).load()
    np.savez(tmp_path / "b.npz", x=X.numpy(), y=ONE_HOT.numpy())
    with pytest.raises(DataError, match=r"one-hot.*argmax"):
        Arrays(str(tmp_path / "b.npz")).load()
    np.savez(tmp_path / "c.npz", x=X.numpy(), y=ONE_HOT.float().numpy())
    assert any(
        "one-hot" in note and "regression" in note for note in Arrays(str(tmp_path / "c.npz")).load().notes
    )


@pytest.mark.parametrize(
    "empty", [(np.zeros((0, 4)), np.zeros(0)), ([], []), (torch.zeros(0, 4), torch.zeros(0, 1))]
)
def test_a_part_without_examples_has_no_types(empty: Any) -> None:
    full = np.ones((8, 4)), np.arange(8) % 2
    for client in (empty, {"train": empty, "test": full}):
        with pytest.raises(DataError, match=r"^client 1 has no training examples; leave it out$"):
            Federation.from_arrays([full, client], nn.Linear(4, 2))
    data = Federation.from_arrays([full, {"train": full, "test": empty}], nn.Linear(4, 2)).clients[1]
    assert [len(data.train), len(data.val), len(data.test)] == [8, 0, 0]
    with pytest.raises(DataError, match=r"client 1: .*0 labels, but the input holds 8"):
        Federation.from_arrays([full, (full[0], full[1][:0])], nn.Linear(4, 2))


@pytest.mark.parametrize("classes", [{"b", "c", "a"}, {"b": 1, "c": 2, "a": 0}])
def test_classes_without_an_order_are_refused(classes: Any) -> None:
    pair = np.ones((8, 4)), np.arange(8) % 2
    with pytest.raises(ConfigError, match=r"a list is needed, such as \['a', 'b', 'c'\]"):
        Federation.from_arrays([pair], nn.Linear(4, 3), classes=classes)


def test_one_hot_targets_are_said_to_make_a_regression() -> None:
    with pytest.warns(UserWarning, match=r"one-hot.*regression.*y\.argmax\(1\)") as said:
        made = federation(ONE_HOT.float())
    assert said[0].filename == __file__ or "test_given" in said[0].filename
    assert made.classes == ()
    # any other warning is an error
    for y in (ONE_HOT.float() + 0.25, LABELS.float()[:, None], torch.ones(12, 3)):
        federation(y, model=nn.Linear(4, y.shape[1]))
    assert federation(ONE_HOT.argmax(1)).classes == ("0", "1", "2")
    with pytest.raises(DataError, match=r"one-hot rows.*y\.argmax\(1\)"):
        federation(ONE_HOT)
    with pytest.raises(DataError, match=r"one-hot rows, y\.argmax\(1\)"):
        federation(ONE_HOT.float(), classes=3)
    with pytest.raises(DataError, match=r"int64 \[12, 1\].*y\[:, 0\]"):
        federation(LABELS[:, None])


def test_data_frames_are_arrays_but_no_pairs() -> None:
    pandas = pytest.importorskip("pandas")
    frame, series = pandas.DataFrame(X.double().numpy()), pandas.Series(LABELS.numpy())
    made = make_examples((frame, series), "client 0")
    assert torch.equal(made.inputs, X)
    assert torch.equal(made.y, LABELS)
    array = X.numpy().copy()
    array.flags.writeable = False
    assert torch.equal(make_examples((array, LABELS), "client 0").inputs, X)
    assert torch.equal(make_examples((array[::-1], LABELS), "client 0").inputs, X.flip(0))
    frame["name"] = "text"
    with pytest.raises(DataError, match=r"client 0: the column 'name' holds no numbers.*'text'.*get_dummies"):
        federation(LABELS, frame)
    # a client that is one table of two columns would else unpack into the columns' names
    table = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    for given in (table, X, (X,), (X, LABELS, LABELS), "xy", 5, None):
        message = rf"client 0: expected a pair \(x, y\) of arrays, not a {type(given).__name__}"
        with pytest.raises(DataError, match=message):
            Federation.from_arrays([given], nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (["a"] * 12, LABELS, "the inputs must be an array of numbers, not a list of 12 of <U1; encode text as numbers first"),
        (X.to(torch.complex64), LABELS, "the inputs must be real numbers, not torch.complex64"),
        ([[1.0], [1.0, 2.0]], [0, 1], "the inputs must be an array of numbers"),
        (None, LABELS, "the inputs must be an array of numbers, not a NoneType"),
        ({"a": object()}, LABELS, "input 'a' must be an array of numbers"),
    ],
)  # fmt: skip
def test_what_are_no_numbers(x: Any, y: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        federation(y, x)
    assert f"client 0: {says}" in str(error.value)


@pytest.mark.parametrize("x", [5.0, np.float32(3), torch.tensor(3.0), {"image": 5.0}], ids=str)
def test_a_single_value_is_no_array_of_examples(x: Any) -> None:
    with pytest.raises(DataError, match=r"client 0: .*must be an array \[n, \.\.\.\] of n examples"):
        Federation.from_arrays([(x, np.array([1]))], nn.Linear(1, 2), val=0, test=0)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (X.to_sparse(), LABELS, r"the inputs must be a dense tensor, .*torch\.sparse_coo; .*to_dense\(\)"),
        (X, LABELS.to_sparse(), r"the targets must be a dense tensor, .*torch\.sparse_coo; .*to_dense\(\)"),
        (X.numpy().astype(">f4"), LABELS, r'the inputs must .*>f4 .*another order.*astype\("float32"\)'),
        (X.numpy().astype(">f8"), LABELS, r'the inputs must .*>f8 .*another order.*astype\("float32"\)'),
        (X.numpy().astype(np.longdouble), LABELS, r'the inputs must .*extended.*astype\("float32"\)'),
        (X, LABELS.numpy().astype(">i4"), r'the targets must .*>i4 .*another order.*astype\("int64"\)'),
        (X, X.numpy().astype(">f4"), r'the targets must .*>f4 .*another order.*astype\("float32"\)'),
    ],
)
def test_numbers_that_torch_does_not_take(x: Any, y: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"^client 0: {says}"):
        federation(y, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, -1e39])
def test_inputs_that_are_not_finite_are_named(value: float) -> None:
    x = X.double().clone()
    x[[5, 7], 2] = value
    with pytest.raises(DataError) as error:
        Federation.from_arrays([(X, LABELS), (x, LABELS)], nn.Linear(4, 3))
    for part in ("client 1", "its inputs", "2 of 12", "first in example 5"):
        assert part in str(error.value)
    assert "learning rate" not in str(error.value)
    is_finite = np.isfinite(value)
    assert ("NaN or an infinity" in str(error.value)) == (not is_finite)
    assert (f"beyond the range of float32 in its inputs, {value:g}," in str(error.value)) == is_finite
    assert ("divide such values by a constant" in str(error.value)) == is_finite
    # a NaN beside it is named first
    x[9, 0] = float("nan")
    if is_finite:
        with pytest.raises(
            DataError, match=r"NaN or an infinity in its inputs, in 1 of 12.* first in example 9"
        ):
            federation(LABELS, x)


def test_targets_and_new_inputs_beyond_float32_are_named() -> None:
    large = X.double().clone()
    large[3, 1] = 2e39
    for y, width in ((large, 4), (large[:, 1], 1)):
        with pytest.raises(
            DataError, match=r"beyond the range of float32 in its targets, 2e\+39, in 1 of 12"
        ):
            federation(y, model=nn.Linear(4, width), loss="mse")
    result = simulate("fedavg", federation(LABELS), rounds=1)
    with pytest.raises(DataError, match=r"^there is a number beyond .* in the inputs, 2e\+39, in 1 of 12"):
        result.predict(0, large)
    named = Federation.from_arrays([({"input": X}, LABELS)], nn.Linear(4, 3))
    with pytest.raises(
        DataError, match=r"beyond the range of float32 in the inputs 'input', 2e\+39, in 1 of"
    ):
        simulate("fedavg", named, rounds=1).predict(0, {"input": large})
    large[3, 1] = torch.nan
    with pytest.raises(DataError, match=r"^there is a NaN or an infinity in the inputs, in 1 of 12"):
        result.predict(0, large)


class Overflowing(nn.Module):
    """Scores that are infinite before anything was learnt, from finite inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x) * 1e30 * 1e30
        return scores


def test_a_loss_that_is_not_finite_at_once_does_not_blame_the_learning_rate() -> None:
    with pytest.raises(NonFiniteError) as error:
        simulate("fedavg", federation(LABELS, model=Overflowing()), rounds=1)
    assert "look at this client's inputs" in str(error.value)
    assert "Lower the learning rate" not in str(error.value)
    deep = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(NonFiniteError, match=r"not finite.*Lower the learning rate"):
        simulate(FedAvg(optimizer=SGD(lr=1e30), batch_size=2), federation(LABELS, model=deep), rounds=2)


def test_initial_parameters_that_are_not_finite() -> None:
    model = nn.Linear(4, 3)
    nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(
        TaskError, match=r"model model: there is a NaN or an infinity among its initial parameters, in bias"
    ):
        federation(LABELS, model=model)


# Models


@pytest.mark.parametrize(("width", "classes"), [(2, None), (3, 4)])
def test_fewer_outputs_than_classes(width: int, classes: int | None) -> None:
    with pytest.raises(
        TaskError, match=rf"client 0: model model makes \[1, {width}\] .*there are {classes or 3} classes"
    ):
        federation(LABELS, model=nn.Linear(4, width), classes=classes)
    with pytest.raises(TaskError, match="client 1: model narrow"):
        federation(LABELS, model={"wide": nn.Linear(4, 3), "narrow": nn.Linear(4, 2)})


def test_more_outputs_than_classes_are_learnt() -> None:
    with pytest.warns(UserWarning, match="makes 5 scores"):
        made = federation(LABELS, model=nn.Linear(4, 5))
    assert simulate("fedavg", made, rounds=1).rounds[-1].steps > 0


# Methods


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, {"lr": 0.1}, None],
    ids=["torch", "dict", "None"],
)
def test_another_optimizer(optimizer: Any) -> None:
    if optimizer is not None:
        with pytest.raises(ConfigError, match=r"adapter_optimizer must be fedlowrank\.SGD"):
            PFedLoRA(adapter_optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"FedAvg\.optimizer must be fedlowrank\.SGD\(\.\.\.\)"):
        FedAvg(optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"server_optimizer"):
        FederatedFloral(server_optimizer=optimizer)


def test_a_class_instead_of_a_method() -> None:
    with pytest.raises(
        ConfigError, match=r"simulate needs a method, made by FedAvg\(\.\.\.\) and not the class itself"
    ):
        simulate(FedAvg, federation(LABELS), rounds=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="simulate needs a method or the name of one"):
        simulate(5, federation(LABELS), rounds=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="simulate needs a federation"):
        simulate("fedavg", [(X, LABELS)], rounds=1)  # type: ignore[arg-type]


def test_inputs_that_the_model_does_not_take() -> None:
    with pytest.raises(TaskError, match=r"model model .*\(1x4 and 5x3\)\. One example has the shape \[4\]\."):
        federation(LABELS, model=nn.Linear(5, 3))
    with pytest.raises(TaskError, match=r"client 1: model model .* One example has the shape \[2\]\."):
        Federation.from_arrays([(X, LABELS), (X[:, :2], LABELS)], nn.Linear(4, 3))


def test_arrays_of_other_lengths_in_a_file_name_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=LABELS.numpy()[:-1])
    with pytest.raises(DataError, match=r"a\.npz': there are 11 labels, but the input holds 12 examples"):
        Arrays(str(tmp_path / "a.npz")).load()


@pytest.mark.parametrize(
    "shares", [{"val": -0.1}, {"test": -0.2, "val": 0.5}, {"val": float("nan")}, {"test": 1.0}]
)
def test_shares_out_of_bounds_are_refused(shares: dict[str, float]) -> None:
    data = [(np.ones((20, 3)), np.arange(20) % 2)]
    with pytest.raises(DataError, match=r"Federation\.from_arrays: (val|test) is a share"):
        Federation.from_arrays(data, torch.nn.Linear(3, 2), **shares)
