"""Token ids and labels, by hand with words as tokens, and decoded again with a byte-level BPE."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.learning.losses import IGNORE_INDEX
from fedlowrank.data.dataset import Dataset
from fedlowrank.data.text.packing import Sample, pack_sequences
from fedlowrank.data.text.text_records import Conversation, Instruction, Labeled, Preference, Texts
from fedlowrank.data.text.tokens import TextSettings, tokenize
from fedlowrank.language.scores.text_generation import encode_prompt
from tests.support.byte_tokenizers import byte_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "<pad>", "<bos>", "<eos>", "a", "b", "c", "d", "e", "f", "[CLS]", "[SEP]"]
PAD, BOS, EOS, A, B, C, D, E, F, CLS, SEP = range(1, 12)
_ = IGNORE_INDEX


def tokenizer_of(template: str, **more: Any) -> Any:
    """A tokenizer with a token for each word."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = [(word, WORDS.index(word)) for word in template.split() if word != "$A"]
    made.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **more)


def words(bos: bool = True, names: tuple[str, ...] = ("pad", "bos", "eos"), **more: Any) -> Any:
    special = {f"{name}_token": f"<{name}>" for name in names}
    return tokenizer_of("<bos> $A" if bos else "$A", **special, **more)


def bert(**more: Any) -> Any:
    return tokenizer_of("[CLS] $A [SEP]", pad_token="<pad>", **more)


