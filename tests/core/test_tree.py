"""Trees: bytes and back, arithmetic, and messages that are damaged or hostile."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedlowrank
from fedlowrank.core import tree
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.core.tree import TreeError

# the same examples in every run: what fails here fails for everyone
ANY = settings(suppress_health_check=list(HealthCheck))


@tree.tree_dataclass
class Point:
    """A registered class with a tensor and a plain value."""

    where: Any
    name: Any


DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip
SHAPES = ((), (0,), (1,), (7,), (8,), (9,), (3, 0, 2), (2, 3), (2, 3, 4))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of all kinds of type, shape and layout."""
    dtype, shape, seed = (
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(0, 99)),
    )
    layout = draw(st.sampled_from(["plain", "sliced", "transposed", "expanded", "grad"]))
    values = torch.randint(-100, 100, (2, *shape), generator=torch.Generator().manual_seed(seed))
    made = (values % 2).to(dtype) if dtype == torch.bool else values.to(dtype)
    out = made[1]
    if layout == "plain":
        return out.clone()
    if layout == "transposed" and out.ndim >= 2:
        return out.transpose(0, -1)
    if layout == "expanded":
        return out[None].expand(3, *shape)
    if layout == "grad" and dtype.is_floating_point:
        return out.clone().requires_grad_()
    return out


KEYS = st.one_of(
    st.sampled_from(
        ["", "a", "a/b", "/", "~", "~0", "~1", "0", "__metadata__", "t", "v", "d", "ключ", "\U0001f642"]
    ),
    st.text(max_size=5),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0]),
    st.text(max_size=8),
)
TREES = st.recursive(
    st.one_of(PLAIN, tensors()),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


def assert_same(a: Any, b: Any) -> None:
    """Equality written apart from the package's own: types, order of keys, and bits."""
    assert type(a) is type(b) or (isinstance(a, Tensor) and isinstance(b, Tensor))
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not b.requires_grad
        assert (
            a.detach()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(b.contiguous().view(-1).view(torch.uint8))
        )
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Point):
        assert_same((a.where, a.name), (b.where, b.name))
    elif isinstance(a, float):
        assert np.float64(a).tobytes() == np.float64(b).tobytes() or (math.isnan(a) and math.isnan(b))
    else:
        assert a == b


# -- bytes and back ------------------------------------------------------------------------------------------


