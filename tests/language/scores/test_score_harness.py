"""Tasks of lm-evaluation-harness are scored from local files by a run's model, and programs run only if told to."""

import json
import random
import sys

import numpy as np
import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.scores import Decoding, HarnessTask, complete_prompts
from tests.language.scores.score_models import Scripted, byte_tokenizer, llama

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
GENERATION = """
generation_kwargs:
  until: ["\\n\\n\\n"]
  do_sample: false
  max_gen_toks: 8
  {more}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
# what lm_eval imports warns
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def lm_eval(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return pytest.importorskip(
        "lm_eval", reason="lm_eval is not installed: pip install 'fedlowrank[harness]'"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(eos_token="<end>")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_task(tmp_path, records, more="", kind="generate_until", rest=GENERATION):
    path = write(tmp_path / "test.jsonl", records)
    text = TASK.format(name="own", path=path, kind=kind, rest=rest.format(more=more))
    (tmp_path / "own.yaml").write_text(text)
    return str(tmp_path / "own.yaml")


def scripted(tokenizer, answers):
    """A model that writes what it is told to, and the prompts that it was given."""
    model, script = llama(len(tokenizer), max_position_embeddings=4096), Scripted(tokenizer, answers)
    model.generate = script.generate
    return model, script.asked


def asked(record):
    return f"[{record['instruction']}|{record['input']}]"


def global_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def test_a_task_of_a_file_leaves_everything_as_it_was(tmp_path, lm_eval, tokenizer):
    model = llama(len(tokenizer)).train()
    questions = ["the quick", "brown fox", "def add(", "lazy", "jumps over"]
    # three of the five references are what the model does write
    texts = complete_prompts(model, tokenizer, questions, Decoding(8))
    answers = [text if i < 3 else "something else" for i, text in enumerate(texts)]
    pairs = zip(questions, answers, strict=True)
    name = write_task(tmp_path, [{"question": q, "answer": a} for q, a in pairs])
    before, padding = global_states(), (tokenizer.pad_token, tokenizer.padding_side)
    whole = HarnessTask(name, bootstrap=1).score(model, tokenizer, asked)
    assert (whole.name, whole.value, whole.count) == (name, pytest.approx(3 / 5), 5)
    assert whole.details["exact_match_stderr,none"] == pytest.approx(np.std([1, 1, 1, 0, 0], ddof=1) / 5**0.5)
    assert whole.decoding == Decoding(8, stop=("\n\n\n",)).describe()
    part = HarnessTask(name, limit=4, max_new_tokens=8).score(model, tokenizer, asked)
    assert (part.value, part.count) == (pytest.approx(3 / 4), 4)
    assert global_states() == before
    assert model.training
    assert (tokenizer.pad_token, tokenizer.padding_side) == padding


def test_gsm8k_of_a_local_file(tmp_path, lm_eval, tokenizer):
    """The task of lm_eval itself, both of its filters, in the format of training and with examples."""
    records = [{"question": f"what is {i}?", "answer": f"well\n#### {i}"} for i in range(4)]
    test = write(tmp_path / "test.jsonl", records)
    says = {
        f"[Question: what is {i}?\nAnswer:|]": text for i, text in enumerate(["0", "#### 1", "it is 2.", "4"])
    }
    model, _ = scripted(tokenizer, says)
    task = HarnessTask("gsm8k", test, shots=0, prompting="format", metric="exact_match,flexible-extract")
    score = task.score(model, tokenizer, asked)
    assert (score.value, score.count) == (0.75, 4)
    assert score.details["exact_match,strict-match"] == 0.25
    assert score.details["shots"] == 0
    assert "greedy, at most 256 new tokens" in score.decoding
    assert "Question:" in score.decoding
    train = write(
        tmp_path / "train.jsonl", [{"question": f"train {i}?", "answer": f"#### {i}"} for i in range(9)]
    )
    model, prompts = scripted(tokenizer, lambda prompt: f" #### {prompt.split()[-2][:-1]}\n\nQuestion: 77")
    score = HarnessTask("gsm8k", test, train, shots=3).score(model, tokenizer, asked)
    assert score.value == 1.0
    assert [prompt.count("Question: train ") for prompt in prompts] == [3] * 4
    with pytest.raises(ConfigError, match=r"no metric 'any'.*gsm8k exact_match,strict-match 0.0"):
        HarnessTask("gsm8k", test, shots=0, metric="any").score(
            *scripted(tokenizer, lambda _: "x")[:1], tokenizer, asked
        )


CODE_EVAL = '''
import datasets
import evaluate


class CodeEval(evaluate.Metric):
    """Stands for the metric of the hub, which tests do not reach."""

    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": datasets.Sequence(text), "references": text})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, k):
        right = 0
        for (program,), test in zip(predictions, references):
            try:
                exec(f"{program}\\n{test}", {})
                right += 1
            except Exception:
                pass
        return {"pass@1": right / len(predictions)}, {}
'''


def test_humaneval_runs_programs_only_if_told_to(tmp_path, lm_eval, tokenizer, monkeypatch):
    (tmp_path / "code_eval").mkdir()
    (tmp_path / "code_eval" / "code_eval.py").write_text(CODE_EVAL)
    monkeypatch.chdir(tmp_path)
    problems = [
        {
            "task_id": f"own/{i}",
            "prompt": f"def f{i}(x):\n",
            "entry_point": f"f{i}",
            "test": f"def check(f):\n    assert f(1) == {i}\n",
        }
        for i in range(3)
    ]
    path = write(tmp_path / "problems.jsonl", problems)
    says = {
        "def f0(x):\n": "    return 0\n",
        "def f1(x):\n": "    return x\nprint(",
        "def f2(x):\n": "    return x\n",
    }
    model, prompts = scripted(tokenizer, says)
    with pytest.raises(ConfigError, match=r"humaneval runs programs .* set execute to true"):
        HarnessTask("humaneval", path, shots=0).score(model, tokenizer, asked)
    assert prompts == []
    score = HarnessTask("humaneval", path, shots=0, execute=True).score(model, tokenizer, asked)
    assert (score.value, score.count) == (pytest.approx(2 / 3), 3)
    with pytest.raises(ConfigError, match="takes no few-shot examples"):
        HarnessTask("humaneval", path, path, shots=2, execute=True).score(model, tokenizer, asked)
    model, prompts = scripted(tokenizer, lambda prompt: says[prompt.split("```python\n")[-1].rstrip() + "\n"])
    formatted = HarnessTask(
        "humaneval_instruct", path, shots=0, execute=True, prompting="format", max_new_tokens=9
    )
    assert formatted.score(model, tokenizer, asked).value == pytest.approx(2 / 3)
    assert prompts[0].startswith("[Write a solution")
    assert prompts[0].endswith("|]Here is the completed function:\n```python\ndef f0(x):\n\n")


def test_likelihoods_are_those_of_the_model(tmp_path, lm_eval, tokenizer):
    """A task that generates nothing: the log-likelihood of a text is computed here from the logits."""
    rest = "metric_list:\n  - metric: perplexity\n    aggregation: mean\n    higher_is_better: false\n"
    name = write_task(tmp_path, [{"question": "the", "answer": " quick"}], kind="loglikelihood", rest=rest)
    model = llama(len(tokenizer))
    score = HarnessTask(name).score(model, tokenizer, asked)
    tokens, start = tokenizer("the quick")["input_ids"], len(tokenizer("the")["input_ids"])
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = sum(float(logits[i - 1, tokens[i]]) for i in range(start, len(tokens)))
    assert score.value == pytest.approx(expected, rel=1e-4)
    assert score.decoding == "nothing generated"


def test_settings_of_generation_that_are_not_followed_are_refused(tmp_path, lm_eval, tokenizer):
    name = write_task(tmp_path, [{"question": "a", "answer": "b"}], more="num_beams: 4")
    with pytest.raises(ConfigError, match="sets num_beams for generation"):
        HarnessTask(name).score(llama(len(tokenizer)), tokenizer, asked)


def test_sampling_is_repeatable(tmp_path, lm_eval, tokenizer):
    rest = GENERATION.replace("do_sample: false", "do_sample: true\n  temperature: 0.8\n  top_p: 0.9")
    name = write_task(tmp_path, [{"question": "a", "answer": "b"}], rest=rest)
    actual = [HarnessTask(name).score(llama(len(tokenizer)), tokenizer, asked) for _ in range(2)]
    assert actual[0] == actual[1]
    assert actual[0].decoding.startswith("sampled at temperature 0.8, top-p 0.9, key 0,")


@pytest.mark.full
def test_tasks_that_cannot_be_loaded_are_named(tmp_path, lm_eval, tokenizer):
    model = llama(len(tokenizer))
    path = write(tmp_path / "test.jsonl", [{"question": "a", "answer": "b"}])
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: json\n")
    for task, error, message in (
        (HarnessTask("gsm8"), ConfigError, "no task 'gsm8'. Did you mean 'gsm8k'"),
        (HarnessTask("?" * 9), ConfigError, "`lm-eval ls tasks` lists all"),
        (HarnessTask("mmlu", path, shots=0), ConfigError, "'mmlu' is a group"),
        (HarnessTask(str(tmp_path / "own.yaml")), DataError, "lm_eval cannot load"),
        (HarnessTask("gsm8k", str(tmp_path / "none.jsonl"), shots=0), DataError, "does not exist"),
    ):
        with pytest.raises(error, match=message.replace("?", r"\?") if "??" in message else message):
            task.score(model, tokenizer, asked)


def test_what_is_missing_is_named(tmp_path, monkeypatch, tokenizer):
    with pytest.raises(ConfigError, match="train_path belongs to path"):
        HarnessTask("gsm8k", train_path="train.jsonl")
    for shots in (None, 5):
        with pytest.raises(ConfigError, match="set shots to 0"):
            HarnessTask("gsm8k", "test.jsonl", shots=shots)
    for wrong in ({"limit": 0}, {"shots": -1}, {"execute": 1}, {"prompting": "chat"}):
        with pytest.raises(ConfigError):
            HarnessTask("gsm8k", **wrong)
    model = llama(len(tokenizer)).train()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(DataError, match=r"fedlowrank\[harness\]"):
        HarnessTask("gsm8k").score(model, tokenizer, asked)
    assert model.training
