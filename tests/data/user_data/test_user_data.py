"""Data as users have them, of every kind: what a client holds equals the rows that were given."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from fedlowrank import Federation, Loss, simulate
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.data.dataset import Examples

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
WORDS = np.array(["cat", "ant", "bee"])[Y]
PIXELS = np.random.default_rng(1).integers(0, 256, (12, 5, 6, 3), dtype=np.uint8)
WHOLE = {"val": 0, "test": 0}


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def make(clients: Any, model: Any = linear, **more: Any) -> Federation:
    """A federation whose clients divide nothing."""
    return Federation.from_arrays(clients, model, **{**WHOLE, **more})


def in_order(federation: Federation, client: int) -> Examples:
    """Training examples in the order in which they were given, if they were divided at random."""
    train = federation.clients[client].train
    drawn = torch.randperm(len(train), generator=(federation.key / "split" / client).generator())
    return train.take(torch.argsort(drawn))


def check(federation: Federation, client: int, x: Any, y: Any) -> None:
    actual = in_order(federation, client)
    assert isinstance(actual.x, Tensor)
    np.testing.assert_array_equal(actual.x.numpy(), x)
    np.testing.assert_array_equal(actual.y.numpy(), y)


class Listed(Dataset[Any]):
    """A data set of any examples."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]

    def __len__(self) -> int:
        return len(self.items)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
PAIRS = list(zip(X, Y.tolist(), strict=True))


# -- data sets of torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "rows"),
    [
        (TENSORS, range(12)),
        (Subset(TENSORS, [3, 1, 7]), [3, 1, 7]),
        (ConcatDataset([Subset(TENSORS, [0, 1]), Subset(TENSORS, [5])]), [0, 1, 5]),
        (random_split(TENSORS, [4, 8], torch.Generator().manual_seed(0))[1], None),
        (Listed(PAIRS), range(12)),
        (Listed([list(pair) for pair in PAIRS]), range(12)),
        (Listed({"values": x, "label": y} for x, y in PAIRS), range(12)),
        (Listed({"y": torch.tensor(y), "x": torch.from_numpy(x)} for x, y in PAIRS), range(12)),
    ],
    ids=["tensors", "subset", "concatenated", "random_split", "numpy", "lists", "dicts", "dicts of tensors"],
)
def test_a_map_style_data_set(dataset: Any, rows: Any) -> None:
    rows = list(dataset.indices if rows is None else rows)
    for federation in (
        make([dataset, TENSORS]),
        Federation.from_datasets([dataset, TENSORS], linear, **WHOLE),
    ):
        check(federation, 0, X[rows], Y[rows])
        check(federation, 1, X, Y)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
