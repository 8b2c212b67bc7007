"""Orthonormal columns from Gram matrices, and where these are not enough, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank.linalg import low_rank_sum as module
from fedlowrank.linalg.delta import DeltaForm, initial_deltas, split_svd, truncate_delta, update_deltas
from fedlowrank.linalg.factored import canonical_signs
from fedlowrank.linalg.low_rank_sum import ExtendedBasis, add_low_rank, extend_basis
from fedlowrank.linalg.pair import Pair

N, R, M = 300, 20, 50
ALL = ["_first_pass_float32", "_first_pass", "orthogonalize"]
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def basis(rng: np.random.Generator, n: int = N, r: int = R, batch: int = 2) -> Tensor:
    return torch.from_numpy(np.linalg.qr(rng.normal(size=(batch, n, r)))[0])


def conditioned(rng: np.random.Generator, condition: float, shape: tuple[int, ...] = (2, N, M)) -> np.ndarray:
    """Matrices of that condition, whose columns are all of about one length."""
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    out: np.ndarray = (u * np.geomspace(1, 1 / condition, shape[-1])) @ vt
    return out


def check(old: Tensor, new: np.ndarray, found: ExtendedBasis, error: float = 1e-13) -> None:
    """[old Q] is orthonormal and gives the columns back, each to rounding of its own length."""
    width = old.shape[-1] + new.shape[-1]
    for i in range(len(new)):
        whole = found.multiply(i, torch.eye(width, dtype=torch.float64)).numpy()
        assert np.abs(whole.T @ whole - np.eye(width)).max() < error
        np.testing.assert_allclose(whole[:, : old.shape[-1]], old[i].numpy(), rtol=0, atol=error)
        lengths = np.linalg.norm(new[i], axis=0)
        off = np.linalg.norm(whole @ found.coordinates[i].numpy() - new[i], axis=0)
        assert np.all(off <= error * lengths)


def rows(new: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(new.swapaxes(-1, -2)))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that were called, in order."""
    called: list[str] = []

    def spy(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def spied(*args: Tensor) -> object:
            called.append(name)
            return call(*args)

        return spied

    for name in ALL:
        monkeypatch.setattr(module, name, spy(name, getattr(module, name)))
    return called


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [(1e0, 1), (1e1, 1), (1e3, 2), (1e5, 2), (1e7, 3), (1e8, 3), (1e12, 3), (1e16, 3)],
)
@pytest.mark.parametrize("r", [0, R])
def test_any_condition(condition: float, wanted: int, r: int, ways: list[str]) -> None:
    rng = np.random.default_rng(0)
    old, new = basis(rng, r=r), conditioned(rng, condition)
    given = rows(new)
    check(old, new, extend_basis(old, given))
    assert ways == ALL[:wanted]
    assert torch.equal(given, rows(new))


@pytest.mark.parametrize("c", [0.1, 0.25, 0.3, 0.6])
def test_a_triangle_whose_inverse_is_large(c: float) -> None:
    """Kahan's matrices, on which an explicit inverse loses more than a substitution."""
    rng = np.random.default_rng(9)
    s = np.sqrt(1 - c * c)
    kahan = s ** np.arange(M)[:, None] * (np.eye(M) - c * np.triu(np.ones((M, M)), 1))
    old = basis(rng)
    new = np.linalg.qr(rng.normal(size=(2, N, M)))[0] @ kahan
    check(old, new, extend_basis(old, rows(new)))


@pytest.mark.parametrize("power", range(0, 17, 2))
@pytest.mark.parametrize("lean", [1, 3, R])
def test_any_nearness_to_some_of_the_old_columns(power: int, lean: int) -> None:
    rng = np.random.default_rng(1)
    old = basis(rng)
    inside = old[..., :lean].numpy() @ rng.normal(size=(2, lean, M))
    new = inside + 10.0**-power * conditioned(rng, 30.0)
    check(old, new, extend_basis(old, rows(new)))


