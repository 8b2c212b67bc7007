"""Small models and tokenizers for the tests of scores."""

from types import SimpleNamespace

import numpy as np
import torch

TEXTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "the quick brown fox jumps over the lazy dog",
    "Question: what is 1 + 2?\nAnswer: 1 + 2 = 3\n#### 3",
]


def byte_tokenizer(**special):
    """Byte-level BPE: every text survives encoding and decoding; with no special token unless one is named."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def space_tokenizer():
    """Words with their space in front, as SentencePiece has them: decoding drops the space where a text begins."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁x", "▁", "x", "▁return", "return", "▁▁▁▁"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"), words


def llama(vocab, seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    # a wide initialization, so that the likeliest token is clearly so and changes from step to step
    rest = {
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
    }
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **{**sizes, **rest, **ends, **changes}))


def gpt2(vocab, seed=0):
    """A model with learnt absolute positions, which wrong padding would shift."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.4}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, bos_token_id=None, eos_token_id=None, **sizes))


@torch.no_grad()
def greedy(model, tokens, count):
    """The likeliest tokens one by one, the whole text anew each time: no cache, no padding, no batch."""
    was = model.training
    model.eval()
    row = list(tokens)
    for _ in range(count):
        row.append(int(np.argmax(model(input_ids=torch.tensor([row])).logits[0, -1].numpy())))
    model.train(was)
    return row[len(tokens) :]


class Scripted(torch.nn.Module):
    """Writes what it is told to after each prompt; for tests of what happens to the text afterwards."""

    def __init__(self, tokenizer, answers):
        super().__init__()
        self.tokenizer, self.answers, self.asked = tokenizer, answers, []
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(is_encoder_decoder=False)

    def generate(self, input_ids, attention_mask, generation_config, stopping_criteria):
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            prompt = self.tokenizer.decode(row[mask.bool()].tolist())
            self.asked.append(prompt)
            answer = self.answers(prompt) if callable(self.answers) else self.answers[prompt]
            rows.append(self.tokenizer(answer)["input_ids"])
        width = max(map(len, rows))
        end = self.tokenizer.eos_token_id
        rows = [row + [end] * (width - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)], 1)
