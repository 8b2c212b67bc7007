"""A round of a small language model's clients, taken together or one after another: ratios of CPU time.

    python benchmarks/language/cohort_of_texts.py BASE [--rounds 5]

BASE is a transformers folder of a small model, such as stories260K (``examples/llama2c.py``). Ten clients of ranks 16 to 1 train
20 steps of FedHL a round on random texts of three lengths, by the sequential and by the vectorized engine in turns, in one
process on one thread. ``fedlowrank.training.trainer.MAX_BATCHED_STEP`` is set aside, so that all sizes are batched: it stands
where this table says that it gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines import ENGINES
from fedlowrank.testing.check import RunWithoutEvaluation
from fedlowrank.training import trainer

SIZES = [(1, 32), (1, 64), (2, 64), (4, 64), (2, 128), (4, 128), (8, 128), (8, 256)]
"""Texts and tokens of a step."""


def write_texts(path: Path) -> None:
    """400 instructions of 20 to 300 random letters."""
    generator = np.random.default_rng(0)
    letters = [*"abcdefghij klmnopqrst uvwxyz "]
    with path.open("w") as file:
        for length in generator.choice([20, 80, 300], 400):
            answer = "".join(generator.choice(letters, length))
            file.write(json.dumps({"prompt": "write", "response": answer}) + "\n")


def measure(base: str, texts: Path, size: tuple[int, int], rounds: int) -> tuple[list[float], int]:
    """Ratios of the CPU time of rounds, sequential over vectorized, and the numbers of a token."""
    runs = []
    for engine in ("sequential", "vectorized"):
        made = ExperimentConfig.parse(
            {
                "name": "stacked",
                "method": "fedhl",
                "data": {"source": "instructions", "path": str(texts), "prompt": "prompt", "response": "response"},
                "partition": {"kind": "iid", "clients": 10},
                "language": {"path": base, "format": "plain", "context": size[1]},
                "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "ranks": [16, 8, 4, 4, 2, 2, 1, 1, 1, 1]},
                "run": {"rounds": rounds + 1},
                "defaults": {"batch_size": size[0], "steps": 20, "optimizer": {"kind": "adamw", "lr": 1e-3}},
            }
        )  # fmt: skip
        method, federation = made.build_method("fedhl"), made.federation()
        runs.append(RunWithoutEvaluation(method, federation, made.run, ENGINES[engine]()))
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for run, found in zip(runs, seconds, strict=True):
            begin = time.process_time()
            run.step()
            found.append(time.process_time() - begin)
    model = next(iter(runs[0].federation.architectures.values()))
    # the first round learns what steps cost, and compares
    return [a / b for a, b in zip(seconds[0][1:], seconds[1][1:], strict=True)], model.hidden_size or 0


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("base")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    print(
        "| texts x tokens | numbers | sequential / together | least to most |\n| :--- | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(trainer, "MAX_BATCHED_STEP", 1 << 60):
        write_texts(texts := Path(folder) / "texts.jsonl")
        for size in SIZES:
            ratios, width = measure(given.base, texts, size, given.rounds)
            row = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {size[0]} x {size[1]} | {size[0] * size[1] * width:,} | {row} |", flush=True)


if __name__ == "__main__":
    main()
