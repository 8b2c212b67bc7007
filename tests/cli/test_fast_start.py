"""What starts at once imports nothing heavy; the catalog that ``list`` prints is up to date."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest

import fedlowrank
import fedlowrank.methods.ifca
from fedlowrank.cli.catalog import build_catalog
from fedlowrank.cli.listing import CATALOG

HEAVY = {
    "scipy",
    "sklearn",
    "pandas",
    "matplotlib",
    "pydantic",
    "flwr",
    "transformers",
    "datasets",
    "jinja2",
    "ray",
}
COMPILER = "torch._dynamo"  # takes seconds, in every process that trains
LANGUAGE = {"transformers", "peft", "tokenizers", "rouge_score", "lm_eval"}
CALL = "from fedlowrank.cli.main import main\ntry: main({!r})\nexcept SystemExit: pass"
COUNT = """
from fedlowrank.training.flops import FlopCounter
import torch
with FlopCounter() as counter: torch.ones(2, 2) @ torch.ones(2, 2)
assert counter.total == 16
"""
STEPS = {
    "import fedlowrank": {*HEAVY, "torch", "numpy"},
    CALL.format(["--help"]): {*HEAVY, "torch", "numpy"},
    CALL.format(["list"]): {*HEAVY, "torch", "numpy"},
    "from fedlowrank import Federation, simulate": {*HEAVY, COMPILER},
    "import fedlowrank.engines": {"ray", COMPILER},
    COUNT: {COMPILER},
    "import fedlowrank.language.base_model, fedlowrank.language.lora.peft_adapter": LANGUAGE,
    "import fedlowrank.language.export.adapter_files": LANGUAGE,
    "import fedlowrank.language.tiny_models, fedlowrank.language.scores.harness_task": LANGUAGE,
}
"""What is executed one after another, and the packages that are not in memory afterwards."""
IMPORTED = "print('\\nin memory:', *sorted({m if m == 'torch._dynamo' else m.partition('.')[0] for m in sys.modules}))"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "\n".join(["import sys", *(f"{step}\n{IMPORTED}" for step in STEPS)])
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    memory = [set(line.split()[2:]) for line in actual.stdout.splitlines() if line.startswith("in memory: ")]
    assert {
        step: there & unwanted for (step, unwanted), there in zip(STEPS.items(), memory, strict=True)
    } == {step: set() for step in STEPS}
    assert "torch" in memory[-1]


@pytest.mark.full
def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fedlowrank", "--version"]
    actual = subprocess.run(command, capture_output=True, text=True, check=True)
    assert actual.stdout == f"fedlowrank {fedlowrank.__version__}\n"


def test_every_public_name_is_found() -> None:
    assert all(hasattr(fedlowrank, name) for name in fedlowrank.__all__)
    assert {*fedlowrank.__all__} <= {*dir(fedlowrank)}
    with pytest.raises(AttributeError, match="has no attribute 'Flora'"):
        _ = fedlowrank.Flora  # type: ignore[attr-defined]


def test_the_catalog_is_up_to_date() -> None:
    assert json.loads(CATALOG.read_text()) == build_catalog(), "run `make catalog`"


@pytest.mark.full
def test_the_algorithm_of_a_method_keeps_its_lines_on_a_narrow_terminal() -> None:
    command = [sys.executable, "-m", "fedlowrank", "list", "ifca"]
    narrow = {**os.environ, "COLUMNS": "80"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=narrow).stdout
    algorithm = inspect.getdoc(fedlowrank.methods.ifca)
    assert algorithm is not None
    # the terminal shows no markup
    assert algorithm.replace("``", "") in printed
