"""A federated round here and in other simulators: the same model, examples, order, clients, seeds; final weights compared.

    pip install pfl "flwr[simulation]"           # and FedJAX in an environment of its own, with jax 0.4.25 and numpy 1.26
    python benchmarks/peers/round_against_simulators.py [--rows MODEL:CLIENTSxEXAMPLES/SAMPLE:BATCH,...]
        [--arms bare,sequential,vectorized,...]
        [--rounds 30] [--jax-python PATH] [--page docs/results/speed.md]

Simulators that are not installed are left out. With ``--page`` the table becomes the last section of that page, which
``benchmarks/speed/rounds_against_pytorch.py`` has written: ``make bench bench-peers``.

Every arm runs in a process of its own, on one thread. They take turns round by round, in an order that rotates, and a ratio is
that of an arm's CPU time to the plain loop's in the same turn; shown are medians with quartiles. Other simulators get their
examples already in the order in which a client sees them, and evaluate nothing. Flower runs its clients in processes of Ray,
whose CPU time is counted with its own. Memory is the peak of the arm's process (of Flower: of the server's alone) less what it
has once torch or JAX is imported and the examples are read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.process_memory import measure_peak, measure_resident
from helpers.simulator_arms import ARMS, TITLES
from helpers.simulator_task import WARM, Clock, Plan, Problem, make_plan, next_turn


def run_arm(arm: str, name: str, folder: Path) -> None:
    """In a process of its own: run, and leave figures and weights in the folder."""
    warnings.simplefilter("ignore")
    if arm == "fedjax":
        pass
    else:
        import torch

        torch.set_num_threads(1)
    plan: Plan = dict(np.load(folder / "plan.npz"))
    before, clock = measure_resident(), Clock(processes=arm == "flower")
    found = ARMS[arm](name, plan, clock)
    np.savez(folder / f"{arm}.npz", *found)
    (folder / f"{arm}.json").write_text(json.dumps({"memory": measure_peak() - before}))


class Runner:
    """An arm in a process of its own, which waits for its turn before every round.

    Args:
        arm: which.
        name: of the model.
        folder: with the plan.
        python: interpreter.
    """

    def __init__(self, arm: str, name: str, folder: Path, python: str) -> None:
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
        one["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        command = [
            python,
            str(Path(__file__).resolve()),
            "--run",
            arm,
            "--rows",
            name,
            "--folder",
            str(folder),
        ]
        self.arm, self._errors = arm, (folder / f"{arm}.err").open("w+")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env={**os.environ, **one}, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def round(self) -> dict[str, float]:
        """What the next round took."""
        return next_turn(self._process, self._errors, self.arm)

    def close(self) -> None:
        """Wait until it has left its weights."""
        self._process.communicate()


def difference(folder: Path, arm: str) -> float:
    """Largest difference of a final weight from the plain loop's, as a share of the largest weight."""
    a, b = (list(np.load(folder / f"{n}.npz").values()) for n in ("bare", arm))
    apart = max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))
    return apart / max(float(np.abs(x).max()) for x in a)


