"""Adapter folders and merged models: what another program that reads them computes is what the live model computes."""

import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fedlowrank.core.errors import DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.artifacts import merge_update, read_adapter, save_model, write_adapter
from fedlowrank.language.base import Base, load_base
from fedlowrank.language.peft_adapter import attach_adapter
from fedlowrank.language.peft_config import lora_config, scale_of
from fedlowrank.linalg.pair import Pair

from .test_peft_adapter import Mixed, X, by_hand, layers, parameters, random_factors, set_scale

KEY = Key((5,))
CLASSES = ("a", "b", "c")
IDS = torch.arange(3, 19).reshape(2, 8)
PLAIN = {"r": 4, "lora_alpha": 8}
STABLE = PLAIN | {"use_rslora": True}
MODELS = {
    "llama": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "value", "dense"],
}


def live(folder, fields, task="causal", targets=None):
    """A model with a slot, random factors of another rank than the slot's, their scale, and the scores they give."""
    loaded = load_base(Base(str(folder), task), CLASSES if task == "classification" else (), KEY)
    config = lora_config(fields | {"target_modules": targets})
    model = attach_adapter(loaded.model, config, KEY, "shared", loaded.head)
    factors = random_factors(layers(model), 3)
    scale = scale_of(config, 3) / 10
    set_scale(model, scale)
    with torch.inference_mode():
        out = functional_call(model, parameters(layers(model), factors), kwargs={"input_ids": IDS}).logits
        assert not torch.allclose(out, model(input_ids=IDS).logits, atol=1e-2)
    return loaded, model, factors, scale, out


def head_of(model):
    return {
        n.removeprefix("base_model.model."): t for n, t in model.state_dict().items() if ".classifier." in n
    }


def scores(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("fields", [PLAIN, STABLE], ids=["plain", "rslora"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_loads_what_the_live_model_computes(name, fields, request, tmp_path):
    folder = request.getfixturevalue(name)
    loaded, model, factors, scale, out = live(folder, fields, targets=MODELS[name])
    write_adapter(tmp_path, factors, scale, model.peft_config["default"], str(folder), loaded.digest)
    # the peft_config of the folder alone must do, so the base is loaded apart from this package
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    assert torch.allclose(scores(again), out, atol=1e-5)
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora, config.task_type) == (3, 3, False, "CAUSAL_LM")
    assert config.modules_to_save is None


@pytest.mark.parametrize("fields", [PLAIN, STABLE], ids=["plain", "rslora"])
def test_peft_loads_a_classifier_with_its_head(bert, fields, tmp_path):
    loaded, model, factors, scale, out = live(bert, fields, "classification", MODELS["bert"])
    write_adapter(
        tmp_path, factors, scale, model.peft_config["default"], str(bert), loaded.digest, head_of(model)
    )
    base = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    assert not torch.allclose(base.classifier.weight, model.base_model.model.classifier.weight)
    assert torch.allclose(scores(PeftModel.from_pretrained(base, tmp_path)), out, atol=1e-5)
    back = read_adapter(tmp_path, loaded.digest)
    assert {n: t.tolist() for n, t in back.head.items()} == {n: t.tolist() for n, t in head_of(model).items()}


def test_a_new_part_of_the_body_travels_with_the_head(bert, tmp_path):
    folder = tmp_path / "base"
    load_base(Base(str(bert), "classification"), CLASSES, KEY).model.bert.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in weights.items() if "pooler" not in n},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    loaded, model, factors, scale, out = live(folder, PLAIN, "classification", MODELS["bert"])
    where = tuple(f"base_model.model.{m}." for m in loaded.head)
    head = {n[len("base_model.model.") :]: t for n, t in model.state_dict().items() if n.startswith(where)}
    assert "bert.pooler.dense.weight" in head
    adapter = tmp_path / "adapter"
    write_adapter(adapter, factors, scale, model.peft_config["default"], str(folder), loaded.digest, head)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert torch.allclose(scores(PeftModel.from_pretrained(base, adapter)), out, atol=1e-5)


def test_a_frozen_head_of_the_files_needs_not_travel(bert, tmp_path):
    first = load_base(Base(str(bert), "classification"), CLASSES, KEY)
    first.model.save_pretrained(tmp_path / "base")
    first.tokenizer.save_pretrained(tmp_path / "base")
    loaded, model, factors, scale, out = live(tmp_path / "base", PLAIN, "classification", MODELS["bert"])
    config = model.peft_config["default"]
    write_adapter(tmp_path / "a", factors, scale, config, "base", loaded.digest)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert torch.allclose(scores(PeftModel.from_pretrained(base, tmp_path / "a")), out, atol=1e-5)


def test_the_files_are_those_that_peft_writes(llama, tmp_path):
    _, model, factors, scale, _ = live(llama, PLAIN, targets=["v_proj", "q_proj"])
    write_adapter(
        tmp_path / "ours",
        factors,
        scale,
        model.peft_config["default"],
        "./a/base",
        "d" * 32,
        client=7,
        round=2,
    )
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


def test_the_revision_is_kept_and_named_targets_too(llama, tmp_path):
    loaded = load_base(Base(str(llama)), (), KEY)
    config = lora_config({"r": 2, "target_modules": r".*\.v_proj", "revision": "v1.0"})
    model = attach_adapter(loaded.model, config, KEY)
    factors = random_factors(layers(model), 2)
    write_adapter(tmp_path, factors, 1.0, model.peft_config["default"], "x", "d")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["revision"], settings["target_modules"]) == ("v1.0", r".*\.v_proj")
    # as the user wrote it, before PEFT settled the layers
    for target in (None, "all-linear"):
        write_adapter(tmp_path, factors, 1.0, lora_config({"r": 2, "target_modules": target}), "x", "d")
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        assert settings["target_modules"] == [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]
    with pytest.raises(TaskError, match=r"do not match the layer model\.layers\.0\.self_attn\.v_proj"):
        write_adapter(tmp_path, factors, 1.0, lora_config({"target_modules": ["q_proj"]}), "x", "d")


