"""Forms of rows, in real files that other libraries write."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.text.rows.row_forms import FORMS
from fedlowrank.data.text.rows.text_rows import TextRows
from fedlowrank.data.text.text_records import Conversation, Instruction, Labeled, Preference, TokenLabeled

library = pytest.importorskip("datasets")
library.disable_progress_bars()

USER, ANSWER, OTHER = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "assistant", "content": "no"},
)
SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
TALK = (USER, ANSWER)


def read(folder: Path, rows: list[dict[str, Any]], name: str = "a.jsonl", **more: Any) -> Any:
    """The texts of a file, which the libraries' own writers make."""
    file = folder / name
    if name.endswith(".parquet"):
        library.Dataset.from_list(rows).to_parquet(str(file))
    elif name.endswith((".csv", ".tsv")):
        library.Dataset.from_list(rows).to_csv(str(file), sep="\t" if name.endswith("tsv") else ",")
    else:
        text = (
            json.dumps(rows) if ".json" in name and ".jsonl" not in name else "\n".join(map(json.dumps, rows))
        )
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return TextRows(str(file), cache=str(folder / "cache"), **more).load()


def fields(conversation: Conversation) -> Any:
    return conversation.messages, conversation.tools, conversation.learn_from


@pytest.mark.parametrize(
    ("form", "row", "wanted"),
    [
        ("messages", {"messages": [USER, ANSWER]}, (TALK, (), 0)),
        ("messages", {"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, (TALK, ({"name": "f"},), 0)),
        ("messages", {"messages": [USER, ANSWER], "tools": '[{"name": "f"}]'}, (TALK, ({"name": "f"},), 0)),
        ("conversations", {"conversations": SAID}, (TALK, (), 0)),
        (
            "conversations",
            {"conversations": SAID, "system": "be brief"},
            (({"role": "system", "content": "be brief"}, *TALK), (), 0),
        ),
        ("prompt_completion", {"prompt": [USER], "completion": [ANSWER]}, (TALK, (), 1)),
        ("prompt_completion", {"prompt": "hi ", "completion": "hello"}, Instruction("hi ", "hello")),
        ("alpaca", {"instruction": "do", "input": "it", "output": "done"}, Instruction("do", "done", "it")),
        ("alpaca", {"instruction": "do", "response": "done"}, Instruction("do", "done")),
        (
            "alpaca",
            {"instruction": "do", "context": "it", "response": "done"},
            Instruction("do", "done", "it"),
        ),
        ("text", {"text": "once"}, Instruction("", "once")),
        ("labels", {"text": "good", "label": 1}, Labeled("good", 1)),
        ("labels", {"text": "good", "label": "yes"}, Labeled("good", "yes")),
    ],
)
def test_a_form_is_recognized_and_said(tmp_path: Path, form: str, row: dict[str, Any], wanted: Any) -> None:
    actual = read(tmp_path, [row, row])
    assert len(actual.train) == 2
    assert (fields(actual.train[0]) if isinstance(wanted, tuple) else actual.train[0]) == wanted
    assert f"a.jsonl: rows are of the form {form!r}" in actual.notes[0]
    assert actual.notes[0].endswith("recognized by its columns")
    # as set by the user
    again = read(tmp_path, [row, row], form=form)
    assert again.notes[0].endswith("set by data.form")
    assert len(again.train) == 2
    verbatim = dict.fromkeys(("prompt_completion", "preference"), "verbatim")
    assert {**verbatim, "text": "none"}.get(form) == actual.format


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        # a prompt beside lists that contain it
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ],
)
def test_pairs_of_messages(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = read(tmp_path, [row]).train
    assert isinstance(pair, Preference)
    assert fields(pair.chosen) == ((USER, ANSWER), (), 1)
    assert fields(pair.rejected) == ((USER, OTHER), (), 1)


def test_pairs_of_texts(tmp_path: Path) -> None:
    (pair,) = read(tmp_path, [{"prompt": "hi", "chosen": [ANSWER], "rejected": [OTHER]}]).train
    assert fields(pair.chosen) == (({"role": "user", "content": "hi"}, ANSWER), (), 1)
    assert fields(pair.rejected) == (({"role": "user", "content": "hi"}, OTHER), (), 1)
    texts = read(tmp_path, [{"prompt": "hi", "chosen": "hello", "rejected": "no"}])
    (pair,) = texts.train
    assert (pair.chosen, pair.rejected) == (Instruction("hi", "hello"), Instruction("hi", "no"))
    # as TRL writes them, and as prompts with completions are written
    assert texts.format == "verbatim"


def test_labels_of_words_with_the_names_of_a_saved_data_set(tmp_path: Path) -> None:
    names = library.ClassLabel(names=["O", "PER"])
    kinds = library.Features(
        {"tokens": library.List(library.Value("string")), "ner_tags": library.List(names)}
    )
    rows = {"tokens": [["Ann", "ran"], ["no"]], "ner_tags": [[1, 0], [0]]}
    library.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "saved"))
    actual = TextRows(str(tmp_path / "saved")).load()
    assert [(r.words, r.labels) for r in actual.train] == [(("Ann", "ran"), (1, 0)), (("no",), (0,))]
    assert isinstance(actual.train[0], TokenLabeled)
    assert actual.classes == ("O", "PER")
    assert "form 'token_labels'" in actual.notes[0]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet", "a.csv", "a.tsv"]
)
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    rows = [{"instruction": f"do {i}, é", "output": f"done\n{i}", "who": f"c{i % 2}"} for i in range(4)]
    actual = read(tmp_path, rows, name, client_column="who", category_column="who")
    assert actual.train == [
        Instruction(f"do {i}, é", f"done\n{i}", category=f"c{i % 2}", client=f"c{i % 2}") for i in range(4)
    ]
    assert actual.name == "a"


