"""Every method by the vectorized engine against the sequential one, and what of it goes one client after another.

    python benchmarks/speed/cohort_methods.py [METHOD ...] [--out docs/results/cohort-methods.md]

Five clients of uneven size, four of them in each of three rounds, the settings of each method at their defaults. Differences
are the largest of a number of the server's state, and of the clients' states.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from fedlowrank.core import tree
from fedlowrank.engines import vectorized
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation

ROUNDS = 3


class Remarks(logging.Handler):
    """Collects what the engine says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.said.append(record.getMessage())


def gap(a: Any, b: Any) -> float:
    """The largest difference of two trees of one structure."""
    pairs = zip(tree.tensors(a), tree.tensors(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()), default=0.0)


def compare(name: str) -> str:
    """A line of the table."""
    remarks, logger = Remarks(), logging.getLogger("fedlowrank.engines")
    logger.handlers, logger.propagate = [remarks], False
    logger.setLevel(logging.INFO)
    method = METHODS[name]()
    settings = RunSettings(rounds=ROUNDS, participation=0.8)
    one, many = (
        Run(method, small_federation(method.heterogeneous), settings, engine())
        for engine in (Sequential, Vectorized)
    )
    for _ in range(ROUNDS):
        expected, found = one.step(), many.step()
    counted = all(
        getattr(expected, field) == getattr(found, field)
        for field in ("bytes_up", "bytes_down", "steps", "flops")
    )
    assert expected.measured is not None
    assert found.measured is not None
    scores = [
        a.values == b.values
        for a, b in zip(expected.measured.columns, found.measured.columns, strict=True)
        if a.name == "accuracy"
    ]
    states = max((gap(one.state.clients[i], many.state.clients[i]) for i in one.state.clients), default=0.0)
    alone = "; ".join(dict.fromkeys(said.partition(": ")[2].partition(": ")[2] for said in remarks.said))
    cells = [
        method.title,
        f"{gap(one.state.server, many.state.server):.0e}",
        f"{states:.0e}",
        "yes" if counted else "no",
        "yes" if all(scores) else "no",
        alone.replace("|", "/") or "nothing",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = """# Methods by cohorts

    python benchmarks/speed/cohort_methods.py --out docs/results/cohort-methods.md

Every method by the vectorized engine against the sequential one: five clients of uneven size, four of them in each of three
rounds, the settings of each method at their defaults. *Server* and *clients* are the largest differences of a number in their
states. *Counts* are bytes, steps and FLOPs; *accuracies* those of all series, splits and clients. *One by one* names the
operation without a rule from which on the clients of a cohort go on alone; what was trained before is batched all the same.

| method | server | clients | equal counts | equal accuracies | one by one from |
| :--- | ---: | ---: | :--- | :--- | :--- |
"""


def main() -> None:
    """Compare, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=[*METHODS])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # so few clients would go one by one
    vectorized.MIN_COHORT = 2
    warnings.simplefilter("ignore")
    rows = []
    for name in args.methods:
        rows.append(compare(name))
        print(rows[-1], flush=True)
    if args.out:
        args.out.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