def test_embeddings_and_convolutions_go_through_files(tmp_path):
    config = lora_config({"r": 2, "lora_alpha": 2, "target_modules": ["line", "seen", "image", "turned"]})
    model = attach_adapter(Mixed(), config, KEY)
    where = layers(model)
    factors = random_factors(where, 3)
    write_adapter(tmp_path, factors, 0.5, model.peft_config["default"], "mixed", "d", layers=where)
    expected = by_hand(factors, 0.5)(X)
    with warnings.catch_warnings():
        # PEFT warns wherever linear layers and Conv1D are adapted together
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        again = PeftModel.from_pretrained(Mixed(), tmp_path)
    assert torch.allclose(again(X), expected, rtol=1e-4, atol=1e-3)
    back = read_adapter(tmp_path)
    assert torch.allclose(merge_update(Mixed(), back.pairs, back.scale)(X), expected, rtol=1e-4, atol=1e-3)
    assert torch.allclose(merge_update(model, factors, 0.5)(X), expected, rtol=1e-4, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.floats(0.01, 100), st.integers(0, 99))
def test_ranks_are_made_equal_and_products_stay(tmp_path_factory, ranks, scale, seed):
    folder = tmp_path_factory.mktemp("a")
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        f"layer.{i}": Pair(torch.randn(6, r, generator=draw), torch.randn(r, 5, generator=draw))
        for i, r in enumerate(ranks)
    }
    config = lora_config({"r": 1, "target_modules": list(pairs), "use_rslora": bool(seed % 2)})
    write_adapter(folder, pairs, scale, config, "x", "d")
    back = read_adapter(folder)
    assert {p.rank for p in back.pairs.values()} == {max(1, *ranks)} == {back.config.r}
    for name, pair in pairs.items():
        assert torch.allclose(
            back.scale * back.pairs[name].dense(), scale * pair.dense(), rtol=1e-4, atol=1e-5
        )
    assert (back.scale, back.round, back.client, back.base_name) == (1, None, None, "x")


