"""Callbacks end a run where a hand-made curve says so, also after a stop, and what they raise loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank import Callback, EarlyStopping, Federation, simulate
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.results.measurements import ClientTable
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage.digest import write_sealed
from tests.support.client_tables import make_client_table

CURVE = [0.2, 0.5, 0.4, 0.6, 0.55, 0.6, 0.3, 0.58, 0.7, 0.7, 0.7, 0.7]
"""Validation by round: the best until round 7 is in round 3, and the next better one in round 8."""


@pytest.fixture
def by_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that follow the curve, whatever the models are."""

    def evaluation(run: Run) -> ClientTable:
        row: list[float | None] = [CURVE[run.round]] * len(run.federation.infos)
        table = {"global": {"train": row, "val": row, "test": row}}
        return make_client_table({"accuracy": table, "loss": table})

    monkeypatch.setattr(Run, "evaluate", evaluation)


def federation(val: float = 0.25) -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 3, generator=generator), torch.arange(20) % 2) for _ in range(2)]
    module = torch.nn.Linear(3, 2)
    torch.nn.init.eye_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return Federation.from_arrays(clients, module, val=val)


def run(folder: Path | None = None, **settings: Any) -> Any:
    chosen = {"rounds": 11, "representations": 0, "evaluate_every": 1, **settings}
    return simulate("fedavg", federation(), folder=folder, **chosen)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def status(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((folder / "status.json").read_text())
    del actual["digest"]
    return actual


class Crash:
    """Raises after a round, once."""

    def __init__(self, round: int) -> None:
        self.round = round

    def __call__(self, record: RoundRecord) -> None:
        if record.round == self.round:
            raise ZeroDivisionError("the callback's own")


# round 3 is the best, so 2, 3 and 4 evaluations without a better one end with rounds 5, 6 and 7; of more, round 8
# is better. A gain of 0.1 in round 3 and in round 8 is not more than 0.15 above round 1.
@pytest.mark.parametrize(
    ("patience", "min_delta", "last", "best"),
    [(1, 0.0, 2, 1), (2, 0.0, 5, 3), (3, 0.0, 6, 3), (4, 0.0, 7, 3), (5, 0.0, 11, None), (3, 0.15, 4, 1)],
)
@pytest.mark.usefixtures("by_curve")
def test_the_round_of_a_hand_made_curve(patience: int, min_delta: float, last: int, best: int | None) -> None:
    actual = run(on_round=EarlyStopping(patience, min_delta))
    assert [record.round for record in actual.rounds] == list(range(last + 1))
    why = f"stopped early: no better validation for {patience} evaluations after round {best}"
    assert actual.run.stopped == ("" if best is None else why)


@pytest.mark.usefixtures("by_curve")
def test_evaluations_count_and_not_rounds() -> None:
    # every second round: 0.2 (0), 0.5 (1), 0.4 (2), 0.55 (4), 0.3 (6), 0.7 (8), 0.7 (10), 0.7 (11)
    actual = run(on_round=EarlyStopping(2), evaluate_every=2)
    assert actual.rounds[-1].round == 11
    assert run(on_round=EarlyStopping(1), evaluate_every=2).rounds[-1].round == 2


@pytest.mark.parametrize(
    ("metric", "is_error"), [("ece", True), ("mae", True), ("auroc", False), ("own", False)]
)
def test_a_smaller_error_is_better_without_being_told(metric: str, is_error: bool) -> None:
    curve = [0.5, 0.4, 0.3, 0.2]
    records = [
        RoundRecord(t, measured=make_client_table({metric: {"own": {"val": [v]}}}))
        for t, v in enumerate(curve)
    ]
    stops = EarlyStopping(2, metric=metric)
    assert [bool(stops(record)) for record in records] == [False, False, not is_error, not is_error]
    # what the caller says counts
    told = EarlyStopping(2, metric=metric, lower_is_better=not is_error)
    assert bool([told(record) for record in records][-1]) is is_error


def _stops(patience: int, *rows: list[float | None]) -> list[bool]:
    """Whether early stopping ends a run after each of these evaluations, with one value a client."""
    stopping = EarlyStopping(patience)
    tables = [make_client_table({"accuracy": {"own": {"val": row}}}) for row in rows]
    return [bool(stopping(RoundRecord(t, measured=table))) for t, table in enumerate(tables)]


def test_evaluations_are_compared_over_the_clients_that_both_have() -> None:
    # the weak client is missing at first: it lowers the mean and is no fall
    assert _stops(1, [0.4, 0.7, None], [0.4, 0.7, 0.0], [0.4, 0.7, 0.5], [0.4, 0.7, 0.5]) == [
        False, False, False, True,
    ]  # fmt: skip
    # it is missing in between: a higher mean without it is no gain
    assert _stops(2, [0.7, 0.1], [0.7, None], [0.7, None]) == [False, False, True]
    # a gain of the others is one
    assert _stops(1, [0.7, 0.1], [0.8, None], [0.8, 0.1]) == [False, False, False]


def test_evaluations_without_a_common_client_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert _stops(1, [0.7, None], [None, 0.1], [0.7, 0.1], [0.7, 0.1]) == [False, False, False, True]
    assert "round 1: no client has a validation result here and in round 0" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("crash", [1, 4, 6])
@pytest.mark.usefixtures("by_curve")
def test_an_interrupted_run_ends_in_the_same_round(crash: int, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", patience=4)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "parts", patience=4, on_round=Crash(crash))
    assert status(tmp_path / "parts") == {
        "state": "stopped",
        "rounds": crash,
        "message": "ZeroDivisionError: the callback's own",
    }
    resumed = run(tmp_path / "parts", patience=4, resume=True)
    assert [r.untimed() for r in resumed.rounds] == [r.untimed() for r in whole.rounds]
    assert status(tmp_path / "parts") == status(tmp_path / "whole")
    assert status(tmp_path / "whole")["rounds"] == 7


@pytest.mark.usefixtures("by_curve")
def test_killed_between_the_last_round_and_its_status(tmp_path: Path) -> None:
    run(tmp_path / "run", patience=3)
    before = status(tmp_path / "run")
    write_sealed(tmp_path / "run" / "status.json", {"state": "running", "rounds": 0, "message": ""})
    assert len(run(tmp_path / "run", patience=3, resume=True).rounds) == 7
    assert status(tmp_path / "run") == before


@pytest.mark.full
@pytest.mark.usefixtures("by_curve")
def test_a_run_that_stopped_early_goes_on_only_with_more_patience(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, patience=3)
    before = files(folder)
    assert len(run(folder, patience=3, resume=True).rounds) == 7
    # as an unbroken run of 11 rounds would have
    assert len(run(folder, patience=3, rounds=11, resume=True).rounds) == 7
    assert files(folder) == before
    assert len(run(folder, patience=5, resume=True).rounds) == 12
    assert status(folder) == {"state": "finished", "rounds": 11, "message": ""}


class Two(Callback):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_run_begin(self, records: Any) -> None:
        self.seen.append([record.round for record in records])

    def __call__(self, record: RoundRecord) -> bool:
        self.seen.append(record.round)
        return record.round == 5

    def on_run_end(self, finished: bool) -> None:
        self.seen.append(finished)


def test_several_callbacks_and_the_last_round_is_evaluated(tmp_path: Path) -> None:
    first, second = Two(), Two()
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", on_round=[first, Crash(3)], evaluate_every=4)
    actual = run(tmp_path / "run", on_round=[second, lambda record: None], evaluate_every=4, resume=True)
    assert first.seen == [[], 0, 1, 2, 3, False]
    assert second.seen == [[0, 1, 2, 3], 4, 5, True]
    assert [r.is_evaluated for r in actual.rounds] == [True, True, False, False, True, True]
    # the true accuracy of the last model, and the same in the folder
    client = actual.run.federation.clients[0].test
    module = torch.nn.Linear(3, 2)
    module.load_state_dict(actual.personal(0))
    right = (module(client.x).argmax(1) == client.y).float().mean().item()
    assert actual.accuracy()[0] == pytest.approx(right)
    assert [r.untimed() for r in RunRecord.load(tmp_path / "run").rounds] == [
        r.untimed() for r in actual.rounds
    ]
    assert actual.run.stopped.endswith("Two returned True after round 5")


def test_a_metric_that_is_undefined_for_all_clients_is_named() -> None:
    clients = [(torch.randn(20, 3), torch.full((20,), k)) for k in range(2)]
    one_class = Federation.from_arrays(clients, torch.nn.Linear(3, 2), val=0.25)
    with pytest.raises(
        ConfigError, match=r"'auroc' is not defined on the validation examples of any client"
    ) as caught:
        simulate("fedavg", one_class, rounds=2, metrics=["auroc"], on_round=EarlyStopping(1, metric="auroc"))
    assert "split.val" not in str(caught.value)


def test_what_is_no_callback_or_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the class EarlyStopping"):
        run(on_round=EarlyStopping)
    with pytest.raises(ConfigError, match="return True to end the run"):
        run(on_round=lambda record: record)
    with pytest.raises(ConfigError, match=r"split\.val"):
        simulate("fedavg", federation(val=0), rounds=2, patience=1, folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="patience must be >= 1"):
        run(patience=0)
    with pytest.raises(ConfigError, match="module:function"):
        run(callbacks=("mine",))
    # a function that takes no record, or more than one argument, before anything is trained
    for function in ("os:getcwd", "math:atan2"):
        with pytest.raises(
            ConfigError, match="cannot be called with a round's record alone: define it as function"
        ):
            run(callbacks=(function,), folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_that_a_callback_ends_when_it_is_resumed_evaluates_its_last_round(tmp_path: Path) -> None:
    class Limit(Callback):
        ended = False

        def on_run_begin(self, records: Any) -> bool:
            return len(records) > 3

        def on_run_end(self, finished: bool) -> None:
            self.ended = True

    def crash(record: RoundRecord) -> None:
        if record.round == 4:
            raise ZeroDivisionError

    settings: Any = {"evaluate_every": 5, "checkpoint_every": 1}
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", on_round=crash, **settings)
    limit = Limit()
    result = run(tmp_path / "run", on_round=limit, resume=True, **settings)
    assert [r.round for r in result.rounds if r.is_evaluated] == [0, 1, 4]
    assert RunRecord.load(tmp_path / "run").rounds == result.rounds
    assert limit.ended
    whole = run(on_round=lambda record: record.round == 4, **settings)
    assert result.mean_accuracy() == whole.mean_accuracy()


def test_callbacks_that_did_not_begin_are_not_ended_and_hide_no_error(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_run_begin(self, records: Any) -> None:
            raise ZeroDivisionError("the first error")

    class Later(Callback):
        def on_run_end(self, finished: bool) -> None:
            raise AssertionError("it did not begin")

    with pytest.raises(ZeroDivisionError, match="the first error"):
        run(tmp_path / "run", on_round=[Broken(), Later()])

    class BadEnd(Callback):
        def __call__(self, record: RoundRecord) -> None:
            raise ZeroDivisionError("the first error")

        def on_run_end(self, finished: bool) -> None:
            raise KeyError("another one")

    with pytest.raises(ZeroDivisionError, match="the first error"):
        run(tmp_path / "other", on_round=BadEnd())
    assert "the first error" in status(tmp_path / "other")["message"]


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"x": {"a": torch.tensor(1.5)}}, None),
        ({"x": {"a": np.float32(1.5)}}, None),
        ({"x": 3}, "must return a dict of dicts of numbers"),
        (None, "must return a dict of dicts of numbers, by name and series; it returned None"),
        ({"x": {"a": "much"}}, "the values of 'x' must be numbers; one is a str"),
        ({"x": {"a": torch.ones(2)}}, "the values of 'x' must be numbers; one is a Tensor"),
    ],
)
def test_a_methods_own_metrics_are_numbers(metrics: Any, says: str | None, tmp_path: Path) -> None:
    class Own(FedAvg):
        def server_metrics(self, server: Any) -> Any:
            return metrics

    if says is not None:
        with pytest.raises(TaskError, match=rf"Own\.server_metrics.*{says}"):
            simulate(Own(), federation(), folder=tmp_path / "run", rounds=1)
        return
    simulate(Own(), federation(), folder=tmp_path / "run", rounds=1)
    assert [r.server_metrics for r in RunRecord.load(tmp_path / "run").rounds] == [{"x": {"a": 1.5}}] * 2
