"""Attacks and rules in whole runs, against numpy on the updates of the clients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod, ClientInfo, Mean, ServerView, Sum
from fedlowrank.core.contract.contribution import contribution_leaves
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.engine import ClientJob
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Attack, Clipping, Compression, Privacy, Robust, SecureSums
from tests.methods.setting import federate_one_model

METHOD = FedAvg(batch_size=8, optimizer=SGD(lr=0.1))
CLIENTS = [
    {"train": (np.random.default_rng(i).normal(size=(12 + i, 12)).astype("float32"), np.arange(12 + i) % 4)}
    for i in range(7)
]


def run_of(method: AnyMethod = METHOD, rounds: int = 1, **settings: Any) -> Run:
    return Run(
        method, federate_one_model(clients=CLIENTS), RunSettings(rounds=rounds, **settings), Sequential()
    )


def vector(value: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(value)])


def moved(**settings: Any) -> np.ndarray:
    """How far the server moves in a round."""
    run = run_of(**settings)
    before = vector(run.state.server)
    run.step()
    return vector(run.state.server) - before


def updates_of() -> np.ndarray:
    """What each client changes, ``[clients, numbers]``."""
    actual = []
    for i in range(len(CLIENTS)):
        run = run_of()
        start = vector(run.state.server)
        run.step({str(j): "left out" for j in range(len(CLIENTS)) if j != i})
        actual.append(vector(run.state.server) - start)
    return np.stack(actual)


@pytest.fixture(scope="module")
def updates() -> np.ndarray:
    return updates_of()


WEIGHTS = np.array([12.0 + i for i in range(7)])


@pytest.mark.full
def test_the_median_is_that_of_each_number(updates: np.ndarray) -> None:
    uniform = dataclasses.replace(METHOD, weighting="uniform")
    assert np.allclose(
        moved(method=uniform, robust=Robust("median")), np.median(updates, 0), rtol=0, atol=1e-12
    )


def test_the_trimmed_mean_leaves_out_two_at_either_end(updates: np.ndarray) -> None:
    uniform = dataclasses.replace(METHOD, weighting="uniform")
    expected = np.sort(updates, 0)[2:-2].mean(0)
    assert np.allclose(
        moved(method=uniform, robust=Robust("trimmed_mean", 0.2)), expected, rtol=0, atol=1e-12
    )


def test_updates_are_bounded_by_the_median_norm(updates: np.ndarray) -> None:
    norms = np.linalg.norm(updates, axis=1)
    bounded = updates * np.minimum(1, np.median(norms) / norms)[:, None]
    expected = np.average(bounded, 0, weights=WEIGHTS)
    assert np.allclose(moved(robust=Robust("norm_bound", weights="examples")), expected, rtol=0, atol=1e-12)
    assert not np.allclose(np.average(updates, 0, weights=WEIGHTS), expected, atol=1e-4)


def test_the_geometric_median_weighs_replies(updates: np.ndarray) -> None:
    share = WEIGHTS / WEIGHTS.sum()
    z, beta = share @ updates, share
    for _ in range(100):
        beta = share / np.maximum(1e-6, np.linalg.norm(updates - z, axis=1))
        beta = beta / beta.sum()
        z = beta @ updates
    run = run_of(robust=Robust("geometric_median", weights="examples"))
    before = vector(run.state.server)
    record = run.step()
    assert np.allclose(vector(run.state.server) - before, z, rtol=0, atol=1e-9)
    assert np.allclose(list(record.server_metrics["weight"].values()), beta, rtol=1e-5)


@dataclass(frozen=True)
class AddsUp(FedAvg):
    """The server adds up what clients changed, without weights."""

    def contribution(self, server: Any, upload: Any, client: Any) -> Sum[Any]:
        return Sum(tree.map_leaves(torch.sub, upload, server))

    def server_update(self, server: Any, total: Any, view: Any) -> Any:
        return tree.map_leaves(torch.add, server, total)


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_the_geometric_median_keeps_the_size_of_a_plain_sum(weights: Any) -> None:
    # one client's examples for all: equal updates, of which the geometric median is the mean
    method = AddsUp(batch_size=64, optimizer=SGD(lr=0.1))
    clients = [CLIENTS[3]] * 7

    def change(**settings: Any) -> np.ndarray:
        federation = federate_one_model(clients=clients)
        run = Run(method, federation, RunSettings(rounds=1, **settings), Sequential())
        before = vector(run.state.server)
        run.step()
        return vector(run.state.server) - before

    plain = change()
    assert np.abs(plain).max() > 1e-3
    robust = change(robust=Robust("geometric_median", weights=weights))
    assert np.allclose(robust, plain, rtol=1e-5, atol=1e-9)


@pytest.mark.full
def test_krum_takes_the_reply_nearest_to_others(updates: np.ndarray) -> None:
    square = ((updates[:, None] - updates[None]) ** 2).sum(-1)
    scores = np.sort(square, 1)[:, 1 : 7 - 2 - 2 + 1].sum(1)
    record = (run := run_of(robust=Robust("krum", 0.2))).step()
    assert [int(i) for i, w in record.server_metrics["weight"].items() if w] == [int(scores.argmin())]
    start = vector(run_of().state.server)
    assert np.allclose(vector(run.state.server) - start, updates[scores.argmin()], rtol=0, atol=1e-12)
    several = moved(robust=Robust("multi_krum", 0.2, weights="examples"))
    best = np.argsort(scores)[:5]
    assert np.allclose(several, np.average(updates[best], 0, weights=WEIGHTS[best]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "factor"), [("sign_flip", -1.0), ("scaled", 10.0)])
def test_hostile_clients_send_another_update(kind: Any, factor: float, updates: np.ndarray) -> None:
    run = run_of(attack=Attack(kind, share=0.3))
    assert len(run.hostile) == 2
    sent = updates.copy()
    sent[sorted(run.hostile)] *= factor
    expected = np.average(sent, 0, weights=WEIGHTS)
    assert np.allclose(moved(attack=Attack(kind, share=0.3)), expected, rtol=0, atol=1e-9)
    assert [row["hostile"] for row in run.clients()] == [i in run.hostile for i in range(7)]


def test_an_attack_acts_on_what_the_server_decodes(updates: np.ndarray) -> None:
    """A compressed update is attacked as it arrives, whatever its form on the way."""
    settings: dict[str, Any] = {
        "compression": Compression("bfloat16"),
        "attack": Attack("sign_flip", share=0.3),
    }
    run = run_of(**settings)
    start = vector(run.state.server.inner)
    run.step()
    sent = updates.copy()
    sent[sorted(run.hostile)] *= -1
    actual = vector(run.state.server.inner) - start
    assert np.allclose(
        actual, np.average(sent, 0, weights=WEIGHTS), rtol=0, atol=2e-2 * np.abs(updates).max()
    )


@pytest.mark.full
def test_a_rule_undoes_what_an_attack_does_to_the_mean(updates: np.ndarray) -> None:
    honest = np.linalg.norm(np.average(updates, 0, weights=WEIGHTS))
    attack = Attack("scaled", share=0.28, strength=1e4)
    assert np.linalg.norm(moved(attack=attack)) > 100 * honest
    for rule in ("median", "trimmed_mean", "norm_bound", "krum", "multi_krum"):
        assert np.linalg.norm(moved(attack=attack, robust=Robust(rule, 0.28))) < 3 * honest, rule


def test_under_a_rule_every_client_counts_the_same(updates: np.ndarray) -> None:
    expected = np.sort(updates, 0)[2:-2].mean(0)
    assert np.allclose(moved(robust=Robust("trimmed_mean", 0.2)), expected, rtol=0, atol=1e-12)


def test_a_lie_about_the_number_of_examples_counts_at_most_ten_times() -> None:
    lying = run_of(attack=Attack("examples", share=0.3))
    assert {lying.federation.infos[i].example_count for i in lying.hostile} == {
        100 * (12 + i) for i in lying.hostile
    }
    claimed = [i.example_count for i in lying.federation.infos]
    for weights, most in (("examples", 10 * int(np.median(claimed))), ("equal", int(np.median(claimed)))):
        guarded = run_of(attack=Attack("examples", share=0.3), robust=Robust("median", weights=weights))  # type: ignore[arg-type]
        counts = [guarded.weigh_client(i).example_count for i in guarded.federation.infos]
        assert max(counts) == most
        assert (len(set(counts)) == 1) == (weights == "equal")


@pytest.mark.full
def test_lies_do_not_carry_an_attack_through_a_rule(updates: np.ndarray) -> None:
    """Hostile updates with claims a hundred times too high, against what the rule does without them."""
    for rule in ("median", "geometric_median", "multi_krum"):
        run = run_of(robust=Robust(rule, 0.28), attack=Attack("scaled", share=0.28, strength=1e3))
        liars = [
            dataclasses.replace(i, example_count=100 * i.example_count) if i.id in run.hostile else i
            for i in run.federation.infos
        ]
        run.federation = dataclasses.replace(run.federation, infos=liars)
        start = vector(run.state.server)
        run.step()
        assert np.linalg.norm(vector(run.state.server) - start) < 3 * np.linalg.norm(updates, axis=1).max(), (
            rule
        )


def test_the_weights_of_clusters_stay_under_the_geometric_median() -> None:
    """A method's own weights, such as pi of a mixture, are multiplied and not replaced."""
    from fedlowrank.core.contract import Mean
    from fedlowrank.rounds.inspection import reweight

    actual = reweight({"a": Mean(torch.ones(1), 90.0), "b": Mean(torch.ones(1), 10.0)}, 0.3, 4)
    assert [actual["a"].weight, actual["b"].weight] == [27.0, 3.0]


