"""A model with experts: what ``all-linear`` leaves out is said, and factors on experts are refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedlowrank.core.errors import FedlowrankError
from fedlowrank.core.key import Key
from fedlowrank.models.architecture import build_module
from tests.language.text_experiments import make_causal_tables, run_rounds

torch.set_num_threads(1)


def save_model(kind: Any, config: Any, tokenizer_folder: Path, folder: Path) -> Path:
    """Save an untrained model beside the tokenizer of another one, with as many tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    config.vocab_size = len(tokenizer)
    build_module(lambda: kind(config), Key((0,))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of one layer with 4 experts."""
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return save_model(transformers.MixtralForCausalLM, config, llama, tmp_path_factory.mktemp("mixtral"))


def tables_of(base: Path, folder: Path, **lora: Any) -> dict[str, Any]:
    return make_causal_tables(base, folder, method="fedit", lora={"r": 2, "ranks": [2], **lora})


@pytest.fixture(scope="module", autouse=True)
def _imported(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first adapter imports layers compiled by torch.jit, which warn, in whatever order the tests run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run_rounds(tables_of(mixtral, tmp_path_factory.mktemp("first"), target_modules=["q_proj"]), 0)


def test_all_linear_says_that_it_leaves_out_experts(mixtral: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtral)
    total = sum(p.numel() for p in model.parameters())
    # 4 experts of 64 × 32 and 32 × 32 weights
    share = 4 * (64 * 32 + 32 * 32) / total
    words = (
        rf"adapts k_proj, o_proj, q_proj, v_proj and no experts: 2 parameters, .* {share:.0%} of the model"
    )
    with pytest.warns(RuntimeWarning, match=words):
        run = run_rounds(tables_of(mixtral, tmp_path, target_modules="all-linear"), 0)
    trained = run.federation.architectures["language"].initial
    assert all(".self_attn." in name for name in trained)
    assert len(trained) == 8


def test_named_layers_and_models_without_experts_give_no_warning(
    mixtral: Path, llama: Path, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run_rounds(tables_of(mixtral, tmp_path, target_modules=["q_proj"]), 0)
        run_rounds(tables_of(llama, tmp_path, target_modules="all-linear"), 0)


def test_factors_on_experts_are_refused(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FedlowrankError, match=r"experts\.down_proj holds the weights of all experts in one 3-dim"
    ):
        run_rounds(tables_of(mixtral, tmp_path, target_modules=["q_proj", "down_proj"]), 0)
    with pytest.raises(FedlowrankError, match="one pair of rank r · E"):
        run_rounds(tables_of(mixtral, tmp_path, target_parameters=["mlp.experts.down_proj"]), 0)


@pytest.fixture(scope="module")
def glm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer without experts, and one with experts beside an expert that all tokens share."""
    config = transformers.Glm4MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    return save_model(transformers.Glm4MoeForCausalLM, config, llama, tmp_path_factory.mktemp("glm"))


def test_names_that_peft_takes_for_experts_are_left_out_or_refused(glm: Path, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"adapts k_proj, o_proj, q_proj, v_proj and no experts"):
        run = run_rounds(tables_of(glm, tmp_path, target_modules="all-linear"), 1)
    trained = run.federation.architectures["language"].initial
    assert len(trained) == 2 * 4 * 2
    assert all(".self_attn." in name for name in trained)
    for names in (["q_proj", "down_proj"], ["shared_experts.down_proj"], ["gate_proj"]):
        with pytest.raises(FedlowrankError, match=r"PEFT takes '.*_proj' for the experts of a glm4_moe"):
            run_rounds(tables_of(glm, tmp_path, target_modules=names), 0)
    with pytest.raises(FedlowrankError, match=r"PEFT has given the layer .*down_proj no factors"):
        run_rounds(tables_of(glm, tmp_path, target_modules=r".*\.down_proj"), 0)
