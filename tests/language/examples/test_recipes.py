"""Each recipe parses, names layers that its family has, and trains two steps on a tiny model of that family."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines.sequential import Sequential
from fedlowrank.rounds.run import Run

torch.set_num_threads(1)

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama-chat": "Llama", "qwen-chat": "Qwen2", "mistral-chat": "Mistral", "gemma-chat": "Gemma2", "phi-chat": "Phi3",
    "smollm-chat": "Llama", "qlora-one-gpu": "Llama", "seven-billion-network": "Qwen2",
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)


def family(name: str, tokenizer_of: Path, folder: Path) -> Path:
    """A tiny model of a family, with a chat template."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.chat_template = WITHOUT_SYSTEM if FAMILIES[name] == "Gemma2" else CHATML
    config = getattr(transformers, f"{FAMILIES[name]}Config")(vocab_size=len(tokenizer), **SMALL)
    if FAMILIES[name] == "Gemma2":
        config.head_dim = 8
    torch.manual_seed(0)
    getattr(transformers, f"{FAMILIES[name]}ForCausalLM")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(folder: Path) -> None:
    for site in range(3):
        rows = []
        for i in range(24):
            talk = [
                {"role": "system", "content": "the fox is short"},
                {"role": "user", "content": f"who is {i}?"},
                {"role": "assistant", "content": f"the quick fox {site}"},
            ]
            rows.append(json.dumps({"messages": talk}))
        (folder / f"site{site}.jsonl").write_text("\n".join(rows) + "\n")


def test_every_recipe_is_tried_here() -> None:
    assert {p.stem for p in RECIPES.glob("*.toml")} == {
        *FAMILIES,
        "classification",
        "preferences-dpo",
        "embeddings",
        "base-chat",
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_recipe_trains_two_steps(name: str, llama: Path, tmp_path: Path) -> None:
    conversations(tmp_path)
    base = family(name, llama, tmp_path / "base")
    changes = [f"language.path={base}", f"data.path={tmp_path}/*.jsonl", "language.dtype=float32"]
    changes += [
        "language.context=200",
        "run.device=cpu",
        "run.rounds=2",
        "defaults.steps=1",
        "defaults.batch_size=4",
    ]
    tables = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    file = RECIPES / f"{name}.toml"
    if tables["language"].get("quantize") and importlib.util.find_spec("bitsandbytes") is None:
        # the rest of the recipe is tried without bitsandbytes
        text = file.read_text().replace('quantize = "4bit"\n', "")
        file = tmp_path / "recipe.toml"
        file.write_text(text.replace("base-chat.toml", str(RECIPES / "base-chat.toml")))
    experiment = ExperimentConfig.read(file, changes)
    run = Run(experiment.build_method("fedhl"), experiment.federation(), experiment.run, Sequential())
    losses = [run.step().training_losses, run.step().training_losses]
    assert all(loss is not None and loss == loss for loss in losses)
    expected = tables["lora"]["target_modules"]
    adapted = {layer.rpartition(".")[2] for layer in run.state.server.delta}
    assert adapted == set(expected) if isinstance(expected, list) else "down_proj" in adapted


def test_the_recipe_for_classes_trains_two_steps(bert: Path, tmp_path: Path) -> None:
    for site in range(3):
        lines = [f"the fox {i} of {site},{'fox' if i % 2 else 'dog'}" for i in range(30)]
        (tmp_path / f"site{site}.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    changes = [f"language.path={bert}", f"data.path={tmp_path}/*.csv", "language.context=24", "run.rounds=1"]
    changes += ['lora.target_modules=["query", "value"]', "defaults.batch_size=8"]
    experiment = ExperimentConfig.read(RECIPES / "classification.toml", changes)
    run = Run(experiment.build_method("fedhl"), experiment.federation(), experiment.run, Sequential())
    assert run.step().steps >= 3


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_the_recipe_for_preferences_trains_two_steps(loss: str, llama: Path, tmp_path: Path) -> None:
    base = family("smollm-chat", llama, tmp_path / "base")
    for site in range(3):
        rows = [
            {"prompt": f"who is {i}?", "chosen": "the fox", "rejected": f"a dog {site}"} for i in range(24)
        ]
        (tmp_path / f"site{site}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    changes = [f"language.path={base}", f"data.path={tmp_path}/*.jsonl", "language.dtype=float32"]
    changes += [
        "language.context=64",
        "run.device=cpu",
        "run.rounds=2",
        "defaults.steps=1",
        "defaults.batch_size=4",
    ]
    changes += ["loss=orpo"] if loss == "orpo" else []
    experiment = ExperimentConfig.read(RECIPES / "preferences-dpo.toml", changes)
    assert experiment.loss.kind == loss
    run = Run(experiment.build_method("fedhl"), experiment.federation(), experiment.run, Sequential())
    losses = [run.step().training_losses, run.step().training_losses]
    assert all(value is not None and value == value for value in losses)


def test_the_recipe_for_embeddings_trains_two_steps(bert: Path, tmp_path: Path) -> None:
    for site in range(3):
        rows = [{"anchor": f"who is {i}?", "positive": f"the fox {i} of {site}"} for i in range(30)]
        (tmp_path / f"site{site}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    changes = [
        f"language.path={bert}",
        f"data.path={tmp_path}/*.jsonl",
        "language.context=24",
        "run.rounds=1",
    ]
    experiment = ExperimentConfig.read(RECIPES / "embeddings.toml", [*changes, "defaults.batch_size=8"])
    run = Run(experiment.build_method("fedhl"), experiment.federation(), experiment.run, Sequential())
    assert run.step().steps >= 6