def test_replies_that_were_lost_are_not_judged() -> None:
    run = run_of(robust=Robust("multi_krum", 0.1))
    record = run.step({"3": "it was lost"})
    assert record.server_metrics["weight"].keys() == {"0", "1", "2", "4", "5", "6"}
    assert record.lost == {"3": "it was lost"}


def test_too_few_replies_for_krum_are_named() -> None:
    with pytest.raises(ConfigError, match="at least 11 replies a round, and 7"):
        run_of(robust=Robust("krum", 0.45))
    run = run_of(robust=Robust("krum", 0.28))
    before = run.state
    record = run.step({str(i): "it was lost" for i in range(3)})
    assert tree.equal(run.state.server, before.server)
    assert "krum needs at least 7 replies, and there were 4" in record.lost["5"]


def test_clusters_of_a_minority_are_not_emptied_by_the_median() -> None:
    """Weights of clusters are counted, so that a model which two of seven clients chose still learns."""

    def learnt(**settings: Any) -> list[bool]:
        run = run_of(METHODS["ifca"](batch_size=8, optimizer=SGD(lr=0.1), clusters=2), **settings)
        before = run.state.server
        run.step()
        changes = [new - before[name] for name, new in run.state.server.items()]
        return [any(bool(change[c].any()) for change in changes) for c in range(2)]

    assert learnt() == learnt(robust=Robust("median")) == learnt(robust=Robust("trimmed_mean"))


