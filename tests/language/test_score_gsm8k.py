import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlowrank.core.errors import DataError
from fedlowrank.language.scores import gsm8k

# completion, reference; right by the last number, by lm_eval's strict-match and by its flexible-extract
TABLE = [
    ("18 - 5 = 13\n#### 13", "13", True, True, True),
    ("The answer is 13.", "13", True, False, True),
    ("The answer is $1,300.", "1300", True, False, True),
    ("#### 1,300", "#### 1300", True, True, True),
    ("#### 1300", "so 1,000 + 300\n#### 1,300", True, True, True),
    ("#### 42.0", "42", True, False, False),
    ("#### 42", "42.0", True, False, False),
    ("#### $42", "42", True, False, True),
    ("#### -7", "-7", True, True, True),
    ("it is -$7", "-7", True, False, True),
    ("#### 5 and then 6", "5", False, True, False),
    ("#### 5 #### 6", "5", False, True, False),
    ("it was 5...", "5", True, False, False),
    ("3 of them. So...", "3", True, False, False),
    ("a difference of 12-7", "7", True, False, False),
    ("between 3-4", "-4", False, False, True),
    ("no number", "4", False, False, False),
    ("", "4", False, False, False),
    ("####5", "5", True, False, True),
    ("half is .5", "0.5", True, False, False),
    ("half is .5", ".5", True, False, True),
    ("72 clips", "72", True, False, True),
    ("720 clips", "72", False, False, False),
    ("50% of 10", "50", False, False, False),
    ("#### 13\n\nQuestion: 4?", "13", False, True, False),
]


def test_conventions():
    for text, answer, last, strict, flexible in TABLE:
        found = gsm8k.grade_answers([text], [answer])
        assert found == {"last": last, "strict": strict, "flexible": flexible}, (text, answer)
    found = gsm8k.grade_answers(["#### 1", "it is 2", "3", "5"], ["1", "2", "3", "4"])
    assert found == {"last": 0.75, "strict": 0.25, "flexible": 0.75}
    with pytest.raises(DataError, match="answer 1 has no number"):
        gsm8k.grade_answers(["1", "1"], ["1", "#### none"])


def test_the_table_is_what_lm_eval_says():
    """Against the filters and the metric of lm_eval themselves, with the settings of its task gsm8k."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed; the table stands for it")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    strict = RegexFilter(r"#### (\-?[0-9\.\,]+)")
    flexible = RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    ignored = [",", r"\$", r"(?s).*#### ", r"\.$"]
    for text, answer, _, *theirs in TABLE:
        for rule, right in zip((strict, flexible), theirs, strict=True):
            taken = rule.apply([[text]], [{}])[0][0]
            found = exact_match_hf_evaluate([taken], [answer], regexes_to_ignore=ignored, ignore_case=True)[
                "exact_match"
            ]
            assert bool(found) == right, (text, answer, taken)


@pytest.mark.full
@settings(deadline=None)
@given(
    st.integers(-(10**9), 10**9),
    st.integers(0, 99),
    st.sampled_from(["", "$"]),
    st.sampled_from(["", ".", "!", " apples"]),
)
def test_a_number_is_found_however_it_is_written(whole, cents, dollar, after):
    sign, size = ("-" if whole < 0 else ""), abs(whole)
    value = float(f"{sign}{size}.{cents:02d}")
    written = f"first 7, then the answer is {sign}{dollar}{size:,}.{cents:02d}{after}"
    assert float(gsm8k.last_number(written)) == value
    assert gsm8k.grade_answers([written], [f"#### {sign}{size}.{cents:02d}"])["last"] == 1
    assert gsm8k.grade_answers([written], [f"#### {sign}{size}.{(cents + 1) % 100:02d}"])["last"] == 0


def test_few_shots_come_first_and_in_order():
    shots = [{"question": f"q{i}?", "answer": f"because\n#### {i}"} for i in range(8)]
    prompt = gsm8k.build_few_shot_prompt("and now?", shots)
    pieces = [piece for i in range(8) for piece in (f"q{i}?", f"because\n#### {i}")] + ["and now?"]
    at = [prompt.index(piece) for piece in pieces]
    assert at == sorted(at)
    assert prompt.count("Question:") == prompt.count("Answer:") == 9
    assert prompt.endswith("and now?\nAnswer:")


@pytest.mark.data
def test_real_solutions_are_right_by_every_convention(real):
    for name in ("train", "test"):
        with gzip.open(real / "gsm8k" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            answers = [json.loads(line)["answer"] for line in lines]
        numbers = [answer.split("####")[1].strip() for answer in answers]
        found = gsm8k.grade_answers(answers, answers)
        assert found == {"last": 1.0, "strict": 1.0, "flexible": 1.0}
        shifted = gsm8k.grade_answers([f"#### {float(n.replace(',', '')) + 1:g}" for n in numbers], answers)
        assert shifted["last"] == 0.0