def test_messages_survive_parquet_which_fills_in_nulls(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "x": "1"}}]}
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, call, {"role": "tool", "content": "r"}, ANSWER]},
    ]
    for name in ("a.parquet", "a.jsonl"):
        plain, calling = read(tmp_path, rows, name).train
        assert plain.messages == TALK
        assert calling.messages[1] == {**call, "content": ""}


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    parts = {
        name: library.Dataset.from_list([{"text": f"{name} {i}"} for i in range(2)])
        for name in ("train", "dev")
    }
    library.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    actual = TextRows(str(tmp_path / "saved"), test_split="dev").load()
    assert [r.response for r in actual.train] == ["train 0", "train 1"]
    assert [r.response for r in actual.test] == ["dev 0", "dev 1"]
    assert TextRows(str(tmp_path / "saved"), train_split="dev").load().test is None
    with pytest.raises(DataError, match="no split 'test'"):
        TextRows(str(tmp_path / "saved"), test_split="test").load()


def files(folder: Path) -> Path:
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(2))
        )
    return folder


def test_a_client_is_a_file_of_a_folder_a_pattern_or_a_list(tmp_path: Path) -> None:
    folder = files(tmp_path / "sites")
    (folder / "readme.md").write_text("no rows")
    listed = (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    for path in (str(folder), str(folder / "*.jsonl"), listed):
        actual = TextRows(path, client_by_file=True).load()
        assert [(r.response, r.client) for r in actual.train] == [
            ("a0", "a"),
            ("a1", "a"),
            ("b0", "b"),
            ("b1", "b"),
        ]
        assert actual.name == "sites" or path == str(folder)
        assert "2 files" in actual.notes[0]
    # without it they are one data set
    assert {r.client for r in TextRows(listed).load().train} == {None}


def test_a_test_part_by_share_or_file(tmp_path: Path) -> None:
    rows = [{"text": f"{i}"} for i in range(10)]
    actual = read(tmp_path, rows, test_share=0.3, seed=1)
    assert (len(actual.train), len(actual.test)) == (7, 3)
    (tmp_path / "t.csv").write_text("text\nheld out\n")
    actual = read(tmp_path, rows, test=str(tmp_path / "t.csv"))
    assert [r.response for r in actual.test] == ["held out"]


MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        "line 2 has no turn of the assistant to learn. Drop",
    ),
    (
        {"messages": [USER, ANSWER]},
        {"messages": []},
        "line 2: 'messages' must be a list of at least one message",
    ),
    ({"messages": [USER, ANSWER]}, {"messages": None}, "line 2 has no 'messages'"),
    (
        {"messages": [USER, ANSWER]},
        {"messages": [{"content": "x"}]},
        "line 2: 'messages', turn 1 has no 'role'",
    ),
    (
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "content": [{"type": "image"}]}]},
        "turn 2: 'content'",
    ),
    *(
        ({"messages": [USER, ANSWER]}, {"messages": [USER, {"role": "assistant", **more}]}, message)
        for more, message in (
            ({}, "turn 2, of the assistant, has no 'content' and no 'tool_calls'; it has nothing else"),
            (
                {"content": None, "tool_calls": []},
                "turn 2, .* has no 'content' and no 'tool_calls'; it has 'tool_calls'",
            ),
            ({"text": "x"}, "turn 2, of the assistant, has no 'content' .* it has 'text'"),
        )
    ),
    (
        {"conversations": SAID},
        {"conversations": [SAID[0], {**SAID[1], "content": "x"}]},
        "turn 2 has two texts, in 'value' and in 'content'",
    ),
    (
        {"conversations": SAID},
        {"conversations": [SAID[0], {"from": "gpt", "content": [1]}]},
        "turn 2: 'content' must be text",
    ),
    (
        {"conversations": SAID},
        {"conversations": [{"from": "cat", "value": "x"}]},
        "turn 1 is from 'cat', which is none",
    ),
    (
        {"messages": [USER, ANSWER], "tools": "[]"},
        {"messages": [USER, ANSWER], "tools": "{"},
        "line 2: 'tools' is not",
    ),
    (
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": "b", "input": "c", "context": "d"},
        "line 2 has both 'input' and 'context'",
    ),
    (
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": [ANSWER]},
        "line 2: 'prompt' and 'completion' must",
    ),
    (
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": None},
        "line 2 has no 'completion'; it has",
    ),
    (
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": None},
        "line 2 has no 'output' or 'response'",
    ),
    (
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": "b", "response": "c"},
        "line 2 needs one of 'output' or 'response', and has several",
    ),
    (
        {"chosen": "a", "rejected": "b", "prompt": "x"},
        {"chosen": "a", "rejected": "b"},
        "line 2 has no 'prompt', and",
    ),
    (
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        "line 2: 'chosen' and 'rejected' differ in no turn",
    ),
    (
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [OTHER]},
        "line 2: 'chosen' and 'rejected' begin with different turns",
    ),
    (
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "weight": 0}]},
        "line 2 has no turn of the assistant to learn",
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]},
        "line 2 has no turn of the assistant to learn",
    ),
    (
        {"messages": [USER, {**ANSWER, "train": True}]},
        {"messages": [{**USER, "train": True}, ANSWER]},
        "turn 1 has 'train': true, but turns of the user are not learnt",
    ),
    (
        {"messages": [USER, {**ANSWER, "weight": 1}]},
        {"messages": [USER, {**ANSWER, "weight": 0.5}]},
        "turn 2: 'weight' is 0.5; it is 1 for a turn to learn, or 0",
    ),
    (
        {"messages": [USER, {**ANSWER, "train": True}]},
        {"messages": [USER, {**ANSWER, "train": "no"}]},
        "turn 2: 'train' is 'no'; it is true",
    ),
    (
        {"tokens": ["a"], "ner_tags": [0]},
        {"tokens": ["a", "b"], "ner_tags": [0]},
        "line 2: 'ner_tags' must hold .* 2 'tokens'",
    ),
    ({"text": "a", "label": 1}, {"text": "a", "label": None}, "line 2 has no 'label'"),
    # json.dumps writes half of a surrogate pair as an escape
    *(
        (good, {**good, column: value}, rf"line 2: '{column}' holds '\\ud83d', which is half of a surrogate")
        for good, column, value in (
            ({"prompt": "a", "completion": "b"}, "prompt", "hi \ud83d"),
            ({"prompt": "a", "completion": "b"}, "completion", "\ud83d hi"),
            ({"instruction": "a", "output": "b"}, "input", "\ud83d"),
            ({"text": "a"}, "text", "\ud83d"),
            ({"text": "a", "label": "b"}, "label", "\ud83d"),
            ({"tokens": ["a"], "ner_tags": [0]}, "tokens", ["\ud83d"]),
            ({"anchor": "a", "positive": "b"}, "positive", "\ud83d"),
            ({"prompt": "x", "chosen": "a", "rejected": "b"}, "rejected", "\ud83d"),
            ({"prompt": "x", "chosen": "a", "rejected": "b"}, "prompt", "\ud83d"),
            ({"messages": [USER, ANSWER]}, "messages", [USER, {**ANSWER, "content": "\ud83d"}]),
            ({"messages": [USER, ANSWER]}, "messages", [USER, {**ANSWER, "thinking": ["\ud83d"]}]),
            ({"conversations": SAID}, "conversations", [{"from": "human", "value": "\ud83d"}, SAID[1]]),
            ({"messages": [USER, ANSWER], "tools": [{"a": 1}]}, "tools", [{"\ud83d": 1}]),
            # an escape in JSON that is text in JSON
            ({"messages": [USER, ANSWER], "tools": "[]"}, "tools", '["\\ud83d"]'),
        )
    ),
    *(
        (
            {"conversations": SAID},
            {"conversations": [{**SAID[0], key: value}, SAID[1]]},
            f"line 2: 'conversations', turn 1: '{key}' {problem}",
        )
        for key, value, problem in (
            ("from", ["h"], r"must be text, not \['h'\]"),
            ("from", {"h": 1}, "must be text, not"),
            ("from", 5, "must be text, not 5"),
            ("value", 5, "must be text, or a list of parts of type 'text', not 5"),
            ("value", [{"type": ["text"]}], "must be text, or a list of parts"),
            ("weight", ["h"], r"is \['h'\]; it is 1 for a turn to learn, or 0"),
            ("weight", {"h": 1}, "is .* it is 1 for a turn to learn, or 0"),
        )
    ),
    *(
        ({"messages": [USER, ANSWER]}, {"messages": [{**USER, key: value}, ANSWER]}, f"turn 1: '{key}' must")
        for key, value in (("role", ["h"]), ("role", {"h": 1}), ("content", 5), ("content", [["h"]]))
    ),
    ({"text": "a", "label": 1}, {"text": "a", "label": 1.5}, "'label' must be text or a whole number"),
    (
        {"text": "a", "label": 1},
        {"text": "a", "label": 1 << 63},
        "'label' must be text or a whole number of 64",
    ),
    (
        {"tokens": ["a"], "labels": [1]},
        {"tokens": ["a"], "labels": [-(1 << 63) - 1]},
        "line 2: 'labels' must hold a name or whole number",
    ),
]


