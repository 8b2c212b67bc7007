"""What the README shows works as shown."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.models.zoo import ModelSettings

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found


def test_the_python_examples_run_one_after_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for text in blocks("python"):
        exec(compile(text, "README.md", "exec"), scope)
    first, *budget, routes, ranked, weights, frozen, last = capsys.readouterr().out.splitlines()
    accuracy, sent = first.split()
    assert 0 <= float(accuracy) <= 1
    assert int(sent) > 0
    # the whole module has 12·64+64 + 64·8+8 + 8·3+3 numbers
    assert budget[-1] == "The base has 1,379 numbers. Not adapted: none."
    assert sum(json.loads(routes)) == pytest.approx(1)
    assert all(0 <= float(share) <= 1 for share in ranked.split())
    shares, ranks = re.match(r"(\{.*\}) (\{.*\})$", weights).groups()
    assert sum(json.loads(shares.replace("'", '"')).values()) == pytest.approx(1)
    assert json.loads(ranks.replace("'", '"')).keys() == {"0", "2"}
    # B and A of rank 4 of 64 x 12 and 8 x 64, and the head 3 x 8 with its constant, from each of 5 clients
    assert int(frozen) == 5 * (4 * (64 + 12) + 4 * (8 + 64) + 27)
    sizes = re.match(r"(\d+) -> (\d+) {", last)
    assert sizes is not None
    assert 0 < int(sizes[2]) < int(sizes[1])


def test_run_and_compare_work_one_after_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        ("rounds = 20", "rounds = 1"),
        ("clients = 10", "clients = 2"),
        ('"cnn1", "cnn2", "cnn3", "cnn4", "cnn5"', '"mlp"'),
    )
    text = blocks("toml")[0]
    for shown, less in small:
        assert shown in text
        text = text.replace(shown, less)
    Path("FILE.toml").write_text(text)
    lines = [line.partition("   #")[0].split() for line in blocks("sh")[1].splitlines()]
    run, compare = (next(w for w in lines if w[1] == command) for command in ("run", "compare"))
    for words in (run, compare):
        shorter = [w.replace("run.rounds=50", "run.rounds=2").replace("0,1,2", "0") for w in words[1:]]
        assert main(shorter) == 0, capsys.readouterr().err
    # the first of the comparison is the second run of the method, with settings of its own
    assert sorted(p.parent.name for p in Path("runs").rglob("run.json")) == [
        "fedproto-s0",
        "pfedlora-s0",
        "try",
    ]


def test_the_factory_makes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (code,) = [text for text in blocks("python") if "def factory" in text]
    (tmp_path / "readme_module.py").write_text(code)
    make = ModelSettings(names=("readme_module:factory",)).factories((5,), 3)["readme_module:factory"]
    assert make()(torch.zeros(2, 5)).shape == (2, 3)


def test_the_experiment_is_one() -> None:
    made = ExperimentConfig.parse(tomllib.loads(blocks("toml")[0]))
    assert made.compared_methods == ["pfedlora", "standalone", "fedproto"]
    assert made.build_method("pfedlora").mu == 0.9


def test_the_language_experiment_is_one() -> None:
    made = ExperimentConfig.parse(tomllib.loads(blocks("toml")[1]))
    assert made.build_method("fedhl").title == "FedHL"
    assert made.partition.clients == 10