@ANY
@given(TREES)
@example({"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}, "~1": 1, "/": torch.tensor(True)})
@example({"a~1b": torch.ones(2), "a/b": torch.zeros(2)})
@example([torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool)])
def test_a_tree_comes_out_of_its_bytes_as_it_went_in(value: Any) -> None:
    data = tree.encode(value)
    assert_same(value, tree.decode(data))
    assert tree.encoded_size(value) == len(data)
    assert tree.equal(value, tree.decode(data))


def test_tensors_that_share_storage_come_out_apart() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {"whole": base, "again": base, "row": base[1], "column": base[:, 1], "turned": base.T}
    actual = tree.decode(tree.encode(value))
    assert_same(value, actual)
    actual["whole"].zero_()
    assert_same(base[1], actual["row"])
    assert_same(base, actual["again"])


def test_a_slice_of_a_large_tensor_is_sent_as_the_slice() -> None:
    large = torch.zeros(100_000)
    assert len(tree.encode(large[:10])) < 1000
    assert tree.nbytes(large[:10]) == 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_element_has_its_bytes_whatever_its_strides(dtype: torch.dtype) -> None:
    wide = torch.ones(3, 2).to(dtype)
    for one in (
        wide[0:1, 0],
        wide.T[:1, :1],
        wide[:1, :1],
        wide[0, 0].expand(1),
        wide[0, 0].expand(1, 1, 1),
        wide[0, 0],
    ):
        assert_same(torch.ones(one.shape).to(dtype), tree.decode(tree.encode(one)))


def test_booleans_travel_as_bits() -> None:
    mask = torch.rand(8001, generator=torch.Generator().manual_seed(0)) < 0.5
    assert len(tree.encode(mask)) < 1001 + 400
    assert tree.nbytes(mask) == 1001
    assert torch.equal(tree.decode(tree.encode(mask)), mask)


@ANY
@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=4))
def test_counts_of_parameters_and_bytes(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    value = {str(i): torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(parts)}
    sizes = [math.prod(shape) for shape, _ in parts]
    # labels and masks are no parameters; what was rounded to eight bits is
    numbers = (d.is_floating_point or d == torch.int8 for _, d in parts)
    assert tree.numel(value) == sum(n for n, counts in zip(sizes, numbers, strict=True) if counts)
    expected = sum(
        math.ceil(n / 8) if d == torch.bool else n * d.itemsize
        for n, (_, d) in zip(sizes, parts, strict=True)
    )
    assert tree.nbytes(value) == expected


def test_the_remembered_size_depends_on_plain_values_shapes_and_types() -> None:
    values = [
        {"a": 1}, {"a": 100000}, {"a": "x"}, {"a": "x" * 100}, {"a": torch.zeros(3)}, {"a": torch.zeros(300)},
        {"a": torch.zeros(300, dtype=torch.float64)}, {"a": torch.zeros(300, dtype=torch.bool)}, {"a" * 60: torch.zeros(3)},
        {"a": 0.0}, {"a": -0.0}, {"a": math.nan},
    ]  # fmt: skip
    for value in values * 2:
        assert tree.encoded_size(value) == len(tree.encode(value))


def test_equality_is_of_bits() -> None:
    nan = torch.tensor([math.nan])
    assert tree.equal({"a": nan}, {"a": nan.clone()})
    assert not tree.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not tree.equal(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    assert not tree.equal([1], (1,))
    assert not tree.equal({"a": 1}, {"a": True})


# -- damage --------------------------------------------------------------------------------------------------


VALUE = {
    "x": torch.arange(6.0),
    "m": torch.tensor([True, False]),
    "p": Point([torch.ones(2)], ("s", 1, None, 2.5)),
}


@pytest.mark.parametrize("length", [*range(40), 100, 200, -9, -8, -4, -1])
def test_bytes_cut_short_are_refused(length: int) -> None:
    with pytest.raises(TreeError):
        tree.decode(tree.encode(VALUE)[:length])


@ANY
@given(st.binary(max_size=200))
@example(b"\x00" * 8)
@example(b"\xff" * 8)
@example((4).to_bytes(8, "little") + b"null")
@example((2).to_bytes(8, "little") + b"{}")
@example((100_000).to_bytes(8, "little") + b"[" * 100_000)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TreeError):
        tree.decode(data)


@ANY
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused_or_decode_to_a_tree(changes: list[tuple[int, int]]) -> None:
    data = bytearray(tree.encode(VALUE))
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        actual = tree.decode(bytes(data))
    except TreeError:
        return
    tree.encode(actual)


JSONS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 20),
        st.sampled_from(["t", "v", "b", "c", "d", "", f"{__name__}:Point"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["t", "v", "b", "l", "u", "c", "d", "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def message(skeleton: Any, **named: Tensor) -> bytes:
    """A well-formed file with any skeleton."""
    return safetensors.torch.save({"": torch.zeros(3), **named}, {"tree": json.dumps(skeleton)})


@ANY
@given(JSONS)
@example(5)
@example(None)
@example("x")
@example([])
@example({})
@example({"d": 5})
@example({"d": {"a": "t"}})
@example({"l": 5})
@example({"u": ["t"]})
@example({"b": [-1]})
@example({"b": "x"})
@example({"b": [3, 3]})
@example({"c": [], "d": {}})
@example({"c": f"{__name__}:Point"})
@example({"c": f"{__name__}:Point", "d": {"nonsense": {"v": 1}}})
def test_a_skeleton_of_another_shape_is_refused_or_decodes_to_a_tree(skeleton: Any) -> None:
    try:
        actual = tree.decode(message(skeleton))
    except TreeError:
        return
    tree.encode(actual)


def test_booleans_of_a_size_that_the_bytes_do_not_hold_are_refused() -> None:
    bits = torch.zeros(2, dtype=torch.uint8)
    for shape in (
        [17],
        [8],
        [10**13],
        [2**31, 2**31, 2**31],
        [-1],
        [2, -8],
        [-8, -2],
        [16.0],
        ["16"],
        [None],
    ):
        with pytest.raises(TreeError):
            tree.decode(message({"d": {"m": {"b": shape}}}, **{"/m": bits}))
    none = torch.zeros(0, dtype=torch.uint8)
    for shape in ([0, 10**30], [-1], [-3, 0], [0, -1]):
        with pytest.raises(TreeError):
            tree.decode(message({"d": {"m": {"b": shape}}}, **{"/m": none}))
    assert tree.decode(message({"d": {"m": {"b": [16]}}}, **{"/m": bits}))["m"].shape == (16,)


def test_booleans_that_are_not_packed_are_refused() -> None:
    # a boolean made of another byte than 0 or 1 is neither equal to True nor to False
    odd = torch.tensor([2, 255, 1], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(TreeError, match="booleans at /m that are not packed"):
        tree.decode(message({"d": {"m": "t"}}, **{"/m": odd}))


@pytest.mark.parametrize("value", [[], [1, 2], {}, {"a": 1}, [[None]]])
def test_a_plain_value_is_no_list_and_no_dict(value: Any) -> None:
    with pytest.raises(TreeError, match=f"a {type(value).__name__} as a plain value at /x"):
        tree.decode(message({"d": {"x": {"v": value}}}))


@tree.tree_dataclass
class Even:
    """A registered class that refuses some values, each in its own way."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise FedlowrankError("odd") if self.number > 0 else ZeroDivisionError


@pytest.mark.parametrize("number", [1, -1, "x"])
def test_a_class_that_refuses_its_values_makes_the_message_damaged(number: Any) -> None:
    with pytest.raises(TreeError, match="not an encoded tree"):
        tree.decode(message({"c": f"{__name__}:Even", "d": {"number": {"v": number}}}))
    assert tree.decode(tree.encode(Even(4))) == Even(4)


def test_a_header_that_claims_more_than_there_is_is_not_looked_at() -> None:
    data = tree.encode(VALUE)
    for size in (len(data) + 1, 2**40, 2**64 - 1):
        with pytest.raises(TreeError, match=f"header alone would take {size}"):
            tree.decode(size.to_bytes(8, "little") + data[8:])


def test_decoded_tensors_are_private_and_may_be_written() -> None:
    data = tree.encode(VALUE)
    actual = tree.decode(data)
    actual["x"].zero_()
    actual["m"][0] = False
    assert_same(VALUE, tree.decode(data))


def test_more_booleans_than_allowed_are_refused() -> None:
    masks = {
        "a": torch.ones(3, 5, dtype=torch.bool),
        "b": [torch.ones(6, dtype=torch.bool)],
        "c": torch.ones(9),
    }
    data = tree.encode(masks)
    assert_same(masks, tree.decode(data, bools=21))
    with pytest.raises(
        TreeError, match=r"^the message holds more booleans than it may; the last are the 6 at /b/0"
    ):
        tree.decode(data, bools=20)


# -- classes and code ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stranger:
    """A class that was never registered."""

    a: int = 1


def test_a_class_that_is_not_registered_cannot_be_sent() -> None:
    with pytest.raises(TreeError, match=r"Stranger at /x.*decorate"):
        tree.encode({"x": Stranger()})
    for odd in (object(), {1: 2}, {"a": {2: 3}}, np.zeros(2), {1, 2}, b"bytes", 1j):
        with pytest.raises(TreeError):
            tree.encode(odd)


@pytest.mark.parametrize(
    "name",
    [
        f"{__name__}:Stranger",
        "os:system",
        "builtins:eval",
        "fedlowrank.core.tree:tree_dataclass",
        "",
        "Point",
    ],
)
def test_a_message_cannot_name_code_that_is_not_registered(name: str) -> None:
    with pytest.raises(TreeError, match="registered tree"):
        tree.decode(message({"c": name, "d": {"a": {"v": 1}}}))


def imports_and_calls(source: str) -> set[str]:
    """Names of pickle and of torch's pickle in a module."""
    actual = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            actual |= {a.name for a in node.names if a.name.split(".")[0] in UNSAFE}
        elif isinstance(node, ast.ImportFrom) and node.module:
            actual |= {node.module} if node.module.split(".")[0] in UNSAFE else set()
            actual |= {
                f"{node.module}.{a.name}"
                for a in node.names
                if node.module == "torch" and a.name in ("save", "load")
            }
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            actual |= (
                {f"torch.{node.attr}"}
                if node.value.id == "torch" and node.attr in ("save", "load")
                else set()
            )
            actual |= {"np.load"} if node.value.id == "np" and node.attr == "load" else set()
    return actual


UNSAFE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_no_module_unpickles_but_the_restricted_reader_of_cifar() -> None:
    root = Path(fedlowrank.__file__).parent
    actual = {
        p.relative_to(root).as_posix(): imports_and_calls(p.read_text(encoding="utf-8"))
        for p in root.rglob("*.py")
    }
    assert len(actual) > 20
    guilty = {p: names for p, names in actual.items() if names - {"np.load"}}
    assert set(guilty) <= {"data/download/unpickle.py"}
    for path, names in actual.items():
        # np.load unpickles only if told to
        assert "np.load" not in names or "allow_pickle=True" not in (root / path).read_text(encoding="utf-8")


def test_the_scan_for_pickle_would_find_it() -> None:
    for source in (
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
    ):
        assert imports_and_calls(source)


# -- arithmetic ----------------------------------------------------------------------------------------------


def pair(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 4, generator=g, dtype=dtype),
        "deep": [
            torch.randn(5, generator=g, dtype=dtype),
            ("plain", 7, None, torch.randn((), generator=g, dtype=dtype)),
        ],
        "p": Point(torch.randn(2, generator=g, dtype=dtype), "name"),
    }


def flat(value: Any) -> np.ndarray:
    return np.concatenate([t.numpy().reshape(-1) for _, t in tree.leaves(value)])


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1, 2], [0, 5, 1], [0.2, 0.3, 0.5], [1e-9, 1e-9, 2e-9]])
def test_means_are_those_of_numpy(weights: list[float]) -> None:
    trees = [pair(s) for s in range(3)]
    kept = [tree.encode(t) for t in trees]
    actual = flat(mean(trees, weights))
    np.testing.assert_allclose(
        actual, np.average([flat(t) for t in trees], axis=0, weights=weights), rtol=0, atol=1e-14
    )
    assert [tree.encode(t) for t in trees] == kept