@pytest.mark.parametrize(("good", "bad", "message"), MISFITS)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, good: Any, bad: Any, message: str) -> None:
    assert len(read(tmp_path, [good]).train) == 1
    for on_disk in (False, True):
        with pytest.raises(DataError, match=r"b\.jsonl.*" + message):
            read(tmp_path, [good, bad], "b.jsonl", on_disk=on_disk)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("columns", [("chosen", "rejected"), ("completion",)])
def test_rows_of_texts_and_of_messages_are_named(
    columns: tuple[str, ...], on_disk: bool, tmp_path: Path
) -> None:
    text = {"prompt": "a", **{column: f"b {column}" for column in columns}}
    messages = {"prompt": [USER], **{column: [ANSWER, USER, OTHER] for column in columns}}
    for rows, text_line, message_line in (
        ([text, text, messages], 1, 3),
        ([messages, text, messages], 2, 1),
    ):
        with pytest.raises(
            DataError, match=rf"text in some rows \(.*a\.jsonl', line {text_line}\) .*, line {message_line}\)"
        ):
            read(tmp_path, rows, on_disk=on_disk)


def test_files_of_texts_and_of_messages_are_named(tmp_path: Path) -> None:
    rows = (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    )
    for name, row in zip("ab", rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        DataError, match=r"as in '.*a\.jsonl'.* lists of messages in others \(as in '.*b\.jsonl"
    ):
        TextRows(str(tmp_path / "*.jsonl")).load()


