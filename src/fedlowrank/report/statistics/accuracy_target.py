"""Chooses the accuracy up to which costs are counted, and names its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.errors import ConfigError
from ...results.ranking import ROUNDING
from ...results.records import RunRecord
from .measures import TEST_ACCURACY, TEST_LOSS
from .run_statistics import RunStatistics


class Target(NamedTuple):
    """The accuracy up to which costs are counted (None if there is none), with its source."""

    value: float | None
    source: str


def choose_target(settings: Sequence[Sequence[RunStatistics]], target: float | None = None) -> Target:
    """Choose the target of one experiment: the given one, else the runs' own, else one that separates methods.

    An accuracy that a method reaches without any message (Standalone) costs nothing. If there is such a method, the
    target is the largest whole percent above its best accuracy that all seeds of another method reached. Otherwise it
    is the largest whole percent that all runs reached or, if that is uninformative, that all seeds of one method
    reached. A target is uninformative if it does not exceed the chance level (:func:`chance_level`) or if every run
    reached it by its first evaluated round.

    Args:
        settings: finished and diverged runs of each method and setting, one per seed.
        target: accuracy in (0, 1], or None for a default.

    Raises:
        ConfigError: if the given target is not in (0, 1].
    """
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"the target accuracy is a fraction in (0, 1], not {target:g}")
    runs = [run for setting_runs in settings for run in setting_runs]
    measures = {run.measure for run in runs}
    if TEST_LOSS in measures and TEST_ACCURACY not in measures:
        return Target(None, "no target: these runs have no accuracy")
    if target is not None:
        return Target(target, "as asked for")
    own_targets = {run.own_target for run in runs}
    if len(own_targets) == 1 and None not in own_targets:
        return Target(own_targets.pop(), "the target in the configuration of the runs")
    silent_runs = [run for run in runs if run.sends_nothing and _best_mean(run) is not None]
    sending_settings = [
        setting_runs for setting_runs in settings if not any(run.sends_nothing for run in setting_runs)
    ]
    best_percent = max(map(_whole_percent, sending_settings), default=0)
    if silent_runs:
        plateau = max(_best_mean(run) or 0.0 for run in silent_runs)
        baseline_text = f"{silent_runs[0].record.method_title} reaches without communication"
        if best_percent / 100 <= plateau + ROUNDING:
            return Target(None, f"no method exceeds what {baseline_text}")
        source = "the highest whole percent that all seeds of another method reached, above the "
        choices = [(best_percent, f"{source}{100 * plateau:.1f} % that {baseline_text}")]
    else:
        choices = [
            (_whole_percent(runs), "the highest whole percent that all runs reached"),
            (best_percent, "the highest whole percent that all seeds of one method reached"),
        ]
    chance, reason = max((chance_level(run.record) for run in runs), default=0.0), "no target"
    for percent, source in choices:
        if percent / 100 <= chance + ROUNDING:
            reason = f"no method exceeds the {100 * chance:.1f} % of a constant answer" if chance else reason
        elif all(_reaches_at_once(run, percent / 100) for run in runs):
            reason = "all runs reach what they have in common by their first evaluation"
        else:
            return Target(percent / 100, source)
    return Target(None, reason)


def chance_level(run: RunRecord) -> float:
    """Compute the mean accuracy over clients of the best answer without input; 0 if classes are not known.

    It is the larger accuracy of a uniform guess, 1 / classes, and of the one class that is right most often.
    """
    if run.predicts_tokens or not run.config.get("classes"):
        return 0.0
    guess = 1 / len(run.config["classes"])
    counted_positions = run.measurements.select_clients("counted", len(run.clients))
    rows = [(run.clients[i].get("classes") or {}).get("test") for i in counted_positions]
    shares = [np.array(counts) / sum(counts) for counts in rows if counts and sum(counts)]
    if len({len(class_shares) for class_shares in shares}) != 1:
        return guess
    return max(guess, float(np.mean(shares, axis=0).max()))


def _reaches_at_once(run: RunStatistics, target: float) -> bool:
    """Whether a run reaches the target by its first evaluation after training; True for a run without evaluations."""
    means = run.curve(run.headline, TEST_ACCURACY)["mean"]
    early_means = means[means.index <= next((t for t in means.index if t > 0), 0)]
    return means.empty or bool((early_means >= target - ROUNDING).any())


def _best_mean(run: RunStatistics) -> float | None:
    """Compute the largest mean accuracy over rounds; None if the run was never evaluated."""
    means = run.curve(run.headline, TEST_ACCURACY)["mean"]
    return float(means.max()) if len(means) else None


def _whole_percent(runs: Sequence[RunStatistics]) -> int:
    """Find the highest whole percent that all evaluated runs reached; 0 if there is none, or if a run diverged."""
    if any(run.state == "diverged" for run in runs):
        return 0
    best_means = [best for run in runs if (best := _best_mean(run)) is not None]
    return math.floor(100 * min(best_means, default=0) + 1e-9)