def test_a_mean_takes_weights_from_an_iterator_and_keeps_the_type() -> None:
    actual = mean([pair(0, torch.float32)], iter([2.0]))
    assert {t.dtype for _, t in tree.leaves(actual)} == {torch.float32}
    np.testing.assert_array_equal(flat(actual), flat(pair(0, torch.float32)))
    assert actual["deep"][1][:3] == ("plain", 7, None)


@pytest.mark.parametrize(
    ("trees", "weights"), [([], []), ([{"a": torch.ones(1)}], [0]), ([{"a": torch.ones(1)}] * 2, [2, -1])]
)
def test_a_mean_of_nothing_or_with_bad_weights_is_refused(trees: list[Any], weights: list[float]) -> None:
    with pytest.raises(TreeError):
        mean(trees, weights)


def test_sums_and_products_are_those_of_numpy() -> None:
    a, b = pair(1), pair(2)
    x, y = flat(a), flat(b)
    np.testing.assert_allclose(flat(tree.add(a, b)), x + y, atol=1e-15)
    np.testing.assert_allclose(flat(tree.add(a, b, -0.3)), x - 0.3 * y, atol=1e-15)
    np.testing.assert_allclose(flat(tree.sub(a, b)), x - y, atol=1e-15)
    assert float(tree.dot(a, b)) == pytest.approx(float(x @ y), abs=1e-12)
    assert float(tree.square_distance(a, b)) == pytest.approx(float(((x - y) ** 2).sum()), abs=1e-12)
    assert not flat(tree.zeros_like(a)).any()


