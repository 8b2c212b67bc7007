"""CPU time of a round by this package's own steps and by TRL's trainer, alternating, with a real model.

    python benchmarks/language/step_against_trl.py FOLDER_OF_SMOLLM2

One client, 4 texts of 128 tokens a step, LoRA of rank 8 on q and v, AdamW. The losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines.sequential import Sequential
from fedlowrank.rounds.run import Run

STEPS, ROUNDS = 3, 3


def make_run(base: str, rows: Path, trainer: str) -> Run:
    """A run of one client."""
    made = ExperimentConfig.parse(
        {
            "name": "trl-steps",
            "method": "fedit",
            "data": {
                "source": "instructions",
                "path": str(rows),
                "prompt": "prompt",
                "response": "response",
                "normalize": "none",
            },
            "partition": {"kind": "iid", "clients": 1},
            "split": {"kind": "local", "train": 0.9, "val": 0.05, "test": 0.05},
            "language": {"path": base, "format": "plain", "context": 128, "trainer": trainer},
            "lora": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
            "run": {"rounds": ROUNDS, "evaluate_every": ROUNDS, "representations": 0},
            "defaults": {"batch_size": 4, "steps": STEPS, "optimizer": {"kind": "adamw", "lr": 1e-3}},
        }
    )
    return Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())


def main(base: str) -> None:
    """Print the CPU seconds of training in each round, and their means."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"own": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        texts = [
            {"prompt": f"Question {i}: what is {i} plus {i}? " * 4, "response": f"It is {2 * i}. " * 8}
            for i in range(40)
        ]
        rows.write_text("\n".join(map(json.dumps, texts)))
        runs = {name: make_run(base, rows, name) for name in seconds}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                record = run.step()
                seconds[name].append(record.cpu_seconds["train"])
                print(
                    f"{name}: {seconds[name][-1]:.1f} s, loss {record.training_losses['local']:.6f}",
                    flush=True,
                )
    means = {name: statistics.mean(values) for name, values in seconds.items()}
    print(f"mean of {ROUNDS} rounds of {STEPS} steps: {means}; trl / own {means['trl'] / means['own']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="CPU time of a round by this package's own steps and by TRL's trainer."
    )
    parser.add_argument("base", help="folder of the model, such as SmolLM2")
    main(parser.parse_args().base)
