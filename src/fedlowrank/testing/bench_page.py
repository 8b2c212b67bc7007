"""What ``fedlowrank bench`` shows: tables, and the page ``docs/results/speed.md``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .bench import USER, Defaults, Timing, machine

HEAD = (
    "model",
    "parameters",
    "floor loop, ms a step",
    "arm",
    "CPU time / floor loop",
    "wall time / floor loop",
)


def rows(timings: Sequence[Timing]) -> list[tuple[str, ...]]:
    """One row a model and arm: medians, and quartiles where there are enough rounds."""
    found: list[tuple[str, ...]] = []
    for t in timings:
        step = f"{1e3 * statistics.median(t.floor) / t.steps:.3f}"
        for name, arm in t.arms.items():
            # what a child spends is not this process's
            cpu = "" if name == "processes" else _spread(arm.cpu)
            found.append((t.subject.title, f"{t.parameters:,}", step, name, cpu, _spread(arm.wall)))
    return found


DEFAULTS_HEAD = ("model", "engine", "with default settings / without, CPU time")


def defaults_rows(found: Sequence[Defaults]) -> list[tuple[str, ...]]:
    """One row a model and engine: the median, and the extremes."""
    return [
        (
            d.subject.title,
            d.engine,
            f"{statistics.median(d.ratios):.2f} ({min(d.ratios):.2f} to {max(d.ratios):.2f})",
        )
        for d in found
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; columns of figures, whose heads name a ratio, a count or a time, are aligned to the right."""
    sides = [":---" if name in ("model", "arm", "engine") else "---:" for name in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, sides, *lines])


def page(command: str, title: str, timings: Sequence[Timing], defaults: Sequence[Defaults]) -> str:
    """The page ``docs/results/speed.md``."""
    return f"""# Speed of a round

    {command}

{title}. Medians over rounds with quartiles; all arms take turns in one process on one thread.

{markdown(HEAD, rows(timings))}

- *Floor loop*: as many steps of `torch.optim.SGD` on batches that were made beforehand, one optimizer for all
  clients; no weights are copied or averaged.
- *{USER.capitalize()}*: federated averaging in plain PyTorch: a deep copy of the model and a new optimizer
  for each client, batches by random indices, the mean of the weights.
- *Engines*: whole rounds of `fedlowrank`: sampling, copies, training, counting of bytes and FLOPs, the
  server's mean. What the processes of the engine `processes` spend is not in its parent's CPU time.

## Default settings

Whole runs, 14 times as long, with a run folder, evaluation and checkpoints at their defaults, against the
same rounds without; median and extremes.

{markdown(DEFAULTS_HEAD, defaults_rows(defaults))}

{machine()}

`make bench-peers` adds a comparison with other simulators, where they are installed.
"""


def _spread(values: Sequence[float]) -> str:
    if len(values) < 4:
        return f"{statistics.median(values):.2f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
