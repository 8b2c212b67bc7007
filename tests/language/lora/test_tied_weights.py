"""A base whose embedding and output layer are one tensor: what is trained is what chat, scores and adapters are."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.key import Key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.language.export.server_model import find_server_model
from fedlowrank.models.architecture import build_module
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_causal_tables

torch.set_num_threads(1)

IDS = torch.tensor([[1, 5, 9, 7, 4, 6]])
BOTH = ["lm_head", "embed_tokens"]


@pytest.fixture(scope="module")
def tied(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with tied weights."""
    folder = tmp_path_factory.mktemp("tied")
    config = transformers.AutoConfig.from_pretrained(llama)
    config.tie_word_embeddings = True
    build_module(lambda: transformers.LlamaForCausalLM(config), Key((3,))).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def run_of(base: Path, folder: Path, method: str = "fedit", rounds: int = 2, **lora: Any) -> Run:
    tables: Any = make_causal_tables(base, folder, method=method, lora={"ranks": [2], "r": 2, **lora})
    tables["defaults"] = {"batch_size": 8, "optimizer": {"kind": "sgd", "lr": 0.3}}
    made = ExperimentConfig.parse(tables)
    run = Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())
    for _ in range(rounds):
        run.step()
    return run


def as_evaluated(run: Run) -> Tensor:
    """Scores of the first client's model as training and evaluation compute them."""
    params = run.personal_params(run.federation.infos[0])
    (architecture,) = run.federation.architectures.values()
    with torch.no_grad():
        return architecture.apply(params, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})


def in_memory(run: Run) -> Tensor:
    """Scores of the same model as chat and scores use it."""
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(run.personal_params(run.federation.infos[0])) as model:
        actual: Tensor = model(input_ids=IDS).logits
    return actual


def written(run: Run, base: Path, folder: Path) -> Tensor:
    """Scores by PEFT of the adapter that is written of it."""
    language: Any = run.federation.companion
    params = run.personal_params(run.federation.infos[0])
    made = language.write_one(folder, params, run.round, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # both are in the adapter
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), made)
    with torch.no_grad():
        actual: Tensor = loaded.eval()(input_ids=IDS).logits
    return actual


def test_both_names_are_trained_as_one_and_written_as_two(tied: Path, tmp_path: Path) -> None:
    run = run_of(tied, tmp_path, modules_to_save=BOTH)
    expected = as_evaluated(run)
    before = transformers.AutoModelForCausalLM.from_pretrained(tied)(input_ids=IDS).logits
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(in_memory(run), expected)
    torch.testing.assert_close(written(run, tied, tmp_path / "adapter"), expected, rtol=1e-4, atol=1e-5)
    # a federation goes on from it
    again = run_of(tied, tmp_path, rounds=0, start=str(tmp_path / "adapter"))
    torch.testing.assert_close(in_memory(again), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_with_two_versions_of_the_tensor_is_refused(tied: Path, tmp_path: Path) -> None:
    run = run_of(tied, tmp_path, rounds=1, modules_to_save=BOTH)
    written(run, tied, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = {n: t.clone() for n, t in safetensors.torch.load_file(file).items()}
    (head,) = (n for n in stored if n.endswith("lm_head.weight"))
    safetensors.torch.save_file(stored | {head: stored[head] + 1}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"different weights for .* one tensor in the base"):
        run_of(tied, tmp_path, rounds=0, start=str(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("method", ["flora", "fedex_lora"])
def test_what_is_merged_into_an_embedding_does_not_move_the_output_layer(
    tied: Path, tmp_path: Path, method: str
) -> None:
    runs = []
    for base_updates in ("merged", "stacked"):
        tables: Any = make_causal_tables(tied, tmp_path, method=method, lora={"ranks": [2], "r": 2})
        tables["lora"]["target_modules"] = ["embed_tokens", "q_proj"]
        tables["defaults"] = {"batch_size": 8, "optimizer": {"kind": "sgd", "lr": 0.3}}
        made = ExperimentConfig.parse(tables)
        rule = dataclasses.replace(made.build_method(made.default_method), base_updates=base_updates)
        run = Run(rule, made.federation(), made.run, Sequential())
        for _ in range(2):
            run.step()
        runs.append(run)
    merged, stacked = (as_evaluated(run) for run in runs)
    torch.testing.assert_close(merged, stacked, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(in_memory(runs[0]), merged)
    # a base whose embedding moved has an output layer of its own
    language: Any = runs[0].federation.companion
    folder = language.write(runs[0], tmp_path / "exact", ExportSettings(form="exact", card=False))[0].parent
    for name in ("server", "client_0000"):
        params = (
            find_server_model(runs[0])
            if name == "server"
            else runs[0].personal_params(runs[0].federation.infos[0])
        )
        (architecture,) = runs[0].federation.architectures.values()
        with torch.no_grad():
            expected = architecture.apply(params, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
        torch.testing.assert_close(loaded_logits(folder / name), expected, rtol=1e-4, atol=1e-5)
    assert transformers.AutoConfig.from_pretrained(folder / "base").use_cache is True


def loaded_logits(folder: Path) -> Tensor:
    """Scores of a folder by PEFT or transformers alone."""
    config = folder / "adapter_config.json"
    source = json.loads(config.read_text())["base_model_name_or_path"] if config.is_file() else folder
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model = peft.PeftModel.from_pretrained(model, folder) if config.is_file() else model
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits
