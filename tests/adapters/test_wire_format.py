"""Lossy wires against numpy, with bounds that hold for what is received."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlowrank.adapters.wire_format import Quantized, Rounded, WireType, pack_factors, unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.linalg.pair import Pair

entries = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -3e-42, 2.0**-133, 1e-38, 1e36, -1.0, 127.0]).map(
        lambda x: float(np.float32(x))
    ),
)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 7))


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    d, r, k = draw(shapes)
    b, a = (draw(hnp.arrays(np.float32, shape, elements=entries)) for shape in ((d, r), (r, k)))
    return Pair(torch.from_numpy(b), torch.from_numpy(a))


def through(pair: Pair, wire: WireType) -> Pair:
    # over the real bytes
    return unpack_factors(tree.decode(tree.encode(pack_factors({"a.b": pair}, wire))))["a.b"]


def slices(pair: Pair) -> list[np.ndarray]:
    """Columns of B and rows of A, in float64."""
    return [*pair.b.double().numpy().T, *pair.a.double().numpy()]


@given(pairs())
def test_int8_is_off_by_at_most_half_a_scale_and_keeps_zeros(pair: Pair) -> None:
    packed = pack_factors({"w": pair}, "int8")["w"]
    assert isinstance(packed, Quantized)
    assert {packed.b.dtype, packed.a.dtype} == {torch.int8}
    assert {packed.b_scale.dtype, packed.a_scale.dtype} == {torch.float32}
    got = through(pair, "int8")
    assert (got.b.dtype, got.b.shape, got.a.shape) == (torch.float32, pair.b.shape, pair.a.shape)
    scales = [*packed.b_scale.double().numpy(), *packed.a_scale.double().numpy()]
    for x, y, scale in zip(slices(pair), slices(got), scales, strict=True):
        largest = np.abs(x).max()
        # a scale has 17 bits, rounded up; below 2^-133 they would not fit a float32
        assert largest / 127 * (1 - 1e-15) <= scale <= max(largest / 127 * (1 + 2.0**-16), 2.0**-133)
        assert np.all(np.abs(x - y) <= scale / 2)
        assert np.all(y[x == 0] == 0)
        assert np.all(np.isfinite(y))


@given(pairs(), st.sampled_from(get_args(WireType)))
def test_a_second_passage_changes_nothing(pair: Pair, wire: WireType) -> None:
    once = through(pair, wire)
    twice = through(once, wire)
    assert torch.equal(once.b, twice.b)
    assert torch.equal(once.a, twice.a)


def test_int8_by_hand() -> None:
    b = torch.tensor([[127.0, 0.0], [-1.4, 0.0], [63.5, 0.0], [0.4, 0.0]])
    a = torch.tensor([[0.0, 2.54, -1.27, 0.05], [1.0, 1.0, 0.0, -1.0]])
    packed = pack_factors({"w": Pair(b, a)}, "int8")["w"]
    assert isinstance(packed, Quantized)
    # a column for each component of B, a row for each of A; halves to even
    assert packed.b.tolist() == [[127, 0], [-1, 0], [64, 0], [0, 0]]
    assert packed.a.tolist() == [[0, 127, -63, 2], [127, 127, 0, -127]]
    assert packed.b_scale.tolist() == [1.0, 0.0]
    np.testing.assert_allclose(packed.a_scale.numpy(), [0.02, 1 / 127], rtol=2.0**-16)


@given(pairs())
def test_bfloat16_is_rounded_to_nearest(pair: Pair) -> None:
    got = through(pair, "bfloat16")
    for mine, x in ((got.b, pair.b), (got.a, pair.a)):
        # the upper half of the bits of a float32, half a unit added (to even in a tie)
        bits = x.numpy().view(np.uint32).astype(np.uint64)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        np.testing.assert_array_equal(mine.numpy(), upper.astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("wire", get_args(WireType))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factors_arrive_in_the_type_that_they_had(dtype: torch.dtype, wire: WireType) -> None:
    generator = torch.Generator().manual_seed(0)
    pair = Pair(*(torch.randn(s, generator=generator).to(dtype) for s in ((5, 2), (2, 3))))
    got = through(pair, wire)
    assert (got.b.dtype, got.a.dtype) == (dtype, dtype)
    for sent, actual in ((pair.b, got.b), (pair.a, got.a)):
        lost = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 1 / 127}[wire] * float(sent.abs().max())
        # and once more the rounding of the type itself
        lost += float(torch.finfo(dtype).eps) * float(sent.abs().max()) if lost else 0.0
        assert float((sent.double() - actual.double()).abs().max()) <= lost


def test_a_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        TaskError, match="layer 'w' are of type 'int64'; known are float64, float32, bfloat16"
    ):
        unpack_factors({"w": Rounded(torch.ones(3, 1), torch.ones(1, 2), "int64")})
    with pytest.raises(TaskError, match="layer 'w' are of type int64"):
        pack_factors({"w": Pair(torch.ones(3, 1).long(), torch.ones(1, 2).long())}, "int8")


def test_sizes_on_the_wire() -> None:
    pair = {"w": Pair(torch.randn(700, 8), torch.randn(8, 500))}
    sizes = {wire: tree.encoded_size(pack_factors(pair, wire)) for wire in get_args(WireType)}
    numbers = 1200 * 8
    for wire, data in (("float32", 4 * numbers), ("bfloat16", 2 * numbers), ("int8", numbers + 2 * 8 * 4)):
        assert data < sizes[wire] < data + 600


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    good = torch.ones(3, 2)
    for bad, wires in (
        (float("nan"), ("bfloat16", "int8")),
        (float("inf"), ("bfloat16", "int8")),
        (3.4e38, ("bfloat16",)),
    ):
        for wire in wires:
            b = good.clone()
            b[1, 1] = bad
            with pytest.raises(TaskError, match=f"B of the layer 'x/y' .* {wire}"):
                pack_factors({"x/y": Pair(b, good.mT)}, wire)
            with pytest.raises(TaskError, match="A of the layer 'x/y'"):
                pack_factors({"x/y": Pair(good, b.mT)}, wire)
    with pytest.raises(TaskError, match="too large"):
        pack_factors({"w": Pair(good.double() * 1e200, good.mT)}, "int8")


def test_rounding_beyond_the_type_of_the_factors_and_unknown_wires_are_refused() -> None:
    # 65500 is a float16, and the nearest bfloat16 is 65536
    pair = Pair(torch.full((2, 1), 65500.0, dtype=torch.float16), torch.ones(1, 2, dtype=torch.float16))
    with pytest.raises(TaskError, match=r"B of the layer 'w' has values .* for their own type"):
        pack_factors({"w": pair}, "bfloat16")
    assert through(pair, "int8").b.isfinite().all()
    with pytest.raises(ConfigError, match="'fp8' is no wire"):
        pack_factors({"w": pair}, "fp8")  # type: ignore[arg-type]
