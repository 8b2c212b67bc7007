"""Before a run of language models trains, its steps are counted and one of them is timed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from fedlowrank.cli.language.run_estimate import estimate_run
from fedlowrank.cli.main import main
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.effective_delta import Weighing
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)


@pytest.mark.parametrize("method", ["fedhl", "fedit", "flora"])
def test_the_steps_are_those_of_the_run(method: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["run"] = {**tables.get("run", {}), "rounds": 3, "participation": 1.0}
    if method == "fedit":
        tables["lora"] = {**tables["lora"], "ranks": [2]}
    run = run_rounds(tables)
    text = estimate_run(METHODS[method](**_shared(run.method)), run.federation, run.settings)
    assert text is not None
    steps = run.step().steps
    assert f"{3 * steps:,} local steps" in text
    assert float(re.search(r"steps of ([\d.e-]+) s", text).group(1)) > 0  # type: ignore[union-attr]


def _shared(method: object) -> dict[str, object]:
    return {name: getattr(method, name) for name in ("epochs", "batch_size", "optimizer", "training")}


def test_a_method_that_asks_for_a_statistic_first_has_no_estimate(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path))
    assert estimate_run(METHODS["standalone"](batch_size=4), run.federation, run.settings) is not None
    assert estimate_run(METHODS["fedem"](batch_size=4), run.federation, run.settings) is None


def test_a_run_shows_rows_samples_and_the_estimate(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = make_causal_tables(llama, tmp_path)
    tables["run"] = {**tables.get("run", {}), "rounds": 1}
    assert main(["run", str(write_toml(tables, tmp_path / "e.toml")), "-o", "out"]) == 0
    shown = capsys.readouterr().out
    assert "⟦" in shown
    assert "local steps of" in shown


def test_fedhl_says_that_its_weights_are_not_by_examples(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path))
    task = run.federation.task(1)
    sizes = [c.example_count for c in task.clients]
    expected = max(sizes) > 2 * min(sizes)
    said = " ".join(METHODS["fedhl"]().remarks(task))
    assert ("weighing.by = 'examples'" in said) == expected
    uneven = dataclasses.replace(
        task, clients=[dataclasses.replace(c, example_count=10 if c.id else 1) for c in task.clients]
    )
    assert "not by its 1 to 10 examples" in " ".join(METHODS["fedhl"]().remarks(uneven))
    assert METHODS["fedhl"](weighing=Weighing(by="examples")).remarks(uneven) == []


@pytest.mark.parametrize("method", ["fml", "fd", "fedproto"])
def test_a_method_of_classes_is_refused_before_its_step_is_timed(
    method: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_toml(make_causal_tables(llama, tmp_path), tmp_path / "e.toml")
    assert main(["run", str(file), "--method", method, "-o", str(tmp_path / "out")]) == 1
    assert "works on classes and cannot learn a task without them" in capsys.readouterr().err
