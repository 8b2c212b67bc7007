"""Which tokens of conversations are learnt, against spans of characters found in what jinja renders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import pytest
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.learning.losses import IGNORE_INDEX
from fedlowrank.data.text.chat import chat_template
from fedlowrank.data.text.chat.chat_template import ChatTemplate, find_turn_end
from fedlowrank.data.text.text_records import Conversation, Texts
from fedlowrank.data.text.tokens import TextSettings, tokenize
from tests.support.byte_tokenizers import SPECIAL, TEMPLATES, byte_tokenizer

Messages = list[dict[str, Any]]

TALK: Messages = [
    {"role": "user", "content": "Wo liegt Köln?"},
    {"role": "assistant", "content": " Am Rhein,\n in Deutschland. "},
    {"role": "user", "content": "And  Bonn? "},
    {"role": "assistant", "content": "Also on it. é"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Am Rhein too"},
]
SYSTEM = {"role": "system", "content": "Answer briefly."}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"name": "find", "arguments": {"city": "Köln"}}
WITH_TOOLS: Messages = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "On the Rhine"},
    {"role": "assistant", "content": "On the Rhine"},
]

Answer = Callable[[str], str]


def spoken(end: str, change: Answer = str) -> Answer:
    return lambda content: change(content) + end


# What each template makes of a turn of the assistant, written by hand; and what more it writes after the last.
ANSWERS: dict[str, tuple[Answer, str]] = {
    "chatml": (spoken("<|im_end|>"), ""),
    "llama3": (spoken("<|eot_id|>", str.strip), ""),
    "mistral": (lambda content: f" {content}</s>", ""),
    "gemma": (spoken("<end_of_turn>", str.strip), ""),
    "phi3": (spoken("<|end|>"), "\n<|endoftext|>"),
    "qwen": (spoken("<|im_end|>"), ""),
    "trimming": (spoken("</s>", str.strip), ""),
    "marked": (spoken("<|im_end|>"), ""),
    "silent": (spoken("<|im_end|>"), ""),
}


class Generation(Extension):
    """The tag of the markers, which writes what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def rendered(name: str, messages: Messages, **more: Any) -> str:
    """The text by jinja itself."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    eos = "<|endoftext|>" if name == "phi3" else "</s>"
    template = environment.from_string((TEMPLATES / f"{name}.jinja").read_text())
    return template.render(messages=messages, bos_token="<s>", eos_token=eos, **more)


def spans_of(text: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    """Where the answers stand, each looked for after the one before."""
    actual, start = [], 0
    for answer in answers:
        start = text.index(answer, start)
        actual.append((start, start + len(answer)))
        start += len(answer)
    return actual


def expected(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """Special tokens and bytes of a text, each with whether it lies in a span."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    actual, at = [], 0
    for piece in pieces:
        for part in [piece] if piece in SPECIAL else piece:
            learnt = any(a <= at < b for a, b in spans)
            actual += [(part, learnt)] * (1 if part in SPECIAL else len(part.encode()))
            at += len(part)
    return actual


def learnt(tokenizer: Any, messages: Messages, loss_on: Any = "response", **more: Any) -> list[bool]:
    made = ChatTemplate(tokenizer, loss_on, more.pop("system", "template"))
    sample = made.sample(Conversation(tuple(messages), **more))
    for token, label in zip(sample.ids, sample.labels, strict=True):
        assert label in (IGNORE_INDEX, token)
    return [label != IGNORE_INDEX for label in sample.labels]


def tokenizer_for(name: str, **more: Any) -> Any:
    return byte_tokenizer(name, "<|endoftext|>" if name == "phi3" else "</s>", **more)


def answers_of(name: str, messages: Messages) -> list[str]:
    answer, last = ANSWERS[name]
    actual = [answer(m["content"]) for m in messages if m["role"] == "assistant"]
    return [*actual[:-1], actual[-1] + last]


