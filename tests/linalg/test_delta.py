"""The server's delta against the recursion of FedHL on dense matrices in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank.adapters.wire_format import WireType, pack_factors, unpack_factors
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.linalg import delta as module
from fedlowrank.linalg import randomized_svd as sketch
from fedlowrank.linalg.delta import (
    Delta,
    DeltaForm,
    initial_deltas,
    measure_product_norm,
    measure_tail_energy,
    split_svd,
    truncate_delta,
    update_deltas,
)
from fedlowrank.linalg.pair import Pair

Matrix = np.ndarray
STATES = (DeltaForm("exact"), DeltaForm("capped", cap=99), DeltaForm("dense"), DeltaForm("auto"))
CLOSE = 1e-10


def best(w: Matrix, rank: int) -> Matrix:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    cut: Matrix = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return cut


def product(pair: Pair) -> Matrix:
    dense: Matrix = pair.b.double().numpy() @ pair.a.double().numpy()
    return dense


def off(found: Delta, wanted: Matrix, scale: float = 1.0) -> float:
    return float(np.linalg.norm(found.dense().double().numpy() - wanted) / max(scale, np.linalg.norm(wanted)))


def tidy(delta: Delta) -> None:
    """What a delta says of itself: orthonormal factors, canonical signs, descending values, energy."""
    eye = torch.eye(delta.rank, dtype=delta.u.dtype)
    eps = torch.finfo(delta.u.dtype).eps
    for f in (delta.u, delta.v):
        torch.testing.assert_close(f.mT @ f, eye, rtol=0, atol=200 * eps)
    assert delta.s.dtype == torch.float64
    assert bool((delta.s > 0).all())
    assert bool((delta.s.diff() <= 0).all())
    at = delta.u.abs().max(0).indices if delta.rank else torch.empty(0, dtype=torch.long)
    assert bool((delta.u[at, range(delta.rank)] > 0).all())
    expected = float(np.linalg.norm(delta.dense().double().numpy())) ** 2
    assert delta.energy == pytest.approx(expected, rel=1e3 * eps, abs=1e-300)


def rand(rng: np.random.Generator, d: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(rng.normal(size=(d, k))).to(dtype)


def upload(
    rng: np.random.Generator, w: Matrix, rank: int, noise: float, dtype: torch.dtype = torch.float64
) -> Pair:
    """The truncation of W, as a client trains it: near where it was, in a basis that is not orthogonal."""
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    b, a = np.zeros((w.shape[0], rank)), np.zeros((rank, w.shape[1]))
    r = min(rank, len(s))
    b[:, :r], a[:r] = u[:, :r] * np.sqrt(s[:r]), np.sqrt(s[:r])[:, None] * vt[:r]
    return Pair(*(torch.from_numpy(x + noise * rng.normal(size=x.shape)).to(dtype) for x in (b, a)))


def fedhl(w: Matrix, clients: Sequence[tuple[float, float, Pair]]) -> Matrix:
    """Algorithm 1, line 17: Σ p_i [W + s_i B_i A_i - W^{r_i}], of (p_i, s_i, pair)."""
    out = np.zeros_like(w)
    for p, scale, pair in clients:
        out += p * (w + scale * product(pair) - best(w, pair.rank))
    return out


def step(
    state: dict[str, Delta], clients: Sequence[tuple[float, float, Pair]], layer: str = "w"
) -> dict[str, Delta]:
    blocks = {layer: [(p * s, pair) for p, s, pair in clients]}
    return update_deltas(
        state,
        blocks,
        sent_ranks={layer: [(p, c.rank) for p, _, c in clients]},
        previous_weight=sum(p for p, _, _ in clients),
    )


@pytest.mark.full
@given(
    shape=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    scales=st.lists(st.sampled_from([0.25, 1.0, 2.0, 16.0]), min_size=5, max_size=5),
    dtypes=st.lists(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), min_size=5, max_size=5),
    noise=st.sampled_from([1e-3, 0.3, 1.0]),
    total=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 2**32 - 1),
)
@example((40, 61), [1, 1, 2], [1.0] * 5, [torch.float64] * 5, 1.0, 1.0, 0)
@example((13, 7), [7, 9, 3], [2.0] * 5, [torch.float32] * 5, 0.3, 1.0, 1)
def test_every_state_follows_the_dense_recursion(
    shape: tuple[int, int],
    ranks: list[int],
    scales: list[float],
    dtypes: list[torch.dtype],
    noise: float,
    total: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    states = [initial_deltas({"w": shape}, form, 9) for form in STATES]
    w = np.zeros(shape)
    for _ in range(7):
        sampled = [i for i in range(len(ranks)) if rng.random() < 0.7] or [0]
        p = rng.dirichlet(np.ones(len(sampled))) * total
        clients = [
            (float(q), scales[i], upload(rng, w / scales[i], ranks[i], noise, dtypes[i]))
            for q, i in zip(p, sampled, strict=True)
        ]
        w = fedhl(w, clients)
        states = [step(state, clients) for state in states]
        for state in states:
            tidy(state["w"])
            assert off(state["w"], w) < CLOSE, state["w"].state
            for rank, actual in zip(ranks, measure_tail_energy(state["w"], ranks), strict=True):
                energy = np.linalg.norm(w) ** 2
                assert actual == pytest.approx(
                    np.linalg.norm(w - best(w, rank)) ** 2, abs=1e-12 * max(1.0, energy)
                )
                assert actual >= 0


def test_a_dense_state_that_is_iterated_follows_it_too() -> None:
    """Large enough for the iteration, with a spectrum that decays and one that does not."""
    for decay in (0.5, 0.97):
        rng = np.random.default_rng(3)
        states, w = [initial_deltas({"w": (130, 90)}, form, 6) for form in STATES], np.zeros((130, 90))
        for _ in range(6):
            clients = []
            for p, rank in ((0.2, 6), (0.5, 3), (0.3, 1)):
                pair = upload(rng, w, rank, 0.2)
                clients.append((p, 1.0, Pair(pair.b * decay ** torch.arange(rank), pair.a)))
            w = fedhl(w, clients)
            states = [step(state, clients) for state in states]
            assert max(off(state["w"], w) for state in states) < CLOSE
        assert [state["w"].state for state in states] == ["exact", "capped", "dense", "dense"]


def test_the_order_of_clients_is_immaterial_and_equal_inputs_give_equal_factors() -> None:
    rng = np.random.default_rng(0)
    for form in STATES:
        state = step(
            initial_deltas({"w": (31, 24)}, form, 5), [(1.0, 1.0, Pair(rand(rng, 31, 9), rand(rng, 9, 24)))]
        )
        clients = [
            (p, 2.0, Pair(rand(rng, 31, r), rand(rng, r, 24))) for p, r in ((0.5, 5), (0.2, 3), (0.3, 1))
        ]
        one, other, again = (step(state, c)["w"] for c in (clients, clients[::-1], clients))
        torch.testing.assert_close(one.dense(), other.dense(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.u, other.u, rtol=0, atol=1e-9)
        assert tree.equal(one, again)


@pytest.mark.parametrize("form", STATES)
def test_with_equal_ranks_the_uploads_take_the_place_of_the_head_and_the_tail_stays(form: DeltaForm) -> None:
    rng = np.random.default_rng(1)
    first = Pair(rand(rng, 30, 8), rand(rng, 8, 22))
    state = step(initial_deltas({"w": (30, 22)}, form, 4), [(1.0, 1.0, first)])
    clients = [(p, 0.5, Pair(rand(rng, 30, 4), rand(rng, 4, 22))) for p in (0.3, 0.7)]
    tail = product(first) - best(product(first), 4)
    assert off(step(state, clients)["w"], sum(p * s * product(c) for p, s, c in clients) + tail) < 1e-13


@pytest.mark.parametrize("form", STATES)
def test_previous_0_replaces_and_the_components_that_all_hold_vanish(form: DeltaForm) -> None:
    rng = np.random.default_rng(2)
    state = update_deltas(
        initial_deltas({"w": (50, 40)}, form, 5), {"w": [(1.0, Pair(rand(rng, 50, 5), rand(rng, 5, 40)))]}
    )
    new = Pair(rand(rng, 50, 2), rand(rng, 2, 40))
    assert (
        off(update_deltas(state, {"w": [(-0.5, new)]}, previous_weight=0.0)["w"], -0.5 * product(new)) < 1e-13
    )
    turned = update_deltas(state, {}, sent_ranks={"w": [(1.0, 3)]}, previous_weight=0.4)["w"]
    w = state["w"].dense().numpy()
    assert off(turned, 0.4 * w - best(w, 3)) < 1e-13
    tidy(turned)
    # ten times a tenth is not 1 in floating point
    left = update_deltas(state, {"w": [(1.0, new)]}, sent_ranks={"w": [(0.1, 5)] * 10})["w"]
    assert left.rank == 2
    gone = update_deltas(state, {}, sent_ranks={"w": [(0.1, 5)] * 10})["w"]
    assert (gone.rank if form.kind != "dense" else gone.energy) == pytest.approx(0, abs=1e-25)
    same = update_deltas(
        state,
        {"w": [(0.0, new), (1.0, Pair(new.b * 0, new.a)), (1.0, Pair(rand(rng, 50, 0), rand(rng, 0, 40)))]},
    )
    assert off(same["w"], state["w"].dense().numpy()) < 1e-14
    assert same["w"].rank == 5


def test_subtracting_all_there_is_leaves_nothing_and_not_its_rounding() -> None:
    rng = np.random.default_rng(3)
    for dtype, shape in (("float64", (60, 45)), ("float32", (60, 45)), ("float64", (6, 5))):
        pair = Pair(rand(rng, shape[0], 4), rand(rng, 4, shape[1]))
        state = update_deltas(
            initial_deltas({"w": shape}, DeltaForm("exact", dtype=dtype), 4), {"w": [(1e6, pair)]}
        )
        assert update_deltas(state, {"w": [(-1e6, pair)]})["w"].rank == 0


def test_orthogonality_survives_many_rounds_close_to_the_servers_own_factors() -> None:
    rng = np.random.default_rng(4)
    state = step(
        initial_deltas({"w": (300, 200)}, DeltaForm("exact"), 4),
        [(1.0, 1.0, Pair(rand(rng, 300, 4), rand(rng, 4, 200)))],
    )
    for _ in range(10):
        sent = split_svd(truncate_delta(state["w"], 4), 4)
        # new columns that lie in the span of the old ones but for 1e-8 of them
        left = Pair(sent.b + 1e-7 * rand(rng, 300, 4), rand(rng, 4, 200))
        right = Pair(rand(rng, 300, 4), sent.a + 1e-7 * rand(rng, 4, 200))
        state = update_deltas(state, {"w": [(1.0, left), (0.5, right)]})
    assert state["w"].rank > 40
    for f in (state["w"].u, state["w"].v):
        assert float((f.mT @ f - torch.eye(f.shape[1], dtype=f.dtype)).abs().max()) < 1e-13


@pytest.mark.parametrize("wire", get_args(WireType))
@pytest.mark.parametrize("form", STATES)
def test_what_went_over_a_lossy_wire_is_subtracted_exactly(form: DeltaForm, wire: WireType) -> None:
    rng = np.random.default_rng(5)
    state, w, ideal = initial_deltas({"w": (41, 29)}, form, 6), np.zeros((41, 29)), np.zeros((41, 29))
    for _ in range(6):
        blocks: list[tuple[float, Pair]] = []
        change = np.zeros_like(w)
        for p, rank in ((0.5, 6), (0.3, 3), (0.2, 1)):
            sent = unpack_factors(
                pack_factors({"w": split_svd(truncate_delta(state["w"], rank), rank)}, wire)
            )["w"]
            trained = Pair(
                sent.b + 0.1 * rand(rng, 41, rank).float(), sent.a + 0.1 * rand(rng, rank, 29).float()
            )
            back = unpack_factors(pack_factors({"w": trained}, wire))["w"]
            blocks += [(p, back), (-p, sent)]
            change += p * (product(back) - product(sent))
        w = w + change
        state = update_deltas(state, {"w": blocks})
        ideal = best(w, form.cap or 99)
        assert off(state["w"], ideal) < CLOSE


def test_the_cap_cuts_what_numpy_cuts_and_says_how_much() -> None:
    rng = np.random.default_rng(6)
    state, w, total = initial_deltas({"w": (34, 27)}, DeltaForm("capped"), 2), np.zeros((34, 27)), 0.0
    assert state["w"].form.cap == 8
    for _ in range(6):
        clients = [(p, 1.0, upload(rng, w, r, 0.5)) for p, r in ((0.5, 6), (0.3, 4), (0.2, 5))]
        full = fedhl(w, clients)
        w = best(full, 8)
        state = step(state, clients)
        lost = float(np.linalg.norm(full - w)) ** 2
        total += lost
        tidy(state["w"])
        assert (off(state["w"], w) < CLOSE, state["w"].rank <= 8, state["w"].state) == (True, True, "capped")
        assert state["w"].discarded_energy == pytest.approx(lost, rel=1e-9, abs=1e-13)
        assert state["w"].total_discarded_energy == pytest.approx(total, rel=1e-9)
    assert total > 0.1


@pytest.mark.parametrize("shape", [(72, 36), (36, 72), (48, 48)])
def test_auto_is_exact_while_the_factors_are_no_larger_than_the_matrix(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(7)
    state = initial_deltas({"w": shape}, DeltaForm(), 3)
    # of (d + k) widths 24 make d·k numbers in each of the three
    for rank, expected in ((9, "exact"), (15, "exact"), (1, "dense"), (1, "dense")):
        before = state["w"].dense().clone().numpy()
        pair = Pair(rand(rng, shape[0], rank), rand(rng, rank, shape[1]))
        held = (state["w"].u.numel() + state["w"].v.numel()) + pair.b.numel() + pair.a.numel()
        state = update_deltas(state, {"w": [(1.0, pair)]})
        assert state["w"].state == expected
        assert expected == "dense" or held <= shape[0] * shape[1]
        assert off(state["w"], before + product(pair)) < 1e-13
        state = tree.decode(tree.encode(state))
    assert (state["w"].rank, state["w"].max_client_rank) == (3, 3)
    # replacing the whole is narrow again, but a dense matrix stays one
    assert update_deltas(state, {}, previous_weight=0.5)["w"].state == "dense"


def test_what_a_client_held_does_not_count_for_the_width_where_it_vanishes() -> None:
    rng = np.random.default_rng(15)
    state = initial_deltas({"w": (48, 48)}, DeltaForm(), 13)
    for _ in range(4):
        pair = Pair(rand(rng, 48, 13), rand(rng, 13, 48))
        state = update_deltas(state, {"w": [(1.0, pair)]}, sent_ranks={"w": [(1.0, 13)]})
        assert (state["w"].state, state["w"].rank) == ("exact", 13)


def truncation_error(before: Matrix, after: Matrix, p: Sequence[float], ranks: Sequence[int]) -> float:
    """Bound on the error of Σ p_i W^{r_i}, where W is ``before``, from its spectral gaps.

    Singular vectors whose residuals on both sides are at most δ give W^r up to √2 δ σ_r / (σ_r - σ_{r+1})
    (Wedin). Here δ =
    10 ε √d σ₁, which the leading triplets of a matrix of d rows promise. The largest error seen over seeds is
    1/11.
    """
    s = np.linalg.svd(before)[1]
    spread = sum(q * s[r - 1] / (s[r - 1] - s[r]) if s[0] else q for q, r in zip(p, ranks, strict=True))
    delta = 10 * np.finfo(float).eps * (2 * max(before.shape)) ** 0.5 * max(s[0], np.linalg.norm(after))
    return float(delta * max(1.0, spread))


def test_a_default_run_never_decomposes_a_matrix_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with uploads whose spectrum falls, nor with flat ones: ten rounds far beyond the width at which W becomes dense."""
    monkeypatch.setattr(sketch, "compute_svd", lambda w: pytest.fail("decomposed in full"))
    ranks, d, k = (8, 6, 4, 2), 200, 150
    for decay in (0.7, 1.0):
        rng = np.random.default_rng(16)
        state = initial_deltas({"w": (d, k)}, DeltaForm(), 8)
        for i in range(10):
            # each round begins at the state's own W, for over rounds an error grows by what the gaps allow
            w, clients = state["w"].dense().numpy(), []
            for rank in ranks:
                pair = upload(rng, w, rank, 0.0)
                fall = (0.1 if i else 1.0) * torch.from_numpy(decay ** np.arange(rank)) / d**0.5
                clients.append(
                    (
                        0.25,
                        1.0,
                        Pair(pair.b + fall * rand(rng, d, rank), pair.a + fall[:, None] * rand(rng, rank, k)),
                    )
                )
            expected = fedhl(w, clients)
            state = step(state, clients)
            assert np.linalg.norm(state["w"].dense().numpy() - expected) < truncation_error(
                w, expected, [0.25] * 4, ranks
            )
        assert state["w"].state == "dense"


