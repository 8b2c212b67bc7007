"""Loading of bases: what is new in them, what is said about it, and when two are the same."""

import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, check_positions, keep_in_float32, load_base
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.models.architecture import Architecture, build_module
from fedlowrank.models.coupling import find_coupling
from tests.language.conftest import TEXTS
from tests.language.text_experiments import make_causal_tables, run_rounds

KEY = Key((7,))
CLASSES = ("bad", "good", "neither")


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_tiny_llama_is_what_its_files_say(llama):
    loaded = load_base(LanguageBase(str(llama)), (), KEY)
    stored = load_file(llama / "model.safetensors")
    state = loaded.model.state_dict()
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert all(torch.equal(state[n], t) for n, t in stored.items())
    assert stored["model.layers.0.self_attn.v_proj.weight"].shape == (16, 32)
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training
    assert (loaded.head, loaded.notes, loaded.name) == ((), (), str(llama))


def test_the_attention_is_the_one_asked_for_and_computes_the_same(llama):
    made = {
        kind: load_base(LanguageBase(str(llama), attention=kind), (), KEY).model for kind in ("eager", "sdpa")
    }
    x = torch.randint(0, 40, (3, 11), generator=KEY.generator())
    assert {kind: m.config._attn_implementation for kind, m in made.items()} == {
        "eager": "eager",
        "sdpa": "sdpa",
    }
    torch.testing.assert_close(made["eager"](x).logits, made["sdpa"](x).logits)


