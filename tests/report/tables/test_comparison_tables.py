"""The comparison as data, and each way of writing it."""

import csv
import io
import json
import math
import re

import numpy as np
import pytest

from fedlowrank.core.io.text import on_one_line
from fedlowrank.report import compare_runs, render_terminal
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.number_formats import (
    MISSING,
    format_loss,
    format_loss_pair,
    format_number,
    format_percent_pair,
    format_seconds,
    format_si,
    format_si_pair,
    format_signed,
    format_tick,
)
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.rounds.logs.console import console
from tests.report.report_runs import cells, page_of, rounds_of, rows_of, text_of, titles_of

REFERENCE = {"label": "Table 2", "accuracy": {"a": 96.66, "b": None}}


@pytest.mark.full
def test_columns_appear_where_they_have_something_to_say(make_run):
    plain_table = compare_runs([make_run("a", 0)])
    assert not {"over seeds", "n", "paper", "difference", "status", "global"} & set(titles_of(plain_table))
    full = compare_runs([make_run(m, s, reference=REFERENCE) for m in "abc" for s in (0, 1)])
    assert {"over seeds", "n", "paper", "difference"} <= set(titles_of(full))
    assert [row["label"] for row in rows_of(full)] == ["a", "b", "c"]


def test_the_heading_names_a_spread_that_is_no_interval(make_run):
    for seeds in ([0], [0, 1]):
        table = compare_runs([make_run("a", seed) for seed in seeds]).result_tables["accuracy"]
        headings = [column.heading for column in table.columns]
        assert headings[0] == "last round / % ± std over clients"
        assert [heading for heading in headings[1:] if "±" in heading] == []


def test_reference_and_difference(make_run):
    table = compare_runs([make_run(m, 0, reference=REFERENCE) for m in "abc"])
    assert cells(table, "accuracy", "paper") == ["96.66", "not converged", MISSING]
    ours = 100 * rows_of(table)[0]["accuracy_last"]
    assert rows_of(table)[0]["difference_points"] == ours - 96.66
    assert cells(table, "accuracy", "difference")[0].startswith("−")
    assert ("paper", "Table 2") in table.footnotes


@pytest.mark.full
def test_csv_has_the_exact_means_over_seeds(make_run):
    runs = [make_run(m, s, title='x, "y"\nz') for m in "ab" for s in (0, 1, 2)]
    table = compare_runs(runs)
    for read, row in zip(csv.DictReader(io.StringIO(to_csv(table))), rows_of(table), strict=True):
        assert list(read) == list(row)
        for key, value in row.items():
            assert read[key] == "" if value is None else type(value)(read[key]) == value
    row, last = (
        rows_of(table)[0],
        np.array([run.rounds[-1].values("accuracy", series="personal", split="test") for run in runs[:3]]),
    )
    assert row["accuracy_last"] == pytest.approx(last.mean())
    assert row["std_clients"] == pytest.approx(last.std(axis=1).mean())
    assert row["worst_tenth"] == pytest.approx(last.min(axis=1).mean())
    assert row["bytes_up"] == 20 * 500
    assert isinstance(row["bytes_up"], int)


@pytest.mark.full
def test_costs_to_target_need_every_seed(make_run):
    runs = [make_run("a", s, rounds=rounds_of([[0.1], [0.2 + 0.5 * s]])) for s in (0, 1)]
    table = compare_runs(runs, 0.6)
    assert rows_of(table)[0]["target_round"] is None
    assert cells(table, "target", "rounds") == ["1 of 2 seeds"]
    assert cells(compare_runs(runs, 0.9), "target", "rounds") == ["not reached"]


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_unfinished_runs_say_so(make_run, tmp_path):
    runs = [make_run("a", status={"state": "stopped", "rounds": 12, "message": "ctrl-c"})]
    table = compare_runs(runs)
    for written in (
        text_of(table, all_tables=False),
        comparison_markdown(table),
        page_of(runs, tmp_path),
        to_csv(table),
    ):
        assert "stopped at round 12" in written


@pytest.mark.full
def test_names_cannot_break_out(make_run):
    name = "<script>|[red]x[/red]|*_`$y$"
    table = compare_runs([make_run("a", title=name)])
    assert name in text_of(table)
    for line in comparison_markdown(table).splitlines():
        if line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            assert cells in {line.count("|"), cells}
    tables = re.findall(r"(?:^\|.*\n)+", comparison_markdown(table).replace("\\|", ""), re.MULTILINE)
    assert len(tables) == len(table.tables) > 2
    for rows in tables:
        assert len({row.count("|") for row in rows.splitlines()}) == 1


