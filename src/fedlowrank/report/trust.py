"""What a report says of protected and attacked runs: sentences on the setting, columns of the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..core.io.text import on_one_line
from ..results.records import RunRecord
from ..rounds.participation.participants import count_participants
from .number_formats import format_number
from .statistics.groups import RunGroup
from .statistics.run_statistics import RunStatistics, curve_over_seeds, estimate

RULES = {
    "median": "the median of each coordinate",
    "trimmed_mean": "the trimmed mean of each coordinate",
    "geometric_median": "the geometric median (RFA)",
    "norm_bound": "the mean of updates scaled to at most their median norm",
    "krum": "Krum",
    "multi_krum": "multi-Krum",
}
COUNTING = ("trimmed_mean", "krum", "multi_krum")  # rules that count on a share of hostile replies


def describe_trust(run: RunRecord) -> list[str]:
    """Sentences on protection of updates, their rule and the attack; none by default."""
    tables = ("compression", "clipping", "privacy", "robust", "attack", "secure")
    compression, clipping, privacy, robust, attack, secure = (run.section("run", name) for name in tables)
    parts = []
    if uplink := compression.get("uplink"):
        feedback = ", with error feedback" if compression.get("error_feedback") else ""
        parts.append(f"Updates are compressed: {on_one_line(uplink)}{feedback}.")
    if norm := clipping.get("norm"):
        quantile = clipping.get("quantile")
        follows = f" at first; the bound follows the {quantile:g} quantile of their norms" if quantile else ""
        parts.append(f"Updates are clipped to a norm of {norm:g}{follows}.")
    if privacy.get("kind", "none") != "none":
        parts.append(_describe_privacy(run, privacy))
    if (rule := robust.get("rule", "mean")) != "mean":
        weighed = ", weighed by examples" if robust.get("weights") == "examples" else ""
        share = (
            f", with at most {format_number(100 * robust['hostile'])} % hostile" if rule in COUNTING else ""
        )
        parts.append(f"The server takes {RULES.get(rule, on_one_line(rule))} of the replies{share}{weighed}.")
    if attack.get("kind", "none") != "none":
        parts.append(_describe_attack(run, attack))
    if secure.get("on"):
        parts.append(
            f"Sums are secure: of numbers in ±{secure['bound']:g}, quantized to {secure['bits']} bits, the "
            f"server learns the total, if {format_number(100 * secure['threshold'])} % of the clients reply."
        )
    return parts


def _describe_privacy(run: RunRecord, privacy: Mapping[str, Any]) -> str:
    recorded = [
        record.server_metrics["privacy"] for record in run.rounds if "privacy" in record.server_metrics
    ]
    numbers = {
        "noise multiplier σ": recorded[0]["noise"] if recorded else privacy.get("noise"),
        "budget ε": privacy.get("epsilon"),
        "δ": privacy.get("delta"),
    }
    settings = ", ".join(f"{name} = {value:.4g}" for name, value in numbers.items() if value is not None)
    of = "in which one client has other data" if is_replacing(run) else "that differ by one client"
    kind, accountant = on_one_line(privacy["kind"]), on_one_line(privacy.get("accountant"))
    scope = f"ε is for federations {of} (accountant {accountant})"
    return f"Differential privacy of clients, {kind}: {settings}; {scope}."


def is_replacing(run: RunRecord) -> bool:
    """Whether neighboring federations of a private run differ by other data of a client, not by its absence.

    See :attr:`fedlowrank.trust.privacy.accounting.Sampling.relation`; under local privacy it is always so.
    """
    settings = run.section("run")
    seen = len(run.clients) - len(run.measurements.flagged("unseen"))
    drawn = count_participants(settings.get("participation", 1.0), seen)
    is_fixed = settings.get("sampling") != "poisson" and drawn < seen
    return run.section("run", "privacy").get("kind") == "local" or is_fixed


def _describe_attack(run: RunRecord, attack: Mapping[str, Any]) -> str:
    kind, hostile = attack["kind"], len(run.measurements.flagged("hostile"))
    strength = f", strength {attack['strength']:g}" if attack.get("strength") is not None else ""
    target = f" to class {attack.get('target', 0)}" if kind == "backdoor" else ""
    return (
        f"{hostile} of the {len(run.clients)} clients are hostile: {on_one_line(kind).replace('_', ' ')}{target}"
        f"{strength}. No result counts the hostile clients."
    )


def privacy_curve(group: RunGroup) -> pd.DataFrame:
    """ε spent after each round, over seeds; empty where nothing is private."""
    return _curve(group, "privacy", "epsilon")


def clipping_curve(group: RunGroup) -> pd.DataFrame:
    """The clipping norm after each round, over seeds; empty where it is fixed."""
    return _curve(group, "clipping", "norm")


def _curve(group: RunGroup, kind: str, name: str) -> pd.DataFrame:
    tables = [run.table.of_rounds(kind) for run in group.runs]
    return curve_over_seeds(table[name] for table in tables if name in table)


def hostile_weight(run: RunStatistics) -> float:
    """Share of the weights of replies that a rule gave to hostile clients, mean over rounds, or NaN."""
    weights, hostile = run.table.of_rounds("weight"), run.record.measurements.flagged("hostile")
    if not hostile or weights.empty:
        return math.nan
    of_hostile = weights[[name for name in weights if int(name) in hostile]].sum(axis=1)
    return float((of_hostile / weights.sum(axis=1)).mean())


def trust_row(group: RunGroup) -> dict[str, float | None]:
    """Columns of the CSV about privacy and attacks; empty for runs without.

    ``backdoor_success`` is the share of triggered examples that models of honest clients take for the target,
    ``hostile_weight`` that of :func:`hostile_weight`; ``epsilon`` the ε that was spent.
    """
    numbers = {
        "backdoor_success": [_last(run, "backdoor", "success") for run in group.runs],
        "hostile_weight": [hostile_weight(run) for run in group.runs],
        "epsilon": [_last(run, "privacy", "epsilon") for run in group.runs],
    }
    return {name: interval.mean for name, values in numbers.items() if (interval := estimate(values))}


def _last(run: RunStatistics, kind: str, name: str) -> float:
    """The last value of what a run reports; NaN if there is none."""
    table = run.table.of_rounds(kind)
    return float(table[name].iloc[-1]) if name in table else math.nan
