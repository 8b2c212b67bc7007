"""PiSSA and OLoRA: the start and the steps are PEFT's, and what is written fits the base as it lies on the disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from fedlowrank import SGD, Federation
from fedlowrank.cli.main import main
from fedlowrank.config.stored_run import open_run
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.lora.peft_adapter import attach_adapter
from fedlowrank.language.lora.peft_config import make_lora_config
from fedlowrank.methods import METHODS
from fedlowrank.rounds.simulate import simulate
from tests.language.peft_scores import (
    TOKEN_IDS,
    score_client_tokens,
    score_server_tokens,
    score_tokens_with_peft,
)
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)

LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}


def by_plain_peft(base: Path, init: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(base),
            peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=init, **LORA),
        )


def attach(base: Path, **fields: Any) -> Any:
    loaded = load_base(LanguageBase(str(base)), (), Key((0,)))
    return attach_adapter(loaded.model, make_lora_config(LORA | fields), Key((0,)))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_factors_and_base_are_those_of_peft(init: str, llama: Path) -> None:
    ours, plain = attach(llama, init_lora_weights=init), by_plain_peft(llama, init)
    actual, expected = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(actual[name], parameter, rtol=0, atol=1e-6)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    weight = "model.layers.0.self_attn.q_proj.weight"
    moved = actual["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert (moved - base.get_parameter(weight)).abs().max() > 0.01
    with torch.no_grad():
        torch.testing.assert_close(
            ours(input_ids=TOKEN_IDS).logits, base(input_ids=TOKEN_IDS).logits, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("method", ["fedit", "fedhl", "hetlora", "fedavg"])
def test_a_step_is_that_of_peft(method: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(
        llama, tmp_path, method=method, lora=LORA | {"ranks": [3], "init_lora_weights": "pissa"},
        partition={"clients": 1, "alpha": 1.0},
        defaults={"batch_size": 1000, "steps": 1, "optimizer": {"kind": "sgd", "lr": 0.1}},
    )  # fmt: skip
    run = run_rounds(tables, 1)
    data = run.federation.clients[0].train
    assert isinstance(data.x, dict)
    plain = by_plain_peft(llama, "pissa")
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    loss = plain(**data.x, labels=data.y).loss
    grads = torch.autograd.grad(loss, list(trained.values()))
    with torch.no_grad():
        for parameter, grad in zip(trained.values(), grads, strict=True):
            parameter -= 0.1 * grad
        expected = plain.eval()(input_ids=TOKEN_IDS).logits
    torch.testing.assert_close(score_client_tokens(run, 0), expected, rtol=0, atol=2e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        assert (expected - base(input_ids=TOKEN_IDS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["fedit", "fedhl"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_and_whole_models_fit_the_base_of_the_files(
    method: str, init: str, llama: Path, tmp_path: Path
) -> None:
    lora = LORA | {"ranks": [3], "init_lora_weights": init}
    experiment = write_toml(
        make_causal_tables(llama, tmp_path, method=method, lora=lora), tmp_path / "e.toml"
    )
    assert main(["run", str(experiment), "-o", str(tmp_path / "run")]) == 0
    run = open_run(tmp_path / "run", "")
    # by default the rank is twice that of a client, which loses nothing of a client's model
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    for k in range(3):
        folder = tmp_path / "out" / f"client_{k:04d}"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["init_lora_weights"]) == (6, True)
        torch.testing.assert_close(
            score_tokens_with_peft(llama, folder), score_client_tokens(run, k), rtol=0, atol=2e-5
        )
    assert (
        main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "exact"), "--exact", "--merged"]) == 0
    )
    torch.testing.assert_close(
        score_tokens_with_peft(llama, tmp_path / "exact" / "server"),
        score_server_tokens(run),
        rtol=0,
        atol=2e-5,
    )
    for name, expected in (("server_merged", score_server_tokens(run)), ("server", score_server_tokens(run))):
        if not (tmp_path / "exact" / name / "model.safetensors").is_file():
            continue
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact" / name)
        with torch.no_grad():
            torch.testing.assert_close(whole(input_ids=TOKEN_IDS).logits, expected, rtol=0, atol=2e-5)
    assert any((tmp_path / "exact").glob("*/model.safetensors"))


def test_adapters_for_a_base_that_moved_fit_the_base_beside_them(llama: Path, tmp_path: Path) -> None:
    lora = LORA | {"ranks": [3], "init_lora_weights": "pissa"}
    experiment = write_toml(
        make_causal_tables(llama, tmp_path, method="fedex_lora", lora=lora), tmp_path / "e.toml"
    )
    assert main(["run", str(experiment), "-o", str(tmp_path / "run")]) == 0
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--exact"]) == 0
    run = open_run(tmp_path / "run", "")
    for k in range(3):
        actual = score_tokens_with_peft(tmp_path / "out" / "base", tmp_path / "out" / f"client_{k:04d}")
        torch.testing.assert_close(actual, score_client_tokens(run, k), rtol=0, atol=2e-5)


def test_a_module_of_the_user_may_begin_so() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    with torch.no_grad():
        expected = net(x)
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights="pissa"))
    on = Federation.from_arrays([(x[:12], y[:12]), (x[12:], y[12:])], model, classes=3)
    result = simulate(METHODS["fedhl"](optimizer=SGD(lr=0.0)), on, rounds=2)
    with torch.no_grad():
        actual = torch.func.functional_call(model, result.personal(0), (x,))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_what_has_no_such_start_is_refused(llama: Path, tmp_path: Path) -> None:
    lora = LORA | {"init_lora_weights": "pissa"}
    for method, more, message in (
        ("fedhl", {"ranks": [3, 3, 2]}, "client 2 of rank 2 would begin without some"),
        ("hetlora", {"ranks": [3, 1, 1]}, "would begin without some"),
        ("flora", {"ranks": [3]}, "FLoRA begins every round with new factors"),
        # singular vectors have a sign that two machines may choose differently
        ("ffa_lora", {"ranks": [3]}, "FFA-LoRA sends B alone"),
        ("fedsa_lora", {"ranks": [3]}, "FedSA-LoRA sends A alone"),
    ):
        with pytest.raises(TaskError, match=message):
            run_rounds(make_causal_tables(llama, tmp_path, method=method, lora=lora | more), 0)
    with pytest.raises(ConfigError, match="two starts of the same factors"):
        run_rounds(make_causal_tables(llama, tmp_path, lora=lora | {"start": str(tmp_path)}), 0)
    with pytest.raises(TaskError, match="embed_tokens is no linear layer but Embedding"):
        attach(llama, init_lora_weights="pissa", target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"'pissa_niter_4' cannot be used .* same on all machines"):
        make_lora_config({"r": 2, "init_lora_weights": "pissa_niter_4"})
    tied = load_base(LanguageBase(str(llama)), (), Key((0,))).model
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(TaskError, match=r"lm_head, which is that of model\.embed_tokens\.weight, too"):
        attach_adapter(
            tied,
            make_lora_config(LORA | {"init_lora_weights": "olora", "target_modules": ["lm_head"]}),
            Key((0,)),
        )