@pytest.mark.parametrize("on_disk", [False, True])
def test_whole_numbers_with_too_many_digits_are_refused(tmp_path: Path, on_disk: bool) -> None:
    row = '{"prompt": "a", "completion": "b", "id": ' + "1" * 5000 + "}"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n' + row + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl', line 3 has a whole number of more than 4300 digits"):
        TextRows(str(tmp_path / "a.jsonl"), on_disk=on_disk).load()
    tools = {"messages": [USER, ANSWER], "tools": "[" + "1" * 5000 + "]"}
    (tmp_path / "b.jsonl").write_text(json.dumps(tools))
    with pytest.raises(DataError, match=r"b\.jsonl', line 1: 'tools' has a whole number of more than 4300"):
        TextRows(str(tmp_path / "b.jsonl"), on_disk=on_disk).load()
    (tmp_path / "c.json").write_text('[{"text": "a"},\n{"text": "b", "id": -' + "1" * 5000 + "}]")
    with pytest.raises(DataError, match=r"c\.json' has a whole number .* digits, at line 2 column 21\."):
        TextRows(str(tmp_path / "c.json")).load()
    (tmp_path / "d.csv").write_text("text,label\na," + "1" * 5000 + "\n")
    # labels of more digits than an int64 has are names
    assert TextRows(str(tmp_path / "d.csv")).load().train == [Labeled("a", "1" * 5000)]