def test_gradients_flow_through_products_and_distances() -> None:
    a = {"x": torch.tensor([1.0, 2.0], requires_grad=True)}
    b = {"x": torch.tensor([3.0, -1.0])}
    assert torch.autograd.grad(tree.dot(a, b), a["x"])[0].tolist() == [3.0, -1.0]
    assert torch.autograd.grad(tree.square_distance(a, b), a["x"])[0].tolist() == [-4.0, 6.0]


@ANY
@given(TREES)
def test_mapping_the_identity_keeps_a_tree(value: Any) -> None:
    assert_same(tree.canonical(value), tree.map_leaves(lambda t: t.detach(), value))


def test_the_canonical_form_is_detached_and_contiguous() -> None:
    value = {
        "w": torch.ones(2, 3, 4, 5, requires_grad=True).to(memory_format=torch.channels_last),
        "t": torch.ones(2, 3).T,
    }
    actual = tree.canonical(value)
    assert all(t.is_contiguous() and not t.requires_grad for _, t in tree.leaves(actual))
    assert tree.equal(actual, value)


def test_plain_values_that_are_not_a_number_are_equal_to_themselves() -> None:
    value = {"x": torch.ones(1), "loss": math.nan}
    assert tree.equal(
        tree.add(value, {"x": torch.ones(1), "loss": math.nan}),
        {"x": torch.full((1,), 2.0), "loss": math.nan},
    )


