"""No run spends more than its budget, however often it is resumed: ε is computed from what the ledger says was released."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting")

import dp_accounting

from fedlowrank import Clipping, Privacy, simulate
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.run_files import seal_run
from fedlowrank.trust.privacy.accounting import Sampling
from fedlowrank.trust.privacy.budget import Budget
from tests.methods.setting import federate_one_model

DELTA = 1e-3
CENTRAL = Privacy("central", epsilon=2.0, delta=DELTA)
POISSON: dict[str, Any] = {"sampling": "poisson", "participation": 0.5, "clipping": Clipping(0.05)}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "privacy.jsonl").read_text().splitlines()]


def epsilon_of(folder: Path, kind: str = "central") -> float:
    """ε by Rényi divergences of the very (σ, q) that the ledger holds."""
    if kind == "central":
        return composed(Counter((line["noise"], line["sampling"].get("rate", 1.0)) for line in lines(folder)))
    releases: defaultdict[int, Counter[tuple[float, float]]] = defaultdict(Counter)
    for line in lines(folder):
        for client in line["clients"]:
            releases[client][line["noise"] / 2, 1.0] += 1
    return max(map(composed, releases.values()))


def composed(events: Mapping[tuple[float, float], int]) -> float:
    accountant = dp_accounting.rdp.RdpAccountant()
    for (sigma, rate), count in events.items():
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count
        )
    return float(accountant.get_epsilon(DELTA))


def sigmas(folder: Path) -> set[float]:
    return {line["noise"] for line in lines(folder)}


class KilledError(Exception):
    pass


def killed_after(rounds: int) -> Any:
    def stop(record: Any) -> None:
        if record.round == rounds:
            raise KilledError

    return stop


@pytest.mark.full
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_more_rounds_keep_the_noise_of_the_first_plan(accountant: Any, tmp_path: Path) -> None:
    privacy = Privacy("central", epsilon=2.0, delta=DELTA, accountant=accountant)
    # by privacy loss distributions a sampled round takes half a second
    share = POISSON if accountant == "rdp" else {**POISSON, "participation": 1.0}
    settings: dict[str, Any] = {"privacy": privacy, "folder": tmp_path / "run", **share}
    for rounds, resume in ((2, False), (5, True), (9, True)):
        result = simulate("fedavg", federate_one_model(), rounds=rounds, resume=resume, **settings)
        assert sigmas(tmp_path / "run") == {lines(tmp_path / "run")[0]["noise"]}
        assert result.rounds[-1].server_metrics["privacy"]["epsilon"] <= 2.0
    if accountant == "rdp":
        assert 1.9 < epsilon_of(tmp_path / "run") <= 2.0
    assert result.run.round == len(lines(tmp_path / "run")) == 2
    status = RunRecord.load(tmp_path / "run").status
    assert status["state"] == "finished"
    for word in ("privacy.epsilon = 2.0", "is spent", "σ = ", "new run"):
        assert word in status["message"]


@pytest.mark.full
def test_a_run_that_is_killed_and_extended_spends_no_more(tmp_path: Path) -> None:
    """Killed in the middle, between a charge and its checkpoint, and extended before and after its plan is done."""
    settings: dict[str, Any] = {
        "privacy": CENTRAL, "folder": tmp_path / "run", "checkpoint_every": 2, **POISSON
    }  # fmt: skip
    with pytest.raises(KilledError):
        simulate("fedavg", federate_one_model(), rounds=4, on_round=killed_after(3), **settings)
    assert [line["round"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    # as a kill leaves it: a part of the charge of a round that never was
    with (tmp_path / "run" / "privacy.jsonl").open("a") as file:
        file.write('{"round": 3, "noi')
    with pytest.raises(KilledError):
        simulate("fedavg", federate_one_model(), rounds=20, resume=True, on_round=killed_after(4), **settings)
    for rounds in (30, 40):
        simulate("fedavg", federate_one_model(), rounds=rounds, resume=True, **settings)
        assert len(sigmas(tmp_path / "run")) == 1
        assert epsilon_of(tmp_path / "run") <= 2.0
    # planned for four
    assert max(line["round"] for line in lines(tmp_path / "run")) == 3


@pytest.mark.full
def test_a_given_noise_may_use_the_whole_budget(tmp_path: Path) -> None:
    privacy = Privacy("central", noise=1.5, epsilon=3.0, delta=DELTA)
    settings: dict[str, Any] = {"privacy": privacy, "folder": tmp_path / "run", **POISSON}
    simulate("fedavg", federate_one_model(), rounds=2, **settings)
    result = simulate("fedavg", federate_one_model(), rounds=99, resume=True, **settings)
    assert 2 < result.run.round < 99
    assert epsilon_of(tmp_path / "run") <= 3.0
    last = lines(tmp_path / "run")[-1]
    with (tmp_path / "run" / "privacy.jsonl").open("a") as file:
        file.write(json.dumps({**last, "round": last["round"] + 1}) + "\n")
    assert epsilon_of(tmp_path / "run") > 3.0


def test_local_noise_of_the_first_plan_is_kept(tmp_path: Path) -> None:
    local = Privacy("local", epsilon=4.0, delta=DELTA)
    settings: dict[str, Any] = {
        "privacy": local, "folder": tmp_path / "run", "participation": 0.5, "clipping": Clipping(0.05)
    }  # fmt: skip
    simulate("fedavg", federate_one_model(), rounds=4, **settings)
    result = simulate("fedavg", federate_one_model(), rounds=30, resume=True, **settings)
    assert len(sigmas(tmp_path / "run")) == 1
    assert 3.9 < epsilon_of(tmp_path / "run", "local") <= 4.0
    assert result.run.budget is not None
    # planned for two updates of each client
    assert {result.run.budget.ledger.releases(i) for i in range(4)} == {2}
    message = RunRecord.load(tmp_path / "run").status["message"]
    assert "the privacy budget of each client, privacy.epsilon = 4.0, is spent" in message


def test_a_run_from_before_plans_were_stored_has_the_noise_of_its_ledger(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"privacy": CENTRAL, "folder": tmp_path / "run", **POISSON}
    simulate("fedavg", federate_one_model(), rounds=2, **settings)
    path = tmp_path / "run" / "run.json"
    stored = json.loads(path.read_text())
    del stored["plan"]
    path.write_text(json.dumps(stored))
    seal_run(path.parent)
    simulate("fedavg", federate_one_model(), rounds=6, resume=True, **settings)
    assert len(sigmas(tmp_path / "run")) == 1
    assert epsilon_of(tmp_path / "run") <= 2.0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"privacy": Privacy("central", epsilon=9.0, delta=DELTA)}, "privacy.epsilon was 2.0 and is 9.0"),
        ({"privacy": Privacy("central", epsilon=2.0, delta=0.01)}, "privacy.delta"),
        ({"privacy": Privacy("central", noise=9.0, epsilon=2.0, delta=DELTA)}, "privacy.noise"),
        ({"participation": 0.25}, "participation"),
        ({"sampling": "fixed"}, "sampling"),
        ({"rounds": 1}, "only get more rounds"),
        ({"privacy": Privacy(), "rounds": 3}, "privacy.kind"),
    ],
)
def test_another_budget_is_another_run(
    changed: dict[str, Any], named: str, tmp_path: Path, once: Path
) -> None:
    shutil.copytree(once, tmp_path / "run")
    settings = {"privacy": CENTRAL, "rounds": 2, **POISSON, **changed}
    with pytest.raises(CheckpointError, match=named):
        simulate("fedavg", federate_one_model(), folder=tmp_path / "run", resume=True, **settings)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of two rounds."""
    folder = tmp_path_factory.mktemp("once") / "run"
    simulate("fedavg", federate_one_model(), rounds=2, privacy=CENTRAL, folder=folder, **POISSON)
    return folder


