"""What the README shows works as shown."""

import re
import tomllib
from pathlib import Path

from fedlowrank import experiment

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_python_example_runs(capsys) -> None:
    exec(compile(block("python"), "README.md", "exec"), {})
    accuracy, sent = capsys.readouterr().out.split()
    assert 0 <= float(accuracy) <= 1
    assert int(sent) > 0


def test_the_experiment_is_one() -> None:
    made = experiment.load(tomllib.loads(block("toml")))
    assert made.compared == ["pfedlora", "standalone", "fedproto"]
    assert made.method("pfedlora").mu == 0.9
