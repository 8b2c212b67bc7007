"""Tables of results against the records and the files' own JSON."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from fedlowrank import SGD, Federation, average_by_examples, load_rounds, load_runs, simulate
from fedlowrank.core.errors import CheckpointError, ConfigError, DataError
from fedlowrank.methods import Ditto, FedAvg
from fedlowrank.report import compare_runs
from fedlowrank.results.frames import client_frame, rounds_frame
from fedlowrank.results.measurements import ClientTable, Column, Measurements
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.logs.progress import describe_record
from fedlowrank.storage.digest import read_sealed, write_sealed
from fedlowrank.storage.run_files import RECORDS_FILE
from tests.support.client_tables import read_tables

torch.set_num_threads(1)


def federation(seed: int) -> Federation:
    g = torch.Generator().manual_seed(seed)
    data = [
        {
            part: (torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g))
            for part, n in {"train": 20, "val": 6, "test": 0 if c == 1 else 7}.items()
        }
        for c in range(3)
    ]
    return Federation.from_arrays(data, lambda: nn.Linear(4, 3), classes=3, seed=seed)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((folder / RECORDS_FILE).read_bytes()).splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with a metric and a varied field, and one that was moved aside."""
    root = tmp_path_factory.mktemp("frames") / "runs"
    simulate("fedavg", federation(0), rounds=2, folder=root / "a" / "fedavg-s0", unseen=0.34)
    vary = {"run.rounds": 1, "lora.ranks": [4, 8]}
    simulate("fml", federation(1), rounds=1, folder=root / "b", metrics=["ece"], config={"vary": vary})
    simulate("fml", federation(1), rounds=1, folder=root / "b.old-1")
    return root


def test_all_values_are_those_of_the_files(runs: Path) -> None:
    actual = load_runs(runs, series="all")
    assert actual["run"].unique().tolist() == ["a/fedavg-s0", "b"]
    assert list(actual)[:6] == ["run", "experiment", "method", "seed", "run.rounds", "lora.ranks"]
    rows = {
        (row["run"], row["round"], row["client"], row["series"], row["split"]): row
        for row in actual.to_dict("records")
    }
    assert len(rows) == len(actual)
    expected = 0
    for run, method, seed in (("a/fedavg-s0", "fedavg", 0), ("b", "fml", 1)):
        people = json.loads((runs / run / "clients.json").read_text())
        for line in lines_of(runs / run):
            tables = read_tables(RoundRecord.from_line(json.dumps(line)).measured)
            for series, splits in tables["accuracy"].items():
                for split, values in splits.items():
                    for client, accuracy in enumerate(values):
                        row = rows[run, line["round"], client, series, split]
                        assert (row["method"], row["seed"]) == (method, seed)
                        assert row["unseen"] == people[client]["unseen"]
                        assert row["n"] == people[client][split]
                        stored = {"accuracy": accuracy, "loss": tables["loss"][series][split][client]}
                        stored["ece"] = tables["ece"][series][split][client] if "ece" in tables else None
                        for name, value in stored.items():
                            assert row[name] == value or (value is None and math.isnan(row[name])), name
                        expected += 1
    assert expected == len(actual)
    assert actual["unseen"].any()
    varied = actual[actual["run"] == "b"]
    assert varied["run.rounds"].tolist() == [1] * len(varied)
    assert varied["lora.ranks"].tolist() == [[4, 8]] * len(varied)
    assert actual[actual["run"] != "b"]["run.rounds"].isna().all()


def test_the_last_round_and_one_folder(runs: Path) -> None:
    last = load_runs(runs, last=True)
    assert last.groupby("run")["round"].unique().map(list).to_dict() == {"a/fedavg-s0": [2], "b": [1]}
    (line,) = lines_of(runs / "b")[-1:]
    values = [v for v in column(line, "personal") if v is not None]
    mine = load_runs(runs / "b", last=True).query("split == 'test'")
    assert mine["accuracy"].mean() == pytest.approx(sum(values) / len(values))
    assert mine["run"].unique().tolist() == ["b"]


