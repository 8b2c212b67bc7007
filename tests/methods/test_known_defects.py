"""Defects found in widely used public code, each with a test that ours does not have it; and what every
method sends."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract import Reply, personal, predictor, server_update
from fedlowrank.core import tree
from fedlowrank.core.contract.method import Batch, ServerView
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.batch_losses import kl_divergence, soft_cross_entropy, square_error
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential, Wire
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.linalg.factored import (
    Factored,
    compress_update,
    compute_svd,
    decompress_update,
    rank_of_energy,
    truncate_svd,
)
from fedlowrank.methods import METHODS
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fedproto import ClientState, FedProto, Prototypes
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.fml import FML
from fedlowrank.methods.lg_fedavg import LGFedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models.architectures.cnn import CNN
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from golden import reference

from .setting import (
    CLASSES,
    KINDS,
    OWNED,
    SIZES,
    WIDTH,
    Net,
    alike,
    arrays,
    at,
    layers,
    plan,
    run_of,
    start_of,
    train_data,
    unlike,
    view_of,
)

LOCAL = {"optimizer": SGD(lr=0.2), "batch_size": 8, "epochs": 2}
ONE_STEP = {"optimizer": SGD(lr=0.2), "batch_size": max(SIZES), "epochs": 1}
F32 = {"dtype": torch.float32}


def predictor_of(run: Run, client: int) -> Any:
    return predictor(run.method, *at(run, client))


# -- what is sent --------------------------------------------------------------------------------------------

SMALL = WIDTH * 12 + WIDTH + CLASSES * WIDTH + CLASSES
HEAD = CLASSES * WIDTH + CLASSES
ADAPTER = 5 * WIDTH + 5 + CLASSES * 5 + CLASSES


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "make", "each_way"),
    [
        (Standalone(**LOCAL), unlike, 0),
        (FedAvg(**LOCAL), alike, SMALL),
        (FedProx(**LOCAL), alike, SMALL),
        (FML(meme="small", **LOCAL), unlike, SMALL),
        (LGFedAvg(**LOCAL), unlike, HEAD),
        (PFedLoRA(width=5, **LOCAL), unlike, ADAPTER),
    ],
    ids=lambda v: getattr(v, "title", None),
)
def test_parameters_sent_follow_the_formula(method, make, each_way: int) -> None:
    run = run_of(method, make(), participation=0.75, steps=0)
    for _ in range(3):
        record = run.step()
        assert len(record.participants) == 3
        assert record.parameters_down == record.parameters_up == 3 * each_way
        if each_way:
            # float64 parameters, and at most a few kilobytes of names and shapes a message
            assert 0 <= record.bytes_up - 3 * each_way * 8 < 3 * 2048
        else:
            assert record.bytes_up == record.bytes_down == 0


def test_fd_sends_a_square_of_the_classes_down_and_a_row_for_each_own_label_up() -> None:
    run = run_of(FD(**LOCAL), unlike(), participation=0.75, steps=0)
    for _ in range(3):
        record = run.step()
        assert record.parameters_down == 3 * CLASSES**2
        assert record.parameters_up == sum(len(OWNED[k]) for k in record.participants) * CLASSES


def test_fedproto_sends_all_prototypes_down_and_its_own_up() -> None:
    run = run_of(FedProto(**LOCAL), unlike(), participation=0.75, steps=0)
    for _ in range(3):
        record = run.step()
        assert record.parameters_down == 3 * CLASSES * WIDTH
        assert record.parameters_up == sum(len(OWNED[k]) for k in record.participants) * WIDTH


@pytest.mark.full
def test_fedkd_sends_factors_or_the_weight_whichever_is_smaller() -> None:
    federation = unlike(deep_width=7)
    energies = (0.6, 0.9)
    method = FedKD(energy_start=energies[0], energy_end=energies[1], mentee="small", **LOCAL)
    run = run_of(method, federation, participation=0.75, steps=0)
    records = [run.step() for _ in range(3)]
    projections = [method.client_init(run.task, i).projection.numpy() for i in federation.infos]
    mentee = layers(federation.architectures["small"].initial)
    history, *_, sent = reference.fedkd(
        mentee, start_of(federation), projections, train_data(federation), plan(run), 0.2, energies
    )
    assert [r.parameters_up for r in records] == sent
    assert sent[0] < 3 * SMALL
    # down: every update a participant has missed, as the server compressed it
    rounds, at, wanted = plan(run), dict.fromkeys(range(len(SIZES)), 0), []
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
        wanted.append(sum(min(sum(numbers[at[k] : t]), SMALL) for k in clients))
        at |= dict.fromkeys(clients, t)
    assert [r.parameters_down for r in records] == wanted


# -- losses --------------------------------------------------------------------------------------------------


def test_divergences_are_means_over_examples_and_not_over_classes() -> None:
    rng = np.random.default_rng(0)
    t, s = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    p, q = reference.softmax(t), reference.softmax(s)
    batch = Batch(torch.zeros(5), torch.zeros(5, dtype=torch.int64))
    found = kl_divergence(torch.tensor(t), torch.tensor(s), batch)
    assert float(found) == pytest.approx(float((p * np.log(p / q)).sum() / 5), abs=1e-14)
    found = soft_cross_entropy(torch.tensor(s), torch.tensor(p))
    np.testing.assert_allclose(found.numpy(), -(p * np.log(q)).sum(1), atol=1e-14)
    assert float(square_error(torch.tensor(t), torch.tensor(s), batch)) == pytest.approx(
        float(((t - s) ** 2).mean()), abs=1e-14
    )


def test_padding_counts_in_no_mean() -> None:
    values = torch.tensor([1.0, 2.0, torch.inf])
    batch = Batch(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.tensor([True, True, False]))
    assert float(batch.mean(values)) == 1.5
    assert batch.total(torch.stack([values, values], 1)).tolist() == [3.0, 3.0]
    empty = Batch(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool))
    assert float(empty.mean(values)) == 0.0


# -- FML -----------------------------------------------------------------------------------------------------


def after_one_step(method: FML) -> tuple[Any, Any]:
    run = run_of(method, unlike(deep_width=7), rounds=1)
    return run.state.server, run.state.clients


@pytest.mark.full
def test_the_private_model_does_not_learn_from_the_loss_of_the_meme() -> None:
    found = [after_one_step(FML(alpha=0.5, beta=b, meme="small", **ONE_STEP)) for b in (0.0, 0.4, 1.0)]
    for server, clients in found[1:]:
        for k, state in clients.items():
            tree.map_leaves(
                lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-15), state, found[0][1][k]
            )
        assert not torch.allclose(server["head.weight"], found[0][0]["head.weight"], atol=1e-6)


@pytest.mark.full
def test_the_meme_does_not_learn_from_the_loss_of_the_private_model() -> None:
    found = [after_one_step(FML(alpha=a, beta=0.5, meme="small", **ONE_STEP)) for a in (0.0, 0.4, 1.0)]
    for server, clients in found[1:]:
        tree.map_leaves(
            lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-15), server, found[0][0]
        )
        assert not torch.allclose(clients[0]["head.weight"], found[0][1][0]["head.weight"], atol=1e-6)


# -- FedKD ---------------------------------------------------------------------------------------------------


def matrix(rank: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)))


def test_updates_and_not_weights_are_decomposed() -> None:
    federation = alike()
    method = FedKD(energy_start=0.9, energy_end=0.9, **LOCAL)
    run = run_of(method, federation, steps=0)
    before = run.state.server.mentee
    assert torch.linalg.matrix_rank(before["body.0.weight"]) == WIDTH
    update = {n: torch.zeros_like(p) for n, p in before.items()}
    update["body.0.weight"] = matrix(1, WIDTH, 12)
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
    w = matrix(3, 40, 30) + 0.1 * matrix(20, 40, 30, 1)
    found = compress_update({"w": w}, energy)["w"]
    assert isinstance(found, Factored)
    u, s, vt = np.linalg.svd(w.numpy(), full_matrices=False)
    r = found.rank
    assert (s[:r] ** 2).sum() >= energy * (s**2).sum() > (s[: r - 1] ** 2).sum()
    np.testing.assert_allclose(found.dense().numpy(), (u[:, :r] * s[:r]) @ vt[:r], atol=1e-10)
    np.testing.assert_allclose(found.s.numpy(), s[:r], atol=1e-10)
    lost = float((w - found.dense()).square().sum())
    assert lost == pytest.approx(float((s[r:] ** 2).sum()), rel=1e-8)
    np.testing.assert_allclose((found.u.T @ found.u).numpy(), np.eye(r), atol=1e-12)
    np.testing.assert_allclose((found.v.T @ found.v).numpy(), np.eye(r), atol=1e-12)


def test_matrices_are_sent_whole_where_factors_are_no_smaller() -> None:
    # rank 5 of a 12 x 10 matrix: 5 * 23 = 115 < 120 numbers; rank 6: 138
    for rank, factored in ((5, True), (6, False)):
        u, _ = torch.linalg.qr(matrix(12, 12, 12))
        v, _ = torch.linalg.qr(matrix(10, 10, 10, 1))
        w = u[:, :rank] @ v[:, :rank].T
        found = compress_update({"w": w}, 0.999)["w"]
        assert isinstance(found, Factored) == factored
        assert tree.numel(found) == (115 if factored else 120)
        torch.testing.assert_close(decompress_update({"w": found}, {"w": w})["w"], w, rtol=0, atol=1e-12)


def test_vectors_and_single_rows_are_sent_whole() -> None:
    update = {"bias": torch.randn(9), "scalar": torch.tensor(2.0), "row": torch.randn(1, 50)}
    found = compress_update(update, 0.5)
    assert all(found[n] is update[n] for n in update)


def test_a_kernel_is_a_matrix_of_outputs_by_all_else() -> None:
    # [O, I, k1, k2] = [16, 8, 3, 3] of rank 2 as a 16 x 72 matrix, of full rank in any other reading
    kernel = matrix(2, 16, 72).reshape(16, 8, 3, 3)
    found = compress_update({"w": kernel}, 0.9999)["w"]
    assert isinstance(found, Factored)
    assert (found.rank, found.u.shape, found.v.shape) == (2, (16, 2), (72, 2))
    torch.testing.assert_close(
        decompress_update({"w": found}, {"w": kernel})["w"], kernel, rtol=0, atol=1e-10
    )


def test_an_update_of_zeros_keeps_rank_one() -> None:
    found = compress_update({"w": torch.zeros(20, 20)}, 0.9)["w"]
    assert isinstance(found, Factored)
    assert found.rank == 1
    assert torch.equal(found.dense(), torch.zeros(20, 20))


def test_equal_matrices_have_equal_factors_whatever_signs_the_decomposition_picks() -> None:
    w = matrix(6, 8, 6)
    f = compute_svd(w)
    at = f.u.abs().argmax(0)
    assert (f.u[at, torch.arange(6)] > 0).all()
    torch.testing.assert_close(f.dense(), w, rtol=0, atol=1e-12)
    assert (f.s[:-1] >= f.s[1:]).all()
    assert truncate_svd(f, 2).rank == 2


@pytest.mark.full
@pytest.mark.parametrize("engine", [Sequential, Wire])
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_a_client_that_missed_rounds_rebuilds_the_mentee_bit_for_bit(engine, lost: float) -> None:
    method = FedKD(energy_start=0.6, energy_end=0.9, **LOCAL)
    run = run_of(
        method, unlike(**F32), rounds=9, steps=0, engine=engine, participation=0.5, lost_replies=lost
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


@pytest.mark.full
def test_the_share_of_energy_rises_linearly_to_the_last_round() -> None:
    seen = []

    class Spied(FedKD):
        def server_update(self, server, total, view):
            seen.append(self._energy(view))
            return super().server_update(server, total, view)

    run_of(Spied(energy_start=0.5, energy_end=0.9, **LOCAL), alike(), rounds=5)
    assert seen == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])


@pytest.mark.full
def test_fedkd_infers_with_the_mentor() -> None:
    federation = unlike(deep_width=7)
    run = run_of(FedKD(mentee="small", **LOCAL), federation)
    x = federation.clients[0].test.x
    wanted = reference.forward(layers(run.state.clients[0].mentor), x.double().numpy())[1]
    np.testing.assert_allclose(predictor_of(run, 0)(x).detach().numpy(), wanted, atol=1e-12)


# -- LG-FedAvg -----------------------------------------------------------------------------------------------


def test_lg_fedavg_infers_with_the_head_after_aggregation() -> None:
    federation = unlike()
    run = run_of(LGFedAvg(**LOCAL), federation, steps=2)
    old = run.state.server
    record = run.step()
    for info, data in zip(federation.infos, federation.clients, strict=True):
        x, y = data.test.x.double().numpy(), data.test.y.numpy()
        body = layers(run.state.clients[info.id])
        fresh, stale = (reference.forward([*body, *layers(h)], x)[1] for h in (run.state.server, old))
        np.testing.assert_allclose(
            predictor_of(run, info.id)(data.test.x).detach().numpy(), fresh, atol=1e-12
        )
        assert not np.allclose(fresh, stale, atol=1e-6)
        assert record.values()[info.id] == (fresh.argmax(1) == y).mean()


# fedem infers by a mixture of several models, of which test_clusters.py speaks
@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(set(KINDS) - {"fedem"}))
def test_recorded_accuracy_is_that_of_the_personal_model_on_test_examples(name: str) -> None:
    federation = (unlike if METHODS[name].heterogeneous else alike)()
    run = run_of(METHODS[name](**LOCAL), federation, steps=2)
    record = run.step()
    for info, data in zip(federation.infos, federation.clients, strict=True):
        down = run.method.download(run.state.server, info)
        # the round that is over: its order of examples is that of an adaptation before inference, too
        params = personal(run.method, run.state_of(info), down, view_of(run, info.id, run.round - 1))
        in_order = {n: params[n] for n in federation.architectures[info.architecture].initial}
        scores = reference.forward(layers(in_order), data.test.x.double().numpy())[1]
        assert record.values()[info.id] == (scores.argmax(1) == data.test.y.numpy()).mean()
        assert record.values("accuracy", "val")[info.id] is None


# -- FD ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fd_targets_are_probabilities_and_thirty_rounds_stay_finite() -> None:
    run = run_of(FD(optimizer=SGD(lr=0.1), batch_size=8), unlike(**F32), rounds=30, steps=0)
    losses = []
    for _ in range(30):
        losses.append(run.step().loss["local"])
        for info in run.federation.infos:
            down = run.method.download(run.state.server, info)
            rows = down.mean[down.known]
            assert rows.min() >= -1e-6
            torch.testing.assert_close(rows.sum(1), torch.ones(len(rows)), rtol=0, atol=1e-5)
            assert torch.equal(down.mean[~down.known], torch.zeros_like(down.mean[~down.known]))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(t).all() for s in run.state.clients.values() for t in s.values())


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_fd_averages_all_outputs_of_a_model_with_more_of_them_than_classes(engine: Any) -> None:
    federation = Federation.from_arrays(arrays(), lambda: Net(WIDTH, classes=CLASSES + 2), classes=CLASSES)
    run = run_of(FD(**LOCAL), federation, 2, engine=engine)
    for k, theta in run.state.clients.items():
        x, y = train_data(federation)[k]
        scores = torch.func.functional_call(Net(WIDTH, classes=CLASSES + 2), theta, torch.from_numpy(x))
        own = run.state.server.latest[str(k)]
        for label, mean in zip(own.labels.tolist(), own.mean, strict=True):
            wanted = scores.softmax(-1)[torch.from_numpy(y) == label].mean(0).detach()
            torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*makes 6 scores")
def test_fd_refuses_models_of_other_numbers_of_outputs() -> None:
    models = {"more": lambda: Net(WIDTH, classes=CLASSES + 2), "small": lambda: Net(WIDTH)}
    federation = Federation.from_arrays(arrays(), models, classes=CLASSES)
    with pytest.raises(TaskError, match="more has 6, small has 4"):
        start(FD(), federation)


@pytest.mark.full
def test_fd_leaves_out_the_clients_own_outputs() -> None:
    federation = unlike()
    run = run_of(FD(**LOCAL), federation)
    for info in federation.infos:
        down = run.method.download(run.state.server, info)
        # replacing what the client itself said moves none of its targets
        server = copy.deepcopy(run.state.server)
        own = server.latest[str(info.id)]
        other = type(own)(own.labels, torch.full_like(own.mean, 0.25))
        moved = server_update(
            run.method, server, [Reply(info, other)], ServerView(run.task, 3, federation.key)
        )
        again = run.method.download(moved, info)
        torch.testing.assert_close(again.mean, down.mean, rtol=0, atol=1e-12)
        assert torch.equal(again.known, down.known)


# -- FedProto ------------------------------------------------------------------------------------------------


def proto_run(infer: str, known: list[bool]) -> tuple[Run, Prototypes]:
    run = run_of(FedProto(infer=infer, **LOCAL), alike())
    mean = torch.where(
        torch.tensor(known)[:, None], run.state.server.mean, torch.zeros(1, dtype=torch.float64)
    )
    return run, Prototypes(mean, torch.tensor(known))


@pytest.mark.parametrize("known", [[True, True, False, True], [False, True, True, False]])
def test_the_nearest_prototype_is_never_of_a_class_without_one(known: list[bool]) -> None:
    run, protos = proto_run("nearest", known)
    # at the origin, where a class without prototype holds its zeros, such a class would be the nearest
    small = {n: p * 1e-3 for n, p in run.state.clients[0].model.items()}
    state = ClientState(small, run.state.clients[0].own)
    x = torch.cat([c.test.x for c in run.federation.clients])
    r = reference.forward(layers(small), x.double().numpy())[0][-1]
    gap = ((r[:, None, :] - protos.mean.numpy()[None]) ** 2).sum(2)
    gap[:, ~np.array(known)] = np.inf
    found = predictor(run.method, state, protos, view_of(run, 0))(x).argmax(1)
    assert found.tolist() == gap.argmin(1).tolist()


def test_the_nearest_own_prototype_is_of_a_class_the_client_has() -> None:
    run, protos = proto_run("nearest_own", [True] * CLASSES)
    x = torch.cat([c.test.x for c in run.federation.clients])
    for k, owned in enumerate(OWNED):
        found = predictor(run.method, run.state.clients[k], protos, view_of(run, k))(x).argmax(1)
        r = reference.forward(layers(run.state.clients[k].model), x.double().numpy())[0][-1]
        gap = ((r[:, None, :] - protos.mean.numpy()[None]) ** 2).sum(2)
        wanted = [min(owned, key=lambda j, row=row: row[j]) for row in gap]
        assert found.tolist() == wanted


# -- pFedLoRA ------------------------------------------------------------------------------------------------


def test_an_adapter_started_by_decomposition_of_the_head_begins_as_the_head() -> None:
    federation = unlike()
    model = federation.architectures["deep"]
    r = torch.randn(6, WIDTH, dtype=torch.float64)
    for width in (CLASSES, CLASSES + 3):
        adapter = PFedLoRA(width=width, start="svd", **LOCAL).server_init(federation.task(1))
        assert adapter.a.shape == (width, WIDTH)
        torch.testing.assert_close(
            adapter.apply(r, relu=False), model.head(model.initial, r), rtol=0, atol=1e-6
        )
    narrow = PFedLoRA(width=2, start="svd", **LOCAL).server_init(federation.task(1))
    u, s, vt = np.linalg.svd(model.initial["head.weight"].numpy(), full_matrices=False)
    np.testing.assert_allclose((narrow.b @ narrow.a).numpy(), (u[:, :2] * s[:2]) @ vt[:2], atol=1e-6)


def test_an_adapter_of_a_head_of_two_layers_decomposes_the_first() -> None:
    x = np.zeros((8, 1, 8, 8), np.float32)
    make = {"cnn": lambda: CNN((1, 8, 8), 3, (2, 3), (20, 9), split="fc1")}
    federation = Federation.from_arrays([(x, np.arange(8) % 3)], make, classes=3)
    initial = federation.architectures["cnn"].initial
    w2, b2, w3, b3 = (p.double().numpy() for n, p in initial.items() if n.startswith("head."))
    adapter = PFedLoRA(width=4, start="svd", **LOCAL).server_init(federation.task(1))
    u, s, vt = np.linalg.svd(w2, full_matrices=False)
    np.testing.assert_allclose((adapter.b @ adapter.a).numpy(), w3 @ (u[:, :4] * s[:4]) @ vt[:4], atol=1e-5)
    np.testing.assert_allclose(adapter.b_bias.numpy(), w3 @ b2 + b3, atol=1e-5)


def test_a_random_adapter_is_uniform_as_a_linear_layer_draws_it() -> None:
    federation = unlike(**F32)
    adapter = PFedLoRA(width=400, **LOCAL).server_init(federation.task(1))
    for t, fan_in in ((adapter.a, WIDTH), (adapter.a_bias, WIDTH), (adapter.b, 400), (adapter.b_bias, 400)):
        bound = fan_in**-0.5
        assert t.abs().max() <= bound
        if t.numel() > 300:
            assert abs(float(t.mean())) < 0.1 * bound
            assert float(t.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


# -- what does not fit is said before any training -----------------------------------------------------------


def start(method: Any, federation: Federation) -> Run:
    return Run(method, federation, RunSettings(rounds=1), Sequential())


@pytest.mark.parametrize("method", [FedAvg(), FedProx()])
def test_averaging_whole_models_refuses_different_ones(method) -> None:
    with pytest.raises(TaskError, match=r"client 0 holds deep.*client 1 holds small"):
        start(method, unlike())


@pytest.mark.parametrize("method", [PFedLoRA(), FedProto()])
def test_representations_of_two_widths_are_refused_with_clients_and_widths(method) -> None:
    with pytest.raises(TaskError, match=r"client 0 \(deep\) has 7 and client 1 \(small\) has 10"):
        start(method, unlike(deep_width=7))


def test_heads_of_two_shapes_are_refused_with_clients_and_shapes() -> None:
    with pytest.raises(TaskError, match=r"client 0 \(deep\) and client 1 \(small\) differ"):
        start(LGFedAvg(), unlike(deep_width=7))


def test_an_unknown_small_model_is_refused() -> None:
    for method in (FML(meme="nope"), FedKD(mentee="nope")):
        with pytest.raises(TaskError, match="nope"):
            start(method, unlike())


def test_the_small_model_is_the_one_with_the_fewest_parameters() -> None:
    federation = unlike()
    assert federation.architectures["small"].parameters < federation.architectures["deep"].parameters
    assert sorted(start(FML(), federation).state.server) == sorted(federation.architectures["small"].initial)
    assert sorted(start(FedKD(), federation).state.server.mentee) == sorted(
        federation.architectures["small"].initial
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedProx(mu=-1.0),
        lambda: FML(alpha=1.5),
        lambda: FML(beta=-0.1),
        lambda: FedKD(energy_start=0.9, energy_end=0.8),
        lambda: FedKD(energy_start=0.0),
        lambda: FedKD(energy_end=1.1),
        lambda: FD(gamma=-1.0),
        lambda: FedProto(lam=-1.0),
        lambda: PFedLoRA(mu=0.4),
        lambda: PFedLoRA(mu=1.1),
        lambda: PFedLoRA(width=0),
        lambda: FedAvg(epochs=0),
        lambda: FedAvg(batch_size=0),
    ],
)
def test_settings_out_of_range_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (FedProx, "mu"),
        (FD, "gamma"),
        (FedProto, "lam"),
        (FML, "alpha"),
        (FedKD, "energy_start"),
        (PFedLoRA, "mu"),
    ],
    ids=lambda v: getattr(v, "title", None),
)
def test_a_setting_that_is_not_a_number_is_refused(method, setting: str) -> None:
    # NaN compares false with everything, so that a check of the form `x < 0` lets it pass
    with pytest.raises(ConfigError):
        method(**{setting: float("nan")})


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(weighting="example"),
        lambda: FedProto(infer="neares"),
        lambda: FedProto(weighting="example"),
        lambda: PFedLoRA(start="SVD"),
        lambda: RunSettings(on_nan="stopp"),
    ],
    ids=["FedAvg weighting", "FedProto infer", "FedProto weighting", "pFedLoRA start", "on_nan"],
)
def test_a_choice_that_does_not_exist_is_refused(make) -> None:
    # it would otherwise be taken for the other one, without a word
    with pytest.raises(ConfigError):
        make()


class Wet(Net):
    """A model with dropout between its representation's layers."""

    def __init__(self, p: float) -> None:
        super().__init__(WIDTH)
        self.body.append(nn.Dropout(p))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method", [FML(meme="wet", **LOCAL), FedKD(mentee="wet", **LOCAL)], ids=["FML", "FedKD"]
)
def test_dropout_of_a_small_shared_model_acts_at_clients_of_other_models(method) -> None:
    sent = []
    for p in (0.0, 0.5):
        models = {"deep": lambda: Net(9, 7), "wet": lambda p=p: Wet(p)}
        federation = Federation.from_arrays(
            arrays(), models, classes=CLASSES, architecture=["deep"] * len(SIZES)
        )
        server = run_of(method, federation, rounds=1).state.server
        sent.append(getattr(server, "mentee", server)["head.weight"])
    assert not torch.equal(*sent)


