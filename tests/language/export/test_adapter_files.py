"""Adapter folders and merged models: what another program that reads them computes is what the live model computes."""

import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.export.adapter_files import merge_update, save_model, write_adapter
from fedlowrank.language.lora.peft_adapter import attach_adapter
from fedlowrank.language.lora.peft_config import make_lora_config
from fedlowrank.linalg.pair import Pair
from tests.language.mixed_layers import (
    EVERY_LAYER,
    INPUTS,
    MixedLayers,
    build_with_updates,
    convert_to_parameters,
    draw_factors,
    find_layers,
    set_scale,
)

KEY = Key((5,))
CLASSES = ("a", "b", "c")
IDS = torch.arange(3, 19).reshape(2, 8)
MODELS = {
    "llama": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "value", "dense"],
}


def live(folder, stable=False, task="causal", targets=None):
    """A model with a slot, random factors of another rank than the slot's, their scale, and the scores they give."""
    loaded = load_base(LanguageBase(str(folder), task), CLASSES if task == "classification" else (), KEY)
    config = make_lora_config({"r": 4, "lora_alpha": 8, "use_rslora": stable, "target_modules": targets})
    model = attach_adapter(loaded.model, config, KEY, loaded.head)
    factors, scale = draw_factors(find_layers(model), 3), 0.2
    set_scale(model, scale)
    with torch.inference_mode():
        out = functional_call(
            model, convert_to_parameters(find_layers(model), factors), kwargs={"input_ids": IDS}
        ).logits
        assert not torch.allclose(out, model(input_ids=IDS).logits, atol=1e-2)
    return loaded, model, factors, scale, out


def write(folder, model, factors, scale, base_name="x", digest="d", **more):
    return write_adapter(
        folder, factors, scale, model.peft_config["default"], find_layers(model), base_name, digest, **more
    )


def head_of(model):
    return {
        n.removeprefix("base_model.model."): t for n, t in model.state_dict().items() if ".classifier." in n
    }


def scores(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.full
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_loads_what_the_live_model_computes(name, stable, request, tmp_path):
    folder = request.getfixturevalue(name)
    _, model, factors, scale, out = live(folder, stable, targets=MODELS[name])
    write(tmp_path, model, factors, scale)
    # the peft_config of the folder alone must do, so the base is loaded apart from this package
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    assert torch.allclose(scores(again), out, atol=1e-5)
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora, config.task_type) == (3, 3, False, "CAUSAL_LM")
    assert config.modules_to_save is None


@pytest.mark.full
def test_peft_loads_a_classifier_with_its_head(bert, tmp_path):
    _, model, factors, scale, out = live(bert, task="classification", targets=MODELS["bert"])
    write(tmp_path, model, factors, scale, head=head_of(model))
    base = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    assert not torch.allclose(base.classifier.weight, model.base_model.model.classifier.weight)
    assert torch.allclose(scores(PeftModel.from_pretrained(base, tmp_path)), out, atol=1e-5)


@pytest.mark.full
def test_a_new_part_of_the_body_travels_with_the_head(bert, tmp_path):
    folder = tmp_path / "base"
    load_base(LanguageBase(str(bert), "classification"), CLASSES, KEY).model.bert.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in weights.items() if "pooler" not in n},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    loaded, model, factors, scale, out = live(folder, task="classification", targets=MODELS["bert"])
    where = tuple(f"base_model.model.{m}." for m in loaded.head)
    head = {n[len("base_model.model.") :]: t for n, t in model.state_dict().items() if n.startswith(where)}
    assert "bert.pooler.dense.weight" in head
    adapter = write(tmp_path / "adapter", model, factors, scale, head=head)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert torch.allclose(scores(PeftModel.from_pretrained(base, adapter)), out, atol=1e-5)


@pytest.mark.full
def test_a_frozen_head_of_the_files_needs_not_travel(bert, tmp_path):
    first = load_base(LanguageBase(str(bert), "classification"), CLASSES, KEY)
    first.model.save_pretrained(tmp_path / "base")
    first.tokenizer.save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    _, model, factors, scale, out = live(base, task="classification", targets=MODELS["bert"])
    write(tmp_path / "a", model, factors, scale)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert torch.allclose(scores(PeftModel.from_pretrained(base, tmp_path / "a")), out, atol=1e-5)