def test_costs_of_rounds(runs: Path) -> None:
    actual = load_rounds(runs)
    for run in ("a/fedavg-s0", "b"):
        mine, lines = actual[actual["run"] == run].to_dict("records"), lines_of(runs / run)
        assert len(mine) == len(lines)
        for row, line in zip(mine, lines, strict=True):
            assert row["participants"] == len(line["participants"])
            for name in ("round", "bytes_up", "bytes_down", "steps", "flops"):
                assert row[name] == line[name]
            for kind, seconds in line["seconds"].items():
                assert row[f"seconds_{kind}"] == seconds


def test_a_result_and_its_folder_give_one_table(tmp_path: Path) -> None:
    result = simulate("fedavg", federation(0), rounds=2, folder=tmp_path / "run", metrics=["ece"])
    for mine, read in (
        (result.to_frame(), load_runs(tmp_path)),
        (result.to_frame(last=True), load_runs(tmp_path, last=True)),
        (result.to_frame(series="personal"), load_runs(tmp_path, series="all")),
        (result.rounds_frame(), load_rounds(tmp_path)),
    ):
        assert mine.equals(read[list(mine)])
    test = result.to_frame(last=True).query("split == 'test'")
    assert test["accuracy"].mean() == pytest.approx(result.mean_accuracy())


CLIENTS = [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3, "hostile": True}]


def test_missing_is_not_diverged_and_some_clients_have_no_row() -> None:
    nothing = RoundRecord(round=0)
    rows = {"accuracy": [0.5, None, 0.25], "loss": [math.nan, None, 2.0]}
    columns = [Column(name, "personal", "test", values) for name, values in rows.items()]
    record = RoundRecord(round=1, measured=ClientTable([0, 1, 3], columns))
    actual = client_frame(Measurements.of([nothing, record], CLIENTS))
    assert actual["client"].tolist() == [0, 1, 3]
    assert actual["hostile"].tolist() == [False, False, True]
    assert actual["loss"].tolist()[::2] == [math.inf, 2.0]
    assert math.isnan(actual["loss"][1])
    assert len(client_frame(Measurements.of([nothing], CLIENTS))) == 0
    assert rounds_frame([nothing])["round"].tolist() == [0]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a method that evaluates two models of every client, and a method with one model."""
    root = tmp_path_factory.mktemp("series") / "runs"
    for seed in (0, 1):
        of = federation(seed)
        ditto = Ditto(optimizer=SGD(lr=1.0), epochs=9, batch_size=5)
        simulate(ditto, of, rounds=2, folder=root / f"ditto-s{seed}", unseen=0.34, evaluate_every=1)
        simulate("standalone", of, rounds=1, folder=root / f"standalone-s{seed}")
    return root


def column(line: Any, series: str) -> list[Any]:
    """Test accuracies of a series, from the file's own JSON."""
    key = {"name": "accuracy", "series": series, "split": "test"}
    (actual,) = (c["values"] for c in line["measured"]["columns"] if key.items() <= c.items())
    assert line["measured"]["clients"] == [*range(len(actual))]
    return list(actual)


def series_of(line: Any) -> list[str]:
    return list(dict.fromkeys(c["series"] for c in line["measured"]["columns"] if c["name"] == "accuracy"))


def by_hand(folder: Path, series: str, *, weighted: bool = False) -> float:
    """Mean test accuracy of one model over the clients that train, from the file's own JSON."""
    people = json.loads((folder / "clients.json").read_text())
    values = column(lines_of(folder)[-1], series)
    pairs = [
        (v, p["test"] if weighted else 1)
        for v, p in zip(values, people, strict=True)
        if v is not None and not p["unseen"]
    ]
    return sum(v * n for v, n in pairs) / sum(n for _, n in pairs)


