"""The grid search of ``fedlowrank tune``: which setting it chooses, by what, and what it leaves behind."""

from __future__ import annotations

import csv
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.tuning import (
    Setting,
    ValidationScore,
    choose_setting,
    find_edges,
    plan_tuning,
    score_run,
)
from fedlowrank.core.errors import ConfigError
from fedlowrank.data.federation import Federation
from fedlowrank.methods import METHODS
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage.run_files import RECORDS_FILE
from tests.cli.small_experiment import SMALL, done, refused, write
from tests.support.client_tables import make_client_table

Capsys = pytest.CaptureFixture[str]

TUNE = (
    SMALL.replace("[run]", "[split]\nkind = 'local'\nval = 0.3\ntrain = 0.4\ntest = 0.3\n[run]")
    + """
[tune]
seeds = [10, 11]
test_seeds = [0, 1]
rounds = 1
[tune.grid]
"optimizer.lr" = [0.01, 0.3]
"""
)


def config(**tune: Any) -> ExperimentConfig:
    return ExperimentConfig.parse({**tomllib.loads(SMALL), "tune": tune})


def record(rounds: list[RoundRecord], clients: list[dict[str, Any]]) -> RunRecord:
    return RunRecord(Path("run"), {}, clients, rounds, {})


def by_clients(round: int, val: list[Any], test: list[Any], kind: str = "accuracy") -> RoundRecord:
    tables = {kind: {"personal": {"val": val, "test": test}, "other": {"val": [0.0]}}}
    return RoundRecord(round, [0] * (round > 0), measured=make_client_table(tables))


CLIENTS: list[dict[str, Any]] = [{"id": i} for i in range(3)]


def test_a_run_is_scored_by_the_validation_of_its_clients() -> None:
    rounds = [
        by_clients(0, [0.1, 0.1, None], [1.0, 1.0, 1.0]),
        by_clients(5, [0.9, 0.5, None], [0.0, 0.0, 0.0]),
        RoundRecord(6, [0]),
        by_clients(7, [0.6, 0.4, None], [1.0, 1.0, 1.0]),
    ]
    assert score_run(record(rounds, CLIENTS), "last") == (0.5, 7, False)
    assert score_run(record(rounds, CLIENTS), "best") == (0.7, 5, False)
    # clients that never train and hostile ones have no say
    some = [{"id": 0, "unseen": True}, {"id": 1}, {"id": 2}]
    assert score_run(record(rounds, some), "best") == (0.5, 5, False)
    assert score_run(record(rounds, [{"id": 0}, {"id": 1, "hostile": True}]), "last") == (0.6, 7, False)


def test_the_state_before_training_is_no_candidate() -> None:
    rounds = [by_clients(t, [v], [0.0]) for t, v in enumerate([0.9, 0.4, 0.3])]
    assert score_run(record(rounds, CLIENTS[:1]), "best") == (0.4, 1, False)


def test_a_run_that_used_no_reply_has_no_score() -> None:
    table = by_clients(1, [0.9, 0.9], [0.0, 0.0]).measured
    dropped = [RoundRecord(t, [0, 1], {"0": "NaN", "1": "NaN"}, measured=table) for t in (1, 2)]
    start, used = RoundRecord(0, measured=table), RoundRecord(3, [0, 1], {"0": "NaN"}, measured=table)
    for at in ("last", "best"):
        assert score_run(record([start, *dropped], CLIENTS[:2]), at) is None
        assert score_run(record([start, *dropped, used], CLIENTS[:2]), at) is not None
        # no client was drawn
        assert score_run(record([start, RoundRecord(1, measured=table)], CLIENTS[:2]), at) is None


def test_a_run_is_scored_by_the_series_asked_for_or_else_by_its_first() -> None:
    tables = {"personal": {"val": [0.1, 0.3], "test": [0, 0]}, "server": {"val": [0.5, 0.7], "test": [0, 0]}}
    both = RoundRecord(1, [0], measured=make_client_table({"accuracy": tables}))
    assert score_run(record([both], CLIENTS), "last", "server") == (0.6, 1, False)
    assert score_run(record([both], CLIENTS), "last", "gkr") == (0.2, 1, False)
    assert score_run(record([both], CLIENTS), "last") == (0.2, 1, False)


def test_a_regression_is_scored_by_its_loss_and_what_is_not_finite_has_no_score() -> None:
    rounds = [by_clients(t, [v], [0.0], "loss") for t, v in enumerate([4.0, 1.0, 2.0, math.inf])]
    assert score_run(record(rounds, CLIENTS[:1]), "best") == (1.0, 1, True)
    assert score_run(record(rounds[:3], CLIENTS[:1]), "last") == (2.0, 2, True)
    assert score_run(record(rounds, CLIENTS[:1]), "last") is None
    with pytest.raises(ConfigError, match=r"Set split\.val"):
        score_run(record([by_clients(1, [None], [1.0])], CLIENTS[:1]), "last")


