"""The lines on the other ideas below ``make demo``, against arithmetic on the committed figures."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
T_5, T_10 = 2.776445, 2.262157  # quantiles .975 of Student's t for 4 and 9 degrees of freedom, from a table


def last_round(experiment: str, method: str, series: str, column: str) -> np.ndarray:
    with (ROOT / "docs" / "results" / "evidence" / f"{experiment}.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["method"], r["series"]) == (method, series)]
    end = max(int(r["round"]) for r in rows)
    return np.array([float(r[column]) for r in rows if int(r["round"]) == end])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("experiment", "method", "series", "t", "line"),
    [
        ("fedslr-mnist", "lam_3e-3", "mixed", T_5, 0),
        ("fedslr-mnist", "ditto", "personal", T_5, 1),
        ("teacher-24", "fedhl", "server", T_5, 2),
        ("teacher-24", "hetlora", "server", T_5, 2),
        ("teacher-24", "flora", "server", T_5, 3),
        ("pfedlora-digits", "pfedlora", "personal", T_10, 4),
        ("pfedlora-digits", "fd", "personal", T_10, 5),
    ],
)
def test_a_line_has_the_mean_and_interval_of_the_figures(
    experiment: str, method: str, series: str, t: float, line: int
) -> None:
    spec = importlib.util.spec_from_file_location("other_ideas", ROOT / "examples" / "other_ideas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = module.describe_ideas()
    values = 100 * last_round(experiment, method, series, "test")
    half = t * values.std(ddof=1) / np.sqrt(len(values))
    assert f"{values.mean():.1f} ± {half:.1f} %" in lines[line]
    assert f"{len(values)} seeds: python docs/evidence.py run {experiment}" in lines[line | 1]
    sent = last_round("fedslr-mnist", "lam_3e-3", "mixed", "bytes_down").mean() / 1e6
    assert f"{sent:.3g} MB to the clients" in lines[0]
