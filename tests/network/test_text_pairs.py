"""Clients over a network learn from pairs of texts of unequal lengths, and the reference of DPO stays with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.key import Key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.network.client import prepare, read_own_share
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from tests.support.local_network import LocalTransport, intact, serve_run

CASES = {
    "dpo": ("causal", ("prompt", "chosen", "rejected"), "pair_accuracy"),
    "orpo": ("causal", ("prompt", "chosen", "rejected"), "pair_accuracy"),
    "contrastive": ("embedding", ("anchor", "positive"), "retrieval_accuracy"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", CASES)
def test_a_network_is_the_simulation(loss: str, tmp_path: Path) -> None:
    task, names, metric = CASES[loss]
    base = build_tiny_model(tmp_path / "base", "causal", Key((0,)), ["the fox jumps over the dog"])
    files = []
    for site, words in enumerate((1, 12)):
        values = [("who? " * (i % 3 + 1), "the fox " * words, f"a dog {i}") for i in range(20)]
        rows = [dict(zip(names, row, strict=False)) for row in values]
        files.append(tmp_path / f"site{site}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: dict[str, Any] = {
        "name": "pairs",
        "method": "fedhl",
        "language": {"path": str(base), "format": "plain", "context": 64, "task": task},
        "data": {
            "source": "text",
            "path": list(map(str, files)),
            "client_by_file": True,
            "normalize": "none",
        },
        "partition": {"kind": "natural"},
        "loss": {"kind": loss},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "ranks": [4, 2]},
        "run": {"rounds": 2, "representations": 0},
        "defaults": {"batch_size": 8, "optimizer": {"kind": "adamw", "lr": 0.01}},
        "network": {"clients": 2, "min_clients": 2, "wait": 5.0, "limits": {"update_ratio": 0.0}},
    }
    made = ExperimentConfig.parse(tables)
    # what each site reads from its own file is as long as its own texts
    alone = ExperimentConfig.parse(
        {**tables, "data": {"source": "text", "path": str(files[0]), "normalize": "none"}}
    )
    widths = {
        read_own_share(alone, i, 2, file).data[i].train.x["input_ids"].shape[-1]
        for i, file in enumerate(files)
    }  # type: ignore[call-overload,index]
    assert len(widths) == 2
    folders = {}
    for i, file in enumerate(files):
        folders[100 + i] = tmp_path / f"client-{i}"
        prepare(folders[100 + i], alone, i, read_own_share(alone, i, 2, file), SiteSettings.simulated())
    unequal = serve_run(LocalTransport(folders, intact), alone, tmp_path / "unequal")
    assert [r.lost for r in unequal.rounds] == [{}, {}, {}]
    folders, shares = {}, made.shares()
    for i in range(2):
        folders[200 + i] = tmp_path / f"same-{i}"
        prepare(folders[200 + i], made, i, shares, SiteSettings.simulated())
    result = serve_run(LocalTransport(folders, intact), made, tmp_path / "run")
    run = Run(made.build_method("fedhl"), made.federation(), made.run, Sequential())
    run.record_initial_models()
    records = [run.step() for _ in range(2)]
    for record, same in zip(records, result.rounds[1:], strict=True):
        for name in ("loss", metric):
            assert same.by_client(name, split="test") == pytest.approx(
                record.by_client(name, split="test"), rel=1e-4
            )
