"""A federation that starts from an adapter of PEFT begins with the logits of PEFT, under every LoRA method."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from fedlowrank import SGD, Federation
from fedlowrank.adapters.lora.lora_factors import find_lora
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.engines import ENGINES
from fedlowrank.language.export.server_model import find_server_model
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.models.architecture import build_module
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.simulate import simulate

torch.set_num_threads(1)

IDS = torch.tensor([[1, 5, 9, 7, 4, 6]])
FIXED_RANK = ["fedit", "ffa_lora", "fedsa_lora", "fedex_lora"]
ANY_RANK = ["hetlora", "flexlora", "flora", "fedhl"]


def write_adapter(base: Path, folder: Path, seed: int = 1, **config: Any) -> Tensor:
    """An adapter with random factors by plain PEFT; its logits."""
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], **config}
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    with warnings.catch_warnings():
        # that it saves the base's embedding, too
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)
        made.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder)
    logits: Tensor = loaded.eval()(input_ids=IDS).logits.detach()
    return logits


def name_folders(folder: Path | Sequence[Path]) -> str | list[str]:
    return str(folder) if isinstance(folder, Path) else [str(f) for f in folder]


def make_run(
    base: Path,
    folder: Path | Sequence[Path],
    rows: Path,
    method: str,
    lora: dict[str, Any],
    lr: float = 0.0,
    start: Path | Sequence[Path] | None = None,
    new_tokens: Sequence[str] = (),
) -> Run:
    for c in range(2):
        lines = [json.dumps({"prompt": f"who is {i}?", "completion": f"the fox {c}"}) for i in range(12)]
        (rows / f"site{c}.jsonl").write_text("\n".join(lines))
    config = ExperimentConfig.parse(
        {
            "name": "start",
            "method": method,
            "data": {
                "source": "text",
                "path": str(rows / "*.jsonl"),
                "client_by_file": True,
                "normalize": "none",
            },
            "partition": {"kind": "natural"},
            "language": {"path": str(base), "context": 48, "format": "plain", "new_tokens": [*new_tokens]},
            "lora": {"start": name_folders(folder), **lora},
            "run": {"rounds": 1},
            "local": {} if start is None else {"start": name_folders(start)},
            "defaults": {"steps": 1, "batch_size": 4, "optimizer": {"kind": "sgd", "lr": lr}},
        }
    )
    run = Run(config.build_method(method), config.federation(), config.run, ENGINES["sequential"]())
    run.record_initial_models()
    return run


def logits_of(run: Run, params: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad(), run.federation.companion.use_parameters(params) as model:
        actual: Tensor = model(input_ids=ids).logits
    return actual


def plain_logits(base: Path) -> Tensor:
    with torch.no_grad():
        actual: Tensor = transformers.AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=IDS).logits
    return actual


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("method", "lora"),
    [(m, {}) for m in (*FIXED_RANK, *ANY_RANK, "standalone", "fedavg")]
    + [(m, {"r": 6, "lora_alpha": 6}) for m in FIXED_RANK]
    + [(m, {"ranks": [4, 3]}) for m in ANY_RANK]
    + [(m, {"ranks": [2, 1]}) for m in ("flexlora", "flora", "fedhl")],
)
def test_the_first_model_is_that_of_peft(
    method: str, lora: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    expected = write_adapter(llama, tmp_path / "adapter")
    assert (expected - plain_logits(llama)).abs().max() > 0.01
    run = make_run(llama, tmp_path / "adapter", tmp_path, method, lora)
    for _ in range(2):
        server = find_server_model(run)
        params = run.personal_params(run.federation.infos[0]) if server is None else server
        assert torch.allclose(logits_of(run, params), expected, atol=2e-5)
        # a round at a learning rate of 0 changes nothing, but for means of truncated models
        if lora.get("ranks") and method not in ("fedhl", "flora"):
            break
        run.step()


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.v_proj": 9}},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
)
def test_scales_and_ranks_of_single_layers_are_read(
    config: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    expected = write_adapter(llama, tmp_path / "adapter", **config)
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {})
    assert torch.allclose(logits_of(run, run.personal_params(run.federation.infos[1])), expected, atol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
        {"exclude_modules": ["v_proj"]},
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"alpha_pattern": {"v_proj": 20}},
        {"rank_pattern": {"v_proj": 1}},
        {"rank_pattern": {"v_proj": 1, "layers.0.self_attn.q_proj": 5}, "alpha_pattern": {"q_proj": 2}},
        {"lora_dropout": 0.25},
    ],
    ids=str,
)
def test_the_layers_and_settings_are_those_of_the_adapter(
    config: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    expected = write_adapter(llama, tmp_path / "adapter", **config)
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {})
    params = run.personal_params(run.federation.infos[0])
    assert torch.allclose(logits_of(run, params), expected, atol=2e-5)
    stored = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".default.weight", ".weight") for name in params} == set(stored)
    # as PEFT loads them, so that steps are the same, too
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ours: Any = run.federation.companion
    for name, layer in theirs.named_modules():
        if hasattr(layer, "lora_A"):
            own = ours.model.get_submodule(name)
            assert own.scaling == layer.scaling
            assert getattr(own.lora_dropout["default"], "p", 0) == getattr(
                layer.lora_dropout["default"], "p", 0
            )


def test_layers_that_are_set_replace_those_of_the_adapter(llama: Path, tmp_path: Path) -> None:
    expected = write_adapter(
        llama, tmp_path / "adapter", layers_to_transform=[1], alpha_pattern={"q_proj": 9}
    )
    wider = {"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 4, "lora_alpha": 4}
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", wider)
    params = run.personal_params(run.federation.infos[0])
    assert torch.allclose(logits_of(run, params), expected, atol=2e-5)
    assert len(params) == 2 * 3 * 2


@pytest.mark.parametrize(
    "lora", [{"r": 8}, {"lora_alpha": 8}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"v_proj": 4}}]
)
def test_what_is_set_replaces_that_field_alone(lora: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    stored = {
        "r": 4,
        "lora_alpha": 16,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"v_proj": 6},
        "lora_dropout": 0.1,
    }
    expected = write_adapter(llama, tmp_path / "adapter", **stored)
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", lora)
    config = run.federation.companion.model.peft_config["default"]
    assert {name: getattr(config, name) for name in stored} == stored | lora
    torch.testing.assert_close(logits_of(run, find_server_model(run)), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "config", [{"alpha_pattern": {"v_proj": 7}}, {"target_modules": ["embed_tokens", "q_proj"]}]
)
def test_an_adapter_in_half_precision_is_not_rounded(
    config: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    write_adapter(llama, tmp_path / "adapter", **config)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {n: t.bfloat16() for n, t in safetensors.torch.load_file(file).items() if "lora_" in n}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    expected = (
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=IDS).logits.detach()
    )
    # another scale, so that the factors are multiplied
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {"lora_alpha": 7})
    torch.testing.assert_close(logits_of(run, find_server_model(run)), expected, rtol=1e-5, atol=1e-6)


def test_training_goes_on_from_the_factors(llama: Path, tmp_path: Path) -> None:
    """One step of FedIT is a step of SGD on the factors in plain PEFT."""
    write_adapter(llama, tmp_path / "adapter")
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {}, lr=0.1)
    before = {n: t.clone() for n, t in run.personal_params(run.federation.infos[0]).items()}
    stored = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, value in before.items():
        assert torch.equal(value, stored[name.replace(".default.weight", ".weight")])
    run.step()
    after = run.personal_params(run.federation.infos[0])
    # A has a gradient in the first step already, for B is not zero
    assert all((after[n] - before[n]).abs().max() > 0 for n in before)


@pytest.mark.parametrize(
    ("method", "lora", "error", "message"),
    [
        ("fedit", {"ranks": [2, 2]}, TaskError, "starts from has rank 3 .* choose fedhl, flexlora or flora"),
        ("hetlora", {"ranks": [2, 1]}, TaskError, "Give them a rank of at least 3"),
        ("fedit", {"r": 2}, ConfigError, "lora.r is 2. Set lora.r = 3, or leave it out"),
        ("fedit", {"target_modules": ["q_proj"]}, ConfigError, "which this model does not adapt"),
    ],
)
def test_what_does_not_fit_is_refused(
    method: str, lora: dict[str, Any], error: type[Exception], message: str, llama: Path, tmp_path: Path
) -> None:
    write_adapter(llama, tmp_path / "adapter")
    with pytest.raises(error, match=message):
        make_run(llama, tmp_path / "adapter", tmp_path, method, lora)


def test_folders_that_are_no_lora_adapter_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no adapter folder of PEFT: there is no adapter_config\.json"):
        make_run(llama, tmp_path, tmp_path, "fedit", {})
    write_adapter(llama, tmp_path / "dora", use_dora=True)
    with pytest.raises(ConfigError, match="use_dora = True, but its magnitudes"):
        make_run(llama, tmp_path / "dora", tmp_path, "fedit", {})
    write_adapter(llama, tmp_path / "kasa")
    config = json.loads((tmp_path / "kasa" / "adapter_config.json").read_text())
    # PEFT stores this setting in every adapter
    assert config["inference_mode"]
    (tmp_path / "kasa" / "adapter_config.json").write_text(json.dumps({**config, "kasa_config": {}}))
    with pytest.raises(ConfigError, match=r"kasa_config = \{\}, but it is another update"):
        make_run(llama, tmp_path / "kasa", tmp_path, "fedit", {})
    write_adapter(llama, tmp_path / "other")
    file = tmp_path / "other" / "adapter_model.safetensors"
    cut = {
        n: t[..., :-1].contiguous() if "lora_A" in n else t
        for n, t in safetensors.torch.load_file(file).items()
    }
    safetensors.torch.save_file(cut, file)
    with pytest.raises(DataError, match="The adapter is of another base model"):
        make_run(llama, tmp_path / "other", tmp_path, "fedit", {})


@pytest.mark.parametrize("name", [*FIXED_RANK, *ANY_RANK])
def test_trained_layers_of_your_own_module_are_the_start(name: str) -> None:
    """Not for language models alone: factors that a module brings are not thrown away."""
    generator = torch.Generator().manual_seed(0)
    net = add_lora(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), rank=2, alpha=3, target_modules=["0"]
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, y = torch.randn(20, 6, generator=generator), torch.arange(20) % 3
    federation = Federation.from_arrays([(x[:10], y[:10]), (x[10:], y[10:])], net, classes=3)
    method = METHODS[name](optimizer=SGD(lr=0.0), batch_size=4, training=LoRATraining(head="frozen"))
    result = simulate(method, federation, rounds=1)
    params = result.personal(0)
    with torch.no_grad():
        actual = torch.func.functional_call(net, params, (x,))
    assert torch.allclose(actual, net(x), atol=1e-5)


def test_the_adapter_may_lie_elsewhere_on_a_machine(llama: Path, tmp_path: Path) -> None:
    expected = write_adapter(llama, tmp_path / "adapter")
    run = make_run(llama, tmp_path / "of the others", tmp_path, "fedit", {}, start=tmp_path / "adapter")
    assert torch.allclose(logits_of(run, run.personal_params(run.federation.infos[1])), expected, atol=2e-5)
    files = run.federation.companion.files
    weights = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert files["start/adapter_model.safetensors"] == hashlib.blake2b(weights, digest_size=16).hexdigest()
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    digests = []
    for change in ({"base_model_name_or_path": "elsewhere"}, {"lora_alpha": 50}, {"lora_dropout": 0.5}):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(stored | change))
        other = make_run(
            llama, tmp_path, tmp_path, "fedit", {}, start=tmp_path / "adapter"
        ).federation.companion
        digests.append(other.files["start/adapter_config.json"])
    assert digests[0] == files["start/adapter_config.json"]
    assert len({*digests}) == 3
    with pytest.raises(ConfigError, match=r"lora\.start is not set"):
        make_run(llama, tmp_path, tmp_path, "fedit", {"start": None}, start=tmp_path / "adapter")


@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_an_adapter_that_belongs_to_another_base_is_refused(llama: Path, tmp_path: Path, begun: str) -> None:
    write_adapter(llama, tmp_path / "adapter", init_lora_weights=begun)
    with pytest.raises(ConfigError, match="PEFT changes the base when it loads it"):
        make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {"ranks": [3]})


def test_layers_of_a_higher_rank_have_room(llama: Path, tmp_path: Path) -> None:
    expected = write_adapter(llama, tmp_path / "adapter", rank_pattern={"q_proj": 6})
    run = make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {})
    language: Any = run.federation.companion
    with torch.no_grad(), language.use_parameters(find_server_model(run)) as model:
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


def write_mean_by_peft(base: Path, folders: Sequence[Path], mean: Path) -> Tensor:
    """Write the mean of adapters as PEFT computes it; its logits."""
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), folders[0], "0"
    )
    for i, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, str(i))
    names = [str(i) for i in range(len(folders))]
    model.add_weighted_adapter(names, [1 / len(names)] * len(names), "start", combination_type="cat")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)
        model.save_pretrained(mean, selected_adapters=["start"])
    model.set_adapter("start")
    logits: Tensor = model.eval()(input_ids=IDS).logits.detach()
    return logits


MEANS: dict[str, list[dict[str, Any]]] = {
    "ranks": [{"r": 2, "lora_alpha": 4}, {"r": 3, "lora_alpha": 4}],
    "three with other scales": [{"r": 2, "lora_alpha": 8}, {"use_rslora": True}, {"r": 1, "lora_alpha": 1}],
    "patterns": [
        {"rank_pattern": {"layers.1.self_attn.q_proj": 1}, "alpha_pattern": {"layers.0.self_attn.v_proj": 9}},
        {"r": 2},
    ],
}


@pytest.mark.parametrize("adapters", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("method", ["fedit", "fedhl", "flora", "standalone"])
def test_adapters_of_organizations_begin_at_the_mean_of_peft(
    method: str, adapters: list[dict[str, Any]], llama: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / f"organization{i}" for i in range(len(adapters))]
    for i, (folder, config) in enumerate(zip(folders, adapters, strict=True)):
        write_adapter(llama, folder, seed=i, **config)
    if adapters is MEANS["patterns"]:
        # PEFT's own mean takes one rank for all layers, so the mean is computed by hand
        expected = merged_logits(llama, folders)
    else:
        expected = write_mean_by_peft(llama, folders, tmp_path / "mean")
    run = make_run(llama, folders, tmp_path, method, {})
    server = find_server_model(run)
    params = run.personal_params(run.federation.infos[0]) if server is None else server
    torch.testing.assert_close(logits_of(run, params), expected, rtol=1e-4, atol=2e-5)
    run.step()


def merged_logits(base: Path, folders: Sequence[Path]) -> Tensor:
    """Logits of a base whose weights are the means of those of the merged models."""
    models = [
        peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), f
        ).merge_and_unload()
        for f in folders
    ]
    states = [m.state_dict() for m in models]
    mean = {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}
    models[0].load_state_dict(mean)
    logits: Tensor = models[0].eval()(input_ids=IDS).logits.detach()
    return logits


def test_adapters_of_other_layers_and_whole_modules_have_a_mean(llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, targets in enumerate((["q_proj", "embed_tokens"], ["k_proj", "q_proj"])):
        write_adapter(llama, folders[i], seed=i, target_modules=targets, modules_to_save=["lm_head"])
        stored = safetensors.torch.load_file(folders[i] / "adapter_model.safetensors")
        stored["base_model.model.lm_head.weight"] += i
        safetensors.torch.save_file(stored, folders[i] / "adapter_model.safetensors")
    run = make_run(llama, folders, tmp_path, "flexlora", {})
    actual = logits_of(run, find_server_model(run))
    torch.testing.assert_close(actual, merged_logits(llama, folders), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_the_mean_of_adapters_in_half_precision_is_not_rounded(
    dtypes: tuple[str, str], llama: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, (folder, dtype) in enumerate(zip(folders, dtypes, strict=True)):
        write_adapter(llama, folder, seed=i, modules_to_save=["lm_head"])
        file = folder / "adapter_model.safetensors"
        stored = {n: t.to(getattr(torch, dtype)) for n, t in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(stored, file)
    run = make_run(llama, folders, tmp_path, "flexlora", {})
    actual = logits_of(run, find_server_model(run))
    expected = merged_logits(llama, folders)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_mean_of_the_largest_rank_of_a_layer_is_not_truncated(llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(folders):
        write_adapter(llama, folder, seed=i, r=20, target_modules=["q_proj"])
    run = make_run(llama, folders, tmp_path, "fedit", {})
    torch.testing.assert_close(
        logits_of(run, find_server_model(run)), merged_logits(llama, folders), rtol=1e-4, atol=1e-4
    )
    assert not [n for n in run.federation.notes if "truncated" in n]


def test_a_mean_is_truncated_to_a_rank_that_is_set(llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(folders):
        write_adapter(llama, folder, seed=i)
    run = make_run(llama, folders, tmp_path, "fedit", {"r": 4, "lora_alpha": 4})
    lora = find_lora(next(iter(run.federation.architectures.values())).module, None)
    params: Any = run.personal_params(run.federation.infos[0])
    lost = total = 0.0
    for name, layer in lora.layers.items():
        short = name.removeprefix("base_model.model.")
        update = torch.zeros(layer.shape)
        for folder in folders:
            stored = safetensors.torch.load_file(folder / "adapter_model.safetensors")
            b, a = (stored[f"base_model.model.{short}.lora_{n}.weight"] for n in "BA")
            update += b @ a * (5 / 3) / 2
        u, s, v = torch.linalg.svd(update)
        best = u[:, :4] * s[:4] @ v[:4]
        torch.testing.assert_close(layer.read_pair(params).dense() * lora.scale, best, rtol=1e-4, atol=1e-5)
        lost, total = lost + float(s[4:].square().sum()), total + float(s.square().sum())
    (note,) = [n for n in run.federation.notes if "truncated" in n]
    assert f"rank 4, with a relative error of {(lost / total) ** 0.5:.1%}" in note


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = None.*\['lm_head'\].*no mean"),
        ({"lora_dropout": 0.5}, r"lora_dropout.*Set lora\.lora_dropout"),
    ],
)
def test_adapters_without_a_mean_are_refused(
    other: dict[str, Any], error: str, llama: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    write_adapter(llama, folders[0])
    write_adapter(llama, folders[1], **other)
    with pytest.raises(ConfigError, match=error):
        make_run(llama, folders, tmp_path, "fedit", {})
    if "lora_dropout" in other:
        make_run(llama, folders, tmp_path, "fedit", {"lora_dropout": 0.1})


def test_each_of_several_adapters_may_lie_elsewhere_on_a_machine(llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(folders):
        write_adapter(llama, folder, seed=i)
    names = [tmp_path / "there" / "one", tmp_path / "there" / "two"]
    language: Any = make_run(llama, names, tmp_path, "fedit", {}, start=folders).federation.companion
    swapped: Any = make_run(llama, names, tmp_path, "fedit", {}, start=folders[::-1]).federation.companion
    digests, swapped_digests = (
        [model.files[f"start/{i}/adapter_model.safetensors"] for i in range(2)]
        for model in (language, swapped)
    )
    assert digests[0] != digests[1]
    assert digests == swapped_digests[::-1]
    with pytest.raises(ConfigError, match=r"local\.start has 2 folders, and lora\.start names 1"):
        make_run(llama, names[0], tmp_path, "fedit", {}, start=folders)
    with pytest.raises(ConfigError, match=r"local\.start has 1 folders, and lora\.start names 2"):
        make_run(llama, names, tmp_path, "fedit", {}, start=folders[:1])


TOKENS = ["<|im_start|>", "<|im_end|>"]


def copy_tied(llama: Path, folder: Path) -> Path:
    """A base whose embedding and output layer are one tensor."""
    config = transformers.AutoConfig.from_pretrained(llama)
    config.tie_word_embeddings = True
    build_module(lambda: transformers.LlamaForCausalLM(config), Key((3,))).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def write_adapter_with_tokens(
    base: Path, folder: Path, token_layers: Any, pad_to_multiple_of: int | None = None
) -> tuple[Tensor, Tensor]:
    """An adapter by plain PEFT whose base was resized for tokens; ids of a text with these tokens, and PEFT's logits."""

    def resize(model: Any) -> Any:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # new rows are random in transformers
            model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=pad_to_multiple_of)
        return model

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    token_ids = tokenizer.convert_tokens_to_ids(TOKENS)
    layers = dict.fromkeys(token_layers, token_ids) if isinstance(token_layers, dict) else token_ids
    settings: dict[str, Any] = {"trainable_token_indices": layers} if token_layers else {}
    model = peft.get_peft_model(
        resize(transformers.AutoModelForCausalLM.from_pretrained(base)),
        peft.LoraConfig(
            task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], **settings
        ),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)
        model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(
        resize(transformers.AutoModelForCausalLM.from_pretrained(base)), folder
    )
    ids = torch.tensor([[1, token_ids[0], 9, 7, token_ids[1], 6]])
    with torch.no_grad():
        logits: Tensor = loaded.eval()(input_ids=ids).logits
    return ids, logits


