"""Python code that an experiment names: who may name it, how it is called, and what a mistake in it looks like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.cli import commands
from fedlowrank.cli.main import main
from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]

CODE = """
from pathlib import Path
from torch import nn
Path("imported").touch()

def net(shape, classes):
    Path("called").write_text(f"{shape} {classes}")
    return nn.Linear(shape[0], classes)
"""


OWN = SMALL.replace('["mlp"]', '["own_traced:net"]').replace("hidden = [4]\n", "")
"""The experiment with a model of its own, which no width of :data:`SMALL`'s goes with."""


def own_run(capsys: Capsys) -> Path:
    """A finished run whose configuration names code that leaves a trace where it is imported."""
    Path("own_traced.py").write_text(CODE)
    done(capsys, "run", write(Path(), OWN), "run.rounds=1")
    assert Path("imported").exists()
    assert Path("called").read_text() == "(4,) 3"
    forget()
    return Path("runs/small/fedavg-s0")


def forget() -> None:
    sys.modules.pop("own_traced", None)
    Path("imported").unlink()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["resume", "RUN"],
        ["export", "RUN"],
        ["adapters", "RUN"],
        ["score", "RUN", "--task", "perplexity", "path=none.jsonl"],
    ],
)
def test_a_run_folder_imports_nothing_unless_allowed(arguments: list[str], capsys: Capsys) -> None:
    # downloaded from somebody else, it would belong to this user all the same
    folder = own_run(capsys).rename("theirs")
    typed = [str(folder) if a == "RUN" else a for a in arguments]
    actual = refused(capsys, *typed)
    assert "own_traced:net" in actual
    assert "--allow-code" in actual
    assert not Path("imported").exists()
    main([*typed, "--allow-code"])
    assert Path("imported").exists()


@pytest.mark.full
def test_allowed_code_goes_on_with_the_run(capsys: Capsys) -> None:
    folder = own_run(capsys)
    done(capsys, "resume", str(folder), "run.rounds=2", "--allow-code")
    assert len(RunRecord.load(folder).rounds) == 3


