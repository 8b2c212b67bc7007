"""The model ``base`` of ``score`` and ``chat`` is the base of the files, also if training starts from an adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from fedlowrank.cli.language_commands import params_of
from fedlowrank.cli.main import main
from fedlowrank.core.key import Key
from fedlowrank.models.architecture import build_module
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)

TOKENS = ["<|im_start|>", "<|im_end|>"]


def load_plain(base: Path, has_tokens: bool) -> tuple[Any, Any]:
    """The base and its tokenizer by transformers; rows of new tokens are the mean of the former rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    if has_tokens:
        count = len(tokenizer)
        tokenizer.add_tokens(TOKENS, special_tokens=True)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                layer.weight[count:] = layer.weight[:count].mean(0)
    return model, tokenizer


def write_start(base: Path, folder: Path, has_tokens: bool, **config: Any) -> Any:
    """An adapter by plain PEFT in which every trained parameter is random; returns the model."""
    plain, tokenizer = load_plain(base, has_tokens)
    if has_tokens:
        ids = tokenizer.convert_tokens_to_ids(TOKENS)
        is_tied = plain.config.tie_word_embeddings
        config["trainable_token_indices"] = {"embed_tokens": ids, **({} if is_tied else {"lm_head": ids})}
    config = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **config}
    model = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model.eval()


def make_tables(base: Path, folder: Path, has_tokens: bool) -> dict[str, Any]:
    tables = make_causal_tables(base, folder, method="fedit", lora={"start": str(folder / "start")})
    for name in ("r", "lora_alpha", "target_modules", "ranks"):
        del tables["lora"][name]
    tables["language"]["new_tokens"] = TOKENS if has_tokens else []
    return tables


def compute_logits(run: Run, name: str, ids: Tensor) -> Tensor:
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(params_of(run, name)) as model:
        logits: Tensor = model(input_ids=ids).logits
    return logits


def copy_tied(llama: Path, folder: Path) -> Path:
    config = transformers.AutoConfig.from_pretrained(llama)
    config.tie_word_embeddings = True
    build_module(lambda: transformers.LlamaForCausalLM(config), Key((3,))).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("has_tokens", "is_tied", "config"),
    [
        (False, False, {}),
        (False, False, {"target_modules": ["embed_tokens", "q_proj"], "use_rslora": True}),
        (False, False, {"modules_to_save": ["lm_head", "norm"]}),
        (True, False, {}),
        (True, True, {}),
        (True, False, {"modules_to_save": ["norm"]}),
    ],
)
def test_the_base_has_no_effect_of_the_start_adapter(
    has_tokens: bool, is_tied: bool, config: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    base = copy_tied(llama, tmp_path / "tied") if is_tied else llama
    adapted = write_start(base, tmp_path / "start", has_tokens, **config)
    plain, tokenizer = load_plain(base, has_tokens)
    new_ids = tokenizer.convert_tokens_to_ids(TOKENS) if has_tokens else [5, 4]
    ids = torch.tensor([[1, new_ids[0], 9, 7, new_ids[1], 6]])
    with torch.no_grad():
        base_logits, start_logits = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert (base_logits - start_logits).abs().max() > 0.01
    run = run_rounds(make_tables(base, tmp_path, has_tokens), 0)
    torch.testing.assert_close(compute_logits(run, "server", ids), start_logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(compute_logits(run, "base", ids), base_logits, rtol=0, atol=2e-6)
    run.step()
    torch.testing.assert_close(compute_logits(run, "base", ids), base_logits, rtol=0, atol=2e-6)


def test_the_command_scores_the_base_of_the_files(llama: Path, tmp_path: Path) -> None:
    write_start(llama, tmp_path / "start", False, modules_to_save=["norm"])
    file = write_toml(make_tables(llama, tmp_path, False), tmp_path / "experiment.toml")
    assert main(["run", str(file), "-o", str(tmp_path / "run"), "run.rounds=1"]) == 0
    text = "who is the fox? the dog"
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}))
    out = tmp_path / "scores.json"
    command = ["score", str(tmp_path / "run"), "--task", "perplexity", "--model", "base", "-o", str(out)]
    assert main([*command, f"path={tmp_path / 'texts.jsonl'}"]) == 0
    plain, tokenizer = load_plain(llama, False)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(plain(input_ids=ids, labels=ids).loss)
    assert json.loads(out.read_text())["base"]["value"] == pytest.approx(math.exp(loss), rel=1e-5)
