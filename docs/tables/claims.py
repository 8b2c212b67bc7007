"""The claims of the papers, judged by the committed figures, and the tables of the summary.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from fedlowrank.report.number_formats import format_signed
from fedlowrank.report.statistics.significance import ALPHA, correct_holm
from tables.experiments import (
    FOUND,
    costs_to,
    format_rate,
    has_figures,
    is_loss,
    list_seeds,
    paired_differences,
    read_figures,
    read_kept,
    read_spread,
    results_by_seed,
    running_costs,
    table_row,
    unit_of,
)
from tables.settings import FIGURES, RESULTS, ROOT, list_horizons, read_evidence, read_settings
from tables.verdicts import MARGIN, MARKS, VERDICTS, Judgment, judge_claim, judge_difference, judge_rate


class Case(NamedTuple):
    """One comparison that a claim is about, and what the figures say about it."""

    label: str
    experiment: str
    judged: Judgment
    diverged: tuple[int, int]  # seeds of the method and of the other
    effects: tuple[float, ...]  # the paper's differences in points; empty if it gives none
    digits: int
    unit: str  # points, loss or runs
    is_nearest: bool
    expected: str = "+"
    """What the claim says of the difference, see :func:`.verdicts.judge_difference`."""
    is_strong: bool = False
    """Whether it stands after Holm's correction within its claim."""

    @property
    def is_matched(self) -> bool:
        """Whether data, clients, model and rounds are the paper's."""
        return read_settings()[self.experiment]["task"] == "matched"

    @property
    def estimate(self) -> str:
        """The estimate with its interval and its marks."""
        found = self.judged
        if self.unit == "runs":
            text = format_rate(round(found.value * found.n), found.n, found.low, found.high)
        else:
            text = format_signed(f"{found.value:+.{self.digits}f}")
            if not math.isnan(found.low):
                ends = f"[{found.low:+.{self.digits}f}, {found.high:+.{self.digits}f}]"
                text += " " + ends.replace("-", "−")
        return text + "†" * self.is_strong + " ≈" * found.is_equivalent

    @property
    def inside(self) -> str:
        """Whether the paper's effect lies inside the interval."""
        within = [self.judged.low <= effect <= self.judged.high for effect in self.effects]
        if not within:
            return "–"
        return "yes" if all(within) else "partly" if any(within) else "no"

    @property
    def reported(self) -> str:
        """The paper's effect, or the range of several."""
        ends = [format_signed(f"{effect:+.1f}") for effect in sorted(self.effects)]
        return " to ".join(dict.fromkeys([ends[0], ends[-1]])) if ends else "–"


Judged = list[tuple[dict[str, Any], list[Case], str]]


@cache
def judge_claims() -> Judged:
    """The claims of ``evidence.toml`` with their comparisons and verdicts; no comparison where one rests on text alone."""
    return [_judge(claim) for claim in read_claims()]


def read_claims() -> list[dict[str, Any]]:
    """The claims of ``evidence.toml``; a case ``horizons`` is replaced by a case for each that has figures."""
    return [_write_out(claim) for claim in read_evidence()["claims"]]


def _write_out(claim: dict[str, Any]) -> dict[str, Any]:
    if "cases" not in claim:
        return claim
    named = {case["experiment"] for case in claim["cases"] if "experiment" in case}
    cases = []
    for case in claim["cases"]:
        if "horizons" not in case:
            cases.append(case)
            continue
        cases += [
            {"experiment": name, "label": label}
            for name, label in list_horizons(case["horizons"]).items()
            if name not in named and has_figures(name)
        ]
    return claim | {"cases": cases}


def _judge(claim: dict[str, Any]) -> tuple[dict[str, Any], list[Case], str]:
    """The family of a claim's comparisons is corrected together."""
    if "cases" not in claim:
        return claim, [], claim["verdict"]
    shared = {key: value for key, value in claim.items() if key != "effects"}
    cases = [_judge_case(shared | case) for case in claim["cases"]]
    corrected = correct_holm([case.judged.p for case in cases])
    cases = [
        case._replace(is_strong=p < ALPHA and case.judged.mark != "open")
        for case, p in zip(cases, corrected, strict=True)
    ]
    verdict = judge_claim(
        [case.judged for case in cases], [case.is_strong for case in cases], claim.get("asks", "each")
    )
    return claim, cases, verdict


