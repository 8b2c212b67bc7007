"""Evaluation tasks that read records from a file: Dolly and perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, did_you_mean
from ...data.text.packing import Sample
from ...data.text.table import read_file
from ...data.text.text_records import Instruction
from . import perplexity, rouge
from .harness_task import HarnessTask
from .score import PromptFormat, Render, Score, adds_special_tokens, find_end_token
from .text_generation import Decoding, complete_prompts


@dataclass(frozen=True)
class DollyTask(CheckedFields):
    """Dolly (Databricks 2023): mean Rouge-L F of the answers to the instructions of a held-out category.

    Attributes:
        path: jsonl file with ``instruction``, ``context``, ``response`` and ``category``, or another file that
            :func:`fedlowrank.data.text.table.read_file` reads.
        category: category of the records that are scored; None takes all, for a file that has only held-out
            records.
        stemmer: whether words are reduced to their stems first.
        limit: number of records that are scored, from the first on; None takes all.
        decoding: settings of text generation; by default greedy with 128 new tokens.
    """

    section = "dolly"

    path: str
    category: str | None = None
    stemmer: bool = False
    limit: int | None = None
    decoding: Decoding = Decoding(128)

    def __post_init__(self) -> None:
        check_bounds(self, {"limit": ">= 1"}, "dolly")

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """See :meth:`.score.ScoreTask.score`."""
        columns = ("instruction", "context", "response", *(() if self.category is None else ("category",)))
        records = _read_records(self.path, columns, optional="context")
        if self.category is not None:
            categories = {r["category"] for r in records}
            if self.category not in categories:
                raise DataError(
                    f"{self.path!r} has no category {self.category!r}. {did_you_mean(self.category, categories)}"
                )
            records = [r for r in records if r["category"] == self.category]
        records = records[: self.limit]
        prompts = [format({"instruction": r["instruction"], "input": r["context"]}) for r in records]
        adds_special = self.decoding.special_tokens and adds_special_tokens(format)
        decoding = replace(self.decoding, special_tokens=adds_special)
        completions = [text.strip() for text in complete_prompts(model, tokenizer, prompts, decoding)]
        value = rouge.compute_rouge_l(completions, [r["response"] for r in records], self.stemmer)
        details = {"metric": "Rouge-L F", "stemmer": self.stemmer, "category": self.category}
        return Score("dolly", value, len(records), decoding.describe(), details)


@dataclass(frozen=True)
class PerplexityTask(CheckedFields):
    """Perplexity of texts: exp of the mean negative log-likelihood of a token.

    The tokens are those of training, and those count that ``language.loss_on = "response"`` learns. With ``end`` the negative
    log-likelihood is therefore the loss that the run reports for the same records.

    Attributes:
        path: jsonl file with records; one without a text is left out, as in training.
        text: column whose tokens count.
        instruction: column with an instruction that the text answers; the instruction is written as a prompt in the
            given format. None for texts without a prompt.
        input: column with the instruction's input, or None.
        context: maximum number of tokens of a row; longer rows are truncated on the right. None truncates nothing.
        end: whether the token that ends an answer in training counts: the end token of the tokenizer, or with
            ``language.format = "chat"`` the token by which the chat template ends an answer, and what it writes after it.
        batch_size: number of rows in a batch; the score does not depend on it.
        limit: number of records, from the first on; None takes all.
    """

    section = "perplexity"

    path: str
    text: str = "text"
    instruction: str | None = None
    input: str | None = None
    context: int | None = 1024
    end: bool = False
    batch_size: int = 8
    limit: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self, {"limit": ">= 1", "batch_size": ">= 1"}, "perplexity")
        if self.context is not None and self.context < 2:
            raise ConfigError(
                f"context must be >= 2, it is {self.context}: the first token is predicted by nothing"
            )

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """See :meth:`.score.ScoreTask.score`."""
        columns = [name for name in (self.text, self.instruction, self.input) if name is not None]
        # as in training, a record without a text is left out
        records = [r for r in _read_records(self.path, columns, self.limit) if r[self.text].strip()]
        end_token = find_end_token(format, tokenizer)
        if self.end and end_token is None:
            raise ConfigError("no token ends an answer in training, so none can count. Set end to false")
        whole_rows = self._tokenize(records, tokenizer, format, end_token)
        rows = [perplexity.cut_row(row, self.context, None if self.end else end_token) for row in whole_rows]
        likelihood = perplexity.measure_likelihood(model, rows, self.batch_size)
        decoding = "nothing generated: each token given all before it"
        decoding += "" if self.context is None else f", rows cut to {self.context} tokens"
        details: dict[str, Any] = {"nll": likelihood.nll, "tokens": likelihood.tokens}
        end_text = tokenizer.convert_ids_to_tokens(end_token) if self.end else None
        details |= {"records": sum(map(perplexity.has_counted_token, rows)), "counted end token": end_text}
        return Score("perplexity", likelihood.perplexity, likelihood.tokens, decoding, details)

    def _tokenize(
        self, records: Sequence[dict[str, str]], tokenizer: Any, format: Render, end_token: int | None
    ) -> list[Sample]:
        """Tokens and labels of records, of any length."""
        texts = [record[self.text] for record in records]
        if self.instruction is None:
            return perplexity.tokenize_texts(tokenizer, [""] * len(texts), texts, end_token)
        instructions = [
            Instruction(r[self.instruction], r[self.text], "" if self.input is None else r[self.input])
            for r in records
        ]
        if isinstance(format, PromptFormat) and format.make_rows is not None:
            return format.make_rows(instructions)
        prompts = [format({"instruction": r.prompt, "input": r.input}) for r in instructions]
        return perplexity.tokenize_texts(tokenizer, prompts, texts, end_token, adds_special_tokens(format))


def _read_records(
    path: str, columns: Sequence[str], limit: int | None = None, optional: str = ""
) -> list[dict[str, str]]:
    """Read text columns of a file's first records; the optional column may be missing."""
    table = read_file(path)
    table.require()
    return [
        {column: table.text(i, column, optional=column == optional) for column in columns}
        for i in range(len(table.rows))[:limit]
    ]


TASKS: dict[str, type] = {
    "dolly": DollyTask,
    "lm_eval": HarnessTask,
    "perplexity": PerplexityTask,
}
"""Tasks by name; the fields of each class are its settings."""
