"""A method of one's own, ``module:Class``, wherever the name of a built-in method may stand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.cli import catalog
from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.results.records import RunRecord
from fedlowrank.testing.check import CheckFinding
from tests.cli.small_experiment import SMALL, done, refused, write

Capsys = pytest.CaptureFixture[str]

CODE = '''
from dataclasses import dataclass
from pathlib import Path
from fedlowrank.methods import FedAvg

Path("imported").touch()


@dataclass(frozen=True)
class Damped(FedAvg):
    """Federated averaging that goes a part of the way to the mean.

    Attributes:
        damping: share of the way.
    """

    damping: float = 0.5

    title = "Damped FedAvg"
    citation = "this test"

    def server_update(self, server, *rest):
        mean = super().server_update(server, *rest)
        return {name: value + self.damping * (mean[name] - value) for name, value in server.items()}


class Other:
    pass
'''
NAME = "own_method:Damped"
ALONE = SMALL.replace('method = "fedavg"', f'method = "{NAME}"').replace("compare", "# compare")
VARIANT = SMALL + f'[methods.half]\nmethod = "{NAME}"\n[methods."{NAME}"]\ndamping = 0.25\n'


@pytest.fixture(autouse=True)
def _code() -> None:
    Path("own_method.py").write_text(CODE)


def fields(folder: str) -> dict[str, Any]:
    actual: dict[str, Any] = RunRecord.load(Path(folder)).config["method"]
    return actual


def forget() -> None:
    sys.modules.pop("own_method", None)
    Path("imported").unlink()


@pytest.mark.full
def test_as_the_method_of_a_file(capsys: Capsys) -> None:
    out = done(capsys, "run", write(Path(), ALONE), "defaults.batch_size=16")
    assert "Damped FedAvg" in out
    actual = fields(f"runs/small/{NAME}-s0")
    assert (actual["name"], actual["title"], actual["fields"]["damping"]) == (NAME, "Damped FedAvg", 0.5)
    assert actual["fields"]["batch_size"] == 16


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_as_an_option_of_run_and_compare(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1", "--method", NAME)
    out = done(capsys, "compare", write(Path()), "run.rounds=1", "--methods", f"fedavg,{NAME}")
    assert "Damped FedAvg" in out
    # the run of before is finished, and not made again
    assert sorted(p.name for p in Path("runs/small").glob("*-s0*")) == ["fedavg-s0", f"{NAME}-s0"]


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_with_settings_of_its_own_and_as_a_variant(capsys: Capsys) -> None:
    done(capsys, "compare", write(Path(), VARIANT), "run.rounds=1", f'compare=["fedavg", "half", "{NAME}"]')
    actual = [fields(f"runs/small/{name}-s0") for name in ("half", NAME)]
    assert [(f["name"], f["title"], f["fields"]["damping"]) for f in actual] == [
        ("half", "half", 0.5), (NAME, "Damped FedAvg", 0.25),
    ]  # fmt: skip
    # half the way is another run than the whole way
    ends = [RunRecord.load(Path(f"runs/small/{n}-s0")).rounds[-1].untimed() for n in ("fedavg", "half")]
    assert ends[0] != ends[1]


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_a_field_is_varied(capsys: Capsys) -> None:
    vary = f"methods.{NAME}.damping=0.5,1.0"
    done(capsys, "compare", write(Path()), "run.rounds=1", "--methods", NAME, "--vary", vary)
    assert sorted(
        fields(str(p.parent))["fields"]["damping"] for p in Path("runs/small").glob("*/run.json")
    ) == [0.5, 1]


@pytest.mark.full
def test_check_takes_it(capsys: Capsys) -> None:
    assert "FAILED" not in done(capsys, "check", NAME)


def test_check_says_once_what_fails_every_check(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = [
        CheckFinding("one", False, "no pair"),
        CheckFinding("two", True),
        CheckFinding("three", False, "no pair"),
    ]
    monkeypatch.setattr(catalog, "check_method", lambda method: actual)
    assert main(["check", NAME]) == 1
    out = capsys.readouterr().out
    assert (out.count("FAILED"), out.count("no pair"), out.count("as above")) == (2, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('method = "own_method:Nothing"', "'own_method:Nothing' cannot be imported"),
        ('method = "own_nowhere:Damped"', "'own_nowhere:Damped' cannot be imported"),
        ('compare = ["own_method:Other"]', "'own_method:Other' is no subclass of fedlowrank.Method"),
        (f'compare = ["{NAME}"]\n[methods."{NAME}"]\ndampin = 1.0', f"methods.{NAME}.dampin: there is no such field. Did you"),
        ('[methods.half]\nmethod = "own_method:Dampd"', "cannot be imported"),
    ],
)  # fmt: skip
def test_a_class_that_does_not_fit(text: str, says: str, capsys: Capsys) -> None:
    for command in ("run", "compare", "data"):
        assert says in refused(capsys, command, write(Path(), text))
    assert not Path("runs").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("text", "options", "folder"),
    [(ALONE, [], f"{NAME}-s0"), (SMALL, ["--method", NAME], f"{NAME}-s0"), (VARIANT, ["--method", "half"], "half-s0")],
    ids=["method", "option", "variant"],
)  # fmt: skip
@pytest.mark.parametrize(
    "command", [["resume"], ["export"], ["adapters"], ["score", "--task", "perplexity", "path=no"]]
)
def test_a_run_folder_imports_nothing_unless_allowed(
    text: str, options: list[str], folder: str, command: list[str], capsys: Capsys
) -> None:
    done(capsys, "run", write(Path(), text), "run.rounds=1", *options)
    # downloaded from somebody else, it would belong to this user all the same
    Path(f"runs/small/{folder}").rename("theirs")
    forget()
    typed = [command[0], "theirs", *command[1:]]
    actual = refused(capsys, *typed)
    assert NAME in actual
    assert "--allow-code" in actual
    assert not Path("imported").exists()
    main([*typed, "--allow-code"])
    assert Path("imported").exists()


@pytest.mark.full
def test_allowed_code_goes_on_with_the_run(capsys: Capsys) -> None:
    done(capsys, "run", write(Path(), ALONE), "run.rounds=1", "-o", "a run")
    forget()
    done(capsys, "resume", "a run", "run.rounds=2", "--allow-code")
    assert len(RunRecord.load(Path("a run")).rounds) == 3


@pytest.mark.full
def test_report_and_list_import_nothing(capsys: Capsys) -> None:
    done(capsys, "run", write(Path(), ALONE), "run.rounds=1")
    forget()
    assert "Damped FedAvg" in done(capsys, "report", "runs/small")
    assert "fedlowrank check" in refused(capsys, "list", NAME)
    assert not Path("imported").exists()


def test_changed_code_is_another_configuration(capsys: Capsys) -> None:
    """Finished runs of a method are no results of what its code is now; comments are no code."""
    both = ["compare", write(Path()), "--methods", f"fedavg,{NAME}", "run.rounds=1"]
    done(capsys, *both)
    Path("own_method.py").write_text(CODE.replace("self.damping * (", "self.damping  *  (") + "# a comment\n")
    forget()
    done(capsys, *both)
    Path("own_method.py").write_text(CODE.replace("self.damping * (", "0.0 * ("))
    forget()
    actual = refused(capsys, *both)
    assert f"the code of {NAME} was changed" in actual
    assert "--force" in actual
    forget()
    assert f"the code of {NAME} was changed" in refused(
        capsys, "resume", f"runs/small/{NAME}-s0", "run.rounds=2", "--allow-code"
    )
    done(capsys, *both, "--force")
    assert RunRecord.load(Path(f"runs/small/{NAME}-s0")).rounds


@pytest.mark.full
def test_changed_code_of_a_model_is_another_configuration(capsys: Capsys) -> None:
    code = "import torch\ndef make(shape, classes):\n    return torch.nn.Linear(4, classes)\n"
    Path("own_method.py").write_text(code)
    text = SMALL.replace('names = ["mlp"]\nhidden = [4]', 'names = ["own_method:make"]')
    done(capsys, "compare", write(Path(), text), "run.rounds=1")
    Path("own_method.py").write_text(code.replace("Linear(4, classes)", "Linear(4, classes, bias=False)"))
    sys.modules.pop("own_method")
    assert "the code of own_method:make was changed" in refused(
        capsys, "compare", "small.toml", "run.rounds=1"
    )


def test_workers_end_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """The command has a handler of SIGTERM, by which processes that train are ended."""
    assert main(["run", write(Path(), ALONE), "run.engine=processes", "run.rounds=2"]) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_class_without_a_title_is_not_called_as_its_base(capsys: Capsys) -> None:
    Path("own_method.py").write_text(CODE.replace('    title = "Damped FedAvg"\n', ""))
    sys.modules.pop("own_method", None)
    title = f"FedAvg ({NAME})"
    done(capsys, "compare", write(Path()), "--methods", f"fedavg,{NAME}", "run.rounds=1")
    assert RunRecord.load(Path(f"runs/small/{NAME}-s0")).method_title == title
    assert RunRecord.load(Path("runs/small/fedavg-s0")).method_title == "FedAvg"
    assert title in " ".join(done(capsys, "report", "runs/small").split())
    # from Python, too
    method = ExperimentConfig.read("small.toml", (), NAME).build_method(NAME)
    assert method.title == title