def test_effective_updates_are_compared_whatever_the_gauge_of_the_factors() -> None:
    """Krum's choice among LoRA replies is that by their dense products."""
    method = METHODS["fedhl"](batch_size=8, optimizer=SGD(lr=0.1))
    run = run_of(method, robust=Robust("krum", 0.2))
    inspection = run.inspection
    assert inspection is not None
    server, infos = run.state.server, run.federation.infos
    jobs = [ClientJob(run.state_of(i), run.method.download(server, i), i) for i in infos]
    uploads = {
        i.id: r.upload
        for i, r in zip(infos, run.engine.run(run.method, run.federation, run.task, 0, jobs), strict=True)
    }
    dense = []
    for i in infos:
        base, up = jobs[i.id].down.message, uploads[i.id]
        scale = run.method.describe_update(jobs[i.id].down, i, run.task).scale
        own = [scale * (up.factors[n].dense() - base.factors[n].dense()) for n in up.factors]
        own += [up.rest[n] - base.rest[n] for n in up.rest]
        dense.append(vector(own))
    square = ((np.stack(dense)[:, None] - np.stack(dense)[None]) ** 2).sum(-1)
    scores = np.sort(square, 1)[:, 1:4].sum(1)
    # another gauge of the same product changes nothing
    turned = {
        i: dataclasses.replace(
            u, factors={n: dataclasses.replace(p, b=p.b * 8.0, a=p.a / 8.0) for n, p in u.factors.items()}
        )
        for i, u in uploads.items()
    }
    for form in (uploads, turned):
        used, _ = inspection.judge(form, server, run.federation.key, lambda *_: 1.0)
        assert list(used) == [int(scores.argmin())]


