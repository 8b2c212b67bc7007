"""Generates text by a language model, with decoding settings that are printed beside a score."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, TaskError
from ...core.key import Key
from ...data.text.tokens import find_added_prefix
from ...models.stateless import exchange_slots
from ..base_model import find_end_tokens
from ..optional_packages import import_library


@dataclass(frozen=True)
class Decoding(CheckedFields):
    """How text is generated. Of the model's own generation settings only the end tokens are used.

    Attributes:
        max_new_tokens: maximum number of tokens after the prompt.
        method: choice of the next token: greedy, the likeliest one; or sample, from the distribution.
        temperature: divisor of the logits for sampling, above 0.
        top_p: probability in (0, 1] for sampling, which keeps only the likeliest tokens that together reach it.
        batch_size: number of prompts in a batch.
        stop: strings that end the text, which stops before the first of them. A string that is a special token of the
            tokenizer ends the text as the end token does.
        prompt_tokens: maximum number of prompt tokens; longer prompts are truncated on the left. With None, a prompt
            that exceeds the model's context is an error.
        special_tokens: whether the tokenizer adds its special tokens (such as a begin token) to the prompt.
            False for prompts that include them, such as prompts of a chat template.
        key: source of randomness for sampling.
    """

    max_new_tokens: int = 256
    method: Literal["greedy", "sample"] = "greedy"
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 8
    stop: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    special_tokens: bool = True
    key: Key = Key((0,))

    def __post_init__(self) -> None:
        check_bounds(
            self, dict.fromkeys(("max_new_tokens", "batch_size", "prompt_tokens"), ">= 1"), "decoding"
        )
        if not (0 < self.temperature < math.inf and 0 < self.top_p <= 1):
            raise ConfigError(
                f"decoding: temperature must be > 0 and top_p in (0, 1]; they are {self.temperature} and "
                f"{self.top_p}. For the likeliest token each time set method to 'greedy'."
            )
        if self.method == "greedy" and (self.temperature != 1 or self.top_p != 1):
            raise ConfigError(
                "decoding: temperature and top_p have no effect on greedy decoding. Set method to 'sample'."
            )
        if "" in self.stop:
            raise ConfigError("decoding: an empty stop string would end every text before it begins")

    def describe(self) -> str:
        """Describe all settings that change the text in one line, to print beside a score."""
        method = "greedy"
        if self.method == "sample":
            name = "/".join(map(str, self.key.path))
            method = f"sampled at temperature {self.temperature:g}, top-p {self.top_p:g}, key {name}"
        phrases = [method, f"at most {self.max_new_tokens} new tokens", f"batches of {self.batch_size}"]
        if self.stop:
            phrases.append("stop at " + " ".join(map(repr, self.stop)))
        if self.prompt_tokens is not None:
            phrases.append(f"prompts cut to their last {self.prompt_tokens} tokens")
        if not self.special_tokens:
            phrases.append("no special tokens added")
        return ", ".join(phrases)


def complete_prompts(model: Any, tokenizer: Any, prompts: Sequence[str], decoding: Decoding) -> list[str]:
    """Generate the text after each prompt, without special tokens, truncated at the stop strings.

    The tokenizer needs no padding token. The model is in evaluation mode during generation. Greedy texts do not depend
    on the batch size, except by rounding. Sampling runs ``generate`` inside ``fork_rng``, seeded for each batch from the
    key: the global generators do not change, and equal keys, prompts and batch sizes give equal texts on one kind of
    device.

    New tokens are decoded together with the prompt's tokens, because many tokenizers drop a space at the beginning of a
    text, which would break the indentation of code. New tokens are decoded alone only if they change the decoded text of
    the prompt (incomplete characters).

    Raises:
        DataError: if transformers is missing, a prompt has no token, or a prompt with the new tokens exceeds the
            model's context.
        TaskError: if the model is an encoder with a decoder.
    """
    transformers = import_library("transformers", "generating text")
    if getattr(model.config, "is_encoder_decoder", False):
        raise TaskError(
            f"{type(model).__name__} is an encoder and decoder; texts are only completed by causal models."
        )
    tokens = [_tokenize_prompt(tokenizer, prompt, decoding) for prompt in prompts]
    _check_lengths(model, tokens, decoding)
    end_tokens = _collect_end_tokens(model, tokenizer, decoding)
    # padding is masked out, so any token can pad
    pad_token = min(end_tokens, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    settings: dict[str, Any] = {
        "max_new_tokens": decoding.max_new_tokens,
        "pad_token_id": pad_token,
        "eos_token_id": sorted(end_tokens) or None,
        "do_sample": decoding.method == "sample",
    }
    if decoding.method == "sample":
        settings |= {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    device = next(model.parameters()).device
    pad_rows = partial(pad_sequence, batch_first=True, padding_side="left")
    texts = [""] * len(prompts)
    # sorted by length, the longest first: this saves padding, and out-of-memory errors occur at once
    order = sorted(range(len(prompts)), key=lambda i: -len(tokens[i]))
    with (
        use_evaluation_mode(model),
        _replace_generation_settings(model, transformers.GenerationConfig),
        torch.no_grad(),
    ):
        for batch, begin in enumerate(range(0, len(order), decoding.batch_size)):
            rows = order[begin : begin + decoding.batch_size]
            prompt_rows = [torch.tensor(tokens[i]) for i in rows]
            x = pad_rows(prompt_rows, padding_value=pad_token)
            mask = pad_rows([torch.ones_like(row) for row in prompt_rows])
            stop_criterion = _make_stop_criterion(
                tokenizer, [tokens[i] for i in rows], x.shape[1], decoding.stop
            )
            with _seed_sampling(decoding, batch):
                output_ids = model.generate(
                    input_ids=x.to(device),
                    attention_mask=mask.to(device),
                    generation_config=transformers.GenerationConfig(**settings),
                    stopping_criteria=transformers.StoppingCriteriaList(
                        [stop_criterion] if decoding.stop else []
                    ),
                )
            for i, row in zip(rows, output_ids[:, x.shape[1] :].tolist(), strict=True):
                stop = next((index for index, token in enumerate(row) if token in end_tokens), len(row))
                texts[i] = truncate_at_stop(_decode_new_text(tokenizer, tokens[i], row[:stop]), decoding.stop)
    return texts


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first occurrence of a stop string."""
    return text[: min((position for position in map(text.find, stop) if position >= 0), default=len(text))]