def test_truncation_is_the_best_of_its_rank() -> None:
    rng = np.random.default_rng(8)
    pair = Pair(rand(rng, 90, 7), rand(rng, 7, 70))
    w = product(pair)
    for form in STATES:
        delta = update_deltas(initial_deltas({"w": (90, 70)}, form, 7), {"w": [(1.0, pair)]})["w"]
        for rank in range(8):
            f = truncate_delta(delta, rank)
            assert (f.rank, f.u.dtype, f.s.dtype) == (rank, torch.float64, torch.float64)
            np.testing.assert_allclose(f.dense().numpy(), best(w, rank), atol=1e-11)
        left = [np.sum(np.linalg.svd(w)[1][r:] ** 2) for r in range(8)]
        assert measure_tail_energy(delta, list(range(8))) == pytest.approx(left, rel=1e-10, abs=1e-10)
    few = update_deltas(initial_deltas({"w": (90, 70)}, DeltaForm("dense"), 3), {"w": [(1.0, pair)]})["w"]
    for ask in (lambda: truncate_delta(few, 4), lambda: measure_tail_energy(few, [4])):
        with pytest.raises(ConfigError, match="leading 3 triplets"):
            ask()
    assert (
        truncate_delta(update_deltas(initial_deltas({"w": (9, 7)}, DeltaForm("dense"), 3), {})["w"], 5).rank
        == 0
    )


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, t.numel() if isinstance(t, Tensor) else 0)
        return out


