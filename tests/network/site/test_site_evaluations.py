"""What a site tells of its examples: a server that chooses the models cannot read them by evaluations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional

from fedlowrank.cli.main import main
from fedlowrank.config.assembly import Shares
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.messages import Answer, Order
from fedlowrank.network.persistence.account import prepare_resume
from fedlowrank.network.site.allowance import max_trainings
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.storage.digest import read_sealed, write_sealed
from tests.support.local_network import (
    assert_equals_sequential_run,
    assert_same_states,
    headline,
    local,
    run_sequentially,
    serve_run,
    small,
)

ROUNDS = 4
SITES = SiteSettings(evaluation="exact")
STEEP = 300.0
"""Slope of the crafted scores: losses are linear but for a small neighborhood of each example."""


@pytest.fixture
def made() -> ExperimentConfig:
    return small("fedavg", 3, ROUNDS, model={"names": ["linear"]})


def shares_of(made: ExperimentConfig, test: int, val: int = 20) -> Shares:
    """Shares in which client 1 has so many test and validation examples."""
    shares = made.shares()
    whole = shares.data[1].train
    parts = {"test": whole.take(torch.arange(test)), "val": whole.take(torch.arange(5, 5 + val))}
    return dataclasses.replace(
        shares, data=(shares.data[0], dataclasses.replace(shares.data[1], **parts), shares.data[2])
    )


def folder_of(made: ExperimentConfig, base: Path, test: int, **site: Any) -> Path:
    prepare(base / "client", made, 1, shares_of(made, test), SiteSettings(**site))
    return base / "client"


def crafted(feature: int, at: float) -> dict[str, torch.Tensor]:
    """A linear model whose loss bends where a feature of an example has a value."""
    weight, bias = torch.zeros(3, 4), torch.tensor([-STEEP * at, 0.0, -1e4])
    weight[0, feature] = STEEP
    return {"linear.weight": weight, "linear.bias": bias}


def plain(seed: int = 0) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {"linear.weight": torch.randn(3, 4, generator=draws), "linear.bias": torch.zeros(3)}


def answered(folder: Path, down: Any, /, **fields: Any) -> Answer:
    """What a client's process that begins now answers to an order that by default only evaluates."""
    given = {"run": "run", "round": 0, "stamp": 0, "train": False, "evaluate": True}
    return ClientRuntime(folder).answer(Order(**{**given, **fields}), tree.encode(down))[0]


def read_features(ask: Callable[[Any], float | None], examples: int, first: int) -> tuple[list[Any], int]:
    """The attack: read each feature's values, sorted, by losses of crafted models.

    As a function of the place of the bend, the loss is piecewise linear. Its slope goes up by one at each example.

    Args:
        ask: mean loss of a model on the examples, or None.
        examples: their number.
        first: how many of them are of the first class.

    Returns:
        Values by feature, and the number of models.
    """
    orders, actual = 0, []

    def loss(feature: int, at: float) -> float | None:
        nonlocal orders
        orders += 1
        mean = ask(crafted(feature, at))
        return None if mean is None else mean * examples / STEEP

    for feature in range(4):
        here, slope, values = -8.0, first - examples, []
        value = loss(feature, here)
        for _ in range(examples):
            low, high = here, 8.0
            for _ in range(16):
                middle = (low + high) / 2
                seen = loss(feature, middle)
                if value is None or seen is None:
                    return actual, orders
                bends = seen - (value + slope * (middle - here)) > 1e-3
                low, high = (low, middle) if bends else (middle, high)
            value, here, slope = (value or 0.0) + slope * (high - here), high, slope + 1
            values.append(high)
        actual.append(values)
    return actual, orders


def test_losses_without_limit_tell_every_feature(made: ExperimentConfig) -> None:
    """The attack is real: here against losses that PyTorch computes."""
    data = shares_of(made, 5).data[1].test
    assert isinstance(data.x, torch.Tensor)
    x, y = data.x, data.y

    def ask(model: Any) -> float:
        scores = functional.linear(x, model["linear.weight"], model["linear.bias"])
        return float(functional.cross_entropy(scores, y))

    actual, orders = read_features(ask, 5, int((y == 0).sum()))
    assert torch.allclose(torch.tensor(actual).T, x.sort(dim=0).values, atol=0.01)
    assert orders == 324


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("test", "answers"), [(5, 0), (40, 1)])
def test_a_client_is_no_oracle(
    test: int, answers: int, train: bool, made: ExperimentConfig, tmp_path: Path
) -> None:
    """Orders that read five examples whole bring one rounded number, of five examples none."""
    folder = folder_of(made, tmp_path, test)
    data = ClientRuntime(folder).data.test
    seen: list[float] = []

    def ask(model: Any) -> float | None:
        evaluation = answered(folder, model, train=train).evaluation
        (found,) = [None] if evaluation is None else evaluation.values("loss")
        seen.extend([] if found is None else [found])
        return found

    actual, _ = read_features(ask, test, int((data.y == 0).sum()))
    assert (actual, len(seen)) == ([], answers)