@pytest.mark.parametrize("kept", [0, 1])
def test_a_lost_ledger_is_no_new_budget(kept: int, tmp_path: Path, once: Path) -> None:
    shutil.copytree(once, tmp_path / "run")
    path = tmp_path / "run" / "privacy.jsonl"
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before[:kept]))
    with pytest.raises(CheckpointError, match=f"lacks round {kept + 1}"):
        simulate(
            "fedavg",
            federate_one_model(),
            rounds=3,
            privacy=CENTRAL,
            folder=tmp_path / "run",
            resume=True,
            **POISSON,
        )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "plan", [5, {"interval": 0, "noise": 1.5}, {"noise": "1.5"}, {"interval": 1, "noise": -1.0}]
)
def test_a_damaged_plan_is_named(plan: Any, tmp_path: Path, once: Path) -> None:
    shutil.copytree(once, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "plan": plan}))
    seal_run(path.parent)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged: the plan"):
        simulate(
            "fedavg",
            federate_one_model(),
            rounds=3,
            privacy=CENTRAL,
            folder=tmp_path / "run",
            resume=True,
            **POISSON,
        )


def test_noise_without_a_budget_never_runs_out() -> None:
    for kind in ("central", "local"):
        budget = Budget(Privacy(kind, noise=1.0, delta=DELTA), Sampling("all", 2), 1, 1.0, seeded=False)
        for t in range(4):
            assert budget.allowed([0, 1], t) == [0, 1]
            budget.charge(t, 1.0, [0, 1])


@pytest.mark.full
def test_a_second_release_of_one_draw_costs_what_it_costs(tmp_path: Path) -> None:
    """Sampling amplifies a draw once, so a repeated release costs more than one of another draw."""
    privacy, poisson = (
        Privacy("central", noise=1.0, epsilon=3.0, delta=DELTA),
        Sampling("poisson", 50, rate=0.1),
    )
    budget = Budget(privacy, poisson, 1000, 0.1, seeded=False)
    budget.open(tmp_path / "privacy.jsonl")
    releases = 0
    while budget.allowed([1], 0):
        budget.charge(0, 1.0, [1])
        releases += 1

    assert composed({(releases**-0.5, 0.1): 1}) <= 3.0 < composed({((releases + 1) ** -0.5, 0.1): 1})
    # as many independent rounds would have been allowed
    assert composed({(1.0, 0.1): releases + 1}) < 3.0
    with pytest.raises(ConfigError, match="is spent"):
        budget.charge(0, 1.0, [1])


def test_a_round_that_is_done_again_with_other_clients_is_charged_anew() -> None:
    budget = Budget(
        Privacy("central", noise=1.0, epsilon=4.3, delta=DELTA), Sampling("all", 2), 5, 1.0, seeded=True
    )
    assert composed({(1.0, 1.0): 1}) < 4.3 < composed({(1.0, 1.0): 2})
    budget.charge(0, 1.0, [0, 1])
    # the same bytes
    assert budget.allowed([0, 1], 0)
    budget.charge(0, 1.0, [0, 1])
    assert budget.ledger.rounds() == 1
    with pytest.raises(ConfigError, match="is spent"):
        budget.charge(0, 1.0, [0])
    assert not budget.allowed([0, 1], 1)
