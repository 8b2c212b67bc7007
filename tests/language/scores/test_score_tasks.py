"""Tasks score held-out texts and answers, and files that cannot be used are named."""

import gzip
import json
import math

import pytest

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.scores import (
    Decoding,
    DollyTask,
    PerplexityTask,
    PromptFormat,
    Score,
    complete_prompts,
)
from fedlowrank.language.scores.perplexity import measure_likelihood, tokenize_texts
from tests.language.scores.score_models import Scripted, byte_tokenizer, llama


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(eos_token="<end>")


def write(path, records):
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def asked(record):
    return f"[{record['instruction']}|{record['input']}]"


def test_dolly_scores_the_held_out_category(tmp_path, tokenizer):
    records = [
        {"instruction": "a", "context": "b", "response": "the cat sat", "category": "held"},
        {"instruction": "c", "context": "", "response": "the cat sat", "category": "held"},
        {"instruction": "d", "context": "", "response": "x", "category": "seen"},
    ]
    path = write(tmp_path / "dolly.jsonl.gz", records)
    says = {"[a|b]": " The cat sat.\n", "[c|]": "the dog", "[d|]": "x"}
    score = DollyTask(path, "held").score(Scripted(tokenizer, says), tokenizer, asked)
    # one whole match; one word of two and three in common
    assert score.value == pytest.approx((1 + 2 / 5) / 2)
    assert score.count == 2
    assert score.decoding.startswith("greedy, at most 128 new tokens")
    assert DollyTask(path).score(Scripted(tokenizer, says), tokenizer, asked).count == 3
    assert DollyTask(path, "held", limit=1).score(
        Scripted(tokenizer, says), tokenizer, asked
    ).value == pytest.approx(1)
    with pytest.raises(DataError, match="Did you mean 'held'"):
        DollyTask(path, "helt").score(Scripted(tokenizer, says), tokenizer, asked)


def test_perplexity_of_texts_and_of_answers(tmp_path, tokenizer):
    model = llama(len(tokenizer))
    path = write(
        tmp_path / "texts.jsonl",
        [{"text": "the quick brown", "q": "lazy", "more": "dog"}, {"text": "fox", "q": "a", "more": None}],
    )
    score = PerplexityTask(path).score(model, tokenizer, asked)
    plain = measure_likelihood(model, tokenize_texts(tokenizer, ["", ""], ["the quick brown", "fox"]))
    assert (score.value, score.count) == (pytest.approx(plain.perplexity), plain.tokens)
    assert math.log(score.value) == pytest.approx(score.details["nll"])
    score = PerplexityTask(path, instruction="q", input="more", end=True, batch_size=1).score(
        model, tokenizer, asked
    )
    given = measure_likelihood(
        model,
        tokenize_texts(
            tokenizer, ["[lazy|dog]", "[a|]"], ["the quick brown", "fox"], end_token=tokenizer.eos_token_id
        ),
    )
    assert (score.value, score.count) == (pytest.approx(given.perplexity), given.tokens)
    assert given.nll != pytest.approx(plain.nll)
    assert score.details["counted end token"] == tokenizer.eos_token
    with pytest.raises(ConfigError, match="no token ends an answer in training"):
        PerplexityTask(path, end=True).score(model, tokenizer, PromptFormat(asked))
    for wrong in ({"context": 1}, {"batch_size": 0}):
        with pytest.raises(ConfigError):
            PerplexityTask(path, **wrong)


@pytest.mark.full
def test_a_real_model_goes_through_a_task(tmp_path, tokenizer):
    """A reference that is what the model writes scores 1; the model itself is a random one."""
    model = llama(len(tokenizer))
    prompt = asked({"instruction": "say", "input": "it"})
    text = complete_prompts(model, tokenizer, [prompt], Decoding(30))[0] + " word"
    path = write(tmp_path / "dolly.jsonl", [{"instruction": "say", "context": "it", "response": text}])
    score = DollyTask(path, decoding=Decoding(30)).score(model, tokenizer, asked)
    assert isinstance(score, Score)
    assert score.value > 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b'{"instruction": "a"}\n', "line 1 has no 'response'"),
        (b'{"instruction": 1, "response": "1"}\n', "must be text, not 1"),
        (None, "does not exist"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, tokenizer, content, message):
    path = tmp_path / "test.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        DollyTask(str(path)).score(Scripted(tokenizer, {}), tokenizer, asked)