@pytest.mark.parametrize("name", ANSWERS)
def test_all_answers_are_learnt_and_nothing_else(name: str) -> None:
    text = rendered(name, TALK)
    wanted = expected(text, spans_of(text, answers_of(name, TALK)))
    actual = learnt(tokenizer_for(name), TALK)
    assert actual == [own for _, own in wanted]
    assert 0 < sum(actual) < len(actual)
    # also under its other name, and counted by hand: the bytes of the three answers and their ends
    assert learnt(tokenizer_for(name), TALK, "assistant") == actual
    if name == "chatml":
        assert sum(actual) == sum(len(TALK[k]["content"].encode()) + 1 for k in (1, 3, 5))


@pytest.mark.parametrize("name", ANSWERS)
def test_only_the_last_answer_or_every_token(name: str) -> None:
    text = rendered(name, TALK)
    last = spans_of(text, answers_of(name, TALK))[-1:]
    assert learnt(tokenizer_for(name), TALK, "last") == [own for _, own in expected(text, last)]
    assert all(learnt(tokenizer_for(name), TALK, "all"))


@pytest.mark.parametrize("name", ANSWERS)
def test_with_merges_the_learnt_tokens_decode_to_the_answers(name: str) -> None:
    tokenizer = tokenizer_for(name, merges_from=[m["content"] + " Am Rhein answer" for m in TALK] * 4)
    sample = ChatTemplate(tokenizer, "response", "template").sample(Conversation(tuple(TALK)))
    actual = tokenizer.decode([label for label in sample.labels if label != IGNORE_INDEX])
    # a space that ends the prompt may be in one token with the answer's first word
    assert actual.replace(" ", "") == "".join(answers_of(name, TALK)).replace(" ", "")
    assert len(sample.ids) < len(expected(rendered(name, TALK), []))


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "phi3", "qwen", "trimming", "marked"])
def test_a_system_is_written_and_not_learnt(name: str) -> None:
    messages = [SYSTEM, *TALK]
    text = rendered(name, messages)
    assert SYSTEM["content"] in text
    wanted = expected(text, spans_of(text, answers_of(name, messages)))
    assert learnt(tokenizer_for(name), messages) == [own for _, own in wanted]


@pytest.mark.parametrize(
    ("name", "problem"), [("gemma", "System role not supported"), ("silent", "leaves out")]
)
def test_a_template_without_a_system_is_refused_unless_it_is_merged(name: str, problem: str) -> None:
    messages = [SYSTEM, *TALK]
    with pytest.raises(DataError, match=f"row 7.*{problem}.*system = 'merge'"):
        learnt(tokenizer_for(name), messages, location="row 7")
    merged = [{"role": "user", "content": f"{SYSTEM['content']}\n\n{TALK[0]['content']}"}, *TALK[1:]]
    text = rendered(name, merged)
    wanted = expected(text, spans_of(text, answers_of(name, merged)))
    assert learnt(tokenizer_for(name), messages, system="merge") == [own for _, own in wanted]
    with pytest.raises(DataError, match="no turn of a user follows"):
        learnt(tokenizer_for(name), [SYSTEM, TALK[1]], system="merge")


def test_calls_of_tools_are_learnt_and_their_results_are_not() -> None:
    text = rendered("tools", WITH_TOOLS, tools=[TOOL])
    call = f"<tool_call>{json.dumps(CALL, ensure_ascii=False)}</tool_call><|im_end|>"
    first = spans_of(text, [call])
    # the answer repeats the tool's result: the last place is the assistant's
    end = "On the Rhine<|im_end|>"
    last = text.rindex(end)
    wanted = expected(text, [*first, (last, last + len(end))])
    assert learnt(byte_tokenizer("tools"), WITH_TOOLS, tools=(TOOL,)) == [own for _, own in wanted]
    assert '"name": "find", "parameters"' in text


