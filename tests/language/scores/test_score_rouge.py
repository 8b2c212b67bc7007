"""ROUGE-L is the F measure of the longest common subsequence."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import DataError
from fedlowrank.language.scores.rouge import compute_rouge_l


def by_hand(prediction, reference):
    """F of precision and recall of the longest common subsequence of words."""
    a, b = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
    longest = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            longest[i, j] = longest[i - 1, j - 1] + 1 if x == y else max(longest[i - 1, j], longest[i, j - 1])
    common = longest[-1, -1]
    return 0.0 if common == 0 else 2 * common / (len(a) + len(b))


words = st.lists(st.sampled_from(["the", "cat", "Sat", "on", "a", "mat.", "42", "é"]), max_size=8).map(
    " ".join
)


@pytest.mark.full
@given(st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_it_is_the_f_of_the_longest_common_subsequence(pairs):
    predictions, references = zip(*pairs, strict=True)
    assert compute_rouge_l(predictions, references) == pytest.approx(
        np.mean([by_hand(p, r) for p, r in pairs])
    )


def test_stems_count_only_if_asked():
    assert compute_rouge_l(["the cats were running"], ["the cat was run"]) == pytest.approx(0.25)
    assert compute_rouge_l(["the cats were running"], ["the cat was run"], stemmer=True) == pytest.approx(
        0.75
    )


def test_a_missing_package_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(DataError, match=r"fedlowrank\[language\]"):
        compute_rouge_l(["a"], ["a"])