def test_the_reference_has_the_gradients_of_its_losses() -> None:
    """Central differences of a network's loss, so that the reference is not merely consistent with the
    package."""
    federation = unlike()
    net = start_of(federation)[0]
    x, y = train_data(federation)[0]
    inputs, scores = reference.forward(net, x)
    grads = reference.backward(
        net, inputs, (reference.softmax(scores) - reference.one_hot(y, CLASSES)) / len(y)
    )
    rng = np.random.default_rng(0)
    for layer in range(len(net)):
        for part in (0, 1):
            towards = rng.normal(size=net[layer][part].shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = [list(pair) for pair in net]
                moved[layer][part] = moved[layer][part] + step * towards
                values.append(reference.cross_entropy(reference.forward([tuple(p) for p in moved], x)[1], y))
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(
                float((grads[layer][part] * towards).sum()), abs=1e-7
            )


def test_data_of_the_setting_is_as_the_tests_assume() -> None:
    for part, labels, n in zip(arrays(), OWNED, SIZES, strict=True):
        assert sorted(set(part["train"][1].tolist())) == list(labels)
        assert len(part["train"][1]) == n
    assert Net(WIDTH).head.weight.dtype == torch.float64


@pytest.mark.parametrize("name", ["standalone", "fedkd", "lg_fedavg"])
def test_clients_of_one_architecture_begin_with_the_same_weights(name: str) -> None:
    """As the pages of these methods say; clients 0 and 2 hold one architecture, clients 1 and 3 another."""
    federation = unlike()
    task = run_of(METHODS[name](), federation, steps=0).task
    starts = [dict(tree.leaves(METHODS[name]().client_init(task, c))) for c in federation.infos]
    for a, b in ((0, 2), (1, 3)):
        assert starts[a].keys() == starts[b].keys()
        assert all(torch.equal(starts[a][n], starts[b][n]) for n in starts[a])
    assert starts[0].keys() != starts[1].keys() or any(
        starts[0][n].shape != starts[1][n].shape for n in starts[0]
    )


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_batch_normalization_is_welcome_and_keeps_its_statistics(name: str) -> None:
    """As the pages of these methods say."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.body.append(nn.BatchNorm1d(WIDTH))
            self.double()

    federation = Federation.from_arrays(arrays(), Normed, classes=CLASSES)
    run = run_of(METHODS[name](batch_size=7), federation, rounds=2)
    before = run.task.common_model("").initial
    assert {"body.2.weight", "body.2.bias"} < {*run.state.server} == {*before}
    assert not torch.equal(run.state.server["body.2.weight"], before["body.2.weight"])
