"""Factors for clients, norms of products, and what the server's delta refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.linalg.delta import (
    DeltaForm,
    initial_deltas,
    measure_product_norm,
    measure_tail_energy,
    split_svd,
    truncate_delta,
    update_deltas,
)
from fedlowrank.linalg.factored import compute_svd
from fedlowrank.linalg.low_rank_sum import add_low_rank, orthogonalize
from fedlowrank.linalg.pair import Pair
from fedlowrank.linalg.truncation import truncate_update

STATES = (DeltaForm("exact"), DeltaForm("capped", cap=9), DeltaForm("dense"), DeltaForm("auto"))


def rand(rng: np.random.Generator, d: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(rng.normal(size=(d, k))).to(dtype)


def product(pair: Pair) -> np.ndarray:
    dense: np.ndarray = pair.b.double().numpy() @ pair.a.double().numpy()
    return dense


def best(w: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    cut: np.ndarray = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return cut


@pytest.mark.parametrize("near", [1.0, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("width", [3, 12])
def test_new_columns_near_the_span_of_the_old_are_made_orthogonal(near: float, width: int) -> None:
    rng = np.random.default_rng(15)
    basis = torch.from_numpy(np.linalg.qr(rng.normal(size=(2, 40, 9)))[0])
    inside = basis @ torch.from_numpy(rng.normal(size=(2, 9, width)))
    new = inside + near * torch.from_numpy(rng.normal(size=(2, 40, width)))
    q, c = orthogonalize(basis, new)
    whole = torch.cat([basis, q], -1)
    torch.testing.assert_close(whole @ c, new, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        q.mT @ q, torch.eye(width, dtype=q.dtype).expand(2, -1, -1), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(basis.mT @ q, torch.zeros(2, 9, width, dtype=q.dtype), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(12, 17), (17, 12)])
def test_a_stack_wider_than_the_matrix_keeps_small_components_orthogonal(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(16)
    u, v = (torch.from_numpy(np.linalg.qr(rng.normal(size=(1, n, 6)))[0]) for n in shape)
    s = torch.from_numpy(np.geomspace(1, 1e-11, 6))[None]
    left, right = (torch.from_numpy(rng.normal(size=(1, n, 8))) for n in shape)
    ((u1, s1, v1, _),) = add_low_rank(u, s, v, left * 10.0 ** -torch.arange(8), right * 10.0**-6, None)
    for f in (u1, v1):
        torch.testing.assert_close(f.mT @ f, torch.eye(12, dtype=f.dtype), rtol=0, atol=1e-13)
    expected = (u * s[:, None]) @ v.mT + (left * 10.0 ** -torch.arange(8)) @ (right * 10.0**-6).mT
    torch.testing.assert_close((u1 * s1) @ v1.mT, expected[0], rtol=0, atol=1e-14)


@given(
    st.integers(1, 6), st.integers(1, 7), st.sampled_from([0, 1, 3, 8]), st.sampled_from(["sqrt", "B", "A"])
)
def test_split_puts_the_singular_values_where_it_says_and_pads_with_zeros(
    d: int, k: int, rank: int, how: Any
) -> None:
    w = rand(np.random.default_rng(d + 7 * k), d, k)
    f = compute_svd(w)
    pair = split_svd(f, rank, how)
    assert (pair.b.shape, pair.a.shape) == ((d, rank), (rank, k))
    np.testing.assert_allclose(product(pair), best(w.numpy(), rank), atol=1e-13)
    r = min(rank, d, k)
    root = f.s[:r].sqrt()
    norms = {"sqrt": (root, root), "B": (f.s[:r], root**0), "A": (root**0, f.s[:r])}[how]
    torch.testing.assert_close(
        pair.b[:, :r].mT @ pair.b[:, :r], norms[0].square().diag(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(pair.a[:r] @ pair.a[:r].mT, norms[1].square().diag(), rtol=1e-12, atol=1e-12)
    assert not bool(pair.b[:, r:].any())
    assert not bool(pair.a[r:].any())


def test_norms_of_products_against_the_products() -> None:
    rng = np.random.default_rng(13)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        pairs = [Pair(rand(rng, 70, r, dtype), rand(rng, r, 50, dtype)) for r in (1, 5, 60)]
        assert [measure_product_norm(p) for p in pairs] == pytest.approx(
            [np.linalg.norm(product(p)) for p in pairs], rel=1e-13
        )
    assert measure_product_norm(Pair(torch.zeros(4, 2), torch.ones(2, 3))) == 0
    assert measure_product_norm(Pair(torch.ones(4, 0), torch.ones(0, 3))) == 0
    b, a = rand(rng, 40, 1), rand(rng, 1, 30)
    # [b b] [a; -a] = 0, where rounding may leave less than nothing
    for scale in (1.0, 0.1, 1 / 3):
        cancelled = Pair(torch.cat([b, scale * b], 1), torch.cat([a, -a / scale]))
        assert measure_product_norm(cancelled) < 1e-6 * measure_product_norm(Pair(b, a))


def good(d: int = 5, r: int = 2, k: int = 4) -> Pair:
    return Pair(torch.ones(d, r), torch.ones(r, k))


@pytest.mark.parametrize(
    ("ask", "error", "match"),
    [
        (lambda s: DeltaForm("dens"), ConfigError, "Did you mean 'dense'"),  # type: ignore[arg-type]
        (lambda s: DeltaForm(dtype="float16"), ConfigError, "Form.dtype"),  # type: ignore[arg-type]
        (lambda s: DeltaForm("capped", cap=0), ConfigError, "at least 1"),
        (lambda s: DeltaForm("exact", cap=5), ConfigError, "only kind = 'capped'"),
        (lambda s: initial_deltas({"w": (3, 4)}, DeltaForm(), 0), ConfigError, "r_max"),
        (lambda s: initial_deltas({"w": (3, 0)}, DeltaForm(), 1), TaskError, "'w' has a weight of shape"),
        (
            lambda s: update_deltas(s, {"layer.1": []}),
            TaskError,
            "no layer 'layer.1'. Did you mean 'layer.0'",
        ),
        (lambda s: update_deltas(s, {}, sent_ranks={"x": []}), TaskError, "no layer 'x'"),
        (
            lambda s: update_deltas(s, {"layer.0": [(1.0, good()), (1.0, good(k=5))]}),
            TaskError,
            "term 1: B .5, 2. and A .2, 5.",
        ),
        (
            lambda s: update_deltas(s, {"layer.0": [(1.0, Pair(torch.ones(5, 2), torch.ones(3, 4)))]}),
            TaskError,
            "no factors",
        ),
        (
            lambda s: update_deltas(s, {"layer.0": [(float("nan"), good())]}),
            ConfigError,
            "weights must be finite",
        ),
        (lambda s: update_deltas(s, {}, previous_weight=float("inf")), ConfigError, "weights must be finite"),
        (
            lambda s: update_deltas(s, {}, sent_ranks={"layer.0": [(1.0, -1)]}),
            ConfigError,
            "whole number of at least 0",
        ),
        (lambda s: truncate_delta(s["layer.0"], -1), ConfigError, "at least 0"),
        (lambda s: measure_tail_energy(s["layer.0"], [1, -2]), ConfigError, "at least 0"),
        (lambda s: split_svd(truncate_delta(s["layer.0"], 1), 1, "b"), ConfigError, "split"),  # type: ignore[arg-type]
        (lambda s: split_svd(truncate_delta(s["layer.0"], 1), -1), ConfigError, "at least 0"),
    ],
)
def test_what_cannot_be_is_refused(ask: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ask(initial_deltas({"layer.0": (5, 4)}, DeltaForm("exact"), 2))


@pytest.mark.parametrize("scale", [0.25, 3.0, -2.0])
@pytest.mark.parametrize("how", ["sqrt", "B", "A"])
def test_a_scale_divides_the_factors_as_the_singular_values_are_split(how: Any, scale: float) -> None:
    w = rand(np.random.default_rng(3), 6, 5)
    pair, plain = (split_svd(compute_svd(w), 2, how, s) for s in (scale, 1.0))
    np.testing.assert_allclose(scale * product(pair), best(w.numpy(), 2), atol=1e-13)
    # W = s·B A, where |s|^p divides B and |s|^(1 - p) divides A
    power = {"sqrt": 0.5, "B": 1.0, "A": 0.0}[how]
    torch.testing.assert_close(pair.a, plain.a / abs(scale) ** (1 - power), rtol=1e-14, atol=0)
    torch.testing.assert_close(pair.b, np.sign(scale) * plain.b / abs(scale) ** power, rtol=1e-14, atol=0)


def test_a_rank_may_be_a_whole_number_of_numpy() -> None:
    state = initial_deltas({"w": (5, 4)}, DeltaForm("exact"), np.int64(2))
    state = update_deltas(state, {"w": [(1.0, good())]})
    rank = np.int64(1)
    assert tree.equal(truncate_delta(state["w"], rank), truncate_delta(state["w"], 1))
    assert measure_tail_energy(state["w"], [rank]) == measure_tail_energy(state["w"], [1])
    f = truncate_delta(state["w"], 2)
    assert tree.equal(split_svd(f, rank), split_svd(f, 1))
    assert truncate_update(good(), rank).pair.rank == 1
    after = [update_deltas(state, {}, sent_ranks={"w": [(1.0, r)]})["w"] for r in (rank, 1)]
    assert tree.equal(after[0].dense(), after[1].dense())


@pytest.mark.parametrize("form", STATES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_uploads_that_are_not_finite_are_refused_by_layer(form: DeltaForm, bad: float) -> None:
    state = initial_deltas({"fine": (30, 20), "broken": (30, 20)}, form, 2)
    b = torch.ones(30, 2, dtype=torch.float64)
    b[3, 1] = bad
    pair = Pair(b, torch.ones(2, 20))
    with pytest.raises(TaskError, match="'broken' is not finite"):
        update_deltas(state, {"fine": [(1.0, good(30, 2, 20))], "broken": [(1.0, pair)]})


def test_columns_that_are_vectors_of_the_basis_are_completed() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    basis, new = eye[None, :, [0, 2]], torch.stack([3 * eye[:, 0], eye[:, 2] - eye[:, 0], eye[:, 4]], 1)[None]
    q, c = orthogonalize(basis, new)
    whole = torch.cat([basis, q], -1)
    torch.testing.assert_close(whole.mT @ whole, torch.eye(5, dtype=q.dtype)[None])
    torch.testing.assert_close(whole @ c, new)
