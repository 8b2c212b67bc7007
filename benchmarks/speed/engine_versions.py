"""CPU time of rounds and evaluations by two versions of the package, alternating in one run.

    python benchmarks/speed/engine_versions.py BEFORE [AFTER] [--repeats 3] [--cases NAME,NAME] [--out docs/results/cohorts.md]

BEFORE and AFTER are source trees (``git worktree add FOLDER COMMIT``); AFTER is this one by default. Each measurement is a
process of its own with one thread, which runs one case by one version: three rounds to get ready, then ``ROUNDS`` rounds and
evaluations, of which it reports the median. Versions alternate, so that a change of the machine's speed meets both. Beside
the vectorized engine, loops written by hand for FedAvg and FLoRAL (``rounds_by_hand.py``) give the floor: batched matrix
products of all clients, with the same number of steps and examples and with the same draws, and nothing of what a simulator
does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 15
"""Rounds whose median is reported."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: method, its settings, the problem
    "60 clients: Standalone": ("standalone", {}, {}),
    "60 clients: FedAvg": ("fedavg", {}, {}),
    "60 clients: SCAFFOLD": ("scaffold", {}, {}),
    "60 clients: IFCA": ("ifca", {"clusters": 4}, {}),
    "60 clients: FLoRAL": ("floral", {"clusters": 4, "rank": 0.1}, {}),
    "60 clients, 30 a round: FLoRAL": (
        "floral",
        {"clusters": 4, "rank": 0.1},
        {"participation": 0.5},
    ),
    "60 clients: pFedLoRA": ("pfedlora", {}, {}),
    "60 clients: FedSLR": ("fedslr", {}, {}),
    "60 clients: FedIT": ("fedit", {"training.rank": 4}, {}),
    "60 clients: FedHL": ("fedhl", {"training.rank": 4}, {}),
    "10 clients of 5 ranks: HetLoRA": ("hetlora", {}, {"clients": 10, "ranks": [1, 2, 4, 8, 16]}),
    "100 clients of 20: FedAvg": ("fedavg", {}, {"clients": 100, "examples": 20, "width": 784, "hidden": 32}),
    "100 clients of 20: SCAFFOLD": (
        "scaffold",
        {},
        {"clients": 100, "examples": 20, "width": 784, "hidden": 32},
    ),
    "1,000 clients of 20, 100 a round: FedAvg": (
        "fedavg",
        {},
        {"clients": 1000, "examples": 20, "width": 784, "hidden": 32, "participation": 0.1},
    ),
    "1,000 clients of 20, 100 a round: SCAFFOLD": (
        "scaffold",
        {},
        {"clients": 1000, "examples": 20, "width": 784, "hidden": 32, "participation": 0.1},
    ),
}

BY_HAND = [
    case
    for case, (name, _, problem) in CASES.items()
    if name in ("standalone", "fedavg") or (name == "floral" and not problem)
]
"""Cases with a loop written by hand (:mod:`rounds_by_hand`); Standalone's is that of FedAvg."""


def federation(clients: int, examples: int, width: int, hidden: int, ranks: list[int] | None) -> Any:
    """Clients with random examples of ten classes and a perceptron, or with the handwritten digits by themselves."""
    import dataclasses

    import numpy as np
    import torch

    from fedlowrank import Federation

    g = np.random.default_rng(0)
    sizes = g.integers(examples - 2, examples + 3, clients)
    data = [(g.normal(size=(n, width)).astype(np.float32), g.integers(0, 10, n)) for n in sizes]
    model = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))
    made = Federation.from_arrays(data, model, head="2")
    if ranks is not None:
        infos = [dataclasses.replace(i, rank=ranks[i.id % len(ranks)]) for i in made.infos]
        made = dataclasses.replace(made, infos=infos)
    return made


def measure(case: str) -> dict[str, float]:
    """Milliseconds of CPU of a round and of an evaluation by the version that is imported."""
    import dataclasses

    import torch

    torch.set_num_threads(1)
    from fedlowrank.engines.vectorized import Vectorized
    from fedlowrank.methods import METHODS
    from fedlowrank.rounds.run import Run
    from fedlowrank.rounds.run_settings import RunSettings

    name, options, problem = CASES[case]
    on = federation(
        problem.get("clients", 60),
        problem.get("examples", 21),
        problem.get("width", 64),
        problem.get("hidden", 64),
        problem.get("ranks"),
    )
    method = METHODS[name](**{k: v for k, v in options.items() if "." not in k}, batch_size=32, epochs=5)
    for path, value in options.items():
        if "." in path:
            field, inner = path.split(".")
            # an older version calls it tuning
            field = field if hasattr(method, field) else "tuning"
            method = dataclasses.replace(
                method, **{field: dataclasses.replace(getattr(method, field), **{inner: value})}
            )
    settings = RunSettings(
        rounds=10_000, evaluate_every=10_000, participation=problem.get("participation", 1.0)
    )
    run = Run(method, on, settings, Vectorized())
    for _ in range(3):
        run.step()
    # an older version calls it evaluation
    evaluate = getattr(run, "evaluate", None) or run.evaluation  # type: ignore[attr-defined]
    return {"round": median(run.step), "evaluation": median(evaluate)}