def test_adapters_for_another_base_are_noticed(llama, tmp_path):
    loaded, model, factors, scale, _ = live(llama, PLAIN, targets=["v_proj"])
    config = model.peft_config["default"]
    write_adapter(tmp_path, factors, scale, config, str(llama), loaded.digest, round=3, client=11)
    back = read_adapter(tmp_path, loaded.digest)
    assert (back.notes, back.round, back.client, back.digest) == ((), 3, 11, loaded.digest)
    with pytest.raises(DataError, match=f"adapters for another base.*{loaded.digest}.*{'0' * 32}"):
        read_adapter(tmp_path, "0" * 32)
    (tmp_path / "fedlowrank.json").unlink()
    assert "could not be compared" in read_adapter(tmp_path, loaded.digest).notes[0]


@pytest.mark.parametrize("stable", [False, True])
def test_a_folder_of_peft_itself_is_read_with_its_scale(llama, tmp_path, stable):
    base = AutoModelForCausalLM.from_pretrained(llama)
    config = LoraConfig(
        r=4, lora_alpha=6, use_rslora=stable, target_modules=["v_proj"], task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(base, config).eval()
    draw = torch.Generator().manual_seed(0)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=draw)
    theirs.save_pretrained(tmp_path)
    back = read_adapter(tmp_path, "0" * 32)
    assert back.digest is None
    assert back.scale == pytest.approx(3 if stable else 1.5)
    assert back.config.r == 4
    assert torch.allclose(
        scores(merge_update(load_base(Base(str(llama)), (), KEY).model, back.pairs, back.scale)),
        scores(theirs),
        atol=1e-5,
    )
    slot = attach_adapter(load_base(Base(str(llama)), (), KEY).model, back.config, KEY)
    assert [p.requires_grad for n, p in slot.named_parameters() if "lora_" in n] == [True] * 4


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_merged_folder_computes_what_the_live_model_does(name, request, tmp_path):
    folder = request.getfixturevalue(name)
    task = "classification" if name == "bert" else "causal"
    loaded, model, factors, scale, out = live(folder, PLAIN, task, MODELS[name])
    before = scores(model)
    # a head that was trained on
    head = {n: t + 0.5 for n, t in head_of(model).items()}
    if head:
        given = parameters(layers(model), factors) | {f"base_model.model.{n}": t for n, t in head.items()}
        with torch.inference_mode():
            out = functional_call(model, given, kwargs={"input_ids": IDS}).logits
    save_model(tmp_path, merge_update(model, factors, scale, head), loaded.tokenizer)
    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    assert torch.allclose(scores(kind.from_pretrained(tmp_path)), out, atol=1e-5)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("the fox").input_ids == loaded.tokenizer("the fox").input_ids
    )
    assert torch.equal(scores(model), before)
    plain = load_base(Base(str(folder), task), CLASSES if head else (), KEY).model
    dense = {n: scale * pair.dense() for n, pair in factors.items()}
    assert torch.allclose(scores(merge_update(plain, dense, 1.0, head)), out, atol=1e-5)


def test_a_delta_is_added_in_full_precision(llama):
    model = load_base(Base(str(llama), dtype="bfloat16"), (), KEY).model
    name = "model.layers.0.self_attn.v_proj"
    weight = model.get_submodule(name).weight.detach().clone()
    pair = Pair(torch.full((16, 1), 0.37), torch.full((1, 32), 0.41))
    made = merge_update(model, {name: pair}, 0.013).get_submodule(name).weight
    expected = (weight.double() + 0.013 * 0.37 * 0.41).to(torch.bfloat16)
    assert made.dtype == torch.bfloat16
    # where the exact sum lies halfway between two bfloat16 numbers, float32 may round to the other
    assert float((made != expected).double().mean()) < 0.01
    assert torch.equal(model.get_submodule(name).weight, weight)


