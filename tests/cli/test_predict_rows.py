"""``predict --rows``: new rows are prepared as the rows of training were, and the outputs are those of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedlowrank.config.new_rows import read_new_rows
from fedlowrank.config.stored_run import open_run
from tests.cli.small_experiment import done, refused, write

Capsys = pytest.CaptureFixture[str]

TEXT = """
name = "rows"
method = "standalone"
[data]
source = "csv"
path = "train.csv"
label = "ill"
client = "hospital"
missing = "mean"
[partition]
kind = "natural"
[model]
names = ["mlp"]
hidden = [4]
[run]
rounds = 1
representations = 0
"""
RUN = Path("runs/rows/standalone-s0")
HOSPITALS = "north", "south"


def make_table(seed: int, count: int = 80) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    age, dose = draw.uniform(20, 90, count).round(3), draw.normal(size=count).round(3)
    return pd.DataFrame({
        "age": age,
        "hospital": np.array(HOSPITALS)[np.arange(count) % 2],
        "sex": np.array(["f", "m", "x"])[draw.integers(0, 3, count)],
        "dose": dose,
        "ill": np.where(age / 50 + dose > 1, "yes", "no"),
    })  # fmt: skip


def run_on_table(capsys: Capsys, *typed: str) -> pd.DataFrame:
    train = make_table(0)
    train.to_csv("train.csv", index=False)
    done(capsys, "run", write(Path(), TEXT, "rows.toml"), *typed)
    return train


@pytest.mark.parametrize("normalize", ["none", "scale", "standard", "standard_per_client"])
def test_rows_are_prepared_as_in_training(normalize: str, capsys: Capsys) -> None:
    train = run_on_table(capsys, f"data.normalize={normalize}")
    # the rows of training once more, in another order of rows and columns
    train.iloc[::-1, ::-1].to_csv("again.csv", index=False)
    rows, run = read_new_rows(RUN, Path("again.csv")), open_run(RUN, "")
    assert rows.clients is not None
    for client, name in enumerate(HOSPITALS):
        data = run.federation.clients[client]
        expected = np.concatenate([part.x.numpy() for part in (data.train, data.val, data.test)])
        actual = rows.inputs(client).numpy()[np.array(rows.clients) == name]
        for table in (expected, actual):
            table[:] = table[np.lexsort(table.T)]
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_predictions_are_those_of_the_weights(capsys: Capsys) -> None:
    train = run_on_table(capsys)
    new = make_table(1, 7)
    # an empty cell gets the mean of training, and columns that the models do not take change nothing
    new.loc[2, "age"] = np.nan
    new.assign(other=1).drop(columns="ill").iloc[:, ::-1].to_csv("new.csv", index=False)
    said = done(capsys, "predict", str(RUN), "--rows", "new.csv", "-o", "out/new.csv")
    assert "7 rows, predicted by the models of 2 clients, after round 1" in said
    actual = pd.read_csv("out/new.csv").sort_values("row").reset_index(drop=True)
    assert list(actual["row"]) == list(range(7))
    assert list(actual["client_name"]) == list(new["hospital"])
    low, high = train[["age", "dose"]].min(), train[["age", "dose"]].max()
    scaled = (new[["age", "dose"]].fillna({"age": train["age"].mean()}) - low) / (high - low)
    sexes = np.stack([new["sex"] == value for value in "fmx"], 1)
    x = np.column_stack([scaled["age"], sexes, scaled["dose"]])
    run = open_run(RUN, "")
    for row in range(7):
        params = run.personal_params(run.federation.infos[int(actual["client"][row])])
        w1, b1, w2, b2 = (p.numpy().astype(np.float64) for p in params.values())
        scores = w2 @ np.maximum(w1 @ x[row] + b1, 0) + b2
        probability = np.exp(scores) / np.exp(scores).sum()
        assert actual["prediction_name"][row] == ("no", "yes")[int(scores.argmax())]
        assert actual["probability"][row] == pytest.approx(probability.max(), abs=1e-5)
    # each model on its own; without the column of clients, all models
    done(capsys, "predict", str(RUN), "--rows", "new.csv", "--client", "1", "-o", "one.csv")
    one = pd.read_csv("one.csv")
    assert set(one["client"]) == {1}
    assert list(one["row"]) == list(range(7))
    new.drop(columns="hospital").to_csv("nobody.csv", index=False)
    done(capsys, "predict", str(RUN), "--rows", "nobody.csv", "-o", "all.csv")
    every = pd.read_csv("all.csv")
    assert len(every) == 14
    own = every.merge(actual, on=["client", "row"], suffixes=("", "_own"))
    assert len(own) == 7
    np.testing.assert_array_equal(own["probability"], own["probability_own"])


def test_targets_of_a_regression(capsys: Capsys) -> None:
    run_on_table(capsys, "data.label=dose", "data.features=['age']", "data.missing=refuse")
    make_table(1, 5).to_csv("new.csv", index=False)
    done(capsys, "predict", str(RUN), "--rows", "new.csv")
    assert list(pd.read_csv("predictions.csv")) == ["client", "row", "client_name", "prediction"]


def test_rows_that_do_not_fit_are_refused(capsys: Capsys) -> None:
    run_on_table(capsys, "data.missing=refuse")
    new = make_table(1, 5)

    def told(frame: pd.DataFrame, *typed: str) -> str:
        frame.to_csv("new.csv", index=False)
        return refused(capsys, "predict", str(RUN), "--rows", "new.csv", *typed)

    said = told(new.drop(columns=["age", "dose"]).rename(columns={"sex": "sexe"}))
    assert "new.csv' lacks the columns 'age', 'sex', 'dose'" in said
    assert "new.csv': the column 'sex' has the value 'q'" in told(new.assign(sex="q"))
    empty = new.copy()
    empty.loc[3, "dose"] = np.nan
    assert "the column 'dose' has 1 empty cell, in row 4" in told(empty)
    said = told(new.assign(hospital="east"))
    assert "'east', which is no client of the run" in said
    assert "--client" in said
    assert "--split" in told(new, "--split", "val")
    assert "--confusion" in told(new, "--confusion", "a.svg")
    Path("new.csv").unlink()
    assert f"there is no file '{Path.cwd() / 'new.csv'}'" in refused(
        capsys, "predict", str(RUN), "--rows", "new.csv"
    )
    done(
        capsys, "run", "rows.toml", "data={source='iris'}", "partition={kind='iid', clients=2}", "-o", "iris"
    )
    assert "of another source than 'csv'" in refused(capsys, "predict", "iris", "--rows", "train.csv")