@pytest.mark.parametrize(
    ("is_tied", "token_layers"),
    [
        (False, {"embed_tokens": [], "lm_head": []}),
        (False, ["embed_tokens"]),
        (False, []),
        (True, ["embed_tokens"]),
    ],
)
def test_an_adapter_whose_base_was_resized_for_tokens_is_a_start(
    is_tied: bool, token_layers: Any, llama: Path, tmp_path: Path
) -> None:
    base = copy_tied(llama, tmp_path / "tied") if is_tied else llama
    ids, expected = write_adapter_with_tokens(base, tmp_path / "adapter", token_layers)
    stored = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # PEFT stored the resized embedding
    assert any(
        "embed_tokens" in name and len(weight) == expected.shape[-1] for name, weight in stored.items()
    )
    run = make_run(base, tmp_path / "adapter", tmp_path, "fedit", {}, new_tokens=TOKENS)
    params = run.personal_params(run.federation.infos[0])
    torch.testing.assert_close(logits_of(run, params, ids), expected, rtol=0, atol=2e-5)


def test_a_resized_embedding_of_another_base_is_refused(llama: Path, tmp_path: Path) -> None:
    write_adapter_with_tokens(llama, tmp_path / "adapter", ["embed_tokens"])
    with pytest.raises(ConfigError, match=r"Set language\.new_tokens to"):
        make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {})
    write_adapter_with_tokens(llama, tmp_path / "untrained rows", [])
    with pytest.raises(
        ConfigError, match=r"\[310, .*, which is not that of this base.* set language\.new_tokens"
    ):
        make_run(llama, tmp_path / "untrained rows", tmp_path, "fedit", {})
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = next(n for n in tensors if n.endswith("embed_tokens.token_adapter.base_layer.weight"))
    tensors[name][5, 0] += 1e-3
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"embed_tokens\..*, which is not that of this base"):
        make_run(llama, tmp_path / "adapter", tmp_path, "fedit", {}, new_tokens=TOKENS)
    write_adapter_with_tokens(llama, tmp_path / "padded", ["embed_tokens"], pad_to_multiple_of=64)
    with pytest.raises(ConfigError, match=r"resize the embedding for it to the length of the tokenizer"):
        make_run(llama, tmp_path / "padded", tmp_path, "fedit", {}, new_tokens=TOKENS)


