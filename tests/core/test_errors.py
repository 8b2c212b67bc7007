"""What errors advise: arguments to a caller in Python, options and tables to a user of the command line."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedlowrank
from fedlowrank import Federation, simulate
from fedlowrank.core.errors import ConfigError, FedlowrankError, did_you_mean
from fedlowrank.methods import METHODS

SOURCE = Path(fedlowrank.__file__).parent
OF_COMMANDS = ("cli", "network")
"""Rooms whose errors only commands meet."""
CLIENTS = [(np.zeros((8, 3), np.float32), np.arange(8) % 2) for _ in range(2)]


def texts_for_python() -> Iterator[tuple[str, str]]:
    """The texts of all errors in the source, without what is given to the command line alone."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in OF_COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name.endswith("Error"):
                parts = [*node.args, *(k.value for k in node.keywords if k.arg != "command")]
                text = "".join(
                    str(one.value)
                    for part in parts
                    for one in ast.walk(part)
                    if isinstance(one, ast.Constant)
                )
                yield f"{path.name}:{node.lineno}", text


def test_errors_name_no_option_of_a_command_to_python() -> None:
    actual = dict(texts_for_python())
    assert len(actual) > 500
    # options of other programs, which are started outside of Python
    others = re.compile(r"(?:ray start|export\.py) --|--num-cpus")
    flags = {
        place: text for place, text in actual.items() if re.search(r"(?<![\w-])--[a-z]", others.sub("", text))
    }
    assert flags == {}


def test_an_error_has_advice_for_each_place() -> None:
    error = ConfigError("it exists.", python="Pass force=True.", command="Add --force.")
    assert (str(error), error.for_command) == ("it exists. Pass force=True.", "it exists. Add --force.")
    again = copy.deepcopy(error)  # as pickle does it
    assert (str(again), again.for_command) == (str(error), error.for_command)
    plain = ConfigError("rounds must be >= 1")
    assert str(plain) == plain.for_command == "rounds must be >= 1"


@pytest.mark.parametrize(
    ("settings", "python", "command"),
    [
        ({"rounds": 0}, "rounds must be >= 1", "run.rounds must be >= 1"),
        ({"participation": 2.0}, "participation is the share", "run.participation is the share"),
        ({"engine": "vectorised"}, "engine: 'vectorised' is no choice", "run.engine: 'vectorised'"),
        ({"keep_best": True}, "keep_best keeps a state", "run.keep_best keeps a state"),
        ({"metrics": ["rmse"]}, "metrics: rmse is", "run.metrics: rmse is"),
    ],
)
def test_errors_name_arguments_of_simulate(settings: dict[str, object], python: str, command: str) -> None:
    federation = Federation.from_arrays(CLIENTS, nn.Linear(3, 2))
    with pytest.raises(FedlowrankError) as error:
        simulate("fedavg", federation, **settings)
    assert str(error.value).startswith(python)
    assert "run." not in str(error.value)
    assert error.value.for_command.startswith(command)


def test_an_existing_folder_is_no_matter_of_options_in_python(tmp_path: Path) -> None:
    federation = Federation.from_arrays(CLIENTS, nn.Linear(3, 2))
    with pytest.raises(FedlowrankError) as error:
        simulate("fedavg", federation, rounds=1, folder=tmp_path)
    assert "force=True" in str(error.value)
    assert "--" not in str(error.value)
    assert "--force" in error.value.for_command


def test_a_name_in_other_case_is_suggested() -> None:
    for name, method in METHODS.items():
        assert did_you_mean(method.title, METHODS) == f"Did you mean {name!r}?"
    with pytest.raises(ConfigError, match=r"no method 'pFedLoRA'\. Did you mean 'pfedlora'\?"):
        simulate("pFedLoRA", Federation.from_arrays(CLIENTS, nn.Linear(3, 2)), rounds=1)
    assert did_you_mean("AGEE", ["age", "AGE"]) == "Did you mean 'AGE'?"
    assert did_you_mean("agee", ["age", "AGE"]) == "Did you mean 'age'?"