def median(work: Callable[[], object]) -> float:
    """Milliseconds of CPU, the median of some calls."""
    work()
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def time_by_hand(case: str) -> dict[str, float]:
    """Milliseconds of CPU of a round by hand."""
    import numpy as np
    import torch
    from rounds_by_hand import ClientArrays, make_fedavg_round, make_floral_round

    from fedlowrank.core.key import Key

    torch.set_num_threads(1)
    name, options, problem = CASES[case]
    clients, width, hidden = (problem.get(k, d) for k, d in (("clients", 60), ("width", 64), ("hidden", 64)))
    # a client of the federation keeps a part of its examples for validation and test
    made = federation(clients, problem.get("examples", 21), width, hidden, None)
    examples = max(len(data.train) for data in made.clients)
    g = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.tensor(scale * g.normal(size=shape), dtype=torch.float32)

    arrays = ClientArrays(
        draw(clients, examples, width, scale=1.0),
        torch.tensor(g.integers(0, 10, (clients, examples))),
        Key((0,)),
        round(clients * problem.get("participation", 1.0)),
    )
    shapes = [(hidden, width), (10, hidden)]
    model = [t for rows, columns in shapes for t in (draw(rows, columns), draw(rows))]
    if name != "floral":
        return {"round": median(make_fedavg_round(arrays, model))}
    adaptors, clusters = list[torch.Tensor](), options["clusters"]
    for rows, columns in shapes:
        rank = max(1, int(options["rank"] * rows * columns / (rows + columns)))
        adaptors += [draw(clusters, rows, rank), draw(clusters, columns, rank), draw(clusters, rows)]
    return {"round": median(make_floral_round(arrays, model, adaptors))}


HEAD = """# Rounds and evaluations by cohorts

    git worktree add BEFORE {before}
    python benchmarks/speed/engine_versions.py BEFORE --out docs/results/cohorts.md

Milliseconds of CPU of a round and of an evaluation by the vectorized engine, of two versions: `{before}` (a coroutine a
client, whose requests to train are batched) and `{after}` (one call of the method for a cohort). One thread; {machine}. Each
number is the median of {repeats} processes, which report the median of {rounds} rounds; versions alternate. The hand-written
loops (`benchmarks/speed/rounds_by_hand.py`; Standalone's is that of FedAvg) make the same steps by batched matrix products,
with the same draws (a generator for each client and round) and as many examples as the largest client trains on, and keep no
records, bytes, states or losses. Examples are random: 21 a client with 64 features (the shape of the handwritten digits)
where nothing else is said, 784 features in the last four rows; a tenth of them is kept for validation and a tenth for the
test; five epochs, batches of 32.

| case | round before | after | ratio | evaluation before | after | ratio | round by hand | after / by hand |
| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    """Measure in turn, and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).parents[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(time_by_hand(args.child) if args.by_hand else measure(args.child)))
        return
    if args.before is None:
        parser.error("say which source tree is the earlier version")
    chosen = [c for c in CASES if not args.cases or any(part in c for part in args.cases.split(","))]
    rows = []
    for case in chosen:
        found: dict[str, list[dict[str, float]]] = {"before": [], "after": [], "by hand": []}
        for _ in range(args.repeats):
            for arm, folder in (("before", args.before), ("after", args.after)):
                found[arm].append(call(folder, case))
            if case in BY_HAND:
                found["by hand"].append(call(args.after, case, "--by-hand"))
        rows.append(row(case, found))
        print(rows[-1], flush=True)
    if args.out:
        commits = [
            subprocess.check_output(
                ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], text=True
            ).strip()
            for folder in (args.before, args.after)
        ]
        machine = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
        head = HEAD.format(
            before=commits[0], after=commits[1], machine=machine, repeats=args.repeats, rounds=ROUNDS
        )
        args.out.write_text(head + "\n".join(rows) + "\n")


def call(folder: Path, case: str, *more: str) -> dict[str, float]:
    """The figures of one process."""
    path = os.pathsep.join([str(folder / "src"), os.environ.get("PYTHONPATH", "")])
    found: dict[str, float] = json.loads(
        subprocess.check_output(
            [sys.executable, "-W", "ignore", __file__, "--child", case, *more],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        ).splitlines()[-1]
    )
    return found


def row(case: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A line of the table."""
    cells = [case]
    for what in ("round", "evaluation"):
        before, after = (statistics.median(one[what] for one in found[arm]) for arm in ("before", "after"))
        cells += [f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}"]
    if found["by hand"]:
        by_hand = statistics.median(one["round"] for one in found["by hand"])
        mine = statistics.median(one["round"] for one in found["after"])
        cells += [f"{by_hand:.1f}", f"{mine / by_hand:.2f}"]
    else:
        cells += ["", ""]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