@pytest.mark.full
def test_secure_sums_are_the_plain_ones_to_their_grid() -> None:
    plain, masked = run_of(rounds=3), run_of(rounds=3, secure=SecureSums(on=True))
    for _ in range(3):
        plain.step()
        masked.step()
    step = 2 * 8.0 / 2**22
    assert np.abs(vector(masked.state.server) - vector(plain.state.server)).max() < 6 * step
    assert not tree.equal(masked.state.server, plain.state.server)


def test_a_round_below_the_threshold_gives_nothing_and_keeps_no_state() -> None:
    run = run_of(METHODS["scaffold"](batch_size=8), secure=SecureSums(on=True, threshold=0.9))
    before = run.state
    record = run.step({"0": "it was lost", "5": "it was lost"})
    assert tree.equal(run.state.server, before.server)
    assert len(run.state.clients) == 0
    assert len(record.lost) == 7


def test_what_a_method_cannot_do_is_said_before_training() -> None:
    for name, settings, named in (
        ("fedhl", {"robust": Robust("median")}, "single replies"),
        ("fedhl", {"secure": SecureSums(on=True)}, "single replies"),
        ("fedkd", {"compression": Compression("int8")}, "compresses"),
    ):
        with pytest.raises(TaskError, match=named):
            run_of(METHODS[name](), **settings)


def test_bits_are_those_of_before_where_nothing_is_asked_for() -> None:
    """Stages that are off are absent: nothing wraps the method, and no upload waits for others."""
    run = run_of()
    assert run.method is METHOD
    assert run.inspection is None
    assert run.budget is None
    assert not isinstance(run.state.server, torch.Tensor)
    assert "weight" not in run.step().server_metrics


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedslr", "gpgd"])
def test_weights_that_are_sent_as_factors_are_compared_whole(name: str) -> None:
    """Once the server's weights have lost rank, downloads hold factors, and uploads are dense."""
    method = METHODS[name](batch_size=8, optimizer=SGD(lr=0.1), lam=0.3, prox_step=1.0)
    run = run_of(method, rounds=4)
    for _ in range(3):
        run.step()
    assert any(
        not isinstance(w, torch.Tensor)
        for w in method.download(run.state.server, run.federation.infos[0]).values()
    )
    for settings in (
        {"compression": Compression("int8")},
        {"clipping": Clipping(0.1)},
        {"robust": Robust("norm_bound")},
        {"robust": Robust("multi_krum")},
        {"attack": Attack("sign_flip")},
        {"clipping": Clipping(0.1), "privacy": Privacy("central", noise=0.01, delta=1e-3)},
    ):
        other = run_of(method, rounds=4, **settings)  # type: ignore[arg-type]
        for _ in range(4):
            other.step()