@pytest.mark.full
def test_the_files_are_those_that_peft_writes(llama, tmp_path):
    _, model, factors, scale, _ = live(llama, targets=["v_proj", "q_proj"])
    write(tmp_path / "ours", model, factors, scale, "./a/base", "d" * 32, client_id=7, round=2)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (
        json.loads((tmp_path / w / "adapter_config.json").read_text()) for w in ("ours", "theirs")
    )
    differ = {n for n in theirs | ours if theirs.get(n) != ours.get(n)}
    assert differ <= {"r", "lora_alpha", "base_model_name_or_path", "target_modules"}
    assert (ours["r"], ours["lora_alpha"], ours["base_model_name_or_path"]) == (3, 3, "./a/base")
    assert ours["target_modules"] == ["q_proj", "v_proj"] == sorted(theirs["target_modules"])
    assert ours["inference_mode"] is True
    names = []
    for where in ("ours", "theirs"):
        with safe_open(tmp_path / where / "adapter_model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
            assert file.metadata() == {"format": "pt"}
    assert names[0] == names[1]
    assert json.loads((tmp_path / "ours" / "fedlowrank.json").read_text()) == {
        "format": 1, "digest": "d" * 32, "round": 2, "client": 7, "rank": 3, "scale": scale
    }  # fmt: skip
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "fedlowrank.json"
    }  # fmt: skip


@pytest.mark.full
def test_the_revision_is_kept_and_a_regular_expression_too(llama, tmp_path):
    loaded = load_base(LanguageBase(str(llama)), (), KEY)
    config = make_lora_config({"r": 2, "target_modules": r".*\.v_proj", "revision": "v1.0"})
    model = attach_adapter(loaded.model, config, KEY)
    write(tmp_path, model, draw_factors(find_layers(model), 2), 1.0)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["revision"], settings["target_modules"]) == ("v1.0", r".*\.v_proj")


def test_embeddings_and_convolutions_go_through_files(tmp_path):
    model = attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY)
    where = find_layers(model)
    factors = draw_factors(where, 3)
    write(tmp_path, model, factors, 0.5)
    expected = build_with_updates(factors, 0.5)(INPUTS)
    with warnings.catch_warnings():
        # PEFT warns wherever linear layers and Conv1D are adapted together
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        again = PeftModel.from_pretrained(MixedLayers(), tmp_path)
    assert torch.allclose(again(INPUTS), expected, rtol=1e-4, atol=1e-3)
    merged = merge_update(model, where, {n: Pair(p.b * 0.5, p.a) for n, p in factors.items()})
    assert torch.allclose(merged(INPUTS), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.full
@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.floats(0.01, 100), st.booleans())
def test_ranks_are_made_equal_and_products_stay(tmp_path_factory, ranks, scale, stable):
    folder, names = tmp_path_factory.mktemp("a"), ("line", "image")
    model = attach_adapter(
        MixedLayers(), make_lora_config({"r": 1, "target_modules": names, "use_rslora": stable}), KEY
    )
    pairs = {n: draw_factors(find_layers(model), r)[n] for n, r in zip(names, ranks, strict=True)}
    write(folder, model, pairs, scale)
    stored = load_file(folder / "adapter_model.safetensors")
    for name, pair in pairs.items():
        a, b = (stored[f"base_model.model.{name}.lora_{factor}.weight"].flatten(1) for factor in "AB")
        assert a.shape[0] == b.shape[1] == max(1, *ranks)
        assert torch.allclose(b @ a, scale * pair.dense(), rtol=1e-4, atol=1e-5)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (max(1, *ranks),) * 2 + (False,)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_merged_folder_computes_what_the_live_model_does(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    task = "classification" if name == "bert" else "causal"
    loaded, model, factors, scale, out = live(folder, task=task, targets=MODELS[name])
    before = scores(model)
    # a head that was trained on
    head = {n: t + 0.5 for n, t in head_of(model).items()}
    if head:
        given = convert_to_parameters(find_layers(model), factors) | {
            f"base_model.model.{n}": t for n, t in head.items()
        }
        with torch.inference_mode():
            out = functional_call(model, given, kwargs={"input_ids": IDS}).logits
    where, dense = find_layers(model), {n: scale * pair.dense() for n, pair in factors.items()}
    save_model(tmp_path, merge_update(model, where, dense, head), loaded.tokenizer)
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    assert torch.allclose(scores(kind.from_pretrained(tmp_path)), out, atol=1e-5)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("the fox").input_ids == loaded.tokenizer("the fox").input_ids
    )
    assert torch.equal(scores(model), before)
    scaled = {n: Pair(scale * pair.b, pair.a) for n, pair in factors.items()}
    assert torch.allclose(scores(merge_update(model, where, scaled, head)), out, atol=1e-5)


