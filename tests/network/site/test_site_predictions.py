"""``predict --rows`` at a site: its rows are prepared as those of training were, and scored by the stored weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy

from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.network.client import prepare, read_own_share
from fedlowrank.network.site.site_settings import SiteSettings
from tests.support.local_network import LocalTransport, serve_run, small

Capsys = pytest.CaptureFixture[str]
CLASSES = ["no", "yes"]


def make_table(seed: int, count: int = 60) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    age, dose = draw.uniform(20, 90, count).round(3), draw.normal(5, 2, count).round(3)
    ill = np.where(age / 50 + dose > 6, "yes", "no")
    return pd.DataFrame({"age": age, "site": seed, "dose": dose, "ill": ill})


def run_at_sites(folder: Path, normalize: str, method: str = "ditto") -> list[Path]:
    """Folders of three clients after a run; each has its own table."""
    data = {
        "source": "csv",
        "path": "none.csv",
        "label": "ill",
        "client": "site",
        "classes": CLASSES,
        "normalize": normalize,
    }
    made = small(method, rounds=2, data=data)
    carrier = LocalTransport({100 + i: folder / f"client-{i}" for i in range(3)})
    for node, client_folder in carrier.folders.items():
        i, path = node - 100, folder / f"{node - 100}.csv"
        make_table(i).to_csv(path, index=False)
        shares = read_own_share(made, i, 3, path)
        prepare(client_folder, made, i, shares, SiteSettings.simulated(), data_path=path)
    serve_run(carrier, made, folder / "run")
    return list(carrier.folders.values())


def score(folder: Path, inputs: np.ndarray) -> np.ndarray:
    """Probabilities of the classes by the weights in a client's folder."""
    (file,) = folder.glob("*/model/model.safetensors")
    weights = [t.astype(np.float64) for _, t in sorted(safetensors.numpy.load_file(file).items())]
    for k in range(0, len(weights), 2):
        bias, weight = weights[k : k + 2]
        inputs = (np.maximum(inputs, 0) if k else inputs) @ weight.T + bias
    e = np.exp(inputs - inputs.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


@pytest.mark.parametrize("normalize", ["none", "standard_per_client"])
def test_new_rows_are_prepared_and_scored_as_those_of_training(
    normalize: str, tmp_path: Path, capsys: Capsys
) -> None:
    folders = run_at_sites(tmp_path, normalize)
    out, rows = tmp_path / "predictions.csv", tmp_path / "rows.csv"
    # in another order, without labels and without the column of the sites
    table = make_table(1).sample(frac=1, random_state=0)
    table[["dose", "age"]].to_csv(rows, index=False)
    assert main(["predict", str(folders[1]), "--rows", str(rows), "-o", str(out)]) == 0
    assert "60 rows, predicted by" in " ".join(capsys.readouterr().out.split())
    actual = pd.read_csv(out)
    assert actual["row"].tolist() == list(range(60))
    assert set(actual["client"]) == {1}
    assert actual["prediction_name"].tolist() == [CLASSES[k] for k in actual["prediction"]]
    # what the client trained on, in an order of its own
    data = tree.decode((folders[1] / "data.tree").read_bytes())
    parts = [np.asarray(data[part]["x"], np.float64) for part in ("train", "val", "test")]
    expected = score(folders[1], np.concatenate(parts)).max(1)
    np.testing.assert_allclose(np.sort(actual["probability"]), np.sort(expected), rtol=1e-5)
    if normalize == "none":
        expected = score(folders[1], table[["age", "dose"]].to_numpy())
        np.testing.assert_allclose(actual["probability"], expected.max(1), rtol=1e-5)
        assert actual["prediction"].tolist() == expected.argmax(1).tolist()


def test_what_cannot_be_predicted_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    folder, *_ = run_at_sites(tmp_path, "standard_per_client")
    rows = str(tmp_path / "1.csv")
    for typed in ([], ["--rows", rows, "--client", "0"], ["--rows", rows, "--series", "personal"]):
        assert main(["predict", str(folder), *typed]) == 1
        assert "the folder of one client" in capsys.readouterr().err
    make_table(7).to_csv(tmp_path / "0.csv", index=False)
    assert main(["predict", str(folder), "--rows", rows]) == 1
    assert "0.csv has changed since client 0 trained on it" in capsys.readouterr().err
    make_table(0).to_csv(tmp_path / "0.csv", index=False)
    for file in folder.glob("*/model/*"):
        file.unlink()
    assert main(["predict", str(folder), "--rows", rows]) == 1
    assert "holds no model yet" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedem", "ensemble"])
def test_a_client_that_infers_by_more_than_a_model_predicts_nothing_by_its_weights(
    method: str, tmp_path: Path, capsys: Capsys
) -> None:
    folder, *_ = run_at_sites(tmp_path, "none", method)
    rows, out = str(tmp_path / "0.csv"), tmp_path / "predictions.csv"
    assert main(["predict", str(folder), "--rows", rows, "-o", str(out)]) == 1
    assert "infers by more than the scores of one model" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