def saved(folder, make):
    """A model of transformers, untrained, with the tokenizer of another folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    there = folder.parent / f"{folder.name}-{make.__name__}"
    build_module(lambda: make(size), KEY).save_pretrained(there)
    tokenizer.save_pretrained(there)
    return there


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}


def masked_bert(size):
    return transformers.BertForMaskedLM(transformers.BertConfig(**size, **SMALL))


def causal_bert(size):
    return transformers.BertLMHeadModel(transformers.BertConfig(**size, **SMALL, is_decoder=True))


def t5(size):
    small = {"d_model": 32, "d_ff": 40, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **small))


def test_a_causal_model_whose_tokens_see_later_ones_is_refused(bert):
    with pytest.raises(
        ConfigError, match=r"a token sees those that follow it.*language.task to 'classification'"
    ):
        load_base(LanguageBase(str(saved(bert, masked_bert))), (), KEY)
    # the same code with a causal mask is none of them
    assert load_base(LanguageBase(str(saved(bert, causal_bert))), (), KEY).model.config.is_decoder
    # and the encoder is one for its tasks
    assert load_base(LanguageBase(str(saved(bert, masked_bert)), "embedding"), (), KEY).head == ()


@pytest.mark.parametrize("task", ["causal", "classification", "token_classification", "embedding"])
def test_an_encoder_with_a_decoder_is_refused(bert, task):
    base = LanguageBase(str(saved(bert, t5)), task)
    with pytest.raises(ConfigError, match=r"is an encoder with a decoder \(t5\)"):
        load_base(base, CLASSES if base.has_head else (), KEY)


def test_the_digest_is_of_the_files_whatever_the_dtype_and_the_folder(llama, tmp_path):
    there = copied(llama, tmp_path)
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    files = {n: hashlib.blake2b((llama / n).read_bytes(), digest_size=16).hexdigest() for n in names}
    whole, half, moved = (
        load_base(LanguageBase(str(folder), dtype=dtype), (), KEY)
        for folder, dtype in ((llama, "float32"), (llama, "bfloat16"), (there, "auto"))
    )
    assert half.model.dtype == torch.bfloat16
    assert whole.files == half.files == moved.files == files
    assert whole.digest == hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
    stored = load_file(there / "model.safetensors")
    stored["model.norm.weight"][0] += 1
    save_file(stored, there / "model.safetensors", {"format": "pt"})
    other = load_base(LanguageBase(str(there)), (), KEY)
    assert {n for n in names if other.files[n] != files[n]} == {"model.safetensors"}
    assert other.digest != whole.digest


@pytest.mark.full
def test_a_new_head_comes_from_the_key_alone(bert):
    before = torch.random.get_rng_state()
    base = LanguageBase(str(bert), "classification")
    a, b, c = (load_base(base, CLASSES, key) for key in (KEY, KEY, Key((8,))))
    assert torch.equal(before, torch.random.get_rng_state())
    assert a.model.classifier.weight.shape == (3, 32)
    assert torch.equal(a.model.classifier.weight, b.model.classifier.weight)
    assert not torch.equal(a.model.classifier.weight, c.model.classifier.weight)
    assert a.digest == c.digest
    assert a.head == ("classifier",)
    assert a.model.config.id2label == dict(enumerate(CLASSES))
    assert "classifier) is new" in a.notes[0]


@pytest.mark.full
def test_a_decoder_classifies_by_its_last_token_that_is_no_padding(llama):
    loaded = load_base(LanguageBase(str(llama), "classification"), CLASSES, KEY)
    assert loaded.head == ("score",)
    tok = loaded.tokenizer
    with torch.inference_mode():
        alone = loaded.model(**tok(["a dog"], return_tensors="pt")).logits
        padded = loaded.model(**tok(["a dog", TEXTS[0]], return_tensors="pt", padding=True)).logits
    assert torch.allclose(alone[0], padded[0], atol=1e-5)


def test_the_head_of_the_files_is_kept_where_it_fits_and_replaced_where_not(bert, tmp_path):
    first = load_base(LanguageBase(str(bert), "classification"), CLASSES, KEY)
    first.model.save_pretrained(tmp_path)
    first.tokenizer.save_pretrained(tmp_path)
    base = LanguageBase(str(tmp_path), "classification")
    same = load_base(base, CLASSES, Key((9,)))
    assert torch.equal(same.model.classifier.weight, first.model.classifier.weight)
    assert "one of the files" in same.notes[0]
    assert same.digest != first.digest
    other = load_base(base, ("a", "b"), Key((9,)))
    assert other.model.classifier.weight.shape == (2, 32)
    assert "is new" in other.notes[0]
    # new weights are not of the files
    assert other.digest == same.digest


def test_a_part_of_the_body_that_the_files_lack_is_drawn_from_the_key_and_belongs_to_the_head(bert, tmp_path):
    folder = copied(bert, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in weights.items() if "pooler" not in n},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    base = LanguageBase(str(folder), "classification")
    a, b = load_base(base, CLASSES, KEY), load_base(base, CLASSES, Key((8,)))
    assert a.head == ("classifier", "bert.pooler.dense")
    assert any("bert.pooler.dense.weight" in note for note in a.notes)
    assert not torch.equal(a.model.bert.pooler.dense.weight, b.model.bert.pooler.dense.weight)
    assert a.digest == b.digest


def test_a_tokenizer_without_padding_is_said_and_mended(llama, tmp_path):
    folder = copied(llama, tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({n: v for n, v in settings.items() if n != "pad_token"}))
    loaded = load_base(LanguageBase(str(folder)), (), KEY)
    assert loaded.tokenizer.pad_token == "</s>"
    assert loaded.model.config.pad_token_id == 2
    assert "'</s>' pads" in loaded.notes[0]
    path.write_text(json.dumps({n: v for n, v in settings.items() if not n.endswith("_token")}))
    with pytest.raises(DataError, match="no token for padding"):
        load_base(LanguageBase(str(folder)), (), KEY)


def test_a_tokenizer_with_another_end_than_the_model_is_said(llama, tmp_path):
    folder = copied(llama, tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token": settings["bos_token"]}))
    (note,) = load_base(LanguageBase(str(folder)), (), KEY).notes
    assert "ends a text by '<s>' (1), but the model stops at '</s>' (2)" in note
    # one of several ends, as in models for conversations
    generation = folder / "generation_config.json"
    stored = json.loads(generation.read_text())
    generation.write_text(json.dumps(stored | {"eos_token_id": [2, 1]}))
    assert load_base(LanguageBase(str(folder)), (), KEY).notes == ()


def test_a_padding_token_beyond_the_embeddings_is_refused(llama, tmp_path):
    from transformers import AutoTokenizer

    folder = copied(llama, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.save_pretrained(folder)
    with pytest.raises(DataError, match=r"<new>.*embeddings"):
        load_base(LanguageBase(str(folder)), (), KEY)


def test_checkpointing_changes_no_gradient_within_a_functional_call_or_after_it(llama):
    """The pass that is repeated must see the parameters that were given, not those that the module holds by then."""
    gradients = []
    for checkpointing in (False, True):
        model = load_base(
            LanguageBase(str(llama), gradient_checkpointing=checkpointing), (), KEY
        ).model.train()
        name = "model.layers.0.mlp.gate_proj.weight"
        leaf = dict(model.named_parameters())[name].detach().clone().mul_(1.5).requires_grad_()
        calls = []

        class Graded(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, ids, leaf):
                loss = self.inner(input_ids=ids, labels=ids).loss
                return torch.autograd.grad(loss, leaf)[0]

        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        ids = torch.arange(3, 15).reshape(2, 6)
        gradients.append(torch.func.functional_call(Graded(model), {f"inner.{name}": leaf}, (ids, leaf)))
        assert len(calls) == 1 + checkpointing
    assert float(gradients[0].abs().max()) > 1e-4
    assert torch.allclose(*gradients, atol=1e-7)
    model.get_parameter(name).requires_grad_()
    loss = torch.func.functional_call(model, {name: leaf}, kwargs={"input_ids": ids, "labels": ids}).loss
    assert torch.allclose(torch.autograd.grad(loss, leaf)[0], gradients[0], atol=1e-7)
    assert len(calls) == 4


def test_settings_that_cannot_be():
    for fields, classes, error, words in (
        ({"path": "./nowhere"}, (), DataError, "does not exist"),
        ({"path": "runs/a/base", "offline": True}, (), DataError, "there is no folder '/.*/runs/a/base'"),
        ({"path": "no-such/model", "offline": True}, (), DataError, "no-such/model"),
        ({"task": "classification"}, (), ConfigError, "names of its classes"),
        ({}, ("a",), ConfigError, "set task = 'classification'"),
        ({"task": "clasification"}, (), ConfigError, "Did you mean 'classification'"),
        ({"quantize": "2bit"}, (), ConfigError, "quantize"),
    ):
        with pytest.raises(error, match=words):
            load_base(LanguageBase(**({"path": "x"} | fields)), classes, KEY)


def test_folders_that_hold_no_such_model(llama, bert, tmp_path):
    with pytest.raises(DataError, match=r"no config\.json"):
        load_base(LanguageBase(str(tmp_path)), (), KEY)
    with pytest.raises(DataError, match="another kind of model"):
        load_base(LanguageBase(str(bert)), (), KEY)
    folder = copied(llama, tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="transformers cannot load a causal model"):
        load_base(LanguageBase(str(folder)), (), KEY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with pytest.raises(DataError, match="unheard-of"):
        load_base(LanguageBase(str(folder)), (), KEY)


def test_quantizing_without_its_library_names_the_extra(llama, monkeypatch):
    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else usual(name, *a)
    )
    with pytest.raises(ConfigError, match=r"fedlowrank\[quantize\]"):
        load_base(LanguageBase(str(llama), quantize="4bit"), (), KEY)


def test_a_missing_library_names_the_extra(monkeypatch, llama):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"fedlowrank\[language\]"):
        load_base(LanguageBase(str(llama)), (), KEY)


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_a_tiny_model_is_a_function_of_its_key_and_texts(tmp_path, task):
    before = torch.random.get_rng_state()
    a, b, c = (build_tiny_model(tmp_path / str(i), task, Key((k,)), TEXTS) for i, k in enumerate((0, 0, 1)))
    assert torch.equal(before, torch.random.get_rng_state())
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (a / file).read_bytes() == (b / file).read_bytes()
    assert (a / "model.safetensors").read_bytes() != (c / "model.safetensors").read_bytes()
    assert (a / "model.safetensors").stat().st_size < 300_000


def test_the_tiny_tokenizer_writes_any_text(llama, tmp_path):
    tok = load_base(LanguageBase(str(llama)), (), KEY).tokenizer
    with pytest.raises(DataError, match="at least one text"):
        build_tiny_model(tmp_path, "causal", Key((0,)), [])
    for text in ("the quick fox", "  two spaces", "Ünïcode 日本 🙂\n\ttab", ""):
        ids = tok(text).input_ids
        assert ids[0] == tok.bos_token_id
        assert tok.decode(ids, skip_special_tokens=True) == text
        assert max(ids) < 384
    assert len(tok("the quick brown fox").input_ids) < len("the quick brown fox") / 2


def test_texts_that_the_model_has_no_room_for_are_refused(gpt2: Path, llama: Path, tmp_path: Path) -> None:
    tables: Any = make_causal_tables(gpt2, tmp_path, method="fedit")
    tables["lora"] = {"ranks": [2], "target_modules": ["c_attn"]}
    tables["language"]["context"] = 65
    with pytest.raises(ConfigError, match=r"65 tokens here, .* 64 positions\. Set context to 64"):
        ExperimentConfig.parse(tables).federation()
    shutil.copytree(llama, tmp_path / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match="the model does not know"):
        ExperimentConfig.parse(make_causal_tables(tmp_path / "base", tmp_path, method="fedit")).federation()


def test_modules_in_float32_keep_the_dtype_of_the_base_for_all_that_they_take_and_give() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Any, *, parts: Any, cache: Any) -> Any:
            cache.append(x)
            sums = (x @ self.weight, [parts[0][0] @ self.weight])
            return BaseModelOutput(x @ self.weight, hidden_states=({"sums": sums, "counts": parts[1]}, cache))

    class Cache(list):  # type: ignore[type-arg]
        def __init__(self, first: object, size: int) -> None:
            super().__init__([first] * size)

    class Base(torch.nn.Module):
        dtype = torch.bfloat16

        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

    base, cache = Base().to(torch.bfloat16), Cache(None, 2)
    weight = base.layer.weight.float()
    keep_in_float32(base, ["layer"])
    x, y, counts = torch.randn(3, 5).bfloat16(), torch.randn(2, 5).bfloat16(), torch.arange(2)
    given = base.layer(x, parts=({0: y}, counts), cache=cache)
    table, same_cache = given.hidden_states
    (a, (b,)), same_counts = table["sums"], table["counts"]
    for result, value in ((given.last_hidden_state, x), (a, x), (b, y)):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, (value.float() @ weight).bfloat16())
    assert torch.equal(same_counts, counts)
    # an object that is changed in place stays the same one
    assert same_cache is cache
    assert cache[2].dtype == torch.float32


@pytest.mark.parametrize(
    "settings", [{"autocast": "float16"}, {"dtype": "float16"}, {"autocast": "bfloat16"}]
)
def test_a_note_says_that_float16_loses_small_gradients(
    settings: dict[str, str], llama: Path, tmp_path: Path
) -> None:
    tables = make_causal_tables(llama, tmp_path, method="fedit", lora={"ranks": [2]}, language=settings)
    federation = ExperimentConfig.parse(tables).federation()
    has_note = any("the loss is not scaled" in note for note in federation.notes)
    assert has_note == ("float16" in settings.values())


def test_a_causal_model_has_no_head_and_the_error_says_what_to_choose(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"language.task = 'causal' has no head.*fedit") as refusal:
        run_rounds(make_causal_tables(llama, tmp_path, method="fedrep"), 0)
    # a setting that an experiment of a language model does not have
    assert "head_name" not in str(refusal.value)


SMALL_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
POSITIONS = {
    "OpenAIGPTLMHeadModel": lambda: transformers.OpenAIGPTConfig(vocab_size=40, **SMALL_GPT),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(vocab_size=40, **SMALL_GPT),
    "GPTJForCausalLM": lambda: transformers.GPTJConfig(vocab_size=40, rotary_dim=4, **SMALL_GPT),
    "CodeGenForCausalLM": lambda: transformers.CodeGenConfig(vocab_size=40, rotary_dim=4, **SMALL_GPT),
    "CTRLLMHeadModel": lambda: transformers.CTRLConfig(vocab_size=40, dff=32, **SMALL_GPT),
    "MptForCausalLM": lambda: transformers.MptConfig(
        vocab_size=40, d_model=32, n_layers=1, n_heads=4, max_seq_len=16
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_texts_that_are_longer_than_the_table_of_positions_are_refused(name):
    model = build_module(lambda: getattr(transformers, name)(POSITIONS[name]()), KEY).eval()
    # the truth: one more token than there are positions fails
    model(input_ids=torch.ones(1, 16, dtype=torch.long))
    with pytest.raises((RuntimeError, IndexError)):
        model(input_ids=torch.ones(1, 17, dtype=torch.long))
    check_positions(model, 16)
    with pytest.raises(ConfigError, match="may have 17 tokens here, but the model has 16 positions"):
        check_positions(model, 17)


def test_rotary_positions_have_no_limit(llama):
    check_positions(load_base(LanguageBase(str(llama)), (), KEY).model, 10**6)


def test_a_loss_that_balances_experts_is_named(llama):
    def mixtral(size):
        config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_key_value_heads=4, **size)
        return transformers.MixtralForCausalLM(config)

    base = saved(llama, mixtral)
    assert load_base(LanguageBase(str(base)), (), KEY).notes == ()
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"output_router_logits": True}))
    (note,) = load_base(LanguageBase(str(base)), (), KEY).notes
    assert "output_router_logits" in note
    assert "no part of the loss" in note


def test_rotary_positions_of_the_longest_text_keep_clients_apart():
    size = {"vocab_size": 40, "num_key_value_heads": 4, "max_position_embeddings": 8}
    for rope, reason in (
        ({}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "'dynamic'"),
    ):
        config = transformers.LlamaConfig(**SMALL, **size, **({"rope_parameters": rope} if rope else {}))
        module = build_module(lambda config=config: transformers.LlamaForCausalLM(config), KEY)
        model = Architecture("llama", module, {"input_ids": torch.ones(1, 4, dtype=torch.long)})
        model.declare_repeatable()
        assert (reason is None) == (model.beyond_stacking is None)
        assert reason is None or reason in model.beyond_stacking
        assert (reason is None) == (find_coupling(model) is None)
