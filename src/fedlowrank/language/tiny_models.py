"""Tiny untrained language models with their own tokenizer, for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..core.errors import DataError
from ..core.key import Key
from ..models.architecture import build_module
from .optional_packages import import_library, silence_library

VOCABULARY_SIZE = 384
"""Number of tokens: 256 bytes, the special tokens, and about 125 merges."""


def build_tiny_model(
    folder: Path, task: Literal["causal", "classification"], key: Key, texts: Iterable[str], width: int = 32
) -> Path:
    """Write an untrained model of two layers as an ordinary folder of ``transformers``.

    For a causal task the model is a Llama with grouped-query attention: 4 query heads and 2 key-value heads, so that
    the projections k and v are not square. For classification it is the body of a BERT; the head is created when the
    model is loaded, because only then the number of classes is known. The tokenizer is a byte-level BPE, which can
    encode any text; its merges are learnt from the texts. Equal keys and texts give equal files.

    Args:
        folder: folder to write to, created if it does not exist.
        task: task of the model.
        key: source of randomness of the weights.
        texts: texts from which the merges of the tokenizer are learnt.
        width: width of the hidden states, a multiple of 8.

    Returns:
        The folder.

    Raises:
        DataError: if transformers is missing or there is no text.
    """
    library = import_library("transformers", "a language model")
    tokenizer = _train_tokenizer(library, task, list(texts))

    def make_model() -> nn.Module:
        size = {
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 2 * width + 8,
            "max_position_embeddings": 256,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if task == "causal":
            special_ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            llama: nn.Module = library.LlamaForCausalLM(
                library.LlamaConfig(**size, **special_ids, num_key_value_heads=2, tie_word_embeddings=False)
            )
            return llama
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        bert: nn.Module = library.BertModel(library.BertConfig(**size, **no_dropout))
        return bert

    model: Any = build_module(make_model, key / "tiny" / task)
    folder.mkdir(parents=True, exist_ok=True)
    with silence_library(library):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train_tokenizer(library: Any, task: str, texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if not texts:
        raise DataError("a tokenizer needs at least one text to learn its merges from")
    names = (
        {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        if task == "causal"
        else {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(names.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    template = "<s> $A" if task == "causal" else "[CLS] $A [SEP]"
    special_tokens = [(token, bpe.token_to_id(token)) for token in template.split() if token != "$A"]
    bpe.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
    return library.PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=256, **names)