def test_one_evaluation_a_round_and_none_of_an_older_one(made: ExperimentConfig, tmp_path: Path) -> None:
    """Whatever is asked, in a new process each time: of 60 orders at most one a round has an evaluation."""
    folder = folder_of(made, tmp_path, 40)
    got, asked = [], 0
    # the server goes back after round 3, to round 1; rounds that it repeats are trained again, not evaluated
    for branch, rounds in ((0, (0, 1, 0, 2, 2, 3)), (1, (1, 2, 3, 4)), (2, (0, 4)), (9, (4, 0, 1, 2, 3, 4))):
        for t in rounds:
            for _ in range(2):
                asked += 1
                down = plain(asked)
                actual = answered(folder, down, round=t, branch=branch, last=t == ROUNDS)
                got += [(branch, t)] * (actual.evaluation is not None)
    assert got == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4)]
    assert len(got) == ROUNDS + 1
    refused = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert {(e["event"], e["kind"]) for e in refused} == {("refused", "evaluation")}


def test_the_same_order_gets_the_same_numbers(made: ExperimentConfig, tmp_path: Path) -> None:
    """A reply that was lost is asked for again, by the same bytes."""
    folder = folder_of(made, tmp_path, 40)
    first = answered(folder, plain(), round=2).evaluation
    assert first is not None
    assert answered(folder, plain(), round=2).evaluation == first
    assert answered(folder, plain(), round=2, stamp=0, last=True).evaluation is None
    assert answered(folder, plain(), round=3).evaluation is not None
    assert answered(folder, plain(), round=2).evaluation is None


def test_another_run_is_refused_unless_the_site_allows_it(made: ExperimentConfig, tmp_path: Path) -> None:
    """Else a server would name a new run for each order, and have evaluations and folders without limit."""
    folder = folder_of(made, tmp_path, 40, runs=2)
    assert all(answered(folder, plain(), run=run).evaluation is not None for run in ("a", "b"))
    for i in range(3):
        refused = answered(folder, plain(), run=f"c{i}")
        assert (refused.evaluation, refused.kind) == (None, "other")
        assert "belongs to the run 'a', 'b'" in refused.problem
    assert answered(folder, plain(), run="a", round=1).evaluation is not None
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"a", "b"}


def test_trainings_are_counted_too(made: ExperimentConfig, tmp_path: Path) -> None:
    """Their losses and uploads tell of the training examples; a server may repeat rounds, but not for ever."""
    folder = folder_of(made, tmp_path, 40)
    runtime, order = ClientRuntime(folder), Order("run", 3, 0, True, False)
    most = max_trainings(ROUNDS)
    problems = [runtime.answer(order, tree.encode(plain(i)))[0].problem for i in range(most + 2)]
    assert problems[:most] == [""] * most
    assert all(f"has trained {most} times" in why for why in problems[most:])


def test_numbers_are_rounded(made: ExperimentConfig, tmp_path: Path) -> None:
    folder = folder_of(made, tmp_path, 40)
    answer = answered(folder, model := plain(), train=True)
    data, actual = shares_of(made, 40).data[1], answer.evaluation
    assert actual is not None
    for split in ("val", "test"):
        part = getattr(data, split)
        scores = functional.linear(part.x, model["linear.weight"], model["linear.bias"])
        assert actual.values("accuracy", series="personal", split=split) == [
            int((scores.argmax(1) == part.y).sum()) / len(part)
        ]
        assert actual.values("loss", series="personal", split=split) == [
            float(f"{functional.cross_entropy(scores, part.y):.3g}")
        ]
    exact = answered(folder_of(made, tmp_path / "exact", 40, evaluation="exact"), model, train=True)
    assert answer.losses == {name: float(f"{loss:.3g}") for name, loss in exact.losses.items()}
    assert answer.losses != exact.losses


@pytest.mark.parametrize(("val", "test"), [(19, 20), (20, 19)])
def test_of_fewer_than_20_examples_no_number_is_sent(
    val: int, test: int, made: ExperimentConfig, tmp_path: Path
) -> None:
    made = small("fedavg", 3, ROUNDS, model={"names": ["linear"]}, run={"metrics": ["macro_f1"]})
    shares = shares_of(made, test, val)
    few = dataclasses.replace(shares.data[1], train=shares.data[1].train.take(torch.arange(19)))
    prepare(tmp_path / "client", made, 1, dataclasses.replace(shares, data=(few, few, few)))
    answer = answered(tmp_path / "client", plain(), train=True)
    assert answer.evaluation is not None
    names = ("accuracy", "loss", "macro_f1")
    assert [[answer.evaluation.values(n, split=s) == [None] for s in ("val", "test")] for n in names] == [
        [val < 20, test < 20]
    ] * 3
    assert answer.losses == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("evaluation", ["none", "rounded"])
