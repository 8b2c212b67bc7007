"""Evaluation tasks: from a file of records to a score, with everything that the number depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError, did_you_mean
from ...data.text.table import read_file
from . import gsm8k, humaneval, perplexity, rouge
from .generate import Decoding, complete_prompts
from .sandbox import ProgramLimits

Format = Callable[[Mapping[str, str]], str]
"""The prompt of an instruction record with ``instruction`` and ``input`` (may be empty).

It should be the format of training.
"""


@dataclass(frozen=True)
class Score:
    """What a model is worth at a task.

    Attributes:
        name: of the task.
        value: the headline number; shares are in [0, 1].
        count: records that it is a mean over; for perplexity, tokens.
        decoding: the settings by which text was generated, in words.
        details: other results and settings on which they depend, by name.
    """

    name: str
    value: float
    count: int
    decoding: str
    details: dict[str, Any]


class ScoreTask(Protocol):
    """An evaluation; its settings are the fields of a dataclass, ``path`` that of its data among them."""

    def score(self, model: Any, tokenizer: Any, format: Format) -> Score:
        """Score a causal language model of transformers, or one wrapped by PEFT.

        Raises:
            DataError: if the data cannot be read or do not fit the task.
            ConfigError: if the settings do not fit.
        """
        ...


@dataclass(frozen=True)
class Gsm8kTask(CheckedFields):
    """GSM8K (Cobbe et al. 2021): the share of questions whose last number is right.

    Attributes:
        path: jsonl of ``question`` and ``answer``, such as the published test part; any file of
            :func:`fedlowrank.data.text.table.read_file` will do, for the other tasks too.
        shots: 0 asks in the format given; else so many solved questions stand before each, in plain
            chain-of-thought form.
        train_path: file whose first records are the shots; commonly the published training part.
        grade: which convention is the headline: last, the last number as a number; strict or flexible, as
            lm_eval's two filters. The details have all three.
        limit: only so many records, the first; None takes all.
        decoding: greedy, by default.
    """

    section = "gsm8k"

    path: str
    shots: int = 0
    train_path: str | None = None
    grade: Literal["last", "strict", "flexible"] = "last"
    limit: int | None = None
    decoding: Decoding = Decoding(512)

    def __post_init__(self) -> None:
        check_bounds(self, {"limit": ">= 1"}, "gsm8k")
        if self.shots < 0 or (self.shots > 0) != (self.train_path is not None):
            raise ConfigError(
                f"gsm8k: shots > 0 and train_path belong together; they are {self.shots} and "
                f"{self.train_path!r}"
            )

    def score(self, model: Any, tokenizer: Any, format: Format) -> Score:
        """See :meth:`ScoreTask.score`."""
        records = _read_records(self.path, ("question", "answer"), self.limit)
        decoding = self.decoding
        if self.train_path is None:
            prompts = [format({"instruction": r["question"], "input": ""}) for r in records]
        else:
            shots = _read_records(self.train_path, ("question", "answer"), self.shots)
            if len(shots) < self.shots:
                raise DataError(
                    f"{self.train_path!r} has {len(shots)} records; {self.shots} shots are asked for."
                )
            prompts = [gsm8k.build_few_shot_prompt(r["question"], shots) for r in records]
            decoding = replace(decoding, stop=(*decoding.stop, *gsm8k.STOP))
        completions = complete_prompts(model, tokenizer, prompts, decoding)
        rates = gsm8k.grade_answers(completions, [r["answer"] for r in records])
        prompting = f"{self.shots}-shot chain of thought" if self.shots else "0-shot in the format given"
        details = {**rates, "grade": self.grade, "prompts": prompting}
        return Score("gsm8k", rates[self.grade], len(records), decoding.describe(), details)


@dataclass(frozen=True)
class DollyTask(CheckedFields):
    """Dolly (Databricks 2023): mean Rouge-L F of the answers to the instructions of a held-out category.

    Attributes:
        path: jsonl of ``instruction``, ``context``, ``response`` and ``category``.
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

    def score(self, model: Any, tokenizer: Any, format: Format) -> Score:
        """See :meth:`ScoreTask.score`."""
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
        completions = [text.strip() for text in complete_prompts(model, tokenizer, prompts, self.decoding)]
        value = rouge.rouge_l(completions, [r["response"] for r in records], self.stemmer)
        details = {"metric": "Rouge-L F", "stemmer": self.stemmer, "category": self.category}
        return Score("dolly", value, len(records), self.decoding.describe(), details)


