"""The cost of a step on texts is learnt from short ones, and equals what is counted of the step itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.core import tree
from fedlowrank.core.learning.losses import AUTO
from fedlowrank.models.architecture import Architecture
from fedlowrank.training import local_data
from fedlowrank.training.flops import FlopCounter, FlopLedger
from tests.language.text_experiments import make_causal_tables, run_rounds

torch.set_num_threads(1)


def transformer(implementation: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def counted(model: Any, texts: int, tokens: int) -> int:
    ids = torch.randint(90, (texts, tokens))
    with FlopCounter() as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.square().mean().backward()
    return int(counter.total)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_cost_of_every_size_follows_from_short_texts(implementation: str) -> None:
    model, ledger = transformer(implementation), FlopLedger()
    assert ledger.fit("step", lambda b, t: counted(model, b, t), 64)
    for size in ((1, 5), (3, 17), (4, 64)):
        assert ledger.knows("step", size)
        assert ledger.total("step", {size: 2}) == 2 * counted(model, *size)


def test_what_a_batch_shares_is_learnt() -> None:
    weight, angles = torch.zeros(6, 6), torch.zeros(1, 8, 1)

    def step(texts: int, tokens: int) -> int:
        x = torch.zeros(texts, tokens, 6)
        with FlopCounter() as counter:
            # rotations as products of angles and positions, equal for all texts
            angles @ torch.zeros(1, 1, tokens)
            x @ weight @ x.transpose(1, 2)
        return int(counter.total)

    ledger = FlopLedger()
    assert ledger.fit("step", step, 64)
    assert ledger.total("step", {(4, 50): 1}) == 2 * (8 * 50 + 4 * (50 * 36 + 50 * 50 * 6))


def test_a_cost_that_is_no_square_of_the_length_is_not_learnt() -> None:
    ledger = FlopLedger()
    assert not ledger.fit("cubic", lambda b, t: b * t**3, 64)
    assert not ledger.fit("couples", lambda b, t: b * b * t, 64)
    assert not ledger.fit("short", lambda b, t: b * t, 3)
    assert not ledger.knows("cubic", (1, 8))


def test_a_large_vocabulary_takes_fewer_texts_at_once_and_gives_the_same_loss(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path, split={"train": 0.5, "test": 0.5, "val": 0.0}), 0)
    model = run.federation.architectures["language"]
    seen: list[int] = []
    apply = Architecture.apply

    def counted_apply(self: Architecture, params: Any, x: Any) -> torch.Tensor:
        scores = apply(self, params, x)
        seen.append(scores.numel())
        return scores

    monkeypatch.setattr(Architecture, "apply", counted_apply)
    usual = run.record_initial_models().values("loss", split="test")
    most, tokens = max(seen), 2 * run.federation.clients[0].train.x["attention_mask"].shape[1]
    seen.clear()
    # room for the scores of two texts
    monkeypatch.setattr(local_data, "MAX_CHUNK_SCORES", tokens * model.vocabulary)
    assert run.record_initial_models().values("loss", split="test") == pytest.approx(usual, rel=1e-6)
    assert max(seen) <= tokens * model.vocabulary < most


@pytest.mark.parametrize("checkpointing", [False, True])
def test_costs_are_those_of_the_steps_and_counting_changes_no_step(
    checkpointing: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["language"]["gradient_checkpointing"] = checkpointing
    actual = run_rounds(tables)
    learnt = [actual.step().flops, actual.step().flops]
    with monkeypatch.context() as patch:
        # every step is counted as it is taken
        patch.setattr(FlopLedger, "fit", lambda *_: False)
        other = run_rounds(tables)
        assert [other.step().flops, other.step().flops] == learnt
    with monkeypatch.context() as patch:
        # nothing is counted at all
        patch.setattr(FlopCounter, "__enter__", lambda self: self)
        patch.setattr(FlopCounter, "__exit__", lambda *_: None)
        bare = run_rounds(tables)
        bare.step()
        bare.step()
    assert tree.equal(actual.state.server, bare.state.server)


def test_the_loss_of_tokens_is_the_mean_over_those_that_count() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randint(11, (3, 7), generator=generator)
    y[0, :4], y[1], y[2, 5:] = -100, -100, -100
    actual = AUTO.each(scores, y)
    logs = scores.log_softmax(-1)
    means = []
    for k in range(3):
        own = [-logs[k, t - 1, y[k, t]] for t in range(1, 7) if y[k, t] != -100]
        means.append(torch.stack(own).mean() if own else scores[k].sum() * 0)
    torch.testing.assert_close(actual, torch.stack(means), rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(v.sum(), scores, retain_graph=True)[0] for v in (actual, torch.stack(means))]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=0)