@pytest.mark.parametrize("where", ["first", "last", "all"])
@pytest.mark.parametrize("strength", [0.1, 0.03, 0.01])
def test_near_the_leading_columns_or_the_last_float32_is_enough(
    where: str, strength: float, ways: list[str]
) -> None:
    rng = np.random.default_rng(2)
    old = basis(rng)
    at = {"first": slice(0, 4), "last": slice(R - 4, R), "all": slice(0, R)}[where]
    new = strength * old[..., at].numpy() @ rng.normal(size=(2, at.stop - at.start, M)) + 0.02 * conditioned(
        rng, 3.0
    )
    check(old, new, extend_basis(old, rows(new)))
    assert ways == ["_first_pass_float32"]


def zero(new: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    new[1, :, 7:19] = 0
    return new


def twice(new: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    new[..., 1] = new[..., 0]
    return new


def nearly_twice(new: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    new[..., 1] = new[..., 0] * (1 + 1e-9 * rng.normal(size=new.shape[:2]))
    return new


def of_low_rank(new: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    out: np.ndarray = new[..., :5] @ rng.normal(size=(len(new), 5, M))
    return out


def lengths(new: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return new * np.geomspace(1e-30, 1e30, M)


@pytest.mark.parametrize(
    "change",
    [
        zero,
        twice,
        nearly_twice,
        of_low_rank,
        lengths,
        lambda new, rng: new * 0,
        lambda new, rng: new * 1e100,
        lambda new, rng: new * 1e200,
        lambda new, rng: new * 1e-100,
        lambda new, rng: new * 1e-200,
    ],
)
@pytest.mark.parametrize("r", [0, R])
def test_columns_that_no_gram_matrix_can_do(change: Change, r: int) -> None:
    rng = np.random.default_rng(3)
    old, new = basis(rng, r=r), change(conditioned(rng, 10.0), rng)
    actual = extend_basis(old, rows(new))
    # numpy's norms of the shortest and longest would be 0 and infinite; a power of two is taken out exactly
    largest = np.abs(new).max()
    scale = 2.0 ** -round(np.log2(largest)) if largest else 1.0
    check(old, new * scale, replace(actual, coordinates=actual.coordinates * scale))


def test_what_the_first_pass_leaves_is_measured(monkeypatch: pytest.MonkeyPatch, ways: list[str]) -> None:
    """A first pass that did nothing must not go unnoticed, alone in its batch or not."""
    rng = np.random.default_rng(4)
    monkeypatch.setattr(
        module, "_first_pass_float32", lambda old, given: (given, old.new_zeros(len(old), 0, M), None)
    )
    old = basis(rng)
    new = conditioned(rng, 2.0)
    check(old, new, extend_basis(old, rows(new)))
    assert ways == []
    for bad in (
        conditioned(rng, 100.0),
        5 * old.numpy() @ rng.normal(size=(2, R, M)) + conditioned(rng, 2.0),
    ):
        new[1] = bad[1]
        check(old, new, extend_basis(old, rows(new)))
        assert ways == ["_first_pass"]
        ways.clear()


@pytest.mark.parametrize("condition", [1.0, 30.0, 1e4, 1e9])
def test_float32_factors(condition: float) -> None:
    rng = np.random.default_rng(5)
    old = basis(rng).float()
    new = conditioned(rng, condition).astype(np.float32)
    check(old, new, extend_basis(old, rows(new)), error=4e-6)


@pytest.mark.parametrize("shape", [(90, 70), (70, 90), (64, 64)])
@pytest.mark.parametrize("width", [0, 1, 43, 44, 45, 60])
def test_widths_up_to_the_matrix_and_above(shape: tuple[int, int], width: int) -> None:
    rng = np.random.default_rng(6)
    u, v = basis(rng, shape[0]), basis(rng, shape[1])
    s = np.geomspace(1, 1e-9, R)
    left, right = (conditioned(rng, 50.0, (2, n, width)) for n in shape)
    expected = (u.numpy() * s) @ v.numpy().swapaxes(1, 2) + left @ right.swapaxes(1, 2)
    actual = add_low_rank(u, torch.from_numpy(s).expand(2, -1), v, rows(left).mT, rows(right).mT, None)
    for (u1, s1, v1, _), w in zip(actual, expected, strict=True):
        values = np.linalg.svd(w)[1]
        assert len(s1) == (R + width if R + width < min(shape) else int((values > 1e-14).sum()))
        np.testing.assert_allclose(s1.numpy(), values[: len(s1)], rtol=0, atol=1e-13)
        np.testing.assert_allclose(((u1 * s1) @ v1.mT).numpy(), w, rtol=0, atol=1e-13)
        for f in (u1, v1):
            torch.testing.assert_close(f.mT @ f, torch.eye(len(s1), dtype=f.dtype), rtol=0, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "noise"), [((350, 420), 1e-2), *(((420, 350), n) for n in (1.0, 1e-2, 1e-4, 1e-8, 0.0))]
)
def test_steps_of_fedhl_from_float32_uploads(shape: tuple[int, int], noise: float) -> None:
    """From the server's own factors, with noise, against the recursion on the matrix; ranks as Householder's
    QRs have them."""
    rng, ranks = np.random.default_rng(7), (16, 8, 8, 4)
    share = 1 / len(ranks)
    state = initial_deltas({"w": shape}, DeltaForm("exact"), max(ranks))
    for step in range(4):
        before = state["w"].dense().numpy()
        after, blocks = before.copy(), []
        for rank in ranks:
            triplets = truncate_delta(state["w"], rank)
            sent = split_svd(triplets, rank)
            b, a = (
                x + (noise if step else 1.0) * torch.from_numpy(rng.normal(size=x.shape))
                for x in (sent.b, sent.a)
            )
            pair = Pair(b.float(), a.float())
            blocks.append((share, pair))
            after += share * (pair.b.double().numpy() @ pair.a.double().numpy() - triplets.dense().numpy())
        held = {"w": [(share, r) for r in ranks]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_first_pass_float32", lambda old, given: None)
            patch.setattr(module, "_first_pass", lambda old, given: None)
            slow = update_deltas(state, {"w": blocks}, sent_ranks=held)["w"]
        state = update_deltas(state, {"w": blocks}, sent_ranks=held)
        delta = state["w"]
        scale = max(np.linalg.norm(before, 2), np.linalg.norm(after, 2))
        for one, other in ((delta, after), (delta, slow.dense().numpy())):
            assert np.linalg.norm(one.dense().numpy() - other, 2) < 1e-13 * scale
        values = np.linalg.svd(after)[1]
        assert delta.rank == slow.rank == int((values > max(shape) * 2.0**-52 * scale).sum())
        np.testing.assert_allclose(delta.s.numpy(), values[: delta.rank], rtol=0, atol=1e-13 * scale)
        for f in (delta.u, delta.v):
            torch.testing.assert_close(f.mT @ f, torch.eye(delta.rank, dtype=f.dtype), rtol=0, atol=1e-13)


def test_of_entries_of_one_magnitude_the_first_sets_the_sign() -> None:
    u = torch.tensor([[0.5, -0.5, 0.1, -0.7], [-0.5, 0.5, -0.6, 0.7], [0.0, 0.1, 0.5, 0.0]])
    assert canonical_signs(u).tolist() == [[1, -1, -1, -1]]
    assert canonical_signs(u[:, 2:3]).tolist() == [[-1]]
    assert canonical_signs(u[:, :0]).shape == (1, 0)


def test_triplets_left_with_gaps_between_them() -> None:
    rng = np.random.default_rng(8)
    pair = Pair(torch.from_numpy(rng.normal(size=(40, 6))), torch.from_numpy(rng.normal(size=(6, 30))))
    state = update_deltas(initial_deltas({"w": (40, 30)}, DeltaForm("exact"), 6), {"w": [(1.0, pair)]})
    w = pair.b.numpy() @ pair.a.numpy()
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    keep = np.array([1.0, 0, 0, 1, 1, 1])
    actual = update_deltas(state, {}, sent_ranks={"w": [(1.0, 3), (-1.0, 1)]})["w"]
    assert actual.rank == 4
    np.testing.assert_allclose(actual.dense().numpy(), (u[:, :6] * s[:6] * keep) @ vt[:6], rtol=0, atol=1e-13)