def test_another_gauge_does_not_carry_a_reply_through_where_factors_are_averaged() -> None:
    """(cB, A/c) is the same product; but a server that averages B and A would be moved far."""
    method = METHODS["fedit"](batch_size=8, optimizer=SGD(lr=0.1))
    for rule in ("norm_bound", "multi_krum", "geometric_median"):
        run = run_of(method, robust=Robust(rule, 0.2))
        inspection, server, infos = run.inspection, run.state.server, run.federation.infos
        assert inspection is not None
        jobs = [ClientJob(run.state_of(i), run.method.download(server, i), i) for i in infos]
        done = run.engine.run(run.method, run.federation, run.task, 0, jobs)
        uploads = {i.id: r.upload for i, r in zip(infos, done, strict=True)}
        liar = uploads[3]
        uploads[3] = dataclasses.replace(
            liar,
            factors={n: dataclasses.replace(p, b=p.b * 1e6, a=p.a / 1e6) for n, p in liar.factors.items()},
        )
        used, weights = inspection.judge(uploads, server, run.federation.key, lambda *_: 1.0)
        size = max(float(t.abs().max()) for t in tree.tensors(used.get(3)) or [torch.zeros(1)])
        assert weights[3] * size < 10, rule


def test_factors_that_are_rounded_on_their_way_are_refused() -> None:
    from fedlowrank.methods.shared.lora_family import LoRATraining

    for settings in ({"clipping": Clipping(0.1)}, {"robust": Robust("norm_bound")}):
        with pytest.raises(TaskError, match=r"training.wire"):
            run_of(METHODS["fedit"](training=LoRATraining(wire="int8")), **settings).step()  # type: ignore[arg-type]


def test_shares_of_clusters_that_are_claimed_too_high_count_as_one() -> None:
    from fedlowrank.methods.shared.clusters import clamp_shares

    assert clamp_shares(torch.tensor([1000.0, 0.0])).tolist() == [1.0, 0.0]
    assert clamp_shares(torch.tensor([3.0, -1.0, 1.0])).tolist() == [0.5, 0.0, 0.5]
    honest = torch.softmax(torch.randn(5, generator=torch.Generator().manual_seed(0)), 0)
    assert torch.equal(clamp_shares(honest), honest)


@pytest.mark.parametrize(
    ("robust", "participation", "needed"),
    [
        (Robust("trimmed_mean", 0.2), 2 / 7, 3),
        (Robust("trimmed_mean", 0.4), 4 / 7, 5),
        (Robust("trimmed_mean", 0.0), 1 / 7, None),
        (Robust("trimmed_mean", 0.2), 3 / 7, None),
        (Robust("median"), 2 / 7, 3),
        (Robust("median"), 3 / 7, None),
        (Robust("norm_bound"), 1 / 7, None),
    ],
)
def test_a_rule_that_would_be_the_mean_is_refused(
    robust: Robust, participation: float, needed: int | None
) -> None:
    """A trimmed mean drops ⌈h n⌉ of n at either end and must leave one; of two, the median is the mean."""
    if needed is None:
        run_of(robust=robust, participation=participation)
        return
    with pytest.raises(ConfigError, match=f"needs at least {needed} replies a round"):
        run_of(robust=robust, participation=participation)


def test_a_round_whose_trimming_is_reduced_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(rounds=2, robust=Robust("trimmed_mean", 0.2), participation=1.0)
    run.step({str(i): "it was lost" for i in range(4)})
    assert "needs at least" not in caplog.text
    run.step({str(i): "it was lost" for i in range(5)})
    assert "round 2: trimmed_mean of 2 replies needs at least 3" in caplog.text


def test_a_secure_sum_of_one_client_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match=r"secure\.on needs at least 2 replies a round"):
        run_of(secure=SecureSums(on=True), participation=1 / 7)
    run_of(secure=SecureSums(on=True), participation=2 / 7)


