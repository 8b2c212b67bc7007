"""Clipped, compressed and private updates in whole runs, against plain numpy on the same updates."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedlowrank import simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.compression import decompress, parse_stages
from fedlowrank.trust.privacy.accounting import default_count_noise, epsilon
from fedlowrank.trust.privacy.noise import gaussian
from fedlowrank.trust.protection import Protected, Upload
from fedlowrank.trust.trust_settings import Clipping, Compression, Privacy
from tests.methods.setting import federate_one_model, federate_two_models

METHOD = FedAvg(batch_size=8, optimizer=SGD(lr=0.1))
CENTRAL = Privacy("central", noise=1.0, delta=1e-3)


def run_of(method: AnyMethod = METHOD, rounds: int = 3, engine: str = "sequential", **settings: Any) -> Run:
    return Run(method, federate_one_model(), RunSettings(rounds=rounds, **settings), ENGINES[engine]())


def vector(params: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(params)])


def start_of(run: Run) -> Any:
    return (
        run.state.server.inner
        if isinstance(run.state.server, tree.tree_classes(Protected.__module__))
        else run.state.server
    )


def updates_of(rounds: int = 1) -> tuple[np.ndarray, list[np.ndarray]]:
    """The start, and the update that each client makes of it in the first round, without any protection."""
    run = run_of(rounds=rounds)
    start = vector(run.state.server)
    actual = []
    for info in run.federation.infos:
        alone = Run(METHOD, federate_one_model(), RunSettings(rounds=rounds), Sequential())
        alone.step({str(i.id): "left out" for i in run.federation.infos if i.id != info.id})
        actual.append(vector(alone.state.server) - start)
    return start, actual


def clipped(update: np.ndarray, bound: float) -> np.ndarray:
    return update * min(1.0, bound / float(np.linalg.norm(update)))


def test_without_settings_a_method_is_itself() -> None:
    assert run_of().method is METHOD


@pytest.mark.full
def test_clipped_updates_are_averaged() -> None:
    start, updates = updates_of()
    bound = float(np.median([np.linalg.norm(u) for u in updates]))
    run = run_of(clipping=Clipping(bound))
    run.step()
    weights = [i.example_count for i in run.federation.infos]
    expected = start + np.average([clipped(u, bound) for u in updates], axis=0, weights=weights)
    assert np.allclose(vector(start_of(run)), expected, rtol=0, atol=1e-12)
    assert not np.allclose(expected, start + np.average(updates, axis=0, weights=weights), atol=1e-4)


@pytest.mark.full
def test_a_private_round_adds_noise_to_the_sum_of_clipped_updates() -> None:
    """Server = start + (Σ clip(Δ) + N(0, σ²C²)) / N; uniform weights whatever the numbers of examples."""
    start, updates = updates_of()
    run = run_of(privacy=CENTRAL, clipping=Clipping(0.05))
    run.step()
    names = list(start_of(run))
    zeros = {f"/{n}": torch.zeros_like(t) for n, t in start_of(run).items()}
    drawn = gaussian(zeros, 1.0 * 0.05, run.federation.key / "server" / 0 / "noise")
    noise = np.concatenate([drawn[f"/{n}"].numpy().ravel() for n in names])
    expected = start + (np.sum([clipped(u, 0.05) for u in updates], axis=0) + noise) / len(updates)
    assert np.allclose(vector(start_of(run)), expected, rtol=0, atol=1e-12)
    assert np.abs(noise).max() > 0.01


@pytest.mark.full
def test_the_noise_of_a_round_has_the_stated_deviation() -> None:
    start, updates = updates_of()
    run = run_of(privacy=dataclasses.replace(CENTRAL, noise=3.0), clipping=Clipping(0.05))
    run.step()
    noise = (vector(start_of(run)) - start) * len(updates) - np.sum(
        [clipped(u, 0.05) for u in updates], axis=0
    )
    square = float((noise**2).sum() / (3.0 * 0.05) ** 2)
    low, high = stats.chi2(len(noise)).interval(0.999)
    assert low < square < high
    assert stats.kstest(noise / 0.15, "norm").pvalue > 1e-3


@pytest.mark.full
def test_a_lost_reply_does_not_change_the_divisor() -> None:
    start, updates = updates_of()
    run = run_of(privacy=dataclasses.replace(CENTRAL, noise=1e-6), clipping=Clipping(0.05))
    run.step({"1": "it was lost"})
    others = [clipped(u, 0.05) for i, u in enumerate(updates) if i != 1]
    assert np.allclose(vector(start_of(run)), start + np.sum(others, axis=0) / 4, rtol=0, atol=1e-6)
    # who was asked has released what it sent
    assert [run.budget.ledger.releases(i) for i in range(4)] == [1, 1, 1, 1]  # type: ignore[union-attr]


def test_a_round_of_nobody_changes_nothing_but_the_noise() -> None:
    run = run_of(rounds=30, privacy=CENTRAL, clipping=Clipping(0.05), sampling="poisson", participation=0.05)
    actual = []
    for _ in range(30):
        before = vector(start_of(run))
        record = run.step()
        actual.append((len(record.participants), vector(start_of(run)) - before))
    empty = [move for count, move in actual if not count]
    assert len(empty) > 15
    # the divisor is qN = 0.2
    deviation = np.std(np.concatenate(empty))
    assert deviation == pytest.approx(0.05 / 0.2, rel=0.05)
    assert run.budget is not None
    assert run.budget.ledger.rounds() == 30


def test_poisson_sampling_draws_every_client_by_itself() -> None:
    run = run_of(rounds=400, sampling="poisson", participation=0.3)
    counts = np.array([len(run.participants(t)) for t in range(400)])
    observed = np.bincount(counts, minlength=5)[:5]
    expected = stats.binom(4, 0.3).pmf(range(5)) * 400
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert run_of(rounds=9, sampling="poisson", participation=0.3).participants(7) == run.participants(7)


def test_a_client_that_exaggerates_is_clipped_by_the_server() -> None:
    """The bound holds for what a client contributes, whatever it sends."""
    run = run_of(privacy=CENTRAL, clipping=Clipping(0.05))
    info, method = run.federation.infos[0], run.method
    assert isinstance(method, Protected)
    upload = run.engine.boundary(method.download(run.state.server, info).message)
    far = tree.map_leaves(lambda t: t + 1000, upload)
    contribution = method.contribution(run.state.server, _sent(far), info)
    assert np.linalg.norm(vector(contribution["sum"].value)) == pytest.approx(0.05, rel=1e-12)


def test_no_clients_data_travel_with_a_protected_method() -> None:
    """An engine pickles the method, and a tensor is pickled with all that it is a view of."""
    run = run_of(clipping=Clipping(0.05))
    assert isinstance(run.method, Protected)
    for name, model in run.method.task.architectures.items():
        data, own = run.federation.architectures[name].example, model.example
        assert torch.equal(own, data)
        assert own.untyped_storage().nbytes() == own.nbytes


def _sent(upload: Any) -> Any:
    return Upload(upload, None, None)


def test_the_clipping_norm_follows_the_quantile() -> None:
    """C exp(-η (b - γ)) with the share b of updates within C, found here from the updates themselves."""
    _, updates = updates_of()
    norms = np.array([np.linalg.norm(u) for u in updates])
    bound = float(np.sort(norms)[1] * 1.001)
    run = run_of(clipping=Clipping(bound, quantile=0.75, rate=0.3))
    run.step()
    assert run.state.server.clip == pytest.approx(bound * np.exp(-0.3 * ((norms <= bound).mean() - 0.75)))
    # and the share of a private run is noised
    few = run_of(
        rounds=1, clipping=Clipping(bound, quantile=0.75), privacy=dataclasses.replace(CENTRAL, noise=0.3)
    )
    few.step()
    share = 0.75 - np.log(few.state.server.clip / bound) / 0.2
    deviation = default_count_noise(4) / 4
    assert share != pytest.approx((norms <= bound).mean(), abs=1e-9)
    assert abs(share - (norms <= bound).mean()) < 4 * deviation


def test_too_few_clients_for_a_private_quantile_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="noise of the count"):
        run_of(clipping=Clipping(0.1, quantile=0.5), privacy=CENTRAL)


@pytest.mark.full
@pytest.mark.parametrize("uplink", ["int8", "top_k:0.1", "low_rank:2", "top_k:0.2 + int8"])
def test_what_compression_lost_is_sent_later(uplink: str) -> None:
    """Σ decoded = Σ true updates - what still waits at the client."""
    run = run_of(rounds=6, compression=Compression(uplink))
    method, info, total = run.method, run.federation.infos[0], 0.0
    assert isinstance(method, Protected)
    sent = 0.0
    for _ in range(6):
        alone = Run(METHOD, federate_one_model(), RunSettings(rounds=6), Sequential())
        alone.state = dataclasses.replace(
            run.state, server=run.state.server.inner, clients=alone.state.clients
        )
        alone.step({str(i): "left out" for i in (1, 2, 3)})
        before = vector(start_of(run))
        total = total + vector(alone.state.server) - before
        run.step({str(i): "left out" for i in (1, 2, 3)})
        sent = sent + vector(start_of(run)) - before
    residual = run.state_of(info).residual
    assert np.allclose(sent + vector(residual), total, rtol=0, atol=1e-6)
    assert np.abs(vector(residual)).max() > 1e-6


@pytest.mark.full
def test_a_lost_reply_keeps_what_compression_lost_before() -> None:
    run = run_of(compression=Compression("top_k:0.1"))
    run.step()
    before = run.state_of(run.federation.infos[2])
    run.step({"2": "it was lost"})
    assert tree.equal(run.state_of(run.federation.infos[2]), before)


def test_without_error_feedback_a_client_keeps_nothing() -> None:
    run = run_of(compression=Compression("top_k:0.1", error_feedback=False))
    run.step()
    assert run.state_of(run.federation.infos[0]).residual is None


@pytest.mark.full
def test_bytes_are_those_of_the_compressed_messages() -> None:
    run = run_of(rounds=1, compression=Compression("int8"))
    plain = run_of(rounds=1)
    wire = run_of(rounds=1, engine="wire", compression=Compression("int8"))
    actual, whole, coded = run.step().bytes_up, plain.step().bytes_up, wire.step().bytes_up
    assert actual == coded < whole


@pytest.mark.full
@pytest.mark.parametrize("engine", ["wire", "processes", "vectorized"])
@pytest.mark.parametrize(
    "settings",
    [
        {"compression": Compression("top_k:0.2 + int8")},
        {"privacy": CENTRAL, "clipping": Clipping(0.05)},
        {"privacy": Privacy("local", noise=0.1, delta=1e-3), "clipping": Clipping(0.05)},
    ],
)
def test_every_engine_gives_the_same(engine: str, settings: dict[str, Any]) -> None:
    run, other = run_of(**settings), run_of(engine=engine, **settings)
    for _ in range(3):
        run.step()
        other.step()
    other.engine.close()
    if engine == "vectorized":
        assert np.allclose(vector(start_of(other)), vector(start_of(run)), rtol=0, atol=1e-3)
    else:
        assert tree.equal(other.state.server, run.state.server)


@pytest.mark.full
def test_local_noise_is_added_to_every_update() -> None:
    """And every client counts the same, for its number of examples is data."""
    settings: dict[str, Any] = {"clipping": Clipping(0.05)}
    plain = run_of(dataclasses.replace(METHOD, weighting="uniform"), rounds=1, **settings)
    noisy = run_of(rounds=1, **settings, privacy=Privacy("local", noise=2.0, delta=1e-3))
    plain.step()
    noisy.step()
    noise = vector(start_of(noisy)) - vector(start_of(plain))
    expected = 2.0 * 0.05 / np.sqrt(4)
    low, high = stats.chi2(len(noise)).interval(0.999)
    assert low < float((noise**2).sum()) / expected**2 < high
    assert abs(stats.zscore(noise)).max() < 5


@pytest.mark.full
def test_a_run_stops_before_its_budget_is_exceeded(tmp_path: Path) -> None:
    privacy = Privacy("central", noise=1.5, epsilon=3.0, delta=1e-3)
    settings: dict[str, Any] = {"sampling": "poisson", "participation": 0.5, "clipping": Clipping(0.05)}
    result = simulate(
        METHOD, federate_one_model(), rounds=100, privacy=privacy, folder=tmp_path / "run", **settings
    )
    spent = [r.server_metrics["privacy"]["epsilon"] for r in result.rounds]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert spent[-1] <= 3.0
    sampling = result.run.client_sampler.sampling
    assert epsilon(1.5, len(result.rounds), 1e-3, sampling, "rdp") > 3.0
    assert 1 < result.run.round < 100
    # the last round is evaluated
    assert result.rounds[-1].is_evaluated
    lines = [json.loads(line) for line in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(result.run.round))
    assert [line["clients"] for line in lines] == [r.participants for r in result.rounds[1:]]


def test_a_client_whose_budget_is_spent_sits_out() -> None:
    privacy = Privacy("local", noise=5.0, epsilon=2.0, delta=1e-3)
    run = run_of(rounds=60, privacy=privacy, clipping=Clipping(0.05), participation=0.5)
    while not run.is_over:
        run.step()
    assert run.budget is not None
    (most,) = {run.budget.ledger.releases(i) for i in range(4)}
    assert run.budget.spent() <= 2.0 < run.budget.epsilon_of(most + 1)


@pytest.mark.full
def test_the_noise_is_found_from_the_budget() -> None:
    run = run_of(rounds=20, privacy=Privacy("central", epsilon=4.0, delta=1e-3), clipping=Clipping(0.05))
    assert run.budget is not None
    assert 3.98 < run.budget.epsilon_of(20) <= 4.0
    for _ in range(20):
        run.step()
    assert run.is_over
    assert run.budget.spent() == pytest.approx(run.budget.epsilon_of(20))


class StoppedError(Exception):
    pass


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"compression": Compression("top_k:0.2")},
        {"privacy": CENTRAL, "clipping": Clipping(0.05), "sampling": "poisson", "participation": 0.5},
    ],
)
def test_a_resumed_run_has_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        if record.round == 3:
            raise StoppedError

    common: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2, **settings}
    with pytest.raises(StoppedError):
        simulate(METHOD, federate_one_model(), folder=tmp_path / "run", on_round=stop, **common)
    resumed = simulate(METHOD, federate_one_model(), folder=tmp_path / "run", resume=True, **common)
    whole = simulate(METHOD, federate_one_model(), **common)
    assert tree.equal(resumed.run.state.server, whole.run.state.server)
    assert [r.untimed() for r in resumed.rounds] == [r.untimed() for r in whole.rounds]
    if resumed.run.budget is not None:
        # a round that was done again with the same noise is charged once
        assert resumed.run.budget.ledger.rounds() == 5


@pytest.mark.parametrize("kind", ["central", "local"])
def test_records_of_a_killed_and_resumed_run_have_the_epsilon_of_a_whole_run(
    kind: Any, tmp_path: Path
) -> None:
    privacy = Privacy(kind, noise=1.0, delta=1e-3)
    common: dict[str, Any] = {
        "rounds": 5, "checkpoint_every": 5, "privacy": privacy, "clipping": Clipping(0.05),
        "participation": 0.5, **({"sampling": "poisson"} if kind == "central" else {}),
    }  # fmt: skip

    def run(folder: str, **options: Any) -> list[float]:
        result = simulate(METHOD, federate_one_model(), folder=tmp_path / folder, **common, **options)
        return [r.server_metrics["privacy"]["epsilon"] for r in result.rounds]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        try:
            run("killed", on_round=lambda record: os._exit(9) if record.round == 4 else None)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert run("killed", resume=True) == run("whole")


@pytest.mark.full
def test_personal_models_train_under_privacy_and_compression() -> None:
    """Clients of other models share an adapter; each keeps its own state beside the residual."""
    method = PFedLoRA(width=4, batch_size=8, optimizer=SGD(lr=0.1))
    federation = federate_two_models()
    result = simulate(
        method,
        federation,
        rounds=2,
        privacy=CENTRAL,
        clipping=Clipping(0.05),
        compression=Compression("int8"),
    )
    plain = simulate(method, federation, rounds=2)
    assert result.run.method.title == "pFedLoRA"
    # the model itself never leaves, so only the adapter it learnt beside has noise
    moved = [
        vector(result.run.personal_params(i)) - vector(plain.run.personal_params(i)) for i in federation.infos
    ]
    assert all(0 < np.abs(m).max() < 1 for m in moved)


@pytest.mark.parametrize("name", ["fedhl", "flora", "fd", "fedspa", "ifca", "floral"])
def test_methods_that_cannot_be_private_say_why(name: str) -> None:
    with pytest.raises(TaskError, match="cannot be used with it"):
        run_of(METHODS[name](), privacy=CENTRAL, clipping=Clipping(0.05))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clipping": {"norm": 0.0}}, "norm must be > 0"),
        ({"clipping": {"norm": float("nan")}}, "norm must be > 0"),
        (
            {"clipping": {"norm": 1.0}, "privacy": {"kind": "central", "noise": -1.0, "delta": 1e-5}},
            "noise must be > 0",
        ),
        ({"clipping": {"norm": 1.0}, "privacy": {"kind": "central", "epsilon": 1.0}}, "delta is needed"),
        ({"clipping": {"norm": 1.0}, "privacy": {"kind": "central", "delta": 1e-5}}, "privacy.noise"),
        ({"privacy": {"kind": "central", "noise": 1.0, "delta": 1e-5}}, "set run.clipping.norm"),
        ({"clipping": {"quantile": 0.5}}, "first value"),
        ({"robust": {"rule": "median"}, "secure": {"on": True}}, "single replies"),
        ({"attack": {"kind": "alie", "share": 0.3}, "robust": {"rule": "krum"}}, "hostile"),
        ({"attack": {"kind": "scaled", "share": 0.4}, "robust": {"rule": "trimmed_mean"}}, "hostile"),
        ({"robust": {"rule": "krum", "hostile": 0.5}}, "hostile must be"),
        (
            {
                "clipping": {"norm": 1.0},
                "privacy": {"kind": "central", "noise": 1.0, "delta": 1e-5},
                "robust": {"rule": "median"},
            },
            "leave one of them out",
        ),
        (
            {
                "clipping": {"norm": 1.0, "quantile": 0.5},
                "privacy": {"kind": "local", "noise": 1.0, "delta": 1e-5},
            },
            "local privacy",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ExperimentConfig.parse({"run": settings})


def test_a_budget_below_one_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="one round costs"):
        run_of(privacy=Privacy("central", noise=0.5, epsilon=0.1, delta=1e-3), clipping=Clipping(0.05))


def test_settings_are_read_from_an_experiment_file() -> None:
    made = ExperimentConfig.parse(
        {
            "run": {
                "compression": {"uplink": "top_k:0.1 + int8"},
                "clipping": {"norm": 0.5},
                "attack": {"kind": "alie"},
            }
        }
    )
    assert made.run.trust.compression.uplink == "top_k:0.1 + int8"
    assert made.run.trust.attack.kind == "alie"
    assert ExperimentConfig.parse(made.to_dict()).run == made.run


def test_both_sides_decode_the_same_bits() -> None:
    """The client's residual is formed from what the server decodes."""
    run = run_of(rounds=1, compression=Compression("low_rank:2 + int8"))
    method, info = run.method, run.federation.infos[0]
    assert isinstance(method, Protected)
    trainer = run.engine.trainer(method, run.federation, 0, info)
    view = client_view(run.federation, run.task, info, 0, trainer)
    state, upload = method.local_update(run.state_of(info), method.download(run.state.server, info), view)
    sent = tree.decode(tree.encode(upload))
    like = {f"/{n}": t for n, t in start_of(run).items()}
    decoded = decompress(parse_stages("low_rank:2 + int8"), sent.update, like)
    at_server = method.decode(run.state.server, sent, info).remainder
    for name, t in start_of(run).items():
        assert torch.equal(at_server[name], t + decoded[f"/{name}"])
    trained = METHOD.local_update(None, run.state.server.inner, view)[1]
    for name, t in start_of(run).items():
        assert torch.allclose(state.residual[f"/{name}"], trained[name] - t - decoded[f"/{name}"], atol=1e-12)
