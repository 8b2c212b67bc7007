"""Reports on protected and attacked runs: sentences on the setting, columns of the comparison."""

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
COUNTING = ("trimmed_mean", "krum", "multi_krum")  # rules that rely on a share of hostile replies


def describe_trust(run: RunRecord) -> list[str]:
    """Describe the protection of updates, their rule and the attack in sentences; none by default."""
    section_names = ("compression", "clipping", "privacy", "robust", "attack", "secure")
    compression, clipping, privacy, robust, attack, secure = (
        run.section("run", name) for name in section_names
    )
    sentences = []
    if uplink := compression.get("uplink"):
        feedback = ", with error feedback" if compression.get("error_feedback") else ""
        sentences.append(f"Updates are compressed: {on_one_line(uplink)}{feedback}.")
    if norm := clipping.get("norm"):
        quantile = clipping.get("quantile")
        quantile_text = (
            f" at first; the bound follows the {quantile:g} quantile of their norms" if quantile else ""
        )
        sentences.append(f"Updates are clipped to a norm of {norm:g}{quantile_text}.")
    if privacy.get("kind", "none") != "none":
        sentences.append(_describe_privacy(run, privacy))
    if (rule := robust.get("rule", "mean")) != "mean":
        weights_text = ", weighed by examples" if robust.get("weights") == "examples" else ""
        share_text = (
            f", with at most {format_number(100 * robust['hostile'])} % hostile" if rule in COUNTING else ""
        )
        sentences.append(
            f"The server takes {RULES.get(rule, on_one_line(rule))} of the replies{share_text}{weights_text}."
        )
    if attack.get("kind", "none") != "none":
        sentences.append(_describe_attack(run, attack))
    if secure.get("on"):
        # over a network the protocol sets its own bound
        least_text = (
            "more than two thirds" if run.is_deployed else f"{format_number(100 * secure['threshold'])} %"
        )
        sentences.append(
            f"Sums are secure: of numbers in ±{secure['bound']:g}, quantized to {secure['bits']} bits, the "
            f"server learns the total, if {least_text} of the clients reply."
        )
    return sentences


def _describe_privacy(run: RunRecord, privacy: Mapping[str, Any]) -> str:
    privacy_records = [
        record.server_metrics["privacy"] for record in run.rounds if "privacy" in record.server_metrics
    ]
    numbers = {
        "noise multiplier σ": privacy_records[0]["noise"] if privacy_records else privacy.get("noise"),
        "budget ε": privacy.get("epsilon"),
        "δ": privacy.get("delta"),
    }
    settings = ", ".join(f"{name} = {value:.4g}" for name, value in numbers.items() if value is not None)
    neighbor_text = "in which one client has other data" if is_replacing(run) else "that differ by one client"
    kind, accountant = on_one_line(privacy["kind"]), on_one_line(privacy.get("accountant"))
    scope = f"ε is for federations {neighbor_text} (accountant {accountant})"
    return f"Differential privacy of clients, {kind}: {settings}; {scope}."


def is_replacing(run: RunRecord) -> bool:
    """Whether neighboring federations of a private run differ by other data of a client and not by its absence.

    See :attr:`fedlowrank.trust.privacy.accounting.Sampling.relation`; under local privacy they always do.
    """
    settings = run.section("run")
    trainable_count = len(run.clients) - len(run.measurements.flagged_ids("unseen"))
    participant_count = count_participants(settings.get("participation", 1.0), trainable_count)
    is_fixed = settings.get("sampling") != "poisson" and participant_count < trainable_count
    return run.section("run", "privacy").get("kind") == "local" or is_fixed


def _describe_attack(run: RunRecord, attack: Mapping[str, Any]) -> str:
    kind, hostile_count = attack["kind"], len(run.measurements.flagged_ids("hostile"))
    strength = f", strength {attack['strength']:g}" if attack.get("strength") is not None else ""
    target = f" to class {attack.get('target', 0)}" if kind == "backdoor" else ""
    return (
        f"{hostile_count} of the {len(run.clients)} clients are hostile: {on_one_line(kind).replace('_', ' ')}{target}"
        f"{strength}. No result counts the hostile clients."
    )


def privacy_curve(group: RunGroup) -> pd.DataFrame:
    """Compute ε spent after each round, over seeds; empty if no run is private."""
    return _curve(group, "privacy", "epsilon")


def clipping_curve(group: RunGroup) -> pd.DataFrame:
    """Compute the clipping norm after each round, over seeds; empty if it is fixed."""
    return _curve(group, "clipping", "norm")


def _curve(group: RunGroup, metric: str, name: str) -> pd.DataFrame:
    tables = [run.table.of_rounds(metric) for run in group.runs]
    return curve_over_seeds(table[name] for table in tables if name in table)


def hostile_weight(run: RunStatistics) -> float:
    """Compute the share of the weights of replies that a rule gave to hostile clients, as a mean over rounds, or NaN."""
    weights, hostile_ids = run.table.of_rounds("weight"), run.record.measurements.flagged_ids("hostile")
    if not hostile_ids or weights.empty:
        return math.nan
    hostile_sums = weights[[name for name in weights if int(name) in hostile_ids]].sum(axis=1)
    return float((hostile_sums / weights.sum(axis=1)).mean())


def trust_row(group: RunGroup) -> dict[str, float | None]:
    """Make the columns of the CSV about privacy and attacks; empty for runs without them.

    ``backdoor_success`` is the share of triggered examples that models of honest clients take for the target,
    ``hostile_weight`` that of :func:`hostile_weight`; ``epsilon`` is the ε that was spent.
    """
    numbers = {
        "backdoor_success": [_last(run, "backdoor", "success") for run in group.runs],
        "hostile_weight": [hostile_weight(run) for run in group.runs],
        "epsilon": [_last(run, "privacy", "epsilon") for run in group.runs],
    }
    return {name: interval.mean for name, values in numbers.items() if (interval := estimate(values))}


def _last(run: RunStatistics, metric: str, name: str) -> float:
    """Get the last value of a number that a run reports; NaN if there is none."""
    table = run.table.of_rounds(metric)
    return float(table[name].iloc[-1]) if name in table else math.nan
