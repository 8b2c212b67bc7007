"""Losses and gradients of packed and padded rows against those of each sample alone, on random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.losses import IGNORE_INDEX
from fedlowrank.data.text.text_records import Conversation, Instruction, Texts
from fedlowrank.data.text.tokens import TextSettings, tokenize
from fedlowrank.language.packed_attention import use_packed_attention
from fedlowrank.training.local_data import gather
from tests.support.byte_tokenizers import byte_tokenizer

torch.set_num_threads(1)
TASKS = [Instruction(f"what is {n}?", f"it is {'x' * n}") for n in (3, 9, 1, 14, 5)]
TALKS = [
    Conversation(({"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * (n + 1)}))
    for n in (3, 9, 1, 14, 5)
]


def llama(attention: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype)


def gpt2() -> Any:
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256))
        .double()
        .eval()
    )


def loss_and_gradient(model: Any, x: dict[str, torch.Tensor], y: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean over all tokens of a data set, and its gradient."""
    model.zero_grad()
    scores = model(**x).logits[:, :-1]
    loss = functional.cross_entropy(scores.transpose(1, 2), y[:, 1:], ignore_index=IGNORE_INDEX)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return loss.item(), gradient


def difference(model: Any, one: Any, other: Any) -> float:
    """Of losses and of gradients, relative to the largest gradient."""
    first, second = (loss_and_gradient(model, data.x, data.y) for data in (one, other))
    scale = second[1].abs().max().item()
    return max(abs(first[0] - second[0]), (first[1] - second[1]).abs().max().item() / scale)


def tokens(records: Any, packing: bool, loss_on: Any = "response") -> Any:
    settings = TextSettings("plain", 80, loss_on, packing)
    return tokenize(Texts("t", list(records)), byte_tokenizer("chatml"), settings).train


@pytest.mark.parametrize("records", [TASKS, TALKS], ids=["instructions", "conversations"])
@pytest.mark.parametrize("loss_on", ["response", "all"])
@pytest.mark.parametrize(
    ("attention", "dtype", "most"),
    [("eager", torch.float64, 1e-6), ("sdpa", torch.float64, 1e-12), ("sdpa", torch.float32, 1e-6)],
)
def test_packing_changes_no_loss_and_no_gradient(
    records: Any, loss_on: Any, attention: str, dtype: torch.dtype, most: float
) -> None:
    packed, single = tokens(records, True, loss_on), tokens(records, False, loss_on)
    assert len(packed) < len(single) == len(records)
    model = llama(attention, dtype)
    # the samples of a row see each other unless the model is told
    assert difference(model, packed, single) > 1e-3
    use_packed_attention(model)
    assert difference(model, packed, single) < most


def test_learned_positions_start_again_in_packed_rows() -> None:
    packed, single = tokens(TASKS, True), tokens(TASKS, False)
    model = gpt2()
    use_packed_attention(model)
    assert difference(model, packed, single) < 1e-12


def test_padding_on_either_side_gives_the_same_loss() -> None:
    right, model = tokens(TASKS, False), llama("sdpa")
    lengths = right.x["attention_mask"].sum(1)
    width = right.y.shape[1]

    def moved(t: torch.Tensor) -> torch.Tensor:
        """The padding of each row moved to the left."""
        return torch.stack([row.roll(width - int(n)) for row, n in zip(t, lengths, strict=True)])

    left = type(right)({name: moved(t) for name, t in right.x.items()}, moved(right.y))
    assert int(left.x["attention_mask"][0, 0]) == 0
    assert difference(model, right, left) < 1e-6
    # a batch is cut to the columns that it needs: columns that are padding in all rows stay on the left
    for sides in ((16, 0), (0, 16), (8, 8)):
        wide_x = {name: functional.pad(t, sides) for name, t in left.x.items()}
        wide = type(right)(wide_x, functional.pad(left.y, sides, value=IGNORE_INDEX))
        batch = gather(wide, torch.arange(len(wide)))
        assert batch.y.shape[1] <= width + 16
        assert difference(model, right, batch) < 1e-6
    # of what padding is, the loss does not depend
    other = {**right.x, "input_ids": right.x["input_ids"].where(right.x["attention_mask"] == 1, 7)}
    assert difference(model, right, type(right)(other, right.y)) < 1e-6


def test_a_model_that_sees_the_whole_row_is_refused() -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    encoder = BertLMHeadModel(BertConfig(vocab_size=300, **size)).eval()
    with pytest.raises(ConfigError, match="BertLMHeadModel does not keep the samples of a row apart"):
        use_packed_attention(encoder)