def test_rows_of_tied_layers_must_be_equal(llama: Path, tmp_path: Path) -> None:
    base = copy_tied(llama, tmp_path / "tied")
    write_adapter_with_tokens(base, tmp_path / "adapter", ["embed_tokens"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["base_model.model.lm_head.token_adapter.trainable_tokens_delta"] += 1
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"different rows of tokens for .*lm_head and the embedding"):
        make_run(base, tmp_path / "adapter", tmp_path, "fedit", {}, new_tokens=TOKENS)


def test_three_adapters_with_tokens_have_a_mean(llama: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        ids, expected = write_adapter_with_tokens(llama, folder, ["embed_tokens"])
    run = make_run(llama, folders, tmp_path, "fedit", {}, new_tokens=TOKENS)
    # the same adapter three times is its own mean; only the embedding's new rows have the values of the adapter
    torch.testing.assert_close(
        logits_of(run, find_server_model(run), ids)[..., :250], expected[..., :250], rtol=1e-4, atol=2e-5
    )


def test_classes_in_another_order_are_refused(bert: Path, tmp_path: Path) -> None:
    rows = [
        {"text": f"{['a fox', 'a dog'][i % 2]} {i % 5}", "label": ["fox", "dog"][i % 2]} for i in range(40)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")

    def make_classifier(lora: dict[str, Any]) -> Run:
        config = ExperimentConfig.parse(
            {
                "name": "classes",
                "method": "fedit",
                "data": {"source": "text_classes", "path": str(tmp_path / "c.jsonl"), "normalize": "none"},
                "partition": {"kind": "iid", "clients": 2},
                "language": {"path": str(bert), "task": "classification", "context": 32},
                "lora": lora,
                "run": {"rounds": 1},
            }
        )
        return Run(config.build_method("fedit"), config.federation(), config.run, ENGINES["sequential"]())

    first = make_classifier({"target_modules": ["query", "value"], "r": 2})
    assert any(n.startswith("The head (classifier) is new") for n in first.federation.notes)
    first.record_initial_models()
    first.federation.companion.write(first, tmp_path / "out")
    again = make_classifier({"start": str(tmp_path / "out" / "server")})
    assert not [n for n in again.federation.notes if "is new" in n]
    shutil.copytree(tmp_path / "out" / "server", tmp_path / "other")
    file = tmp_path / "other" / "fedlowrank.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"classes": stored["classes"][::-1]}))
    with pytest.raises(
        ConfigError, match=r"trained for the classes \['fox', 'dog'\].*this run has \['dog', 'fox'\]"
    ):
        make_classifier({"start": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match="do not have one order, so they have no mean"):
        make_classifier({"start": [str(tmp_path / "out" / "server"), str(tmp_path / "other")]})


def test_an_empty_list_of_adapters_is_refused(llama: Path, tmp_path: Path) -> None:
    tables: Any = {"language": {"path": str(llama)}, "lora": {"start": []}}
    with pytest.raises(ConfigError, match=r"start is an empty list"):
        ExperimentConfig.parse(
            {"name": "start", "method": "fedit", "data": {"source": "text", "path": "x"}, **tables}
        )
