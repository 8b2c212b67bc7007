"""Small real models, made once: a Llama with grouped-query attention, a BERT body, and a GPT-2."""

import os
from pathlib import Path

import pytest
import torch

from fedlowrank.core.key import Key

torch.set_num_threads(1)

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a dog sleeps; the fox does not",
    "1 + 1 = 2, said the fox",
]


def pytest_configure(config: pytest.Config) -> None:
    # PEFT asks transformers for a property under its old name, so that every adapter loaded with PEFT itself warns.
    config.addinivalue_line(
        "filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    )


@pytest.fixture(scope="session")
def real() -> Path:
    folder = os.environ.get("FEDLOWRANK_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDLOWRANK_DATA names no folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedlowrank.language.tiny_models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("llama"), "causal", Key((0,)), TEXTS)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedlowrank.language.tiny_models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("bert"), "classification", Key((0,)), TEXTS)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from fedlowrank.models.architecture import build_module

    tokenizer = AutoTokenizer.from_pretrained(llama)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": len(tokenizer)}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    folder = tmp_path_factory.mktemp("gpt2")
    build_module(lambda: GPT2LMHeadModel(GPT2Config(**size, **ends)), Key((1,))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
