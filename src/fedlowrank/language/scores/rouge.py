"""Computes Rouge-L (Lin 2004) with the package ``rouge-score``, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence

from ..optional_packages import import_library


def compute_rouge_l(predictions: Sequence[str], references: Sequence[str], stemmer: bool = False) -> float:
    """Compute the mean Rouge-L F of predictions with their references, in [0, 1].

    Needs ``pip install 'fedlowrank[language]'``. Words are lower-cased runs of ASCII letters and digits, so
    text in other scripts has no words and scores 0. With ``stemmer`` words are reduced to their stems (Porter) first.
    Some published results use the stemmer and some do not.

    Raises:
        DataError: if ``rouge-score`` is missing.
    """
    library = import_library("rouge_score.rouge_scorer", "Rouge-L")
    scorer = library.RougeScorer(["rougeL"], use_stemmer=stemmer)
    pairs = zip(predictions, references, strict=True)
    return sum(float(scorer.score(target, text)["rougeL"].fmeasure) for text, target in pairs) / len(
        references
    )
