"""Byte tokenizers with special tokens and a chat template, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|endoftext|>",
    "[INST]",
    "[/INST]",
]


def byte_tokenizer(
    template: str | None = None, eos: str = "</s>", merges_from: list[str] | None = None
) -> Any:
    """A token for each byte and special token; with texts to learn merges from, a BPE.

    Args:
        template: name of a file of chat_templates, or None.
        eos: the token that ends a text.
        merges_from: texts.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if merges_from is None:
        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    if merges_from is not None:
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(merges_from, trainer)
    made.add_special_tokens(SPECIAL)
    # as real byte-level tokenizers: offsets leave spaces out
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer
