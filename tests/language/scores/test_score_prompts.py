"""Prompts of scores, sample answers and conversations are tokenized as in training."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlowrank.cli.language_commands import language_of_run, scores
from fedlowrank.cli.main import main
from fedlowrank.language.language_model import Language
from fedlowrank.language.scores import Decoding, DollyTask, HarnessTask, PerplexityTask
from fedlowrank.rounds.run import Run
from tests.language.scores.score_models import llama as llama_of
from tests.language.text_experiments import make_causal_tables, make_row_tables, run_rounds, write_toml
from tests.support.byte_tokenizers import TEMPLATES, byte_tokenizer

torch.set_num_threads(1)

QUESTION = "who is 3?"
FORMATS = ["chat", "plain", "alpaca", "verbatim"]


@pytest.fixture(scope="module")
def base(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, whose tokenizer adds a begin token, with a chat template that writes none."""
    folder = shutil.copytree(llama, tmp_path_factory.mktemp("base") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return folder


def run_in(base: Path, folder: Path, form: str) -> tuple[Run, Language, list[int]]:
    """A run in a format, and the tokens of the question's prompt in its training rows."""
    language = {"path": str(base), "format": form, "context": 200, "prompts": [QUESTION], "answer_tokens": 1}
    run = run_rounds(
        make_causal_tables(base, folder, method="fedit", language=language, lora={"ranks": [2]}), 0
    )
    tokenizer = language_of_run(run).loaded.tokenizer
    for client in run.federation.clients:
        for ids, labels in zip(client.train.x["input_ids"], client.train.y, strict=True):
            prompt = ids[: int((labels >= 0).nonzero()[0])].tolist()
            if QUESTION in tokenizer.decode(prompt):
                return run, language_of_run(run), prompt
    raise AssertionError("no row asks the question")


@contextlib.contextmanager
def first_inputs(model: Any) -> Iterator[list[list[int]]]:
    """Tokens of each first row that a model reads, without padding on the left."""
    actual: list[list[int]] = []

    def record(_: Any, args: Any, given: dict[str, Any]) -> None:
        ids, mask = given["input_ids"][0], given.get("attention_mask")
        actual.append((ids if mask is None else ids[mask[0].bool()]).tolist())

    handle = model.get_base_model().register_forward_pre_hook(record, with_kwargs=True)
    yield actual
    handle.remove()


def records(folder: Path) -> str:
    path = folder / "records.jsonl"
    path.write_text(
        json.dumps({"instruction": QUESTION, "context": "", "response": "a fox", "text": "a fox"})
    )
    return str(path)


@pytest.mark.parametrize("form", FORMATS)
def test_scores_and_answers_ask_with_the_tokens_of_training(form: str, base: Path, tmp_path: Path) -> None:
    run, language, prompt = run_in(base, tmp_path, form)
    file = records(tmp_path)
    with first_inputs(language.model) as seen:
        scores(run, DollyTask(file, decoding=Decoding(1)), ["base"])
        score = scores(run, PerplexityTask(file, instruction="instruction", end=True), ["base"])["base"]
        language.answer(run)
    assert len(seen) == 3
    assert all(row[: len(prompt)] == prompt for row in seen)
    # the token that ends what is learnt counts as the end of an answer
    labels = run.federation.clients[0].train.y[0]
    assert labels[labels >= 0][-1] in seen[1][len(prompt) :]
    assert score.details["counted end token"] == ("<|im_end|>" if form == "chat" else "</s>")
    # plain texts are no prompts
    with first_inputs(language.model) as seen:
        scores(run, PerplexityTask(file), ["base"])
    assert seen[0] == language.loaded.tokenizer("a fox")["input_ids"]


def make_base(folder: Path, template: str) -> Path:
    """A tiny Llama with the chat template of a file of chat_templates."""
    tokenizer = byte_tokenizer(template)
    model = llama_of(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["none", "verbatim", "mistral", "phi3", "chatml"])
def test_perplexity_is_the_loss_of_the_run(form: str, llama: Path, tmp_path: Path) -> None:
    # templates that write a space before an answer, or more than the end token after it; texts with special tokens
    answers = ["a fox", "<s>the dog", "one two</s>", "  "]
    rows = [{"prompt": f"who is {i}?", "completion": answers[i % 4]} for i in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    is_chat = form in ("mistral", "phi3", "chatml")
    base = make_base(tmp_path / "base", form) if is_chat else llama
    tables = make_row_tables(
        base, {"path": str(file), "test": str(file)}, format="chat" if is_chat else form, context=100
    )
    run = run_rounds(tables | {"partition": {"kind": "iid", "clients": 1}}, 0)
    task = PerplexityTask(
        str(file), text="completion", instruction=None if form == "none" else "prompt", end=True
    )
    score = scores(run, task, ["0"])["0"]
    # without the blank answers
    assert score.details["records"] == 9
    (loss,) = run.evaluate().values("loss", split="test")
    assert score.details["nll"] == pytest.approx(loss, rel=1e-5)
    labels = run.federation.clients[0].test.y
    assert score.count == int((labels[:, 1:] >= 0).sum())
    # without the end: the tokens of the answers alone
    tokenizer = language_of_run(run).loaded.tokenizer
    without_end = scores(run, replace(task, end=False), ["0"])["0"]
    ends = {"phi3": 3, "mistral": 1, "chatml": 1}.get(form, 1)
    assert without_end.count == score.count - 9 * ends, tokenizer.decode(labels[0][labels[0] >= 0])
    assert without_end.details["counted end token"] is None
    # records whose prompt fills the context do not count
    if form == "verbatim":
        rows[0]["prompt"] *= 30
        file.write_text("\n".join(map(json.dumps, rows)))
        assert scores(run, replace(task, context=40), ["0"])["0"].details["records"] == 8


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["generate_until", "multiple_choice"])
@pytest.mark.parametrize("form", ["chat", "plain"])
def test_the_harness_asks_with_the_tokens_of_training(
    form: str, kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'fedlowrank[harness]'")
    run, language, prompt = run_in(base, tmp_path, form)
    lines = ["task: own", "dataset_path: json", "test_split: test", f"output_type: {kind}"]
    lines += ["dataset_kwargs:", "  data_files:", f"    test: {records(tmp_path)}"]
    lines += ['doc_to_text: "{{instruction}}"', "target_delimiter: ''"]
    lines += (
        ["doc_to_target: 0", 'doc_to_choice: ["a", "b"]']
        if kind == "multiple_choice"
        else ['doc_to_target: "{{text}}"']
    )
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    task = HarnessTask(str(tmp_path / "own.yaml"), prompting="format", shots=0, max_new_tokens=1)
    with first_inputs(language.model) as seen:
        scores(run, task, ["base"])
    assert seen
    assert all(row[: len(prompt)] == prompt for row in seen)


@pytest.mark.parametrize("form", FORMATS)
def test_chat_asks_in_the_format_of_training(
    form: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, prompt = run_in(base, tmp_path, form)
    language = {"path": str(base), "format": form, "context": 200}
    tables = make_causal_tables(
        base, tmp_path, method="fedit", language=language, lora={"ranks": [2]}, run={"rounds": 1}
    )
    assert main(["run", str(write_toml(tables, tmp_path / "e.toml")), "-o", str(tmp_path / "run")]) == 0
    seen: list[list[int]] = []
    from fedlowrank.language.scores import text_generation

    whole = text_generation._tokenize_prompt

    def recorded(*given: Any) -> list[int]:
        seen.append(whole(*given))
        return seen[-1]

    monkeypatch.setattr(text_generation, "_tokenize_prompt", recorded)
    assert main(["chat", str(tmp_path / "run"), "--prompt", QUESTION, "--tokens", "2"]) == 0
    assert seen == [prompt]
