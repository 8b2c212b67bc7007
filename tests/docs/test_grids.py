"""The page on grids: its files parse, its numbers of runs are right, and its table is that of the demo's grid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlowrank.cli.main import parser
from fedlowrank.config.comparison import plan_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.tuning import plan_tuning

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "grids.md").read_text()


def read(text: str, folder: Path) -> ExperimentConfig:
    (folder / "file.toml").write_text(text.replace("experiments/", f"{ROOT}/experiments/"))
    return ExperimentConfig.read(folder / "file.toml")


@pytest.mark.full
def test_the_grid_has_as_many_runs_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^fedlowrank (compare .*--vary.*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    args = parser().parse_args(command.split())
    seeds = [int(seed) for seed in args.seeds.split(",")]
    made = ExperimentConfig.read(args.file)
    typed = plan_runs(made, args.methods, seeds, args.vary, Path("runs/grid"))
    grid, tuned = (read(text, tmp_path) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    filed = plan_runs(grid, grid.compared_methods, grid.seeds, grid.vary, Path("runs/grid"))
    (count,) = re.findall(r"= (\d+) runs", PAGE)
    assert [one.folder for one in typed] == [one.folder for one in filed]
    assert len({one.folder for one in typed}) == int(count)
    # 3 learning rates, and twice as many settings of the method with a further field
    assert [one.method for one in plan_tuning(tuned, tmp_path)] == ["standalone"] * 3 + ["pfedlora"] * 6


@pytest.mark.full
def test_the_python_example_plans_the_same_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(text, "page", "exec"), {})
    assert capsys.readouterr().out.split()[0] == "16"


@pytest.mark.full
def test_the_table_shows_every_setting_of_the_demo() -> None:
    made = ExperimentConfig.read(ROOT / "experiments" / "demo" / "tune.toml")
    shown = PAGE.partition("<!-- evidence tuning -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| [\d.]+ \|.*$", shown, re.MULTILINE)
    assert len(rows) == len(plan_tuning(made, Path("out")))
    assert sum("chosen" in row for row in rows) == len(made.compared_methods)
