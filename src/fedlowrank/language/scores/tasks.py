"""Evaluation tasks: from a file of records to a score, with everything that the number depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, did_you_mean
from ...data.text.table import read_file
from . import perplexity, rouge
from .generate import Decoding, complete_prompts
from .harness import HarnessTask
from .score import Render, Score, adds_special_tokens


@dataclass(frozen=True)
class DollyTask(CheckedFields):
    """Dolly (Databricks 2023): mean Rouge-L F of the answers to the instructions of a held-out category.

    Attributes:
        path: jsonl of ``instruction``, ``context``, ``response`` and ``category``; any file of
            :func:`fedlowrank.data.text.table.read_file` will do, as for perplexity.
        category: only records of this category; None takes all, for a file that holds the held-out ones
            alone.
        stemmer: whether words are reduced to their stems first.
        limit: only so many of these records, the first; None takes all.
        decoding: greedy with 128 new tokens, by default.
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
            known = {r["category"] for r in records}
            if self.category not in known:
                raise DataError(
                    f"{self.path!r} has no category {self.category!r}. {did_you_mean(self.category, known)}"
                )
            records = [r for r in records if r["category"] == self.category]
        records = records[: self.limit]
        prompts = [format({"instruction": r["instruction"], "input": r["context"]}) for r in records]
        special = self.decoding.special_tokens and adds_special_tokens(format)
        decoding = replace(self.decoding, special_tokens=special)
        completions = [text.strip() for text in complete_prompts(model, tokenizer, prompts, decoding)]
        value = rouge.rouge_l(completions, [r["response"] for r in records], self.stemmer)
        details = {"metric": "Rouge-L F", "stemmer": self.stemmer, "category": self.category}
        return Score("dolly", value, len(records), decoding.describe(), details)


@dataclass(frozen=True)
class PerplexityTask(CheckedFields):
    """Perplexity of texts: exp of the mean negative log-likelihood of a token.

    Attributes:
        path: jsonl of records.
        text: column whose tokens count.
        instruction: column with an instruction; the text is then its answer and stands behind it in the
            format given. None: the text stands alone.
        input: column with the instruction's input, or None.
        context: rows are cut on the right to so many tokens; None leaves them.
        end: whether the end token counts.
        batch_size: rows at a time; the score does not depend on it.
        limit: only so many records, the first; None takes all.
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
        records = _read_records(self.path, columns, self.limit)
        prompts, texts = [""] * len(records), [r[self.text] for r in records]
        if self.instruction is not None:
            inputs = [""] * len(records) if self.input is None else [r[self.input] for r in records]
            prompts = [
                format({"instruction": r[self.instruction], "input": given})
                for r, given in zip(records, inputs, strict=True)
            ]
        special = self.instruction is None or adds_special_tokens(format)
        rows = perplexity.tokenize_texts(tokenizer, prompts, texts, self.context, self.end, special)
        found = perplexity.measure_likelihood(model, rows, self.batch_size)
        how = "nothing generated: each token given all before it"
        how += "" if self.context is None else f", rows cut to {self.context} tokens"
        details = {"nll": found.nll, "tokens": found.tokens}
        details |= {"records": len(records), "end token counts": self.end}
        return Score("perplexity", found.perplexity, found.tokens, how, details)


def _read_records(
    path: str, columns: Sequence[str], limit: int | None = None, optional: str = ""
) -> list[dict[str, str]]:
    """The columns of a file's first records, all text; the optional one may be missing."""
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
