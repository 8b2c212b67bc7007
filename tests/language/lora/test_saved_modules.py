"""Modules that are trained whole beside the factors: one step is PEFT's, and what is written loads in PEFT and goes on."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers

from fedlowrank.cli.main import main
from fedlowrank.config.stored_run import open_run
from fedlowrank.core.errors import ConfigError, FedlowrankError
from fedlowrank.language.lora.saved_modules import find_saved_modules
from tests.language.peft_scores import (
    TOKEN_IDS,
    score_client_tokens,
    score_server_tokens,
    score_tokens_with_peft,
)
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)

HEAD = "base_model.model.lm_head.weight"
NORM = "base_model.model.model.norm.weight"
SAVED = {"ranks": [2], "r": 2, "modules_to_save": ["lm_head", "norm"]}


def test_a_step_is_that_of_plain_peft(llama: Path, tmp_path: Path) -> None:
    # one client, one step on all of its texts
    tables = make_causal_tables(
        llama, tmp_path, method="fedit", lora=SAVED, partition={"clients": 1, "alpha": 1.0},
        defaults={"batch_size": 1000, "steps": 1, "optimizer": {"kind": "sgd", "lr": 0.3}},
    )  # fmt: skip
    run = run_rounds(tables, 0)
    before = {n: p.clone() for n, p in run.personal_params(run.federation.infos[0]).items()}
    run.step()
    after = run.personal_params(run.federation.infos[0])

    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head", "norm"], task_type="CAUSAL_LM"
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama), config)

    def ours(name: str) -> str:
        return name.replace("modules_to_save.default.", "")

    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    assert {ours(n) for n in trained} == set(before)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(before[ours(name)])
    data = run.federation.clients[0].train
    assert isinstance(data.x, dict)
    # the mean over all supervised tokens, as transformers computes it
    loss = plain(**data.x, labels=data.y).loss
    grads = torch.autograd.grad(loss, list(trained.values()))
    for (name, parameter), grad in zip(trained.items(), grads, strict=True):
        torch.testing.assert_close(after[ours(name)], parameter - 0.3 * grad, rtol=0, atol=2e-6)
    assert (after[HEAD] - before[HEAD]).abs().max() > 1e-4
    assert (after[NORM] - before[NORM]).abs().max() > 1e-5


@pytest.mark.parametrize("method", ["fedit", "fedhl", "flora"])
def test_adapters_load_in_peft_and_the_next_run_starts_from_them(
    method: str, llama: Path, tmp_path: Path
) -> None:
    saved = SAVED | ({} if method == "fedit" else {"ranks": [2, 1, 1]})
    experiment = write_toml(
        make_causal_tables(llama, tmp_path, method=method, lora=saved), tmp_path / "e.toml"
    )
    assert main(["run", str(experiment), "-o", str(tmp_path / "run")]) == 0
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--exact"]) == 0
    run = open_run(tmp_path / "run", "")
    assert (run.personal_params(run.federation.infos[0])[NORM] - 1).abs().max() > 1e-3
    # the base of FLoRA's clients moved and is written beside them
    base = tmp_path / "out" / "base" if method == "flora" else llama
    for k in range(3):
        torch.testing.assert_close(
            score_tokens_with_peft(base, tmp_path / "out" / f"client_{k:04d}"),
            score_client_tokens(run, k),
            rtol=0,
            atol=1e-5,
        )
    assert (
        main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "whole"), "--merged", "--exact"]) == 0
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "server")
    with torch.no_grad():
        scores = whole(input_ids=TOKEN_IDS).logits
    torch.testing.assert_close(scores, score_server_tokens(run), rtol=0, atol=1e-5)
    if method == "flora":
        return
    card = (tmp_path / "out" / "client_0000" / "README.md").read_text()
    assert "lm_head" in card
    start = tmp_path / "out" / "client_0000"
    tables = make_causal_tables(llama, tmp_path, method=method, lora={"start": str(start)})
    for field in ("r", "lora_alpha", "target_modules", "ranks"):
        del tables["lora"][field]
    following = run_rounds(tables, 0)
    torch.testing.assert_close(
        score_client_tokens(following, 0), score_tokens_with_peft(llama, start), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("head", ["shared", "personal", "frozen"])
def test_who_holds_them_is_a_setting(head: str, llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(
        llama, tmp_path, method="fedit", lora=SAVED, methods={"fedit": {"training": {"head": head}}}
    )
    run = run_rounds(tables, 0)
    record = run.step()
    first, second = (run.personal_params(info)[HEAD] for info in run.federation.infos[:2])
    initial = run.federation.architectures["language"].initial[HEAD]
    moved = not torch.equal(first, initial)
    assert (moved, torch.equal(first, second)) == {
        "shared": (True, True), "personal": (True, False), "frozen": (False, True)
    }[head]  # fmt: skip
    whole = 3 * 4 * (initial.numel() + run.federation.architectures["language"].initial[NORM].numel())
    assert (record.bytes_up > whole) == (head == "shared")


# transformers calls attention by keywords, with a tuple among them, and it returns a tuple
@pytest.mark.parametrize("saved", [["lm_head", "norm"], ["self_attn"]])
def test_a_base_in_half_precision_trains_them_in_float32(
    saved: list[str], llama: Path, tmp_path: Path
) -> None:
    lora = {**SAVED, "modules_to_save": saved, "target_modules": ["up_proj"]}
    tables = make_causal_tables(llama, tmp_path, method="fedit", lora=lora, language={"dtype": "bfloat16"})
    run = run_rounds(tables, 0)
    info = run.federation.infos[0]
    before = {n: t.clone() for n, t in run.personal_params(info).items() if "lora_" not in n}
    run.step()
    after = run.personal_params(info)
    assert before
    for name, value in before.items():
        assert after[name].dtype == torch.float32
        assert (after[name] - value).abs().max() > 1e-3


def test_what_cannot_be_trained_whole_is_refused(llama: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    for name, message in (
        ("lm_haed", "'lm_haed' is the end of no module's name .* Did you mean 'lm_head'"),
        ("rotary_emb", "'rotary_emb' is the end of no module's name"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_saved_modules(model, [name])
    assert find_saved_modules(model, ["mlp", "gate_proj"]) == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert find_saved_modules(model, ["model.norm", "lm_head"], ["lm_head"]) == ("model.norm",)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight are one tensor \(tied"
    ):
        find_saved_modules(model, ["lm_head"])
    assert find_saved_modules(model, ["lm_head", "embed_tokens"]) == ("model.embed_tokens", "lm_head")
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"model\.norm is quantized"):
        find_saved_modules(model, ["norm"])
    for value in ("lm_head", [1]):
        with pytest.raises(FedlowrankError, match="modules_to_save must be a list of names"):
            run_rounds(make_causal_tables(llama, tmp_path, lora=SAVED | {"modules_to_save": value}), 0)
