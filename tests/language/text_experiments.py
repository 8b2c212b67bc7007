"""Small experiments on texts: their files, their tables, and their runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines.sequential import Sequential
from fedlowrank.rounds.run import Run


def write_instructions(folder: Path, count: int = 60) -> Path:
    rows = []
    for i in range(count):
        animal = ["fox", "dog"][i % 2]
        rows.append({"prompt": f"who is {i % 7}?", "response": f"the {animal}" * (1 + i % 3), "kind": animal})
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return path


def make_causal_tables(base: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Tables of an experiment; ``more`` by section."""
    tables: dict[str, Any] = {
        "name": "tiny",
        "method": "fedhl",
        "data": {
            "source": "instructions",
            "path": str(write_instructions(folder)),
            "prompt": "prompt",
            "response": "response",
            "category": "kind",
            "normalize": "none",
        },
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 1.0},
        "language": {"path": str(base), "format": "plain", "context": 48},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "ranks": [4, 2, 1]},
        "run": {"rounds": 2, "representations": 0},
        "defaults": {"batch_size": 8, "optimizer": {"kind": "adamw", "lr": 0.01}},
    }
    for section, fields in more.items():
        tables[section] = {**tables.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return tables


def run_rounds(tables: dict[str, Any], steps: int | None = None) -> Run:
    made = ExperimentConfig.parse(tables)
    run = Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())
    for _ in range(made.run.rounds if steps is None else steps):
        run.step()
    return run


def write_toml(tables: dict[str, Any], path: Path) -> Path:
    """A file with these tables."""
    path.write_text(ExperimentConfig.parse(tables).to_toml())
    return path


def make_row_tables(base: Path, data: dict[str, Any], **language: Any) -> dict[str, Any]:
    return {
        "name": "rows",
        "method": "fedit",
        "data": {"source": "text", "normalize": "none", **data},
        "partition": {"kind": "natural"},
        "language": {"path": str(base), "context": 160, **language},
        "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        "run": {"rounds": 2, "representations": 0},
        "defaults": {"batch_size": 4, "optimizer": {"kind": "adamw", "lr": 0.01}},
    }


def write_preferences(folder: Path, count: int = 24) -> Path:
    """Pairs whose responses have one to six words, in both orders of length."""
    rows = []
    for i in range(count):
        chosen, rejected = "the fox " * (1 + i % 3), "a dog sleeps " * (1 + i % 2)
        rows.append({"prompt": f"who is {i % 7}?", "chosen": chosen.strip(), "rejected": rejected.strip()})
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def make_preference_tables(base: Path, folder: Path, loss: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Tables of an experiment; ``more`` by section."""
    made: dict[str, Any] = {
        "name": "preferences",
        "method": "fedit",
        "data": {"source": "text", "path": str(write_preferences(folder)), "normalize": "none"},
        "partition": {"kind": "iid", "clients": 2},
        "language": {"path": str(base), "format": "plain", "context": 48},
        "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "ranks": [2]},
        "loss": loss,
        "run": {"rounds": 1, "representations": 0},
        "defaults": {"batch_size": 4, "optimizer": {"kind": "sgd", "lr": 0.1}},
    }
    for section, fields in more.items():
        made[section] = {**made.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return made
