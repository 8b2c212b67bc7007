"""Perplexity is the exponential of the mean loss of each token, whatever the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import DataError
from fedlowrank.language.scores.perplexity import Likelihood, TokenRow, measure_likelihood, tokenize_texts
from tests.language.scores.score_models import byte_tokenizer, gpt2, llama

TOKENIZER = byte_tokenizer(eos_token="<end>")
MODELS = {make: make(len(TOKENIZER)) for make in (llama, gpt2)}


@torch.no_grad()
def by_hand(model, rows):
    """Mean over all counted tokens; each row alone: its tokens, and how many of the first do not count."""
    model.eval()
    losses = []
    for tokens, start in rows:
        if len(tokens) <= start:
            continue
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double().numpy()
        for t in range(max(start, 1), len(tokens)):
            z = logits[t - 1] - logits[t - 1].max()
            losses.append(-(z[tokens[t]] - np.log(np.exp(z).sum())))
    return float(np.mean(losses)), len(losses)


row = st.tuples(st.lists(st.integers(0, 200), max_size=9), st.integers(0, 9))


@pytest.mark.full
@given(
    st.lists(row, min_size=1, max_size=5).filter(lambda rows: any(len(x) > max(s, 1) for x, s in rows)),
    st.sampled_from([llama, gpt2]),
    st.integers(1, 4),
)
def test_it_is_the_mean_of_each_token_alone_whatever_the_batch(rows, make, batch_size):
    nll, tokens = by_hand(MODELS[make], rows)
    actual = measure_likelihood(MODELS[make], [TokenRow(*one) for one in rows], batch_size)
    assert actual.tokens == tokens
    assert actual.nll == pytest.approx(nll, rel=1e-4)
    assert actual.perplexity == pytest.approx(math.exp(nll), rel=1e-3)


def test_prompt_and_text_are_tokenized_apart_and_cut_on_the_right():
    end = TOKENIZER.eos_token_id
    given = [("the quick", " brown fox"), ("", "def add")]
    made = tokenize_texts(TOKENIZER, *zip(*given, strict=True), end_token=end)
    for one, (prompt, text) in zip(made, given, strict=True):
        before = TOKENIZER(prompt)["input_ids"]
        assert (one.tokens, one.start) == ([*before, *TOKENIZER(text)["input_ids"], end], len(before))
    (whole,), (short,) = (tokenize_texts(TOKENIZER, ["the"], [" quick brown fox"], n) for n in (None, 4))
    assert (short.tokens, short.start) == (whole.tokens[:4], whole.start)
    assert end not in whole.tokens


def test_special_tokens_stand_before_the_prompt_only():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompt, text = tokenizer("the")["input_ids"], tokenizer(" fox")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", begin), ("<end>", end)]
    )
    assert tokenize_texts(tokenizer, ["the"], [" fox"])[0].tokens == [begin, *prompt, *text]
    # the begin token predicts the first one of a text that stands alone
    assert tokenize_texts(tokenizer, [""], [" fox"])[0] == TokenRow([begin, *text], 1)


def test_a_begin_token_that_is_the_end_token_stays_and_so_does_the_prompt_s_own_end_token():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<end>", eos_token="<end>")
    end = tokenizer.eos_token_id
    prompt, text = tokenizer("the")["input_ids"], tokenizer(" fox")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", end)]
    )
    assert tokenizer("the")["input_ids"] == [end, *prompt]
    assert tokenize_texts(tokenizer, [""], [" fox"]) == [TokenRow([end, *text], 1)]
    expected = [end, *prompt, end]
    assert tokenizer("the<end>")["input_ids"] == expected
    assert tokenize_texts(tokenizer, ["the<end>"], [" fox"]) == [TokenRow([*expected, *text], len(expected))]


def test_dropout_is_off_and_the_mode_is_as_before():
    model = llama(len(TOKENIZER), attention_dropout=0.5)
    model.train()
    tokens = TOKENIZER("the quick brown fox")["input_ids"]
    actual = measure_likelihood(model, [TokenRow(tokens, 0)])
    assert model.training
    assert actual.nll == pytest.approx(by_hand(model, [(tokens, 0)])[0], rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = llama(len(TOKENIZER))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    actual = measure_likelihood(model, tokenize_texts(TOKENIZER, ["", "a"], ["the quick brown fox", "b"]))
    assert actual.perplexity == pytest.approx(len(TOKENIZER), rel=1e-6)
    assert Likelihood(1e4, 3).perplexity == math.inf


def test_what_has_no_likelihood_is_refused():
    with pytest.raises(DataError, match="no token of any text"):
        measure_likelihood(MODELS[llama], tokenize_texts(TOKENIZER, ["the quick brown"], [" fox"], 2))


def test_a_prompt_that_begins_with_the_begin_token_gets_no_second_one():
    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    tokenizer.add_bos_token = True
    (one,) = tokenize_texts(tokenizer, ["<begin>the"], [" fox"])
    (other,) = tokenize_texts(tokenizer, ["the"], [" fox"])
    assert one.tokens.count(tokenizer.bos_token_id) == 1
    assert one.tokens[-3:] == other.tokens[-3:]
