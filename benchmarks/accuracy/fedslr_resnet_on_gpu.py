"""FedSLR with the paper's ResNet18 on one GPU: accuracy and bytes of the same runs, as far as they come in some minutes.

    python benchmarks/accuracy/fedslr_resnet_on_gpu.py run fedslr 0 --lam 1e-3 --seconds 280 -o FOLDER    # one method and seed
    python benchmarks/accuracy/fedslr_resnet_on_gpu.py table FOLDER                                       # of all in the folder

The settings are the paper's (``experiments/fedslr/table1-cifar10-noniid.toml``), with 20,000 images, a fifth for each client. A
prox takes λ η_g from every singular value in every round, so in fewer rounds than the paper's 1,000 a larger λ does what its
1e-4 does. A run writes a line for each evaluated round: round, accuracy by series, bytes of all rounds so far, ranks. The table
compares the runs at the last round that all of them reached. On an H200 a round of FedSLR takes 5 s and one of FedAvg 2.7 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines import ENGINES
from fedlowrank.results.measurements import mean_over_clients
from fedlowrank.rounds.run import Run

FILE = Path(__file__).parents[2] / "experiments/fedslr/table1-cifar10-noniid.toml"
CHANGES = [
    *("data.examples=20000", "run.engine=vectorized", "run.device=cuda"),
    *("run.rounds=150", "run.evaluate_every=10"),
]


def run(method: str, seed: int, lam: str, limit: float, folder: Path, changes: list[str]) -> None:
    """Train until the time is up, and write a line for each evaluated round."""
    start = time.perf_counter()
    penalty = [f"methods.fedslr.lam={lam}"] if lam else []
    experiment = ExperimentConfig.read(FILE, [*CHANGES, *penalty, f"run.seed={seed}", *changes])
    title = experiment.method_title(method) + (f", λ = {lam}" if lam else "")
    settings = experiment.run
    made = Run(experiment.build_method(method), experiment.federation(), settings, ENGINES[settings.engine]())
    down = up = 0
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{method}{lam}-s{seed}.jsonl").open("w") as file:
        record = made.record_initial_models()
        while True:
            down, up = down + record.bytes_down, up + record.bytes_up
            if record.measured is not None:
                found = {s: mean_over_clients(record.values(series=s)) for s in record.series()}
                line = {
                    "method": title,
                    "seed": seed,
                    "round": record.round,
                    "accuracy": found,
                    "down": down,
                    "up": up,
                    "seconds": round(time.perf_counter() - start, 1),
                    "ranks": record.ranks,
                }
                print(json.dumps(line), file=file, flush=True)
            if made.round == settings.rounds or time.perf_counter() - start > limit:
                return
            record = made.step()


def table(folder: Path) -> str:
    """The runs of a folder at the last round that all reached: means over seeds, and each seed's accuracy."""
    runs = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    ]
    at = min(lines[-1]["round"] for lines in runs)
    by_method: dict[str, list[dict[str, Any]]] = {}
    for lines in runs:
        by_method.setdefault(lines[0]["method"], []).extend(row for row in lines if row["round"] == at)
    rows = [
        f"Round {at}.",
        "",
        "| method | series | accuracy, % | of each seed | GB down | GB up | seconds |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for method, found in by_method.items():
        for series in found[0]["accuracy"]:
            values = [100 * row["accuracy"][series] for row in found]
            down, up, took = (statistics.mean(row[k] for row in found) for k in ("down", "up", "seconds"))
            each = ", ".join(f"{v:.1f}" for v in values)
            cells = f"{statistics.mean(values):.1f} | {each} | {down / 1e9:.2f} | {up / 1e9:.2f} | {took:.0f}"
            rows.append(f"| {method} | {series} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = options.add_subparsers(dest="what", required=True)
    one = what.add_parser("run")
    one.add_argument("method")
    one.add_argument("seed", type=int)
    one.add_argument("--lam", default="", help="λ of FedSLR, instead of the paper's")
    one.add_argument("--seconds", type=float, default=280)
    one.add_argument("-o", "--out", type=Path, required=True)
    one.add_argument("--set", nargs="*", default=[], help="SECTION.FIELD=VALUE")
    shown = what.add_parser("table")
    shown.add_argument("folder", type=Path)
    given = options.parse_args()
    if given.what == "table":
        print(table(given.folder))
    else:
        run(given.method, given.seed, given.lam, given.seconds, given.out, given.set)


if __name__ == "__main__":
    main()
