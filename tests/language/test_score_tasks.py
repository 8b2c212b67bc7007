import gzip
import json
import math

import pytest

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.scores import (
    Decoding,
    DollyTask,
    Gsm8kTask,
    HumanEvalTask,
    PerplexityTask,
    Score,
    complete_prompts,
)
from fedlowrank.language.scores.perplexity import measure_likelihood, tokenize_texts

from .score_models import Scripted, byte_tokenizer, llama


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(eos_token="<end>")


def write(path, records):
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def asked(record):
    return f"[{record['instruction']}|{record['input']}]"


QUESTIONS = [{"question": f"what is {i}?", "answer": f"well\n#### {i}"} for i in range(4)]


def test_gsm8k_without_shots(tmp_path, tokenizer):
    says = {
        "[what is 0?|]": "0",
        "[what is 1?|]": "#### 1",
        "[what is 2?|]": "#### 2.0",
        "[what is 3?|]": "4",
    }
    path = write(tmp_path / "test.jsonl", QUESTIONS)
    score = Gsm8kTask(path).score(Scripted(tokenizer, says), tokenizer, asked)
    assert (score.name, score.value, score.count) == ("gsm8k", 0.75, 4)
    assert (score.details["last"], score.details["strict"], score.details["flexible"]) == (0.75, 0.25, 0.5)
    assert score.decoding == Decoding(512).describe()
    assert Gsm8kTask(path, grade="strict").score(Scripted(tokenizer, says), tokenizer, asked).value == 0.25
    assert Gsm8kTask(path, limit=2).score(Scripted(tokenizer, says), tokenizer, asked).value == 1.0


def test_gsm8k_with_the_first_training_records_as_shots(tmp_path, tokenizer):
    test = write(tmp_path / "test.jsonl.gz", QUESTIONS)
    train = write(
        tmp_path / "train.jsonl.gz", [{"question": f"train {i}?", "answer": f"#### {i}"} for i in range(10)]
    )
    model = Scripted(tokenizer, lambda prompt: f" {prompt.split()[-2][:-1]}\n\nQuestion: 77")
    score = Gsm8kTask(test, shots=8, train_path=train).score(model, tokenizer, asked)
    assert score.value == 1.0
    assert "8-shot" in score.details["prompts"]
    assert "Question" in score.decoding
    for prompt in model.asked:
        assert [f"train {i}?" in prompt for i in range(10)] == [True] * 8 + [False] * 2
    with pytest.raises(DataError, match="10 records; 11 shots"):
        Gsm8kTask(test, shots=11, train_path=train).score(model, tokenizer, asked)
    for wrong in (
        {"shots": 8},
        {"train_path": train},
        {"shots": -1, "train_path": train},
        {"grade": "any"},
        {"limit": 0},
    ):
        with pytest.raises(ConfigError):
            Gsm8kTask(test, **wrong)


def test_dolly_scores_the_held_out_category(tmp_path, tokenizer):
    records = [
        {"instruction": "a", "context": "b", "response": "the cat sat", "category": "held"},
        {"instruction": "c", "context": "", "response": "the cat sat", "category": "held"},
        {"instruction": "d", "context": "", "response": "x", "category": "seen"},
    ]
    path = write(tmp_path / "dolly.jsonl", records)
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


PROBLEMS = [
    {
        "task_id": f"own/{i}",
        "prompt": f"def f{i}(x):\n",
        "entry_point": f"f{i}",
        "test": f"def check(f):\n    assert f(1) == {i}\n",
    }
    for i in range(3)
]


def test_humaneval(tmp_path, tokenizer):
    path = write(tmp_path / "problems.jsonl", PROBLEMS)
    says = {
        "def f0(x):\n": "    return 0\n",
        "def f1(x):\n": "    return x\nprint(",
        "def f2(x):\n": "    return x\n",
    }
    model = Scripted(tokenizer, says)
    with pytest.raises(ConfigError) as found:
        HumanEvalTask(path, execute=False).score(model, tokenizer, asked)
    assert str(found.value) == (
        "humaneval runs programs that the model wrote, under limits that are no security boundary. "
        "Set execute to true to say that this machine has nothing to lose."
    )
    for execute in (None, 1, "yes"):
        with pytest.raises(ConfigError) as found:
            HumanEvalTask(path, execute=execute)
        assert str(found.value) == f"humaneval.execute: input should be a valid boolean; it is {execute!r}"
    assert model.asked == []
    score = HumanEvalTask(path, execute=True).score(model, tokenizer, asked)
    assert score.value == score.details["pass@1"] == pytest.approx(2 / 3)
    assert "in force" in score.details["sandbox (not a security boundary)"]
    assert score.details["timed out"] == 0
    formatted = Scripted(tokenizer, lambda prompt: says[prompt.partition("]")[2]])
    score = HumanEvalTask(path, execute=True, prompting="format", instruction="do").score(
        formatted, tokenizer, asked
    )
    assert score.value == pytest.approx(2 / 3)
    assert formatted.asked[0] == "[do|def f0(x):\n]def f0(x):\n"


def test_humaneval_with_samples(tmp_path, tokenizer):
    path = write(tmp_path / "problems.jsonl", PROBLEMS[:2])
    count = iter(range(100))
    model = Scripted(tokenizer, lambda prompt: f"    return {next(count) % 4}\n")
    task = HumanEvalTask(
        path, execute=True, samples=4, k=(1, 2), decoding=Decoding(9, "sample", batch_size=4)
    )
    score = task.score(model, tokenizer, asked)
    # of four samples one is right: half of the pairs hold it
    assert (score.details["pass@1"], score.details["pass@2"]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (score.value, score.count) == (pytest.approx(0.25), 2)
    for wrong in ({"samples": 2}, {"k": (2,)}, {"k": ()}, {"prompting": "chat"}):
        with pytest.raises(ConfigError):
            HumanEvalTask(path, execute=True, **wrong)


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
        model, tokenize_texts(tokenizer, ["[lazy|dog]", "[a|]"], ["the quick brown", "fox"], end=True)
    )
    assert (score.value, score.count) == (pytest.approx(given.perplexity), given.tokens)
    assert given.nll != pytest.approx(plain.nll)
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
        (b'{"question": "a"}\n', "line 1 has no 'answer'"),
        (b'{"question": 1, "answer": "1"}\n', "must be text, not 1"),
        (None, "does not exist"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, tokenizer, content, message):
    path = tmp_path / "test.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        Gsm8kTask(str(path)).score(Scripted(tokenizer, {}), tokenizer, asked)
