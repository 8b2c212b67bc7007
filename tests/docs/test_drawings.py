"""Drawings of the evidence experiments: what is read from them is what they draw."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
try:
    from tables import drawings
    from tables.claims import Case
    from tables.settings import HORIZONS
    from tables.verdicts import Judgment
finally:
    sys.path.pop(0)

LONG = "With very many words in it, so many that they need several lines of the margin, a claim is a long claim (Table 1)."


def case(
    label: str,
    mark: str = "for",
    diverged: tuple[int, int] = (0, 0),
    unit: str = "points",
    expected: str = "+",
) -> Case:
    judged = Judgment(2.0, 1.0, 3.0, 0.01, 5, mark)
    return Case(label, "teacher-24", judged, diverged, (), 1, unit, False, expected, is_strong=True)


def claim(text: str, cases: list[Case], verdict: str, **keys: str):
    return {"paper": "P", "claim": text, "difference": "First minus second", **keys}, cases, verdict


@pytest.fixture(autouse=True)
def kept_figure(monkeypatch):
    """Figures stay open after they were saved, until the end of the test."""
    with monkeypatch.context() as patched:
        patched.setattr(plt, "close", lambda: None)
        yield
    plt.close("all")


@pytest.fixture
def draw_claims(monkeypatch, tmp_path):
    """Draw claims; return the figure."""

    def draw(claims):
        monkeypatch.setattr(drawings, "judge_claims", lambda: claims)
        drawings.draw_claims("P", tmp_path / "claims.svg")
        return plt.gcf()

    return draw


def separators(axes) -> list[float]:
    """Heights of the lines between rows."""
    return [
        y[0] for line in axes.lines if len(y := line.get_ydata()) == 2 and y[0] == y[1] and y[0] % 1 == 0.5
    ]


class TestClaims:
    def test_titles_end_before_the_axes_and_keep_their_verdict(self, draw_claims):
        label = "a label that is as long as the labels of the experiments usually are"
        figure = draw_claims([claim(LONG, [case(label, expected=">=")], "does not hold")])
        figure.draw_without_rendering()
        axes = figure.axes[0]
        assert len(axes.texts) > 2
        assert all(text.get_window_extent().x1 < axes.bbox.x0 for text in axes.texts)
        assert axes.texts[-1].get_text().replace("\N{NO-BREAK SPACE}", " ").endswith("→ does not hold")
        shown = " ".join(text.get_text() for text in axes.texts)
        assert "Claimed: above −1, by the 90 % interval." in shown

    def test_all_claims_are_separated(self, draw_claims):
        figure = draw_claims(
            [
                claim(LONG, [], "no interval"),
                claim(LONG, [case("a")], "holds"),
                claim(LONG, [case("b")], "holds"),
            ]
        )
        axes = figure.axes[0]
        texts = [text.get_text() for text in axes.texts]
        starts = [
            text.get_position()[1]
            for text, words in zip(axes.texts, texts, strict=True)
            if words.startswith("With")
        ]
        assert len(starts) == 3
        assert separators(axes) == [start - 0.5 for start in starts[1:]]

    def test_diverged_seeds_are_named(self, draw_claims):
        cases = [case("all"), case("some", "open", (1, 0)), case("more", "for", (0, 2))]
        axes = draw_claims([claim("C.", cases, "holds")]).axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            "First minus second: all",
            "First minus second: some, diverged in 1 seed",
            "First minus second: more, diverged in 2 seeds",
        ]

    def test_a_claim_with_accuracies_and_losses_is_in_both_panels(self, draw_claims):
        cases = [case("task"), case("text", unit="loss", expected="-"), case("more")]
        points, losses = draw_claims([claim("C.", cases, "holds")]).axes
        shown = [[label.get_text() for label in axes.get_yticklabels()] for axes in (points, losses)]
        assert shown == [
            ["First minus second: task", "First minus second: more"],
            ["First minus second: text"],
        ]
        titles = [" ".join(text.get_text() for text in axes.texts) for axes in (points, losses)]
        assert ["Claimed" in title for title in titles] == [False, True]
        assert "Claimed: below 0." in titles[1]
        assert "loss" in losses.get_xlabel()

    def test_no_row_is_far_from_an_axis(self, draw_claims):
        claims = [claim(f"C{i}.", [case(f"{i} {j}") for j in range(8)], "holds") for i in range(10)]
        figure = draw_claims(claims)
        rows = [len(axes.get_yticks()) + len(axes.texts) for axes in figure.axes]
        assert sum(rows) == 90
        assert max(rows) <= 40
        assert len({axes.get_xlim() for axes in figure.axes}) == 1  # one scale for all
        assert [axes.texts[0].get_text()[:2] for axes in figure.axes] == ["C0", "C4", "C8"]


def test_a_line_of_leads_has_those_of_its_teacher_rate_and_rounds(monkeypatch, tmp_path):
    def lead(name, against, series):
        assert (against, series) == ("flexlora", "server")
        _, rank, kind, rounds, *cosine = name.split("-")
        mean = int(rank) + int(rounds) / 100 + 0.5 * (kind == "iid") + 0.001 * len(cosine)
        return SimpleNamespace(mean=mean, low=mean - 0.1, high=mean + 0.1)

    monkeypatch.setattr(drawings, "find_lead", lead)
    drawings.draw_leads(tmp_path / "leads.svg")
    for axes, cosine in zip(plt.gcf().axes, (0, 0.1), strict=True):
        lines = [list(container.lines[0].get_ydata()) for container in axes.containers]
        ranks = (24, 24.5, 8, 8.5, 1, 1.5)  # skewed and IID
        expected = [[100 * rank + rounds + cosine for rounds in HORIZONS] for rank in ranks]
        assert lines == [pytest.approx(line) for line in expected]
        assert "logarithmic" in axes.get_xlabel()


def test_markers_stand_around_their_own_label(monkeypatch, tmp_path):
    drawings.draw_page("fedslr.md", tmp_path / "page.svg")
    heights = {}
    for axes in plt.gcf().axes:
        for bars in axes.containers:
            for y in bars[0].get_ydata():
                heights.setdefault((axes, round(float(y))), []).append(float(y))
    assert len(heights) > 40
    for (_, row), ys in heights.items():
        assert math.isclose(sum(ys) / len(ys), row, abs_tol=1e-9)
        assert max(abs(y - row) for y in ys) < 0.3
        assert len(set(ys)) == len(ys)


def test_a_layout_that_differs_in_digits_that_are_not_printed_is_the_same_file(tmp_path: Path) -> None:
    drawings._set_style()
    for name, start in (("one", 0.1), ("again", 0.1 + 1e-13)):
        figure = drawings.plt.figure()
        for low in (0.1, 0.6):
            figure.add_axes((start, low, 0.8, 0.3)).plot([0.0, 1.0], [1.0, 0.0])
        drawings._save(tmp_path / name)
    one = (tmp_path / "one").read_text()
    assert one == (tmp_path / "again").read_text()
    assert {"url(#clip0)", "url(#clip1)"} <= {
        f"url(#{part.split(')')[0]})" for part in one.split("url(#")[1:]
    }
