"""Generation takes the likeliest tokens or samples from their distribution, and leaves model and tokenizer unchanged."""

import numpy as np
import pytest
import torch

from fedlowrank.core.errors import ConfigError, DataError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.language.scores.text_generation import Decoding, complete_prompts, truncate_at_stop
from tests.language.scores.score_models import byte_tokenizer, gpt2, greedy, llama, space_tokenizer

PROMPTS = ["the", "def add(a, b):\n", "quick brown", "Question: what is 1", "x"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return llama(len(tokenizer))


def expected(model, tokenizer, prompts, count):
    return [tokenizer.decode(greedy(model, tokenizer(p)["input_ids"], count)) for p in prompts]


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_greedy_is_the_likeliest_token_one_by_one_in_batches_of_any_size(tokenizer, make, batch_size):
    model = make(len(tokenizer))
    texts = complete_prompts(model, tokenizer, PROMPTS, Decoding(15, batch_size=batch_size))
    assert texts == expected(model, tokenizer, PROMPTS, 15)
    assert len(set(texts)) == len(texts)


@pytest.mark.full
def test_settings_saved_with_the_model_change_nothing_and_stay(tokenizer):
    from transformers import GenerationConfig

    model = llama(len(tokenizer))
    plain = expected(model, tokenizer, PROMPTS, 10)
    saved = GenerationConfig(
        do_sample=True, num_beams=3, repetition_penalty=3.0, min_new_tokens=4, no_repeat_ngram_size=1
    )
    model.generation_config = saved
    assert complete_prompts(model, tokenizer, PROMPTS, Decoding(10)) == plain
    assert model.generation_config is saved
    assert saved.num_beams == 3


@pytest.mark.full
def test_an_adapter_of_peft_is_used_and_its_base_left_as_it_was(tokenizer):
    import peft

    base = llama(len(tokenizer))
    plain = expected(base, tokenizer, PROMPTS, 8)
    saved = base.generation_config
    saved.repetition_penalty = 4.0
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    assert complete_prompts(model, tokenizer, PROMPTS, Decoding(8)) == plain
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.linspace(-3, 3, p.numel()).reshape(p.shape))
    adapted = complete_prompts(model, tokenizer, PROMPTS, Decoding(8))
    assert adapted == expected(model, tokenizer, PROMPTS, 8)
    assert adapted != plain
    assert base.generation_config is saved


@pytest.mark.full
@pytest.mark.parametrize("where", ["model", "models", "tokenizer", "stop", "added"])
def test_a_text_ends_before_the_end_token(where):
    tokenizer = (
        byte_tokenizer(eos_token="<end>")
        if where == "tokenizer"
        else byte_tokenizer()
        if where == "added"
        else byte_tokenizer(additional="<end>")
    )
    if where == "added":
        # as language.new_tokens does: all_special_tokens lacks it
        tokenizer.add_tokens(["<end>"], special_tokens=True)
        assert "<end>" not in tokenizer.all_special_tokens
    end = tokenizer.convert_tokens_to_ids("<end>")
    model = llama(len(tokenizer))
    ids = greedy(model, tokenizer("the")["input_ids"], 12)
    assert end not in ids
    # the model writes the end token where it used to write another one
    at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    if where in ("model", "models"):
        model.generation_config.eos_token_id = ids[at] if where == "model" else [end, ids[at]]
        decoding = Decoding(12)
    else:
        with torch.no_grad():
            head = model.lm_head.weight
            head[[end, ids[at]]] = head[[ids[at], end]]
        decoding = Decoding(12, stop=("<end>",) if where in ("stop", "added") else ())
        if where == "stop":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert complete_prompts(model, tokenizer, ["the", "quick"], decoding)[0] == tokenizer.decode(ids[:at])


@pytest.mark.full
def test_texts_are_cut_at_stop_strings_and_generation_ends_there(model, tokenizer):
    whole = expected(model, tokenizer, PROMPTS[:2], 40)
    stop = tuple(text[len(text) // 3 :][:3] for text in whole)
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    texts = complete_prompts(model, tokenizer, PROMPTS[:2], Decoding(40, stop=stop))
    hook.remove()
    assert texts == [min((text.split(s)[0] for s in stop), key=len) for text in whole]
    assert all(len(text) < len(long) for text, long in zip(texts, whole, strict=True))
    assert len(calls) < 35


def test_cut_takes_the_first_place_of_any_string():
    assert truncate_at_stop("abcabd", ["bd", "ca"]) == "ab"
    assert truncate_at_stop("abc", ["x"]) == "abc"
    assert truncate_at_stop("abc", []) == "abc"


@pytest.mark.full
def test_modes_and_tokenizer_are_as_before(tokenizer):
    model = llama(len(tokenizer), attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    tokenizer.padding_side = "right"
    texts = complete_prompts(model, tokenizer, PROMPTS, Decoding(6))
    assert texts == expected(model.eval(), tokenizer, PROMPTS, 6)
    model.train()
    model.model.layers[0].eval()
    with pytest.raises(DataError):
        complete_prompts(model, tokenizer, ["the"], Decoding(300))
    complete_prompts(model, tokenizer, PROMPTS, Decoding(2))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", None)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.full
def test_sampling_draws_from_the_key_alone(tokenizer):
    model = llama(len(tokenizer), initializer_range=0.1)
    decoding = Decoding(12, "sample", batch_size=2, key=Key((3, "eval")))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = complete_prompts(model, tokenizer, PROMPTS, decoding)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert complete_prompts(model, tokenizer, PROMPTS, decoding) == first
    other = Decoding(12, "sample", batch_size=2, key=Key((4, "eval")))
    assert complete_prompts(model, tokenizer, PROMPTS, other) != first
    # each batch has draws of its own
    twice = complete_prompts(model, tokenizer, ["the"] * 4, decoding)
    assert twice[:2] != twice[2:]


@pytest.mark.full
@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.5, 1.0), (1.0, 0.6)])
def test_sampling_follows_the_distribution(tokenizer, temperature, top_p):
    model = llama(len(tokenizer), initializer_range=0.1).eval()
    # what is saved with the model must not narrow it
    saved = model.generation_config
    saved.top_k, saved.top_p, saved.temperature = 1, 0.01, 0.01
    ids = tokenizer("the")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy() / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1] if top_p < 1 else order
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    n = 3000
    texts = complete_prompts(
        model, tokenizer, ["the"] * n, Decoding(1, "sample", temperature, top_p, batch_size=1000)
    )
    texts_of = [tokenizer.decode([i]) for i in range(len(q))]
    for text in {texts_of[i] for i in order[:6]}:
        share = sum(q[i] for i in range(len(q)) if texts_of[i] == text)
        assert texts.count(text) / n == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / n) + 1e-9)
    allowed = {texts_of[i] for i in np.flatnonzero(q)}
    assert set(texts) <= allowed