def compare(name: str, problem: Problem, rounds: int, arms: Sequence[str], jax_python: str) -> list[str]:
    """Rows of a table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.savez(folder / "plan.npz", **make_plan(name, problem, rounds + WARM))  # type: ignore[arg-type]
        # which has networks of its own, and not this one
        # and Flower's simulation has ten nodes here
        arms = [
            a for a in arms if (a, name) != ("fedjax", "lora") and (a != "flower" or problem.sample == 10)
        ]
        runners = [Runner(a, name, folder, jax_python if a == "fedjax" else sys.executable) for a in arms]
        turns: list[dict[str, dict[str, float]]] = []
        for t in range(rounds + WARM):
            order = [*runners[t % len(runners) :], *runners[: t % len(runners)]]
            turns.append({r.arm: r.round() for r in order})
        for runner in runners:
            runner.close()
        rows, counted = [], turns[WARM:]
        for arm in arms:
            cpu, wall = (1e3 * statistics.median(t[arm][kind] for t in counted) for kind in ("cpu", "wall"))
            low, middle, high = statistics.quantiles([t[arm]["cpu"] / t["bare"]["cpu"] for t in counted], n=4)
            beside = (
                statistics.median(t[arm]["cpu"] / t["vectorized"]["cpu"] for t in counted)
                if "vectorized" in arms
                else 1.0
            )
            memory = json.loads((folder / f"{arm}.json").read_text())["memory"]
            cells = [
                name,
                f"{problem.clients} × {problem.examples}, {problem.sample}",
                TITLES[arm],
                f"{cpu:.1f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{beside:.2f}",
            ]
            cells += [f"{wall:.1f}", f"{memory:.0f}", f"{difference(folder, arm):.0e}"]
            rows.append("| " + " | ".join(cells) + " |")
            print(rows[-1], flush=True)
        return rows


MODULES = {"pfl": ["pfl"], "flower": ["flwr", "ray"], "fedjax": ["fedjax"]}
"""What an arm needs."""


def is_installed(arm: str, jax_python: str) -> bool:
    """Whether the arm can run here."""
    needed, python = MODULES.get(arm, []), jax_python if arm == "fedjax" else sys.executable
    look = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    return not needed or subprocess.run([python, "-c", look, *needed], check=False).returncode == 0


SECTION = "## Other simulators"

ABOUT = """\
Federated averaging, random examples, one epoch, plain SGD, batches of 32 of 64 examples, 20 of 200 and 10 of 20, {rounds} rounds
after {warm} that are not counted: the same model, initial weights, examples in the same order, clients of each round. Every arm
runs in a process of its own on one thread (Flower's clients in processes of Ray); they take turns round by round. The plain
PyTorch loop loads weights, makes an optimizer for each client, and averages. *CPU / plain loop* is the median with quartiles
of the ratio in the same turn. *Weights differ by*: the largest difference of a final weight from the plain loop's, as a
share of the largest weight. Memory is a process's peak above torch (or JAX) and the examples.

| simulator | settings at their defaults | switched off |
| :--- | :--- | :--- |
| fedlowrank | checks, counts of bytes and FLOPs | evaluation; no run folder |
| pfl | its own loop and backend | evaluation; no callbacks but the clock |
| Flower | its simulation on Ray, one CPU a client | no strategy: messages over `Grid`, a mean with numpy |
| FedJAX | compiled for one client after another | shuffling, as all arms get their order |
"""

ROWS = (
    "mlp25k:10x200/10:20,mlp25k:100x20/10:10,mlp25k:100x20/100:10,mlp25k:1000x20/100:10,mlp25k:100x64/10:32,"
    "mlp99k:100x64/10:32,mlp200k:100x64/10:32,cnn:100x64/10:32,lora:100x64/10:32"
)

HEAD = [
    "| model | clients × examples, a round | simulator | CPU ms a round | CPU / plain loop | CPU / vectorized | wall ms "
    "| memory, MiB | weights differ by |",
    "| :--- | ---: | :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=ROWS, help="MODEL:CLIENTSxEXAMPLES/SAMPLE:BATCH, ...")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jax-python", default=sys.executable)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_arm(args.run, args.rows, args.folder)
        return
    from helpers.round_timing import machine

    arms = [arm for arm in args.arms.split(",") if is_installed(arm, args.jax_python)]
    print("\n".join(HEAD), flush=True)
    rows = []
    for one in args.rows.split(","):
        name, problem = one.split(":", 1)
        rows += compare(name, Problem.parse(problem), args.rounds, arms, args.jax_python)
    if args.page:
        before = args.page.read_text().split(SECTION)[0].rstrip() if args.page.exists() else ""
        text = ABOUT.format(rounds=args.rounds, warm=WARM)
        args.page.write_text("\n".join([before, "", SECTION, "", text, *HEAD, *rows, "", machine(), ""]))


if __name__ == "__main__":
    main()
