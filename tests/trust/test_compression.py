"""Stages of compression against numpy, error feedback, and messages of hostile peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params, TreeError
from fedlowrank.trust.compression import (
    Compressed,
    compress,
    decompress,
    parse_stages,
    stage_bytes,
    with_feedback,
)
from fedlowrank.trust.stages import BFloat16, Int8, LowRankStage, TopK
from fedlowrank.trust.updates import restore_compared

KEY = Key((0, "compression"))
TEXTS = [
    "",
    "bfloat16",
    "int8",
    "top_k:0.05",
    "top_k:0.3",
    "top_k:1",
    "low_rank:1",
    "low_rank:2",
    "top_k:0.1 + int8",
    "top_k:0.01 + bfloat16",
    "low_rank:2 + int8",
    "low_rank:1 + top_k:0.5 + bfloat16",
    "low_rank:2 + top_k:0.25 + int8",
]
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (6, 3, 3, 3),
    "bias": (6,),
    "scalar": (),
    "none": (0,),
    "no.rows": (0, 4),
    "no.columns": (4, 0),
    "w": (9, 12),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_update(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Params:
    shapes = enumerate(SHAPES.items())
    return {p: (noise(*s, seed=100 * seed + i) * scale).to(dtype) for i, (p, s) in shapes}


def travel(compressed: Compressed) -> Compressed:
    actual = tree.decode(tree.encode(compressed))
    assert isinstance(actual, Compressed)
    return actual


def through(text: str, update: Params, key: Key = KEY) -> Params:
    stages = parse_stages(text)
    return decompress(stages, travel(compress(stages, update, key)), update)


def flatten(update: Params) -> np.ndarray[Any, Any]:
    """All entries in the order of paths, in float64."""
    return np.concatenate([update[p].double().numpy().reshape(-1) for p in sorted(update)])


# stages as text


def test_stages_are_read_from_left_to_right() -> None:
    assert parse_stages("low_rank:4+top_k:0.05 + int8") == (LowRankStage(4), TopK(0.05), Int8())
    assert parse_stages("  bfloat16 ") == (BFloat16(),)
    assert parse_stages("") == parse_stages("  ") == ()


@pytest.mark.parametrize("text", TEXTS)
def test_names_are_what_is_read(text: str) -> None:
    stages = parse_stages(text)
    assert parse_stages(" + ".join(s.name for s in stages)) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:0.1", "Did you mean 'top_k'"),
        ("in8", "Did you mean 'int8'"),
        ("zip", "Known: 'bfloat16', 'int8', 'low_rank', 'top_k'"),
        ("int8 +", "'' is no stage"),
        ("+", "'' is no stage"),
        ("TOP_K:0.1", "is no stage"),
        ("top_k", "write top_k:SHARE"),
        ("top_k:", "write top_k:SHARE"),
        ("top_k:many", "write top_k:SHARE"),
        ("top_k:0.1:2", "write top_k:SHARE"),
        ("top_k:0", r"'top_k:0' is no stage; write top_k:SHARE with a share in \(0, 1\]"),
        ("top_k:-0.1", "write top_k:SHARE"),
        ("top_k:1.01", "write top_k:SHARE"),
        ("top_k:nan", "write top_k:SHARE"),
        ("top_k:inf", "write top_k:SHARE"),
        ("low_rank", "write low_rank:RANK"),
        ("low_rank:0", "write low_rank:RANK"),
        ("low_rank:-1", "write low_rank:RANK"),
        ("low_rank:2.0", "write low_rank:RANK"),
        ("low_rank:x", "write low_rank:RANK"),
        ("int8:4", "'int8:4' is no stage; write int8"),
        ("bfloat16:", "write bfloat16"),
        ("int8 + top_k:0.1", "top_k cannot follow int8"),
        ("bfloat16 + low_rank:2", "low_rank cannot follow bfloat16"),
        ("bfloat16 + int8", "int8 cannot follow bfloat16"),
        ("int8 + bfloat16", "bfloat16 cannot follow int8"),
        ("int8 + int8", "int8 cannot follow int8"),
        ("top_k:0.1 + low_rank:2", "low_rank cannot follow top_k"),
        ("top_k:0.1 + top_k:0.1", "top_k cannot follow top_k"),
        ("low_rank:2 + low_rank:1", "low_rank cannot follow low_rank"),
    ],
)
def test_wrong_stages_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_stages(text)


def test_wrong_parameters_are_refused_without_a_text() -> None:
    for make in (
        lambda: TopK(0.0),
        lambda: TopK(math.nan),
        lambda: LowRankStage(0),
        lambda: LowRankStage(True),
    ):
        with pytest.raises(ConfigError):
            make()


# numbers against numpy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_is_the_nearest(dtype: torch.dtype) -> None:
    update = make_update(dtype=dtype)
    got = through("bfloat16", update)
    x, y = flatten(update), flatten(got)
    # bfloat16 has 8 significant bits
    spacing = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    assert np.array_equal(y, np.round(x / spacing) * spacing)
    assert all(got[p].dtype == dtype and got[p].shape == t.shape for p, t in update.items())


def test_bfloat16_leaves_types_of_two_bytes() -> None:
    update = make_update(dtype=torch.float16)
    assert tree.equal(through("bfloat16", update), update)


def test_int8_by_hand() -> None:
    w = torch.tensor([[127.0, -3.0, 0.0], [0.0, 0.0, 0.0], [0.0, -0.5, 0.25]])
    message = compress((Int8(),), {"w": w, "v": torch.tensor([2.0, -254.0]), "s": torch.tensor(5.0)}, KEY)
    # in the order of paths: s, v, then three rows of w
    scales = message.sides[0]
    assert scales.dtype == torch.float32
    assert scales.tolist()[:4] == [pytest.approx(5 / 127, rel=2**-16), 2.0, 1.0, 0.0]
    assert message.values["w"].dtype == torch.int8
    assert message.values["w"][:2].tolist() == [[127, -3, 0], [0, 0, 0]]
    assert message.values["w"][2, 0] == 0
    assert message.values["v"].tolist() == [1, -127]
    assert message.values["s"].shape == ()


@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_one_of_the_two_nearest_multiples_of_its_scale(scale: float, dtype: torch.dtype) -> None:
    update = {p: t for p, t in make_update(1, dtype, scale).items() if t.numel()}
    update["w"][2] = 0
    stages = parse_stages("int8")
    message = travel(compress(stages, update, KEY))
    got, at = decompress(stages, message, update), 0
    for path in sorted(update):
        rows = SHAPES[path][0] if len(SHAPES[path]) > 1 else 1
        x, y = (t[path].double().numpy().reshape(rows, -1) for t in (update, got))
        scales = message.sides[0][at : at + len(x)].double().numpy()
        at += len(x)
        largest = np.abs(x).max(1)
        assert np.all(scales >= largest / 127 * (1 - 1e-15))
        assert np.all(
            scales <= np.where(largest > 0, np.maximum(largest / 127 * (1 + 2.0**-16), 2.0**-133), 0)
        )
        levels = np.divide(x, scales[:, None], out=np.zeros_like(x), where=scales[:, None] > 0)
        nearest = np.stack([np.floor(levels), np.ceil(levels)]) * scales[:, None]
        # exactly: a scale times a level is a float32
        assert np.all((y == nearest).any(0))
        assert np.all(y[x == 0] == 0)
    assert at == len(message.sides[0])


@pytest.mark.full
def test_int8_rounds_without_bias() -> None:
    w = torch.linspace(-1, 1, 43, dtype=torch.float64)
    scale = float(compress((Int8(),), {"w": w}, KEY).sides[0])
    draws = torch.stack([through("int8", {"w": w}, KEY / i)["w"] for i in range(700)])
    # an entry is above its lower multiple with the chance that it is away from it, in units of the scale
    chance = w / scale - (w / scale).floor()
    error = scale * (chance * (1 - chance) / len(draws)).sqrt()
    assert bool(((draws.mean(0) - w).abs() <= 5 * error + 1e-12).all())
    assert torch.allclose(draws.std(0), error * len(draws) ** 0.5, rtol=0, atol=0.05 * scale)


def test_int8_depends_on_the_key_and_the_path_alone() -> None:
    w = noise(5, 40)
    (stage,) = stages = parse_stages("int8")
    a, b = compress(stages, {"a": w, "b": w}, KEY), compress(stages, {"b": w, "a": w}, KEY)
    assert tree.equal(a, b)
    assert not torch.equal(a.values["a"], a.values["b"])
    assert not tree.equal(a, compress(stages, {"a": w, "b": w}, KEY / 1))
    assert torch.equal(stage.encode({"a": w}, KEY)[0]["a"], a.values["a"])


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 0.5, 0.999, 1.0])
def test_top_k_is_that_of_numpy(share: float) -> None:
    update = make_update(2)
    x, y = flatten(update), flatten(through(f"top_k:{share}", update))
    k = math.ceil(share * len(x))
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    expected = np.zeros_like(x)
    expected[kept] = x[kept]
    assert np.array_equal(y, expected)


def test_top_k_takes_the_first_of_equals_in_the_order_of_paths() -> None:
    update = {"b": torch.tensor([1.0, -2.0, 1.0]), "a": torch.tensor([[-1.0, 1.0], [0.5, 1.0]])}
    got = through("top_k:0.42", update)
    assert got["a"].tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    assert got["b"].tolist() == [0.0, -2.0, 0.0]
    assert list(got) == ["b", "a"]


def test_the_share_is_taken_as_it_is_written() -> None:
    # 0.07 * 100 is 7.000000000000001 in floating point
    assert compress((TopK(0.07),), {"w": torch.ones(100)}, KEY).values["entries"].shape == (7,)
    assert compress((TopK(0.0701),), {"w": torch.ones(100)}, KEY).values["entries"].shape == (8,)
    assert compress((TopK(1e-9),), {"w": torch.ones(100)}, KEY).values["entries"].shape == (1,)


@pytest.mark.parametrize(("share", "dtype"), [(0.031, torch.int32), (0.032, torch.bool), (0.5, torch.bool)])
def test_positions_take_the_smaller_form(share: float, dtype: torch.dtype) -> None:
    # 1000 bits are 125 bytes, and so are 31.25 indices
    update = {"w": noise(1000)}
    (positions,) = compress((TopK(share),), update, KEY).sides
    assert positions.dtype == dtype
    assert tree.nbytes(positions) == min(125, 4 * round(share * 1000))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_is_the_truncated_decomposition_of_numpy(rank: int, dtype: torch.dtype) -> None:
    update = make_update(4, dtype)
    got = through(f"low_rank:{rank}", update)
    for path, shape in SHAPES.items():
        if path not in ("conv", "w"):
            assert torch.equal(got[path], update[path])
            continue
        u, s, vt = np.linalg.svd(update[path].double().numpy().reshape(shape[0], -1), full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ vt[:rank]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert np.allclose(got[path].double().numpy().reshape(shape[0], -1), best, atol=tolerance, rtol=0)


def test_low_rank_by_iteration_and_of_huge_numbers() -> None:
    a, b = noise(200, 3).double(), noise(3, 150).double()
    for scale in (1.0, 1e-200, 1e200):
        w = a @ b * scale
        assert torch.allclose(through("low_rank:4", {"w": w})["w"], w, rtol=0, atol=1e-10 * scale)


def test_low_rank_leaves_what_factors_would_not_make_smaller() -> None:
    # 2 (4 + 4) = 16 numbers for 16; 2 (4 + 5) = 18 for 20
    update = {"same": noise(4, 4), "less": noise(4, 5)}
    values = compress((LowRankStage(2),), update, KEY).values
    assert {p: tuple(t.shape) for p, t in values.items()} == {
        "less/left": (2, 4),
        "less/right": (2, 5),
        "same/whole": (4, 4),
    }


def test_paths_of_factors_do_not_collide() -> None:
    update = {"w": noise(9, 9), "w/left": noise(3), "w/whole": noise(2), "w/left/whole": noise(9, 9)}
    got = through("low_rank:1", update)
    assert torch.equal(got["w/left"], update["w/left"])
    assert torch.equal(got["w/whole"], update["w/whole"])


# both sides have the same bits


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_both_sides_decode_the_same_bits(text: str, dtype: torch.dtype) -> None:
    update, stages = make_update(5, dtype), parse_stages(text)
    message = compress(stages, update, KEY)
    here = decompress(stages, message, update)
    # the server knows the form alone, in an order of its own
    like = {p: torch.zeros_like(update[p]) for p in reversed(update)}
    there = decompress(stages, travel(message), like)
    assert list(here) == list(update)
    assert list(there) == list(like)
    for path, x in update.items():
        assert (here[path].dtype, here[path].shape) == (x.dtype, x.shape)
        assert tree.equal(here[path], there[path])


def test_low_rank_multiplies_without_a_matrix_product() -> None:
    update, stages = {"w": noise(30, 40)}, parse_stages("low_rank:5")
    message = compress(stages, update, KEY)
    left, right = (message.values[f"w/{name}"].numpy() for name in ("left", "right"))
    total = np.zeros((30, 40), np.float32)
    for column, row in zip(left, right, strict=True):
        total = total + np.outer(column, row)
    assert np.array_equal(decompress(stages, message, update)["w"].numpy(), total)


def test_types_may_be_mixed() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    update = {p: t.to(dtypes[i % 4]) for i, (p, t) in enumerate(make_update(6).items())}
    for text in TEXTS:
        got = through(text, update)
        assert [t.dtype for t in got.values()] == [t.dtype for t in update.values()]
    assert tree.equal(through("top_k:1", update), update)
    assert tree.equal(through("", update), update)


@pytest.mark.full
def test_strides_and_gradients_change_nothing() -> None:
    w = noise(12, 9)
    for text in TEXTS:
        plain = through(text, {"w": w.mT.contiguous()})
        assert tree.equal(through(text, {"w": w.mT.clone(memory_format=torch.preserve_format)}), plain)
        update, stages = {"w": w.mT.contiguous().requires_grad_()}, parse_stages(text)
        message, residual = with_feedback(stages, update, None, KEY)
        by_hand = compress(stages, update, KEY)
        assert tree.equal(message, by_hand)
        actual = [*tree.tensors(by_hand), *tree.tensors(decompress(stages, by_hand, update)), residual["w"]]
        assert not any(t.requires_grad for t in actual)


def test_an_empty_update() -> None:
    for text in TEXTS:
        assert through(text, {}) == {}
        assert tree.equal(through(text, {"w": torch.zeros(0, 3)}), {"w": torch.zeros(0, 3)})


# form and size


def special_values(shape: tuple[int, ...], kind: int) -> Tensor:
    if kind == 0:
        return torch.zeros(shape)
    if kind == 1:
        return torch.ones(shape)
    x = noise(*shape, seed=kind)
    return x if kind == 2 else x * (x > 1.5) * 1e-20


@pytest.mark.full
@given(
    st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=5),
    st.sampled_from(TEXTS),
)
def test_the_form_depends_on_shapes_alone(shapes: list[tuple[int, ...]], text: str) -> None:
    stages = parse_stages(text)
    forms = []
    for kind in range(4):
        update = {f"p{i}": special_values(shape, kind) for i, shape in enumerate(shapes)}
        message = compress(stages, update, KEY / kind)
        forms.append(tree.signature(message))
        got = decompress(stages, travel(message), update)
        assert [t.shape for t in got.values()] == [t.shape for t in update.values()]
        if kind == 0:
            assert all(bool((t == 0).all()) for t in got.values())
    assert len(set(forms)) == 1


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_those_of_the_encoded_tree(text: str) -> None:
    update, stages = make_update(7), parse_stages(text)
    actual = stage_bytes(stages, update, KEY)
    expected = {"update": len(tree.encode(update))}
    for i, stage in enumerate(stages):
        expected[stage.name] = len(tree.encode(compress(stages[: i + 1], update, KEY)))
    assert actual == expected
    assert list(actual) == ["update", *(s.name for s in stages)]


def test_savings_of_a_large_update() -> None:
    update = {"w": noise(300, 400), "b": noise(300)}
    sizes = stage_bytes(parse_stages("low_rank:8 + top_k:0.5 + int8"), update, KEY)
    n, factors = 120300, 8 * 700 + 300
    k = factors // 2
    assert sizes["update"] == pytest.approx(4 * n, abs=600)
    assert sizes["low_rank:8"] == pytest.approx(4 * factors, abs=600)
    assert sizes["top_k:0.5"] == pytest.approx(4 * k + factors / 8, abs=600)
    assert sizes["int8"] == pytest.approx(k + 4 + factors / 8, abs=600)


# error feedback


@pytest.mark.few(2)
@pytest.mark.parametrize("text", [t for t in TEXTS if t])
def test_what_is_decoded_and_the_residual_add_up_to_all_updates(text: str) -> None:
    stages, residual = parse_stages(text), None
    sent = sum_of = tree.zeros_like(make_update(dtype=torch.float64))
    for step in range(30):
        update = make_update(100 + step, torch.float64)
        message, residual = with_feedback(stages, update, residual, KEY / step)
        sent = tree.add(sent, decompress(stages, travel(message), update))
        sum_of = tree.add(sum_of, update)
    assert residual is not None
    # int8 and bfloat16 decode to float32 numbers exactly, so only the sums round
    assert np.allclose(flatten(tree.add(sent, residual)), flatten(sum_of), rtol=0, atol=1e-11)
    assert not np.allclose(flatten(sent), flatten(sum_of), rtol=0, atol=1e-11) or text == "top_k:1"


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "text", ["top_k:1", "top_k:0.3", "low_rank:1", "int8", "low_rank:2 + top_k:0.5 + bfloat16"]
)
def test_a_model_of_half_precision_and_the_residual_add_up(text: str, dtype: torch.dtype) -> None:
    # updates are below half the distance of two numbers of the model
    stages, residual = parse_stages(text), None
    model = {"model": {p: 1 + t.abs() for p, t in make_update(1, dtype).items()}}
    end, start = flatten(model["model"]).astype(np.float64), flatten(model["model"]).astype(np.float64)
    for step in range(40):
        update = {tree.join_path("/model", p): t * 2e-4 for p, t in make_update(100 + step % 3).items()}
        reference = dict(tree.leaves(model))
        message, residual = with_feedback(stages, update, residual, KEY / step, reference)
        model = restore_compared(None, model, decompress(stages, travel(message), reference))
        end += flatten(update).astype(np.float64)
    assert {t.dtype for _, t in tree.leaves(model)} == {dtype}
    assert {t.dtype for t in (residual or {}).values()} == {torch.float32}
    assert np.allclose(flatten(model["model"]) + flatten(residual), end, rtol=0, atol=2e-6)
    # the model follows as near as its type and the stages allow
    assert np.abs(flatten(model["model"]) - start).max() > 1e-3


def test_feedback_sends_at_last_what_top_k_left_out() -> None:
    stages, update, residual = parse_stages("top_k:0.5"), {"w": torch.tensor([1.0, 0.4])}, None
    decoded = []
    for _ in range(3):
        message, residual = with_feedback(stages, update, residual, KEY)
        decoded.append(decompress(stages, message, update)["w"].tolist())
    assert residual is not None
    assert decoded == [[1, 0], [1, 0], [0, pytest.approx(1.2)]]
    assert residual["w"].tolist() == [1, 0]


def test_feedback_of_no_stage_loses_nothing() -> None:
    update = make_update()
    message, residual = with_feedback((), update, None, KEY)
    assert tree.equal(message.values, {p: update[p] for p in sorted(update)})
    assert not flatten(residual).any()


def test_a_residual_of_another_form_is_refused() -> None:
    update = {"w": torch.ones(3, 2)}
    for residual in ({}, {"w": torch.ones(2)}, {"w": torch.ones(3, 2).double()}, {"v": torch.ones(3, 2)}):
        with pytest.raises(TreeError):
            with_feedback((TopK(0.5),), update, residual, KEY)
    with pytest.raises(TreeError, match=r"/w is float32 \[2\] where float32 \[3, 2\] is expected"):
        with_feedback((TopK(0.5),), update, {"w": torch.ones(2)}, KEY)


# updates that cannot be compressed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_refused(text: str, number: float) -> None:
    update = make_update()
    update["conv"][2, 1, 0, 0] = number
    stages = parse_stages(text)
    for act in (compress, stage_bytes):
        with pytest.raises(TaskError, match="/conv that are not finite; lower the learning rate"):
            act(stages, update, KEY)
    with pytest.raises(TaskError, match="not finite"):
        with_feedback(stages, update, None, KEY)


@pytest.mark.parametrize("wrong", [torch.ones(2).int(), torch.ones(2) > 0, torch.ones(2) * 1j, 3.0, None])
def test_an_update_of_other_types_is_refused(wrong: Any) -> None:
    with pytest.raises(TaskError, match="the update of 'w' is of type"):
        compress((Int8(),), {"w": wrong}, KEY)


def test_numbers_too_large_for_a_stage_are_refused() -> None:
    largest = torch.finfo(torch.float32).max
    for text in ("bfloat16", "top_k:1 + bfloat16"):
        with pytest.raises(TaskError, match="too large for bfloat16"):
            compress(parse_stages(text), {"w": torch.tensor([largest])}, KEY)
    for number in (1e39, 1e300):
        with pytest.raises(TaskError, match="'w' has values that are too large for int8"):
            compress((Int8(),), {"w": torch.tensor([number], dtype=torch.float64)}, KEY)
    # 127 is what this scale is rounded up from
    through("int8", {"w": torch.tensor([largest * 0.999])})


# messages of hostile peers

Change = Callable[[Compressed], Any]


def with_values(**changes: Any) -> Change:
    return lambda c: replace(c, values={**c.values, **changes})


def with_sides(*sides: Any) -> Change:
    return lambda c: replace(c, sides=list(sides))


def positions(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda c: replace(c, sides=[change(c.sides[0].clone()), *c.sides[1:]])


def put(index: int, value: float | bool) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t.view(-1)[index] = value
        return t

    return change


DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

ANY_STAGE: list[Change] = [
    lambda c: None,
    lambda c: "top_k",
    lambda c: [c.values, c.sides],
    lambda c: {"values": c.values, "sides": c.sides},
    lambda c: c.values,
    lambda c: Compressed({}, c.sides),
    lambda c: Compressed(c.values, []) if c.sides else Compressed(c.values, [()]),
    lambda c: Compressed(c.values, [*c.sides, ()]),
    lambda c: Compressed(c.values, tuple(c.sides)),  # type: ignore[arg-type]
    lambda c: Compressed(list(c.values.values()), c.sides),  # type: ignore[arg-type]
    lambda c: Compressed(None, None),  # type: ignore[arg-type]
    lambda c: Compressed(c, c.sides),  # type: ignore[arg-type]
    lambda c: Compressed(DEEP, DEEP),
    lambda c: Compressed(c.values, [DEEP] * len(c.sides) or DEEP),
    lambda c: Compressed(dict.fromkeys(c.values, DEEP), c.sides),
    lambda c: Compressed(dict.fromkeys(c.values, 1.0), c.sides),  # type: ignore[arg-type]
    lambda c: Compressed({p: t.double().to(torch.int64) for p, t in c.values.items()}, c.sides),
    lambda c: Compressed({p: t[None] for p, t in c.values.items()}, c.sides),
    lambda c: Compressed({p: t.new_zeros(0) for p, t in c.values.items()}, c.sides),
    lambda c: Compressed({p: t.flatten().repeat(2) for p, t in c.values.items()}, c.sides),
    with_values(extra=torch.zeros(3)),
]


@pytest.mark.few(90)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("number", range(len(ANY_STAGE)))
def test_a_message_of_another_form_is_refused(text: str, number: int) -> None:
    stages = parse_stages(text)
    update = {"m": noise(11, 7), "v": noise(5)}
    hostile = ANY_STAGE[number](compress(stages, update, KEY))
    with pytest.raises(TreeError):
        decompress(stages, tree.decode(tree.encode(hostile)), update)


NAN, INF = math.nan, math.inf
FEW, MANY = "top_k:0.02", "top_k:0.5"
"""Of 82 entries: two indices, and a mask."""


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("", with_values(v=torch.full((5,), NAN))),
        ("bfloat16", with_values(v=torch.full((5,), INF, dtype=torch.bfloat16))),
        ("int8", positions(put(0, NAN))),
        ("int8", positions(put(7, -INF))),
        # finite, but not times a level of 127
        ("int8", positions(lambda t: t.fill_(3e38))),
        ("int8", positions(lambda t: t[:-1])),
        ("int8", positions(lambda t: t.repeat(2))),
        ("int8", positions(lambda t: t.double())),
        ("int8", positions(lambda t: t[:, None])),
        ("int8", with_sides(None)),
        (FEW, with_values(entries=torch.tensor([1.0, NAN]))),
        (FEW, positions(lambda t: torch.tensor([0, 82], dtype=torch.int32))),
        (FEW, positions(lambda t: torch.tensor([-1, 5], dtype=torch.int32))),
        (FEW, positions(lambda t: torch.tensor([5, 5], dtype=torch.int32))),
        (FEW, positions(lambda t: torch.tensor([6, 5], dtype=torch.int32))),
        (FEW, positions(lambda t: torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32))),
        (FEW, positions(lambda t: t.long())),
        (FEW, positions(lambda t: t.float())),
        (FEW, positions(lambda t: torch.zeros(82, dtype=torch.bool))),
        (FEW, positions(lambda t: t[:1])),
        (MANY, positions(lambda t: t.fill_(True))),
        (MANY, positions(lambda t: t.fill_(False))),
        (MANY, positions(lambda t: put(int(t.int().argmax()), False)(t))),
        (MANY, positions(lambda t: put(int(t.int().argmin()), True)(t))),
        (MANY, positions(lambda t: t[:-1])),
        (MANY, positions(lambda t: torch.cat([t, t]))),
        (MANY, positions(lambda t: t.nonzero().flatten().int())),
        ("low_rank:2", with_values(**{"m/left": torch.full((2, 11), NAN)})),
        (
            "low_rank:2",
            with_values(**{"m/left": torch.full((2, 11), 1e30), "m/right": torch.full((2, 7), 1e30)}),
        ),
        ("low_rank:2", with_values(**{"m/left": torch.zeros(3, 11), "m/right": torch.zeros(3, 7)})),
        ("low_rank:2", with_values(**{"m/left": torch.zeros(2, 110)})),
        ("low_rank:2 + top_k:0.5 + int8", with_sides((), torch.zeros(41, dtype=torch.int32), torch.ones(1))),
        ("low_rank:2 + top_k:0.5 + int8", with_sides((), torch.ones(41, dtype=torch.bool), torch.zeros(1))),
    ],
)
def test_a_message_of_impossible_numbers_is_refused(text: str, change: Change) -> None:
    stages = parse_stages(text)
    update = {"m": noise(11, 7), "v": noise(5)}
    honest = compress(stages, update, KEY)
    decompress(stages, travel(honest), update)
    with pytest.raises(TreeError):
        decompress(stages, tree.decode(tree.encode(change(honest))), update)


def test_every_honest_number_of_int8_is_accepted_and_decoded_in_bounds() -> None:
    update = {"m": noise(11, 7)}
    message = compress((Int8(),), update, KEY)
    lowest = replace(message, values={"m": torch.full((11, 7), -128, dtype=torch.int8)})
    got = decompress((Int8(),), lowest, update)["m"]
    # a scale for each slice along the shorter dimension
    assert torch.equal(got, -128 * message.sides[0][None, :].expand(11, 7))


def test_scales_of_rows_without_entries_must_be_finite() -> None:
    update = {"m": torch.zeros(3, 0)}
    message = compress((Int8(),), update, KEY)
    with pytest.raises(TreeError, match="numbers at /sides/0 that are not finite"):
        decompress((Int8(),), replace(message, sides=[torch.tensor([0.0, NAN, 0.0])]), update)