def test_a_model_that_is_not_finite_has_an_accuracy_and_no_score() -> None:
    tables = [
        {
            "accuracy": {"own": {"val": [0.9, v], "test": [0, 0]}},
            "loss": {"own": {"val": [0.1, loss], "test": [0, 0]}},
        }
        for v, loss in ((0.5, 1.0), (0.9, math.inf))
    ]
    rounds = [RoundRecord(t, [0], measured=make_client_table(table)) for t, table in enumerate(tables, 1)]
    assert score_run(record(rounds, CLIENTS[:2]), "last") is None
    assert score_run(record(rounds, CLIENTS[:2]), "best") == (0.7, 1, False)


def setting(lr: float, *values: float | None, loss: bool = False) -> Setting:
    scores = tuple(None if v is None else ValidationScore(v, 1, loss) for v in values)
    return Setting("fedavg", {"optimizer.lr": lr}, (), scores)


def test_the_best_mean_is_chosen_and_a_divergence_is_worst() -> None:
    low, middle, high = setting(0.1, 0.9, 0.5), setting(0.2, 0.8, 0.7), setting(0.3, 0.99, None)
    assert choose_setting([low, middle, high]) is middle
    assert choose_setting([low, high]) is low
    # of equal ones the first
    assert choose_setting([setting(0.05, 0.7, 0.8), middle]).values == {"optimizer.lr": 0.05}  # type: ignore[union-attr]
    assert choose_setting([high, setting(0.4, None, None)]) is None
    losses = [
        setting(0.1, 2.0, 2.0, loss=True),
        setting(0.2, 1.0, 2.5, loss=True),
        setting(0.3, None, 0.1, loss=True),
    ]
    assert choose_setting(losses) is losses[1]


def test_an_optimum_at_the_edge_of_the_grid_is_named() -> None:
    grid: dict[str, list[Any]] = {
        "optimizer.lr": [0.3, 0.1, 1.0],
        "epochs": [1],
        "weighting": ["uniform", "examples"],
    }
    others = {"epochs": 1, "weighting": "uniform"}
    for lr, word in ((0.1, "smallest"), (1.0, "largest")):
        (warning,) = find_edges(Setting("fedavg", {"optimizer.lr": lr, **others}), grid)
        for part in (
            "fedavg",
            f"optimizer.lr = {lr} is the {word} of 0.1, 0.3, 1.0",
            "edge of the grid: extend it",
        ):
            assert part in warning
    assert find_edges(Setting("fedavg", {"optimizer.lr": 0.3, **others}), grid) == []
    # nothing lies beyond infinity
    clips = {"optimizer.clip": [1.0, math.inf]}
    assert find_edges(Setting("fedavg", {"optimizer.clip": math.inf}), clips) == []
    assert len(find_edges(Setting("fedavg", {"optimizer.clip": 1.0}), clips)) == 1


@pytest.mark.full
def test_the_grid_of_a_method_is_the_product_and_keeps_its_other_fields() -> None:
    made = ExperimentConfig.parse(
        {
            "compare": ["fedavg", "fedprox", "fedslr"],
            "methods": {"fedprox": {"optimizer": {"lr": 0.5, "momentum": 0.9}}},
            "tune": {
                "seeds": [7],
                "rounds": 3,
                "grid": {"optimizer": {"lr": [0.01, 0.1]}},
                "methods": {"fedprox": {"mu": [1, 2, 3]}},
            },
        }
    )
    plan = plan_tuning(made, Path("out"))
    actual = {}
    for one in plan:
        (run,) = one.runs
        method = run.experiment.build_method(one.method)
        actual[one.method, method.optimizer.lr, method.mu if one.method == "fedprox" else None] = method
        assert (run.experiment.run.seed, run.experiment.run.rounds, run.experiment.tune) == (7, 3, None)
    lrs = (0.01, 0.1)
    assert set(actual) == {
        *(("fedavg", lr, None) for lr in lrs),
        *(("fedprox", lr, mu) for lr in lrs for mu in (1, 2, 3)),
        *(("fedslr", lr, None) for lr in lrs),
    }
    assert len(plan) == len(actual) == 10
    assert len({one.runs[0].folder for one in plan}) == 10
    assert actual["fedprox", 0.1, 2].optimizer.momentum == 0.9
    # a method's own default is changed in the learning rate alone
    default = METHODS["fedslr"]().optimizer
    tuned = actual["fedslr", 0.01, None]
    assert (tuned.optimizer.weight_decay, tuned.optimizer.schedule) == (
        default.weight_decay,
        default.schedule,
    )
    assert default.weight_decay > 0