@pytest.mark.full
def test_report_imports_nothing_and_looks_nowhere_in_the_working_folder(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_run(capsys).rename("theirs")
    before, looked = list(sys.path), []
    write_report = commands.write_report

    def watched(*arguments: Any, **more: Any) -> object:
        # what the package imports while it works must not come from a module that lies beside the run folder
        looked.extend(str(Path(p).resolve()) for p in sys.path)
        return write_report(*arguments, **more)

    monkeypatch.setattr(commands, "write_report", watched)
    done(capsys, "report", "theirs")
    assert looked
    assert str(Path.cwd()) not in looked
    assert not Path("imported").exists()
    assert sys.path == before


def test_the_hint_after_an_interrupt_can_be_typed(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlowrank.rounds.run import Run

    def interrupted(run: Run) -> object:
        raise KeyboardInterrupt

    Path("own_traced.py").write_text(CODE)
    file = write(Path(), OWN)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", interrupted)
        assert main(["run", file, "-o", "a run"]) == 130
    assert "Go on with: fedlowrank resume 'a run' --allow-code" in capsys.readouterr().err
    done(capsys, "resume", "a run", "--allow-code")


@pytest.mark.full
def test_a_run_without_code_needs_no_permission(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1")
    done(capsys, "resume", "runs/small/fedavg-s0", "run.rounds=2")
    config = json.loads(Path("runs/small/fedavg-s0/run.json").read_text())
    assert config["experiment"]["model"]["names"] == ["mlp"]


WRONG = """
from torch import nn

def bare():
    return nn.Linear(4, 3)

def three(shape, classes, width):
    return nn.Linear(4, 3)

def keyword(*, shape, classes):
    return nn.Linear(4, 3)

module = nn.Linear(4, 3)
number = 7

def nothing(shape, classes):
    pass

def dictionary(shape, classes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
        def forward(self, x):
            return {"logits": self.layer(x)}
    return Net()

def narrow(shape, classes):
    return nn.Linear(4, 2)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(
            (n, ("model.names", "factory(shape: tuple[int, ...], classes: int) -> torch.nn.Module"))
            for n in ("bare", "three")
        ),
        ("keyword", ("model.names", "factory(shape")),
        ("module", ("model.names", "factory(shape", "not a Linear")),
        ("number", ("model.names", "factory(shape", "not a int")),
        ("nothing", ("own_wrong:nothing", "NoneType", "torch.nn.Module")),
        ("dictionary", ("Net returns a dict", "scores")),
        ("narrow", ("own_wrong:narrow", "2", "3 classes")),
    ],
)
def test_a_factory_that_does_not_fit_is_told_how_it_is_called(
    name: str, says: tuple[str, ...], capsys: Capsys
) -> None:
    Path("own_wrong.py").write_text(WRONG)
    actual = refused(capsys, "run", write(Path()), f"model.names=['own_wrong:{name}']")
    for part in says:
        assert part in actual
    assert "TypeError" not in actual.replace("TypeError: its factory", "")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [("def f(:\n", "own_broken:f"), ("1 / 0\n", "own_broken:f"), ("", ":f"), ("", "own_broken:")],
)  # fmt: skip
def test_code_that_cannot_be_imported(text: str, name: str, capsys: Capsys) -> None:
    Path("own_broken.py").write_text(text)
    actual = refused(capsys, "run", write(Path()), f"model.names=['{name}']")
    assert "model.names" in actual
    assert "cannot be imported" in actual
    assert list(files(Path())) == ["own_broken.py", "small.toml"] or not Path("runs").exists()


def test_the_signature_is_documented(capsys: Capsys) -> None:
    readme = (Path(__file__).parents[2] / "docs" / "tutorials" / "bring-your-model.md").read_text()
    for text in (done(capsys, "fields", "model"), readme):
        assert "factory(shape, classes)" in " ".join(text.split())
        assert "torch.nn.Module" in text
    assert "--allow-code" in readme


METRIC = """
import numpy as np

def half(scores, labels):
    return 0.5 * float(np.mean(scores.argmax(-1) == labels))

def none(scores, labels):
    return 0.0
"""


def write_metrics(text: str = METRIC) -> None:
    """Write a module of metrics, as another process would find it."""
    Path("own_metrics.py").write_text(text)
    sys.modules.pop("own_metrics", None)


def test_changed_code_of_a_metric_is_another_configuration(capsys: Capsys) -> None:
    """One run has one definition of a metric; metrics may be added and dropped."""
    write_metrics()
    both = ["compare", write(Path()), "--methods", "fedavg", "run.rounds=1"]
    measured = 'run.metrics=["own_metrics:half"]'
    done(capsys, *both, measured)
    write_metrics(METRIC.replace("0.5 *", "0.25 *"))
    assert "the code of own_metrics:half was changed" in refused(capsys, *both, measured, "--seeds", "0,1")
    resume = ["resume", "runs/small/fedavg-s0", "--allow-code"]
    assert "the code of own_metrics:half was changed" in refused(capsys, *resume, "run.rounds=2")
    write_metrics()
    done(capsys, *resume, "run.rounds=2", 'run.metrics=["own_metrics:half", "own_metrics:none"]')
    done(capsys, *resume, "run.rounds=3", "run.metrics=[]")
    assert "code" not in RunRecord.load(Path("runs/small/fedavg-s0")).config
    done(capsys, *resume, "run.rounds=4", measured)
    assert RunRecord.load(Path("runs/small/fedavg-s0")).config["code"].keys() == {"own_metrics:half"}


@pytest.mark.parametrize("arguments", [["resume", "RUN", "run.rounds=2"], ["predict", "RUN"]])
def test_one_message_names_all_code(arguments: list[str], capsys: Capsys) -> None:
    write_metrics()
    Path("own_method.py").write_text(
        "from fedlowrank.methods import FedAvg\nclass Own(FedAvg):\n    title = 'Own'\n"
    )
    done(
        capsys, "run", write(Path()), "--method", "own_method:Own", "run.rounds=1",
        'run.metrics=["own_metrics:half"]', "-o", "RUN",
    )  # fmt: skip
    assert "names Python code, own_metrics:half, own_method:Own, which" in refused(capsys, *arguments)