def test_no_tensor_of_the_matrix_size_is_made_on_factors() -> None:
    rng, d, k = np.random.default_rng(9), 3000, 2900
    for form in (DeltaForm("exact"), DeltaForm("capped"), DeltaForm("auto")):
        state = initial_deltas({"a": (d, k), "b": (d, k)}, form, 6)
        with Largest() as largest:
            for _ in range(3):
                blocks, held = {}, {}
                for name in state:
                    sent = {r: split_svd(truncate_delta(state[name], r), r) for r in (6, 2)}
                    noisy = {r: Pair(s.b + rand(rng, d, r), s.a + rand(rng, r, k)) for r, s in sent.items()}
                    blocks[name], held[name] = (
                        [(0.5, pair) for pair in noisy.values()],
                        [(0.5, r) for r in noisy],
                    )
                state = update_deltas(state, blocks, sent_ranks=held)
                measure_tail_energy(state["a"], [1, 2])
                measure_product_norm(blocks["a"][0][1])
        assert 0 < largest.numel < d * k / 50


def test_layers_are_batched_by_shape_and_come_out_as_alone() -> None:
    rng = np.random.default_rng(10)
    shapes = {"q": (40, 30), "v": (20, 30), "o": (40, 30), "still": (40, 30)}
    state, alone = (
        initial_deltas(shapes, DeltaForm("exact"), 4),
        initial_deltas(shapes, DeltaForm("exact"), 4),
    )
    for _ in range(3):
        blocks = {
            n: [(0.5, Pair(rand(rng, shapes[n][0], r), rand(rng, r, 30))) for r in (4, 2)]
            for n in ("v", "o", "q")
        }
        held = {n: [(0.5, 4), (0.5, 2)] for n in blocks}
        state = update_deltas(state, blocks, sent_ranks=held)
        for n in blocks:
            alone[n] = update_deltas({n: alone[n]}, {n: blocks[n]}, sent_ranks={n: held[n]})[n]
    assert list(state) == list(shapes)
    assert state["still"].rank == 0
    for n in shapes:
        torch.testing.assert_close(state[n].dense(), alone[n].dense(), rtol=1e-12, atol=1e-12)