def test_numbers_that_secure_sums_clip_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Means of weights are clipped to ±bound, here below most of the weights."""
    plain = run_of(rounds=2)
    sent = []
    for i in range(len(CLIENTS)):
        alone = run_of(rounds=2)
        alone.step({str(j): "left out" for j in range(len(CLIENTS)) if j != i})
        sent.append(vector(alone.state.server))
    run = run_of(rounds=2, secure=SecureSums(on=True, bound=0.1))
    records = [run.step(), run.step()]
    assert records[0].server_metrics["secure"]["clipped"] == (np.abs(sent) > 0.1).sum()
    assert records[1].server_metrics["secure"]["clipped"] > 0
    assert caplog.text.count("Raise secure.bound") == 1
    assert "secure" not in plain.step().server_metrics
    caplog.clear()
    enough = run_of(secure=SecureSums(on=True))
    assert "secure" not in enough.step().server_metrics
    assert caplog.text == ""


@dataclass(frozen=True)
class Weighted(FedAvg):
    """Weighs by a multiple of the number of examples, and has a second mean with a share of the weight."""

    factor: float = 1.0
    share: float = 1.0

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Any:
        weight = self.factor * client.example_count
        return [Mean(upload, weight), Mean(upload, self.share * weight)]

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        return total[0]


def test_a_secure_sum_refuses_weights_that_it_would_change(caplog: pytest.LogCaptureFixture) -> None:
    """Weights above the most examples were clipped, so that the mean was one of equal weights."""
    secure: dict[str, Any] = {"secure": SecureSums(on=True, threshold=0.51)}
    plain = run_of(Weighted())
    plain.step()
    for factor, reason in ((10.0, "its weight in a mean is"), (1e-12, "its largest weight in a mean is")):
        with pytest.raises(TaskError, match=rf"secure sums cannot take the reply of client \d: {reason}"):
            run_of(Weighted(factor=factor), **secure).step()
    assert caplog.text == ""
    run = run_of(Weighted(share=1e-11), rounds=2, **secure)
    run.step()
    np.testing.assert_allclose(vector(run.state.server), vector(plain.state.server), atol=1e-5)
    run.step()
    assert caplog.text.count("secure sums round weights to multiples of") == 1


def test_a_coarse_grid_of_secure_sums_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run_of(secure=SecureSums(on=True, bits=2))
    assert "rounded to a multiple of 8" in caplog.text
    caplog.clear()
    run_of(secure=SecureSums(on=True, bits=16))
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["scaled", "sign_flip"])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_the_server_clips_what_a_hostile_client_did_not(
    kind: Any, quantile: float | None, updates: np.ndarray
) -> None:
    """Whatever its client sends, an update moves the mean by at most its weight times C."""
    bound = 0.5 * float(np.linalg.norm(updates, axis=1).min())
    clipped = updates / np.linalg.norm(updates, axis=1)[:, None] * bound
    attack = Attack(kind, 0.3, strength=1000.0)
    settings: dict[str, Any] = {"attack": attack, "clipping": Clipping(bound, quantile)}
    run = run_of(FedAvg(batch_size=8, optimizer=SGD(lr=0.1), weighting="uniform"), **settings)
    start = vector(run.state.server.inner)
    hostile = sorted(run.hostile)
    assert hostile
    run.step()
    if kind == "sign_flip":
        clipped[hostile] *= -1
    assert np.allclose(vector(run.state.server.inner) - start, clipped.mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "fedit", "fedslr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_honest_clients_update_is_left_as_it_is(name: str, dtype: torch.dtype) -> None:
    method = METHODS[name](batch_size=8, optimizer=SGD(lr=0.1))
    federation = federate_one_model(dtype, clients=CLIENTS)
    run = Run(method, federation, RunSettings(rounds=3, clipping=Clipping(0.05)), Sequential())
    bare = Run(method, federation, RunSettings(rounds=3), Sequential())
    for t in range(3):
        run.step()
        server, infos = run.state.server, run.federation.infos
        jobs = [ClientJob(run.state_of(i), run.method.download(server, i), i) for i in infos]
        for info, result in zip(
            infos, run.engine.run(run.method, run.federation, run.task, t, jobs), strict=True
        ):
            actual = run.method.contribution(server, result.upload, info)
            plain = bare.method.contribution(server.inner, result.upload.remainder, info)
            assert tree.equal(*([leaf.value for _, leaf in contribution_leaves(c)] for c in (actual, plain)))


def test_an_update_without_a_norm_is_no_update(updates: np.ndarray) -> None:
    """Finite numbers whose squares are not."""
    run = run_of(clipping=Clipping(0.05))
    info, server = run.federation.infos[0], run.state.server
    far = tree.map_leaves(lambda t: torch.full_like(t, 1e200), server.inner)
    upload = dataclasses.replace(_upload_of(run), remainder=far)
    assert tree.equal(run.method.contribution(server, upload, info).value, server.inner)


def _upload_of(run: Run) -> Any:
    info = run.federation.infos[0]
    jobs = [ClientJob(run.state_of(info), run.method.download(run.state.server, info), info)]
    (result,) = run.engine.run(run.method, run.federation, run.task, 0, jobs)
    return result.upload


@pytest.mark.parametrize("name", ["flora", "fedkd", "fedavg", "ifca"])
@pytest.mark.parametrize(("kind", "strength", "factor"), [("sign_flip", 3.0, -3.0), ("scaled", 10.0, 10.0)])
def test_an_attack_multiplies_products_and_not_each_of_their_factors(
    name: str, kind: Any, strength: float, factor: float
) -> None:
    """Of a product that is itself the update, -B times -A would be the honest one."""

    def model_after(steps: int, **settings: Any) -> np.ndarray:
        run = run_of(METHODS[name](batch_size=8, optimizer=SGD(lr=0.1)), **settings)
        for _ in range(steps):
            run.step()
        if name == "fedkd":
            return vector(run.state.server.mentee)
        return vector(run.local_model(run.federation.infos[0]).server or run.state.server)

    start, honest, attacked = (
        model_after(0),
        model_after(1),
        model_after(1, attack=Attack(kind, 1.0, strength)),
    )
    np.testing.assert_allclose(attacked - start, factor * (honest - start), rtol=1e-5, atol=1e-6)


def test_attacks_by_the_mean_need_updates_that_have_one() -> None:
    for kind in ("alie", "inner_product"):
        with pytest.raises(
            ConfigError, match=f"attack.kind = '{kind}' needs the mean of honest updates, and FLoRA"
        ):
            run_of(METHODS["flora"](), attack=Attack(kind, 0.3))  # type: ignore[arg-type]


def test_weights_of_the_geometric_median_are_those_of_the_method() -> None:
    """A method that weighs all clients alike does so by examples, too."""
    for method in (dataclasses.replace(METHOD, weighting="uniform"), METHODS["scaffold"](batch_size=8)):
        first, second = (
            run_of(method, robust=Robust("geometric_median", weights=weights))
            for weights in ("equal", "examples")
        )
        records = [first.step(), second.step()]
        np.testing.assert_allclose(vector(first.state.server), vector(second.state.server), rtol=0, atol=1e-9)
        assert records[0].server_metrics["weight"] == records[1].server_metrics["weight"]


def test_recorded_weights_of_multi_krum_are_those_that_were_used(updates: np.ndarray) -> None:
    run = run_of(robust=Robust("multi_krum", 0.2, weights="examples"))
    start = vector(run.state.server)
    weights = run.step().server_metrics["weight"]
    selected = np.array([weights[str(i)] > 0 for i in range(7)])
    expected = selected * WEIGHTS / (selected * WEIGHTS).sum()
    assert selected.sum() == 5
    np.testing.assert_allclose([weights[str(i)] for i in range(7)], expected, rtol=1e-5)
    np.testing.assert_allclose(vector(run.state.server) - start, expected @ updates, rtol=0, atol=1e-9)
