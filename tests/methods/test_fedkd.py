"""FedKD: against NumPy, with the loss of the task, the compression of its updates, what it sends, and clients that
missed rounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlowrank import Loss
from fedlowrank.core import tree
from fedlowrank.core.contract import ServerView
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential, Wire
from fedlowrank.linalg.factored import (
    Factored,
    compress_update,
    compute_svd,
    decompress_update,
    rank_of_energy,
    truncate_svd,
)
from fedlowrank.methods.fedkd import FedKD
from tests.golden import reference
from tests.support.method_calls import Reply, server_update

from .comparisons import assert_nested_close, to_layers
from .run_contents import get_client_states, get_initial_networks, get_predictor, get_train_data, plan_rounds
from .setting import (
    FLOAT32,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    SLOW_LOCAL,
    SMALL_PARAMETERS,
    WIDTH,
    federate_one_model,
    federate_two_models,
    run_rounds,
)


# at the first pair of energies weights travel both as factors and whole, at the second all travel whole
def assert_fedkd_equals_reference(energies: tuple[float, float], engine: type[Engine], **data: Any) -> None:
    """Compare a run with the reference; ``data`` are settings of the federation."""
    federation = federate_two_models(deep_width=7, **data)
    method = FedKD(energy_start=energies[0], energy_end=energies[1], mentee="small", **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    task, mentee = run.task, to_layers(federation.architectures["small"].initial)
    projections = [method.client_init(i, task).projection.numpy().copy() for i in federation.infos]
    rounds = plan_rounds(run)
    history, mentors, projections, _ = reference.fedkd(
        mentee,
        get_initial_networks(federation),
        projections,
        get_train_data(federation),
        rounds,
        LR,
        energies,
    )
    assert_nested_close(to_layers(run.state.server.mentee), history[-1])
    for k, state in enumerate(get_client_states(run)):
        last = max(t for t, clients in enumerate(rounds) if k in clients)
        assert_nested_close(to_layers(state.mentor), mentors[k])
        assert_nested_close(to_layers(state.mentee), history[last])
        assert_nested_close(state.projection, projections[k])
    factored = [isinstance(c, Factored) for update in run.state.server.updates for c in update.values()]
    assert any(factored) == (energies[0] < 1)


@pytest.mark.parametrize("energies", [(0.6, 0.9), (1.0, 1.0)])
def test_fedkd(energies: tuple[float, float], engine: type[Engine]) -> None:
    assert_fedkd_equals_reference(energies, engine)


def test_fedkd_minimizes_the_loss_of_the_task(smoothed_loss: Loss) -> None:
    assert_fedkd_equals_reference((0.6, 0.9), Sequential, loss=smoothed_loss)


def test_fedkd_at_full_energy_is_the_uncompressed_method() -> None:
    federation = federate_two_models(deep_width=7)
    method = FedKD(energy_start=1.0, energy_end=1.0, mentee="small", **SLOW_LOCAL)
    run = run_rounds(method, federation, **SAMPLE)
    assert not any(isinstance(c, Factored) for u in run.state.server.updates for c in u.values())
    projections = [method.client_init(i, run.task).projection.numpy().copy() for i in federation.infos]
    start = to_layers(federation.architectures["small"].initial)
    history, _, _, sent = reference.fedkd(
        start,
        get_initial_networks(federation),
        projections,
        get_train_data(federation),
        plan_rounds(run),
        0.2,
        (1.0, 1.0),
    )
    for actual, expected in zip(to_layers(run.state.server.mentee), history[-1], strict=True):
        np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-10)
        np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=1e-10)
    whole = federation.architectures["small"].parameter_count
    assert sent == [3 * whole] * 3


def test_fedkd_sends_factors_or_the_weight_whichever_is_smaller() -> None:
    federation = federate_two_models(deep_width=7)
    energies = (0.6, 0.9)
    method = FedKD(energy_start=energies[0], energy_end=energies[1], mentee="small", **SLOW_LOCAL)
    run = run_rounds(method, federation, participation=0.75, steps=0)
    records = [run.step() for _ in range(3)]
    projections = [method.client_init(i, run.task).projection.numpy() for i in federation.infos]
    mentee = to_layers(federation.architectures["small"].initial)
    history, *_, sent = reference.fedkd(
        mentee,
        get_initial_networks(federation),
        projections,
        get_train_data(federation),
        plan_rounds(run),
        0.2,
        energies,
    )
    assert [r.parameters_up for r in records] == sent
    assert sent[0] < 3 * SMALL_PARAMETERS
    # down: every update a participant has missed, as the server compressed it
    rounds, at, expected = plan_rounds(run), dict.fromkeys(range(len(SIZES)), 0), []
    updates = [
        reference.sent_update(reference.plus(b, a, -1.0), 1.0)[0] for a, b in itertools.pairwise(history)
    ]
    numbers = []
    for t, update in enumerate(updates):
        energy = energies[0] + (energies[1] - energies[0]) * t / 2
        count = 0
        for w, b in update:
            # the applied update is itself of the rank that was sent
            rank = np.linalg.matrix_rank(w, tol=1e-9)
            count += min(rank * (sum(w.shape) + 1), w.size) + b.size
        numbers.append(count)
        assert 0.6 <= energy <= 0.9
    for t, clients in enumerate(rounds):
        expected.append(sum(min(sum(numbers[at[k] : t]), SMALL_PARAMETERS) for k in clients))
        at |= dict.fromkeys(clients, t)
    assert [r.parameters_down for r in records] == expected


def draw_matrix(rank: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)))


def test_updates_and_not_weights_are_decomposed() -> None:
    federation = federate_one_model()
    method = FedKD(energy_start=0.9, energy_end=0.9, **SLOW_LOCAL)
    run = run_rounds(method, federation, steps=0)
    before = run.state.server.mentee
    assert torch.linalg.matrix_rank(before["body.0.weight"]) == WIDTH
    update = {n: torch.zeros_like(p) for n, p in before.items()}
    update["body.0.weight"] = draw_matrix(1, WIDTH, 12)
    after = server_update(
        method,
        run.state.server,
        [Reply(federation.infos[0], update)],
        ServerView(run.task, 0, federation.key),
    )
    assert after.updates[0]["body.0.weight"].rank == 1
    # a rank-one update arrives whole and leaves the weights' own rank alone
    torch.testing.assert_close(
        after.mentee["body.0.weight"] - before["body.0.weight"], update["body.0.weight"]
    )
    assert torch.linalg.matrix_rank(after.mentee["body.0.weight"]) == WIDTH


def test_the_rank_is_the_smallest_that_keeps_the_energy() -> None:
    s = torch.tensor([2.0, 1.0, 1.0, 0.5])
    share = np.cumsum(s.numpy() ** 2) / (s.numpy() ** 2).sum()  # .64, .8, .96, 1
    for energy, rank in (
        (0.1, 1),
        (0.63, 1),
        (0.65, 2),
        (0.79, 2),
        (0.81, 3),
        (0.959, 3),
        (0.97, 4),
        (1.0, 4),
    ):
        assert rank_of_energy(s, energy) == rank == int((share < energy - 1e-12).sum()) + 1
    assert rank_of_energy(torch.zeros(3), 0.9) == 1
    assert rank_of_energy(s, 0.0) == 1
    # 9 of 14 are kept by the first, 13 of 14 by two
    for scale in (1e-200, 1e200):
        assert [
            rank_of_energy(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) * scale, e)
            for e in (0.6, 0.9, 0.95)
        ] == [1, 2, 3]


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.95, 0.99])
def test_compressed_matrices_are_the_best_of_their_rank(energy: float) -> None:
    w = draw_matrix(3, 40, 30) + 0.1 * draw_matrix(20, 40, 30, 1)
    actual = compress_update({"w": w}, energy)["w"]
    assert isinstance(actual, Factored)
    u, s, vt = np.linalg.svd(w.numpy(), full_matrices=False)
    r = actual.rank
    assert (s[:r] ** 2).sum() >= energy * (s**2).sum() > (s[: r - 1] ** 2).sum()
    np.testing.assert_allclose(actual.dense().numpy(), (u[:, :r] * s[:r]) @ vt[:r], atol=1e-10)
    np.testing.assert_allclose(actual.s.numpy(), s[:r], atol=1e-10)
    lost = float((w - actual.dense()).square().sum())
    assert lost == pytest.approx(float((s[r:] ** 2).sum()), rel=1e-8)
    np.testing.assert_allclose((actual.u.T @ actual.u).numpy(), np.eye(r), atol=1e-12)
    np.testing.assert_allclose((actual.v.T @ actual.v).numpy(), np.eye(r), atol=1e-12)


def test_matrices_are_sent_whole_where_factors_are_no_smaller() -> None:
    # rank 5 of a 12 x 10 matrix: 5 * 23 = 115 < 120 numbers; rank 6: 138
    for rank, factored in ((5, True), (6, False)):
        u, _ = torch.linalg.qr(draw_matrix(12, 12, 12))
        v, _ = torch.linalg.qr(draw_matrix(10, 10, 10, 1))
        w = u[:, :rank] @ v[:, :rank].T
        actual = compress_update({"w": w}, 0.999)["w"]
        assert isinstance(actual, Factored) == factored
        assert tree.numel(actual) == (115 if factored else 120)
        torch.testing.assert_close(decompress_update({"w": actual}, {"w": w})["w"], w, rtol=0, atol=1e-12)


def test_vectors_and_single_rows_are_sent_whole() -> None:
    update = {"bias": torch.randn(9), "scalar": torch.tensor(2.0), "row": torch.randn(1, 50)}
    actual = compress_update(update, 0.5)
    assert all(actual[n] is update[n] for n in update)


def test_a_kernel_is_a_matrix_of_outputs_by_all_else() -> None:
    # [O, I, k1, k2] = [16, 8, 3, 3] of rank 2 as a 16 x 72 matrix, of full rank in any other reading
    kernel = draw_matrix(2, 16, 72).reshape(16, 8, 3, 3)
    actual = compress_update({"w": kernel}, 0.9999)["w"]
    assert isinstance(actual, Factored)
    assert (actual.rank, actual.u.shape, actual.v.shape) == (2, (16, 2), (72, 2))
    torch.testing.assert_close(
        decompress_update({"w": actual}, {"w": kernel})["w"], kernel, rtol=0, atol=1e-10
    )


def test_an_update_of_zeros_keeps_rank_one() -> None:
    actual = compress_update({"w": torch.zeros(20, 20)}, 0.9)["w"]
    assert isinstance(actual, Factored)
    assert actual.rank == 1
    assert torch.equal(actual.dense(), torch.zeros(20, 20))


def test_equal_matrices_have_equal_factors_whatever_signs_the_decomposition_picks() -> None:
    w = draw_matrix(6, 8, 6)
    f = compute_svd(w)
    at = f.u.abs().argmax(0)
    assert (f.u[at, torch.arange(6)] > 0).all()
    torch.testing.assert_close(f.dense(), w, rtol=0, atol=1e-12)
    assert (f.s[:-1] >= f.s[1:]).all()
    assert truncate_svd(f, 2).rank == 2


@pytest.mark.parametrize("engine", [Sequential, Wire])
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_a_client_that_missed_rounds_rebuilds_the_mentee_bit_for_bit(engine, lost: float) -> None:
    method = FedKD(energy_start=0.6, energy_end=0.9, **SLOW_LOCAL)
    run = run_rounds(
        method,
        federate_two_models(**FLOAT32),
        rounds=9,
        steps=0,
        engine=engine,
        participation=0.5,
        lost_replies=lost,
    )
    absent, whole, several = dict.fromkeys(range(len(SIZES)), 0), 0, 0
    for t in range(9):
        server = run.state.server
        for info in run.participants(t):
            down = method.download(server, info)
            whole += down.mentee is not None
            several += len(down.updates) > 1
            assert not (down.mentee is not None and down.updates)
        record = run.step()
        for k in record.participants:
            if str(k) not in record.lost:
                assert tree.equal(run.state.clients[k].mentee, server.mentee)
                absent[k] = 0
    # the run did have late clients, some of which got updates and some the model itself
    assert several
    assert whole


def test_the_share_of_energy_rises_linearly_to_the_last_round() -> None:
    seen = []

    class Spied(FedKD):
        def server_update(self, server, total, view):
            seen.append(self._energy(view))
            return super().server_update(server, total, view)

    run_rounds(Spied(energy_start=0.5, energy_end=0.9, **SLOW_LOCAL), federate_one_model(), rounds=5)
    assert seen == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])


def test_fedkd_infers_with_the_mentor() -> None:
    federation = federate_two_models(deep_width=7)
    run = run_rounds(FedKD(mentee="small", **SLOW_LOCAL), federation)
    x = federation.clients[0].test.x
    expected = reference.forward(to_layers(run.state.clients[0].mentor), x.double().numpy())[1]
    np.testing.assert_allclose(get_predictor(run, 0)(x).detach().numpy(), expected, atol=1e-12)
