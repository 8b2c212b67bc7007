"""Runs on text in forms that people have: conversations by file, packed rows, labels of words, and ``fedlowrank data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.engines.sequential import Sequential
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_row_tables
from tests.support.byte_tokenizers import TEMPLATES

torch.set_num_threads(1)


@pytest.fixture
def chat_llama(llama: Path, tmp_path: Path) -> Path:
    """The tiny Llama with a chat template."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (TEMPLATES / "trimming.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def sites(folder: Path) -> str:
    """A file of conversations for each of two clients."""
    folder.mkdir()
    for name, count in (("north", 12), ("south", 20)):
        rows = []
        for i in range(count):
            turns = [
                ("user", f"who is {i}?"),
                ("assistant", "the fox"),
                ("user", "why?"),
                ("assistant", "a dog"),
            ]
            rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def run_of(made: dict[str, Any]) -> tuple[Run, list[float]]:
    """A run after its rounds, and the training loss of each."""
    experiment = ExperimentConfig.parse(made)
    run = Run(
        experiment.build_method(experiment.default_method),
        experiment.federation(),
        experiment.run,
        Sequential(),
    )
    losses = [next(iter(run.step().training_losses.values())) for _ in range(experiment.run.rounds)]
    return run, losses


@pytest.mark.parametrize("packing", [False, True])
def test_each_file_of_conversations_is_a_client(chat_llama: Path, tmp_path: Path, packing: bool) -> None:
    made = make_row_tables(
        chat_llama, {"path": sites(tmp_path / "sites"), "client_by_file": True}, packing=packing
    )
    run, losses = run_of(made)
    assert losses == sorted(losses, reverse=True)
    sizes = [len(client.train) + len(client.val) + len(client.test) for client in run.federation.clients]
    assert len(sizes) == 2
    assert (sizes == [12, 20]) is not packing
    assert ("position_ids" in run.federation.clients[0].train.x) is packing
    assert any("rows are of the form 'messages'" in note for note in run.federation.notes)
    assert any("the rows call for the format 'chat'" in note for note in run.federation.notes)


def test_the_data_command_shows_what_is_learnt(
    chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_row_tables(chat_llama, {"path": sites(tmp_path / "sites"), "client_by_file": True})
    file = tmp_path / "rows.toml"
    file.write_text(ExperimentConfig.parse(made).to_toml())
    assert main(["data", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ASSISTANT:⟦ the fox</s>⟧USER: why?") == 2
    assert "rows are of the form 'messages' (messages), recognized by its columns" in " ".join(
        printed.split()
    )


@pytest.mark.parametrize("pairs", [False, True])
def test_messages_are_written_by_the_template_alone(chat_llama: Path, tmp_path: Path, pairs: bool) -> None:
    user, answer = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "the fox"}
    row: dict[str, Any] = {"messages": [user, answer]}
    if pairs:
        row = {"chosen": [user, answer], "rejected": [user, {**answer, "content": "a dog"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 20))
    made = make_row_tables(chat_llama, {"path": str(tmp_path / "rows.jsonl")}, format="alpaca")
    made["partition"] = {"kind": "iid", "clients": 1}
    made["loss"] = {"kind": "orpo" if pairs else "next_token"}
    with pytest.raises(
        ConfigError, match=r"language\.format is 'alpaca', but the rows are lists of messages"
    ):
        ExperimentConfig.parse(made).federation()
    made["language"].pop("format")
    companion: Any = ExperimentConfig.parse(made).federation().companion
    # what scores and answers ask in
    assert companion.uses_chat_template


def test_pairs_need_a_loss_of_preferences(llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(9)]
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        file.write_text("\n".join(map(json.dumps, rows)))
    made = make_row_tables(llama, {"path": [str(file) for file in files], "client_by_file": True})
    with pytest.raises(DataError, match=r"pairs of responses to one prompt, labels int64 \[\d+, 2, \d+\]"):
        run_of(made)


def test_words_with_labels_are_classified(bert: Path, tmp_path: Path) -> None:
    rows = [{"tokens": ["the", "fox", f"{i}"], "ner_tags": ["O", "ANIMAL", "O"]} for i in range(24)]
    (tmp_path / "ner.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = make_row_tables(bert, {"path": str(tmp_path / "ner.jsonl")}, task="token_classification")
    made["partition"] = {"kind": "iid", "clients": 2}
    made["lora"]["target_modules"] = ["query", "value"]
    made["defaults"]["optimizer"]["lr"] = 0.05
    made["run"]["rounds"] = 4
    run, losses = run_of(made)
    assert run.federation.classes == ("ANIMAL", "O")
    assert run.federation.loss.kind == "cross_entropy"
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ConfigError, match="Set it to 'token_classification'"):
        run_of({**made, "language": {**made["language"], "task": "classification"}})