def test_long_prompts_are_refused_or_cut_on_the_left(model, tokenizer):
    long = "the quick brown fox " * 100
    with pytest.raises(DataError, match=r"prompt 1 has .* context of 256.*prompt_tokens to 246"):
        complete_prompts(model, tokenizer, ["the", long], Decoding(10))
    with pytest.raises(DataError, match="has no token"):
        complete_prompts(model, tokenizer, ["the", ""], Decoding(3))
    tail = tokenizer(long)["input_ids"][-20:]
    cut_ = complete_prompts(model, tokenizer, [long], Decoding(10, prompt_tokens=20))
    assert cut_ == [tokenizer.decode(greedy(model, tail, 10))]


def test_an_encoder_and_decoder_is_refused(tokenizer):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, vocab_size=len(tokenizer))
    with pytest.raises(TaskError, match="causal"):
        complete_prompts(T5ForConditionalGeneration(config), tokenizer, ["the"], Decoding(3))


@pytest.mark.full
def test_the_space_between_prompt_and_text_is_kept():
    tokenizer, words = space_tokenizer()
    assert tokenizer.decode([4]) == "return"
    model = llama(len(words))
    for prompt in ("x", "x x"):
        ids = tokenizer(prompt)["input_ids"]
        new = greedy(model, ids, 6)
        spelt = "".join(words[i] for i in new if i != 0).replace("▁", " ")
        assert complete_prompts(model, tokenizer, [prompt], Decoding(6)) == [spelt]
    # at least one of the texts must begin with a space, or nothing was tested
    begins = [words[greedy(model, tokenizer(p)["input_ids"], 1)[0]] for p in ("x", "x x")]
    if not any(word.startswith("▁") for word in begins):
        with torch.no_grad():
            model.lm_head.weight[4] = (
                10 * model.lm_head.weight[greedy(model, tokenizer("x")["input_ids"], 1)[0]]
            )
        assert complete_prompts(model, tokenizer, ["x"], Decoding(1)) == [" return"]


def test_a_stop_string_that_is_no_token_does_not_make_the_unknown_token_an_end():
    tokenizer, words = space_tokenizer()
    model = llama(len(words))
    with torch.no_grad():
        # the unknown token becomes the likeliest
        model.lm_head.weight[0] = 5 * model.lm_head.weight[greedy(model, tokenizer("x")["input_ids"], 1)[0]]
    calls = []
    assert 0 in greedy(model, tokenizer("x")["input_ids"], 1)
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    complete_prompts(model, tokenizer, ["x"], Decoding(7, stop=("zzz",)))
    hook.remove()
    assert len(calls) == 7


def test_special_tokens_of_the_tokenizer_are_added_or_not_and_a_closing_one_is_not():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    bare = tokenizer("the")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", begin), ("<end>", end)]
    )
    assert tokenizer("the")["input_ids"] == [begin, *bare, end]
    model = llama(len(tokenizer))
    for special, ids in ((True, [begin, *bare]), (False, bare)):
        new = greedy(model, ids, 9)
        assert end not in new
        actual = complete_prompts(model, tokenizer, ["the"], Decoding(9, special_tokens=special))
        assert actual == [tokenizer.decode(new, skip_special_tokens=True)]


def test_settings_that_cannot_be_are_refused():
    for wrong in (
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"prompt_tokens": 0},
        {"method": "beam"},
        {"method": "sample", "temperature": 0.0},
        {"method": "sample", "top_p": 0.0},
        {"method": "sample", "top_p": 1.1},
        {"temperature": 0.5},
        {"stop": ("",)},
    ):
        with pytest.raises(ConfigError):
            Decoding(**wrong)


def test_the_description_tells_settings_apart():
    ways = [Decoding(), Decoding(128), Decoding(method="sample")]
    ways += [Decoding(method="sample", temperature=0.5), Decoding(method="sample", top_p=0.5)]
    ways += [Decoding(method="sample", key=Key((1,))), Decoding(batch_size=1), Decoding(stop=("\n",))]
    ways += [Decoding(prompt_tokens=5), Decoding(special_tokens=False)]
    lines = [way.describe() for way in ways]
    assert len(set(lines)) == len(lines)
    assert not any("\n" in line for line in lines)
    assert lines[1].startswith("greedy, at most 128 new tokens")
