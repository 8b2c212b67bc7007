"""A run with prompts keeps the models' answers before and after, and its report shows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.results.records import RunRecord
from tests.language.text_experiments import make_causal_tables, write_toml

torch.set_num_threads(1)

PROMPTS = ("who is the fox?", "a dog | sleeps")


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> Path:
    tables: Any = make_causal_tables(llama, tmp_path, method="hetlora")
    tables["language"] |= {"prompts": list(PROMPTS), "answer_tokens": 5}
    tables["run"] |= {"rounds": 2}
    assert main(["run", str(write_toml(tables, tmp_path / "e.toml")), "-o", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_answers_are_those_of_the_base_before_and_of_each_model_after(run: Path, llama: Path) -> None:
    rows = RunRecord.load(run).answers
    assert {(r["round"], r["model"]) for r in rows if r["round"] == 0} == {(0, "start")}
    assert {"server", "client 0", "client 1"} <= {r["model"] for r in rows if r["round"] == 2}
    assert {r["round"] for r in rows} == {0, 2}
    # by transformers alone; the format of the run is plain
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    settings = json.loads((run / "run.json").read_text())["language"]
    assert settings["format"] == "plain"
    for prompt in PROMPTS:
        ids = tokenizer(f"{prompt}\n", return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        expected = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert [r["answer"] for r in rows if r["round"] == 0 and r["prompt"] == prompt] == [expected]


def test_the_report_shows_them(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert "Answers before and after" in page
    assert "| a dog \\| sleeps | before |" in text
    assert "| who is the fox? | HetLoRA, client 1, round 2 |" in text


def test_an_answer_with_lines_and_marks_of_markdown_is_one_row_of_the_table(
    run: Path, tmp_path: Path
) -> None:
    file = run / "answers.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["answer"] = "1. red\n2. *blue*\n\n<b>"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert "| before | 1. red 2. \\*blue\\* &lt;b&gt; |" in (tmp_path / "report.md").read_text()


def test_a_run_that_goes_on_replaces_its_last_answers(run: Path) -> None:
    assert main(["resume", str(run), "run.rounds=3"]) == 0
    assert {r["round"] for r in RunRecord.load(run).answers} == {0, 2, 3}


def test_a_damaged_file_is_named(run: Path) -> None:
    (run / "answers.jsonl").write_text('{"round": "x"}\n')
    with pytest.raises(CheckpointError, match=r"answers\.jsonl is damaged"):
        _ = RunRecord.load(run).answers


def test_a_classifier_has_no_answers(bert: Path) -> None:
    language = {"path": str(bert), "task": "classification", "prompts": ["who?"]}
    with pytest.raises(ConfigError, match="answered by a causal model"):
        ExperimentConfig.parse(
            {"name": "x", "method": "fedit", "language": language, "data": {"source": "text", "path": "x"}}
        )


def test_a_chat_template_writes_no_prompt_of_another_format(llama: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ 'fox ' + m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(base)
    tables: Any = make_causal_tables(base, tmp_path, method="hetlora")
    tables["language"] |= {"prompts": ["who is the fox?"], "answer_tokens": 5}
    tables["run"] |= {"rounds": 1}
    assert main(["run", str(write_toml(tables, tmp_path / "e.toml")), "-o", str(tmp_path / "run")]) == 0
    rows = RunRecord.load(tmp_path / "run").answers
    ids = tokenizer("who is the fox?\n", return_tensors="pt")
    made = transformers.AutoModelForCausalLM.from_pretrained(base).generate(
        **ids, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    expected = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert [r["answer"] for r in rows if r["round"] == 0] == [expected]
