"""The summary of ``make demo`` against numpy arithmetic on run folders that are written here."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedlowrank.storage.run_files import seal_run
from tests.support.client_tables import make_client_table

FILE = Path(__file__).parents[2] / "examples" / "demo_summary.py"
CLIENTS = 5
TITLES = {
    "standalone": "Standalone", "fedavg": "FedAvg", "hetlora": "HetLoRA", "flora": "FLoRA",
    "floral": "FLoRAL", "pfedlora": "pFedLoRA", "fedslr": "FedSLR", "fedhl": "FedHL",
}  # fmt: skip
"""Of methods, as the papers write them."""


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_summary", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(
    folder: Path, method: str, seed: int, tests: dict[str, Sequence[float | None]], sizes: Sequence[int]
) -> None:
    """Write a finished run whose last evaluation has these test accuracies of each series.

    Its other evaluation and its validation accuracies are 0, so that reading one of them shows.

    Args:
        folder: of the comparison.
        method: name.
        seed: of the run.
        tests: accuracies of the clients by series.
        sizes: bytes to the clients in each round, that before training first.
    """
    run = folder / f"{method}-s{seed}"
    run.mkdir(parents=True)
    config = {"format": 4, "name": folder.name, "method": {"name": method}, "run": {"seed": seed}}
    records: list[dict[str, Any]] = [{"round": i, "bytes_down": size} for i, size in enumerate(sizes)]
    zero = [0.0] * CLIENTS
    for record, of in ((records[0], dict.fromkeys(tests, zero)), (records[-2], tests)):
        tables = {series: {"val": zero, "test": values} for series, values in of.items()}
        record["measured"] = make_client_table({"accuracy": tables}).to_dict()
    (run / "run.json").write_text(json.dumps(config))
    (run / "clients.json").write_text(json.dumps([{"id": i} for i in range(CLIENTS)]))
    (run / "status.json").write_text(
        json.dumps({"state": "finished", "rounds": len(sizes) - 1, "message": ""})
    )
    seal_run(run)
    with gzip.open(run / "metrics.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def ranked(text: str) -> list[tuple[str, float]]:
    """Names and numbers, in the order in which they are printed."""
    return [(name, float(number)) for name, number in re.findall(r"(\w+) ([\d.]+) (?:%|MB)", text)]


def in_order(values: dict[str, float], descending: bool = False) -> list[tuple[str, float]]:
    names = sorted(values, key=lambda name: values[name], reverse=descending)
    return [(name, round(values[name], 1)) for name in names]


@pytest.mark.full
def test_every_idea_is_summarized_as_numpy_does_it(
    summary: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = np.random.default_rng(0)
    ideas = {"floral": "standalone", "pfedlora": "standalone", "fedslr": "fedavg", "fedhl": "hetlora"}
    accuracy: dict[tuple[str, str], Any] = {}
    server: dict[str, Any] = {}
    sizes: dict[tuple[str, str], Any] = {}
    for idea, baseline in ideas.items():
        for method in (idea, baseline, "flora"):
            accuracy[idea, method] = rng.uniform(0.2, 0.9, (2, CLIENTS))
            server[method] = rng.uniform(0.2, 0.9, (2, CLIENTS))
            sizes[idea, method] = rng.integers(100_000, 5_000_000, (2, 4))
            for seed in (0, 1):
                # a client without test examples is not counted
                accuracy[idea, method][seed, 3] = np.nan
                row = accuracy[idea, method][seed].tolist()
                row[3] = None
                tests = {"mixed" if idea == "fedslr" else "personal": row}
                if idea == "fedslr":
                    tests["gkr"] = [0.99] * CLIENTS
                if idea == "fedhl":
                    tests["server"] = server[method][seed].tolist()
                write_run(tmp_path / f"demo-{idea}", method, seed, tests, sizes[idea, method][seed].tolist())
    monkeypatch.setattr(sys, "argv", ["demo_summary.py", str(tmp_path)])
    summary.main()
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == len(ideas)
    for (idea, baseline), block in zip(ideas.items(), blocks, strict=True):
        heading, first, ranking, costs = block.splitlines()
        names = [TITLES[method] for method in (idea, baseline, "flora")]
        assert heading.startswith(f"{names[0]}: ")
        by_seed = [100 * np.nanmean(accuracy[idea, m], axis=1) for m in (idea, baseline, "flora")]
        means = {name: float(values.mean()) for name, values in zip(names, by_seed, strict=True)}
        difference = by_seed[0] - by_seed[1]
        gap = f"{abs(difference.mean()):.1f} points {'above' if difference.mean() > 0 else 'below'}"
        assert first.strip() == (
            f"{names[0]} {means[names[0]]:.1f} %, {gap} the simple baseline {names[1]} ({means[names[1]]:.1f} %); "
            f"above it in {int((difference > 0).sum())} of 2 seeds."
        )
        clients, _, served = ranking.partition("Server's model: ")
        assert ranked(clients) == in_order(means, descending=True)
        methods = (idea, baseline, "flora") if idea == "fedhl" else ()
        assert ranked(served) == in_order(
            {TITLES[m]: float(100 * server[m].mean()) for m in methods}, descending=True
        )
        total = {
            name: float(sizes[idea, m].sum(axis=1).mean() / 1e6)
            for name, m in zip(names, (idea, baseline, "flora"), strict=True)
        }
        assert ranked(costs) == in_order(total)
        last = [float(number) for number in re.findall(r"\((\d+) kB in the last round\)", costs)]
        by_name = {
            name: float(sizes[idea, m][:, -1].mean() / 1e3)
            for name, m in zip(names, (idea, baseline, "flora"), strict=True)
        }
        assert last == [round(by_name[name]) for name, _ in in_order(total)]


def test_equal_methods_are_called_tied_and_seeds_are_compared_in_pairs(
    summary: ModuleType, tmp_path: Path
) -> None:
    # pFedLoRA is worse with seed 0 and better with seed 1, by the same amount
    for method, values in {"pfedlora": (0.5, 0.8), "standalone": (0.6, 0.7)}.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, method, seed, {"personal": [value] * CLIENTS}, [0, 10, 10])
    first, ranking, _ = summary.summarize_idea(tmp_path, "pfedlora", "standalone")
    assert (
        first
        == "pFedLoRA 65.0 %, tied with the simple baseline Standalone (65.0 %); above it in 1 of 2 seeds."
    )
    assert ranked(ranking) == [("pFedLoRA", 65.0), ("Standalone", 65.0)]