def _judge_case(case: dict[str, Any]) -> Case:
    name = case["experiment"]
    scale, digits = unit_of(name)
    if "rate" in case:
        judged, unit, lost = judge_rate(*count_successes(case)), "runs", (0, 0)
    else:
        seeds, measure = list_seeds(name), case.get("measure", "test")
        figures = read_spread(name) if measure == "spread" else read_figures(name)
        sides = case["method"], case["against"]
        for side in {*sides} - set(figures["method"]):
            sys.exit(
                f"a claim of docs/results/evidence.toml compares {side}, which {name} does not have: {case['label']}"
            )
        pairs = paired_differences(figures, *sides, case.get("series"), measure)
        kept = [len(results_by_seed(figures, side, case.get("series"), measure)) for side in sides]
        lost = len(seeds) - kept[0], len(seeds) - kept[1]
        lower_is_better = is_loss(name)
        judged = judge_difference(
            scale * pairs.to_numpy(),
            case["expected"],
            math.nan if lower_is_better else MARGIN,
            lost[0] - lost[1],
            lower_is_better,
        )
        unit = "loss" if lower_is_better else "points"
    effects = tuple(read_effect(effect) for effect in case.get("effects", ()))
    return Case(
        case["label"],
        name,
        judged,
        lost,
        effects,
        digits,
        unit,
        case.get("nearest", False),
        case.get("expected", "+"),
    )


def read_effect(effect: str) -> float:
    """A difference that a paper prints, in points, rounded to its two digits.

    Args:
        effect: ``FILE: A - B``, of a file in ``experiments/`` and two names in its section ``[reference]``; ``A[2]`` is
            the third of several numbers.
    """
    file, first, second = re.fullmatch(r"(\S+): (\S+) - (\S+)", effect).groups()  # type: ignore[union-attr]
    reference = tomllib.loads((ROOT / "experiments" / f"{file}.toml").read_text())["reference"]
    numbers = reference.get("accuracy") or reference["score"]
    return round(_number_of(numbers, first) - _number_of(numbers, second), 2)


def _number_of(numbers: dict[str, Any], name: str) -> float:
    name, _, place = name.partition("[")
    return float(numbers[name][int(place.rstrip("]"))] if place else numbers[name])


def count_successes(case: dict[str, Any]) -> tuple[int, int]:
    """Runs of a case that succeed, and runs that count; a diverged run does not succeed.

    Args:
        case: with ``rate = "found"``, the run's largest shares are the true clusters at the end; or with the unit of
            a cost, ``MB`` or ``TFLOP``: the method reaches the last result of ``target`` in the same seed, and at
            less cost than ``against``. Runs in which neither reaches it, or both at one cost, do not count, as in a sign test.
    """
    name, method = case["experiment"], case["method"]
    if case["rate"] == "found":
        rows = read_kept(FIGURES, name, "-recovery.csv")
        return int((rows.loc[rows["method"] == method, "index"] >= FOUND).sum()), len(list_seeds(name))
    figures = read_figures(name)
    cost = running_costs(figures)[case["rate"]]
    own, other = (
        costs_to(figures, side, case["target"], cost, is_loss(name)) for side in (method, case["against"])
    )
    seeds = own.index.union(other.index)
    own, other = own.reindex(seeds, fill_value=math.inf), other.reindex(seeds, fill_value=math.inf)
    return int((own < other).sum()), int((own != other).sum())


def claims_table(paper: str) -> str:
    """The verdict of every claim of a paper in a short table."""
    head = ["claim", "the paper", "here, nearest comparison", "task", "inside", *MARKS, "verdict"]
    lines = [table_row(head), "| :--- | ---: | :--- | :--- | :--- | ---: | ---: | ---: | :--- |"]
    lines += [_short_row(*judged) for judged in judge_claims() if judged[0]["paper"] == paper]
    return "\n".join(lines)


def nearest_case(cases: Sequence[Case]) -> Case:
    """The comparison that is nearest to the paper's."""
    return next((case for case in cases if case.is_nearest), cases[0])