@dataclass(frozen=True)
class HumanEvalTask(CheckedFields):
    """HumanEval (Chen et al. 2021): pass@1. Runs programs that the model wrote; not a security boundary.

    Attributes:
        path: jsonl of problems, such as the published file.
        execute: must be True, for programs of a model are run on this machine.
        prompting: raw, the problem's prompt alone, for the model to go on; or format, the same after an
            instruction in the format given, as the beginning of the answer.
        instruction: the instruction of ``format``.
        samples: completions of each problem; more than one need sampling.
        k: pass@k for each of these; the headline is the first.
        limit: only so many problems, the first; None takes all.
        limits: of each program.
        decoding: greedy, stopping where the function ends, by default.
    """

    section = "humaneval"

    path: str
    execute: bool = False
    prompting: Literal["raw", "format"] = "raw"
    instruction: str = "Complete the Python function."
    samples: int = 1
    k: tuple[int, ...] = (1,)
    limit: int | None = None
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    decoding: Decoding = Decoding(512, stop=humaneval.STOP)

    def __post_init__(self) -> None:
        check_bounds(self, {"limit": ">= 1"}, "humaneval")
        if not self.k or not all(1 <= k <= self.samples for k in self.k):
            raise ConfigError(
                f"humaneval: every k must be from 1 to samples; k is {self.k} and samples {self.samples}"
            )
        if self.samples > 1 and self.decoding.method == "greedy":
            raise ConfigError(
                "humaneval: greedy completions of a problem are all the same; sample, or set samples to 1"
            )

    def score(self, model: Any, tokenizer: Any, format: Format) -> Score:
        """See :meth:`ScoreTask.score`."""
        # before the long work of generation
        if self.execute is not True:
            raise ConfigError(
                "humaneval runs programs that the model wrote, under limits that are no security boundary. "
                "Set execute to true to say that this machine has nothing to lose."
            )
        problems = _read_records(self.path, humaneval.COLUMNS, self.limit)
        prompts = [problem["prompt"] for problem in problems]
        if self.prompting == "format":
            prompts = [
                format({"instruction": self.instruction, "input": prompt}) + prompt for prompt in prompts
            ]
        repeated = [prompt for prompt in prompts for _ in range(self.samples)]
        texts = complete_prompts(model, tokenizer, repeated, self.decoding)
        samples = [texts[i : i + self.samples] for i in range(0, len(texts), self.samples)]
        runs = humaneval.grade_completions(problems, samples, self.limits)
        details: dict[str, Any] = {f"pass@{k}": humaneval.mean_pass_at_k(runs, k) for k in self.k}
        details |= {
            "prompts": self.prompting,
            "samples": self.samples,
            "timed out": sum(run.outcome == "timed out" for own in runs for run in own),
            "sandbox (not a security boundary)": humaneval.describe_isolation(runs),
        }
        value = details[f"pass@{self.k[0]}"]
        return Score("humaneval", value, len(problems), self.decoding.describe(), details)


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

    def score(self, model: Any, tokenizer: Any, format: Format) -> Score:
        """See :meth:`ScoreTask.score`."""
        columns = [name for name in (self.text, self.instruction, self.input) if name is not None]
        records = _read_records(self.path, columns, self.limit)
        prompts, texts = [""] * len(records), [r[self.text] for r in records]
        if self.instruction is not None:
            inputs = [""] * len(records) if self.input is None else [r[self.input] for r in records]
            prompts = [
                format({"instruction": r[self.instruction], "input": given})
                for r, given in zip(records, inputs, strict=True)
            ]
        rows = perplexity.tokenize_texts(tokenizer, prompts, texts, self.context, self.end)
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
    "gsm8k": Gsm8kTask,
    "dolly": DollyTask,
    "humaneval": HumanEvalTask,
    "perplexity": PerplexityTask,
}
"""Tasks by name; the fields of each class are its settings."""