def test_a_mean_is_that_of_one_model_and_of_the_report(two_models: Path) -> None:
    folders = [two_models / f"ditto-s{seed}" for seed in (0, 1)]
    headline, other = series_of(lines_of(folders[0])[-1])
    mine, others = ([by_hand(f, series) for f in folders] for series in (headline, other))
    assert mine != others
    actual = load_runs(two_models, last=True).query("split == 'test' and not unseen")
    means = actual.groupby(["method", "seed"])["accuracy"].mean()
    assert means["ditto"].tolist() == pytest.approx(mine)
    table = compare_runs([RunRecord.load(f) for f in folders]).frame
    assert table["accuracy_last"].iloc[0] == pytest.approx(sum(mine) / 2)
    named = load_runs(two_models, last=True, series=other).query("split == 'test' and not unseen")
    assert named["method"].unique().tolist() == ["ditto"]
    assert named.groupby("seed")["accuracy"].mean().tolist() == pytest.approx(others)
    assert set(load_runs(two_models, series="all").query("method == 'ditto'")["series"]) == {headline, other}
    with pytest.raises(ConfigError, match=f"has no series 'parsonal'. Did you mean '{headline}'"):
        load_runs(two_models, series="parsonal")


def test_means_by_examples(two_models: Path) -> None:
    folders = [two_models / f"ditto-s{seed}" for seed in (0, 1)]
    headline = series_of(lines_of(folders[0])[-1])[0]
    expected = [by_hand(f, headline, weighted=True) for f in folders]
    last = load_runs(two_models, last=True)
    actual = average_by_examples(last.query("split == 'test' and not unseen"), ["method", "seed"])
    assert actual["ditto"].tolist() == pytest.approx(expected)
    table = pd.DataFrame({"client": [0, 1, 2], "series": "a", "split": "test", "round": 1, "n": [1, 3, 0]})
    table["accuracy"], table["loss"] = [1.0, 0.2, math.nan], [1.0, math.inf, math.nan]
    assert average_by_examples(table, "split")["test"] == pytest.approx((1 + 3 * 0.2) / 4)
    assert average_by_examples(table, "split", "loss")["test"] == math.inf
    everything = load_runs(two_models, series="all")
    for some, named in (
        (everything.query("round == 2"), "series"),
        (last, "split"),
        (load_runs(two_models).query("split == 'test'"), "round"),
    ):
        with pytest.raises(DataError, match=f"rows of {named} .*averaged together"):
            average_by_examples(some, ["method", "seed"])
    with pytest.raises(DataError, match="not known"):
        average_by_examples(table.assign(n=math.nan), "split")


def test_clients_outside_training_are_in_no_mean() -> None:
    """Of validation, by which rounds are chosen, of the progress line and of the result."""
    how: dict[str, Any] = {"rounds": 2, "unseen": 0.34, "evaluate_every": 1}
    result = simulate("standalone", federation(5), **how)
    record, unseen = result.rounds[-1], result.run.client_sampler.unseen
    assert record.is_evaluated
    values = {split: record.values("accuracy", split=split) for split in ("val", "test")}
    for split, actual in (("val", record.validation()), ("test", result.mean_accuracy())):
        known = [v for i, v in enumerate(values[split]) if v is not None and i not in unseen]
        everyone = [v for v in values[split] if v is not None]
        assert actual == pytest.approx(sum(known) / len(known))
        assert actual != pytest.approx(sum(everyone) / len(everyone))
    assert RoundRecord.from_line(record.to_line()).validation() == record.validation()
    assert f"{100 * result.mean_accuracy():.1f} %" in describe_record(record)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run"):
        load_runs(tmp_path)
    with pytest.raises(CheckpointError, match="holds no run"):
        load_runs(tmp_path / "absent")


def test_a_round_at_which_a_client_diverged_is_the_worst_though_it_has_an_accuracy() -> None:
    def validation(losses: list[float | None], accuracies: list[float | None]) -> float | None:
        columns = [
            Column(name, "personal", "val", values)
            for name, values in (("accuracy", accuracies), ("loss", losses))
        ]
        return RoundRecord(1, measured=ClientTable([0, 1], columns)).validation()

    assert validation([0.1, 0.3], [0.75, 0.25]) == 0.5
    assert validation([0.1, math.nan], [0.9, 0.8]) == -math.inf
    assert validation([0.1, 0.3], [None, None]) == -0.2
    assert validation([0.1, math.nan], [None, None]) == -math.inf
    assert validation([None, None], [0.9, 0.8]) == pytest.approx(0.85)
    assert validation([None, None], [None, None]) is None


