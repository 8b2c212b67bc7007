"""The LoRA slot: which settings are allowed, what is adapted, and that factors of any rank are computed with."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedlowrank.adapters.lora.lora_factors import find_lora
from fedlowrank.core.errors import ConfigError, LoweredRankWarning, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.base_model import LanguageBase, load_base
from fedlowrank.language.lora.peft_adapter import attach_adapter, sample_initial_factors
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

KEY = Key((3,))


def factors_of(model):
    own = dict(model.named_parameters())
    return {name: layer.read_pair(own) for name, layer in find_layers(model).items()}


@pytest.mark.parametrize("rank", [1, 4])
def test_factors_of_any_rank_are_the_update_of_each_kind_of_layer(rank):
    scale = 0.25
    model = attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY, ("classifier",))
    where = find_layers(model)
    assert {n: (w.shape, w.transposed, w.embedding) for n, w in where.items()} == {
        "seen": ((6, 11), True, True),
        "turned": ((5, 6), True, False),
        "line": ((7, 5), False, False),
        "image": ((4, 12), False, False),
    }
    set_scale(model, scale)
    factors = draw_factors(where, rank)
    given = convert_to_parameters(where, factors)
    out = functional_call(model, given, (INPUTS,))
    assert torch.allclose(out, build_with_updates(factors, scale)(INPUTS), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(out, MixedLayers()(INPUTS), atol=1e-1)
    # the module itself is as before
    assert torch.equal(model(INPUTS), MixedLayers()(INPUTS))


@pytest.mark.full
def test_what_a_new_slot_holds():
    bases = [(MixedLayers(), KEY), (MixedLayers(), KEY), (MixedLayers(), Key((4,)))]
    before = torch.random.get_rng_state()
    a, b, c = (attach_adapter(base, make_lora_config(EVERY_LAYER), key) for base, key in bases)
    assert torch.equal(before, torch.random.get_rng_state())
    first, again, other = factors_of(a), factors_of(b), factors_of(c)
    for name, pair in first.items():
        assert pair.rank == 2
        zero, random = ("a", "b") if find_layers(a)[name].embedding else ("b", "a")
        assert not getattr(pair, zero).any()
        assert torch.equal(getattr(pair, random), getattr(again[name], random))
        assert not torch.equal(getattr(pair, random), getattr(other[name], random))
    assert torch.equal(a(INPUTS), MixedLayers()(INPUTS))
    twins = dict.fromkeys(("line", "other"), find_layers(a)["line"])
    drawn = sample_initial_factors(twins, 2, KEY)
    assert torch.equal(drawn["line"].a, first["line"].a)
    assert not torch.equal(drawn["line"].a, drawn["other"].a)


def test_initial_factors_are_those_of_peft_in_distribution():
    model = attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY)
    where = {n: w for n, w in find_layers(model).items() if not w.embedding}
    for name, w in where.items():
        theirs = torch.empty(4000, w.shape[1])
        nn.init.kaiming_uniform_(theirs, a=math.sqrt(5), generator=torch.Generator().manual_seed(0))
        ours = torch.cat([sample_initial_factors({name: w}, 20, Key((i,)))[name].a for i in range(200)])
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=1e-3)
        assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.02)
    word = find_layers(model)["seen"]
    for how in (True, "gaussian"):
        pair = sample_initial_factors({"seen": word}, 500, KEY, how)["seen"]
        assert float(pair.b.std()) == pytest.approx(1, rel=0.05)
        assert not pair.a.any()
    gauss = sample_initial_factors({"line": where["line"]}, 50, KEY, "gaussian")["line"].a
    assert float(gauss.std()) == pytest.approx(1 / 50, rel=0.1)


@pytest.mark.full
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_a_lower_rank_is_the_first_rows_of_a_higher_one(low, more, seed):
    where = find_layers(attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY))
    few, many = (
        sample_initial_factors(where, low, Key((seed,))),
        sample_initial_factors(where, low + more, Key((seed,))),
    )
    for name in where:
        assert torch.equal(few[name].a, many[name].a[:low])
        assert torch.equal(few[name].b, many[name].b[:, :low])
        assert few[name].b.shape == (where[name].shape[0], low)


def test_dropout_acts_in_training_on_the_adapter_alone():
    model = attach_adapter(
        MixedLayers(), make_lora_config(EVERY_LAYER | {"lora_dropout": 0.9, "target_modules": ["line"]}), KEY
    )
    given = convert_to_parameters(find_layers(model), draw_factors(find_layers(model), 2))
    calm = functional_call(model, given, (INPUTS,))
    assert torch.equal(calm, functional_call(model, given, (INPUTS,)))
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        wild = functional_call(model, given, (INPUTS,))
    assert not torch.allclose(calm, wild, atol=1e-3)


def test_the_head_is_trained_whole_and_never_adapted(bert):
    loaded = load_base(LanguageBase(str(bert), "classification"), ("a", "b", "c"), KEY)
    linear = {
        n.removesuffix(".weight")
        for n, t in loaded.model.state_dict().items()
        if t.ndim == 2 and "embeddings" not in n and "classifier" not in n
    }
    config = make_lora_config({"r": 2, "target_modules": "all-linear"})
    model = attach_adapter(loaded.model, config, KEY, loaded.head)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert trained == {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
    assert set(find_layers(model)) == linear
    slot = model.peft_config["default"]
    assert (slot.task_type, slot.exclude_modules) == ("SEQ_CLS", None)
    assert not any(
        hasattr(m, "modules_to_save") and len(m.modules_to_save) for m in model.modules() if m is not model
    )


def test_a_part_of_the_body_that_is_trained_whole_gets_no_adapter(bert):
    loaded = load_base(LanguageBase(str(bert), "classification"), ("a", "b"), KEY)
    fields = {"r": 2, "target_modules": ["dense"], "exclude_modules": ["intermediate.dense"]}
    model = attach_adapter(loaded.model, make_lora_config(fields), KEY, ("classifier", "bert.pooler.dense"))
    assert sorted(n.rpartition("layer.")[2] for n in find_layers(model)) == [
        "0.attention.output.dense", "0.output.dense", "1.attention.output.dense", "1.output.dense"
    ]  # fmt: skip
    assert model.get_parameter("base_model.model.bert.pooler.dense.weight").requires_grad
    assert model.peft_config["default"].exclude_modules == {"intermediate.dense"}


def test_the_usual_target_modules_and_regular_expressions(llama):
    for target, count in ((None, 4), (r".*layers\.1\..*(q|v)_proj", 2), ("all-linear", 14)):
        model = attach_adapter(
            load_base(LanguageBase(str(llama)), (), KEY).model,
            make_lora_config({"r": 2, "target_modules": target}),
            KEY,
        )
        assert len(find_layers(model)) == count
    fields = {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [1]}
    model = attach_adapter(load_base(LanguageBase(str(llama)), (), KEY).model, make_lora_config(fields), KEY)
    assert list(find_layers(model)) == ["model.layers.1.self_attn.v_proj"]
    assert type(model).__name__ == "PeftModelForCausalLM"


def test_target_modules_that_match_nothing_list_what_there_is(bert):
    loaded = load_base(LanguageBase(str(bert), "classification"), ("a", "b"), KEY)
    # several of the names match nothing; a name that matches only the head is not to be adapted
    for target, words in (
        (["query", "q_proj"], "'q_proj'.*dense x 7, key x 2, .*query x 2, .*value x 2, word_embeddings x 1"),
        ("q_proj", "that is not excluded.*query x 2"),
        (["LayerNorm"], "LayerNorm"),
        (["classifier"], "not excluded"),
    ):
        with pytest.raises(TaskError, match=words):
            attach_adapter(loaded.model, make_lora_config({"target_modules": target}), KEY, loaded.head)
    with pytest.raises(TaskError, match="no usual target modules"):
        attach_adapter(MixedLayers(), make_lora_config({"r": 1}), KEY)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_rank_above_a_dimension_is_lowered_in_that_layer(rslora):
    # 6 × 11, 5 × 6, 7 × 5 and 4 × 12
    config = make_lora_config({**EVERY_LAYER, "r": 40, "lora_alpha": 3, "use_rslora": rslora})
    with pytest.warns(LoweredRankWarning, match=r"rank 40 .*4 in image \(4 × 12\)"):
        model = attach_adapter(MixedLayers(), config, KEY)
    ranks = {n.rpartition(".")[2]: pair.rank for n, pair in factors_of(model).items()}
    assert ranks == {"seen": 6, "turned": 5, "line": 5, "image": 4}
    # one scale, that of the largest rank, so that y = (W + s B A) x in every layer
    scale = 3 / math.sqrt(6) if rslora else 3 / 6
    assert find_lora(model, None).scale == scale
    factors = {
        n: Pair(*(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for t in (p.b, p.a)))
        for n, p in factors_of(model).items()
    }
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    out = functional_call(model, convert_to_parameters(find_layers(model), factors), (ids,))
    torch.testing.assert_close(out, build_with_updates(factors, scale)(ids), rtol=1e-4, atol=1e-4)
    assert model.peft_config["default"].r == 6
    assert not model.peft_config["default"].rank_pattern


def test_models_that_cannot_get_a_slot():
    with pytest.raises(TaskError, match="already"):
        attach_adapter(
            attach_adapter(MixedLayers(), make_lora_config(EVERY_LAYER), KEY),
            make_lora_config(EVERY_LAYER),
            KEY,
        )
    clash = MixedLayers()
    clash.default = nn.Linear(2, 2)
    with pytest.raises(TaskError, match="'default'"):
        attach_adapter(clash, make_lora_config(EVERY_LAYER), KEY)
    grouped = MixedLayers()
    grouped.image = nn.Conv2d(2, 4, 2, groups=2)
    with pytest.raises(TaskError, match="groups"):
        attach_adapter(grouped, make_lora_config(EVERY_LAYER), KEY)


@pytest.mark.full
def test_a_half_precision_base_has_factors_in_full_precision(llama):
    base = load_base(LanguageBase(str(llama), dtype="bfloat16"), (), KEY).model
    model = attach_adapter(base, make_lora_config({"r": 2, "target_modules": ["v_proj"]}), KEY)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    ids = torch.arange(5)[None]
    out = functional_call(
        model,
        convert_to_parameters(find_layers(model), draw_factors(find_layers(model), 3)),
        kwargs={"input_ids": ids},
    )
    assert out.logits.dtype == torch.bfloat16
    assert not torch.equal(out.logits, model(input_ids=ids).logits)


def test_what_changes_the_base_or_the_algebra_is_refused_by_name():
    kinds = ("pissa_niter_4", "loftq", "eva", "corda", "orthogonal", "mica", False, 1)
    for name, value in (
        *(("init_lora_weights", kind) for kind in kinds),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("layer_replication", [(0, 1), (0, 2)]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.gate"]),
        ("megatron_config", {"a": 1}),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("ensure_weight_tying", True),
        # an empty table switches a variant on
        ("kasa_config", {}),
        ("velora_config", {}),
        ("monteclora_config", {}),
        ("arrow_config", {}),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("inference_mode", True),
        ("qalora_group_size", 8),
    ):
        with pytest.raises(ConfigError, match=f"{name} = .* cannot be used in federated training"):
            make_lora_config({"r": 2, name: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alpha": 2}, "no setting 'alpha'"),
        ({"lora_alfa": 2}, "Did you mean 'lora_alpha'"),
        ({"r": 0}, r"^lora\.r must be a whole number of at least 1; it is 0$"),
        (
            {"r": 2.5},
            r"^lora\.r: input should be a valid integer, got a number with a fractional part; it is 2\.5$",
        ),
        ({"lora_alpha": 0}, "lora_alpha must"),
        ({"lora_alpha": "8"}, "lora_alpha must"),
        ({"lora_dropout": 1.0}, "lora_dropout must"),
        ({"task_type": "SEQUENCES"}, "SEQUENCES"),
        ({"target_modules": "a.*", "layers_to_transform": 1}, "layers_to_transform"),
        ({"peft_type": "IA3"}, "only LORA"),
    ],
)
def test_wrong_settings_are_said(fields, words):
    with pytest.raises(ConfigError, match=words):
        make_lora_config(fields)