def test_what_cannot_be_merged_is_said(llama):
    model = load_base(Base(str(llama)), (), KEY).model
    pair = Pair(torch.ones(16, 1), torch.ones(1, 32))
    name = "model.layers.0.self_attn.v_proj"
    with pytest.raises(TaskError, match="Did you mean"):
        merge_update(model, {"model.layers.0.self_attn.v_projj": pair})
    with pytest.raises(TaskError, match=r"\[16, 32\] does not fit .*q_proj, \[32, 32\]"):
        merge_update(model, {"model.layers.0.self_attn.q_proj": pair})
    with pytest.raises(TaskError, match=r"no tensor 'score\.weight'"):
        merge_update(model, {name: pair}, head={"score.weight": torch.ones(2, 2)})
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(TaskError, match="one tensor"):
        merge_update(model, {"lm_head": Pair(torch.ones(1, 1), torch.ones(1, 32))})
    packed = Mixed()
    packed.line.weight = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TaskError, match="without quantize"):
        merge_update(packed, {"line": Pair(torch.ones(7, 1), torch.ones(1, 5))})


def test_folders_that_are_no_adapters(tmp_path, llama):
    loaded, model, factors, scale, _ = live(llama, PLAIN, targets=["v_proj"])
    config = model.peft_config["default"]

    def fresh():
        return write_adapter(tmp_path, factors, scale, config, str(llama), loaded.digest)

    def changed(**fields):
        path = fresh() / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def stored(change):
        path = fresh() / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    with pytest.raises(DataError, match="cannot read"):
        read_adapter(tmp_path / "nothing")
    changed(use_dora=True)
    with pytest.raises(DataError, match="use_dora"):
        read_adapter(tmp_path)
    changed(r=5)
    with pytest.raises(DataError, match="has rank 3, but r is 5"):
        read_adapter(tmp_path)
    changed(a_setting_of_tomorrow=1)
    assert "a_setting_of_tomorrow" in read_adapter(tmp_path).notes[0]
    stored(lambda t: {n: v for n, v in t.items() if "1.self_attn.v_proj.lora_B" not in n})
    with pytest.raises(DataError, match="both factors"):
        read_adapter(tmp_path)
    stored(lambda t: t | {"base_model.model.lm_head.weight": torch.ones(2, 2)})
    with pytest.raises(DataError, match=r"replaces weights of the base.*lm_head"):
        read_adapter(tmp_path)
    stored(lambda t: {n.removeprefix("base_model.model."): v for n, v in t.items()})
    with pytest.raises(DataError, match="does not begin with"):
        read_adapter(tmp_path)
    stored(lambda t: t | {"base_model.model.lm_head.lora_magnitude_vector": torch.ones(2)})
    with pytest.raises(DataError, match="no factor of a plain LoRA"):
        read_adapter(tmp_path)
    (fresh() / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot read"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(DataError, match="pickled"):
        read_adapter(tmp_path)
    (fresh() / "adapter_config.json").write_text("[]")
    with pytest.raises(DataError, match="no JSON object"):
        read_adapter(tmp_path)


def test_pairs_that_are_no_factors_are_refused(tmp_path):
    config = lora_config({"r": 2, "target_modules": ["line"]})
    with pytest.raises(TaskError, match="at least one layer"):
        write_adapter(tmp_path, {}, 1.0, config, "x", "d")
    with pytest.raises(TaskError, match="no factors of one matrix"):
        write_adapter(tmp_path, {"line": Pair(torch.ones(4, 2), torch.ones(1, 4))}, 1.0, config, "x", "d")
    where = layers(attach_adapter(Mixed(), config, KEY))
    with pytest.raises(TaskError, match="no layer 'turned'"):
        write_adapter(
            tmp_path, random_factors({"turned": where["line"]}, 1), 1.0, config, "x", "d", layers=where
        )
