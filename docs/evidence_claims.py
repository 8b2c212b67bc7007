"""The claims of the papers, judged by the committed figures, and the tables of the summary; see ``evidence.py``."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from evidence_tables import (
    RESULTS,
    difference,
    format_difference,
    list_seeds,
    read_figures,
    table_row,
    unit_of,
)

from fedlowrank.report.statistics.significance import ALPHA, Difference, correct_holm

VERDICTS = ("holds", "does not hold", "undecided")
BREAK = "<br>"
"""Between the lines of a cell."""


class Case(NamedTuple):
    """One comparison that a claim is about, and what the figures say about it."""

    key: tuple[str, ...]  # experiment, method, against, series: the same in two claims is one interval
    label: str
    found: Difference  # method minus the other
    seeds: int  # that were run
    scale: float  # to the unit of a table
    digits: int
    verdict: str
    stands: bool = False
    """Whether the interval excludes 0 once corrected for the number of all."""

    @property
    def is_weak(self) -> bool:
        """Whether the interval excludes 0 before the correction, and not after it."""
        return self.verdict != "undecided" and not self.stands

    @property
    def text(self) -> str:
        """The difference with its interval, and the number of seeds where some diverged."""
        fewer = f", n = {self.found.n}" if self.found.n < self.seeds else ""
        mark = "†" if self.is_weak else ""
        return f"{self.label}: {format_difference(self.found, self.scale, self.digits)}{mark}{fewer}"


Judged = list[tuple[dict[str, Any], list[Case]]]


@cache
def judge_claims() -> Judged:
    """The claims of ``evidence.toml`` with their comparisons; none where a claim rests on text alone."""
    claims = tomllib.loads((RESULTS / "evidence.toml").read_text())["claims"]
    judged = [(claim, [_judge_case(claim | case) for case in claim.get("cases", ())]) for claim in claims]
    every = distinct_cases(judged)
    corrected = dict(zip(every, correct_holm([case.found.p for case in every.values()]), strict=True))
    return [
        (claim, [case._replace(stands=corrected[case.key] < ALPHA) for case in cases])
        for claim, cases in judged
    ]


def distinct_cases(judged: Judged) -> dict[tuple[str, ...], Case]:
    """The comparisons of all claims, each once."""
    return {case.key: case for _, cases in judged for case in cases}


def _judge_case(case: dict[str, str]) -> Case:
    name, series = case["experiment"], case.get("series")
    found = difference(read_figures(name), case["method"], case["against"], series)
    verdict = judge(found.low, found.high, case["expected"])
    key = (name, case["method"], case["against"], series or "")
    return Case(key, case["label"], found, len(list_seeds(name)), *unit_of(name), verdict)


def judge(low: float, high: float, expected: str) -> str:
    """Whether an interval of a difference shows what a claim expects.

    Args:
        low: of the 95 % interval.
        high: of the 95 % interval.
        expected: the sign of the difference by the claim, ``+`` or ``-``.
    """
    if expected == "-":
        low, high = -high, -low
    if low > 0:
        return "holds"
    return "does not hold" if high < 0 else "undecided"


def judge_together(verdicts: Sequence[str], asks: str) -> str:
    """One verdict for all comparisons of a claim.

    Args:
        verdicts: of the comparisons.
        asks: what the claim says of them. ``every``: it is a claim about all of them at once ("the best"), which one
            comparison refutes; ``one``: it says that something can be, which one shows; ``each``: the same of each.
    """
    if len(set(verdicts)) == 1:
        return verdicts[0]
    if asks == "every":
        return "does not hold" if "does not hold" in verdicts else "undecided"
    if "holds" in verdicts:
        if asks == "one":
            return "holds"
        return "mixed" if "does not hold" in verdicts else "holds in part"
    return "not shown"


def summarize_verdicts(verdicts: Sequence[str]) -> str:
    """How many there are of each."""
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict in verdicts}
    if len(counts) == 1:
        where = {1: "", 2: " in both"}.get(len(verdicts), f" in all {len(verdicts)}")
        return next(iter(counts)) + where
    return ", ".join(f"{verdict} in {count} of {len(verdicts)}" for verdict, count in counts.items())


def claims_table() -> str:
    """The verdict of every claim in one table, and what became of all intervals."""
    judged = judge_claims()
    lines = [table_row(["paper", "claim", "verdict", *VERDICTS, "significant after Holm"])]
    lines.append("| :--- | :--- | :--- |" + " ---: |" * 4)
    lines += [_short_row(claim, cases) for claim, cases in judged]
    return "\n".join([*lines, "", *_count_intervals(judged)])


def comparisons_tables() -> dict[str, tuple[str, str]]:
    """For each paper its page, and the table of its claims with all comparisons."""
    found = {}
    for paper, of_paper in itertools.groupby(judge_claims(), lambda pair: pair[0]["paper"]):
        rows = list(of_paper)
        lines = [
            "| claim | verdict | measured here | the paper |",
            "| :--- | :--- | :--- | :--- |",
            *(_claim_row(claim, cases) for claim, cases in rows),
        ]
        about = f"{paper}: differences behind the verdicts, with their 95 % intervals"
        lines.append(f"\n![{about}](figures/{paper.lower()}-claims.svg)")
        found[paper] = rows[0][0]["page"], "\n".join(lines)
    return found


def _count_intervals(judged: Judged) -> list[str]:
    """How many intervals exclude 0 alone and after correction, as a sentence and a table by paper."""
    every = distinct_cases(judged)
    owner: dict[tuple[str, ...], str] = {}
    for claim, cases in judged:
        for case in cases:
            owner.setdefault(case.key, claim["paper"])
    lines = [
        f"{len(every)} different intervals stand behind these rows:",
        "",
        table_row(["paper", "intervals", "exclude 0", "exclude 0 after Holm"]),
        "| :--- |" + " ---: |" * 3,
    ]
    for paper in [*dict.fromkeys(owner.values()), "all"]:
        own = [case for key, case in every.items() if paper in (owner[key], "all")]
        clear = [case for case in own if case.verdict != "undecided"]
        counts = (len(own), len(clear), sum(case.stands for case in own))
        lines.append(table_row([paper, *map(str, counts)]))
    return lines


def _short_row(claim: dict[str, Any], cases: Sequence[Case]) -> str:
    verdicts = [case.verdict for case in cases]
    counts = [str(verdicts.count(verdict)) for verdict in VERDICTS] if cases else ["", "", ""]
    stand = str(sum(case.stands for case in cases)) if cases else ""
    verdict = f"**{judge_together(verdicts, claim.get('asks', 'each'))}**" if cases else claim["verdict"]
    return table_row([claim["paper"], f"[{claim['claim']}]({_link(claim, cases)})", verdict, *counts, stand])


def _claim_row(claim: dict[str, Any], cases: Sequence[Case]) -> str:
    measured, verdict = claim.get("measured", ""), claim.get("verdict", "")
    if cases:
        verdicts = [case.verdict for case in cases]
        shown = BREAK.join(case.text for case in cases)
        measured = BREAK.join(filter(None, [f"{claim['difference']}:", shown, measured]))
        together, counted = judge_together(verdicts, claim.get("asks", "each")), summarize_verdicts(verdicts)
        verdict = f"**{together}**" + (f": {counted}" if counted != together else "")
    return table_row([f"[{claim['claim']}]({_link(claim, cases)})", verdict, measured, claim["reported"]])


def _link(claim: dict[str, Any], cases: Sequence[Case]) -> str:
    """To the section of the first comparison's experiment."""
    page: str = claim["page"]
    if not cases:
        return page
    above = (RESULTS / page).read_text().split(f"<!-- evidence {cases[0].key[0]} -->")[0]
    title = re.findall(r"^##+ (.*)$", above, flags=re.MULTILINE)[-1]
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    return f"{page}#{anchor}"
