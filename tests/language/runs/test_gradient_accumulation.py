"""A batch of texts that is taken in parts has the gradient of the whole batch: its mean is over tokens, not over texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines import ENGINES
from fedlowrank.rounds.run import Run

torch.set_num_threads(1)

ANSWERS = [
    "fox",
    "the quick brown fox jumps over the lazy dog",
    "a dog",
    "1 + 1 = 2, said the fox",
    "sleeps",
    "no",
]


@pytest.mark.parametrize("micro_batch", [None, 1, 2, 4])
def test_a_step_in_parts_is_the_step_of_the_mean_over_tokens(
    micro_batch: int | None, llama: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"prompt": f"who is {i}?", "completion": a}) for i, a in enumerate(ANSWERS * 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = ExperimentConfig.parse(
        {
            "name": "parts",
            "method": "fedit",
            "data": {"source": "text", "path": str(tmp_path / "rows.jsonl"), "normalize": "none"},
            "partition": {"kind": "iid", "clients": 1},
            "split": {"kind": "local", "train": 0.75, "val": 0.0, "test": 0.25},
            "language": {"path": str(llama), "context": 64, "format": "plain"},
            "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "run": {"rounds": 1, "micro_batch": micro_batch},
            "defaults": {"steps": 1, "batch_size": 100, "optimizer": {"kind": "sgd", "lr": 1.0}},
        }
    )
    run = Run(config.build_method("fedit"), config.federation(), config.run, ENGINES["sequential"]())
    run.record_initial_models()
    language, examples = run.federation.companion, run.federation.clients[0].train
    start = {n: t.clone() for n, t in run.personal_params(run.federation.infos[0]).items()}
    run.step()
    after = run.personal_params(run.federation.infos[0])
    leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
    ids, mask, y = examples.x["input_ids"], examples.x["attention_mask"], examples.y
    model: transformers.PreTrainedModel = language.model
    logits = torch.func.functional_call(model, leaves, (), {"input_ids": ids, "attention_mask": mask}).logits
    each = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), y[:, 1:], ignore_index=-100, reduction="none"
    )
    counts = (y[:, 1:] != -100).sum(1)
    assert counts.unique().numel() > 2
    by_tokens = torch.autograd.grad(each.sum() / counts.sum(), list(leaves.values()), retain_graph=True)
    by_texts = torch.autograd.grad((each.sum(1) / counts).mean(), list(leaves.values()))
    expected = {n: start[n] - g for n, g in zip(leaves, by_tokens, strict=True)}
    assert all(torch.allclose(after[n], expected[n], atol=1e-6) for n in after)
    assert not all(
        torch.allclose(start[n] - g, expected[n], atol=1e-4) for n, g in zip(leaves, by_texts, strict=True)
    )
