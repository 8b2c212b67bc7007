"""The commands at work."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlowrank import __version__
from fedlowrank.cli.main import main, parser
from fedlowrank.core.learning.optimizer import Schedule
from fedlowrank.data.partitioning.partition import PARTITIONS, Natural
from fedlowrank.data.partitioning.split import SPLITS
from fedlowrank.data.sources import SOURCES
from fedlowrank.methods import METHODS
from fedlowrank.models.zoo import MODELS
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage.run_files import RECORDS_FILE, read_lines
from fedlowrank.trust.trust_settings import Privacy
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]
COMMANDS = ("list", "run", "compare", "resume", "status", "report", "export", "check", "data", "fields")


def folders() -> list[str]:
    return sorted(p.parent.name for p in Path("runs/small").glob("*/run.json"))


def stamps() -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path("runs").rglob(RECORDS_FILE)}


def test_list_shows_one_kind_or_one_entry_without_markup(capsys: Capsys) -> None:
    models = done(capsys, "list", "models")
    assert all(name in models for name in MODELS)
    assert "fedavg" not in models
    one = done(capsys, "list", "csv")
    assert "data.source" in one
    assert "A table in a .csv" in one
    assert "npz" not in one
    assert "``" not in done(capsys, "list") + done(capsys, "list", "fedhl")
    assert "Did you mean 'csv'?" in refused(capsys, "list", "cvs")
    assert refused(capsys, "list", "zzzz").endswith("`fedlowrank list` shows all.\n")


@pytest.mark.full
def test_list_names_everything(capsys: Capsys) -> None:
    out = done(capsys, "list")
    for known in (METHODS, MODELS, SOURCES, PARTITIONS, SPLITS):
        for name in known:
            assert name in out
    for cls in METHODS.values():
        assert cls.citation.split(",")[0] in out


@pytest.mark.few(8)
@pytest.mark.parametrize("name", METHODS)
def test_list_shows_one_method(name: str, capsys: Capsys) -> None:
    out = done(capsys, "list", name)
    assert f"[methods.{name}]" in out
    assert "local_update" in out
    for field in ("epochs", "batch_size", "optimizer", *(f.name for f in dataclasses.fields(METHODS[name]))):
        assert field in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"fedlowrank {command}" in out
    assert "--debug" in out


def test_options_are_the_parameters_of_the_command_s_function() -> None:
    # functions are imported only when their command is called, with its options by name
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        module, _, function = command.get_default("function").partition(":")
        actual = getattr(importlib.import_module(f"fedlowrank.cli.{module}"), function)
        options = {a.dest for a in command._actions} - {"help", "debug"}
        assert options == set(inspect.signature(actual).parameters), name


@pytest.mark.few(6)
@pytest.mark.parametrize("command", ["run", "compare", "tune", "data", "serve", "join", "app"])
def test_help_of_an_experiment_fits_a_screen(command: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 30
    assert "fedlowrank fields" in out


def test_fields_are_explained(capsys: Capsys) -> None:
    lines = done(capsys, "fields").splitlines()
    for field, default, meaning in (
        ("rounds", "50", "rounds of communication"),
        ("participation", "1.0", "share of the clients"),
        ("classes_per_client", "2", "number k of classes"),
        ("names", "('cnn1',)", "client k has"),
        ("mu", "0.9", "weight of the model's own loss"),
        ("lr", "0.01", "learning rate"),
        ("epsilon", "None", "the budget"),
    ):
        at = [i for i, line in enumerate(lines) if line.strip() == f"{field} = {default}"]
        assert at, field
        assert any(meaning in lines[i + 1] for i in at), field
    # no field without its meaning, and no table twice
    shown = [i for i, line in enumerate(lines) if line.startswith("  ") and " = " in line and line[2] != " "]
    assert len(shown) > 50
    assert [lines[i] for i in shown if not lines[i + 1].strip()] == []
    titles = [line for line in lines if line.startswith("[")]
    assert len(titles) == len(set(titles)) > 60


@pytest.mark.parametrize(
    ("path", "titles", "fields"),
    [
        ("run", ["[run]"], RunSettings),
        ("[run]", ["[run]"], RunSettings),
        ("run.privacy", ["[run.privacy]"], Privacy),
        ("run.privacy.epsilon", ["[run.privacy]"], ["epsilon"]),
        ("partition.natural", ["[partition, kind = natural]"], Natural),
        ("split", [f"[split, kind = {kind}]" for kind in SPLITS], None),
        ("methods.ifca", ["[methods.ifca]"], METHODS["ifca"]),
        ("methods.fedavg.optimizer.schedule", ["[methods.fedavg.optimizer.schedule]"], Schedule),
        (
            "defaults.optimizer.lr",
            [f"[defaults.optimizer, kind = {kind}]" for kind in ("sgd", "adamw")],
            None,
        ),
        ("methods", [f"[methods.{name}]" for name in METHODS], None),
        ("seeds", ["at the top"], ["seeds"]),
    ],
)
def test_fields_of_one_part(path: str, titles: list[str], fields: Any, capsys: Capsys) -> None:
    lines = done(capsys, "fields", path).splitlines()
    assert [line for line in lines if line.startswith(("[", "at the"))][: len(titles)] == titles
    if fields is not None:
        names = fields if isinstance(fields, list) else [f.name for f in dataclasses.fields(fields)]
        assert [line.split()[0] for line in lines if re.match(r"  \w+ = ", line)] == names


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("partitoin", "'partition'"),
        ("run.privcy", "'run.privacy'"),
        ("privacy", "'run.privacy'"),
        ("floral", "'methods.floral'"),
        ("alpha", "partition.alpha, methods.feddyn.alpha"),
        ("xyzzy", "'run', 'split'"),
    ],
)
def test_unknown_fields(path: str, found: str, capsys: Capsys) -> None:
    message = refused(capsys, "fields", path)
    assert f"there is no section or field {path!r}" in message
    assert found in message


def test_no_command_and_version(capsys: Capsys) -> None:
    for arguments, code in (([], 2), (["nonsense"], 2), (["--version"], 0), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == code
    assert __version__ in capsys.readouterr().out


@pytest.mark.full
def test_run(capsys: Capsys) -> None:
    out = done(capsys, "run", write(Path()), "run.rounds=3", "--method", "standalone")
    assert "Standalone" in out
    assert "runs/small/standalone-s0" in out
    # the end fits a screen: the table of results, what may be concluded, and where definitions are
    end = "\n".join(out.splitlines()[-14:])
    assert "Results" in end
    assert "reaches a mean test accuracy of" in end
    assert "fedlowrank report runs/small/standalone-s0" in end
    assert "each counting once" not in out
    record = RunRecord.load(Path("runs/small/standalone-s0"))
    assert [r.round for r in record.rounds] == [0, 1, 2, 3]
    assert record.status["state"] == "finished"
    assert record.config["method"]["name"] == "standalone"
    assert record.config["run"]["rounds"] == 3
    done(capsys, "run", "small.toml", "run.seed=4", "-o", "elsewhere/run")
    assert RunRecord.load(Path("elsewhere/run")).config["run"]["seed"] == 4


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["small.toml", "--force", "run.rounds=1"],
        ["small.toml", "-o", "out", "run.rounds=1"],
        ["--force", "small.toml", "run.rounds=1", "--method", "standalone", "run.seed=2"],
    ],
    ids=" ".join,
)
def test_overrides_may_stand_anywhere(arguments: list[str], capsys: Capsys) -> None:
    write(Path())
    done(capsys, "run", *arguments)
    (made,) = Path().rglob(RECORDS_FILE)
    assert len(read_lines(made.parent)) == 2


@pytest.mark.usefixtures("undrawn")
def test_compare_runs_everything_once(capsys: Capsys) -> None:
    file = write(Path())
    out = done(capsys, "compare", file, "--seeds", "0,1", "--vary", "run.participation=0.4,1.0")
    made = {f: RunRecord.load(Path("runs/small") / f) for f in folders()}
    actual = {
        (r.config["method"]["name"], r.config["vary"]["run.participation"], r.config["run"]["seed"])
        for r in made.values()
    }
    assert actual == {(m, c, s) for m in ("standalone", "fedavg") for c in (0.4, 1.0) for s in (0, 1)}
    for folder, one in made.items():
        # the folder's name tells which run it is, the whole of the value included
        name, share, seed = (
            one.config["method"]["name"],
            one.config["run"]["participation"],
            one.config["run"]["seed"],
        )
        assert folder.startswith(name)
        assert folder.endswith(f"s{seed}")
        assert str(share) in folder
        assert len(one.rounds[1].participants) == {0.4: 1, 1.0: 3}[share]
    for end in ("html", "md", "csv"):
        text = Path(f"runs/small/report.{end}").read_text()
        assert "FedAvg" in text
        assert "Standalone" in text
    assert "runs/small/report.html" in out

    before = stamps()
    kept = files(Path("runs"))
    done(capsys, "compare", file, "--seeds", "0,1", "--vary", "run.participation=0.4,1.0")
    assert folders() == sorted({Path(p).parent.name for p in before})
    # the same configuration is not trained again, and not even written again
    assert stamps() == before
    assert {p: d for p, d in files(Path("runs")).items() if "report" not in p} == {
        p: d for p, d in kept.items() if "report" not in p
    }


@pytest.mark.usefixtures("undrawn")
def test_a_remark_of_a_method_bears_its_title(capsys: Capsys) -> None:
    variant = '[methods.thin]\nmethod = "floral"\ntitle = "Thin"\nrank = 0.001\n'
    said = done(capsys, "compare", write(Path(), SMALL + variant), "--methods", "thin", "run.rounds=1")
    remark = "Thin: rank = 0.001 gives less than rank 1; rank 1 is used (in "
    # before the run and in the report
    assert said.count(remark) == 2
    assert said.count("less than rank 1") == 2
    assert remark in Path("runs/small/report.md").read_text()
    config = json.loads(Path("runs/small/thin-s0/run.json").read_text())
    assert [text.startswith(remark) for text in config["remarks"]] == [True]


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_takes_methods_seeds_and_vary_from_the_file(capsys: Capsys) -> None:
    text = 'seeds = [3, 5]\nvary = "methods.fedprox.mu=0.1,0.2"\n' + SMALL
    done(capsys, "compare", write(Path(), text), "run.rounds=1", "--methods", "fedprox")
    actual = [RunRecord.load(Path("runs/small") / f).config for f in folders()]
    assert sorted((c["method"]["fields"]["mu"], c["run"]["seed"]) for c in actual) == [
        (0.1, 3), (0.1, 5), (0.2, 3), (0.2, 5),
    ]  # fmt: skip
    assert len([f for f in folders() if "0.1" in f]) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["--methods", "standalone"], []),
        (["--seeds", "0"], ["--seeds", "0,1"]),
        (['compare=["standalone"]'], []),
        (["seeds=[0]"], ["seeds=[0,1]"]),
        ([], ['title="Another title"']),
    ],
    ids=lambda v: " ".join(v) or "-",
)
@pytest.mark.usefixtures("undrawn")
def test_compare_goes_on_when_more_is_asked_for(first: list[str], then: list[str], capsys: Capsys) -> None:
    def arguments(more: list[str]) -> list[str]:
        return [*[m for m in more if "=" in m], *[m for m in more if "=" not in m]]

    file = write(Path())
    done(capsys, "compare", file, *arguments(first))
    before = stamps()
    done(capsys, "compare", file, *arguments(then))
    now = stamps()
    assert {p: now[p] for p in before} == before
    assert not [p for p in Path("runs/small").iterdir() if ".old" in p.name]


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_goes_on_with_what_was_stopped(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlowrank.rounds.run import Run

    step, calls = Run.step, 0

    def interrupted(run: Run) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step(run)

    file = write(Path())
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", interrupted)
        assert main(["compare", file]) == 130
    said = capsys.readouterr().err
    assert "interrupted" in said
    assert "start it again to go on" in said
    assert RunRecord.load(Path("runs/small/fedavg-s0")).status["state"] == "stopped"
    finished = stamps()[f"runs/small/standalone-s0/{RECORDS_FILE}"]
    done(capsys, "compare", file)
    assert stamps()[f"runs/small/standalone-s0/{RECORDS_FILE}"] == finished
    record = RunRecord.load(Path("runs/small/fedavg-s0"))
    assert [r.round for r in record.rounds] == [0, 1, 2]
    assert record.status["state"] == "finished"


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_with_force_keeps_the_old_runs(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "compare", file)
    before = files(Path("runs/small/fedavg-s0"))
    done(capsys, "compare", file, "run.rounds=1", "--force")
    assert files(Path("runs/small/fedavg-s0.old-1")) == before
    assert len(RunRecord.load(Path("runs/small/fedavg-s0")).rounds) == 2
    # what was moved aside is no part of the report
    assert Path("runs/small/report.csv").read_text().count("FedAvg") == 1


@pytest.mark.full
def test_report(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "compare", file)
    one = done(capsys, "report", "runs/small", "-o", "all.html", "--target", "0.3")
    assert "FedAvg" in one
    assert "Standalone" in one
    assert "30" in Path("all.md").read_text()
    for end in ("html", "md", "csv"):
        assert Path(f"all.{end}").stat().st_size > 100
    two = done(capsys, "report", "runs/small/fedavg-s0")
    assert "Standalone" not in two
    assert Path("report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_a_folder_leaves_out_what_was_moved_aside(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file)
    done(capsys, "run", file, "run.rounds=1", "--force")
    done(capsys, "report", "runs/small", "-o", "all.html")
    assert Path("all.csv").read_text().count("FedAvg") == 1


@pytest.mark.full
def test_the_report_shows_the_numbers_of_the_paper(capsys: Capsys) -> None:
    text = (
        SMALL + '[reference]\nlabel = "A paper, Table 7"\naccuracy = { fedavg = 61.25, standalone = "-" }\n'
    )
    done(capsys, "compare", write(Path(), text))
    page = Path("runs/small/report.html").read_text()
    assert "61.25" in page
    assert "A paper, Table 7" in page


@pytest.mark.full
def test_data_shows_and_draws(capsys: Capsys) -> None:
    file = write(Path())
    for end in ("svg", "png", "pdf"):
        out = done(capsys, "data", file, "partition.clients=4", "-o", f"picture.{end}")
        assert Path(f"picture.{end}").stat().st_size > 500
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:4] == ["client", "train", "val", "test"]
    assert [r[0] for r in rows[1:5]] == ["0", "1", "2", "3"]
    assert "setosa" in out
    assert "150" in str(sum(map(int, rows[6][1:4])))
    assert not Path("runs").exists()


OWN = """
from dataclasses import dataclass
from fedlowrank import Method, cross_entropy