def test_a_kind_in_the_grid_keeps_the_fields_in_the_file_wherever_it_stands() -> None:
    for kinds in (["adamw", "sgd"], ["sgd", "adamw"]):
        made = ExperimentConfig.parse(
            {
                "compare": ["fedavg"],
                "methods": {"fedavg": {"optimizer": {"momentum": 0.9}}},
                "tune": {"seeds": [7], "grid": {"optimizer.kind": kinds}},
            }
        )
        plan = plan_tuning(made, Path("out"))
        actual = {
            one.values["optimizer.kind"]: one.runs[0].experiment.build_method("fedavg").optimizer
            for one in plan
        }
        assert (actual["sgd"].kind, actual["adamw"].kind) == ("sgd", "adamw")
        assert actual["sgd"].momentum == 0.9


@pytest.mark.parametrize(
    ("tune", "says"),
    [
        ({"seeds": [0, 1], "test_seeds": [1, 2]}, "tune.seeds and tune.test_seeds both hold 1"),
        ({"seeds": []}, "tune.seeds must list different seeds"),
        ({"test_seeds": [1, 1]}, "tune.test_seeds must list different seeds"),
        ({"gird": {}}, "tune.gird: there is no such field. Did you mean 'grid'?"),
        ({"at": "bset"}, "tune.at: 'bset' is no choice. Did you mean 'best'?"),
        ({"measure": "test"}, "tune.measure: 'test' is no choice"),
        ({"methods": {"fedavgg": {"mu": [1]}}}, "Did you mean 'fedavg'?"),
        ({"grid": {"optimizer.lr": 0.1}}, "tune.grid.optimizer.lr: a list of values is needed"),
        ({"grid": {"optimizer": {"lr": [0.1, 0.1]}}}, "tune.grid.optimizer.lr lists 0.1 twice"),
        ({"grid": {"defaults.optimizer.lr": [0.1]}}, "without a section before them"),
        ({"rounds": 0}, "tune.rounds must be >= 1"),
    ],
)
def test_a_wrong_section_is_refused(tune: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**tune)
    assert says in str(error.value)


def test_a_field_that_a_method_lacks_is_refused_before_anything_runs(capsys: Capsys) -> None:
    actual = refused(capsys, "tune", write(Path(), TUNE), "tune.grid.epoch=[1,2]")
    assert "epoch: there is no such field. Did you mean 'epochs'?" in actual
    assert "no section [tune]" in refused(capsys, "tune", write(Path(), SMALL))
    assert "no client has validation" in refused(
        capsys, "tune", write(Path(), TUNE), "split.val=0", "split.test=0.6"
    )
    assert not Path("runs").exists()


def test_a_series_that_no_method_has_is_refused(capsys: Capsys) -> None:
    actual = refused(capsys, "tune", write(Path(), TUNE), "tune.series=globl", "tune.seeds=[10]")
    assert "tune.series: no method has the series 'globl'" in actual
    assert not list(Path("runs").glob("*/tuning.csv"))


def test_the_section_prints_itself() -> None:
    made = config(
        seeds=[30], grid={"optimizer.lr": [0.1, 0.2]}, methods={"fedavg": {"weighting": ["uniform"]}}
    )
    assert ExperimentConfig.parse(tomllib.loads(made.to_toml())) == made


def stamps() -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path("runs").rglob(RECORDS_FILE)}


