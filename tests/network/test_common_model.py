"""The language model that the server of a network writes is that of the simulation, or none where clients have their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.key import Key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.network.server import RunIsOverError
from fedlowrank.rounds.run import Run
from tests.support.local_network import local, log_lines, serve_run

SHARED = ("fedit", "fedhl", "fedavg")
OWN = ("floral", "fedem", "ifca", "per_fedavg", "fedsa_lora", "ditto", "standalone", "local_adaptor")


def make(folder: Path, method: str) -> ExperimentConfig:
    base = build_tiny_model(folder / "base", "causal", Key((0,)), ["the fox jumps over the dog"])
    rows = [{"prompt": "who? " * (i % 3 + 1), "completion": f"the fox {i}"} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: dict[str, Any] = {
        "name": "texts",
        "method": method,
        "language": {"path": str(base), "format": "plain", "context": 48},
        "data": {"source": "text", "path": str(folder / "rows.jsonl"), "normalize": "none"},
        "partition": {"kind": "iid", "clients": 2},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "export": {"rank": 4},
        "run": {"rounds": 2, "representations": 0},
        "defaults": {"batch_size": 8, "optimizer": {"kind": "sgd", "lr": 0.1}},
        "network": {"clients": 2, "min_clients": 2, "wait": 5.0, "limits": {"update_ratio": 0.0}},
    }
    return ExperimentConfig.parse(tables)


@pytest.mark.few(5)
@pytest.mark.parametrize("method", [*OWN, *SHARED])
def test_the_server_of_a_network_writes_the_model_of_the_simulation(method: str, tmp_path: Path) -> None:
    made = make(tmp_path, method)
    run = Run(made.build_method(method), made.federation(), made.run, Sequential())
    run.record_initial_models()
    for _ in range(2):
        run.step()
    run.federation.companion.write(run, tmp_path / "simulated")
    carrier = local(made, tmp_path)
    with log_lines() as lines:
        serve_run(carrier, made, tmp_path / "run")
    (written,) = (tmp_path / "run" / "adapters").iterdir()
    assert written.name == "round-0002"
    if method in OWN:
        (note,) = written.iterdir()
        assert "no model of the server" in note.read_text()
        assert note.read_text() in [f"{line}.\n" for line in lines]
        adapters = list(tmp_path.glob("client-*/*/model/adapter"))
        assert len(adapters) == (0 if method == "fedem" else 2)
    else:
        actual, expected = (
            safetensors.torch.load_file(folder / "server" / "adapter_model.safetensors")
            for folder in (written, tmp_path / "simulated")
        )
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    # the run is over, and its server waits for no client to write a model
    carrier.away = set(carrier.folders)
    with pytest.raises(RunIsOverError, match="is finished, and no client came"):
        serve_run(carrier, made, tmp_path / "run", resume=True)
