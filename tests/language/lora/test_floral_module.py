"""The module Floral around real language models: every parameter is adapted, checkpointing inside is refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import Floral
from fedlowrank.core.errors import TaskError

IDS = torch.tensor([[1, 5, 4, 7], [3, 2, 6, 1]])


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.full
@pytest.mark.parametrize("which", ["llama", "gpt2"])
def test_every_parameter_of_a_language_model_is_adapted(which: str, request: pytest.FixtureRequest) -> None:
    base = load(request.getfixturevalue(which))
    before, out = copy.deepcopy(base.state_dict()), base(input_ids=IDS, labels=IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Floral(base, rank=2, num_clusters=2).eval()
    assert list(model.adapted()) == [n for n, _ in base.named_parameters()]
    kinds = {row.name: row.parameter.kind for row in model.parameter_budget().rows}
    norms = {n for n, k in kinds.items() if k == "norm"}
    assert {n for n in kinds if "norm" in n or "ln_" in n} == norms != set()
    assert all(
        k == "linear"
        for n, k in kinds.items()
        if n.endswith(("c_attn.weight", "c_fc.weight", "q_proj.weight"))
    )
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, out.loss)
    with torch.no_grad():
        for i, p in enumerate([*model.adaptors.parameters(), model.theta]):
            p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        merged = model.merge()
        assert type(merged) is type(base)
        torch.testing.assert_close(model(IDS).logits, merged(IDS).logits)
        assert not torch.allclose(model(IDS).logits, out.logits)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.adaptors.parameters())
    assert all(torch.equal(t, before[n]) for n, t in base.state_dict().items())


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_is_refused(llama: Path, reentrant: bool) -> None:
    base = load(llama).train()
    # transformers 4 has it under the second name alone
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    getattr(base, next(n for n in names if hasattr(base, n)))({"use_reentrant": reentrant})
    with pytest.raises(TaskError, match="gradient_checkpointing"):
        Floral(base, rank=2)(input_ids=IDS, labels=IDS)