def chosen(out: str = "runs/small-tuned") -> dict[str, float]:
    rows = csv.DictReader(Path(out, "tuning.csv").read_text().splitlines())
    return {row["method"]: float(row["optimizer.lr"]) for row in rows if row["chosen"] == "True"}


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_tune_writes_what_it_chose_and_goes_on_where_it_stopped(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, step, steps = write(Path(), TUNE), Run.step, [0]

    def counted(run: Run) -> RoundRecord:
        steps[0] += 1
        if steps[0] == 6:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(Run, "step", counted)
    from fedlowrank.cli.main import main

    assert main(["tune", file]) == 130
    before = stamps()
    assert 0 < len(before) < 8
    out = done(capsys, "tune", file)
    # 2 methods, 2 settings, 2 seeds, 1 round; then 2 methods, 2 seeds, 2 rounds; one round was interrupted
    assert steps[0] == 8 + 8 + 1
    interrupted = [p for p, stamp in stamps().items() if before.get(p, stamp) != stamp]
    assert len(interrupted) <= 1

    # the choice is that of validation, computed from the records once more
    for name, lr in chosen().items():
        means = {}
        for value in (0.01, 0.3):
            folders = [Path(f"runs/small-tuned/tuning/{name}-lr={value}-s{seed}") for seed in (10, 11)]
            vals = [RunRecord.load(folder).rounds[-1].values("accuracy", split="val") for folder in folders]
            assert all(vals)
            means[value] = sum(sum(v) / len(v) for v in vals) / 2
        assert means[lr] == max(means.values())
        config = RunRecord.load(Path(f"runs/small-tuned/{name}-s1")).config
        assert config["method"]["fields"]["optimizer"]["lr"] == lr
        assert config["run"]["rounds"] == 2
    assert "edge of the grid: extend it" in out
    assert "edge of the grid: extend it" in Path("runs/small-tuned/tuning.md").read_text()

    # nothing is trained again: not by the same command, and not by compare of the file that was written
    finished, steps[0] = stamps(), 100
    done(capsys, "tune", file)
    done(capsys, "compare", "runs/small-tuned/tuned.toml")
    assert (stamps(), steps[0]) == (finished, 100)


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_another_choice_moves_the_tested_runs_aside(capsys: Capsys) -> None:
    done(capsys, "tune", write(Path(), TUNE), 'compare=["fedavg"]', "tune.test_seeds=[0]")
    (lr,) = chosen().values()
    grid = [0.001, 0.0001] if lr > 0.01 else [0.5, 0.9]
    done(
        capsys,
        "tune",
        "small.toml",
        'compare=["fedavg"]',
        "tune.test_seeds=[0]",
        f"tune.grid.optimizer.lr={grid}",
    )
    assert chosen()["fedavg"] in grid
    old, now = (RunRecord.load(Path(f"runs/small-tuned/fedavg-s0{end}")).config for end in (".old-1", ""))
    assert old["method"]["fields"]["optimizer"]["lr"] == lr
    assert now["method"]["fields"]["optimizer"]["lr"] in grid


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_test_labels_have_no_say(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["tune", write(Path(), TUNE), 'compare=["fedavg"]', "tune.test_seeds=[0]", "tune.rounds=3"]
    done(capsys, *arguments)
    table = Path("runs/small-tuned/tuning.csv").read_text()
    federation = ExperimentConfig.federation

    def perturbed(experiment: ExperimentConfig) -> Federation:
        made = federation(experiment)
        for client in made.clients:
            client.test.y.copy_(torch.remainder(client.test.y + 1, 3))
        return made

    monkeypatch.setattr(ExperimentConfig, "federation", perturbed)
    done(capsys, *arguments, "-o", "runs/other")
    # every validation number is the same to the last bit, though test results are others
    assert Path("runs/other/tuning.csv").read_text() == table
    a, b = (
        RunRecord.load(Path(out, "fedavg-s0")).rounds[-1].values()
        for out in ("runs/small-tuned", "runs/other")
    )
    assert a != b


@pytest.mark.usefixtures("undrawn")
def test_settings_that_diverge_are_shown_and_never_chosen(capsys: Capsys) -> None:
    out = done(
        capsys, "tune", write(Path(), TUNE), 'compare=["fedavg","standalone"]', "tune.test_seeds=[0]",
        "tune.grid.optimizer.lr=[1e38,0.1]", "tune.methods.standalone.optimizer.lr=[1e38,1e37]", "tune.rounds=2",
    )  # fmt: skip
    assert chosen() == {"fedavg": 0.1}
    assert "diverged (seed 10)" in Path("runs/small-tuned/tuning.md").read_text()
    assert "Standalone: not compared, for no setting of the grid has a result" in out
    assert [p.name for p in Path("runs/small-tuned").glob("*-s*")] == ["fedavg-s0"]


@pytest.mark.usefixtures("undrawn")
def test_a_setting_in_which_every_reply_was_dropped_is_never_chosen(capsys: Capsys) -> None:
    done(
        capsys, "tune", write(Path(), TUNE), 'compare=["fedavg"]', "tune.test_seeds=[0]", "run.on_nan=drop",
        "tune.grid.optimizer.lr=[1e38,0.00001]", "tune.rounds=2", "tune.at=best", "defaults.epochs=3",
    )  # fmt: skip
    assert chosen() == {"fedavg": 0.00001}
    with Path("runs/small-tuned/tuning.csv").open() as file:
        messages = [row["messages"] for row in csv.DictReader(file)]
    assert "diverged: no reply of a client was ever used (seed 10)" in messages[0]
    assert messages[1] == ""
