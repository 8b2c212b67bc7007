"""What a run costs beside training: start-up, evaluation, other optimizers in a cohort, a report of many rounds.

    python benchmarks/speed/costs_beside_training.py [--page docs/results/round-costs.md]

CPU time of this process on one thread, medians over repetitions with extremes; commands are processes of their own. A
bare forward pass runs the module over all held-out examples in chunks of 512. "Before" are the figures of the first
measurement of each, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedlowrank import METHODS, SGD, AdamW, RunSettings, simulate
from fedlowrank.core.learning.optimizer import Schedule
from fedlowrank.engines import ENGINES
from fedlowrank.rounds.run import Run
from fedlowrank.storage.run_files import seal_run

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.round_timing import SUBJECTS, bench_federation

BEFORE = {
    "fedlowrank --help": "4.2 to 5.2 s",
    "fedlowrank list": "4.1 s",
    "import fedlowrank, beside torch": "2 s",
    "set-up of 10,000 clients, data included": "2.35 s",
    "evaluation of 100 clients": "33 ms",
    "evaluation of 1,000 clients": "158 ms",
    "evaluation of 10,000 clients": "1,473 ms",
    "SGD with momentum, vectorized / plain SGD": "1.94 to 2.26 of a like loop",
    "report of 20 runs of 1,000 rounds": "25.6 s",
}


def timed(work: Callable[[], Any], times: int = 7) -> list[float]:
    """CPU seconds of each repetition, after one that is not timed."""
    work()
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return found


def of_process(*command: str, times: int = 5) -> list[float]:
    """CPU seconds of a command."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def start_up() -> dict[str, list[float]]:
    program = str(Path(sys.executable).with_name("fedlowrank"))
    torch_alone = statistics.median(of_process(sys.executable, "-c", "import torch"))
    whole = of_process(sys.executable, "-c", "import torch, fedlowrank")
    return {
        "fedlowrank --help": of_process(program, "--help"),
        "fedlowrank list": of_process(program, "list"),
        "import fedlowrank, beside torch": [max(0.0, t - torch_alone) for t in whole],
    }


def evaluations() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    subject = SUBJECTS["mlp25k"]
    for clients in (100, 1000, 10_000):
        start = time.process_time()
        made = bench_federation(subject, clients, examples=4, held_out=6)
        settings = RunSettings(rounds=1, participation=10 / clients, evaluate_clients=clients)
        run = Run(METHODS["fedavg"](), made, settings, ENGINES["sequential"]())
        if clients == 10_000:
            found["set-up of 10,000 clients, data included"] = [time.process_time() - start]
        name = f"evaluation of {clients:,} clients"
        found[name] = timed(run.evaluate)
        x = torch.cat([e.inputs for c in made.clients for e in (c.val, c.test)])
        module = subject.plain()

        def forward(x: torch.Tensor = x, module: torch.nn.Module = module) -> None:
            with torch.inference_mode():
                for part in x.split(512):
                    module(part)

        bare = statistics.median(timed(forward))
        found[f"{name} / bare forward pass"] = [t / bare for t in found[name]]
    return found


def optimizers() -> dict[str, list[float]]:
    """Rounds of the vectorized engine by optimizer, each over the plain one in the same turn."""
    kinds = {
        "SGD": SGD(lr=0.01),
        "SGD with momentum": SGD(lr=0.01, momentum=0.9),
        "AdamW": AdamW(lr=0.001),
        "clipped SGD": SGD(lr=0.01, clip=1.0),
        "scheduled SGD": SGD(lr=0.01, schedule=Schedule("exponential", factor=0.99)),
    }
    runs = {}
    for name, optimizer in kinds.items():
        method = METHODS["fedavg"](batch_size=32, optimizer=optimizer)
        settings = RunSettings(rounds=40, participation=0.1, evaluate_every=10**6)
        runs[name] = Run(method, bench_federation(SUBJECTS["mlp25k"]), settings, ENGINES["vectorized"]())
        runs[name].step()
    ratios: dict[str, list[float]] = {name: [] for name in kinds if name != "SGD"}
    for _ in range(15):
        took = {}
        for name, run in runs.items():
            start = time.process_time()
            run.step()
            took[name] = time.process_time() - start
        for name, row in ratios.items():
            row.append(took[name] / took["SGD"])
    return {f"{name}, vectorized / plain SGD": row for name, row in ratios.items()}


def report() -> dict[str, list[float]]:
    """A report of 20 folders whose records are copies of one run of 1,000 rounds."""
    program = str(Path(sys.executable).with_name("fedlowrank"))
    with tempfile.TemporaryDirectory() as base:
        first = Path(base) / "run-0"
        made = bench_federation(SUBJECTS["mlp25k"], 20, examples=4, held_out=4)
        simulate(
            "fedavg", made, rounds=1000, folder=first, participation=0.1, evaluate_every=1, representations=0
        )
        for i in range(1, 20):
            other = Path(base) / f"run-{i}"
            other.mkdir()
            for path in first.iterdir():
                if path.is_file() and path.name != "lock":
                    (other / path.name).write_bytes(path.read_bytes())
            config = json.loads((other / "run.json").read_text())
            config["run"]["seed"] = i
            (other / "run.json").write_text(json.dumps(config))
            seal_run(other)
        took = of_process(program, "report", base, "-o", str(Path(base) / "report.html"), times=3)
    return {"report of 20 runs of 1,000 rounds": took}


def shown(name: str, values: list[float]) -> str:
    ratio = "/" in name
    scale, unit = (1.0, "") if ratio else (1000.0, " ms") if max(values) < 1 else (1.0, " s")
    low, middle, high = (scale * v for v in (min(values), statistics.median(values), max(values)))
    digits = 2 if ratio or unit == " s" else 0
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {**start_up(), **evaluations(), **optimizers(), **report()}
    rows = [f"| {name} | {BEFORE.get(name, '')} | {shown(name, values)} |" for name, values in found.items()]
    text = "\n".join(["| what | before | CPU time now |", "| :--- | ---: | ---: |", *rows])
    print(text)
    if arguments.page:
        usage = "    python benchmarks/speed/costs_beside_training.py --page docs/results/round-costs.md"
        load = f"Load of the machine at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; torch {torch.__version__}."
        about = "\n".join((__doc__ or "").strip().splitlines()[4:])
        arguments.page.write_text(
            f"# What a run costs beside training\n\n{usage}\n\n{about}\n\n{text}\n\n{load}\n"
        )


if __name__ == "__main__":
    main()
