"""Words that are nearly right, options given twice, and text that looks like markup."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlowrank
from fedlowrank import SGD, AdamW
from fedlowrank.cli.main import main
from fedlowrank.config.comparison import label_values, plan_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections.network_section import NetworkSettings
from fedlowrank.core.errors import ConfigError
from fedlowrank.methods import METHODS
from fedlowrank.models.zoo import ModelSettings
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run_settings import RunSettings
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.engine=vectorised", "run.engine: 'vectorised' is no choice. Did you mean 'vectorized'?"),
        ("run.on_nan=dorp", "run.on_nan: 'dorp' is no choice. Did you mean 'drop'?"),
        ("run.pixels=byte", "run.pixels: 'byte' is no choice. Did you mean 'bytes'?"),
        ("defaults.optimizer.kind=adamm", "optimizer.kind: 'adamm' is no choice. Did you mean 'adamw'?"),
        ("defaults.optimizer.kind=zzz", "optimizer.kind: 'zzz' is no choice. Known: 'adamw', 'sgd'."),
        (
            "defaults.optimizer.schedule.kind=cosin",
            "optimizer.schedule.kind: 'cosin' is no choice. Did you mean 'cosine'?",
        ),
        (
            "defaults.optimizer.momentun=0.9",
            "optimizer.momentun: there is no such field. Did you mean 'momentum'?",
        ),
        (
            "defaults.optimizer={kind='adamw', betas=[0.8, 0.9]}",
            "Write defaults.optimizer.beta1=0.8, defaults.optimizer.beta2=0.9",
        ),
        (
            "defaults.optimizer={kind='adamw', betas=[0.8]}",
            "Write defaults.optimizer.beta1=..., defaults.optimizer.beta2=...",
        ),
        (
            "methods.fedavg.weighting=example",
            "methods.fedavg.weighting: 'example' is no choice. Did you mean 'examples'?",
        ),
        ("methods.floral.kinds=[linea]", "methods.floral.kinds: a list is needed"),
        (
            'methods.floral.kinds=["linea"]',
            "methods.floral.kinds.0: 'linea' is no choice. Did you mean 'linear'?",
        ),
        (
            "defaults.lr=0.1",
            "defaults.lr: methods.fedavg has no such field. Did you mean defaults.optimizer.lr=0.1?",
        ),
        (
            "defaults.optimizer=adam",
            "defaults.optimizer must be a table of fields, not 'adam'. Write defaults.optimizer.kind=adamw, "
            'or in a file optimizer = { kind = "adamw" }.',
        ),
        ("model.names=iris:net", 'model.names: a list is needed, such as ["iris:net"]'),
        ("compare=fedavg", 'compare: a list is needed, such as ["fedavg"]'),
    ],
)
def test_a_choice_that_is_nearly_right(override: str, says: str, capsys: Capsys) -> None:
    assert says in refused(capsys, "run", write(Path()), override)
    assert list(files(Path())) == ["small.toml"]


def test_a_wrong_default_names_the_method_that_was_asked_for(capsys: Capsys) -> None:
    text = SMALL.replace('method = "fedavg"', "").replace('compare = ["standalone", "fedavg"]', "")
    said = refused(capsys, "run", write(Path(), text), "--method", "ifca", "defaults.lr=0.1")
    assert "methods.ifca" in said
    assert "pfedlora" not in said
    said = refused(capsys, "compare", write(Path(), text), "defaults.lr=0.1")
    assert said.startswith(
        "defaults.lr: the default method pfedlora has no such field. Did you mean defaults.optimizer.lr"
    )
    assert refused(capsys, "data", write(Path(), text), 'defaults.epochs="2"').startswith(
        "defaults.epochs: input should"
    )
    own = refused(capsys, "data", write(Path(), text), "method=ditto", 'methods.ditto.epochs="2"')
    assert own.startswith("methods.ditto.epochs: input should")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu", "small.toml"], "Did you mean 'run'?"),
        (["export", "runs", "--layout", "smal"], "Did you mean 'small'?"),
        (
            ["compare", "small.toml", "--methods", "fedavg", "--methods", "standalone"],
            "--methods: is given twice",
        ),
        (["compare", "small.toml", "--seeds=0", "--seeds=1"], "--seeds: is given twice"),
        (["run", "small.toml", "-o", "a", "--out", "b"], "is given twice"),
        (
            ["run", "small.toml", "--methods", "fedavg"],
            "Did you mean '--method'? `fedlowrank compare` takes --methods.",
        ),
        (
            ["run", "small.toml", "--seed", "1"],
            "Did you mean run.seed=1? `fedlowrank compare` takes --seeds.",
        ),
        (["resume", "runs", "--rounds=9"], "Did you mean run.rounds=9?"),
        (["compare", "small.toml", "--batch-size", "8"], "Did you mean defaults.batch_size=8?"),
        (["tune", "small.toml", "--lr", "0.1"], "Did you mean defaults.optimizer.lr=0.1?"),
        (["run", "small.toml", "--lr=0.1", "run.rounds=1"], "Did you mean defaults.optimizer.lr=0.1?\n"),
        (["run", "small.toml", "--kind", "x"], "unrecognized arguments: --kind x\n"),
        (["run", "small.toml", "--foo=1"], "unrecognized arguments: --foo=1\n"),
        (["run", "small.toml", "--forse"], "unrecognized arguments: --forse\n"),
        (["list", "--run.rounds=1"], "unrecognized arguments: --run.rounds=1\n"),
        (
            ["report", "runs", "--seeds", "1"],
            "unrecognized arguments: --seeds 1. `fedlowrank compare` takes --seeds.",
        ),
    ],
)
def test_an_option_that_cannot_be_meant(arguments: list[str], says: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_python_settings_are_suggested_too() -> None:
    with pytest.raises(ConfigError, match=r"'vectorised' is no choice\. Did you mean 'vectorized'"):
        RunSettings(engine="vectorised")  # type: ignore[arg-type]


@functools.cache
def texts(path: Path) -> list[str]:
    """The strings of a module that are no docstrings: messages, among others."""
    tree = ast.parse(path.read_text())
    expressions = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in expressions]
    return [n.value for n in constants if isinstance(n.value, str)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("section", "owners"),
    [
        ("run", [RunSettings]),
        ("model", [ModelSettings]),
        ("network", [NetworkSettings]),
        ("optimizer", [SGD, AdamW]),
    ],
)
def test_messages_name_fields_that_there_are(section: str, owners: list[type[Any]]) -> None:
    known = {f.name for owner in owners for f in dataclasses.fields(owner)}
    source = Path(fedlowrank.__file__).parent
    actual = {
        (path.name, name)
        for path in source.rglob("*.py")
        for text in texts(path)
        for name in re.findall(rf"(?<![\w/.]){section}\.([a-z_0-9]+)", text)
        if name not in ("json", "safetensors", "flower", "get_submodule", "reinitialize")
    }
    assert actual
    assert {(path, name) for path, name in actual if name not in known} == set()


# Methods to run and to compare


@pytest.mark.full
def test_run_asks_which_of_the_compared_methods(capsys: Capsys) -> None:
    file = write(Path(), SMALL.replace('method = "fedavg"\n', ""))
    actual = refused(capsys, "run", file)
    for part in ("standalone, fedavg", "--method standalone", "fedlowrank compare"):
        assert part in actual
    assert not Path("runs").exists()
    done(capsys, "run", file, "run.rounds=1", "--method", "standalone")
    # a single one can only be meant
    done(capsys, "run", file, "run.rounds=1", 'compare=["fedavg"]')
    assert sorted(p.name for p in Path("runs/small").iterdir()) == ["fedavg-s0", "standalone-s0"]


@pytest.mark.parametrize("arguments", [["serve", "small.toml", "--insecure"], ["app", "small.toml"]])
def test_a_network_asks_as_well(arguments: list[str], capsys: Capsys) -> None:
    pytest.importorskip("flwr")
    write(Path(), SMALL.replace('method = "fedavg"\n', ""))
    assert "--method standalone" in refused(capsys, *arguments)
    assert list(files(Path())) == ["small.toml"]


@pytest.mark.usefixtures("undrawn")
def test_several_variations_make_a_grid(capsys: Capsys) -> None:
    vary = ["run.participation=0.4,1.0", "defaults.batch_size=8,16"]
    arguments = [
        "compare",
        write(Path()),
        "run.rounds=1",
        "--methods",
        "fedavg",
        *(f"--vary={v}" for v in vary),
    ]
    done(capsys, *arguments)
    actual = [RunRecord.load(p.parent).config for p in Path("runs/small").glob("*/run.json")]
    pairs = sorted((c["run"]["participation"], c["method"]["fields"]["batch_size"]) for c in actual)
    assert pairs == [(0.4, 8), (0.4, 16), (1.0, 8), (1.0, 16)]
    assert sorted(tuple(c["vary"].values()) for c in actual) == pairs


@pytest.mark.full
def test_varied_values_are_one_part_of_a_folder_name() -> None:
    labels = [
        label_values({"run.devices.file": text}) for text in ("../a/b.csv", "../a_b.csv", "..%2Fa/b.csv")
    ]
    assert labels[0] == "-file=..%2Fa%2Fb.csv"
    assert len({*labels}) == 3
    assert not any("/" in label for label in labels)
    long_labels = [label_values({"data.path": f"{'ä' * 300}{i}"}) for i in range(2)]
    assert long_labels[0] != long_labels[1]
    assert all(len(label.encode()) <= 160 for label in long_labels)


def test_a_file_may_vary_several_fields() -> None:
    made = ExperimentConfig.parse(
        {**tomllib.loads(SMALL), "vary": ["run.rounds=1,2", "defaults.batch_size=8,16,32"]}
    )
    runs = plan_runs(made, ["fedavg"], [0], made.vary, Path("out"))
    actual = [
        (p.experiment.run.rounds, p.experiment.build_method("fedavg").batch_size, *p.vary.values())
        for p in runs
    ]
    assert actual == [(r, b, r, b) for r in (1, 2) for b in (8, 16, 32)]
    assert len({p.folder for p in runs}) == 6


def test_one_field_varied_twice(capsys: Capsys) -> None:
    actual = refused(capsys, "compare", write(Path()), "--vary=run.rounds=1,2", "--vary=run.rounds=3")
    assert "vary names run.rounds twice" in actual
    assert not Path("runs").exists()


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_compare_after_run_names_the_ways_out_before_it_trains(capsys: Capsys) -> None:
    file = write(Path())
    done(capsys, "run", file, "run.rounds=1", "defaults.optimizer.lr=0.3")
    before = files(Path("runs"))
    actual = refused(capsys, "compare", file, "run.rounds=1")
    for part in ("runs/small/fedavg-s0 holds", "lr was 0.3 and is 0.1", "-o", "--force"):
        assert part in actual
    # standalone, which comes first and would not be in the way, is not trained for nothing
    assert files(Path("runs")) == before
    done(capsys, "compare", file, "run.rounds=1", "-o", "runs/other")
    assert {p: d for p, d in files(Path("runs")).items() if p in before} == before


# Text is printed as it is


@pytest.mark.full
def test_list_prints_what_stands_in_brackets(capsys: Capsys) -> None:
    out = done(capsys, "list")
    assert "Texts (data.source, with [language])" in out
    for name in METHODS:
        assert "\\[" not in done(capsys, "list", name)


@pytest.mark.full
def test_names_of_users_are_no_markup(capsys: Capsys) -> None:
    text = SMALL + '[methods."own"]\nmethod = "fedavg"\ntitle = "My [red]own[/red] :key: [/x]"\n'
    out = done(
        capsys, "compare", write(Path(), text), "run.rounds=1", "--methods", "own", "-o", "runs/[bold]:key:"
    )
    assert "report: runs/[bold]:key:/report.html" in out
    assert "My [red]own[/red] :key: [/x]" in " ".join(out.split())
    out = done(capsys, "run", "small.toml", "run.rounds=1", "-o", "[dim]folder[/wrong]")
    assert "run folder: [dim]folder[/wrong]" in out


def test_the_bar_shows_a_title_as_it_is(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SMALL + '[methods."own"]\nmethod = "fedavg"\n'
    done(capsys, "run", write(Path(), text), "run.rounds=1", "--method", "own")
    from fedlowrank.rounds.logs.progress import CONSOLE, bar

    monkeypatch.setattr(CONSOLE, "_force_terminal", True)
    with CONSOLE.capture() as shown, bar("a [bold]title[/wrong]", 1):
        pass
    assert "a [bold]title[/wrong]" in shown.get()


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(capsys: Capsys) -> None:
    actual = refused(capsys, "run", write(Path()), "run.device=cuda")
    assert "finds no GPU" in actual
    assert "Set run.device=cpu" in actual
    # not the device that was just refused
    assert "'cuda'." not in actual.replace("run.device is 'cuda'", "")


def test_a_device_of_another_name(capsys: Capsys) -> None:
    assert "it must be 'cpu', 'cuda'" in refused(capsys, "run", write(Path()), "run.device=gpu")


def test_a_further_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    RunSettings(device="cuda:1")
    with pytest.raises(ConfigError, match="finds 2 GPU here, cuda:0 to cuda:1"):
        RunSettings(device="cuda:2")


def test_network_settings_of_a_local_run_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    file = write(Path())
    for command in (["run", file], ["compare", file], ["tune", file]):
        actual = refused(capsys, *command, "network.deadline=5", "run.rounds=1")
        assert "network.deadline=5 does nothing in a run within this process" in actual
        assert "--engine flower" in actual
    actual = refused(capsys, "compare", file, "--vary", "network.deadline=5,6", "run.rounds=1")
    assert "network.deadline=5,6 does nothing" in actual
    assert not Path("runs").exists()
    # a file that server and clients share may be simulated first
    out = done(
        capsys, "run", write(Path(), SMALL + "[network]\ndeadline = 5\n[network.limits]\nban_after = 1\n")
    )
    assert "network.deadline, network.limits do nothing in this run" in " ".join(out.split())
