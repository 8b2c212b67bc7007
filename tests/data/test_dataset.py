"""Examples are taken, standardized and scaled as plain numpy does it, and data that do not fit are refused."""

import numpy as np
import pytest
import torch

from fedlowrank import Federation
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.dataset import Dataset, Examples, normalize


def examples(x, y) -> Examples:
    return Examples(torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64))


def table(train, test=None) -> Dataset:
    parts = [None if p is None else examples(p, [0] * len(p)) for p in (train, test)]
    return Dataset("toy", parts[0], parts[1], ("a", "b"))


def test_take_copies_in_the_order_asked_for():
    whole = examples([[0.0], [1.0], [2.0]], [0, 1, 0])
    part = whole.take(np.array([2, 0]))
    assert part.x.tolist() == [[2.0], [0.0]]
    assert part.y.tolist() == [0, 0]
    part.x.zero_()
    assert whole.x.tolist() == [[0.0], [1.0], [2.0]]
    assert len(whole.take(torch.tensor([], dtype=torch.int64))) == 0


def test_named_inputs_are_taken_together():
    whole = Examples(
        {"ids": torch.arange(6).reshape(3, 2), "mask": torch.ones(3, 2)}, torch.tensor([0, 1, 1])
    )
    part = whole.take(torch.tensor([1]))
    assert part.x["ids"].tolist() == [[2, 3]]
    assert part.x["mask"].shape == (1, 2)
    with pytest.raises(ConfigError, match="named ones"):
        normalize(Dataset("text", whole, None, ("a", "b")), "standard")


def test_data_are_printed_by_their_shapes():
    part = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert repr(part) == "Examples(x=float32 [3, 2], y=int64 [3])"
    assert repr(Dataset("toy", part, None, ("a", "b"), torch.zeros(3))).startswith(
        f"Dataset(name='toy', train={part}, test=None, classes=2"
    )
    pairs = [(np.ones((100, 4)), np.arange(100) % 2)] * 3
    made = Federation.from_arrays(pairs, lambda: torch.nn.Linear(4, 2))
    assert repr(made) == (
        "Federation(name='federation', clients=3, train=240, val=30, test=30, classes=2, models=model)"
    )
    assert "tensor(" not in repr(made.clients[0]) + repr(made.pack_images().clients[0].train.x)


X, LABELS, IDS = torch.zeros(2, 2), torch.tensor([0, 0]), torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3, 2), LABELS, "2 labels.*3 examples"),
        (X.double(), LABELS, "float32"),
        (X, torch.zeros(2), r"float32 \[n, d\]"),
        (X, X.double(), r"float32 \[n, d\]"),
        (X, X[:, :0], r"float32 \[n, d\]"),
        ({}, LABELS, "without a tensor"),
        ({"ids": torch.zeros(3, 2)}, LABELS, "'ids' holds 3"),
        ({"input_ids": IDS}, IDS.double(), r"float32 \[n, d\]"),
    ],
)
def test_examples_refuse_what_does_not_fit(x, y, message):
    with pytest.raises(DataError, match=message):
        Examples(x, y)


GOOD, REAL = Examples(X, LABELS), Examples(X, X)
NAN, INFINITE = torch.tensor([[0.0, 0], [0, float("nan")]]), torch.tensor([[0.0, 0], [float("inf"), 0]])


@pytest.mark.parametrize(
    ("train", "test", "classes", "more", "message"),
    [
        (GOOD, GOOD.take(LABELS[:0]), ("a",), {}, "is empty"),
        (
            Examples(X, torch.tensor([0, 1])),
            None,
            ("a",),
            {},
            r"outside 0\.\.0: the first is 1, at example 1",
        ),
        (Examples(X, LABELS - 1), None, ("a",), {}, "outside"),
        (Examples(NAN, LABELS), None, ("a",), {}, r"NaN.*the inputs.*example 1"),
        (Examples(INFINITE, LABELS), None, ("a",), {}, r"NaN.*example 1"),
        (Examples(X, NAN), None, (), {}, r"NaN or an infinity in the targets.*example 1"),
        (Examples(X[:, :0], LABELS), None, ("a",), {}, "without values"),
        (GOOD, Examples(X[:, :1], LABELS), ("a",), {}, r"\(2,\).*\(1,\)"),
        (REAL, Examples(X, X[:, :1]), (), {}, r"training targets are \[2\], but test targets \[1\]"),
        (GOOD, None, ("a", "a"), {}, "twice"),
        (GOOD, None, ("a",), {"natural": torch.tensor([1])}, "client ids"),
        (GOOD, None, ("a",), {"natural_test": LABELS}, "no test part"),
    ],
)
def test_datasets_refuse_what_does_not_fit(train, test, classes, more, message):
    with pytest.raises(DataError, match=message):
        Dataset("toy", train, test, classes, **more)


def test_standard_uses_the_training_part_alone():
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 3, 4, 4, generator=generator) * torch.tensor([1.0, 5, 0.01])[:, None, None] + 100
    test = torch.full((2, 3, 4, 4), 100.0)
    out = normalize(table(train, test), "standard")
    mean, std = train.double().mean((0, 2, 3)), train.double().std((0, 2, 3), unbiased=False)
    expected = ((t.double() - mean[:, None, None]) / std[:, None, None] for t in (train, test))
    for actual, x in zip((out.train.x, out.test.x), expected, strict=True):
        assert torch.allclose(actual.double(), x, rtol=1e-2, atol=1e-2)


@pytest.mark.full
def test_standard_of_a_large_set_equals_that_of_one_piece():
    # More values than are looked at in one piece.
    x = torch.rand(300_000, 7, generator=torch.Generator().manual_seed(1)) * 3
    out = normalize(table(x), "standard").train.x
    expected = (x - x.double().mean(0).float()) / x.double().std(0, unbiased=False).float()
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("how", ["standard", "scale"])
def test_constant_features_become_zero(how):
    out = normalize(table([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]], [[0.1, 5.0]]), how)
    assert out.train.x[:, 0].tolist() == [0, 0, 0]
    assert out.test.x[0, 0] == 0
    assert torch.isfinite(out.test.x).all()


def test_scale_maps_tables_by_feature_and_images_as_a_whole():
    out = normalize(table([[1.0, -4.0], [3.0, 4.0]], [[5.0, 0.0]]), "scale")
    assert out.train.x.tolist() == [[0, 0], [1, 1]]
    assert out.test.x.tolist() == [[2, 0.5]]
    image = torch.tensor([0.0, 50, 100, 200]).reshape(1, 2, 1, 2)
    assert normalize(table(image), "scale").train.x.flatten().tolist() == [0, 0.25, 0.5, 1]


def test_normalize_leaves_the_old_set_alone_and_names_unknown_ways():
    data = table([[1.0], [3.0]])
    assert normalize(data, "none") is data
    normalize(data, "standard")
    assert data.train.x.tolist() == [[1], [3]]
    with pytest.raises(ConfigError, match="'standard'"):
        normalize(data, "standart")