def test_leaves_are_named_by_json_pointers() -> None:
    value = {"a/b": [torch.zeros(1)], "~": {"": torch.zeros(1)}, "p": Point(torch.zeros(1), 1)}
    assert [p for p, _ in tree.leaves(value)] == ["/a~1b/0", "/~0/", "/p/where"]


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ({"m": {"w": torch.ones(1)}}, {"m": {"v": torch.ones(1)}}, "/m"),
        ({"m": [torch.ones(1)]}, {"m": [torch.ones(1)] * 2}, "/m"),
        ({"m": {"a/b": torch.ones(1)}}, {"m": {"a/b": 3}}, "/m/a~1b"),
        ({"m": 3}, {"m": torch.ones(1)}, "/m"),
        ({"m": 3}, {"m": 4}, "/m"),
        ({"m": [1, {"k": "x"}]}, {"m": [1, {"k": "y"}]}, "/m/1/k"),
        ({"m": None}, {"m": {}}, "/m"),
        ({"m": []}, {"m": ()}, "/m"),
        ({"m": {}}, {"m": []}, "/m"),
        (Point(torch.ones(1), "a"), {"where": torch.ones(1), "name": "a"}, "the top"),
        (torch.ones(1), 1.0, "the top"),
        ({}, {"x": 1}, "the top"),
    ],
)
def test_trees_that_differ_are_refused_with_the_path(a: Any, b: Any, path: str) -> None:
    with pytest.raises(TreeError, match=f"differ at {path}:"):
        tree.add(a, b)
    with pytest.raises(TreeError, match=f"differ at {path}:"):
        mean([a, b], [1, 1])


@pytest.mark.parametrize("function", [tree.add, tree.sub])
@pytest.mark.parametrize("shape", [(1,), (), (2, 8), (1, 8)])
def test_tensors_of_other_shapes_are_not_broadcast(function: Any, shape: tuple[int, ...]) -> None:
    a = {"w": torch.ones(3), "b": torch.ones(8)}
    with pytest.raises(
        TreeError, match=r"at /b the first has \[8\] and the second \[" + ", ".join(map(str, shape))
    ):
        function(a, {"w": torch.ones(3), "b": torch.ones(shape)})


def test_the_difference_of_two_dicts_is_named_in_few_words() -> None:
    many = {f"layer{i}": torch.ones(1) for i in range(20)}
    said = (
        "the second dict lacks 'layer0', 'layer1', 'layer2', 'layer3', 'layer4', ... and has in addition 'x'$"
    )
    with pytest.raises(TreeError, match=said):
        tree.add(many, {"x": torch.ones(1)})
    with pytest.raises(TreeError, match=r"at the top: a dict and None$"):
        tree.add(many, None)


def test_keys_in_another_order_are_matched_by_name() -> None:
    a = {"x": torch.tensor([1.0]), "y": torch.tensor([2.0])}
    b = {"y": torch.tensor([20.0]), "x": torch.tensor([10.0])}
    actual = tree.add(a, b)
    assert (float(actual["x"]), float(actual["y"]), list(actual)) == (11.0, 22.0, ["x", "y"])


def test_registered_classes_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Point(torch.ones(1), "a").name = "b"


def test_remembered_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_SIZES", {})
    for k in range(5000):
        message = {"clip": 0.5 + k, "x": torch.zeros(3)}
        assert tree.encoded_size(message) == len(tree.encode(message))
    assert len(tree._SIZES) <= 4096