DECIDING_MARKS = {
    "holds": ("for",),
    "holds in part": ("for", "open"),
    "depends": ("for", "against"),
    "does not hold": ("against",),
    "undecided": ("open",),
}
"""Marks that show the reason of a verdict."""

FORMS = {
    "every": "<br><small>all must be for it</small>",
    "one": "<br><small>one with † is enough</small>",
}
"""What a verdict needs, where the claim is no direction; see ``judge_claim``."""


def deciding_cases(cases: Sequence[Case], verdict: str) -> list[Case]:
    """The comparisons that show the reason of a verdict where the nearest one does not.

    Of each mark in :data:`DECIDING_MARKS` that the nearest comparison does not have, the clearest: for and against with the
    smallest p-value, open with the largest.
    """
    missing = [mark for mark in DECIDING_MARKS.get(verdict, ()) if mark != nearest_case(cases).judged.mark]
    found = []
    for mark in missing:
        marked = sorted((case for case in cases if case.judged.mark == mark), key=lambda case: case.judged.p)
        found += marked[-1:] if mark == "open" else marked[:1]
    return found


def comparisons_tables() -> dict[str, tuple[str, str]]:
    """For each paper its page, and its claims, each with its verdict and the table of its comparisons."""
    found = {}
    for paper, of_paper in itertools.groupby(judge_claims(), lambda judged: judged[0]["paper"]):
        rows = list(of_paper)
        about = f"{paper}: differences behind the verdicts, with their 95 % intervals"
        parts = [
            f"![{about}](figures/{paper.lower()}-claims.svg)",
            *(_describe_claim(*judged) for judged in rows),
        ]
        found[paper] = rows[0][0]["page"], "\n\n".join(parts)
    return found


def papers() -> list[str]:
    """The papers in the order of their claims."""
    return list(dict.fromkeys(claim["paper"] for claim, _, _ in judge_claims()))


def label_of(claim: dict[str, Any], case: Case) -> str:
    """What is compared in a case."""
    return f"{claim['difference']}: {case.label}".replace("minus: ", "minus ")


def _short_row(claim: dict[str, Any], cases: Sequence[Case], verdict: str) -> str:
    name = f"[{claim['claim']}]({_link(claim, cases)})"
    if not cases:
        return table_row([name, claim.get("effect", "–"), claim["found"], *[""] * 5, verdict])
    near = nearest_case(cases)
    # the paper's effect is the claim's, whichever comparison has it
    told = [
        case.reported + f" {case.unit}" * (case.unit != near.unit) for case in (near, *cases) if case.effects
    ]
    effect = told[0] if told else claim.get("effect", "–")
    others = [
        f"<br><small>{_estimate_with_label(case, case.label)}</small>"
        for case in deciding_cases(cases, verdict)
    ]
    form = FORMS.get(claim.get("asks", "each"), "")
    task, counts = "matched" if near.is_matched else "proxy", [_count_mark(cases, mark) for mark in MARKS]
    return table_row(
        [
            name,
            effect,
            _estimate_with_label(near, label_of(claim, near)),
            task,
            near.inside,
            *counts,
            f"**{verdict}**{form}{''.join(others)}",
        ]
    )


def _estimate_with_label(case: Case, label: str) -> str:
    notes = []
    if case.unit == "loss":
        notes.append("lower is better" if "loss" in label.lower() else "loss (lower is better)")
    notes += [f"{case.judged.n} seeds"] * (case.unit != "runs")
    if case.judged.mark == "open" and any(case.diverged) and not case.judged.low <= 0 <= case.judged.high:
        notes.append(
            f"open because the better one diverged in {max(case.diverged)} seed{'s' * (max(case.diverged) > 1)}"
        )
    return f"{case.estimate}<br>{', '.join([label, *notes])}"


def _count_mark(cases: Sequence[Case], mark: str) -> str:
    """Number of comparisons with a mark, and of those that stand after correction."""
    marked = [case for case in cases if case.judged.mark == mark]
    strong = sum(case.is_strong for case in marked)
    return str(len(marked)) + (f" ({strong}†)" if strong else "")


