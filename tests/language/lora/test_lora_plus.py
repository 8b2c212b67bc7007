"""LoRA+ is a group of the optimizer: B learns faster than A, as by peft.optimizers.create_loraplus_optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines import ENGINES
from fedlowrank.rounds.run import Run

torch.set_num_threads(1)


def test_rounds_of_fedit_are_steps_of_pefts_lora_plus(llama: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"who is {i}?", "completion": "the quick fox"}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = ExperimentConfig.parse(
        {
            "name": "plus",
            "method": "fedit",
            "data": {"source": "text", "path": str(tmp_path / "rows.jsonl"), "normalize": "none"},
            "partition": {"kind": "iid", "clients": 1},
            "split": {"kind": "local", "train": 0.75, "val": 0.0, "test": 0.25},
            "language": {"path": str(llama), "context": 48, "format": "plain"},
            "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "run": {"rounds": 1},
            "defaults": {
                "steps": 3,
                "batch_size": 100,
                "optimizer": {
                    "kind": "adamw",
                    "lr": 1e-3,
                    "weight_decay": 0.0,
                    "groups": {"b": {"lr": 16e-3}},
                },
            },
        }
    )
    run = Run(config.build_method("fedit"), config.federation(), config.run, ENGINES["sequential"]())
    run.record_initial_models()
    federation = run.federation
    start = {n: t.clone() for n, t in run.personal_params(federation.infos[0]).items()}
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(llama),
        federation.companion.model.peft_config["default"],
    ).eval()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in start.items():
            own[name].copy_(value)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    examples = federation.clients[0].train
    for _ in range(3):
        optimizer.zero_grad()
        model(**examples.x, labels=examples.y).loss.backward()
        optimizer.step()
    run.step()
    for name, value in run.personal_params(federation.infos[0]).items():
        assert torch.allclose(value, own[name], atol=2e-5), name
        assert not torch.allclose(value, start[name], atol=1e-4), name
