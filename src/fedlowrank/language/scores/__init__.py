"""Scores of language models, each with its decoding settings.

Everything takes a model and a tokenizer of transformers as they are. Nothing heavy is imported until it is
used.
"""

from .generate import Decoding, complete_prompts
from .harness import HarnessTask
from .score import PromptFormat, Render, Score, ScoreTask
from .tasks import TASKS, DollyTask, PerplexityTask

__all__ = [
    "TASKS",
    "Decoding",
    "DollyTask",
    "HarnessTask",
    "PerplexityTask",
    "PromptFormat",
    "Render",
    "Score",
    "ScoreTask",
    "complete_prompts",
]
