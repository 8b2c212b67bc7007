"""A base whose layers lie partly on the disk trains, scores and writes adapters as one that lies in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from fedlowrank.cli.main import main
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.engines import ENGINES
from fedlowrank.language.export.export_settings import ExportSettings
from fedlowrank.models.architecture import build_module
from fedlowrank.models.placement import PlacedStateless
from fedlowrank.rounds.run import Run
from tests.language.text_experiments import make_causal_tables

torch.set_num_threads(1)

PLACES: dict[str, Any] = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


def make_config(
    base: Path, folder: Path, method: str, local: dict[str, Any], **tables: Any
) -> ExperimentConfig:
    return ExperimentConfig.parse(
        make_causal_tables(
            base,
            folder,
            method=method,
            methods={method: tables.get("settings", {})},
            language=tables.get("language", {}),
            # packed texts are few rows
            partition={"min_size": 1},
            lora={"ranks": [], **tables.get("lora", {})},
            local=local,
            defaults={"steps": 2, "batch_size": 4, "optimizer": {"kind": "sgd", "lr": 0.5}},
        )
    )


def make_run(base: Path, folder: Path, method: str, local: dict[str, Any], **tables: Any) -> Run:
    config = make_config(base, folder, method, local, **tables)
    run = Run(config.build_method(method), config.federation(), config.run, ENGINES["sequential"]())
    run.record_initial_models()
    return run


def on_disk(folder: Path, **places: str) -> dict[str, Any]:
    return {"device_map": PLACES | places, "offload_folder": str(folder / "offload")}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("fedit", {}),
        ("hetlora", {}),
        ("fedsa_lora", {}),
        ("standalone", {}),
        ("fedhl", {"settings": {"delta_form": {"kind": "exact"}}}),
        ("flora", {"settings": {"base_updates": "stacked"}}),
        ("fedit", {"language": {"gradient_checkpointing": True}}),
        ("fedit", {"language": {"packing": True}}),
    ],
)
def test_a_base_on_the_disk_trains_as_one_in_memory(
    method: str, tables: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    runs = [make_run(llama, tmp_path, method, local, **tables) for local in ({}, on_disk(tmp_path))]
    weights = [
        dict(next(iter(run.federation.architectures.values())).module.named_parameters())[
            "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
        ]
        for run in runs
    ]
    assert [w.is_meta for w in weights] == [False, True]
    for _ in range(2):
        expected, actual = (run.step() for run in runs)
        assert actual.training_losses == pytest.approx(expected.training_losses, rel=1e-5)
        assert actual.flops == expected.flops > 0
    for info in runs[0].federation.infos:
        expected_params, params = (run.personal_params(info) for run in runs)
        assert params.keys() == expected_params.keys()
        for name, value in expected_params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


def test_adapters_are_written_and_whole_models_are_refused(llama: Path, tmp_path: Path) -> None:
    written = []
    for name, local in (("memory", {}), ("disk", on_disk(tmp_path))):
        run = make_run(llama, tmp_path, "fedit", local)
        run.step()
        run.federation.companion.write(run, tmp_path / name)
        written.append(safetensors.torch.load_file(tmp_path / name / "server" / "adapter_model.safetensors"))
    for name, value in written[0].items():
        torch.testing.assert_close(written[1][name], value, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        TaskError, match=r"layers\.1\.self_attn\.q_proj is not in memory.*local\.device_map to 'none'"
    ):
        run.federation.companion.write(run, tmp_path / "whole", ExportSettings(merged=True))


def test_answers_are_those_of_a_base_in_memory(llama: Path, tmp_path: Path) -> None:
    answers = []
    for local in ({}, on_disk(tmp_path)):
        run = make_run(llama, tmp_path, "fedit", local)
        run.step()
        with run.federation.companion.use_parameters(run.personal_params(run.federation.infos[0])) as model:
            answers.append(model.generate(input_ids=torch.tensor([[1, 5, 9]]), max_new_tokens=8))
    assert torch.equal(*answers)


@pytest.mark.parametrize("method", ["flora", "fedex_lora"])
def test_methods_that_change_a_weight_on_the_disk_are_refused(
    method: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"changes .*layers\.1.*device_map keeps on the disk.*base_updates"):
        make_run(llama, tmp_path, method, on_disk(tmp_path)).step()


def test_the_server_model_of_a_dense_update_is_that_of_a_base_in_memory(llama: Path, tmp_path: Path) -> None:
    records = []
    for local in ({}, on_disk(tmp_path)):
        run = make_run(llama, tmp_path, "fedhl", local, settings={"delta_form": {"kind": "dense"}})
        run.step()
        records.append(run.step())
    losses = [
        {c.split: c.values for c in r.measured.columns if (c.name, c.series) == ("loss", "server")}
        for r in records
    ]
    assert losses[0].keys() == {"val", "test"}
    for split, values in losses[0].items():
        assert losses[1][split] == pytest.approx(values, rel=1e-5)


def test_bases_that_share_a_folder_of_offloaded_weights_do_not_mix(llama: Path, tmp_path: Path) -> None:
    bases = [tmp_path / "one", tmp_path / "two"]
    for i, base in enumerate(bases):
        # a file of torch, whose weights are stored again, one file each
        model = transformers.AutoModelForCausalLM.from_pretrained(llama)
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(1 + 50 * i)
        model.save_pretrained(base)
        (base / "model.safetensors").unlink()
        torch.save(model.state_dict(), base / "pytorch_model.bin")
        transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(base)
    losses = []
    for local in ({}, on_disk(tmp_path)):
        runs = [make_run(base, tmp_path, "fedit", local) for base in bases]
        losses.append([run.step().training_losses["local"] for run in runs])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-5)
    runs.clear()
    gc.collect()
    assert not list((tmp_path / "offload").iterdir())


def test_a_machine_without_need_for_a_placement_takes_none(llama: Path, tmp_path: Path) -> None:
    language = {"device_map": PLACES, "offload_folder": str(tmp_path / "offload")}
    run = make_run(llama, tmp_path, "fedit", {"device_map": "none"}, language=language)
    (model,) = run.federation.architectures.values()
    assert not any(p.is_meta for p in model.module.parameters())


def test_methods_that_draw_several_models_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"draws several models.*device_map out"):
        make_run(llama, tmp_path, "ifca", on_disk(tmp_path), settings={"clusters": 2})


@pytest.mark.full
def test_a_stored_run_is_merged_with_the_base_in_memory(llama: Path, tmp_path: Path) -> None:
    for name, local in (("memory", {}), ("disk", on_disk(tmp_path))):
        config = make_config(llama, tmp_path, "fedit", local)
        (tmp_path / f"{name}.toml").write_text(config.to_toml())
        assert main(["run", str(tmp_path / f"{name}.toml"), "-o", str(tmp_path / name)]) == 0
        assert main(["adapters", str(tmp_path / name), "--merged", "-o", str(tmp_path / f"out-{name}")]) == 0
    expected, actual = (
        safetensors.torch.load_file(tmp_path / f"out-{name}" / "server_merged" / "model.safetensors")
        for name in ("memory", "disk")
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)
    assert main(["export", str(tmp_path / "disk"), "-o", str(tmp_path / "file")]) == 1


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match:UserWarning")
@pytest.mark.parametrize(
    ("local", "tables", "error"),
    [
        ({"device_map": "atuo"}, {}, r"device_map: 'atuo' is no choice; it is auto, balanced"),
        ({"max_memory": {"cpu": "1GiB"}}, {}, r"max_memory is of language\.device_map"),
        ({"offload_folder": "x"}, {}, r"offload_folder is of language\.device_map"),
        ({"device_map": PLACES, "max_memory": {"cpu": "1GiB"}}, {}, r"max_memory is for a device_map that"),
        ({"device_map": "auto"}, {"language": {"new_tokens": ["<x>"]}}, r"new_tokens changes the embedding"),
        ({"device_map": {**PLACES, "model.embed_tokens": "disk"}}, {}, r"the embedding must"),
        ({"device_map": {}}, {}, r"is an empty table"),
        ({"device_map": {"": "cpu", "model.layers.1": "disk"}}, {}, r"places 'model.layers.1' and '', which contains it"),
        ({"device_map": {**PLACES, "model.layers.7": "disk"}}, {}, r"no module 'model.layers.7'.*mean 'model.layers"),
        ({"device_map": PLACES}, {"lora": {"init_lora_weights": "pissa"}}, r"begins at a part of.*device_map"),
        ({"device_map": PLACES}, {"lora": {"modules_to_save": ["model.layers.1.mlp.up_proj"]}}, r"up_proj.weight is trained"),
    ],
)  # fmt: skip
def test_placements_without_a_meaning_are_refused(
    local: dict[str, Any], tables: dict[str, Any], error: str, llama: Path, tmp_path: Path
) -> None:
    folder = (
        {}
        if "offload_folder" in local or "device_map" not in local
        else {"offload_folder": str(tmp_path / "o")}
    )
    with pytest.raises(ConfigError, match=error):
        make_run(llama, tmp_path, "fedit", local | folder, **tables)


def test_an_output_layer_that_is_tied_must_be_in_memory(llama: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama)
    config.tie_word_embeddings = True
    model = build_module(lambda: transformers.LlamaForCausalLM(config), Key((3,)))
    model.save_pretrained(tmp_path / "tied")
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "tied")
    with pytest.raises(ConfigError, match=r"output layer, which shares its weight.*must be in the memory"):
        make_run(tmp_path / "tied", tmp_path, "fedit", on_disk(tmp_path, lm_head="disk"))


def test_a_weight_that_each_call_loads_is_not_replaced() -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    with pytest.raises(TaskError, match=r"changes weight, which language\.device_map keeps on the disk"):
        PlacedStateless(layer)({"weight": torch.ones(2, 2)}, torch.ones(1, 2))
