"""The command ``predict``: its CSV against the records of the run folder, its picture, and code that it must not import."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import resource
import signal
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.io.compressed_files import write_table
from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]


def accuracy_of(path: Path) -> dict[int, float]:
    rows = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            assert (row["label"] == row["prediction"]) == (row["correct"] == "True")
            rows[int(row["client"])].append(row["correct"] == "True")
    return {client: sum(actual) / len(actual) for client, actual in rows.items()}


def test_predictions_of_a_run_folder(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()))
    folder = Path("runs/small/fedavg-s0")
    before = files(folder)
    said = done(capsys, "predict", str(folder), "--confusion", "confusion.svg")
    recorded = RunRecord.load(folder).rounds[-1]
    assert accuracy_of(Path("predictions.csv")) == dict(enumerate(recorded.values()))
    assert "15 test examples of 3 clients, after round 2" in said
    picture = Path("confusion.svg").read_text()
    for name in ("setosa", "versicolor", "virginica"):
        assert name in picture
    done(capsys, "predict", str(folder), "--client", "1", "--split", "val", "-o", "new/one.csv")
    assert accuracy_of(Path("new/one.csv")) == {1: recorded.values("accuracy", split="val")[1]}
    assert files(folder) == before


def test_the_ending_of_a_table_chooses_its_compression(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1")
    folder = "runs/small/fedavg-s0"
    done(capsys, "predict", folder)
    expected = Path("predictions.csv").read_bytes()
    with pytest.raises(gzip.BadGzipFile):
        gzip.decompress(expected)
    for ending, decompress in (("gz", gzip.decompress), ("bz2", bz2.decompress), ("xz", lzma.decompress)):
        done(capsys, "predict", folder, "-o", f"p.csv.{ending}")
        assert decompress(Path(f"p.csv.{ending}").read_bytes()) == expected
    done(capsys, "predict", folder, "-o", "p.csv.ZIP")
    with zipfile.ZipFile("p.csv.ZIP") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"p.csv": expected}
    for name, ending in (("p.csv.zst", ".zst"), ("p.tar.gz", ".tar")):
        with pytest.raises(ConfigError, match=f"{name}: {ending} is not supported"):
            write_table(Path(name), [b""])
        assert not Path(name).exists()
    done(capsys, "report", folder, "--csv", "v.csv.gz")
    assert gzip.decompress(Path("v.csv.gz").read_bytes()).startswith(b"run,method,seed,")


def test_what_cannot_be_predicted(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1")
    folder = "runs/small/fedavg-s0"
    assert "there is no client 7" in refused(capsys, "predict", folder, "--client", "7")
    assert "no series 'globl'" in refused(capsys, "predict", folder, "--series", "globl")
    assert "cannot draw" in refused(capsys, "predict", folder, "--confusion", "x.nothing")
    assert "not a run folder" in refused(capsys, "predict", "nowhere")


@pytest.mark.full
def test_a_metric_of_the_user_s_is_code(capsys: Capsys) -> None:
    Path("own_metric.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\ndef f(s, y): return 0.5\n"
    )
    done(capsys, "run", write(Path()), "run.metrics=['own_metric:f']", "run.rounds=1")
    folder = Path("runs/small/fedavg-s0")
    last = RunRecord.load(folder).rounds[-1]
    assert last.values("own_metric:f", split="val") == last.values("own_metric:f") == [0.5] * 3
    Path("imported").unlink()
    for command in (["predict", str(folder)], ["resume", str(folder), "run.rounds=2"]):
        actual = refused(capsys, *command)
        assert "own_metric:f" in actual
        assert "--allow-code" in actual
    done(capsys, "report", str(folder))
    assert not Path("imported").exists()
    done(capsys, "predict", str(folder), "--allow-code")
    write(Path(), SMALL.replace("rounds = 2", 'rounds = 2\nmetrics = ["macrof1"]'))
    assert "Did you mean 'macro_f1'" in refused(capsys, "run", "small.toml", "-o", "other")


def test_a_run_without_its_best_round_says_what_keeps_it(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1", "-o", "RUN")
    actual = refused(capsys, "predict", "RUN", "--best")
    assert "run.keep_best = true" in actual
    assert "stopped" not in actual


def test_a_best_state_that_a_later_round_has_overtaken_is_refused(capsys: Capsys) -> None:
    typed = ["run.evaluate_every=1", "run.keep_best=true", "defaults.optimizer.lr=0.5", "-o", "RUN"]
    done(capsys, "run", write(Path()), "run.rounds=1", *typed)
    done(capsys, "predict", "RUN", "--best")
    done(capsys, "resume", "RUN", "run.rounds=8", "run.keep_best=false")
    validation = [record.validation() or 0.0 for record in RunRecord.load(Path("RUN")).rounds]
    best = validation.index(max(validation))
    assert best > 1
    said = refused(capsys, "predict", "RUN", "--best")
    assert f"the best round by validation is {best}, but its state was not kept, only that of round" in said


NAMED = """
name = "named"
method = "standalone"
[data]
source = "csv"
path = "table.csv"
label = "y"
client = "site"
[partition]
kind = "natural"
[model]
names = ["mlp"]
hidden = [4]
[run]
rounds = 1
representations = 0
"""
NAMED_RUN = "runs/named/standalone-s0"


def run_of_named_clients(capsys: Capsys, names: Sequence[str]) -> None:
    """Run on a table whose clients have these names, numbered in their order; the k-th has 10 (k + 1) examples."""
    rows = [
        f"{i % 7},{i % 5},{'no' if i % 2 else 'yes'},{name}"
        for k, name in enumerate(names)
        for i in range(10 * (k + 1))
    ]
    Path("table.csv").write_text("\n".join(["a,b,y,site", *rows]))
    done(capsys, "run", write(Path(), NAMED, "named.toml"))


def get_names(path: str) -> set[str]:
    with Path(path).open() as file:
        return {row["client_name"] for row in csv.DictReader(file)}


def test_a_client_is_typed_by_its_name_or_number(capsys: Capsys) -> None:
    run_of_named_clients(capsys, ["01", "1", "north"])
    # 1 is the number and the name of the same client
    for text, name, number in (
        ("01", "01", 0),
        ("0", "01", 0),
        ("1", "1", 1),
        ("north", "north", 2),
        ("2", "north", 2),
    ):
        said = done(capsys, "predict", NAMED_RUN, "--client", text, "-o", "one.csv")
        assert f"of client {number} ({name})" in said
        assert get_names("one.csv") == {name}
    assert "client 2 (north)" in done(
        capsys, "export", NAMED_RUN, "--client", "north", "-o", "north.safetensors"
    )
    assert "client 0 (01)" in done(capsys, "export", NAMED_RUN, "-o", "first.safetensors")
    said = refused(capsys, "predict", NAMED_RUN, "--client", "nord")
    assert "--client nord: there is no client nord; they are numbered from 0 to 2 and have names." in said
    assert "Did you mean 'north'?" in said
    assert "there is no client 3" in refused(capsys, "export", NAMED_RUN, "--client", "3")


def test_a_name_that_is_the_number_of_another_client_is_refused(capsys: Capsys) -> None:
    run_of_named_clients(capsys, ["1", "2", "3", "4"])
    for command in (
        ["predict", NAMED_RUN],
        ["export", NAMED_RUN],
        ["predict", NAMED_RUN, "--rows", "table.csv"],
    ):
        said = refused(capsys, *command, "--client", "1")
        assert "--client 1 may be client 0 (1), by its name, or client 1 (2), by its number" in said
        assert "Type --client name=1 for client 0 (1), or --client number=1 for client 1 (2)" in said
    for text, name in (
        ("name=1", "1"),
        ("number=1", "2"),
        ("0", "1"),
        ("4", "4"),
        ("number=3", "4"),
        ("name=3", "3"),
    ):
        done(capsys, "predict", NAMED_RUN, "--client", text, "-o", "one.csv")
        assert get_names("one.csv") == {name}
    assert "there is no client name=0" in refused(capsys, "predict", NAMED_RUN, "--client", "name=0")


def test_files_are_written_completely_or_not_at_all(capsys: Capsys) -> None:
    folder = "runs/small/fedavg-s0"
    done(capsys, "run", write(Path()), "run.rounds=1")
    # a file of more bytes than the limit cannot be written, as on a full disk
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        assert "predictions.csv" in refused(capsys, "predict", folder)
        assert "matrix.svg" in refused(
            capsys, "predict", folder, "-o", "/dev/null", "--confusion", "matrix.svg"
        )
        assert "data.svg" in refused(capsys, "data", "small.toml", "-o", "data.svg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in Path().iterdir()) == ["runs", "small.toml"]