@pytest.fixture(scope="module")
def bpe() -> Any:
    """A byte-level BPE, which decodes to the very text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    made.train_from_iterator(["abab ab ab Response:ab ab\nab", "abc\nabc ### Response:a b"] * 5, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def rows(t: torch.Tensor) -> list[list[int]]:
    return t.tolist()


PLAIN = TextSettings("plain", 16)
PAIR = [Instruction("a b", "c"), Instruction("a", "d e f", "b")]


# Causal language models


def test_ids_mask_and_labels_by_hand() -> None:
    data = tokenize(Texts("t", PAIR, [Instruction("a", "b")]), words(), PLAIN)
    assert rows(data.train.x["input_ids"]) == [[BOS, A, B, C, EOS, PAD, PAD], [BOS, A, B, D, E, F, EOS]]
    assert rows(data.train.x["attention_mask"]) == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]
    assert rows(data.train.y) == [[_, _, _, C, EOS, _, _], [_, _, _, D, E, F, EOS]]
    # the test part has the width of both
    assert rows(data.test.x["input_ids"]) == [[BOS, A, B, EOS, PAD, PAD, PAD]]
    assert rows(data.test.y) == [[_, _, B, EOS, _, _, _]]
    for t in (*data.train.x.values(), data.train.y):
        assert t.dtype == torch.int64
    assert (data.classes, data.outputs, data.notes, data.strata, data.natural) == ((), 0, (), None, None)
    assert data.train.has_token_labels
    everything = tokenize(Texts("t", PAIR), words(), TextSettings("plain", 16, "all")).train
    ids, mask = everything.x["input_ids"], everything.x["attention_mask"]
    assert torch.equal(everything.y, torch.where(mask == 1, ids, IGNORE_INDEX))


@pytest.mark.parametrize(
    ("record", "form"),
    [
        (Instruction("", "<bos> a b <eos>"), "none"),
        (Instruction("", "a b <eos>"), "none"),
        (Instruction("<bos> a", "b <eos>"), "verbatim"),
        (Instruction("<bos> a", "b"), "plain"),
        (Instruction("a", "b <eos>"), "plain"),
    ],
)
def test_special_tokens_of_the_text_are_not_written_twice(record: Instruction, form: Any) -> None:
    tokenizer = words()
    # special tokens in a text are single ones, as with every tokenizer of transformers
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    actual = tokenize(Texts("t", [record]), tokenizer, TextSettings(form, 16)).train
    assert rows(actual.x["input_ids"]) == [[BOS, A, B, EOS]]
    assert actual.y[0, -2:].tolist() == [B, EOS]
    everything = tokenize(Texts("t", [record]), tokenizer, TextSettings(form, 16, "all")).train
    assert rows(everything.y) == [[BOS, A, B, EOS]]


def test_special_tokens_that_are_lacking() -> None:
    texts = Texts("t", PAIR)
    without_bos = tokenize(texts, words(bos=False), PLAIN)
    assert rows(without_bos.train.x["input_ids"])[1] == [A, B, D, E, F, EOS]
    without_pad = tokenize(texts, words(names=("bos", "eos")), PLAIN)
    assert rows(without_pad.train.x["input_ids"])[0] == [BOS, A, B, C, EOS, EOS, EOS]
    assert rows(without_pad.train.y)[0] == [_, _, _, C, EOS, _, _]
    assert rows(without_pad.train.x["attention_mask"])[0] == [1, 1, 1, 1, 1, 0, 0]
    assert without_pad.notes == ("the tokenizer has no padding token: EOS pads",)
    neither = tokenize(texts, words(bos=False, names=()), PLAIN)
    assert rows(neither.train.x["input_ids"])[0] == [A, B, C, 0, 0]
    assert neither.notes == (
        "the tokenizer has no padding token: token 0 pads",
        "the tokenizer has no EOS: responses end without one",
    )


def test_truncation_is_counted_and_drops_what_cannot_be_learnt() -> None:
    # 4 tokens: of "a b | c" with BOS and EOS the end is cut, of "a b | d e f" more; of "a b c d | e" all
    texts = Texts("t", [*PAIR, Instruction("a b c d", "e"), Instruction("a", "b")])
    data = tokenize(texts, words(), TextSettings("plain", 4))
    assert rows(data.train.x["input_ids"]) == [[BOS, A, B, C], [BOS, A, B, D], [BOS, A, B, EOS]]
    assert rows(data.train.y) == [[_, _, _, C], [_, _, _, D], [_, _, B, EOS]]
    assert [note.split(": ", 1)[1] for note in data.notes] == [
        "3 of 4 samples are longer than 4 tokens and were truncated on the right",
        "1 of 4 samples dropped: no response token is left",
    ]


def test_a_response_of_one_token_that_nothing_predicts_is_dropped() -> None:
    texts = Texts("t", [Instruction("", "a"), Instruction("", "a b")])
    data = tokenize(texts, words(bos=False), TextSettings("none", 8))
    assert rows(data.train.x["input_ids"]) == [[A, B, EOS]]
    assert "1 of 2 samples dropped" in data.notes[0]
    assert len(tokenize(texts, words(), TextSettings("none", 8)).train) == 2
    with pytest.raises(DataError, match="within 3 tokens no sample has a token of its response"):
        tokenize(Texts("t", [Instruction("a b c", "d")]), words(), TextSettings("plain", 3))


def test_the_boundary_stays_where_a_merge_would_cross_it(bpe: Any) -> None:
    assert len(bpe("ab")["input_ids"]) == 1
    data = tokenize(Texts("t", [Instruction("a", "b")]), bpe, TextSettings("verbatim", 8))
    (a,), (b,) = bpe("a")["input_ids"], bpe("b")["input_ids"]
    eos = bpe.eos_token_id
    assert rows(data.train.x["input_ids"]) == [[a, b, eos]]
    assert rows(data.train.y) == [[_, b, eos]]


some = st.text(alphabet="ab c\n:#é", min_size=1, max_size=12)


@pytest.mark.full
@given(
    pairs=st.lists(st.tuples(some, some, st.one_of(st.just(""), some)), min_size=1, max_size=5),
    format=st.sampled_from(["alpaca", "plain", "none"]),
    packing=st.booleans(),
)
def test_what_is_learnt_decodes_to_the_responses(bpe: Any, pairs: Any, format: Any, packing: bool) -> None:
    records = [Instruction(p, r, i) for p, r, i in pairs]
    # without a prompt and a BOS, nothing predicts the first token
    kept = [r for r in records if format != "none" or len(bpe(r.response)["input_ids"]) > 1]
    if not kept:
        return
    data = tokenize(Texts("t", records), bpe, TextSettings(format, 400, packing=packing))
    actual, prompts = [], []
    x = data.train.x
    for ids, mask, y in zip(*map(rows, (x["input_ids"], x["attention_mask"], data.train.y)), strict=True):
        n = sum(mask)
        assert mask == [1] * n + [0] * (len(mask) - n)
        assert all(label in (IGNORE_INDEX, token) for label, token in zip(y, ids, strict=True))
        actual.append(bpe.decode([label for label in y if label != IGNORE_INDEX]))
        prompts.append(bpe.decode([t for t, label in zip(ids[:n], y, strict=False) if label == IGNORE_INDEX]))
    # in a packed row nothing predicts the first token of a sample: what is before belongs to another one
    first = int(packing and format == "none")
    expected = [bpe.decode(bpe(r.response, add_special_tokens=False)["input_ids"][first:]) for r in kept]
    assert sorted("".join(actual).split("<eos>")) == sorted(["", *expected])
    if not packing:
        assert actual == [r.response + "<eos>" for r in kept]
        ends = {"alpaca": "### Response:", "plain": "\n", "none": ""}[format]
        for prompt, record in zip(prompts, kept, strict=True):
            assert prompt.endswith(ends)
            assert format == "none" or (record.prompt in prompt and record.input in prompt)


@pytest.mark.parametrize(
    ("end", "wanted"), [("<eos>\n", [C, EOS]), (" <eos>", [C, EOS]), (" d", [C, D]), ("", [C])]
)
def test_a_chat_template_alone_writes_the_special_tokens(end: str, wanted: list[int]) -> None:
    tokenizer = words()
    asked, answered = "{{ messages[0]['content'] }} f ", "{{ messages[1]['content'] }}" + end
    tokenizer.chat_template = (
        "<bos> " + asked + "{% if not add_generation_prompt %}" + answered + "{% endif %}"
    )
    data = tokenize(Texts("t", [Instruction("a b", "c")]), tokenizer, TextSettings("chat", 16))
    assert rows(data.train.x["input_ids"]) == [[BOS, A, B, F, *wanted]]
    assert rows(data.train.y) == [[_, _, _, _, *wanted]]
    assert any("no special token ends the last answer" in note for note in data.notes) is (EOS not in wanted)


@pytest.mark.parametrize("pairs", [False, True])
def test_an_instruction_in_the_chat_format_is_a_conversation_of_two_turns(pairs: bool) -> None:
    tokenizer = byte_tokenizer("chatml")
    turns = [{"role": "user", "content": "who?\n\nhere"}, {"role": "assistant", "content": "the fox"}]
    instruction: Any = Instruction("who?", "the fox", "here")
    conversation: Any = Conversation(tuple(turns), learn_from=1)
    if pairs:
        instruction = Preference(instruction, Instruction("who?", "a dog", "here"))
        other = Conversation((turns[0], {"role": "assistant", "content": "a dog"}), learn_from=1)
        conversation = Preference(conversation, other)
    one, same = (
        tokenize(Texts("t", [record]), tokenizer, TextSettings("chat", 200))
        for record in (instruction, conversation)
    )
    for a, b in ((one.train.y, same.train.y), *((t, same.train.x[n]) for n, t in one.train.x.items())):
        assert torch.equal(a, b)
    ids, y = (t[0, 0] if pairs else t[0] for t in (one.train.x["input_ids"], one.train.y))
    assert ids.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]
    assert tokenizer.decode(y[y >= 0]) == "the fox<|im_end|>"


def test_categories_become_strata_and_clients_natural_clients() -> None:
    train = [Instruction("a", "b", category="y", client="w"), Instruction("a", "b", category="x")]
    test = [Instruction("a", "b", category="z", client="v")]
    data = tokenize(Texts("t", train, test, notes=("read",)), words(), PLAIN)
    assert data.strata_names == ("x", "y", "z")
    assert (data.strata.tolist(), data.strata_test.tolist()) == ([1, 0], [2])
    assert (data.natural.tolist(), data.natural_test.tolist()) == ([1, -1], [0])
    assert data.notes == ("read",)
    with pytest.raises(DataError, match="1 records of 't' have no category"):
        tokenize(Texts("t", [*train, Instruction("a", "b")]), words(), PLAIN)
    # a sample that is dropped takes its stratum with it
    texts = Texts("t", [Instruction("a b c", "d", category="p"), *train])
    cut = tokenize(texts, words(), TextSettings("plain", 4))
    assert [cut.strata_names[k] for k in cut.strata] == ["y", "x"]
    assert cut.natural.tolist() == [0, -1]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="made for at most 8 tokens"):
        tokenize(Texts("t", PAIR), words(model_max_length=8), PLAIN)
    with pytest.raises(ConfigError, match="packing is for instructions"):
        tokenize(Texts("t", [Labeled("a", 0)]), bert(), TextSettings(packing=True))
    with pytest.raises(ConfigError, match="context must be a whole number of at least 2"):
        TextSettings(context=1)


# Packing


def test_packed_rows_by_hand() -> None:
    texts = Texts("t", [Instruction("a", "b"), Instruction("a", "c d e f"), Instruction("", "d")])
    data = tokenize(texts, words(), TextSettings("plain", 7, packing=True))
    assert rows(data.train.x["input_ids"]) == [[BOS, A, B, EOS, BOS, D, EOS], [BOS, A, C, D, E, F, EOS]]
    assert rows(data.train.y) == [[_, _, B, EOS, _, D, EOS], [_, _, C, D, E, F, EOS]]
    assert rows(data.train.x["position_ids"]) == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert data.notes == ("training part: 3 samples packed into 2 rows",)
    # in the order given, the two of 4 tokens would share a row, and those of 6 need one each
    samples = [Sample([t] * n, [t] * n) for t, n in [(1, 4), (2, 4), (3, 6), (4, 6), (5, 9)]]
    packed = pack_sequences(samples, 10)
    assert [row.lengths for row in packed] == [(4, 6), (4, 6), (9,)]
    assert [row.ids for row in packed] == [[1] * 4 + [3] * 6, [2] * 4 + [4] * 6, [5] * 9]


def test_packing_keeps_categories_and_clients_apart() -> None:
    records = [Instruction("a", "b", category=f"{i % 2}", client=f"{i % 3}") for i in range(12)]
    data = tokenize(Texts("t", records), words(), TextSettings("plain", 100, packing=True))
    assert sorted(zip(data.strata.tolist(), data.natural.tolist(), strict=True)) == [
        (s, c) for s in range(2) for c in range(3)
    ]
    assert rows(data.train.x["input_ids"]) == [[BOS, A, B, EOS] * 2] * 6


def test_the_first_token_of_a_packed_sample_has_no_label() -> None:
    texts = Texts("t", [Instruction("a", "b"), Instruction("", "c d")])
    data = tokenize(texts, words(bos=False), TextSettings("plain", 8, "all", packing=True))
    assert rows(data.train.x["input_ids"]) == [[A, B, EOS, C, D, EOS]]
    assert rows(data.train.y) == [[_, B, EOS, _, D, EOS]]


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_every_sample_is_packed_once_and_whole(sizes: list[int], seed: int) -> None:
    draws = np.random.default_rng(seed)
    samples = []
    for i, size in enumerate(sizes):
        # tokens tell which sample they are of
        ids = [1 + i] * size
        samples.append(Sample(ids, [t if draws.random() < 0.5 else IGNORE_INDEX for t in ids]))
    packed = pack_sequences(samples, 20)
    assert all(0 < len(row.ids) == len(row.labels) <= 20 for row in packed)
    assert sum(len(row.ids) for row in packed) == sum(sizes)
    for i, sample in enumerate(samples):
        (row,) = (row for row in packed if 1 + i in row.ids)
        at, n = row.ids.index(1 + i), len(sample.ids)
        assert row.ids[at : at + n] == sample.ids
        # nothing predicts the first token
        assert row.labels[at : at + n] == [IGNORE_INDEX, *sample.labels[1:]]
        assert row.positions[at : at + n] == list(range(n))
    # two rows that would fit into one are never left: no two are at most half full
    assert sum(len(row.ids) <= 10 for row in packed) <= 1


# Classifiers


def test_texts_with_labels_by_hand() -> None:
    train = [Labeled("a b", "yes", "w"), Labeled("c", "no", "v")]
    names = ["input_ids", "attention_mask"]
    texts = Texts("t", train, [Labeled("d e f", "yes")])
    data = tokenize(texts, bert(model_input_names=names), TextSettings(context=8))
    assert rows(data.train.x["input_ids"]) == [[CLS, A, B, SEP, PAD], [CLS, C, SEP, PAD, PAD]]
    assert rows(data.train.x["attention_mask"]) == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert rows(data.test.x["input_ids"]) == [[CLS, D, E, F, SEP]]
    assert (data.classes, data.train.y.tolist(), data.test.y.tolist()) == (("no", "yes"), [1, 0], [1])
    assert (data.natural.tolist(), data.natural_test, data.strata) == ([1, 0], None, None)
    assert not data.train.has_token_labels
    assert set(data.train.x) == {"input_ids", "attention_mask"}
    asked = bert(model_input_names=["input_ids", "token_type_ids", "attention_mask"], pad_token_type_id=3)
    types = tokenize(Texts("t", train), asked, TextSettings(context=8)).train.x["token_type_ids"]
    assert rows(types) == [[0, 0, 0, 0], [0, 0, 0, asked.pad_token_type_id]]


def test_long_texts_keep_their_special_tokens() -> None:
    tokenizer = bert(truncation_side="left")
    data = tokenize(
        Texts("t", [Labeled("a b c d e f", 0), Labeled("c", 1)]), tokenizer, TextSettings(context=4)
    )
    assert rows(data.train.x["input_ids"]) == [[CLS, A, B, SEP], [CLS, C, SEP, PAD]]
    assert "1 of 2 texts are longer than 4 tokens" in data.notes[0]
    # nothing of it stays behind in the tokenizer
    assert tokenizer.truncation_side == "left"
    assert len(tokenizer("a b c d e f")["input_ids"]) == 8


def test_classes_in_a_given_order() -> None:
    records = [Labeled("a", "yes"), Labeled("b", "no")]
    data = tokenize(Texts("t", records, classes=("yes", "maybe", "no")), bert())
    assert (data.classes, data.train.y.tolist()) == (("yes", "maybe", "no"), [0, 2])
    numbers = tokenize(Texts("t", [Labeled("a", 2), Labeled("b", 0)], classes=("x", "y", "z")), bert())
    assert (numbers.classes, numbers.train.y.tolist()) == (("x", "y", "z"), [2, 0])
    assert tokenize(Texts("t", [Labeled("a", 2), Labeled("b", 0)]), bert()).classes == ("0", "1", "2")
    for labeled, classes, message in (
        ([Labeled("a", "noo")], ("yes", "no"), r"label 'noo' that is no class. Did you mean 'no'\?"),
        ([Labeled("a", 2)], ("yes", "no"), r"labels outside 0\.\.1"),
        ([Labeled("a", 2), Labeled("a", "b")], (), "text in some records and numbers in others"),
        ([Labeled(" ", 0)], (), "1 of 1 texts have no token"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize(Texts("t", labeled, classes=classes), words(bos=False))


@pytest.mark.data
def test_real_dolly_is_learnt_whole(real: str, bpe: Any) -> None:
    from fedlowrank.data.text.text_sources import Dolly

    texts = Dolly(f"{real}/dolly15k/dolly.jsonl.gz").load()
    few = Texts("dolly", texts.train[:300])
    data: Dataset = tokenize(few, bpe, TextSettings(context=60_000))
    for record, y, s in zip(few.train, data.train.y, data.strata, strict=True):
        assert bpe.decode(y[y != IGNORE_INDEX]) == record.response + "<eos>"
        assert data.strata_names[s] == record.category


def test_tokens_are_those_of_the_tokenizer_also_if_it_changes_texts() -> None:
    """The backend alone is asked only where the tokenizer adds nothing to it."""

    class Stutter(transformers.PreTrainedTokenizerFast):  # type: ignore[misc, name-defined]
        """Repeats each text."""

        def __call__(self, text: Any, **settings: Any) -> Any:
            texts = [text] if isinstance(text, str) else text
            encoding = super().__call__([f"{t} {t}" for t in texts], **settings)
            return {"input_ids": encoding["input_ids"][0]} if isinstance(text, str) else encoding

    plain = words()
    stutter = Stutter(
        tokenizer_object=plain.backend_tokenizer, unk_token="[UNK]", pad_token="<pad>", eos_token="<eos>"
    )
    texts = Texts("t", [Instruction("a", "b c")] * 70)
    assert (
        tokenize(texts, plain, TextSettings("verbatim")).train.x["input_ids"].tolist()
        == [[BOS, A, B, C, EOS]] * 70
    )
    assert (
        tokenize(texts, stutter, TextSettings("verbatim")).train.x["input_ids"].tolist()
        == [[BOS, A, A, B, C, B, C, EOS]] * 70
    )


def test_what_a_tokenizer_writes_before_every_text_begins_each_sample() -> None:
    """Also if it is no declared BOS, as ``[gMASK]<sop>`` of GLM-4."""
    tokenizer = tokenizer_of("[CLS] <bos> $A", pad_token="<pad>", eos_token="<eos>")
    assert tokenizer.bos_token is None
    assert tokenizer("a b")["input_ids"] == [CLS, BOS, A, B]
    # a text that begins with the whole of it already gets it once
    texts = [Instruction("a", "b c"), Instruction("[CLS] <bos> a", "b"), Instruction("[CLS] a", "b")]
    data = tokenize(Texts("t", texts), tokenizer, TextSettings("verbatim"))
    assert data.train.x["input_ids"].tolist() == [
        [CLS, BOS, A, B, C, EOS],
        [CLS, BOS, A, B, EOS, PAD],
        [CLS, BOS, CLS, A, B, EOS],
    ]
    assert data.train.y.tolist()[0] == [_, _, _, B, C, EOS]
    # prompts for generation begin alike
    assert encode_prompt(tokenizer, "a") == [CLS, BOS, A]
    assert encode_prompt(tokenizer, "[CLS] <bos> a") == [CLS, BOS, A]


def test_truncation_saved_with_a_tokenizer_is_not_applied() -> None:
    tokenizer = words(bos=False)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    data = tokenize(Texts("t", [Instruction("a", "b c d e")]), tokenizer, TextSettings("chat"))
    assert data.train.x["input_ids"].tolist() == [[A, B, C, D, E]]


def test_what_a_tokenizer_writes_after_every_text_is_no_prefix() -> None:
    tokenizer = tokenizer_of("[CLS] $A [SEP]", pad_token="<pad>", eos_token="<eos>")
    data = tokenize(Texts("t", [Instruction("a", "b")]), tokenizer, TextSettings("verbatim"))
    assert data.train.x["input_ids"].tolist() == [[CLS, A, B, EOS]]
