"""Scores of language models on generated text, each with its decoding settings.

Everything takes a model and a tokenizer of transformers as they are. Nothing heavy is imported until it is
used.
"""

from .generate import Decoding, complete_prompts
from .tasks import TASKS, DollyTask, Format, Gsm8kTask, HumanEvalTask, PerplexityTask, Score, ScoreTask

__all__ = [
    "TASKS",
    "Decoding",
    "DollyTask",
    "Format",
    "Gsm8kTask",
    "HumanEvalTask",
    "PerplexityTask",
    "Score",
    "ScoreTask",
    "complete_prompts",
]
