"""The two responses of a preference pair keep the same prompt when they are shortened to the context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import DataError
from fedlowrank.data.text.rows.text_rows import TextRows
from fedlowrank.data.text.text_records import Conversation, Instruction, Preference, Texts
from fedlowrank.data.text.tokens import TextSettings, tokenize
from tests.support.byte_tokenizers import byte_tokenizer

torch.set_num_threads(1)

PROMPT = [("user", "one?"), ("assistant", "two"), ("user", "three?")]


def write_turns(turns: Sequence[tuple[str, str]]) -> str:
    """The text of turns in the format ChatML."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def count_tokens(turns: Sequence[tuple[str, str]]) -> int:
    """Bytes of turns, where each special token is one token."""
    return sum(len(f"{role}\n{content}\n".encode()) + 2 for role, content in turns)


def make_messages(turns: Sequence[tuple[str, str]]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


def make_pair(prompt: Sequence[tuple[str, str]], responses: Sequence[str], client: str | None) -> Preference:
    sides = [
        Conversation(make_messages([*prompt, ("assistant", text)]), (), len(prompt), client=client)
        for text in responses
    ]
    return Preference(sides[0], sides[1], client=client)


def decode_sides(data: Any, row: int = 0) -> list[str]:
    tokenizer = byte_tokenizer()
    ids, mask = (data.train.x[name][row] for name in ("input_ids", "attention_mask"))
    return [tokenizer.decode(t[m == 1].tolist()) for t, m in zip(ids, mask, strict=True)]


def decode_prompts(data: Any, row: int) -> list[str]:
    """The text before the first learnt token of each response."""
    tokenizer = byte_tokenizer()
    starts = [int((y >= 0).nonzero()[0]) for y in data.train.y[row]]
    ids = data.train.x["input_ids"][row]
    return [tokenizer.decode(t[:start].tolist()) for t, start in zip(ids, starts, strict=True)]


@pytest.mark.parametrize("is_chosen_long", [True, False])
def test_both_responses_lose_the_same_turns(is_chosen_long: bool, tmp_path: Path) -> None:
    texts = ["an answer of many words", "no"][:: 1 if is_chosen_long else -1]
    row = {
        "prompt": make_messages(PROMPT),
        "chosen": make_messages([("assistant", texts[0])]),
        "rejected": make_messages([("assistant", texts[1])]),
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    context = 76
    lengths = [count_tokens([*PROMPT, ("assistant", text)]) for text in texts]
    assert min(lengths) <= context < max(lengths)
    assert count_tokens([PROMPT[2], ("assistant", "an answer of many words")]) <= context
    data = tokenize(
        TextRows(str(tmp_path / "pairs.jsonl")).load(),
        byte_tokenizer("chatml"),
        TextSettings("chat", context, truncate="turns"),
    )
    assert decode_sides(data) == [write_turns([PROMPT[2], ("assistant", text)]) for text in texts]
    sides = ("chosen", "rejected") if is_chosen_long else ("rejected", "chosen")
    notes = [note for note in data.notes if "responses, " in note]
    assert sorted(notes) == sorted(
        [
            f"{sides[0]} responses, training part of 'pairs': 1 of 1 samples are longer than 76 tokens and lost their oldest "
            "turns",
            f"{sides[1]} responses, training part of 'pairs': 1 of 1 samples lost the same part of the prompt as the longer "
            "response of their pair",
        ]
    )


def test_turns_of_a_response_stay() -> None:
    # a response of several turns, the longer of which would fit only without its own first turn
    responses = [
        [("assistant", "a" * 9), ("user", "so?"), ("assistant", "b" * 9)],
        [("assistant", "c"), ("user", "so?"), ("assistant", "d")],
    ]
    sides = [Conversation(make_messages([*PROMPT, *turns]), (), len(PROMPT)) for turns in responses]
    context = count_tokens([PROMPT[2], *responses[0]]) - 3
    data = tokenize(
        Texts("t", [Preference(*sides)]),
        byte_tokenizer("chatml"),
        TextSettings("chat", context, truncate="turns"),
    )
    actual, expected = decode_sides(data), [write_turns([PROMPT[2], *turns]) for turns in responses]
    # the end of the longer one is cut: the line break, the end of the turn and a letter
    assert actual == [expected[0].removesuffix("b<|im_end|>\n"), expected[1]]


def test_a_system_stays_in_both() -> None:
    system = ("system", "Be brief.")
    texts = ["y" * 30, "n"]
    context = count_tokens([system, PROMPT[2], ("assistant", texts[0])])
    data = tokenize(
        Texts("t", [make_pair([system, *PROMPT], texts, "w"), make_pair(PROMPT[:1], ["a", "b"], "v")]),
        byte_tokenizer("chatml"),
        TextSettings("chat", context, truncate="turns"),
    )
    assert decode_sides(data) == [write_turns([system, PROMPT[2], ("assistant", text)]) for text in texts]
    assert decode_sides(data, 1) == [write_turns([PROMPT[0], ("assistant", text)]) for text in ("a", "b")]
    notes = [note.split(": ", 1)[1] for note in data.notes]
    assert notes == [
        f"1 of 2 samples are longer than {context} tokens and lost their oldest turns (by client: w 1)",
        "1 of 2 samples lost the same part of the prompt as the longer response of their pair (by client: w 1)",
    ]


def test_both_responses_lose_the_same_tokens_on_the_left() -> None:
    pairs = [
        Preference(Instruction("abcdefgh", "123456"), Instruction("abcdefgh", "xy")),
        Preference(Instruction("abcdefgh", "x"), Instruction("abcdefgh", "1234")),
        # the response alone is too long: nothing of the prompt stays, and of the other response everything
        Preference(Instruction("abc", "0123456789"), Instruction("abc", "xyz")),
        Preference(Instruction("ab", "1"), Instruction("ab", "2")),
    ]
    data = tokenize(Texts("t", list(pairs)), byte_tokenizer(), TextSettings("verbatim", 10, truncate="left"))
    # with the token of the end 15 and 11, 10 and 13, 14 and 7, 4 and 4 tokens
    assert [decode_sides(data, row) for row in range(4)] == [
        ["fgh123456</s>", "fghxy</s>"],
        ["defghx</s>", "defgh1234</s>"],
        ["123456789</s>", "xyz</s>"],
        ["ab1</s>", "ab2</s>"],
    ]
    assert [note.split(" responses")[0] + note[note.index(": ") :] for note in data.notes] == [
        "chosen: 2 of 4 samples are longer than 10 tokens and were truncated on the left",
        "chosen: 1 of 4 samples lost the same part of the prompt as the longer response of their pair",
        "rejected: 2 of 4 samples are longer than 10 tokens and were truncated on the left",
        "rejected: 1 of 4 samples lost the same part of the prompt as the longer response of their pair",
    ]


@pytest.mark.parametrize("loss_on", ["response", "last", "all"])
def test_conversations_lose_the_same_tokens_on_the_left(loss_on: Any) -> None:
    texts = ["y" * 20, "n"]
    whole = [write_turns([*PROMPT, ("assistant", text)]) for text in texts]
    longest = count_tokens([*PROMPT, ("assistant", texts[0])])
    data = tokenize(
        Texts("t", [make_pair(PROMPT, texts, None)]),
        byte_tokenizer("chatml"),
        TextSettings("chat", longest - 6, loss_on, truncate="left"),
    )
    # the six tokens <|im_start|>, u, s, e, r and the line break
    assert decode_sides(data) == [text.removeprefix("<|im_start|>user\n") for text in whole]


def test_too_long_pairs_are_refused_with_their_row() -> None:
    pair = make_pair(PROMPT, ["a", "b" * 40], None)
    with pytest.raises(DataError, match=r"a conversation has \d+ tokens, and the context is 90"):
        tokenize(Texts("t", [pair]), byte_tokenizer("chatml"), TextSettings("chat", 90, truncate="refuse"))


turns = st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=5).filter(lambda t: len(t) % 2)


@given(
    prompts=st.lists(turns, min_size=1, max_size=4),
    data=st.data(),
    context=st.integers(40, 120),
    truncate=st.sampled_from(["turns", "left", "right"]),
)
def test_prompts_of_a_pair_are_equal(
    prompts: list[list[str]], data: st.DataObject, context: int, truncate: Any
) -> None:
    pairs = []
    for contents in prompts:
        prompt = [(("user", "assistant")[k % 2], content) for k, content in enumerate(contents)]
        lengths = st.integers(1, 60)
        responses = [letter * data.draw(lengths) for letter in "xy"]
        pairs.append(make_pair(prompt, responses, None))
    settings = TextSettings("chat", context, truncate=truncate)
    try:
        dataset = tokenize(Texts("t", list(pairs)), byte_tokenizer("chatml"), settings)
    except DataError:
        # no response fits
        return
    assert int(dataset.train.x["attention_mask"].sum(-1).max()) <= context
    for row in range(len(dataset.train)):
        first, second = decode_prompts(dataset, row)
        assert first == second