def test_pairs_of_surrogates_are_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "completion": "\u00e9\U0001f600"}')
    assert read(tmp_path, [{"text": "\U0001f600"}], "b.jsonl").train[0].response == "\U0001f600"
    assert TextRows(str(tmp_path / "a.jsonl")).load().train == [Instruction("\U0001f600", "\u00e9\U0001f600")]
    # a column that is not read may hold anything
    assert len(read(tmp_path, [{"text": "a", "id": "\ud83d"}], "c.jsonl").train) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"'a', 'b'|columns a, b, which are of no known form.*alpaca: instruction"
    ):
        read(tmp_path, [{"a": 1, "b": 2}])
    with pytest.raises(DataError, match=r"no column 'messages', which rows of the form 'messages' have"):
        read(tmp_path, [{"text": "x"}], form="messages")
    with pytest.raises(DataError, match="line 2 names no client in 'who'"):
        read(tmp_path, [{"text": "x", "who": "a"}, {"text": "x"}], client_column="who")
    with pytest.raises(DataError, match="Leave category_column 'who' out"):
        read(tmp_path, [{"text": "x", "label": 0, "who": "a"}], category_column="who")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": }\n')
    with pytest.raises(DataError, match=r"bad\.jsonl.*, line 2 is not JSON"):
        TextRows(str(tmp_path / "bad.jsonl")).load()
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"ends in none of \.parquet"):
        TextRows(str(tmp_path / "x.txt")).load()
    with pytest.raises(DataError, match="no file fits the pattern"):
        TextRows(str(tmp_path / "*.none")).load()
    folder = files(tmp_path / "sites")
    (folder / "c.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}))
    with pytest.raises(
        DataError, match=r"different forms: 'text' as in .*a\.jsonl.*'alpaca' as in .*c\.jsonl"
    ):
        TextRows(str(folder), client_by_file=True).load()
    with pytest.raises(DataError, match="prompts are text in some rows"):
        read(tmp_path, [{"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [ANSWER]}])
    for more in (
        {"test": "a", "test_share": 0.1},
        {"client_by_file": True, "client_column": "a"},
        {"client_by_file": True, "test": "b"},
        {"form": "none"},
    ):
        with pytest.raises(ConfigError):
            TextRows("a", **more)


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    row = {"instruction": "a", "output": "b", "id": 1, "who": "x", "history": None}
    actual = read(tmp_path, [row, row], client_column="who")
    assert actual.notes[0].endswith("recognized by its columns; not read: id")


def test_rows_without_text_are_dropped_and_counted(tmp_path: Path) -> None:
    actual = read(tmp_path, [{"text": "a"}, {"text": " "}, {"text": "b"}])
    assert [r.response for r in actual.train] == ["a", "b"]
    assert actual.notes[1].endswith("1 of 3 rows dropped, which have no text to learn")


SILENT = {**ANSWER, "content": " "}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("kept", "dropped"),
    [
        ({"messages": [USER, ANSWER]}, {"messages": [USER, SILENT]}),
        (
            {"messages": [USER, SILENT, USER, ANSWER]},
            {"messages": [USER, SILENT, USER, {**SILENT, "content": ""}]},
        ),
        ({"messages": [USER, CALL]}, {"messages": [USER, {**ANSWER, "weight": 0}, USER, SILENT]}),
        ({"conversations": SAID}, {"conversations": [SAID[0], {"from": "gpt", "value": ""}]}),
        (
            {"prompt": [USER], "completion": [ANSWER]},
            {"prompt": [USER, ANSWER, USER], "completion": [SILENT]},
        ),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [SILENT]},
        ),
        ({"prompt": "hi", "chosen": "a", "rejected": "b"}, {"prompt": "hi", "chosen": "", "rejected": "b"}),
    ],
)
def test_rows_whose_answers_are_blank_are_dropped_and_counted(
    tmp_path: Path, kept: dict[str, Any], dropped: dict[str, Any], on_disk: bool
) -> None:
    alone = read(tmp_path, [kept], on_disk=on_disk)
    actual = read(tmp_path, [kept, dropped], on_disk=on_disk)
    (first,), (second,) = ([*texts.train] for texts in (alone, actual))
    assert repr(first) == repr(second)
    assert len(alone.notes) == 1
    assert actual.notes[1].endswith("1 of 2 rows dropped, which have no text to learn")


def test_a_turn_may_have_the_other_key_of_the_text(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "value": "hi"},
        {"from": "gpt", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    (actual,) = read(tmp_path, [{"messages": turns}]).train
    assert fields(actual) == (TALK, (), 0)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    "marks", [(True, False), (True, True), (1, 0), ("True", "False"), ("true", None), (1.0, 0.0)]
)
def test_completions_that_are_marked_as_bad_are_refused(
    tmp_path: Path, marks: tuple[Any, Any], on_disk: bool
) -> None:
    rows = [{"prompt": "hi", "completion": "a", "label": mark} for mark in marks]
    with pytest.raises(
        DataError, match=r"a\.jsonl' has a 'label' of .* which tells good completions from bad ones"
    ):
        read(tmp_path, rows, on_disk=on_disk)
    # a column of categories
    categories = [{**row, "label": value} for row, value in zip([*rows, *rows], (0, 1, 2, 1), strict=True)]
    assert len(read(tmp_path, categories, on_disk=on_disk).train) == 4


@pytest.mark.parametrize("cells", ["True False", "1 0"])
def test_cells_that_mark_completions_are_refused(tmp_path: Path, cells: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion,label\n" + "".join(f"hi,a,{cell}\n" for cell in cells.split()))
    with pytest.raises(DataError, match="which tells good completions from bad ones"):
        TextRows(str(file)).load()


def test_every_form_has_its_setting_and_the_base_package_needs_no_datasets() -> None:
    choices = TextRows.__annotations__["form"]
    assert all(f'"{name}"' in choices or f"'{name}'" in choices for name in FORMS)
    code = "import sys, fedlowrank.data.text.text_sources; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("ending", "between"), [(".csv", ","), (".tsv", "\t"), (".csv.gz", ",")])
def test_cells_of_a_table_are_texts(tmp_path: Path, ending: str, between: str) -> None:
    rows = [
        ("text", "label"),
        ("NA", "00"),
        ("null", "01"),
        ("12", "00"),
        ("2020-01-01", "01"),
        ("true", "00"),
    ]
    content = "".join(between.join(row) + "\n" for row in rows)
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content.encode()) if ending.endswith("gz") else content.encode())
    actual = TextRows(str(path), test_share=0.0).load()
    assert [r.text for r in actual.parts[0]] == [text for text, _ in rows[1:]]
    assert [r.label for r in actual.parts[0]] == [label for _, label in rows[1:]]