from fedlowrank.core.contract.contribution import mean


@dataclass(frozen=True)
class Own(Method):
    noise: float = 0.0

    title = "My own"
    citation = "me"

    def server_init(self, task):
        return task.common_model(self.title).initial

    def client_init(self, client, task):
        return None

    def download(self, server, client):
        return server

    def local_update(self, state, down, view):
        def loss(theta, batch):
            return cross_entropy(view.model.apply(theta, batch.x), batch)

        return None, view.train(loss, down, "local", self.optimizer)

    def server_update(self, server, total, view):
        return total


@dataclass(frozen=True)
class Wrong(Own):
    title = "My wrong one"

    def server_update(self, server, total, view):
        return {name: 0.99 * p for name, p in total.items()}
"""


@pytest.mark.full
def test_check_a_class_of_ones_own(capsys: Capsys) -> None:
    Path("own_method.py").write_text(OWN)
    out = done(capsys, "check", "own_method:Own")
    assert "My own" in out
    assert "FAILED" not in out
    assert main(["check", "own_method:Wrong"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 1
    assert "learning rate of 0" in next(line for line in out.splitlines() if "FAILED" in line)


def test_check_a_built_in_method(capsys: Capsys) -> None:
    assert "FAILED" not in done(capsys, "check", "fedavg")


@pytest.mark.full
def test_auto_says_which_engine_it_chose_and_why(capsys: Capsys) -> None:
    assert main(["run", write(Path()), "--engine", "auto", "run.rounds=1"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"^engine auto: (sequential|vectorized|processes) \(.+\)$", said, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list"], "pfedlora"),
        pytest.param(["run", "small.toml", "run.rounds=1"], "runs/small/fedavg-s0", marks=pytest.mark.full),
    ],
    ids=["list", "run"],
)
def test_the_installed_command(arguments: list[str], says: str) -> None:
    command = Path(sys.executable).with_name("fedlowrank")
    if not command.exists():
        pytest.skip("the package is not installed with its command")
    write(Path())
    actual = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert actual.returncode == 0, actual.stderr
    assert says in actual.stdout
    assert "Traceback" not in actual.stderr


def test_compare_takes_a_finished_run_without_its_checkpoint_and_names_what_it_moves_aside(
    capsys: Capsys,
) -> None:
    file = write(Path())
    done(capsys, "compare", file)
    for name in ("standalone-s0", "fedavg-s0"):
        shutil.rmtree(f"runs/small/{name}/checkpoint")
    Path(f"runs/small/standalone-s0/{RECORDS_FILE}").unlink()
    before = stamps()
    said = done(capsys, "compare", file)
    assert stamps()[f"runs/small/fedavg-s0/{RECORDS_FILE}"] == before[f"runs/small/fedavg-s0/{RECORDS_FILE}"]
    assert "runs/small/standalone-s0.old-1" in said
    assert folders() == ["fedavg-s0", "standalone-s0", "standalone-s0.old-1"]
    # more rounds need the checkpoint
    shutil.rmtree("runs/small/standalone-s0.old-1")
    assert "runs/small/fedavg-s0.old-1" in done(capsys, "compare", file, "run.rounds=3")
    assert [r.round for r in RunRecord.load(Path("runs/small/fedavg-s0")).rounds] == [0, 1, 2, 3]


class BrokenStream(io.StringIO):
    """A standard stream whose every write fails."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 0), (errno.ENOSPC, 1)])
def test_output_that_cannot_be_written_ends_no_run(
    number: int, code: int, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenStream(number))
    assert main(["run", write(Path()), "-o", "run"]) == code
    assert ("No space left on device" in capsys.readouterr().err) == bool(code)
    assert RunRecord.load(Path("run")).status["state"] == "finished"
    monkeypatch.setattr(sys, "stderr", BrokenStream(number))
    assert main(["run", write(Path()), "-o", "run2"]) == code
    assert RunRecord.load(Path("run2")).status["state"] == "finished"


@pytest.mark.full
def test_a_closed_pipe_is_no_error() -> None:
    text = f"{sys.executable} -m fedlowrank.cli.main list | head -n 1"
    actual = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text}"], capture_output=True, text=True, check=False
    )
    assert actual.returncode == 0
    assert "Traceback" not in actual.stderr
    assert "Exception" not in actual.stderr


@pytest.mark.full
def test_main_leaves_the_signals_of_its_caller_alone(capsys: Capsys) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    done(capsys, "list")
    assert signal.getsignal(signal.SIGTERM) is before