@pytest.mark.full
def test_a_delta_is_added_in_full_precision(llama):
    base = load_base(LanguageBase(str(llama), dtype="bfloat16"), (), KEY).model
    name = "model.layers.0.self_attn.v_proj"
    weight = base.get_submodule(name).weight.detach().clone()
    model = attach_adapter(base, make_lora_config({"r": 1, "target_modules": ["v_proj"]}), KEY)
    pair = Pair(torch.full((16, 1), 0.013 * 0.37), torch.full((1, 32), 0.41))
    made = merge_update(model, find_layers(model), {name: pair}).get_submodule(name).weight
    expected = (weight.double() + 0.013 * 0.37 * 0.41).to(torch.bfloat16)
    assert made.dtype == torch.bfloat16
    # where the exact sum lies halfway between two bfloat16 numbers, float32 may round to the other
    assert float((made != expected).double().mean()) < 0.01
    assert torch.equal(model.get_submodule(f"base_model.model.{name}.base_layer").weight, weight)


@pytest.mark.parametrize(
    "targets", [["lm_head"], ["embed_tokens", "q_proj"], ["lm_head", "embed_tokens"], ["q_proj"]]
)
def test_an_update_of_one_of_two_tied_layers_moves_that_layer_alone(llama, tmp_path, targets):
    base = load_base(LanguageBase(str(llama)), (), KEY).model
    base.config.tie_word_embeddings = True
    base.tie_weights()
    ids = torch.tensor([[1, 5, 9, 7, 4, 6]])
    with warnings.catch_warnings():
        # PEFT warns of tied layers, too
        warnings.simplefilter("ignore", UserWarning)
        model = attach_adapter(
            base, make_lora_config({"r": 1, "lora_alpha": 1, "target_modules": targets}), KEY
        )
    factors = draw_factors(find_layers(model), 1)
    merged = merge_update(model, find_layers(model), factors)
    save_model(tmp_path / "merged", merged, AutoTokenizer.from_pretrained(llama))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = functional_call(model, convert_to_parameters(find_layers(model), factors), (ids,)).logits
        assert torch.allclose(loaded.eval()(ids).logits, expected, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(model(ids).logits, expected, rtol=1e-3, atol=0.01)
    assert loaded.config.tie_word_embeddings is (targets == ["q_proj"])
    # the live model is as before
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_cannot_be_merged_is_said():
    tied = MixedLayers()
    tied.other = torch.nn.Linear(5, 7)
    tied.other.weight = tied.line.weight
    tied = attach_adapter(tied, make_lora_config({"r": 1, "target_modules": ["line"]}), KEY)
    with pytest.raises(TaskError, match="one tensor"):
        merge_update(tied, find_layers(tied), draw_factors(find_layers(tied), 1))
    packed = attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY)
    where = find_layers(packed)
    packed.base_model.model.line.base_layer.weight = torch.nn.Parameter(
        torch.zeros(7, 5, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(TaskError, match="without quantize"):
        merge_update(packed, where, {"line": draw_factors(where, 1)["line"]})