def test_labels_that_are_whole_numbers_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,2\nb,10\n")
    actual = TextRows(str(tmp_path / "a.csv"), test_share=0.0).load()
    assert [r.label for r in actual.parts[0]] == [2, 10]


def test_labels_are_numbers_only_if_those_of_all_files_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,02\nc,A1\n")
    (tmp_path / "b.csv").write_text("text,label\nd,02\ne,1\n")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    tested = TextRows(files[0], test=files[1]).load()
    assert [[r.label for r in part] for part in tested.parts] == [["1", "02", "A1"], ["02", "1"]]
    joined = TextRows(files, test_share=0.0).load()
    assert [r.label for r in joined.parts[0]] == ["1", "02", "A1", "02", "1"]


def test_lines_are_read_as_they_are(tmp_path: Path) -> None:
    question = {"role": "user", "content": "2020-01-01"}
    rows = [{"messages": [question, {"role": "assistant", "content": "2020-01-02T00:00"}]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts: Any = TextRows(str(tmp_path / "a.jsonl"), test_share=0.0).load().parts
    assert parts[0][0].messages[1]["content"] == "2020-01-02T00:00"
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no rows"):
        TextRows(str(tmp_path / "empty.jsonl")).load()


def test_numbers_of_classes_in_other_orders_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name, order in (("a", ["neg", "pos"]), ("b", ["pos", "neg"])):
        rows = datasets.Dataset.from_dict({"text": ["bad", "good"], "label": ["neg", "pos"]})
        kind = datasets.ClassLabel(names=order)
        rows.cast_column("label", kind).to_parquet(str(tmp_path / f"{name}.parquet"))
    with pytest.raises(DataError, match="names are in different orders"):
        TextRows(str(tmp_path / "*.parquet"), client_by_file=True).load()
    with pytest.raises(DataError, match="names are in different orders"):
        TextRows(str(tmp_path / "b.parquet"), classes=("neg", "pos")).load()
