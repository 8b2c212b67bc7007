"""Scores of language models, each with its decoding settings.

All functions take an unchanged model and tokenizer of transformers. Large packages are imported at their first use.
"""

from .harness_task import HarnessTask
from .score import PromptFormat, Render, Score, ScoreTask
from .score_tasks import TASKS, DollyTask, PerplexityTask
from .text_generation import Decoding, complete_prompts

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
