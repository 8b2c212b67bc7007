"""Rouge-L (Lin 2004) by the package ``rouge-score``, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import DataError
from ..optional import import_library


def rouge_l_each(predictions: Sequence[str], references: Sequence[str], stemmer: bool = False) -> list[float]:
    """Rouge-L F of each prediction with its reference, in [0, 1].

    Needs ``pip install 'fedlowrank[language]'``. Words are lower-cased runs of ASCII letters and digits, so
    text in other scripts has none and scores 0.

    Args:
        predictions: texts.
        references: texts.
        stemmer: whether words are reduced to their stems (Porter) first; published numbers differ in this.

    Raises:
        DataError: if ``rouge-score`` is missing, there is nothing to score, or the lengths differ.
    """
    if not references or len(predictions) != len(references):
        raise DataError(
            f"there are {len(predictions)} predictions and {len(references)} references; equally many are "
            "needed."
        )
    scorer = import_library("rouge_score.rouge_scorer", "Rouge-L").RougeScorer(
        ["rougeL"], use_stemmer=stemmer
    )
    pairs = zip(predictions, references, strict=True)
    return [float(scorer.score(target, prediction)["rougeL"].fmeasure) for prediction, target in pairs]


def rouge_l(predictions: Sequence[str], references: Sequence[str], stemmer: bool = False) -> float:
    """The mean of :func:`rouge_l_each`."""
    each = rouge_l_each(predictions, references, stemmer)
    return sum(each) / len(each)