@pytest.mark.parametrize("name", ["chatml", "marked", "llama3"])
def test_a_template_that_drops_calls_of_tools_or_the_tools_is_refused(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    with pytest.raises(DataError, match="leaves out the calls of tools of turn 2"):
        learnt(tokenizer, WITH_TOOLS)
    with pytest.raises(DataError, match="leaves out the tools"):
        learnt(tokenizer, TALK, tools=(TOOL,))


def test_a_template_that_drops_what_the_assistant_or_a_tool_says_is_refused() -> None:
    turn = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    for role, number in (("assistant", 2), ("tool", 3)):
        tokenizer = byte_tokenizer("chatml")
        tokenizer.chat_template = (
            f"{{% for m in messages %}}{{% if m['role'] != '{role}' %}}{turn}{{% endif %}}{{% endfor %}}"
        )
        messages = [{k: v for k, v in m.items() if k != "tool_calls"} for m in WITH_TOOLS]
        messages[1] = {**messages[1], "content": "I look"}
        with pytest.raises(DataError, match=f"leaves out the text of turn {number}, of the {role}"):
            learnt(tokenizer, messages)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("name", ["chatml", "llama3", "marked", "trimming"])
def test_turns_that_a_row_marks_are_not_learnt(name: str, mark: dict[str, Any]) -> None:
    tokenizer, second = byte_tokenizer(name), answers_of(name, TALK)[1]
    places = [i for i, m in enumerate(TALK) if m["role"] == "assistant"]
    messages = [{**m, **mark} if i in (places[0], places[2]) else m for i, m in enumerate(TALK)]
    text = rendered(name, TALK)
    actual = learnt(tokenizer, messages)
    start = text.index(second)
    assert actual == [own for _, own in expected(text, [(start, start + len(second))])]
    assert not any(learnt(tokenizer, messages, "last"))
    with pytest.raises(DataError, match="marked as not learnt"):
        learnt(tokenizer, messages, "all")
    # the marks of the others change nothing
    others = [{**m, "weight": 1, "train": True} if m["role"] == "assistant" else m for m in TALK]
    assert learnt(tokenizer, others) == learnt(tokenizer, TALK)


@pytest.mark.parametrize("name", ["chatml", "llama3", "marked"])
def test_turns_without_text_are_not_learnt_and_noted(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    blank = [TALK[0], {**TALK[1], "content": " "}, *TALK[2:]]
    # as if the row marked the turn
    assert learnt(tokenizer, blank) == learnt(tokenizer, [blank[0], {**blank[1], "weight": 0}, *blank[2:]])
    assert any(learnt(tokenizer, blank))
    assert not any(learnt(tokenizer, blank[:2]))
    (note,) = tokenize(Texts("t", [Conversation(tuple(t)) for t in (blank, TALK)]), tokenizer).notes
    assert note.endswith("turns of the assistant with neither text nor calls of tools are not learnt: 1")


@pytest.mark.parametrize("name", ANSWERS)
def test_the_end_of_a_turn_is_the_special_token_after_the_answer(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    end = tokenizer.convert_tokens_to_ids(ANSWERS[name][0]("x").strip()[1:])
    assert find_turn_end(tokenizer) == end
    # where it is not learnt, it is no end; white space that was added as a token is none
    tokenizer.add_tokens(["  "])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}  \n{% endfor %}"
    assert find_turn_end(tokenizer) is None


def test_keys_of_messages_that_a_template_does_not_read_are_noted() -> None:
    tokenizer = byte_tokenizer("chatml")
    talk = Conversation(tuple({**m, "id": 3, "weight": 1} for m in TALK[:2]))
    notes = tokenize(Texts("t", [talk]), tokenizer, TextSettings("chat", 512)).notes
    assert any("reads no 'id' of the messages" in note for note in notes)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message['content'] ~ message['id'])"
    )
    notes = tokenize(Texts("t", [talk]), tokenizer, TextSettings("chat", 512)).notes
    assert not any("of the messages" in note for note in notes)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    thinking = [
        {**m, "content": f"<think>hm</think>{m['content']}"} if m["role"] == "assistant" else m for m in TALK
    ]
    tokenizer = byte_tokenizer("forgetting")
    tokenizer.name_or_path = "some/model"
    with pytest.raises(
        DataError, match=r"row 3, turn 2: the chat template of 'some/model' rewrites earlier turns"
    ):
        learnt(tokenizer, thinking, location="row 3")
    # the last answer is what the model has to write, whatever became of the earlier ones
    text = rendered("forgetting", thinking)
    answer = f"{thinking[-1]['content']}<|im_end|>"
    wanted = expected(text, spans_of(text, [answer]))
    assert learnt(tokenizer, thinking, "last") == [own for _, own in wanted]
    # without thoughts it rewrites nothing
    assert learnt(tokenizer, TALK) == learnt(byte_tokenizer("chatml"), TALK)


