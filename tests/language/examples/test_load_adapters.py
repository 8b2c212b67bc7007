"""examples/load_adapters.py asks adapters in the format that their run was trained in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from fedlowrank.cli.language_commands import language_of_run, prompt_of
from tests.language.text_experiments import make_causal_tables, run_rounds

EXAMPLE = Path(__file__).parents[3] / "examples" / "load_adapters.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("load_adapters", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["alpaca", "chat without a begin token", "plain", "chat"])
def test_the_prompt_is_that_of_training(
    form: str, example: Any, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, begin = llama, "{{ bos_token }}" if form == "chat" else ""
    if form.startswith("chat"):
        base = tmp_path / "base"
        tokenizer = AutoTokenizer.from_pretrained(llama)
        tokenizer.chat_template = (
            begin + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        tokenizer.save_pretrained(base)
        for name in ("config.json", "model.safetensors"):
            (base / name).symlink_to(llama / name)
    language = {"format": form.partition(" ")[0], "context": 224}
    run = run_rounds(make_causal_tables(base, tmp_path, language=language), 1)
    written = language_of_run(run).write(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = example.encode_prompt(written[0], tokenizer, "who is {it}?")["input_ids"][0].tolist()
    prompt = prompt_of(language_of_run(run))({"instruction": "who is {it}?", "input": ""})
    assert tokenizer.decode(asked).removeprefix("<s>").strip() == prompt.removeprefix("<s>").strip()
    assert (tokenizer.bos_token_id in asked) == (form != "chat without a begin token")
    example.main(base, tmp_path / "out", "who is 1?")
    printed = capsys.readouterr().out
    assert "4 adapter folders loaded" in printed
    assert "server, rank 4" in printed
