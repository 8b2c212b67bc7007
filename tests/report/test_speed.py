"""A report of long runs: nothing is read, computed or drawn more often than it must be."""

from collections import Counter

import pytest

from fedlowrank.cli.main import main
from fedlowrank.report import run_comparison
from fedlowrank.report.figures.chart import MAX_TIPS, POINTS
from fedlowrank.results import measurements, records
from fedlowrank.results.measurements import Measurements
from tests.report.report_runs import curve, draw_figures, in_clusters, with_routes


def long_run(make_run, method, seed):
    rows = curve(method, seed, count=4, rounds=1000)
    for row in rows:
        row["ranks"] = {"w": 2000 - row["round"]}
        row["bytes_down"] -= row["round"] % 7
    routes = [[[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [at / 1000, 1 - at / 1000]] for at in range(1001)]
    people = in_clusters([0, 0, 1, 1])
    return make_run(method, seed, rounds=with_routes(rows, routes), clients=people, lora={"r": 4})


def counted(monkeypatch, module, name, key):
    """Counts the calls of a function by what ``key`` makes of its first argument."""
    calls, original = Counter(), getattr(module, name)

    def count(first, *rest, **more):
        calls[key(first)] += 1
        return original(first, *rest, **more)

    monkeypatch.setattr(module, name, count)
    return calls


@pytest.mark.full
def test_each_run_is_read_and_computed_once(make_run, tmp_path, monkeypatch):
    runs = [long_run(make_run, method, seed) for method in ("a", "b") for seed in (0, 1)]
    read = counted(monkeypatch, records, "read_lines", lambda folder: folder)
    appended = counted(monkeypatch, Measurements, "append_clients", id)
    rows = counted(monkeypatch, run_comparison, "comparison_row", lambda group: group.label)
    indices = counted(monkeypatch, measurements, "measure_recovery", lambda routes: None)
    assert main(["report", *(str(run.folder) for run in runs), "-o", str(tmp_path / "r.html")]) == 0
    folders = [run.folder for run in runs]
    assert read == dict.fromkeys(folders, 1)
    assert list(appended.values()) == [1001] * len(runs)
    assert rows == {"a": 1, "b": 1}
    # One client changes its cluster once in 1,000 rounds.
    assert indices.total() == 2 * len(runs)


@pytest.mark.full
def test_lines_have_a_bounded_number_of_points_with_both_ends(make_run):
    ((_, pictures),) = draw_figures([long_run(make_run, "a", seed) for seed in (0, 1)])
    (curve,) = [picture for picture in pictures if picture.slot == "curve"]
    assert "Of each line at most 250 rounds are drawn" in curve.caption
    assert len(curve.tips) == MAX_TIPS
    checked = 0
    for picture in pictures:
        for axes in picture.figure.axes if "over rounds" in picture.title else ():
            for line in axes.lines:
                x = line.get_xdata()
                assert len(x) <= POINTS, picture.title
                assert x[0] in (0, 1)
                assert x[-1] == 1000
                checked += 1
            for band in axes.collections:
                assert len(band.get_paths()[0].vertices) <= 2 * POINTS + 3, picture.title
    assert checked >= 4
