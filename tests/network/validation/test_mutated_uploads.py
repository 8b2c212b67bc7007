"""Uploads changed at random: refused, or harmless; never another error, never a server's state that is not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.linalg.delta import DeltaForm
from fedlowrank.linalg.pair import Pair
from tests.network.validation.attacked_rounds import CASES, at, judged, outline, paths, put, situation
from tests.support.local_network import fuzz

# -- bytes

names = st.sampled_from(sorted(CASES))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_what_is_honest_passes(name: str) -> None:
    s = situation(name)
    data = tree.encode(s.upload)
    assert tree.equal(judged(name, data), s.upload)
    assert not s.sent(s.upload)[1]


@pytest.mark.full
@fuzz(150)
@given(names, st.data())
def test_bytes_cut_short_or_with_more_behind(name: str, data: st.DataObject) -> None:
    whole = tree.encode(situation(name).upload)
    assert judged(name, whole[: data.draw(st.integers(0, len(whole) - 1))]) is None
    assert judged(name, whole + data.draw(st.binary(min_size=1, max_size=20))) is None


@pytest.mark.full
@fuzz(150)
@given(
    names,
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=6),
    st.booleans(),
)
def test_flipped_bits(name: str, flips: list[tuple[float, int]], in_header: bool) -> None:
    data = bytearray(tree.encode(situation(name).upload))
    size = 8 + int.from_bytes(data[:8], "little") if in_header else len(data)
    for where, bits in flips:
        data[int(where * size)] ^= bits
    judged(name, bytes(data))


@pytest.mark.full
@fuzz(150)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\0" * 8)
@example(b"\xff" * 64)
@example((2**63).to_bytes(8, "little") + b"{}")
@example((2**16).to_bytes(8, "little") + b"{")
def test_bytes_of_something_else(data: bytes) -> None:
    assert judged("fedavg", data) is None


@pytest.mark.full
def test_another_method_s_upload_is_refused() -> None:
    for name in CASES:
        for other in CASES:
            passed = judged(name, tree.encode(situation(other).upload)) is not None
            # FedAvg and FedDyn both send a whole model, and so does FedKD's client where factors would not be
            # smaller
            whole = passed and {name, other} <= {"fedavg", "feddyn", "fedkd"}
            assert passed == (name == other or whole), (name, other)


# -- trees


OTHERS: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "a number": lambda _: 1.5,
    "a whole number": lambda _: 3,
    "a bool": lambda _: True,
    "a text": lambda _: "x",
    "an empty dict": lambda _: {},
    "a list": lambda _: [torch.ones(2)],
    "in a list": lambda v: [v],
    "in a dict": lambda v: {"a": v},
    "a class": lambda v: Pair(torch.ones(2, 2), torch.ones(2, 2)),
    "a class of settings": lambda _: DeltaForm("exact"),
    "a deep tree": lambda v: functools.reduce(lambda inner, _: [inner], range(200), v),
}
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "of another type": lambda t: t.to(torch.float64 if t.dtype != torch.float64 else torch.float32),
    "of half precision": lambda t: t.to(torch.float16 if t.dtype != torch.float16 else torch.int8),
    "of whole numbers": lambda t: t.to(torch.int32),
    "of bools": lambda t: t.to(torch.bool) if t.dtype != torch.bool else t.to(torch.uint8),
    "of eight bits": lambda t: t.to(torch.float8_e4m3fn),
    "without a dimension": lambda t: t.reshape(-1)[:1].reshape(()),
    "of one, which would broadcast": lambda t: t.reshape(-1)[:1],
    "with one more dimension": lambda t: t[None],
    "with one more at the end": lambda t: t[..., None],
    "flat": lambda t: t.reshape(-1) if t.ndim != 1 else t[None],
    "too long": lambda t: torch.cat([t.reshape(-1)] * 2),
    "empty": lambda t: t.reshape(-1)[:0],
    "empty in one dimension": lambda t: t[:0] if t.ndim else t.reshape(-1)[:0],
    "a wide row of few bytes": lambda t: t.new_zeros(0, 10**9),
}


@pytest.mark.full
@fuzz(150)
@given(names, st.sampled_from(sorted(OTHERS)), st.data())
def test_another_node(name: str, what: str, data: st.DataObject) -> None:
    upload = situation(name).upload
    path = data.draw(st.sampled_from(paths(upload)))
    changed = put(upload, path, OTHERS[what](at(upload, path)))
    if outline(changed, True) != outline(upload, True) or tree.skeleton(changed) != tree.skeleton(upload):
        assert judged(name, tree.encode(changed)) is None


@pytest.mark.full
@fuzz(150)
@given(names, st.sampled_from(sorted(TENSORS)), st.data())
def test_another_tensor(name: str, what: str, data: st.DataObject) -> None:
    upload = situation(name).upload
    path = data.draw(st.sampled_from([p for p in paths(upload) if isinstance(at(upload, p), Tensor)]))
    before = at(upload, path)
    after = TENSORS[what](before)
    if after.shape != before.shape or after.dtype != before.dtype:
        assert judged(name, tree.encode(put(upload, path, after))) is None


@pytest.mark.full
@fuzz(150)
@given(names, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_number_that_is_none(name: str, what: float, data: st.DataObject) -> None:
    upload = situation(name).upload
    floats = [
        p
        for p in paths(upload)
        if isinstance(t := at(upload, p), Tensor) and t.is_floating_point() and t.numel()
    ]
    path = data.draw(st.sampled_from(floats))
    changed = at(upload, path).clone()
    changed.view(-1)[data.draw(st.integers(0, changed.numel() - 1))] = what
    assert judged(name, tree.encode(put(upload, path, changed))) is None


@pytest.mark.full
@fuzz(150)
@given(names, st.data())
def test_keys_that_are_missing_or_too_many_or_in_another_order(name: str, data: st.DataObject) -> None:
    upload = situation(name).upload
    dicts = [p for p in paths(upload) if isinstance(at(upload, p), dict) and at(upload, p)]
    if not dicts:
        return
    path = data.draw(st.sampled_from(dicts))
    held = at(upload, path)
    key = data.draw(st.sampled_from(sorted(held)))
    assert judged(name, tree.encode(put(upload, path, {k: v for k, v in held.items() if k != key}))) is None
    assert (
        judged(
            name, tree.encode(put(upload, path, {**held, data.draw(st.text(max_size=5)) + "?": held[key]}))
        )
        is None
    )
    order = data.draw(st.permutations(list(held)))
    actual = judged(name, tree.encode(put(upload, path, {k: held[k] for k in order})))
    # the order is the template's again
    assert tree.equal(actual, upload)
