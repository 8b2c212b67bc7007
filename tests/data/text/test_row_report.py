"""Descriptions of token data: counts by hand, and samples with brackets around what is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.dataset import ClientData, Dataset, Examples
from fedlowrank.data.text.row_report import describe_rows, mark_learnt
from fedlowrank.data.text.text_records import (
    Conversation,
    Instruction,
    Labeled,
    Preference,
    Texts,
    TokenLabeled,
)
from fedlowrank.data.text.tokens import TextSettings, tokenize
from tests.support.byte_tokenizers import byte_tokenizer

PLAIN = TextSettings("verbatim", 64)


def lines(data: Any, tokenizer: Any, count: int = 2) -> list[str]:
    return describe_rows(data, tokenizer, count).split("\n")


def test_counts_and_samples_of_natural_clients() -> None:
    tokenizer = byte_tokenizer()
    records = [
        Instruction("ab", "cde", client="b"),
        Instruction("a", "b", client="a"),
        Instruction("", "xyz", client="b"),
    ]
    actual = lines(tokenize(Texts("t", list(records)), tokenizer, PLAIN), tokenizer, 3)
    # bytes and an EOS each; nothing predicts the first byte of the last one
    assert [line.split() for line in actual[:4]] == [
        ["client", "rows", "tokens", "learnt", "longest"],
        ["a", "1", "3", "2", "3"],
        ["b", "2", "10", "7", "6"],
        ["all", "3", "13", "9", "6"],
    ]
    assert actual[4:] == [
        "",
        "client a, row 1:",
        "a⟦b</s>⟧",
        "",
        "client b, row 1:",
        "ab⟦cde</s>⟧",
        "",
        "client b, row 2:",
        "x⟦yz</s>⟧",
    ]
    assert len(lines(tokenize(Texts("t", list(records)), tokenizer, PLAIN), tokenizer, 0)) == 4


def test_clients_of_a_partition() -> None:
    tokenizer = byte_tokenizer()
    data = tokenize(Texts("t", [Instruction("", "ab")] * 3), tokenizer, PLAIN)
    parts = [data.train.take(torch.tensor(index)) for index in ([0, 1], [2], [])]
    actual = lines([ClientData(part, parts[2], parts[2]) for part in parts], tokenizer, 1)
    assert [line.split()[:4] for line in actual[1:5]] == [
        ["0", "2", "6", "4"],
        ["1", "1", "3", "2"],
        ["2", "0", "0", "0"],
        ["all", "3", "9", "6"],
    ]
    many = [ClientData(parts[1], parts[2], parts[2])] * 40
    assert "and 10 more" in describe_rows(many, tokenizer, 0)
    with pytest.raises(DataError, match="no tokens"):
        describe_rows(Dataset("d", Examples(torch.zeros(1, 2), torch.zeros(1, 1)), None, ()), tokenizer)


def test_conversations_show_every_answer() -> None:
    tokenizer = byte_tokenizer("chatml")
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    record = Conversation(tuple({"role": role, "content": text} for role, text in talk))
    actual = describe_rows(tokenize(Texts("t", [record]), tokenizer, PLAIN), tokenizer)
    assert actual.endswith(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"
    )


def test_packed_rows_show_each_sample() -> None:
    tokenizer = byte_tokenizer()
    records = [Instruction("a", "b"), Instruction("c", "d")]
    data = tokenize(Texts("t", records), tokenizer, TextSettings("verbatim", 64, packing=True))
    assert lines(data, tokenizer)[-1] == "a⟦b</s>⟧c⟦d</s>⟧"


def test_pairs_have_a_row_for_each_response() -> None:
    tokenizer = byte_tokenizer()
    pairs = [
        Preference(Instruction("ab", "c"), Instruction("ab", "defg"), client="w"),
        # no room for the rejected response
        Preference(Instruction("x" * 7, "c"), Instruction("x" * 9, "d"), client="w"),
    ]
    data = tokenize(Texts("t", list(pairs)), tokenizer, TextSettings("verbatim", 8))
    ids, mask = data.train.x["input_ids"], data.train.x["attention_mask"]
    assert tuple(ids.shape) == tuple(mask.shape) == tuple(data.train.y.shape) == (1, 2, 7)
    text = [
        [tokenizer.decode(t[m == 1]) for t, m in zip(*row, strict=True)]
        for row in zip(ids, mask, strict=True)
    ]
    assert text == [["abc</s>", "abdefg</s>"]]
    learnt = [[tokenizer.decode(y[y >= 0]) for y in row] for row in data.train.y]
    assert learnt == [["c</s>", "defg</s>"]]
    assert data.notes[-1].endswith("1 of 2 pairs dropped: a response has no token")
    assert lines(data, tokenizer)[-2:] == ["chosen: ab⟦c</s>⟧", "rejected: ab⟦defg</s>⟧"]
    with pytest.raises(ConfigError, match="these texts are preference pairs"):
        tokenize(Texts("t", list(pairs)), tokenizer, TextSettings(packing=True))


def test_pairs_of_conversations_share_the_prompt() -> None:
    tokenizer = byte_tokenizer("chatml")
    asked = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "p"},
        {"role": "user", "content": "r"},
    )
    sides = [Conversation((*asked, {"role": "assistant", "content": text}), (), 3) for text in ("yes", "no")]
    data = tokenize(Texts("t", [Preference(*sides)]), tokenizer, TextSettings(context=90))
    first, second = data.train.y[0]
    assert [tokenizer.decode(y[y >= 0]) for y in (first, second)] == ["yes<|im_end|>", "no<|im_end|>"]
    start = int((first >= 0).nonzero()[0])
    ids = data.train.x["input_ids"][0]
    assert torch.equal(ids[0, :start], ids[1, :start])
    assert int((second >= 0).nonzero()[0]) == start


def test_labels_of_words_are_at_their_first_tokens() -> None:
    tokenizer = byte_tokenizer()
    records = [TokenLabeled(("ab", "c", "d"), ("X", "O", "X")), TokenLabeled(("e",), ("O",))]
    data = tokenize(Texts("t", records), tokenizer, TextSettings(context=16))
    assert data.classes == ("O", "X")
    # a token for each byte, the space before a word among them
    assert data.train.y.tolist() == [[1, -100, -100, 0, -100, 1, -100], [0, *[-100] * 6]]
    assert data.outputs == 2
    assert lines(data, tokenizer)[1].split() == ["all", "2", "9", "4", "7"]
    assert lines(data, tokenizer, 1)[-1] == " /1 a b  /0 c  /1 d"
    named = tokenize(
        Texts("t", [TokenLabeled(("ab", "c"), (1, -100))], classes=("O", "X")),
        tokenizer,
        TextSettings(context=16),
    )
    assert (named.classes, named.train.y.tolist()) == (("O", "X"), [[1, -100, -100, -100, -100]])
    unnamed = tokenize(
        Texts("t", [TokenLabeled(("ab", "c"), (1, -100))]), tokenizer, TextSettings(context=16)
    )
    assert (unnamed.classes, unnamed.train.y.tolist()) == (("0", "1"), [[1, -100, -100, -100, -100]])
    cut = tokenize(Texts("t", records), tokenizer, TextSettings(context=3))
    assert cut.train.y.tolist() == [[1, -100, -100], [0, -100, -100]]
    assert any("1 of 2 texts are longer than 3 tokens" in note for note in cut.notes)
    with pytest.raises(DataError, match="row 4 has 2 words and 1 labels"):
        tokenize(Texts("t", [TokenLabeled(("a", "b"), ("O",), location="row 4")]), tokenizer, PLAIN)


def test_words_with_labels_have_the_tokens_of_running_text() -> None:
    tokenizer = byte_tokenizer(merges_from=["the fox jumps", "a fox and the dog"] * 3)
    record = TokenLabeled(("the", "fox", "jumps"), ("O", "X", "O"))
    data = tokenize(Texts("t", [record, record]), tokenizer, TextSettings(context=16))
    ids, labels = data.train.x["input_ids"][0].tolist(), data.train.y[0].tolist()
    assert ids == tokenizer(" the fox jumps", add_special_tokens=False)["input_ids"]
    starts = [i for i, label in enumerate(labels) if label >= 0]
    pieces = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert pieces == [" the", " fox", " jumps"]
    assert any("a space is written before each word" in note for note in data.notes)
    # a tokenizer that keeps words apart by itself gets them as they are
    bare = [["the", "fox", "jumps"]]
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    own = tokenize(Texts("t", [record, record]), tokenizer, TextSettings(context=16))
    assert own.train.x["input_ids"][0].tolist() == tokenizer(bare, is_split_into_words=True)["input_ids"][0]
    assert not any("space" in note for note in own.notes)


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    tokenizer = byte_tokenizer()
    # it drops the spaces around each word
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Strip()
    record = TokenLabeled(("a", "b"), ("O", "X"))
    with pytest.raises(ConfigError, match=r"joins the words of a list.*add_prefix_space=True"):
        tokenize(Texts("t", [record]), tokenizer, TextSettings(context=16))


def test_labels_of_texts_are_shown() -> None:
    tokenizer = byte_tokenizer()
    data = tokenize(
        Texts("t", [Labeled("good", "yes"), Labeled("bad", "no")]), tokenizer, TextSettings(context=8)
    )
    assert lines(data, tokenizer, 1)[-1] == "good  -> class 1"


def test_brackets_stand_around_each_learnt_part() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("abcd")["input_ids"]
    assert mark_learnt(ids, [ids[0], -100, ids[2], ids[3]], tokenizer) == "ab⟦cd⟧"
    assert mark_learnt(ids, [-100, ids[1], -100, ids[3]], tokenizer) == "a⟦b⟧c⟦d⟧"


def test_settings_that_need_turns_are_refused_without_them() -> None:
    texts = Texts("t", [Instruction("a", "b")])
    for more, message in (
        ({"truncate": "turns"}, "leaves out turns"),
        ({"loss_on": "last"}, "have no turns"),
        ({"system": "merge"}, "these rows have no "),
    ):
        with pytest.raises(ConfigError, match=message):
            tokenize(texts, byte_tokenizer(), TextSettings("verbatim", 8, **more))
    with pytest.raises(DataError, match=r"training part of 't', record 1 has 3 tokens, and the context is 2"):
        tokenize(texts, byte_tokenizer(), TextSettings("verbatim", 2, truncate="refuse"))
    left = tokenize(
        Texts("t", [Instruction("abc", "de")]), byte_tokenizer(), TextSettings("verbatim", 4, truncate="left")
    )
    assert lines(left, byte_tokenizer())[-1] == "c⟦de</s>⟧"
    assert "truncated on the left" in left.notes[0]


def test_auto_writes_instructions_by_alpaca_and_plain_text_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    for record, chosen, text in (
        (Instruction("do", "done"), None, "### Instruction:\ndo\n\n### Response:⟦done</s>⟧"),
        (Instruction("do ", "done"), "verbatim", "do ⟦done</s>⟧"),
        (Instruction("", "once"), "none", "o⟦nce</s>⟧"),
        (Instruction("", "once"), None, "o⟦nce</s>⟧"),
    ):
        data = tokenize(Texts("t", [record], format=chosen), tokenizer, TextSettings("auto", 400))
        assert describe_rows(data, tokenizer).endswith(text)
