"""Perplexity is the exponential of the mean loss of each token, whatever the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.text.packing import Sample
from fedlowrank.language.scores.perplexity import (
    Likelihood,
    cut_row,
    has_counted_token,
    measure_likelihood,
    tokenize_texts,
)
from tests.language.scores.score_models import byte_tokenizer, gpt2, llama

TOKENIZER = byte_tokenizer(eos_token="<end>")
MODELS = {make: make(len(TOKENIZER)) for make in (llama, gpt2)}


def sample(tokens, start):
    """A row whose first ``start`` tokens do not count."""
    return Sample(tokens, [-100] * min(start, len(tokens)) + tokens[start:])


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
    actual = measure_likelihood(MODELS[make], [sample(*one) for one in rows], batch_size)
    assert actual.tokens == tokens
    assert actual.nll == pytest.approx(nll, rel=1e-4)
    assert actual.perplexity == pytest.approx(math.exp(nll), rel=1e-3)


def test_prompt_and_text_are_tokenized_apart_and_cut_on_the_right():
    end = TOKENIZER.eos_token_id
    given = [("the quick", " brown fox"), ("", "def add")]
    made = tokenize_texts(TOKENIZER, *zip(*given, strict=True), end_token=end)
    for one, (prompt, text) in zip(made, given, strict=True):
        before = TOKENIZER(prompt)["input_ids"]
        assert one == sample([*before, *TOKENIZER(text)["input_ids"], end], len(before))
    (whole,) = tokenize_texts(TOKENIZER, ["the"], [" quick brown fox"])
    assert cut_row(whole, 4) == Sample(whole.ids[:4], whole.labels[:4])
    assert end not in whole.ids


def test_a_row_is_cut_at_its_end_token():
    end = TOKENIZER.eos_token_id
    (whole,) = tokenize_texts(TOKENIZER, ["the"], [" fox"], end)
    # what a template writes after the end token is cut off, too; the same token within the text stays
    longer = Sample([*whole.ids, end, 7], [*whole.labels, end, 7])
    assert cut_row(longer, None, end) == whole
    assert cut_row(whole, None, end) == tokenize_texts(TOKENIZER, ["the"], [" fox"])[0]
    # without a label it belongs to the prompt
    assert cut_row(sample([end, 5, 6], 1), None, end) == sample([end, 5, 6], 1)
    # prompts that fill the context
    assert has_counted_token(whole)
    assert not has_counted_token(cut_row(whole, len(TOKENIZER("the")["input_ids"])))


def test_rows_beyond_learnt_positions_are_refused():
    model, ids = MODELS[gpt2], [1] * 129
    with pytest.raises(ConfigError, match=r"129 tokens here.*128 positions\. Set context to 128"):
        measure_likelihood(model, [sample(ids, 0)])
    assert measure_likelihood(model, [sample(ids[:128], 0)]).tokens == 127


def test_special_tokens_stand_before_the_prompt_only():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompt, text = tokenizer("the")["input_ids"], tokenizer(" fox")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", begin), ("<end>", end)]
    )
    assert tokenize_texts(tokenizer, ["the"], [" fox"])[0].ids == [begin, *prompt, *text]
    # the begin token predicts the first one of a text that stands alone
    assert tokenize_texts(tokenizer, [""], [" fox"])[0] == sample([begin, *text], 1)
    # as in training, a text that has both already gets them once
    assert tokenize_texts(tokenizer, [""], ["<begin> fox<end>"], end) == [sample([begin, *text, end], 0)]


def test_a_begin_token_that_is_the_end_token_stays_and_so_does_the_prompt_s_own_end_token():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<end>", eos_token="<end>")
    end = tokenizer.eos_token_id
    prompt, text = tokenizer("the")["input_ids"], tokenizer(" fox")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", end)]
    )
    assert tokenizer("the")["input_ids"] == [end, *prompt]
    assert tokenize_texts(tokenizer, [""], [" fox"]) == [sample([end, *text], 1)]
    expected = [end, *prompt, end]
    assert tokenizer("the<end>")["input_ids"] == expected
    assert tokenize_texts(tokenizer, ["the<end>"], [" fox"]) == [sample([*expected, *text], len(expected))]


def test_dropout_is_off_and_the_mode_is_as_before():
    model = llama(len(TOKENIZER), attention_dropout=0.5)
    model.train()
    tokens = TOKENIZER("the quick brown fox")["input_ids"]
    actual = measure_likelihood(model, [sample(tokens, 0)])
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
    (row,) = tokenize_texts(TOKENIZER, ["the quick brown"], [" fox"])
    with pytest.raises(DataError, match="no token of any text"):
        measure_likelihood(MODELS[llama], [cut_row(row, 2)])


def test_a_prompt_that_begins_with_the_begin_token_gets_no_second_one():
    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    tokenizer.add_bos_token = True
    (one,) = tokenize_texts(tokenizer, ["<begin>the"], [" fox"])
    (other,) = tokenize_texts(tokenizer, ["the"], [" fox"])
    assert one.ids.count(tokenizer.bos_token_id) == 1
    assert one.ids[-3:] == other.ids[-3:]
