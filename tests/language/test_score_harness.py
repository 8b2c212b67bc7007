import json
import random
import sys

import numpy as np
import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.scores.generate import Decoding, complete_prompts
from fedlowrank.language.scores.harness import evaluate_with_lm_eval

from .score_models import byte_tokenizer, llama

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n\\n\\n"]
  do_sample: false
  max_gen_toks: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.mark.filterwarnings("default")
def test_a_task_over_a_local_file(tmp_path, monkeypatch):
    pytest.importorskip(
        "lm_eval", reason="lm_eval is not installed; the rest of the evaluation does without it"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer(eos_token="<end>")
    model = llama(len(tokenizer)).train()
    questions = ["the quick", "brown fox", "def add(", "lazy", "jumps over"]
    # three of the five references are what the model does write
    texts = complete_prompts(model, tokenizer, questions, Decoding(8))
    answers = [text if i < 3 else "something else" for i, text in enumerate(texts)]
    (tmp_path / "test.jsonl").write_text(
        "".join(
            json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(questions, answers, strict=True)
        )
    )
    (tmp_path / "own.yaml").write_text(TASK.format(name="own", path=tmp_path / "test.jsonl"))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    whole = evaluate_with_lm_eval(model, tokenizer, [str(tmp_path / "own.yaml")])
    assert list(whole) == ["own"]
    assert whole["own"]["exact_match,none"] == pytest.approx(3 / 5)
    part = evaluate_with_lm_eval(model, tokenizer, [str(tmp_path / "own.yaml")], limit=4)
    assert part["own"]["exact_match,none"] == pytest.approx(3 / 4)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert after == states
    assert model.training
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, byte_tokenizer().padding_side)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    model = llama(len(tokenizer))
    with pytest.raises(ConfigError, match="no task"):
        evaluate_with_lm_eval(model, tokenizer, [])
    with pytest.raises(DataError, match="does not exist"):
        evaluate_with_lm_eval(model, tokenizer, [str(tmp_path / "none.yaml")])
    (tmp_path / "own.yaml").write_text("task: own\n")
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    model.train()
    with pytest.raises(DataError, match=r"fedlowrank\[harness\]"):
        evaluate_with_lm_eval(model, tokenizer, [str(tmp_path / "own.yaml")])
    assert model.training