def test_another_prompt_for_generation_is_refused() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    with pytest.raises(DataError, match=r"turn 2: .*writes another prompt when the assistant's text follows"):
        learnt(tokenizer, TALK)


def test_an_assistant_that_begins_has_no_prompt() -> None:
    with pytest.raises(DataError, match="row 1, turn 1: the assistant begins"):
        learnt(byte_tokenizer("chatml"), TALK[1:], location="row 1")
    assert sum(learnt(byte_tokenizer("marked"), TALK[1:])) == sum(learnt(byte_tokenizer("marked"), TALK))


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_earlier_answers_may_belong_to_the_prompt(name: str) -> None:
    text = rendered(name, TALK)
    wanted = expected(text, spans_of(text, answers_of(name, TALK))[1:])
    assert learnt(tokenizer_for(name), TALK, learn_from=2) == [own for _, own in wanted]


def test_what_belongs_to_the_prompt_is_known_after_turns_are_merged_or_left_out() -> None:
    answer = len(f"{TALK[1]['content']}".encode()) + 1
    assert sum(learnt(byte_tokenizer("silent"), [SYSTEM, *TALK[:2]], system="merge", learn_from=2)) == answer
    chat = ChatTemplate(byte_tokenizer("chatml"), "response", "template")
    context = len(expected(rendered("chatml", TALK[2:]), []))
    sample = chat.fit_turns(Conversation(tuple(TALK), learn_from=4), context)
    assert len(sample.ids) == context
    assert sum(label != IGNORE_INDEX for label in sample.labels) == len(TALK[5]["content"]) + 1


def test_a_question_without_an_answer_is_not_all_that_is_kept() -> None:
    chat = ChatTemplate(byte_tokenizer("chatml"), "response", "template")
    sample = chat.fit_turns(Conversation((*TALK[:4], TALK[4])), 10)
    assert sample.ids == chat.sample(Conversation((*TALK[2:4], TALK[4]))).ids


def test_markers_decide_even_where_they_leave_the_end_out() -> None:
    tokenizer = byte_tokenizer("marked")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert sum(learnt(tokenizer, TALK)) == sum(len(TALK[k]["content"].encode()) for k in (1, 3, 5))


def test_tokenizers_that_cannot_do_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="chat template, which this one lacks"):
        ChatTemplate(byte_tokenizer(), "response", "template")
    tokenizer = byte_tokenizer("mistral")
    with pytest.raises(
        DataError, match=r"row 2: the chat template .* fails: conversation roles must alternate"
    ):
        learnt(tokenizer, [TALK[0], TALK[0], TALK[1]], location="row 2")


def test_answers_without_an_end_are_noted() -> None:
    tokenizer = byte_tokenizer("trimming")
    texts = Texts("t", [Conversation(tuple(TALK))])
    assert tokenize(texts, tokenizer).notes == ()
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", "'.'")
    (note,) = tokenize(texts, tokenizer).notes
    assert "in 1 of 1 conversations no special token ends the last answer" in note


# Length


def data_of(messages: Messages, context: int, truncate: Any = "right", **more: Any) -> Any:
    texts = Texts(
        "t", [Conversation(tuple(messages), location="'f', row 1", client="w"), Conversation(tuple(TALK[:2]))]
    )
    settings = TextSettings(context=context, truncate=truncate, **more)
    return tokenize(texts, byte_tokenizer("chatml"), settings)


