"""Ranks and α of single layers in the section ``[lora]``: the layers are PEFT's, and what is written loads in PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from fedlowrank.cli.main import main
from fedlowrank.config.stored_run import open_run
from fedlowrank.core.errors import ConfigError, FedlowrankError, LoweredRankWarning, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.lora.peft_adapter import attach_adapter
from fedlowrank.language.lora.peft_config import make_lora_config
from tests.language.peft_scores import score_client_tokens, score_tokens_with_peft
from tests.language.text_experiments import make_causal_tables, run_rounds, write_toml

torch.set_num_threads(1)

LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
    "alpha_pattern": {"down_proj": 3},
}


def layers_of(model: Any) -> dict[str, tuple[int, float]]:
    """Rank and scale of each adapted layer."""
    return {
        n: (m.lora_A["default"].weight.shape[0], m.scaling["default"])
        for n, m in model.named_modules()
        if isinstance(getattr(m, "scaling", None), dict)
    }


@pytest.mark.parametrize("stable", [False, True])
def test_layers_are_those_of_peft(stable: bool, llama: Path) -> None:
    fields = LORA | {"use_rslora": stable}
    model = attach_adapter(
        load_base(LanguageBase(str(llama)), (), Key((0,))).model, make_lora_config(fields), Key((0,))
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        plain = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(llama),
            peft.LoraConfig(task_type="CAUSAL_LM", **fields),
        )
    actual = layers_of(model)
    assert actual == layers_of(plain)
    assert {r for r, _ in actual.values()} == {4, 2, 6}
    assert len({s for _, s in actual.values()}) > 2


def test_a_layer_that_can_have_less_keeps_the_scale(llama: Path) -> None:
    # k and v of the tiny model have 16 outputs
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 40}}
    base = load_base(LanguageBase(str(llama)), (), Key((0,))).model
    with pytest.warns(LoweredRankWarning, match="rank 40 is above"):
        model = attach_adapter(base, make_lora_config(fields), Key((0,)))
    actual = layers_of(model)
    assert {r for n, (r, _) in actual.items() if "v_proj" in n} == {16}
    assert {s for n, (_, s) in actual.items() if "v_proj" in n} == {8 / 16}
    assert {v for n, v in actual.items() if "q_proj" in n} == {(4, 2.0)}


@pytest.mark.parametrize("method", ["fedit", "fedhl"])
def test_adapters_load_in_peft(method: str, llama: Path, tmp_path: Path) -> None:
    lora = LORA | {"ranks": [6] if method == "fedit" else [6, 3, 1]}
    experiment = write_toml(
        make_causal_tables(llama, tmp_path, method=method, lora=lora), tmp_path / "e.toml"
    )
    assert main(["run", str(experiment), "-o", str(tmp_path / "run")]) == 0
    assert main(["adapters", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--exact"]) == 0
    run = open_run(tmp_path / "run", "")
    assert run.federation.companion.describe()["adapter"]["rank_pattern"] == str(LORA["rank_pattern"])
    for k in range(3):
        folder = tmp_path / "out" / f"client_{k:04d}"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert not config["rank_pattern"]
        assert not config["alpha_pattern"]
        torch.testing.assert_close(
            score_tokens_with_peft(llama, folder), score_client_tokens(run, k), rtol=0, atol=1e-5
        )
        held = run.personal_params(run.federation.infos[k])
        own = run.federation.infos[k].rank or 6
        ranks = {n: t.shape[0] for n, t in held.items() if ".lora_A." in n}
        caps = {n: 2 if "v_proj" in n else 6 if "layers.1.mlp" in n else 4 for n in ranks}
        assert ranks == {n: min(own, cap) for n, cap in caps.items()}


@pytest.mark.parametrize("method", ["fedit", "fedhl", "flora", "hetlora", "flexlora"])
def test_one_alpha_for_clients_of_unequal_ranks_needs_layers_of_one_rank(
    method: str, llama: Path, tmp_path: Path
) -> None:
    lora = {"r": 8, "lora_alpha": 8, "ranks": [4], "target_modules": ["q_proj", "v_proj", "up_proj"]}
    training = {"defaults": {"training": {"scaling": "alpha"}}}
    # min(d, k) of v_proj bounds its rank, not its scale
    with pytest.warns(LoweredRankWarning, match="rank 32 is above"):
        run_rounds(make_causal_tables(llama, tmp_path, method=method, lora=lora | {"r": 32}, **training), 0)
    tables = make_causal_tables(
        llama, tmp_path, method=method, lora=lora | {"rank_pattern": {"v_proj": 4}}, **training
    )
    with pytest.raises(TaskError, match=r"v_proj has another rank than other layers \(lora\.rank_pattern\)"):
        run_rounds(tables, 0)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("flora", {"base_updates": "stacked"}),
        ("fedex_lora", {"base_updates": "stacked"}),
        ("fedhl", {"residual": True, "delta_form": {"kind": "exact"}}),
    ],
)
def test_dropout_beside_a_frozen_update_is_refused(
    method: str, settings: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    for dropout in (0.0, 0.4):
        ranks = [4] if method == "fedex_lora" else [4, 2, 1]
        tables = make_causal_tables(
            llama,
            tmp_path,
            method=method,
            methods={method: settings},
            lora={"lora_dropout": dropout, "ranks": ranks},
        )
        if dropout == 0:
            run_rounds(tables)
            continue
        with pytest.raises(
            TaskError, match=r"lora_dropout = 0\.4 would drop inputs of the frozen update, too"
        ):
            run_rounds(tables, 0)
    if method != "fedhl":
        # merged, with the evaluation of the server's model
        run_rounds(tables | {"methods": {}})


def test_what_names_no_layer_and_what_is_no_number_is_refused(llama: Path) -> None:
    base = load_base(LanguageBase(str(llama)), (), Key((0,))).model
    with pytest.raises(TaskError, match="'k_proj' matches no adapted layer"):
        attach_adapter(
            base,
            make_lora_config({"r": 2, "target_modules": ["q_proj"], "rank_pattern": {"k_proj": 1}}),
            Key((0,)),
        )
    for fields, message in (
        (
            {"rank_pattern": {"q_proj": 0}},
            r"lora\.rank_pattern, 'q_proj' must be a whole number of at least 1",
        ),
        ({"alpha_pattern": {"q_proj": -1}}, r"lora\.alpha_pattern: α of 'q_proj' must be above 0; it is -1"),
        ({"alpha_pattern": {"q_proj": True}}, "must be above 0; it is True"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be a table"),
    ):
        with pytest.raises((ConfigError, FedlowrankError), match=message):
            make_lora_config({"r": 2, **fields})
