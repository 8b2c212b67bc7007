"""The page "Your own method": its code runs, its APFL is APFL, and its tables are the code's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import SGD, ClientModel, ClientView, Federation, Group, Method, Pass, ServerView, Update
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.contract import KeepsSumOfUploads, ProximalTerm, contribution
from fedlowrank.engines import Sequential
from fedlowrank.methods import APFL
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "your-own-method.md").read_text()
BLOCKS = re.findall(r"(?:`(\w+\.py)`:\n\n)?```python\n(.*?)```", PAGE, re.DOTALL)
FILES = {name: "\n\n".join(text for n, text in BLOCKS if n == name) for name, _ in BLOCKS if name}
SCRIPTS = [text for name, text in BLOCKS if not name]
COMMANDS = re.findall(r"^fedlowrank (.*)$", PAGE, re.MULTILINE)

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Three clients of unequal size."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in (20, 35, 50)
    ]
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return Federation.from_arrays(data, model, classes=3)


def trajectory(method: Any, federation: Federation) -> list[Any]:
    """The server's model, each client's v and a, and the models that clients use, after each of three rounds."""
    run = Run(method, federation, RunSettings(rounds=3, participation=0.7), Sequential())
    actual: list[Any] = []
    for _ in range(3):
        run.step()
        # the share a is a tensor [] on the page and [1] in the package
        states = {
            str(i): {path: t.reshape(t.shape or (1,)) for path, t in tree.leaves(s)}
            for i, s in sorted(run.state.clients.items())
        }
        actual.append(
            [run.state.server, states, [run.personal_params(client) for client in federation.infos]]
        )
    return actual


@pytest.mark.usefixtures("folder")
def test_its_apfl_is_the_packages_round_for_round(federation: Federation) -> None:
    settings: dict[str, Any] = {
        "alpha": 0.3, "epochs": 2, "batch_size": 8,
        "optimizer": SGD(lr=0.3, momentum=0.9, weight_decay=0.01, groups={"v": Group(lr=0.1)}),
    }  # fmt: skip
    mine = trajectory(importlib.import_module("my_apfl").MyAPFL(**settings), federation)
    theirs = trajectory(APFL(**settings), federation)
    for one, other in zip(mine, theirs, strict=True):
        assert tree.equal(one, other)
    shares = [float(state["/a"]) for state in mine[-1][1].values()]
    assert all(0 <= a <= 1 and abs(a - 0.3) > 1e-3 for a in shares), "a must have been trained"


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_two_passes_of_one_step_are_the_joint_step(federation: Federation) -> None:
    module = importlib.import_module("my_apfl")
    settings: dict[str, Any] = {"alpha": 0.3, "batch_size": 1000, "optimizer": SGD(lr=0.3)}
    mine = trajectory(module.TwoPassAPFL(**settings), federation)
    theirs = trajectory(module.MyAPFL(**settings), federation)
    for one, other in zip(mine, theirs, strict=True):
        pairs = zip(tree.tensors(one), tree.tensors(other), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
    more = module.TwoPassAPFL(**{**settings, "own_epochs": 3})
    assert more.passes() == {"global": Pass(1, 1000), "own": Pass(3, 1000)}


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_the_scripts_run(capsys: Capsys) -> None:
    for text in SCRIPTS:
        exec(compile(text, "page", "exec"), {})
    accuracies = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(accuracies) == 2
    assert all(0 <= a <= 1 for a in accuracies)


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_the_commands_of_apfl_run(capsys: Capsys) -> None:
    after = PAGE.partition("### In two passes")[2]
    (text,) = re.findall(r"```toml\n(.*?my_apfl.*?)```", after, re.DOTALL)
    Path("passes.toml").write_text(text.replace("experiments/", f"{ROOT}/experiments/"))
    commands = [c for c in COMMANDS if "apfl" in c or "passes.toml" in c]
    assert [c.split()[0] for c in commands] == ["check", "compare", "check", "run", "compare"]
    for command in commands:
        words = shlex.split(command.replace("experiments/", f"{ROOT}/experiments/"))
        # fewer rounds than on the page, for time
        words = ["run.rounds=1" if word == "run.rounds=10" else word for word in words]
        more = ["run.representations=0"] if words[0] != "check" else []
        assert main([*words, *more]) == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out
    rows = re.findall(r"^ *(?:My )?APFL +([\d.]+) ", out, re.MULTILINE)
    # the first comparison; rows of passes.toml, where alpha differs, follow
    assert len(rows) >= 2
    assert rows[0] == rows[1]
    # a class that does not set one_model has no row for it
    assert "one_model" not in out


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_the_experiment_file_and_the_personal_part_run(capsys: Capsys) -> None:
    (text,) = re.findall(r"```toml\n(.*?fedexp.*?)```", PAGE, re.DOTALL)
    Path("mine.toml").write_text(text.replace("experiments/", f"{ROOT}/experiments/"))
    # the other commands of FedExP are run in test_tutorials.py
    commands = [c for c in COMMANDS if "mine.toml" in c or "personal_part" in c]
    assert [c.split()[0] for c in commands] == ["compare", "check", "compare"]
    for command in commands:
        words = shlex.split(command.replace("experiments/", f"{ROOT}/experiments/"))
        more = ["run.representations=0"] if words[0] != "check" else []
        assert main([*words, *more]) == 0, command
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_the_experiment_file_names_settings_that_exist() -> None:
    (text,) = re.findall(r"```toml\n(.*?my_apfl.*?)```", PAGE.partition("### In two passes")[2], re.DOTALL)
    Path("mine.toml").write_text(text.replace("experiments/", f"{ROOT}/experiments/"))
    made = ExperimentConfig.read(Path("mine.toml"))
    assert made.build_method("my_apfl:MyAPFL").alpha == 0.25  # type: ignore[attr-defined]
    assert made.build_method("my_apfl:TwoPassAPFL").own_epochs == 2  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.usefixtures("folder")
def test_the_low_rank_method_passes_every_check(capsys: Capsys) -> None:
    (command,) = [c for c in COMMANDS if "my_low_rank" in c]
    assert main(shlex.split(command)) == 0
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_the_low_rank_server_has_the_best_approximation_of_the_mean(federation: Federation) -> None:
    """After a step of all examples: B is 0 at first, so that B A = -lr ∇F AᵀA for each client, by PyTorch and NumPy."""
    rank, lr = 2, 0.5
    ranks = [2, 1, 2]
    infos = [dataclasses.replace(i, rank=r) for i, r in zip(federation.infos, ranks, strict=True)]
    federation = dataclasses.replace(federation, infos=infos)
    method = importlib.import_module("my_low_rank").MyLowRank(
        rank=rank, batch_size=1000, optimizer=SGD(lr=lr)
    )
    run = Run(method, federation, RunSettings(rounds=2, participation=1.0), Sequential())
    initial = run.state.server
    run.step()
    module = next(iter(federation.architectures.values())).module
    for name, w in module.named_parameters():
        if w.ndim != 2:
            assert name not in run.state.server
            continue
        total = np.zeros(w.shape)
        for client, r in zip(federation.clients, ranks, strict=True):
            loss = nn.functional.cross_entropy(module(client.train.x), client.train.y)
            (gradient,) = torch.autograd.grad(loss, w)
            a = initial[name].a[:r].double().numpy()
            total -= len(client.train) * lr * gradient.double().numpy() @ a.T @ a
        u, s, vt = np.linalg.svd(total / sum(len(c.train) for c in federation.clients))
        best = (u[:, :rank] * s[:rank]) @ vt[:rank]
        assert np.abs(best).max() > 1e-3
        assert np.allclose(run.state.server[name].dense().numpy(), best, atol=1e-6)
        # the first components are the best approximation of a lower rank
        pair = method.download(run.state.server, infos[1])[name]
        assert pair.rank == 1
        assert np.allclose(pair.dense().numpy(), s[0] * np.outer(u[:, 0], vt[0]), atol=1e-6)


def test_the_code_of_the_low_rank_method_is_short() -> None:
    assert len([line for line in FILES["my_low_rank.py"].splitlines() if line.strip()]) <= 40


def test_the_code_of_apfl_is_short() -> None:
    first, second = (text for name, text in BLOCKS if name == "my_apfl.py")
    assert len([line for line in first.splitlines() if line.strip()]) <= 50
    assert len([line for line in second.splitlines() if line.strip()]) <= 25


@pytest.mark.usefixtures("folder")
def test_the_example_of_a_failure_is_what_is_printed(capsys: Capsys) -> None:
    (shown,) = re.findall(r"```text\n(error: .*?)```", PAGE, re.DOTALL)
    text = FILES["my_apfl.py"].replace(
        "server_update(self, server, total, view)", "server_update(self, server, total)"
    )
    Path("my_apfl.py").write_text(text.replace("def client_model", "def client_modle"))
    assert main(["check", "my_apfl:MyAPFL"]) == 1
    assert capsys.readouterr().err == shown


def rows_below(title: str, ends: str = "\n## ") -> dict[str, list[str]]:
    """The rows of the tables of a part of the page, by the code in the first column."""
    part = PAGE.split(title, 1)[1].split(ends, 1)[0]
    rows = re.findall(r"^\| (`.*?`.*?) \| (.*) \|$", part, re.MULTILINE)
    return {first: rest.split(" | ") for first, rest in rows}


def test_the_table_of_hooks_is_the_contract() -> None:
    rows = rows_below("## Every hook", "**`ClientModel")
    shown = {re.sub(r"\(.*", "", name.strip("`")): name.strip("`") for name in rows}
    hooks = {n: v for n, v in vars(Method).items() if n[0] != "_" and inspect.isfunction(v)}
    # what engines use, no hook
    del hooks["local_passes"]
    assert len(hooks) <= 13
    # of methods that add up what they send
    hooks["follow_upload"] = KeepsSumOfUploads.follow_upload
    assert shown == {n: f"{n}({', '.join(inspect.signature(v).parameters)})" for n, v in hooks.items()}
    needed = [name for name, row in zip(shown, rows.values(), strict=True) if row[-1] == "–"]
    assert set(needed) == Method.__abstractmethods__
    text = PAGE.split("Class variables: ", 1)[1].split("\n\n", 1)[0]
    fields = {f.name for f in dataclasses.fields(Method)}
    assert {n for n in Method.__annotations__ if n not in fields} <= set(re.findall(r"`(\w+)`", text))


def test_the_tables_of_arguments_are_the_signatures() -> None:
    rows = rows_below("**`view.train`**", "**`Pass(")
    parameters = list(inspect.signature(ClientView.train).parameters.values())[1:]
    assert list(rows) == [f"`{p.name}`" for p in parameters]
    for (name, row), p in zip(rows.items(), parameters, strict=True):
        wanted = {repr(p.empty): "–", "None": "`None`", "()": "`()`"}
        assert row[-1] == wanted.get(repr(p.default), "none"), name
    for made in (Pass, ClientModel, Update):
        (shown,) = re.findall(rf"\*\*`{made.__name__}\((.*?)\)`", PAGE)
        fields = dataclasses.fields(made)
        expected = [
            f.name if f.default is f.default_factory is dataclasses.MISSING
            else f"{f.name}={f.default if f.default is not dataclasses.MISSING else '{}'}"
            for f in fields
        ]  # fmt: skip
        assert shown.split(", ") == expected
    assert list(rows_below("**`ClientModel(", "So `ClientModel")) == [
        f"`{f.name}`" for f in dataclasses.fields(ClientModel)
    ]
    assert list(rows_below("**`Update(", "So a client")) == [
        f"`{f.name}`" for f in dataclasses.fields(Update)
    ]
    assert [f.name for f in dataclasses.fields(ProximalTerm)] == ["strength", "center", "linear"]
    properties = {n for n, v in vars(ServerView).items() if isinstance(v, property)}
    shown_attributes = re.findall(r"`(\w+)`", " ".join(rows_below("## What the server may use")))
    assert set(shown_attributes) == {f.name for f in dataclasses.fields(ServerView)} | properties


def test_the_rows_of_check_that_the_page_names_exist() -> None:
    names = re.findall(r"^\| check: `(.*?)` fails", PAGE, re.MULTILINE)
    assert len(names) >= 10
    for name in names:
        assert [row for row in check.CHECKS if name in row], name


def test_the_helpers_of_trees_exist_with_these_arguments() -> None:
    calls = re.findall(r"`(\w+)(?:\(([^`]*)\))?`", " ".join(rows_below("## Trees")))
    assert {"map_leaves", "add", "sub", "zeros_like", "tree_dataclass", "Params"} <= {
        name for name, _ in calls
    }
    trees: Any = {"p": torch.tensor([1.0, 2.0]), "q": [torch.tensor(3.0)]}
    for name, arguments in calls:
        function = getattr(tree, name)
        if arguments and name != "map_leaves":
            values = dict(zip("ab", (trees, trees), strict=True))
            given = [values[a] for a in arguments.split(", ") if a in values]
            function(*given)
    assert tree.equal(tree.add(trees, trees, scale=-1.0), tree.zeros_like(trees))
    half = tree.map_leaves(lambda x, y: torch.lerp(x, y, 0.5), trees, tree.zeros_like(trees))
    assert tree.equal(half, contribution.mean([trees, tree.zeros_like(trees)], [1, 1]))


@pytest.mark.usefixtures("folder")
def test_a_failed_check_names_the_line_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    # a misspelt key: trees are combined in the package, and the cause is in this file
    text = FILES["my_apfl.py"].replace(
        'mixture(state["a"], state["v"], down)', 'mixture(state["a"], state, down)'
    )
    Path("my_apfl.py").write_text(text)
    monkeypatch.setattr(
        check, "_CHECKS", {"a client infers": check._CHECKS["a client that has not trained has a model"]}
    )
    (actual,) = check.check_method(importlib.import_module("my_apfl").MyAPFL())
    line = 1 + next(i for i, one in enumerate(text.splitlines()) if "lambda p, q" in one)
    assert not actual.ok
    assert "trees differ" in actual.detail
    assert re.search(r"\(my_apfl.py:(\d+)\)$", actual.detail)[1] == str(line)  # type: ignore[index]