def test_a_run_without_numbers_goes_to_its_end(
    evaluation: Literal["none", "rounded"],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server, early stopping, the status and the report take None."""
    made = small("scaffold", run={"metrics": ["macro_f1"], "patience": 1})
    carrier = local(made, tmp_path, site=SiteSettings(evaluation=evaluation))
    result = serve_run(carrier, made, tmp_path / "run")
    # the models are those of a run that evaluates
    assert_same_states(result, carrier, run_sequentially(made, result.rounds)[0])
    assert [r.lost for r in result.rounds] == [{}] * 4
    assert all(not r.is_evaluated or headline(r) == [None] * 3 for r in result.rounds)
    assert ("early stopping does not count it" in caplog.text) == (evaluation == "rounded")
    assert main(["status", str(tmp_path / "run")]) == 0
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html"), "--tables"]) == 0
    assert "nan" not in capsys.readouterr().out.lower()


def test_a_run_of_sites_with_defaults_is_the_sequential_run_in_rounded_numbers(tmp_path: Path) -> None:
    made = small("scaffold", 2, split={"train": 0.5, "test": 0.4, "val": 0.1})
    carrier = local(made, tmp_path, site=SiteSettings())
    result = serve_run(carrier, made, tmp_path / "run")
    run, records = run_sequentially(made, result.rounds)
    assert_same_states(result, carrier, run)
    for actual, expected in zip(result.rounds, records, strict=True):
        assert actual.is_evaluated
        assert expected.is_evaluated
        assert actual.values("accuracy", split="val") == actual.values("loss", split="val") == [None] * 2
        assert actual.values("accuracy") == expected.values("accuracy")
        losses = [
            float(f"{v:.3g}")
            for v in expected.values("loss", series="personal", split="test")
            if v is not None
        ]
        assert actual.values("loss") == losses


@pytest.mark.few(1)
@pytest.mark.parametrize(("site", "absent"), [(SITES, {3, 4}), (SiteSettings.simulated(), set())])
def test_a_server_that_goes_back_repeats_trainings_and_no_evaluations(
    site: SiteSettings, absent: set[int], tmp_path: Path
) -> None:
    """A simulated client has no bounds."""
    made = small("scaffold", rounds=4)
    carrier = local(made, tmp_path, site=site)
    serve_run(carrier, made, tmp_path / "run")
    prepare_resume(tmp_path / "run", 2, [])
    result = serve_run(carrier, made, tmp_path / "run", resume=True)
    assert assert_equals_sequential_run(result, carrier, made) == {(t, i) for t in absent for i in range(3)}


def test_a_damaged_count_is_named(made: ExperimentConfig, tmp_path: Path) -> None:
    folder = folder_of(made, tmp_path, 40, send_errors=True)
    answered(folder, plain())
    path = folder / "site.json"
    stored = read_sealed(path)
    path.write_text(path.read_text().replace('"round": 0', '"round": -1'))
    assert "site.json is damaged" in answered(folder, plain(1)).problem
    write_sealed(path, {"runs": {"run": {"trainings": "many"}}})
    assert "site.json is damaged" in answered(folder, plain(1)).problem
    write_sealed(path, stored)
    assert answered(folder, plain(1)).problem == ""
    with pytest.raises(CheckpointError):
        read_sealed(tmp_path / "none")


def test_a_client_without_shares_of_clusters_is_evaluated_as_the_others(tmp_path: Path) -> None:
    """It has too few training examples to tell of; its numbers of 20 test examples are those of the others' kind."""
    made = small("ifca", 3, 1)
    carrier = local(made, tmp_path)
    shares = shares_of(made, 20)
    few = dataclasses.replace(shares.data[1], train=shares.data[1].train.take(torch.arange(19)))
    prepare(carrier.folders[101], made, 1, dataclasses.replace(shares, data=(few, few, few)), SiteSettings())
    result = serve_run(carrier, made, tmp_path / "run")
    assert all(None not in headline(record) for record in result.rounds)
    assert [record.values("route", series="0", split="")[1] for record in result.rounds] == [None, None]
    assert all(None not in record.values("route", series="0", split="")[::2] for record in result.rounds)
    assert result.measurements.routes() == {}


def test_an_evaluation_that_fails_is_counted(
    made: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a crafted model fails on the examples tells of them."""
    folder = folder_of(made, tmp_path, 40)
    with monkeypatch.context() as patch:
        patch.setattr(ClientRuntime, "_evaluate", lambda *_: pytest.fail("it fails"))
        with pytest.raises(pytest.fail.Exception):
            answered(folder, plain(0))
    assert answered(folder, plain(1)).evaluation is None
    # the question is the same, and so is the answer
    assert answered(folder, plain(0)).evaluation is not None