def count_verdicts() -> str:
    """The number of claims that have each verdict, and of those that are judged on the paper's own task."""
    judged = [row for row in judge_claims() if is_counted(row[0])]
    found = [verdict for _, _, verdict in judged]
    others = len(judge_claims()) - len(found)
    phrases = {
        "holds": ("holds", "hold"),
        "holds in part": ("holds in part", "hold in part"),
        "depends": ("depends on the setting", "depend on the setting"),
        "does not hold": ("does not hold", "do not hold"),
        "equivalent": ("is equivalent to no difference", "are equivalent to no difference"),
        "undecided": ("is undecided", "are undecided"),
        "no interval": ("has no interval", "have no interval"),
    }
    counts = [(found.count(verdict), *phrases[verdict]) for verdict in VERDICTS if verdict in found]
    *first, last = (f"**{n}** {singular if n == 1 else plural}" for n, singular, plural in counts)
    matched = sum(bool(cases) and nearest_case(cases).is_matched for _, cases, _ in judged)
    judged_count = sum(bool(cases) for _, cases, _ in judged)
    return (
        f"Of {len(found)} claims of the four papers {', '.join(first)}, and {last}. Of the {judged_count} with an interval, "
        f"{matched} {'has' if matched == 1 else 'have'} the paper's own task in the nearest comparison; the other tasks are "
        "*proxies*, which are smaller or have other data."
        + " One more row of the tables is a question of this page and no claim of a paper."
        * (others == 1)
    )


def is_counted(claim: dict[str, Any]) -> bool:
    """Whether it is a claim of a paper, and not a question that this page adds."""
    return bool(claim.get("counted", True))


def verdicts_table() -> str:
    """Number of claims by paper and verdict, without verdicts that no claim has."""
    judged = [row for row in judge_claims() if is_counted(row[0])]
    verdicts = [verdict for verdict in VERDICTS if any(verdict == found for *_, found in judged)]
    lines = [table_row(["paper", *verdicts]), "| :--- |" + " ---: |" * len(verdicts)]
    for paper in [*papers(), "all"]:
        found = [verdict for claim, _, verdict in judged if paper in (claim["paper"], "all")]
        lines.append(table_row([paper, *(str(found.count(verdict)) for verdict in verdicts)]))
    return "\n".join(lines)


def _describe_claim(claim: dict[str, Any], cases: Sequence[Case], verdict: str) -> str:
    """The claim with its verdict, what the paper and these experiments say of it, and a row for each comparison."""
    said = [("The paper", claim["reported"]), ("Here", claim.get("measured", ""))]
    text = claim["claim"].replace("*", r"\*")
    lines = [f"**{text}** Verdict: **{verdict}**.", ""]
    lines += [f"- {who}: {sentence}" for who, text in said for sentence in split_sentences(text)]
    if cases:
        head = ["comparison", "the paper", "here", "inside", "task", "diverged", "mark"]
        lines += ["", table_row(head), "| :--- | ---: | :--- | :--- | :--- | :--- | :--- |"]
    for case in cases:
        task, lost = "matched" if case.is_matched else "proxy", _format_diverged(case)
        cells = [case.reported, case.estimate, case.inside, task, lost, case.judged.mark]
        lines.append(table_row([label_of(claim, case), *cells]))
    return "\n".join(lines)


def split_sentences(text: str) -> list[str]:
    """Sentences of a text; a capital after a full stop begins one."""
    return [sentence for sentence in re.split(r"(?<=\.) (?=[A-ZÀ-Ωα-ω])", text) if sentence]


def _format_diverged(case: Case) -> str:
    """Seeds in which the method and the other diverged."""
    return f"{case.diverged[0]} / {case.diverged[1]}" if any(case.diverged) else ""


def _link(claim: dict[str, Any], cases: Sequence[Case]) -> str:
    """To the section of the nearest comparison's experiment."""
    if not cases:
        return str(claim["page"])
    nearest = nearest_case(cases).experiment
    page = read_settings()[nearest]["page"]
    above = (RESULTS / page).read_text().split(f"<!-- evidence {nearest} -->")[0]
    title = re.findall(r"^##+ (.*)$", above, flags=re.MULTILINE)[-1]
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    return f"{page}#{anchor}"
