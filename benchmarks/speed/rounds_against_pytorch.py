"""How long a federated round takes here, against the same SGD steps in plain PyTorch.

    python benchmarks/speed/rounds_against_pytorch.py [--models mlp25k cnn] [--engines vectorized] [-o docs/results/speed.md]

Prints the page of results, and writes it to a file with ``-o``. ``benchmarks/helpers/round_timing.py`` says what is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fedlowrank.engines import ENGINES

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.round_timing import SUBJECTS, USER, Defaults, Timing, machine, time_defaults, time_rounds

LONGER = 14
"""Times as many rounds as are timed of an engine: the interval of evaluations follows the rounds of a run."""

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

Whole runs, {LONGER} times as long, with a run folder, evaluation and checkpoints at their defaults, against the
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


def main(argv: Sequence[str] | None = None) -> None:
    """Time rounds, and print the page."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=["sequential", "vectorized"])
    options.add_argument("--method", choices=["fedavg", "fedprox", "scaffold", "feddyn"], default="fedavg")
    options.add_argument("--rounds", type=int, default=15, help="timed rounds of each model")
    options.add_argument("-o", "--out", type=Path, help="write the page to this file")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error(f"--rounds must be >= 1; it is {given.rounds}")
    torch.set_num_threads(1)
    found, defaults = [], []
    for model in given.models:
        found.append(time_rounds(model, given.engines, given.rounds, given.method))
        if "sequential" in given.engines:
            defaults.append(time_defaults(model, "sequential", LONGER * given.rounds, given.method))
    command = (
        f"python benchmarks/speed/rounds_against_pytorch.py --method {given.method} --models {' '.join(given.models)} "
        f"--engines {' '.join(given.engines)} --rounds {given.rounds}"
    )
    if given.out is not None:
        command += f" -o {given.out}"
    title = (
        f"{given.method}, {given.rounds} rounds of 10 of 100 clients; below 1 is faster than the floor loop"
    )
    text = page(command, title, found, defaults)
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
