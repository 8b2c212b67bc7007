"""Scores of a model in memory and of the adapter folder that was written of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from fedlowrank.language.export.server_model import find_server_model
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_causal_tables


def take_inputs(run: Run) -> dict[str, Tensor]:
    return {n: t[:4] for n, t in run.federation.clients[0].train.x.items()}


def score_with_peft(base: Path, adapter: Path, x: dict[str, Tensor]) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        scores: Tensor = PeftModel.from_pretrained(plain, adapter)(**x).logits
    return scores


def score_in_memory(run: Run, client: int | None) -> Tensor:
    info = run.federation.infos[client or 0]
    params = run.personal_params(info) if client is not None else run.local_model(info).server
    assert params is not None
    with torch.no_grad():
        return run.federation.architectures["language"].apply(params, take_inputs(run))


def make_half_dense_tables(llama: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """W of the small value projections is soon a matrix, that of the others still factors."""
    return make_causal_tables(llama, tmp_path, lora={"target_modules": ["v_proj", "gate_proj"]}, **more)


TOKEN_IDS = torch.tensor([[1, 5, 9, 7, 4, 6]])


def score_client_tokens(run: Run, client: int) -> Tensor:
    """Scores of a client's model in memory."""
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(run.personal_params(run.federation.infos[client])) as model:
        actual: Tensor = model(input_ids=TOKEN_IDS).logits
    return actual


def score_server_tokens(run: Run) -> Tensor:
    """Scores of the server's model in memory."""
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(find_server_model(run)) as model:
        actual: Tensor = model(input_ids=TOKEN_IDS).logits
    return actual


def score_tokens_with_peft(base: Path, folder: Path) -> Tensor:
    """Scores by PEFT of an adapter folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), folder
        )
    with torch.no_grad():
        actual: Tensor = loaded.eval()(input_ids=TOKEN_IDS).logits
    return actual