@pytest.mark.full
def test_experiments_and_what_is_varied_are_told_apart(make_run):
    table = compare_runs([make_run("a", name="one", vary={"method.mu": 0.5}), make_run("a", name="two")])
    assert [row[0] for row in table.result_tables["accuracy"].rows] == ["one: a (mu = 0.5)", "two: a"]
    assert json.loads(rows_of(table)[0]["vary"]) == {"method.mu": 0.5}


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (format_si(0, "B"), "0 B"),
        (format_si(999, "B"), "999 B"),
        (format_si(1000, "B"), "1.00 kB"),
        (format_si(999_999, "B"), "1.00 MB"),
        (format_si(12_345_678), "12.3 M"),
        (format_si(96_000, "B"), "96.0 kB"),
        (format_number(100 * 0.14), "14"),
        (format_number(12.6), "12.6"),
        (format_si(8_555_200, "B"), "8.56 MB"),
        (format_si(None), MISSING),
        (format_si(float("nan")), MISSING),
        (format_tick(1_500_000.0, "B"), "1.5 MB"),
        (format_percent_pair(0.931249, 0.05), "93.12 ± 5.00"),
        (format_percent_pair(0.5, None), "50.00"),
        (format_seconds(0.0), "0 s"),
        (format_seconds(150.0), "2.50 min"),
        (format_seconds(36_000.0), "10.0 h"),
        (format_si_pair(6_690_000, 560_000), "6.69 ± 0.56 M"),
        (format_si_pair(9_000_900, 98_000, "B"), "9.00 ± 0.10 MB"),
        (format_si_pair(500.0, 20.0), "500 ± 20"),
        (format_si_pair(11_173_952.0, 0.0), "11.2 M"),
        (format_si_pair(11_173_952.0, None), "11.2 M"),
        (format_si_pair(11_173_952.0, math.nan), "11.2 M"),
        (format_si_pair(None, 1.0), MISSING),
        (format_loss(None), MISSING),
        (format_loss(math.nan), MISSING),
        (format_loss(0.0), "0.000"),
        (format_loss(0.0123456), "0.01235"),
        (format_loss(1234.5), "1234"),
        (format_loss(1.23456e-7), "1.235e-07"),
        (format_loss_pair(0.5, None), "0.5000"),
        (format_loss_pair(0.5, 0.0123), "0.500 ± 0.012"),
        (format_loss_pair(0.1542, 0.27), "0.15 ± 0.27"),
        (format_loss_pair(0.01, 5.3), "0.010 ± 5.300"),
        (format_loss_pair(1.234e-6, 1e-8), "1.234e-06 ± 1.0e-08"),
        (on_one_line("a\x00\nb  c"), "a b c"),
        (on_one_line("abcdef", 4), "abc…"),
    ],
)
def test_units(got, expected):
    assert got == expected


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_a_table_has_one_number_format(make_run, tmp_path):
    """Every byte size and count of the page has three significant digits, fewer only where it is a whole number below."""
    text = page_of([make_run("a"), make_run("b", 1)], tmp_path)
    shown = re.findall(r">(\d[\d.]*) ?([kMGTP]?B|[kMGTP])</td>", text)
    assert len(shown) > 10
    for figure, unit in shown:
        digits = figure.replace(".", "").lstrip("0")
        assert len(digits) == 3 or (unit == "B" and "." not in figure and len(digits) < 3), (figure, unit)


def test_a_zero_has_no_minus_sign() -> None:
    assert format_signed("-0.0 [-0.05, -0.00], -10") == "0.0 [−0.05, 0.00], −10"


def test_a_narrow_terminal_loses_no_digit(make_run):
    table = compare_runs([make_run(m, s) for m in "abc" for s in (0, 1)])
    numbers = set(re.findall(r"\d+\.\d+", text_of(table)))
    assert len(numbers) > 10
    for width in (20, 40, 60):
        narrow = console()
        narrow.file, narrow.width = io.StringIO(), width
        narrow.print(render_terminal(table, all_tables=True))
        assert numbers <= set(re.findall(r"\d+\.\d+", narrow.file.getvalue()))