def test_a_data_set_of_images_of_pillow(mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    images = [image.fromarray(pixels).convert(mode) for pixels in PIXELS]
    actual = make([Listed(zip(images, Y.tolist(), strict=True))])
    colors = [np.asarray(one.convert("RGB" if mode == "P" else one.mode)) for one in images]
    truth = np.stack([c if c.ndim == 3 else c[..., None] for c in colors]).astype(np.float32)
    if mode != "1":
        truth /= np.float32(255)
    check(actual, 0, truth.transpose(0, 3, 1, 2), Y)


def test_parts_of_data_sets_and_of_arrays() -> None:
    test, val = Subset(TENSORS, [0, 4]), Subset(TENSORS, [9])
    arrays = (X[:5], Y[:5]), (X[5:], Y[5:])
    clients = {
        "a": (TENSORS, test),
        "b": (TENSORS, val, test),
        "c": {"train": TENSORS, "test": test},
        "d": arrays,
    }
    federation = Federation.from_datasets(clients, linear)
    assert [[len(p) for p in (c.train, c.val, c.test)] for c in federation.clients] == [
        [12, 0, 2], [12, 1, 2], [12, 0, 2], [5, 0, 7],
    ]  # fmt: skip
    assert torch.equal(federation.clients[1].test.inputs, torch.from_numpy(X[[0, 4]]))  # type: ignore[arg-type]
    assert torch.equal(federation.clients[3].test.y, torch.from_numpy(Y[5:]))


def test_random_augmentation_of_a_data_set_is_drawn_once_from_the_seed() -> None:
    class Noisy(Listed):
        def __getitem__(self, i: int) -> Any:
            return torch.randn(4) + float(np.random.rand()), self.items[i][1]  # noqa: NPY002 - as users do

    before = torch.get_rng_state()
    first, second, third = (make([Noisy(PAIRS)], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(in_order(first, 0).x, in_order(second, 0).x)  # type: ignore[arg-type]
    assert not torch.equal(in_order(first, 0).x, in_order(third, 0).x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ([TENSORS, Stream()], r"client 1: its Stream is an IterableDataset.*__getitem__"),
        ({"north": Stream()}, r"client 0 \(north\): its Stream"),
        ([DataLoader(TENSORS)], r"client 0: a DataLoader .*loader\.dataset"),
        (TENSORS, r"a single TensorDataset is one client.*random_split"),
        ([Listed([])], r"client 0: its data set Listed has no examples; leave this client out"),
        ([Listed([(X[0], 0), (X[1, :3], 1)])], r"client 0: the input of example 1 is float32 \[3\].*\[4\]"),
        ([Listed([(X[0], 0), X[1]])], r"client 0: .*pairs \(x, y\) or dicts, but example 1 .* ndarray"),
        ([TensorDataset(*map(torch.from_numpy, (X, X, Y)))], r"example 0 .* tuple of 3.*go into a dict"),
        (
            [Listed(((x, x), y) for x, y in PAIRS)],
            r"input of an example of its Listed is a tuple of 2 .*go into a dict",
        ),
        ([Listed([{"a": 1.0, "b": 0}])], r"keys \['a', 'b'\]; name the target among them: target='b'"),
        ([Listed([{"a": 1.0, "y": 0}, {"y": 0}])], r"client 0: example 1 of its Listed has another form"),
        ([Subset(TENSORS, [99])], r"client 0: example 0 of its data set Subset cannot be read: IndexError"),
    ],
)
def test_data_sets_that_cannot_be_read(clients: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make(clients)


def test_keys_of_examples() -> None:
    items = [{"values": x, "site": "n", "ill": y} for x, y in PAIRS]
    check(make([Listed(items)], target="ill", features=["values"]), 0, X, Y)
    with pytest.raises(DataError, match=r"client 0: .*none is 'il'\. Did you mean 'ill'"):
        make([Listed(items)], target="il")
    with pytest.raises(DataError, match=r"target= names a column.*pairs \(x, y\); leave it out"):
        make([TENSORS], target="ill")


# -- names ---------------------------------------------------------------------------------------------------


def test_names_of_clients_are_kept() -> None:
    federation = Federation.from_arrays({"north": (X, Y), 7: (X, Y)}, linear)
    assert [info.name for info in federation.infos] == ["north", "7"]
    assert [(row["id"], row["name"]) for row in federation.describe()] == [(0, "north"), (1, "7")]
    assert "name" not in make([(X, Y)]).describe()[0]
    for clients, says in (
        ({"north": (X, Y), "south": (X[:5], Y)}, r"client 1 \(south\): there are 12 labels.*5 examples"),
        ({"north": (X, Y), "south": (X * np.nan, Y)}, r"client 1 \(south\): there is a NaN"),
        ({"north": (X[:0], Y[:0])}, r"client 0 \(north\) has no training examples; leave it out"),
        ({"north": (X, Y), "south": (X[:, :3], Y)}, r"client 1 \(south\): model model does not take"),
        ({"north": (X, Y), "south": (X, Y - 1)}, r"client 1 \(south\): label -1 is negative.*y > 0"),
        ({"north": (X, Y), "south": (X, Y)}, r"client 0 \(north\): there is a label 2 but only 2 classes"),
        ({"north": {"train": (X[:0], Y[:0])}}, r"client 0 \(north\) has no training examples; leave it out"),
        (
            {"north": (X, Y), "south": {"train": (X[:0], Y[:0]), "test": (X, Y)}},
            r"client 1 \(south\) has no training examples; leave it out",
        ),
        ({"train": (X, Y), "test": (X, Y)}, "are the parts of one client"),
        ({1: (X, Y), "1": (X, Y)}, "two clients have the name '1'"),
        ({"north": {"train": (X, Y), "tests": (X, Y)}}, r"client 0 \(north\): splits are .*not \['test"),
    ):
        with pytest.raises((DataError, TaskError), match=says):
            make(clients, classes=2 if "only 2" in says else None)
    with pytest.raises(DataError, match=r"client 0: expected a pair .*\[\(x0, y0\), \(x1, y1\)\]"):
        make((X, Y))
    for clients in (None, 5, "abc", 1.5):
        with pytest.raises(DataError, match="the clients are a list with the data of each, or a dict"):
            make(clients)


def test_the_client_of_a_label_that_is_too_large_is_named_where_another_leaves_labels_out() -> None:
    x, loss = X[:4], Loss("cross_entropy", ignore_index=9)
    clients = {"north": (x, np.array([0, 1, 0, 9])), "south": (x, np.array([0, 3, 0, 1]))}
    with pytest.raises(DataError, match=r"client 1 \(south\): there is a label 3 but only 2 classes"):
        make(clients, classes=2, loss=loss)


# -- labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.array, list, lambda y: y.astype(object), tuple])
def test_text_labels_are_numbered_in_sorted_order_over_all_clients(kind: Callable[[Any], Any]) -> None:
    federation = make([(X, kind(WORDS)), (X[:2], kind(WORDS[:2]))])
    assert federation.classes == ("ant", "bee", "cat")
    check(federation, 0, X, [["ant", "bee", "cat"].index(word) for word in WORDS])
    check(federation, 1, X[:2], [2, 0])
    apart = {"train": (X, kind(WORDS)), "val": (X[:0], []), "test": (X[:2], WORDS[:2])}
    assert make([apart]).clients[0].test.y.tolist() == [2, 0]
    assert make([(X, WORDS)], classes=["cat", "bee", "ant"]).classes == ("cat", "bee", "ant")


def test_text_labels_stand_in_predictions_and_confusion() -> None:
    parts = {"train": (X, WORDS), "test": (X, WORDS)}
    result = simulate("fedavg", Federation.from_arrays({"north": parts}, linear), rounds=1)
    actual = result.predictions()
    assert actual["label_name"].tolist() == WORDS.tolist()
    truth = np.array(["ant", "bee", "cat"])[result.predict(0).argmax(1).numpy()]
    assert actual["prediction_name"].tolist() == truth.tolist()
    assert set(actual["client_name"]) == set(result.to_frame()["client_name"]) == {"north"}
    assert torch.equal(result.predict("north"), result.predict(0))
    assert result.personal("north").keys() == result.personal(0).keys()
    with pytest.raises(ConfigError, match=r"no client 'nort'\. Did you mean 'north'"):
        result.predictions("nort")
    assert [*result.confusion().index] == ["ant", "bee", "cat"]
    assert result.confusion().loc["bee"].sum() == (WORDS == "bee").sum()


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (["a"] * 11 + [None], r"client 1: 1 of the 12 labels.*missing, first that of example 11|labels of client 1 is missing"),
        (Y, r"labels of client 0 are text, but those of client 1 are not.*astype\(str\)"),
        (np.array(["a", 1] * 6, dtype=object), r"labels of client 1 are objects of the types int, str"),
        (WORDS.astype(bytes), r"labels of client 1 are bytes"),
        (WORDS[:, None], r"labels of client 1 are text \[12, 1\].*y\[:, 0\]"),
        (["cat", "dog"] * 6, r"client 1 has the label 'dog', which is none of classes="),
    ],
)  # fmt: skip
def test_text_labels_that_do_not_fit(y: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make([(X, WORDS), (X, y)], classes=["cat", "ant", "bee", "a"])


def test_truth_values_are_classes() -> None:
    for y in (Y > 0, torch.from_numpy(Y > 0), (Y > 0).tolist()):
        federation = make([(X, y)], nn.Linear(4, 2))
        assert federation.classes == ("False", "True")
        check(federation, 0, X, Y > 0)
    assert make([(X, Y > 0)], nn.Linear(4, 2), classes=["low", "high"]).classes == ("low", "high")


@pytest.mark.parametrize("loss", ["bce", "mse", "huber"])
def test_truth_values_are_numbers_for_losses_of_real_targets(loss: str) -> None:
    pandas = pytest.importorskip("pandas")
    values = Y > 0
    truth = values.astype(np.float32)[:, None]
    kinds = (
        values,
        torch.from_numpy(values),
        values.tolist(),
        pandas.array(values, "boolean"),
        values[:, None],
    )
    for y in kinds:
        federation = make([(X, y)], nn.Linear(4, 1), loss=loss)
        assert federation.classes == ()
        check(federation, 0, X, truth)
    frame = pandas.DataFrame(X, columns=[*"abcd"]).assign(ill=values)
    check(make([frame], nn.Linear(4, 1), loss=loss, target="ill"), 0, X, truth)
    assert make([(X, values)], nn.Linear(4, 2), loss="focal").classes == ("False", "True")
    says = rf"labels of client 1 are text, such as 'cat', but loss '{loss}' learns numbers.*loss='cross_entropy' for text"
    with pytest.raises(DataError, match=says):
        make([(X, values), (X, WORDS)], nn.Linear(4, 1), loss=loss)


@pytest.mark.parametrize("values", [[1, 2, 3], [10, 20, 300], [0, 5, 7]])
def test_labels_beyond_the_scores_are_numbered_and_said(values: list[int]) -> None:
    y = np.array(values)[Y]
    with pytest.warns(UserWarning, match=rf"labels do not count .* {values[2]} is class 2") as said:
        federation = make([(X, y), (X[:2], y[:2])])
    assert len(said) == 1
    assert federation.classes == tuple(map(str, values))
    check(federation, 0, X, Y)
    check(federation, 1, X[:2], Y[:2])


def test_labels_that_are_places_among_the_scores_stay() -> None:
    with pytest.warns(UserWarning, match="smallest label is 2"):
        check(make([(X, Y * 3 + 2)], lambda: nn.Linear(4, 9)), 0, X, Y * 3 + 2)
    with pytest.raises(TaskError, match=r"makes \[1, 3\].*there are 4 classes"):
        make([(X, np.arange(12) % 4)])


def test_labels_go_unchanged_to_a_loss_of_the_users_own() -> None:
    counts = np.array([0, 2, 4, 6, 16, 78])[np.arange(12) % 6]

    def poisson(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.poisson_nll_loss(scores[:, 0], targets.float(), reduction="none")

    for values in (counts, counts + 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            federation = make([(X, values), (X[:2], values[:2])], nn.Linear(4, 1), loss=poisson)
        check(federation, 0, X, values)
        check(federation, 1, X[:2], values[:2])
        parts = {"train": (X, values), "test": (X, values)}
        result = simulate("fedavg", make([parts], nn.Linear(4, 1), loss=poisson), rounds=1)
        expected = poisson(result.predict(0), torch.as_tensor(values)).mean()
        assert result.rounds[-1].values("loss", split="test") == [pytest.approx(float(expected), rel=1e-5)]
    with pytest.raises(DataError, match=r"largest label is 1700000000.*real targets \[n, 1\]"):
        make([(X, np.arange(12) + 1_699_999_989)], nn.Linear(4, 1), loss=poisson)


# -- inputs --------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """An image, tokens and a table, as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(9, 3), nn.Linear(4, 3)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, tabular: Tensor, image: Tensor | None = None) -> Tensor:
        both = torch.cat([self.words(tokens).mean(1), self.table(tabular)], 1)
        scores: Tensor = self.out(both if image is None else both * image.mean((1, 2, 3))[:, None])
        return scores


@pytest.mark.parametrize("tokens", [np.uint8, np.int8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("tabular", [np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])
def test_named_inputs_are_cast_as_arrays_are(tokens: Any, tabular: Any) -> None:
    words, table = np.stack([Y, Y + 5], 1).astype(tokens), (X * 3).astype(tabular)
    if tabular == np.uint8:
        table = np.abs(X * 30).astype(np.uint8)
    x = {"image": PIXELS, "tabular": table, "tokens": words}
    actual = make([{"train": (x, Y)}], Mixed).clients[0].train
    assert isinstance(actual.x, dict)
    truth = {
        "image": PIXELS / np.float32(255),
        "tabular": table.astype(np.float32),
        "tokens": words.astype(np.int64),
    }
    for name, values in truth.items():
        assert actual.x[name].numpy().dtype == values.dtype, name
        np.testing.assert_array_equal(actual.x[name].numpy(), values)


def test_whole_numbers_stay_whole_where_they_are_looked_up_alone() -> None:
    class Joined(nn.Module):
        def __init__(self, table: nn.Module | None = None) -> None:
            super().__init__()
            self.table, self.out = table, nn.Linear(8, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            # real numbers make real numbers of whole ones beside them
            scores: Tensor = self.out(torch.cat([a, b], 1))
            return scores

    for model, kind in ((Joined, torch.float32), (lambda: Joined(nn.Embedding(2, 2)), torch.int64)):
        actual = make([({"a": X, "b": (X * 3).astype(int)}, Y)], model).clients[0].train.x
        assert isinstance(actual, dict)
        assert actual["b"].dtype == kind


def test_named_bytes_that_are_no_images_keep_their_values(caplog: pytest.LogCaptureFixture) -> None:
    counts, words = np.abs(X * 30).astype(np.uint8), np.stack([Y, Y + 5], 1)
    parts = [
        {"train": ({"tabular": a, "tokens": words}, Y), "test": ({"tabular": a, "tokens": words}, Y)}
        for a in (counts, counts.astype(float))
    ]
    with caplog.at_level(logging.INFO, "fedlowrank"):
        result = simulate("fedavg", make(parts, Mixed), rounds=1)
    assert any(
        "'tabular' were converted from uint8 to float32 with the same values" in m for m in caplog.messages
    )
    for x, _ in (part["test"] for part in parts):
        assert torch.equal(result.predict(0, x), result.predict(0))
    with pytest.raises(DataError, match=r"input 'tokens' must be int64, not float64 \[12, 2\]"):
        result.predict(0, {"tabular": counts, "tokens": words * 1.0})


def test_named_masks_of_types_that_lose_values_are_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.out(x * mask)
            return scores

    mask = X > 0
    with pytest.raises(DataError, match=r"'mask' are bool at client 0 and int64 at client 1; give all"):
        make([({"x": X, "mask": mask}, Y), ({"x": X, "mask": mask * 3}, Y)], Masked)
    for given in (mask, mask.astype(np.uint8)):
        actual = make([({"x": X, "mask": given}, Y), ({"x": X, "mask": mask}, Y)], Masked).clients
        for client in actual:
            assert isinstance(client.train.x, dict)
            assert client.train.x["mask"].dtype == torch.from_numpy(given).dtype


def test_named_inputs_in_every_form_of_a_client() -> None:
    x = {"tabular": X.astype(float), "tokens": np.stack([Y, Y + 5], 1).astype(np.int32)}
    rows = [({n: v[i] for n, v in x.items()}, int(Y[i])) for i in range(12)]
    flat = [{**inputs, "label": y} for inputs, y in rows]
    for client in (
        {"train": (x, Y)},
        {"train": {**x, "label": Y}},
        (Listed(rows), Listed(flat)),
        (Listed(flat), Listed(rows)),
    ):
        actual = make({"north": client}, Mixed).clients[0].train
        assert isinstance(actual.x, dict)
        np.testing.assert_array_equal(actual.x["tabular"].numpy(), X)
        np.testing.assert_array_equal(actual.x["tokens"].numpy(), x["tokens"])
        np.testing.assert_array_equal(actual.y.numpy(), Y)
    check(make([{"x": X, "y": Y}]), 0, X, Y)
    result = simulate("fedavg", make([{"train": (x, Y), "test": (x, Y)}], Mixed), rounds=1)
    assert torch.equal(result.predict(0), result.predict(0, x))
    with pytest.raises(DataError, match=r"inputs 'tokens' of client 0 are whole numbers.*client 1 are real"):
        make([(x, Y), ({**x, "tokens": x["tokens"] * 1.0}, Y)], Mixed)
    with pytest.raises(TaskError, match=r"client 1: model model does not take its inputs.*tokens"):
        make([(x, Y), ({"tabular": X}, Y)], Mixed)


def test_what_becomes_of_whole_numbers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    tokens = np.stack([Y, Y + 5], 1)
    with caplog.at_level(logging.INFO, "fedlowrank"):
        for kind, model, says in (
            (np.uint16, words, "from uint16 to int64, for the model looks them up"),
            (np.int32, linear, "from int32 to float32 with the same values, for the model does not look"),
            (np.uint8, linear, "from uint8 to float32 and divided by 255, for unsigned bytes are pixels"),
        ):
            caplog.clear()
            with pytest.warns(UserWarning, match="bytes up to 7") if kind is np.uint8 else nullcontext():
                made = make([(tokens.astype(kind), Y), (tokens.astype(kind), Y)], model)
            (text,) = [m for m in caplog.messages if "converted" in m]
            assert says in text
            assert text in made.choices
    assert not any("inputs" in choice for choice in make([(X, Y)]).choices)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.array([X[0], X[1, :2]] * 6, dtype=object),
            r"client 1: the inputs .* of object; .*shapes \[2\], \[4\]",
        ),
        (X.astype(object), r"client 1: the inputs .*astype\(float\)"),
        (WORDS, "client 1: the inputs must be an array of numbers.*encode text"),
        (X[:11], "client 1: there are 12 labels, but the input holds 11 examples"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make([(X, Y), (x, Y)])


# -- data frames ---------------------------------------------------------------------------------------------


def table(**columns: Any) -> Any:
    """Rows of three clients, with inputs a and b."""
    pandas = pytest.importorskip("pandas")
    own = {"a": X[:, 0], "b": np.arange(12), "site": ["s", "n", "w"] * 4, "y": WORDS, **columns}
    return pandas.DataFrame(own, index=np.arange(100, 112))


FRAME = {"client": "site", "target": "y"}


def test_a_data_frame() -> None:
    federation = make(table(), **FRAME)
    assert [info.name for info in federation.infos] == ["n", "s", "w"]
    assert federation.classes == ("ant", "bee", "cat")
    for i, first in enumerate((1, 0, 2)):
        rows = np.arange(first, 12, 3)
        truth = np.stack([X[rows, 0], rows.astype(np.float32)], 1)
        check(federation, i, truth, [["ant", "bee", "cat"].index(word) for word in WORDS[rows]])
    chosen = make(table(c=1), features=["b", "a"], **FRAME)
    np.testing.assert_array_equal(in_order(chosen, 1).inputs[:, 0], np.arange(0, 12, 3))  # type: ignore[index]


@pytest.mark.parametrize(
    ("y", "classes", "truth"),
    [
        (Y, ("0", "1", "2"), Y),
        (Y > 0, ("False", "True"), Y > 0),
        (X[:, 1].astype(float), (), X[:, 1:2]),
    ],
)
def test_targets_of_a_data_frame(y: Any, classes: tuple[str, ...], truth: Any) -> None:
    outputs = lambda: nn.Linear(2, len(classes) or 1)  # noqa: E731
    federation = make(table(y=y), outputs, **FRAME)
    assert federation.classes == classes
    np.testing.assert_array_equal(in_order(federation, 1).y.numpy(), truth[::3])


def test_other_columns_of_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    nullable = table(
        b=pandas.array(np.arange(12), "Int64"),
        y=pandas.Categorical(WORDS),
        site=pandas.Categorical(["s", "n"] * 6),
    )
    check(
        make(nullable, **FRAME),
        1,
        np.stack([X[::2, 0], np.arange(0, 12, 2)], 1),
        np.unique(WORDS, return_inverse=True)[1][::2],
    )
    one = make(table(y=Y), lambda: nn.Linear(2, 1), client="site", target=["y"])
    np.testing.assert_array_equal(in_order(one, 1).y.numpy(), Y[::3, None].astype("float32"))
    two = make(table(y=Y), lambda: nn.Linear(1, 2), client="site", target=["a", "b"], features=["y"])
    np.testing.assert_array_equal(in_order(two, 1).y.numpy(), np.stack([X[::3, 0], np.arange(0, 12, 3)], 1))
    parts = make(table(part=["train"] * 6 + ["val"] * 3 + ["test"] * 3), split="part", **FRAME)
    assert [[len(p) for p in (c.train, c.val, c.test)] for c in parts.clients] == [[2, 1, 1]] * 3
    rows = table().drop(columns="site")
    check(
        make({"n": rows[:5], "s": (rows[5:], rows[:2])}, target="y"),
        0,
        np.stack([X[:5, 0], np.arange(5)], 1),
        [2, 0, 1, 2, 0],
    )
    ids = make(
        table(y=Y).drop(columns="a"), lambda: nn.Sequential(nn.Embedding(12, 3), nn.Flatten()), **FRAME
    )
    assert in_order(ids, 0).inputs.dtype == torch.int64  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ({}, {}, r"two columns, client=\.\.\. and target=\.\.\.; client= is missing\. Its columns are"),
        ({}, {"client": "site"}, r"target= is missing"),
        ({}, {"client": "site", "target": "yy"}, r"none is 'yy'\. Did you mean 'y'"),
        ({}, {"client": "side", "target": "y"}, r"none is 'side'\. Did you mean 'site'"),
        ({}, {**FRAME, "features": ["aa", "b"]}, r"none is 'aa'"),
        ({}, {**FRAME, "features": ["a", "y"]}, r"features must be columns besides"),
        ({}, {**FRAME, "split": "part"}, r"none is 'part'"),
        ({"ward": ["u", "v"] * 6}, FRAME, r"\(n\): the column 'ward' holds no numbers .*get_dummies\(frame, columns=\['ward'\]"),
        ({"b": ["1"] * 6 + ["?"] + ["2.5"] * 5}, FRAME, r"\(n\): the column 'b' .*to_numeric"),
        ({"b": ["1", 2, 3, "?"] * 3}, FRAME, r"\(n\): .* but '\?' in row 107 is none\. Correct it and .*to_numeric"),
        ({"Unnamed: 0": range(12)}, FRAME, r"'Unnamed: 0', which has no name .*index=False.*features="),
        ({}, {**FRAME, "target": ["y"]}, r"client 0 \(n\): the target 'y' holds no numbers.* give target='y'$"),
        ({"b": [np.nan] + [1.0] * 11}, FRAME, r"client 1 \(s\): the column 'b' has 1 empty cell, first in row 100.*dropna"),
        ({"b": [np.inf] + [1.0] * 11}, FRAME, r"client 1 \(s\): the column 'b' holds an infinity, first in row 100"),
        ({"y": [None, *WORDS[1:]]}, FRAME, r"client 1 \(s\): the target 'y' has 1 empty cell, first in row 100"),
        ({"site": [None] + ["n"] * 11}, FRAME, r"the column 'site' has 1 empty cell, first in row 100"),
        ({"part": ["train"] * 11 + ["tets"]}, {**FRAME, "split": "part"}, r"'part' .* holds 'tets'\. Did you mean 'test'"),
        ({"part": ["train", "test"] * 6, "site": ["s", "n"] * 6}, {**FRAME, "split": "part"}, r"0 \(n\): .*no row 'train'"),
    ],
)  # fmt: skip
def test_data_frames_that_do_not_fit(columns: Any, options: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make(table(**columns), **options)


def test_columns_of_other_data_are_refused() -> None:
    with pytest.raises(DataError, match=r"client= names a column of one DataFrame.*not of a list"):
        make([(X, Y)], client="site")
    with pytest.raises(
        DataError, match=r"client 0: expected a pair .*a DataFrame; name its column of targets"
    ):
        make([table()])


# -- heads ---------------------------------------------------------------------------------------------------


class Ends(nn.Module):
    """A model whose forward ends in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.one, self.two = how, nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        if how == "tied":
            self.two = self.one
        if how == "none":
            self.head_name = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.how == "sum":
            return self.one(h) + self.two(h)  # type: ignore[no-any-return]
        if self.how == "twice":
            return self.one(torch.nn.functional.pad(self.one(h), (0, 1)))  # type: ignore[no-any-return]
        return self.two(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), "2"),
        (nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3))), "1.1"),
        (nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3)), "1"),
        (Ends("two"), "two"),
        (Ends("sum"), None),
        (Ends("twice"), None),
        (Ends("none"), None),
        (nn.Linear(4, 3), None),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), None),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)), None),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.LogSoftmax(-1)), None),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3).requires_grad_(False)), None),
    ],
)
def test_the_one_candidate_becomes_the_head(
    model: nn.Module, head: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fedlowrank"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "client 0: model model makes 4 scores")
        federation = make([(X, Y), (X, Y)], model)
    architecture = federation.architectures["model"]
    assert architecture.head_name == head
    said = [m for m in caplog.messages if "head" in m]
    assert said == (
        []
        if head is None
        else [f"Model model: its head is {head!r}, the nn.Linear that its forward ends in."]
    )
    if head is None:
        with pytest.raises(TaskError, match="names no head"):
            architecture.width  # noqa: B018
        return
    x = torch.from_numpy(X)
    actual = architecture.head(architecture.initial, architecture.represent(architecture.initial, x))
    assert torch.allclose(actual, model(x), atol=1e-6)


def test_the_head_of_a_regression_and_of_several_models() -> None:
    two = {"small": lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), "none": lambda: nn.Linear(4, 1)}
    made = make([(X, X[:, :1] + 0.5)] * 2, two)
    assert [a.head_name for a in made.architectures.values()] == ["1", None]
    named = make([(X, Y)], nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)), head="2")
    assert not named.choices


def test_rows_of_a_pair_have_one_index() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame(X, columns=list("abcd")[: X.shape[1]]), pandas.Series(Y)
    order = np.arange(12)[::-1]
    for inputs in (x.iloc[order], {"x": x.iloc[order]}, {"train": (x.iloc[order], y)}):
        client = inputs if isinstance(inputs, dict) and "train" in inputs else (inputs, y)
        with pytest.raises(
            DataError, match=r"have other indices: row 0 .* has 11 and 0\..*y\.loc\[x\.index\]"
        ):
            make([client])
    with pytest.raises(DataError, match=r"have other indices: row 0 .* has 100 and 200"):
        make([(x.set_index(np.arange(100, 112)), y.set_axis(np.arange(200, 212)))])
    with pytest.raises(
        DataError, match=r"client 0: its DataFrame has the column 'Unnamed: 1'.*columns=\['Unnamed: 1'\]"
    ):
        make([(x.rename(columns={"b": "Unnamed: 1"}), y)])
    numbers, pairs = np.arange(5, 17), pandas.MultiIndex.from_product([range(3), range(4)])
    with pytest.raises(DataError, match=r"row 2 \(counted from 0\) has \(0, 2\) and \(0, 3\)"):
        make([(x.set_index(pairs), y.set_axis(pairs[[0, 1, 3, 2, *range(4, 12)]]))])
    expected = make([(X[order], Y[order])]).clients[0].train
    # rows that are put together, the same order in arrays, and a new index that only numbers the rows
    for pair in (
        (x.iloc[order], y.loc[x.index[order]]),
        (x.iloc[order], Y[order]),
        (pandas.DataFrame(X[order]), y.iloc[order].set_axis(np.arange(100, 112))),
        (pandas.DataFrame(X[order]), y.iloc[order].set_axis(pairs)),
        (pandas.DataFrame(X[order], index=pairs), y.iloc[order].set_axis(range(12))),
        # one index of other types
        (
            pandas.DataFrame(X[order], index=numbers.astype("int32")),
            y.iloc[order].set_axis(pandas.Index(numbers, dtype="Int64")),
        ),
    ):
        actual = make([pair]).clients[0].train
        assert torch.equal(actual.inputs, expected.inputs)  # type: ignore[arg-type]
        assert torch.equal(actual.y, expected.y)


def test_clients_of_one_name_in_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"site": [1, "1", 2, "1"] * 3, "a": range(12), "y": [0, 1] * 6})
    with pytest.raises(
        DataError, match=r"'site' has several values that read '1'.*\['site'\]\.astype\(str\)"
    ):
        make(frame, lambda: nn.Linear(1, 2), client="site", target="y")


def test_clients_without_a_test_part_are_said() -> None:
    random = np.random.default_rng(0)
    clients = {f"c{n}": (random.normal(size=(n, 3)), np.arange(n) % 2) for n in (40, 3, 5, 6)}
    with pytest.warns(
        UserWarning, match=r"2 of 4 clients have no test part.*client 1 \(c3\), client 2 \(c5\)"
    ):
        made = Federation.from_arrays(clients, lambda: nn.Linear(3, 2))
    assert [len(client.test) for client in made.clients] == [4, 0, 0, 1]
    assert any("2 of 4 clients" in note for note in made.notes)
    # any other warning is an error
    Federation.from_arrays(clients, lambda: nn.Linear(3, 2), test=0.0)
    Federation.from_arrays({"a": {"train": clients["c3"]}, "b": clients["c40"]}, lambda: nn.Linear(3, 2))


def test_times_as_targets() -> None:
    pandas = pytest.importorskip("pandas")
    times = pandas.date_range("2020", periods=12).to_numpy()
    with pytest.raises(DataError, match=r"client 0: the targets must be .*make a small number of times"):
        make([(X, times)])
