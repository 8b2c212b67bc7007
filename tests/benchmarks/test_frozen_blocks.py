"""Hidden states from memory are those of a plain forward pass of transformers."""

from __future__ import annotations

import pytest
import torch
from helpers.counted_logits import CountedLogits
from helpers.frozen_blocks import FrozenBlocks

transformers = pytest.importorskip("transformers")


def _llama() -> torch.nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=40, num_key_value_heads=1, pad_token_id=2, attn_implementation="sdpa", **size
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).double()
    return model.requires_grad_(False)


def test_scores_and_gradients_of_later_blocks_are_those_of_the_whole_model() -> None:
    model = _llama()
    weight = model.get_parameter("model.layers.2.mlp.up_proj.weight").requires_grad_()
    texts = torch.tensor([[5, 2, 7, 8, 2, 2], [9, 4, 3, 11, 12, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    blocks = FrozenBlocks(model, 2, {})

    def score(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shown = model(input_ids=ids, attention_mask=mask).logits[mask.bool() & (ids != 2)]
        (gradient,) = torch.autograd.grad(shown.square().sum(), weight)
        return shown.detach(), gradient

    expected = score(texts, mask)
    with blocks.remembered():
        for _ in range(2):
            torch.testing.assert_close(score(texts, mask), expected)
        # another batch, padded to another width
        torch.testing.assert_close(score(texts[:1, :5], mask[:1, :5]), score(texts[:1], mask[:1]))
        assert len(blocks.hidden) == 2
        with torch.no_grad():
            weight.mul_(2)
        changed = score(texts, mask)
    assert not torch.allclose(changed[0], expected[0])
    torch.testing.assert_close(score(texts, mask), changed)


def test_remembered_blocks_do_not_run() -> None:
    model = _llama()
    blocks = FrozenBlocks(model, 2, {})
    ids = torch.tensor([[5, 6, 7]])
    with blocks.remembered():
        expected = model(input_ids=ids).logits
        with torch.no_grad():
            model.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(3)
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert not torch.allclose(model(input_ids=ids).logits, expected)


def test_states_behind_a_common_beginning_are_those_of_whole_texts() -> None:
    model = _llama()
    texts = [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9, 4, 3, 11])]
    states = FrozenBlocks(model, 2, {}).compute_states(texts, 2)
    for k, text in enumerate(texts):
        expected = model.model(input_ids=text[None]).last_hidden_state[0, 2:]
        torch.testing.assert_close(states[k, : len(expected)], expected)


def test_logits_that_the_loss_counts_and_gradients_are_those_of_the_whole_model() -> None:
    model = _llama()
    weight = model.get_parameter("model.layers.2.mlp.up_proj.weight").requires_grad_()
    texts = torch.tensor([[5, 6, 7, 8, 2, 2], [9, 4, 3, 11, 12, 2]])
    labels = torch.tensor([[-100, -100, 7, 8, -100, -100], [-100, -100, -100, -100, 12, -100]])
    counted = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]).bool()

    def compute(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            scores[:, :-1].transpose(1, 2), labels[:, 1 : ids.shape[1]], ignore_index=-100
        )
        (gradient,) = torch.autograd.grad(loss, weight)
        return scores[counted[:, : ids.shape[1]]].detach(), gradient

    expected = compute(texts)
    with CountedLogits(model, zip(texts, labels, strict=True)).used():
        torch.testing.assert_close(compute(texts), expected)
        # padded to another width
        torch.testing.assert_close(compute(texts[:, :5]), expected)
        others = model(input_ids=texts).logits[~counted]
        assert (others == 0).all()
    assert not (model(input_ids=texts).logits == 0).any()
