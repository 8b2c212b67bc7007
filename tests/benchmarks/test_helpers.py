"""What scripts of ``benchmarks/`` share: pages whose text stays, means over seeds, memory, and runs without evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.process_memory import measure_resident, read_memory, reset_peak
from helpers.result_pages import replace_tables
from helpers.seed_statistics import mean_and_half_width
from scipy import stats
from torch import nn

from fedlowrank import Federation
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import RunWithoutEvaluation

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("name", "first_line"),
    [
        ("secure-sums", "| numbers | clients |"),
        ("network-bounds", "## Learning rate"),
        ("robustness", "## Tables"),
    ],
)
def test_the_text_above_the_tables_stays(name: str, first_line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (RESULTS / f"{name}.md").read_text()
    above = text[: text.index(f"\n{first_line}") + 1]
    page.write_text(text)
    replace_tables(page, "Another title", first_line, f"{first_line} new\n")
    assert page.read_text() == f"{above}{first_line} new\n"


def test_a_page_without_tables_gets_them_below_its_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for expected in ("# Title\n\n## Tables\n", "# Title\n\n## Tables\n"):
        replace_tables(page, "Title", "## Tables", "## Tables\n")
        assert page.read_text() == expected
    page.write_text("# Own title\n\nSee ## Tables.\n")
    replace_tables(page, "Title", "## Tables", "## Tables\n")
    assert page.read_text() == "# Own title\n\nSee ## Tables.\n\n## Tables\n"


def test_an_interval_by_the_textbook() -> None:
    values = [0.5, 0.75, 0.25, 0.875]
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) / 2
    assert mean_and_half_width(values) == pytest.approx((np.mean(values), half))
    assert mean_and_half_width([0.5]) == pytest.approx((0.5, np.nan), nan_ok=True)
    # a seed that diverged is not left out
    assert mean_and_half_width([0.5, np.nan, 0.5]) == pytest.approx((np.nan, np.nan), nan_ok=True)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux alone has it")
def test_memory_is_read_in_mebibytes() -> None:
    reset_peak()
    before = measure_resident()
    block = np.ones(64 << 17)  # 64 MiB, written
    assert measure_resident() - before == pytest.approx(64, abs=8)
    assert block.all()
    del block
    assert read_memory("VmHWM") - before == pytest.approx(64, abs=16)
    assert 0 < read_memory("RssAnon") < read_memory("VmHWM")


def test_no_round_is_evaluated() -> None:
    data = [(np.eye(4, dtype=np.float32), np.arange(4))] * 2
    federation = Federation.from_arrays(data, nn.Linear(4, 4), val=0.25, test=0.25)
    run = RunWithoutEvaluation(FedAvg(), federation, RunSettings(rounds=2, evaluate_every=1), Sequential())
    records = [run.record_initial_models(), run.step(), run.step()]
    assert run.is_over
    assert not any(record.is_evaluated for record in records)
