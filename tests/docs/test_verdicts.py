"""Every verdict on the papers' claims, computed again from the raw CSV files by the rules of the protocol's page.

Nothing of the page's own code is used, except in the tests of its rules on small examples.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import itertools
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
LOSSES = ("floral-synthetic", "stories")


def load(name: str) -> Any:
    """A script of ``docs/``, which imports its neighbors."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


rules, settings = load("tables.verdicts"), load("tables.settings")
SETTINGS, CLAIMS = settings.read_settings(), load("tables.claims").read_claims()
JUDGED = [claim for claim in CLAIMS if "cases" in claim]


@cache
def read(name: str) -> list[dict[str, str]]:
    """Rows of a file of raw figures."""
    with (RESULTS / "evidence" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def runs_planned(name: str) -> int:
    """Test seeds of an experiment: 20 for teachers but the first, routers and stories, 15 in four, 10 on digits, else 5."""
    if name.startswith("teacher-") and any(part in name for part in ("-skew-", "-iid-", "-4-")):
        return 20
    others = {
        "pfedlora-control": 15,
        "fedslr-mnist-15": 15,
        "cifar10-2-all": 15,
        "fedslr-cifar10-15": 15,
        "floral-r-routers": 20,
        "stories": 20,
    }
    return others.get(name, 10 if "digits" in name else 5)


def curve(name: str, method: str, series: str | None) -> dict[int, list[tuple[int, float]]]:
    """Rounds and values of each seed, without the seeds that diverged."""
    own = [row for row in read(name) if row["method"] == method]
    own = [row for row in own if row["series"] == series] or [row for row in own if row["headline"] == "True"]
    actual: dict[int, list[tuple[int, float]]] = {}
    for row in own:
        actual.setdefault(int(row["seed"]), []).append((int(row["round"]), float(row["test"] or "nan")))
    end = max(int(row["round"]) for row in own)
    by_seed = {seed: sorted(values) for seed, values in actual.items()}
    return {seed: v for seed, v in by_seed.items() if v[-1][0] == end and not np.isnan(v[-1][1])}


def values_of(case: dict[str, Any], side: str) -> dict[int, float]:
    """The measure of each seed of a side of a comparison."""
    measure = case.get("measure", "test")
    if measure == "spread":
        return spreads(case["experiment"], case[side])
    actual = curve(case["experiment"], case[side], case.get("series"))
    if measure != "curve":
        return {seed: points[-1][1] for seed, points in actual.items()}
    areas = {}
    for seed, points in actual.items():
        pairs = itertools.pairwise(points)
        areas[seed] = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / (
            points[-1][0] - points[0][0]
        )
    return areas


def spreads(name: str, method: str) -> dict[int, float]:
    """Standard deviation over the clients' test accuracies of each seed that did not diverge."""
    accuracies: dict[int, list[float]] = {}
    with gzip.open(RESULTS / "evidence" / f"{name}-clients.csv.gz", "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["method"], row["split"]) == (method, "test"):
                accuracies.setdefault(int(row["seed"]), []).append(float(row["accuracy"] or "nan"))
    finished = curve(name, method, None)
    return {seed: float(np.std(values, ddof=1)) for seed, values in accuracies.items() if seed in finished}


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share by his formula."""
    z = stats.norm.ppf(0.975)
    center = (k / n + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (k / n * (1 - k / n) / n + z**2 / (4 * n**2)) ** 0.5
    return max(0.0, center - half), min(1.0, center + half)


class Found:
    """One comparison: estimate, interval, p-value, mark, whether it is equivalent, and how it is printed."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.is_equivalent = False
        if "rate" in case:
            self._count(case)
        else:
            self._compare(case)

    def _count(self, case: dict[str, Any]) -> None:
        k, n = successes(case)
        self.ends = wilson(k, n)
        self.mark = "for" if self.ends[0] > 0.5 else "against" if self.ends[1] < 0.5 else "open"
        self.p = stats.chi2.sf((k - n / 2) ** 2 / (n / 4), 1)
        self.text = f"{k} of {n} runs [{100 * self.ends[0]:.0f} %, {100 * self.ends[1]:.0f} %]"

    def _compare(self, case: dict[str, Any]) -> None:
        name = case["experiment"]
        a, b = values_of(case, "method"), values_of(case, "against")
        seeds, is_loss = sorted(a.keys() & b.keys()), name in LOSSES
        scale, digits, margin = (1, 4, np.nan) if is_loss else (100, 1, 1.0)
        x = scale * np.array([a[seed] - b[seed] for seed in seeds])
        n, mean = len(x), x.mean()
        error = x.std(ddof=1) / n**0.5
        half, narrow = (stats.t.ppf(q, n - 1) * error for q in (0.975, 0.95))
        self.ends = mean - half, mean + half
        lost_more = len(b) - len(a)  # seeds that the method lost beyond those that the other lost
        self.is_equivalent = bool(lost_more == 0 and abs(mean) + narrow < margin)
        sign = int(self.ends[0] > 0) - int(self.ends[1] < 0)
        self.p = 2 * stats.t.sf(abs(mean) / error, n - 1) if error else 1.0
        expected = case["expected"]
        if expected == ">=" and lost_more <= 0 and mean - narrow > -margin:
            self.mark, self.p = "for", stats.t.sf((mean + margin) / error, n - 1)
        elif expected == "=" and self.is_equivalent:
            self.mark, self.p = "for", stats.t.sf((margin - abs(mean)) / error, n - 1)
        elif sign == 0:
            self.mark = "open"
        elif (-sign if is_loss else sign) == np.sign(lost_more):
            # the winner, which has the lower loss or the higher accuracy, diverged more often
            self.mark, self.p = "open", 1.0
        else:
            self.mark = "for" if sign == {"+": 1, ">=": 1, "-": -1, "=": 0}[expected] else "against"
        low, high = (f"{end:+.{digits}f}" for end in self.ends)
        self.text = f"[{low}, {high}]".replace("-", "−")


def successes(case: dict[str, Any]) -> tuple[int, int]:
    """Runs that find the clusters, of all; or that reach the target's last result first, of those in which one method does."""
    name = case["experiment"]
    if case["rate"] == "found":
        rows = read(f"{name}-recovery")
        k = sum(row["method"] == case["method"] and float(row["index"] or 0) >= 0.995 for row in rows)
        return k, runs_planned(name)
    columns = {"MB": ("bytes_up", "bytes_down"), "TFLOP": ("flops",)}[case["rate"]]
    goals = {seed: points[-1][1] for seed, points in curve(name, case["target"], None).items()}

    def cost(method: str) -> dict[int, float]:
        actual: dict[int, float] = {}
        for row in sorted(read(name), key=lambda row: int(row["round"])):
            seed = int(row["seed"])
            if (
                row["method"] == method
                and row["headline"] == "True"
                and float(row["test"] or 0) >= goals[seed]
            ):
                actual.setdefault(seed, sum(float(row[column]) for column in columns))
        return actual

    own, other = cost(case["method"]), cost(case["against"])
    wins = sum(spent < other.get(seed, np.inf) for seed, spent in own.items())
    return wins, wins + sum(spent < own.get(seed, np.inf) for seed, spent in other.items())


def correct(p_values: list[float]) -> list[bool]:
    """Holm by hand: the k-th smallest of n stands if it and all before it are below 0.05 / (n - k)."""
    stands = [False] * len(p_values)
    for k, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not p_values[place] < 0.05 / (len(p_values) - k):
            break
        stands[place] = True
    return stands


def verdict_of(found: list[Found], stands: list[bool], asks: str) -> str:
    """The table of the protocol's page, line by line."""
    marks = [one.mark for one in found]
    fors = sum(mark == "for" and strong for mark, strong in zip(marks, stands, strict=True))
    againsts = sum(mark == "against" and strong for mark, strong in zip(marks, stands, strict=True))
    if all(mark == "for" for mark in marks):
        return "holds"
    if all(mark == "against" for mark in marks):
        return "does not hold"
    if asks == "one" and fors:
        return "holds"
    if asks == "every" and againsts:
        return "does not hold"
    if asks == "each" and (fors or againsts):
        return "depends" if fors and againsts else "holds in part" if fors else "does not hold"
    return "equivalent" if all(one.is_equivalent for one in found) else "undecided"


def cases_of(claim: dict[str, Any]) -> list[dict[str, Any]]:
    """Comparisons of a claim, with what they share."""
    shared = {key: value for key, value in claim.items() if key not in ("cases", "effects")}
    return [shared | case for case in claim["cases"]]


def cells(line: str) -> list[str]:
    """Cells of a row of Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def verdict_in(row: list[str]) -> str:
    """The verdict of a row of the summary, without the comparison below it."""
    return row[-1].split("<br>")[0].strip("*")


REASONS = {
    "holds": ["for"],
    "holds in part": ["for", "open"],
    "depends": ["for", "against"],
    "does not hold": ["against"],
    "undecided": ["open"],
}


@pytest.mark.few(8)
@pytest.mark.parametrize("claim", JUDGED, ids=lambda c: f"{c['paper']} {c['claim'][:40]}")
def test_a_claim_is_judged_as_the_protocol_says(claim: dict[str, Any]) -> None:
    cases = cases_of(claim)
    actual = [Found(case) for case in cases]
    # a mark that says nothing cannot stand
    stands = [s and f.mark != "open" for s, f in zip(correct([f.p for f in actual]), actual, strict=True)]
    verdict = verdict_of(actual, stands, claim.get("asks", "each"))

    (row,) = (
        cells(line)
        for line in (RESULTS / "index.md").read_text().splitlines()
        if f"| [{claim['claim']}](" in line
    )
    assert verdict_in(row) == verdict
    # the nearest comparison, or one below the verdict, has each mark that is the reason of the verdict
    for mark in REASONS.get(verdict, ()):
        reasons = [one.text for one in actual if one.mark == mark]
        assert not reasons or any(text in row[2] + row[-1] for text in reasons), (verdict, mark)
    for mark, cell in zip(("for", "open", "against"), row[-4:-1], strict=True):
        own = [strong for one, strong in zip(actual, stands, strict=True) if one.mark == mark]
        assert cell == str(len(own)) + (f" ({sum(own)}†)" if any(own) else "")

    text = (RESULTS / claim["page"]).read_text().split("<!-- evidence claims -->")[1]
    name = claim["claim"].replace("*", r"\*")
    heading = f"**{name}** Verdict: **{verdict}**."
    assert text.count(heading) == 1
    lines = text.split(heading)[1].split("\n**")[0].splitlines()
    lines = [line for line in lines if line.startswith("| ")][2:]
    for case, one, strong, line in zip(cases, actual, stands, lines, strict=True):
        label, _, estimate, inside, task, diverged, mark = cells(line)
        assert label.endswith(case["label"])
        assert one.text in estimate
        assert ("†" in estimate, "≈" in estimate, mark) == (strong, one.is_equivalent, one.mark)
        assert task == SETTINGS[case["experiment"]]["task"]
        effects = [read_effect(effect) for effect in case.get("effects", ())]
        within = [one.ends[0] <= effect <= one.ends[1] for effect in effects]
        words = {(): "–", (True,): "yes", (False,): "no", (False, True): "partly"}
        assert inside == words[tuple(sorted(set(within)))]
        if "rate" not in case:
            lost = [
                runs_planned(case["experiment"]) - len(values_of(case, side))
                for side in ("method", "against")
            ]
            assert diverged == (f"{lost[0]} / {lost[1]}" if any(lost) else "")


def test_the_first_table_counts_the_verdicts() -> None:
    text = (RESULTS / "index.md").read_text()
    head, _, *rows = text.split("<!-- evidence verdicts -->")[1].split("<!-- end -->")[0].strip().splitlines()
    verdicts = {verdict_in(cells(line)) for line in text.splitlines() if line.startswith("| [")}
    for paper, *counts in map(cells, rows):
        part = (
            text
            if paper == "all"
            else text.split(f"<!-- evidence claims {paper} -->")[1].split("<!-- end -->")[0]
        )
        # a question that the page adds is no claim of a paper
        actual = [
            verdict_in(cells(line))
            for line in part.splitlines()
            if line.startswith("| [") and "(not a claim of the paper)" not in line
        ]
        assert counts == [str(actual.count(verdict)) for verdict in cells(head)[1:]]
        assert verdicts <= set(cells(head)[1:])
    assert [c["claim"] for c in CLAIMS if not c.get("counted", True)] == [
        c["claim"] for c in CLAIMS if "(not a claim of the paper)" in c["claim"]
    ]
    # the first sentence says the same as the row of all papers
    said = text.split("<!-- evidence count -->")[1].split("<!-- end -->")[0]
    *_, total = map(cells, rows)
    assert re.findall(r"\d+", said.split(". ")[0]) == [
        str(sum(map(int, total[1:]))),
        *(n for n in total[1:] if n != "0"),
    ]


def read_effect(effect: str) -> float:
    """A difference of two numbers of a paper's table."""
    file, names = effect.split(": ")
    reference = tomllib.loads((ROOT / "experiments" / f"{file}.toml").read_text())["reference"]
    numbers = reference["accuracy"] if "accuracy" in reference else reference["score"]

    def number(name: str) -> float:
        actual = re.fullmatch(r"(.+)\[(\d)\]", name)
        return float(numbers[actual[1]][int(actual[2])] if actual else numbers[name])

    first, second = names.split(" - ")
    return round(number(first) - number(second), 2)


@pytest.mark.parametrize("path", sorted((RESULTS / "evidence").glob("*-recovery.csv")), ids=lambda p: p.stem)
def test_a_table_counts_the_runs_that_find_the_clusters(path: Path) -> None:
    name = path.stem.removesuffix("-recovery")
    table = (RESULTS / "floral.md").read_text().split(f"<!-- evidence {name} -->")[1].split("<!-- end -->")[0]
    sources = json.loads(path.with_name(f"{name}.json").read_text())
    titles = {method: source["title"] for method, source in sources.items()}
    for method in {row["method"] for row in read(path.stem)}:
        k, n = successes({"experiment": name, "method": method, "rate": "found"})
        low, high = (f"{100 * end:.0f} %" for end in wilson(k, n))
        (row,) = re.findall(rf"^\| {re.escape(titles[method])} \|.* runs \[.*$", table, flags=re.MULTILINE)
        assert cells(row)[-1].rstrip(" |") == f"{k} of {n} runs [{low}, {high}]"


def test_diverged_seeds_are_those_of_the_record() -> None:
    """A seed without figures is one that the run's record calls diverged."""
    for claim in JUDGED:
        for case in cases_of(claim):
            if "rate" in case:
                continue
            record = json.loads((RESULTS / "evidence" / f"{case['experiment']}.json").read_text())
            for side in ("method", "against"):
                kept = len(values_of(case, side))
                lost = record[case[side]].get("diverged", 0)
                assert kept == runs_planned(case["experiment"]) - lost, (case["experiment"], case[side])


def test_a_matched_task_has_the_papers_clients_model_and_rounds() -> None:
    from fedlowrank.config.experiment import ExperimentConfig

    own = ExperimentConfig.read(ROOT / "experiments" / "evidence" / "floral-r.toml")
    paper = ExperimentConfig.read(ROOT / "experiments" / "floral" / "mnist-r-reduced.toml")
    assert [name for name, actual in SETTINGS.items() if actual["task"] == "matched"] == ["floral-r"]
    assert own.data == paper.data
    assert own.partition == paper.partition
    assert own.model == paper.model
    assert own.run.rounds == paper.run.rounds
    assert own.run.participation == paper.run.participation


def test_every_claim_has_one_nearest_comparison_and_no_verdict_by_hand() -> None:
    for claim in JUDGED:
        assert "verdict" not in claim
        assert sum(case.get("nearest", False) for case in claim["cases"]) <= 1
    assert {claim["verdict"] for claim in CLAIMS if "cases" not in claim} == {"no interval"}


def test_a_difference_is_that_of_the_claim() -> None:
    """ "A is above B" is about A minus B, also in the paper's numbers: positive for it, or a lower loss."""
    for claim in JUDGED:
        if not re.search(r"\b(above|better|best|highest)\b", claim["claim"]):
            continue
        for case in cases_of(claim):
            if "rate" not in case:
                assert case["expected"] == ("-" if case["experiment"] in LOSSES else "+"), case["label"]
    (feddyn,) = (claim for claim in JUDGED if claim["claim"].startswith("FedDyn's global model is above"))
    assert [read_effect(effect) for case in feddyn["cases"] for effect in case.get("effects", ())] == [2.62]


def test_a_penalty_that_is_too_large_counts_for_one_claim() -> None:
    with_large = [
        claim["claim"]
        for claim in JUDGED
        if any(
            case.get(side) in ("lam_1e-2", "lam_3e-2")
            for case in cases_of(claim)
            for side in ("method", "against")
        )
    ]
    assert with_large == ["A large λ costs accuracy (Table 3)."]


class TestRules:
    """The page's rules on small examples."""

    def judge(self, values: list[float], expected: str = "+", more_diverged: int = 0) -> Any:
        return rules.judge_difference(np.array(values), expected, more_diverged=more_diverged)

    def test_a_mark_is_that_of_the_interval(self) -> None:
        above, around = [2.0, 2.1, 1.9, 2.2], [3.0, -3.0, 2.0, -1.0]
        below = [-value for value in above]
        assert [self.judge(x).mark for x in (above, below, around)] == ["for", "against", "open"]
        assert [self.judge(x, "-").mark for x in (above, below, around)] == ["against", "for", "open"]

    def test_a_method_that_diverged_more_often_cannot_win(self) -> None:
        above = np.array([2.0, 2.1, 1.9, 2.2])
        for lower_is_better, sign in ((False, 1), (True, -1)):
            # sign: of a difference by which the first method wins
            claimed = "-" if lower_is_better else "+"
            marks = [
                rules.judge_difference(
                    side * sign * above, claimed, np.nan, more, lower_is_better=lower_is_better
                ).mark
                for side in (1, -1)
                for more in (1, 0, -1)
            ]
            assert marks == ["open", "for", "for", "against", "against", "open"]

    def test_equivalence_is_two_one_sided_tests(self) -> None:
        # the 90 % interval is inside, the 95 % interval is not
        x = [0.65, -0.26, 0.39, 1.17, -0.52]
        by_hand = max(
            stats.ttest_1samp(x, -1, alternative="greater").pvalue,
            stats.ttest_1samp(x, 1, alternative="less").pvalue,
        )
        assert by_hand < 0.05
        assert self.judge(x).is_equivalent
        wide = [3 * value for value in x]
        assert stats.ttest_1samp(wide, 1, alternative="less").pvalue > 0.05
        assert not self.judge(wide).is_equivalent
        assert self.judge([0.0] * 5).is_equivalent
        assert not rules.judge_difference(np.array(x), "+", margin=np.nan).is_equivalent

    def test_not_worse_and_the_same(self) -> None:
        slightly_below, ahead = [-0.3, -0.2, -0.4, -0.3], [3.0, 3.1, 2.9, 3.2]
        assert [self.judge(slightly_below, sign).mark for sign in (">=", "=", "+")] == [
            "for",
            "for",
            "against",
        ]
        assert [self.judge(ahead, sign).mark for sign in (">=", "=")] == ["for", "against"]
        assert self.judge([-value for value in ahead], ">=").mark == "against"

    def test_a_method_that_diverged_cannot_win(self) -> None:
        ahead = [2.0, 2.1, 1.9, 2.2]
        assert self.judge(ahead, more_diverged=1)[-2:] == ("open", False)
        assert self.judge(ahead, more_diverged=-1).mark == "for"
        behind = [-value for value in ahead]
        assert self.judge(behind, more_diverged=1).mark == "against"
        assert self.judge(behind, more_diverged=-1).mark == "open"
        assert self.judge(behind, "-", more_diverged=-1).mark == "open"
        assert self.judge([0.1, 0.0, -0.1, 0.1], ">=", more_diverged=1).mark == "open"

    @pytest.mark.parametrize(
        ("k", "low", "high", "mark"),
        [(5, 0.566, 1, "for"), (4, 0.376, 0.964, "open"), (0, 0, 0.434, "against")],
    )
    def test_a_rate_has_wilsons_interval(self, k: int, low: float, high: float, mark: str) -> None:
        """Ends for n = 5 as tables print them."""
        actual = rules.judge_rate(k, 5)
        assert (actual.low, actual.high) == pytest.approx((low, high), abs=5e-4)
        assert actual.mark == mark
        # the interval inverts the test: it excludes one half if p is below 5 %
        assert (actual.p < 0.05) == (mark != "open")

    @pytest.mark.parametrize(
        ("comparisons", "each", "every", "one"),
        [
            ("+ + +", "holds", "holds", "holds"),
            ("+† + ?", "holds in part", "undecided", "holds"),
            ("+ + ?", "undecided", "undecided", "undecided"),
            ("+† -† ?", "depends", "does not hold", "holds"),
            ("+† - ?", "holds in part", "undecided", "holds"),
            ("+ -† ?", "does not hold", "does not hold", "undecided"),
            ("- - -", "does not hold", "does not hold", "does not hold"),
            ("- - ?", "undecided", "undecided", "undecided"),
            ("≈ ≈ ≈", "equivalent", "equivalent", "equivalent"),
            ("≈ ≈ ?", "undecided", "undecided", "undecided"),
        ],
    )
    def test_a_claim_is_corrected_where_some_decide_and_not_where_all_do(
        self, comparisons: str, each: str, every: str, one: str
    ) -> None:
        marks = {"+": "for", "-": "against", "?": "open", "≈": "open"}
        given = comparisons.split()
        judged = [rules.Judgment(0, 0, 0, 1, 5, marks[text[0]], text == "≈") for text in given]
        strong = [text.endswith("†") for text in given]
        assert [rules.judge_claim(judged, strong, asks) for asks in ("each", "every", "one")] == [
            each,
            every,
            one,
        ]