def decoded(data: Any, row: int = 0) -> str:
    ids, mask = (data.train.x[name][row] for name in ("input_ids", "attention_mask"))
    return str(byte_tokenizer().decode(ids[mask == 1].tolist()))


def test_too_long_conversations() -> None:
    whole = rendered("chatml", TALK)
    tokens = len(expected(whole, []))
    # 3 special tokens fewer than bytes would need
    right, left = data_of(TALK, 100), data_of(TALK, 100, "left")
    assert tokens > 100 >= len(expected(rendered("chatml", TALK[:2]), []))
    assert whole.startswith(decoded(right))
    assert whole.endswith(decoded(left))
    for data, how in ((right, "on the right"), (left, "on the left")):
        assert int(data.train.x["attention_mask"][0].sum()) == 100
        (note,) = data.notes
        assert f"1 of 2 samples are longer than 100 tokens and were truncated {how} (by client: w 1)" in note
    with pytest.raises(DataError, match=f"'f', row 1 has {tokens} tokens, and the context is 100"):
        data_of(TALK, 100, "refuse")
    data_of(TALK, tokens, "refuse")


def test_the_oldest_turns_are_left_out() -> None:
    messages = [SYSTEM, *TALK]
    kept = [SYSTEM, *TALK[2:]]
    context = len(expected(rendered("chatml", kept), []))
    data = data_of(messages, context, "turns")
    assert decoded(data) == rendered("chatml", kept)
    assert data.notes == (
        f"training part of 't': 1 of 2 samples are longer than {context} tokens and lost their oldest turns "
        "(by client: w 1)",
    )
    assert decoded(data_of(messages, context - 1, "turns")) == rendered("chatml", [SYSTEM, *TALK[4:]])
    # the last exchange stays, even if its end has to go
    shortest = rendered("chatml", [SYSTEM, *TALK[4:]])
    cut = decoded(data_of(messages, len(expected(shortest, [])) - 4, "turns"))
    assert cut != shortest
    assert shortest.startswith(cut)


def test_conversations_without_a_token_to_learn_are_dropped_and_counted() -> None:
    long = [{"role": "user", "content": "x" * 200}, TALK[1]]
    data = data_of(long, 80)
    assert len(data.train) == 1
    assert data.notes[-1].endswith("1 of 2 samples dropped: no response token is left (by client: w 1)")


def test_conversations_tokenized_at_once_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer("chatml", merges_from=["Wo liegt Köln? Am Rhein"])
    conversations = [Conversation(tuple(TALK[: 2 * (1 + i % 3)])) for i in range(9)]
    chat = ChatTemplate(tokenizer, "response", "template")
    singles = [chat.sample(conversation, i) for i, conversation in enumerate(conversations)]
    for characters in (1, 200, 1 << 20):
        monkeypatch.setattr(chat_template, "_CHUNK_CHARACTERS", characters)
        pairs = list(chat.samples(iter(conversations)))
        assert [conversation for conversation, _ in pairs] == conversations
        assert [sample for _, sample in pairs] == singles


def test_errors_come_in_the_order_of_the_conversations() -> None:
    """Also where a later conversation is written before an earlier one gets its labels."""
    chat = ChatTemplate(byte_tokenizer("chatml"), "response", "template")
    fine = Conversation(tuple(TALK))
    without_prompt = Conversation(({"role": "assistant", "content": "a"},), location="first")
    unwritten_tools = Conversation(tuple(TALK), (TOOL,), location="second")
    samples = chat.samples([fine, without_prompt, unwritten_tools])
    assert next(samples)[0] is fine
    with pytest.raises(DataError, match="first, turn 1: the assistant begins"):
        next(samples)
    with pytest.raises(DataError, match=r"second: .* leaves out the tools"):
        list(chat.samples([fine, unwritten_tools, without_prompt]))
