"""The code and commands of the how-to pages are run as a reader would run them."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fedlowrank import SGD, AdamW, LocalSchedule, Loss, RunSettings
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.learning.losses import KINDS
from fedlowrank.methods import METHODS

ROOT = Path(__file__).parents[2]
CALLBACKS = (ROOT / "docs" / "how-to" / "callbacks.md").read_text()
HETEROGENEITY = (ROOT / "docs" / "how-to" / "system-heterogeneity.md").read_text()
LOSSES = (ROOT / "docs" / "how-to" / "losses.md").read_text()
OPTIMIZERS = (ROOT / "docs" / "how-to" / "optimizers.md").read_text()
SAMPLING = (ROOT / "docs" / "how-to" / "sampling.md").read_text()
LOGGING = (ROOT / "docs" / "how-to" / "logging.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.full
def test_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    stopping, own = blocks(CALLBACKS, "python")
    exec(compile(stopping, "page", "exec"), names)
    *lines, last = capsys.readouterr().out.splitlines()
    values = [float(line.split()[-1]) for line in lines]
    best = values.index(max(values))
    assert last == f"stopped early: no better validation for 3 evaluations after round {best}"
    assert len(values) == best + 4
    assert f"`{last}`" in CALLBACKS
    exec(compile(own, "page", "exec"), names)
    # two floats for each of 9 inputs and a name cost a few hundred bytes a message, six messages a round
    end, why = capsys.readouterr().out.splitlines()
    assert end == "finished"
    assert 5000 < int(re.findall(r"stopped early: (\d+) bytes are sent", why)[0]) < 10_000


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for text in blocks(LOSSES, "python"):
        exec(compile(text, "page", "exec"), names)
    *table, accuracy = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["loss", "accuracy", "micro_f1"]
    assert 0 <= float(accuracy) <= 1
    (text,) = blocks(LOSSES, "toml")
    Path("file.toml").write_text(text)
    assert ExperimentConfig.read("file.toml").loss == Loss("focal", gamma=1.5)
    # every kind and every option has a row
    options = {field.name for field in dataclasses.fields(Loss)} - {"kind"}
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", LOSSES, re.MULTILINE))))
    assert {*KINDS, *options} <= named


@pytest.mark.full
def test_system_heterogeneity(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(HETEROGENEITY, "python")
    exec(compile(code, "page", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        # accuracies may differ by a point between machines, simulated seconds and losses may not
        assert line.rpartition(",")[0] in HETEROGENEITY
    (text,) = blocks(HETEROGENEITY, "toml")
    Path("file.toml").write_text(text)
    devices = ExperimentConfig.read("file.toml").run.devices
    assert (devices.uplink, devices.deadline) == ((20.0, 5.0), 60.0)


def test_the_sections_of_files() -> None:
    for page in (CALLBACKS, LOGGING):
        (text,) = blocks(page, "toml")
        Path("file.toml").write_text(text)
        run = ExperimentConfig.read("file.toml").run
        assert (run.patience, run.callbacks, run.log) in [
            (10, ("my_module:report",), ()),
            (None, (), ("tensorboard", "wandb")),
        ]


@pytest.mark.full
def test_logging(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = blocks(LOGGING, "bash")
    words = command.replace("experiments/", f"{ROOT}/experiments/").split()
    with warnings.catch_warnings():
        # TensorBoard's own use of its dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        assert main(words[1:]) == 0
        (text,) = blocks(LOGGING, "python")
        exec(compile(text, "page", "exec"), {})
    folder = re.findall(r"run folder: (\S+)", capsys.readouterr().out)[0]
    for run in (folder, "runs/mine"):
        (events,) = Path(run, "tensorboard").iterdir()
        assert b"accuracy/" in events.read_bytes()


def test_optimizers() -> None:
    names: dict[str, object] = {}
    (code,) = blocks(OPTIMIZERS, "python")
    exec(compile(code, "page", "exec"), names)
    shown = [ExperimentConfig.parse(tomllib.loads(text)) for text in blocks(OPTIMIZERS, "toml")]
    fedavg = [made.build_method("fedavg").optimizer for made in shown]
    assert shown[0].build_method("pfedlora").adapter_optimizer == AdamW(lr=0.001)
    assert fedavg[0] == SGD(lr=0.05, momentum=0.9)
    assert fedavg[1].local_schedule == LocalSchedule("cosine", warmup=5, floor=0.1)
    assert fedavg[2] == AdamW(lr=0.001, keep=True)
    # the page names the methods that refuse to keep states, and no other
    for name, method in METHODS.items():
        assert bool(method.keep_refusal) == (
            name in ("fednova", "fedspa", "ifca", "flora", "flexlora", "fedhl")
        )


@pytest.mark.full
def test_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(SAMPLING, "python")
    exec(compile(code, "page", "exec"), {})
    drawn = ast.literal_eval(capsys.readouterr().out)
    assert [len(clients) for clients in drawn] == [2] * 5
    (table,) = blocks(SAMPLING, "toml")
    run = ExperimentConfig.parse(tomllib.loads(table)).run
    assert (run.sampling, run.candidates) == ("loss", 30)
    assert set(re.findall(r"^\| `(\w+)` \|", SAMPLING, re.MULTILINE)) == set(
        get_args(get_type_hints(RunSettings)["sampling"])
    )