def test_results_of_the_best_round_by_validation() -> None:
    torch.manual_seed(0)  # of the model's initial values
    x = torch.randn(60, 4)
    # labels of validation and test that training does not explain, so that the best round is not the last
    clients = [
        {"train": (x[k::6], (x[k::6, 0] > 0).long()), "val": (x[k::6], (x[k::6, 1] > 0).long()),
         "test": (x[k::6], (x[k::6, 2] > 0).long())}
        for k in range(3)
    ]  # fmt: skip
    actual = simulate(
        FedAvg(optimizer=SGD(lr=0.5)),
        Federation.from_arrays(clients, nn.Linear(4, 2)),
        rounds=6,
        evaluate_every=1,
    )
    means = [sum(r.values("accuracy", series="personal", split="val")) / 3 for r in actual.rounds]
    best = means.index(max(means))
    assert (actual.best_round, best < 6) == (best, True)
    assert actual.accuracy(at="best") == actual.rounds[best].values(
        "accuracy", series="personal", split="test"
    )
    assert actual.mean_accuracy(at="best") == pytest.approx(sum(actual.accuracy(at="best")) / 3)
    assert actual.accuracy() == actual.rounds[-1].values("accuracy", series="personal", split="test")
    with pytest.raises(ConfigError, match="Did you mean 'best'"):
        actual.mean_accuracy(at="bset")
    without = simulate(
        "fedavg",
        Federation.from_arrays([{"train": c["train"], "test": c["test"]} for c in clients], nn.Linear(4, 2)),
        rounds=1,
    )
    with pytest.raises(DataError, match="no client has validation examples"):
        without.mean_accuracy(at="best")


def test_means_by_examples_keep_runs_that_do_not_vary_a_field() -> None:
    table = pd.DataFrame(
        {"run": ["x", "x", "y", "y"], "partition.alpha": [0.1, 0.1, None, None], "client": [0, 1, 0, 1]}
    )
    table = table.assign(
        series="a", split="test", round=1, n=[1, 3, 1, 1], accuracy=[1.0, 0.2, 0.5, 0.7], loss=0.0
    )
    means = average_by_examples(table, ["run", "partition.alpha"])
    assert means.droplevel("partition.alpha").to_dict() == pytest.approx({"x": 0.4, "y": 0.6})


def test_a_seed_beyond_64_bits_is_read_as_it_is(tmp_path: Path) -> None:
    data = [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(2)]
    for seed in (2**63, 3):
        federation = Federation.from_arrays(data, lambda: torch.nn.Linear(3, 2), classes=2, seed=seed)
        simulate("fedavg", federation, rounds=1, folder=tmp_path / str(seed))
    assert set(load_runs(tmp_path)["seed"]) == set(load_rounds(tmp_path)["seed"]) == {2**63, 3}


def test_runs_of_one_method_with_different_settings_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load(folder: Path) -> list[str]:
        caplog.clear()
        load_runs(folder)
        return [record.getMessage() for record in caplog.records]

    data = [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(2)]
    for seed in (0, 1):
        for lr in (0.1, 1.0):
            federation = Federation.from_arrays(data, nn.Linear(3, 2), classes=2, seed=seed)
            every: dict[str, Any] = {"checkpoint_every": 1 + seed}  # changes no result
            method = FedAvg(optimizer=SGD(lr=lr))
            simulate(method, federation, rounds=1, folder=tmp_path / f"lr{lr}" / f"s{seed}", **every)
    (message,) = load(tmp_path)
    assert message.startswith(
        "lr0.1/s0 and lr1.0/s0 are runs of one method and differ in method.optimizer.lr:"
    )
    assert load(tmp_path / "lr0.1") == []
    # a run from before a setting existed has its default
    for path in (tmp_path / "lr0.1" / "s0").glob("run.json"):
        config = read_sealed(path)
        del config["run"]["statistics"]
        write_sealed(path, config)
    assert load(tmp_path / "lr0.1") == []
