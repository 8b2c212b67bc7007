import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.language.scores.perplexity import Labeled, Likelihood, label_tokens, measure_likelihood

from .test_score_models import byte_tokenizer, gpt2, llama

TOKENIZER = byte_tokenizer(eos_token="<end>")
MODELS = {make: make(len(TOKENIZER)) for make in (llama, gpt2)}


@torch.no_grad()
def by_hand(model, rows):
    """Mean over all counted tokens; each row alone: pairs of tokens and of whether each counts."""
    model.eval()
    losses = []
    for tokens, counted in rows:
        logits = model(input_ids=torch.tensor([tokens])).logits[0].double().numpy()
        for t in range(1, len(tokens)):
            z = logits[t - 1] - logits[t - 1].max()
            if counted[t]:
                losses.append(-(z[tokens[t]] - np.log(np.exp(z).sum())))
    return float(np.mean(losses)), len(losses)


def padded(rows, pads):
    """Rows with padding of random tokens, the given share of it on the left."""
    width = max(len(tokens) for tokens, _ in rows) + 2
    x, mask, y = (
        torch.randint(5, 50, (len(rows), width), generator=torch.Generator().manual_seed(0)),
        *torch.zeros(2, len(rows), width, dtype=torch.int64),
    )
    y -= 100
    for i, (tokens, counted) in enumerate(rows):
        start = int(pads[i] * (width - len(tokens)))
        for t, (token, counts) in enumerate(zip(tokens, counted, strict=True), start):
            x[i, t], mask[i, t], y[i, t] = token, 1, token if counts else -100
    return Labeled(x, mask, y)


row = st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=2, max_size=9).map(
    lambda r: tuple(zip(*r, strict=True))
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(row, min_size=1, max_size=5).filter(lambda rows: any(any(c[1:]) for _, c in rows)),
    st.sampled_from([llama, gpt2]),
    st.integers(1, 4),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=5, max_size=5),
)
def test_it_is_the_mean_of_each_token_alone_whatever_batch_and_padding(rows, make, batch_size, pads):
    nll, tokens = by_hand(MODELS[make], rows)
    found = measure_likelihood(MODELS[make], padded(rows, pads), batch_size)
    assert found.tokens == tokens
    assert found.nll == pytest.approx(nll, rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-3)


def test_labels_cover_the_text_and_the_end_alone():
    made = label_tokens(TOKENIZER, ["the quick", ""], [" brown fox", "def add"], end=True)
    end = TOKENIZER.eos_token_id
    for i, (prompt, text) in enumerate([("the quick", " brown fox"), ("", "def add")]):
        before, after = TOKENIZER(prompt)["input_ids"], [*TOKENIZER(text)["input_ids"], end]
        n = len(before) + len(after)
        assert made.x[i][made.mask[i] == 1].tolist() == before + after
        assert made.mask[i, :n].tolist() == [1] * n
        assert made.y[i].tolist() == [-100] * len(before) + after + [-100] * (made.y.shape[1] - n)
    plain = label_tokens(TOKENIZER, ["the quick"], [" brown fox"])
    assert end not in plain.x
    assert plain.x.dtype == plain.mask.dtype == plain.y.dtype == torch.int64


def test_a_context_cuts_on_the_right():
    whole, short = (label_tokens(TOKENIZER, ["the"], [" quick brown fox"], n) for n in (None, 4))
    for a, b in zip(vars(whole).values(), vars(short).values(), strict=True):
        assert torch.equal(a[:, :4], b)


def test_special_tokens_stand_before_the_prompt_only():
    from tokenizers import processors

    tokenizer = byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompt, text = tokenizer("the")["input_ids"], tokenizer(" fox")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", begin), ("<end>", end)]
    )
    assert label_tokens(tokenizer, ["the"], [" fox"]).x.tolist() == [[begin, *prompt, *text]]
    # the begin token predicts the first one of a text that stands alone
    assert label_tokens(tokenizer, [""], [" fox"]).y.tolist() == [[-100, *text]]


def test_the_mode_is_as_before_and_dropout_is_off():
    model = llama(len(TOKENIZER), attention_dropout=0.5)
    model.train()
    data = label_tokens(TOKENIZER, [""], ["the quick brown fox"])
    found = measure_likelihood(model, data)
    assert model.training
    tokens = TOKENIZER("the quick brown fox")["input_ids"]
    assert found.nll == pytest.approx(by_hand(model, [(tokens, [True] * len(tokens))])[0], rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = llama(len(TOKENIZER))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = measure_likelihood(model, label_tokens(TOKENIZER, ["", "a"], ["the quick brown fox", "b"]))
    assert found.perplexity == pytest.approx(len(TOKENIZER), rel=1e-6)
    assert Likelihood(1e4, 3).perplexity == math.inf


def test_what_has_no_likelihood_is_refused():
    model = MODELS[llama]
    x = torch.tensor([[1, 2, 3]])
    with pytest.raises(DataError, match="mask is 0"):
        measure_likelihood(model, Labeled(x, torch.tensor([[1, 1, 0]]), x))
    with pytest.raises(DataError, match="no token counts"):
        measure_likelihood(model, Labeled(x, torch.ones_like(x), torch.tensor([[1, -100, -100]])))
    with pytest.raises(ConfigError):
        measure_likelihood(model, Labeled(x, torch.ones_like(x), x), 0)
    with pytest.raises(DataError, match="no token of any text"):
        label_tokens(TOKENIZER, ["the quick brown"], [" fox"], 2)
    with pytest.raises(DataError):
        label_tokens(TOKENIZER, ["a", "b"], ["c"])
    with pytest.raises(ConfigError):
        label_tokens(TOKENIZER, ["a"], ["b"], 1)
    with pytest.raises(ConfigError, match="no end token"):
        label_tokens(byte_tokenizer(), ["a"], ["b"], end=True)