def test_layers_of_one_stacked_width_may_hold_different_ranks() -> None:
    rng = np.random.default_rng(14)
    pairs = {
        n: [Pair(rand(rng, 30, r), rand(rng, r, 26)) for r in ranks]
        for n, ranks in (("a", (3, 1)), ("b", (1, 3)))
    }
    state = initial_deltas(dict.fromkeys(pairs, (30, 26)), DeltaForm("exact"), 3)
    for i in range(2):
        state = update_deltas(state, {n: [(1.0, both[i])] for n, both in pairs.items()})
    assert max(off(state[n], product(one) + product(other)) for n, (one, other) in pairs.items()) < 1e-13


def test_the_tail_of_a_dense_matrix_that_has_none_is_not_negative() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        blocks = {"w": [(1.0, Pair(rand(rng, 12, 3), rand(rng, 3, 10)))]}
        delta = update_deltas(initial_deltas({"w": (12, 10)}, DeltaForm("dense"), 3), blocks)["w"]
        assert 0 <= measure_tail_energy(delta, [3])[0] < 1e-13 * delta.energy


def test_more_layers_than_fit_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    names = [str(i) for i in range(5)]
    blocks = {n: [(1.0, Pair(rand(rng, 20, 2), rand(rng, 2, 12)))] for n in names}
    monkeypatch.setattr(module, "BATCH_ENTRIES", 20 * 2 * 2)
    state = update_deltas(initial_deltas(dict.fromkeys(names, (20, 12)), DeltaForm("exact"), 2), blocks)
    assert max(off(state[n], product(blocks[n][0][1])) for n in names) < 1e-14


def test_float32_holds_its_own_precision() -> None:
    rng = np.random.default_rng(12)
    for kind in ("exact", "capped", "dense"):
        state, w = initial_deltas({"w": (60, 48)}, DeltaForm(kind, dtype="float32"), 12), np.zeros((60, 48))
        for _ in range(6):
            clients = [(p, 1.0, upload(rng, w, r, 0.3, torch.bfloat16)) for p, r in ((0.5, 12), (0.5, 5))]
            w = fedhl(w, clients)
            state = step(state, clients)
            assert off(state["w"], w) < 1e-4
        assert {t.dtype for t in (state["w"].u, state["w"].v, truncate_delta(state["w"], 3).s)} == {
            torch.float32
        }
