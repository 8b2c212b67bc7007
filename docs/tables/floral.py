"""FLoRAL's Table 1, fedlowrank's numbers beside the paper's, as Markdown: ``python docs/tables/floral.py RUNS``.

RUNS holds a folder for each experiment of ``experiments/floral`` (``mnist-r``, ``mnist-r-reduced``, ...), as
``fedlowrank compare`` leaves them. A cell is the accuracy at the last round, mean over clients, as mean ± standard deviation over
seeds; then in brackets what the paper prints.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.results.records import RunRecord

FILES = Path(__file__).resolve().parents[2] / "experiments" / "floral"
# the paper's ± of Table 1; its means are in the experiment files
SPREAD = {
    "mnist-r": (0.6, 0.3, 0.1, 0.3, 0.6, 0.8, 1.0, 0.6),
    "mnist-r-reduced": (0.6, 5.4, 5.3, 1.4, 3.7, 2.1, 2.3, 0.7),
    "mnist-ls": (2.4, 1.8, 0.5, 0.3, 3.2, 0.2, 0.9, 0.2),
    "mnist-ls-reduced": (0.9, 2.3, 0.4, 1.3, 9.9, 0.5, 7.1, 0.5),
}


def final(folder: Path) -> float | None:
    """Mean test accuracy over clients at the last round in percent; None if the run has none or is not finished."""
    run = RunRecord.load(folder)
    mean = run.rounds[-1].mean(split="test") if run.status["state"] == "finished" else None
    return None if mean is None else 100 * mean


def cell(runs: Path, name: str, paper: float, spread: float) -> str:
    """Mean and standard deviation over seeds, the paper's, and the number of seeds."""
    found = [v for folder in sorted(runs.glob(f"{name}-s[0-9]*")) if (v := final(folder)) is not None]
    if not found:
        return f"– ({paper} ± {spread})"
    over = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.1f}{over} ({paper} ± {spread}), n = {len(found)}"


def main(runs: Path) -> None:
    """Print the table."""
    made = {stem: ExperimentConfig.read(FILES / f"{stem}.toml") for stem in SPREAD}
    print("| method |", " | ".join(f"{stem} (paper)" for stem in SPREAD), "|")
    print("| :--- |", " | ".join("---:" for _ in SPREAD), "|")
    first = made["mnist-r"]
    for place, name in enumerate(first.compared_methods):
        cells = [
            cell(runs / stem, name, one.describe()["reference"]["accuracy"][name], SPREAD[stem][place])
            for stem, one in made.items()
        ]
        print(f"| {first.method_title(name)} |", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="FLoRAL's Table 1 as Markdown: these runs beside the paper's numbers."
    )
    parser.add_argument(
        "runs", type=Path, help="folder with a folder for each experiment of experiments/floral"
    )
    main(parser.parse_args().runs)
