"""Conversations with a language model, by the chat template of its tokenizer or question by question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..core.errors import ConfigError
from .scores.text_generation import Decoding, complete_prompts, encode_prompt


class ChatSession:
    """A conversation with a language model: keeps the turns and generates the next reply.

    With a chat template the model sees the whole conversation; the oldest turns are dropped if the conversation exceeds
    the context. Without a chat template the model sees only the last question, in the format of training.

    Args:
        model: causal model of ``transformers``.
        tokenizer: tokenizer of the model.
        write_prompt: function that writes a question in the format of training; used without a chat template.
        decoding: settings of text generation. The tokenizer adds no special tokens to prompts of a chat template, as in
            training.
        by_template: whether the chat template writes the prompts, if the tokenizer has one.

    Attributes:
        dropped_count: number of turns that were dropped.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        write_prompt: Callable[[str], str],
        decoding: Decoding,
        by_template: bool = True,
    ) -> None:
        self.dropped_count = 0
        self._model = model
        self._tokenizer = tokenizer
        self._write_prompt = write_prompt
        self._by_template = by_template
        adds_special = decoding.special_tokens and not self.has_template
        self._decoding = replace(decoding, special_tokens=adds_special)
        self._replies = 0
        self._turns: list[dict[str, str]] = []

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer's chat template writes the questions."""
        return self._by_template and bool(getattr(self._tokenizer, "chat_template", None))

    def reply(self, question: str) -> str:
        """Generate the model's reply to a question, and add both to the conversation.

        Raises:
            ConfigError: if the question alone, with the tokens to generate, exceeds the model's context.
        """
        if not self.has_template:
            prompt = self._write_prompt(question)
            self._check_length(prompt)
            return self._complete(prompt)
        self._turns.append({"role": "user", "content": question})
        while (excess := self._compute_excess(prompt := self._apply_template())) > 0 and len(self._turns) > 1:
            # drop a question with its reply
            del self._turns[:2]
            self.dropped_count += 2
        if excess > 0:
            self._turns.pop()
        self._check_length(prompt)
        answer = self._complete(prompt)
        self._turns.append({"role": "assistant", "content": answer})
        return answer

    def _apply_template(self) -> str:
        text: str = self._tokenizer.apply_chat_template(
            self._turns, tokenize=False, add_generation_prompt=True
        )
        return text

    def _complete(self, prompt: str) -> str:
        # a key for each reply, so that equal questions get different samples
        decoding = replace(self._decoding, key=self._decoding.key / "reply" / self._replies)
        self._replies += 1
        (text,) = complete_prompts(self._model, self._tokenizer, [prompt], decoding)
        return text.strip()

    def _compute_excess(self, prompt: str) -> int:
        """Compute the number of tokens by which a prompt and a reply exceed the context; at most 0 if they fit."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is None:
            return 0
        ids = encode_prompt(self._tokenizer, prompt, self._decoding.special_tokens)
        return len(ids) + self._decoding.max_new_tokens - int(limit)

    def _check_length(self, prompt: str) -> None:
        if (excess := self._compute_excess(prompt)) > 0:
            limit = self._model.config.max_position_embeddings
            raise ConfigError(
                f"the question and {self._decoding.max_new_tokens} tokens of reply exceed the model's context of "
                f"{limit} tokens by {excess}. Ask for a shorter reply, or shorten the question."
            )