@contextlib.contextmanager
def use_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within a block; then each module returns to its own mode."""
    with exchange_slots((module.__dict__, "training", False) for module in model.modules()):
        yield


@contextlib.contextmanager
def _replace_generation_settings(model: torch.nn.Module, config: Callable[[], Any]) -> Iterator[None]:
    # generate() takes settings that are not passed (beams, penalties, minimum lengths) from the settings saved with the
    # model
    slots = [(m.__dict__, "generation_config") for m in model.modules() if "generation_config" in m.__dict__]
    with exchange_slots((module_dict, name, config()) for module_dict, name in slots):
        yield


@contextlib.contextmanager
def _seed_sampling(decoding: Decoding, batch: int) -> Iterator[None]:
    if decoding.method == "greedy":
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed((decoding.key / "batch" / batch).seed())
        yield


def encode_prompt(tokenizer: Any, prompt: str, special_tokens: bool = True) -> list[int]:
    """Tokenize a prompt as in training: with the tokens that the tokenizer writes before a text, and none after it.

    A prompt that begins with these tokens, as from a chat template, gets them once.
    """
    tokens = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    prefix = find_added_prefix(tokenizer) if special_tokens else []
    return tokens if tokens[: len(prefix)] == prefix else [*prefix, *tokens]


def _tokenize_prompt(tokenizer: Any, prompt: str, decoding: Decoding) -> list[int]:
    tokens = encode_prompt(tokenizer, prompt, decoding.special_tokens)
    if not tokens:
        raise DataError(f"the prompt {prompt[:60]!r} has no token: a model cannot begin without one.")
    return tokens if decoding.prompt_tokens is None else tokens[-decoding.prompt_tokens :]


def _check_lengths(model: Any, tokens: Sequence[Sequence[int]], decoding: Decoding) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    for i, row in enumerate(tokens):
        if limit is not None and len(row) + decoding.max_new_tokens > limit:
            raise DataError(
                f"prompt {i} has {len(row)} tokens; with {decoding.max_new_tokens} new ones it exceeds the "
                f"model's context of {limit}. Set prompt_tokens to {max(1, limit - decoding.max_new_tokens)} "
                "to cut prompts on the left, or lower max_new_tokens."
            )


def _collect_end_tokens(model: Any, tokenizer: Any, decoding: Decoding) -> set[int]:
    end_tokens: set[int | None] = {*find_end_tokens(getattr(model, "generation_config", None))}
    # decoded text has no special tokens, so a stop string that is one is found by its id; other strings have no id.
    # all_special_tokens lacks tokens of add_tokens(special_tokens=True)
    added_tokens = tokenizer.added_tokens_decoder.values()
    special_tokens = {*tokenizer.all_special_tokens, *(t.content for t in added_tokens if t.special)}
    special_stops = [text for text in decoding.stop if text in special_tokens]
    end_tokens |= {tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, special_stops)}
    return {int(i) for i in end_tokens if i is not None}


def _decode_new_text(tokenizer: Any, prompt: Sequence[int], new_tokens: Sequence[int]) -> str:
    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    prompt_text, full_text = decode(prompt), decode([*prompt, *new_tokens])
    return full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else decode(new_tokens)


def _make_stop_criterion(
    tokenizer: Any, prompts: Sequence[Sequence[int]], width: int, stop: Sequence[str]
) -> Callable[..., Tensor]:
    # every text token has at least one byte; a few more, because text decoded from a middle token may lack a space
    tail_length = max((len(s.encode()) for s in stop), default=0) + 4

    def check_stop(input_ids: Tensor, _: Tensor, **__: Any) -> Tensor:
        rows = input_ids[:, width:].tolist()
        has_stopped = []
        for prompt, row in zip(prompts, rows, strict=True):
            tail = _decode_new_text(tokenizer, [], row[-tail_length:])
            # decoding the tail is fast and excludes most rows; the whole text decides
            may_stop = any(s in tail for s in stop)
            full_text = _decode_new_text(tokenizer, prompt, row) if may_stop else ""
            has_stopped.append(may_stop and any(s in full_text for s in stop))
        return torch.tensor(has_stopped, device=input_ids.device)

    return check_stop
