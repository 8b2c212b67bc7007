"""Tables for LaTeX, read back by undoing what LaTeX does, and every value in one CSV file."""

import csv
import math
import re

import pytest

from fedlowrank.report import compare_runs, to_latex, write_values
from fedlowrank.report.formats.latex import escape_latex
from fedlowrank.results.records import RunRecord
from tests.report.report_runs import rounds_of
from tests.support.client_tables import read_tables

PRINTED = {
    r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textless{}": "<",
    r"\textgreater{}": ">", r"\textbar{}": "|", r"\textquotedbl{}": '"', r"$\pm$": "±", "$-$": "−", r"\dots{}": "…",
    r"$\varepsilon$": "ε", r"\textsuperscript{2}": "²", "--": "–",
    **{f"\\{c}": c for c in "&%$#_{}"},
}  # fmt: skip


def printed(text):
    """What LaTeX prints for a text; fails at a command or active character that is none of the above."""
    actual, rest = "", text
    while rest:
        known = next((k for k in sorted(PRINTED, key=len, reverse=True) if rest.startswith(k)), None)
        assert known or rest[0] not in "\\&%$#_{}~^", rest
        actual += PRINTED[known] if known else rest[0]
        rest = rest[len(known or rest[0]) :]
    return actual


@pytest.mark.parametrize(
    "text", [r"a\b_c & 5 % of $x$ #1 {y} ~z^2 <k> |q|", "93.1 ± 0.4", "−1.9 [−3.4, −0.4]", 'ε "R²" –…']
)
def test_escapes(text):
    assert printed(escape_latex(text)) == text


def test_the_table_of_results(make_run):
    rows = {
        m: [rounds_of([[0.1, 0.2], [v - 0.01 * s, v]]) for s in (0, 1, 2)]
        for m, v in (("a_1", 0.9), ("b&c", 0.5))
    }
    runs = [
        make_run(f"m{i}", s, title=m, rounds=one)
        for i, (m, some) in enumerate(rows.items())
        for s, one in enumerate(some)
    ]
    table = compare_runs(runs)
    text = to_latex(table)
    assert text.count(r"\begin{tabular}") == text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    (body,) = re.findall(r"\\midrule\n(.*?)\\bottomrule", text, re.DOTALL)
    cells = [line.removesuffix(r" \\").split(" & ") for line in body.strip().splitlines()]
    (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert {len(row) for row in cells} == {len(columns)}
    bold = {
        (y, x) for y, row in enumerate(cells) for x, cell in enumerate(row) if cell.startswith(r"\textbf{")
    }
    assert bold == set(table.summary.bold) >= {(0, 1)}
    plain = [[printed(re.sub(r"^\\textbf\{(.*)\}$", r"\1", cell)) for cell in row] for row in cells]
    assert [tuple(row) for row in plain] == list(table.summary.rows)
    every = to_latex(table, all_tables=True)
    assert every.count(r"\begin{table}") == every.count(r"\end{table}") == len(table.tables) > 2


def test_every_value(make_run, tmp_path):
    rows = rounds_of([[0.1, None], [0.4, 0.3]])
    for row in rows:
        row["client_losses"] = {"personal": {"val": [1.5, None], "test": [math.inf, 0.25]}}
        row["metrics"] = {"own": {"personal": {"val": [None, None], "test": [7.0, None]}}}
    runs = [make_run("a", seed, rounds=rows) for seed in (0, 1)]
    write_values(runs, tmp_path / "new" / "values.csv")
    with (tmp_path / "new" / "values.csv").open() as file:
        actual = list(csv.DictReader(file))
    assert list(actual[0]) == [
        "run",
        "method",
        "seed",
        "round",
        "client",
        "client_name",
        "series",
        "split",
        "metric",
        "value",
    ]
    expected = set()
    for run in (RunRecord.load(run.folder) for run in runs):
        for record in run.rounds:
            for metric, values in read_tables(record.measured).items():
                for series, splits in values.items():
                    for split, of in splits.items():
                        for k, v in enumerate(of):
                            if v is not None:
                                seed = str(run.config["run"]["seed"])
                                value = v if math.isfinite(v) else math.inf
                                expected.add(
                                    (
                                        str(run.folder),
                                        "a",
                                        seed,
                                        str(record.round),
                                        str(k),
                                        "",
                                        series,
                                        split,
                                        metric,
                                        value,
                                    )
                                )
    assert {(*list(row.values())[:-1], float(row["value"])) for row in actual} == expected
    assert len(actual) == len(expected)
