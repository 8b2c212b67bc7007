"""Texts from files as they are published, read against the rows that were written into them."""

from __future__ import annotations

import dataclasses
import gzip
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank import data
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.download.data_files import expand_path
from fedlowrank.data.text.passages import Speakers
from fedlowrank.data.text.table import read_file, read_split
from fedlowrank.data.text.text_records import Instruction, Labeled, hold_out
from fedlowrank.data.text.text_sources import CodeAlpaca, Dolly, Gsm8k, Instructions, TextClasses
from tests.data.made_datasets import write

TASKS = [
    {"instruction": f"do {i}", "input": "" if i % 2 else f"with {i}", "output": f"done {i} é"}
    for i in range(10)
]
AS_RECORDS = [Instruction(f"do {i}", f"done {i} é", "" if i % 2 else f"with {i}") for i in range(10)]


# Files


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    actual = CodeAlpaca(write(tmp_path / name, TASKS)).load()
    assert actual.train == AS_RECORDS
    assert (actual.test, actual.notes, actual.kind) == (None, (), "instructions")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "q", "answer": }', r"line 3 is not JSON"),
        (b"[1, 2]", r"line 3 must be an object with named values, not \[1, 2\]"),
        (b'{"question": "q"}', r"line 3 has no 'answer'; it has 'question'"),
        (b'{"question": "q", "answer": 7}', r"line 3: 'answer' must be text, not 7"),
        (b'{"question": ["q"], "answer": "a"}', r"line 3: 'question' must be text"),
        (b'{"question": "\xff", "answer": "a"}', r"not text in UTF-8"),
    ],
)
def test_a_broken_row_is_refused_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    # a byte order mark and blank lines are no rows, but counted
    good = b'{"question": "q", "answer": "a"}\n'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"  \n" + line + b"\n" + good)
    with pytest.raises(DataError, match=r"a\.jsonl.*" + message):
        Gsm8k(str(tmp_path / "a.jsonl")).load()


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 500)[:-12])
    (tmp_path / "no.jsonl.gz").write_bytes(b"plain")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}')
    (tmp_path / "b.json").write_text('{"a": 1}')
    (tmp_path / "c.json").write_text("[{}, 3]")
    (tmp_path / "e.jsonl").write_text("")
    for name, message in {
        "short.jsonl.gz": "cannot read",
        "no.jsonl.gz": "cannot read",
        "a.txt": r"ends in none of \.jsonl",
        "a.json": r"must end in \.jsonl",
        "b.json": "must hold a list of objects",
        "c.json": "row 2 must be an object",
        "gone.jsonl": "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            read_file(tmp_path / name)
    with pytest.raises(DataError, match="holds no rows"):
        Gsm8k(str(tmp_path / "e.jsonl")).load()
    with pytest.raises(DataError, match="is no file"):
        read_file(tmp_path)
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_file(tmp_path / "a.parquet")


def test_home_and_environment_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", TASKS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TEXTS_HERE", str(tmp_path))
    for path in ("~/a.jsonl", "$TEXTS_HERE/a.jsonl", "${TEXTS_HERE}/a.jsonl"):
        assert CodeAlpaca(path).load().train == AS_RECORDS
    monkeypatch.delenv("TEXTS_HERE")
    with pytest.raises(DataError, match=r"variable \$TEXTS_HERE, which is not set"):
        CodeAlpaca("$TEXTS_HERE/a.jsonl").load()
    assert expand_path("owner/name") == "owner/name"


# Sources


def test_gsm8k_from_a_folder_and_from_files(tmp_path: Path) -> None:
    answer = "He has 48/2 = <<48/2=24>>24 <and> 5<<5=5>>.\n#### 24"
    train = write(tmp_path / "train.jsonl.gz", [{"question": "How many?", "answer": answer}])
    test = write(tmp_path / "test.jsonl", [{"question": "And now?", "answer": "#### 1"}])
    both = Gsm8k(str(tmp_path)).load()
    write(tmp_path / "test.json", [])
    with pytest.raises(DataError, match=r"several: test\.jsonl, test\.json\. Name one"):
        Gsm8k(str(tmp_path)).load()
    with pytest.raises(DataError, match="holds no train file"):
        Gsm8k(str(tmp_path.parent)).load()
    assert both.train == [Instruction("How many?", answer)]
    assert both.test == [Instruction("And now?", "#### 1")]
    assert Gsm8k(train).load().test is None
    assert Gsm8k(train, test).load().test == both.test
    stripped = Gsm8k(train, annotations=False).load().train
    assert stripped == [Instruction("How many?", "He has 48/2 = 24 <and> 5.\n#### 24")]


def test_empty_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [dict(task) for task in TASKS]
    for i, empty in ((3, ""), (5, None), (7, " \n\t")):
        rows[i]["output"] = empty
    actual = CodeAlpaca(write(tmp_path / "a.jsonl", rows)).load()
    assert actual.train == [r for i, r in enumerate(AS_RECORDS) if i not in (3, 5, 7)]
    (note,) = actual.notes
    assert "3 of 10 records dropped" in note
    path = write(tmp_path / "a.jsonl", [{**row, "output": ""} for row in rows])
    with pytest.raises(DataError, match="each of the 10 records has an empty response; nothing is left"):
        CodeAlpaca(path).load()


def test_a_missing_input_is_none_and_a_missing_column_is_refused(tmp_path: Path) -> None:
    rows = [{k: v for k, v in task.items() if v} for task in TASKS]
    rows[0]["input"] = None
    actual = CodeAlpaca(write(tmp_path / "a.jsonl", rows)).load().train
    assert actual == [Instruction("do 0", "done 0 é"), *AS_RECORDS[1:]]
    for row in rows:
        row["inptu"] = row.pop("input", "")
    with pytest.raises(DataError, match=r"has no column 'input'. Did you mean 'inptu'\?"):
        CodeAlpaca(write(tmp_path / "a.jsonl", rows)).load()


def test_tasks_by_the_programming_language_that_they_name(tmp_path: Path) -> None:
    tasks = {
        "Write Java code": "Java",
        "Write JavaScript": None,
        "go to Go": "Go",
        "sort in python, not C++": "Python",
        "C# please": "C#",
        "some C++17": "C++",
        "option c": None,
        "in C.": "C",
        "PHP": "PHP",
    }
    rows = [{"instruction": task, "input": "", "output": "x"} for task in tasks]
    actual = CodeAlpaca(write(tmp_path / "a.jsonl", rows), by_language=True).load()
    assert [(r.prompt, r.category) for r in actual.train] == [(t, c) for t, c in tasks.items() if c]
    assert "2 of 9 tasks name none of the nine languages" in actual.notes[0]
    with pytest.raises(DataError, match="no task names one of C, C#"):
        CodeAlpaca(write(tmp_path / "b.jsonl", TASKS), by_language=True).load()


def test_dolly_with_a_category_held_out(tmp_path: Path) -> None:
    kinds = ["qa", "poetry", "qa", "sums"] * 3
    records = [Instruction(f"i{i}", f"r{i}", f"c{i}", kind) for i, kind in enumerate(kinds)]
    names = ("instruction", "response", "context", "category")
    rows = [dict(zip(names, dataclasses.astuple(r), strict=False)) for r in records]
    path = write(tmp_path / "dolly.jsonl", rows)
    actual = Dolly(path, held_out_category="qa").load()
    assert (actual.test, actual.train) == (records[::2], records[1::2])
    with pytest.raises(DataError, match=r"no category 'poetri'. Did you mean 'poetry'\?"):
        Dolly(path, held_out_category="poetri").load()
    with pytest.raises(ConfigError, match="set one of them"):
        Dolly(path, held_out_category="qa", test_share=0.1)
    everything = Dolly(path).load()
    assert (everything.train, everything.test) == (records, None)


@given(n=st.integers(2, 60), share=st.floats(0, 0.99), seed=st.integers(0, 50))
def test_a_test_share_takes_each_record_once(n: int, share: float, seed: int) -> None:
    records = [Instruction(f"{i}", "r") for i in range(n)]
    expected = 0 if share == 0 else max(1, round(share * n))
    if expected >= n:
        with pytest.raises(DataError, match="cannot spare"):
            hold_out(records, share, Key((seed,)))
        return
    train, test = hold_out(records, share, Key((seed,)))
    assert len(test or []) == expected
    train_ids, test_ids = ([int(r.prompt) for r in part] for part in (train, test or []))
    assert (train_ids, test_ids) == (sorted(train_ids), sorted(test_ids))
    assert sorted(train_ids + test_ids) == list(range(n))


def test_a_test_share_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**TASKS[0], "output": f"{i}"} for i in range(100)])
    one, again, other = (CodeAlpaca(path, test_share=0.3, seed=seed).load() for seed in (0, 0, 1))
    assert one.test == again.test
    assert one.test != other.test
    for share in (-0.1, 1, True, float("nan")):
        with pytest.raises(ConfigError, match="test_share"):
            CodeAlpaca(path, test_share=share)


def test_instructions_by_their_columns(tmp_path: Path) -> None:
    rows = [
        {"q": f"q{i}", "a": f"a{i}", "kind": i % 2, "who": None if i == 2 else f"w{i % 3}"} for i in range(4)
    ]
    path, test = write(tmp_path / "a.parquet", rows), write(tmp_path / "t.jsonl", rows[:1])
    actual = Instructions(path, test, prompt="q", response="a", category="kind", client="who").load()
    assert actual.train == [
        Instruction(f"q{i}", f"a{i}", "", str(i % 2), None if i == 2 else f"w{i % 3}") for i in range(4)
    ]
    assert actual.test == actual.train[:1]
    assert actual.name == "a"
    with pytest.raises(ConfigError, match="test and test_share each choose"):
        Instructions(path, test, test_share=0.1)
    with pytest.raises(ConfigError, match="is a file, which has no split 'test'"):
        Instructions(path, test_split="test").load()
    rows[1] |= {"who": 0.5, "kind": None}
    bad = write(tmp_path / "b.jsonl", rows)
    with pytest.raises(DataError, match=r"line 2: 'who' must be text or a whole number, not 0\.5"):
        Instructions(bad, prompt="q", response="a", client="who").load()
    with pytest.raises(DataError, match="line 2 has no 'kind'"):
        Instructions(bad, prompt="q", response="a", category="kind").load()


def test_saved_data_sets_and_folders_of_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    parts = {
        name: datasets.Dataset.from_dict({"text": texts, "label": [1, 0]}, kinds)
        for name, texts in {"train": ["fine", "bad"], "test": ["good", "awful"]}.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    actual = TextClasses(str(tmp_path / "saved"), test_split="test").load()
    assert actual.train == [Labeled("fine", 1), Labeled("bad", 0)]
    assert actual.test == [Labeled("good", 1), Labeled("awful", 0)]
    assert (actual.classes, actual.name) == (("no", "yes"), "saved")
    assert TextClasses(str(tmp_path / "saved")).load().test is None
    with pytest.raises(DataError, match=r"no split 'tset'. Did you mean 'test'\?"):
        TextClasses(str(tmp_path / "saved"), test_split="tset").load()
    with pytest.raises(DataError, match="does not exist"):
        read_split(str(tmp_path / "gone"), None, "train", None)
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", TASKS)
    source = Instructions(str(tmp_path / "files"), input="input", cache=str(tmp_path / "cache"))
    assert source.load().train == AS_RECORDS
    # what cannot be reached, or read, is an error of ours
    (tmp_path / "files" / "train.jsonl").write_text("no json")
    with pytest.raises(DataError, match="datasets cannot read"):
        Instructions(str(tmp_path / "files"), cache=str(tmp_path / "other")).load()


def test_text_classes_joins_columns_and_knows_its_labels(tmp_path: Path) -> None:
    rows = [
        {"title": "One", "body": "two", "label": "b"},
        {"body": "three", "label": "a"},
        {"title": "", "body": "four", "label": "b"},
        {"title": "", "body": " ", "label": "b"},
    ]
    (tmp_path / "news").mkdir()
    path = write(tmp_path / "news" / "train.jsonl", rows)
    actual = TextClasses(path, path, text=("title", "body"), separator=" | ").load()
    assert actual.train == [Labeled("One | two", "b"), Labeled("three", "a"), Labeled("four", "b")]
    assert actual.test == actual.train
    assert actual.kind == "classes"
    assert actual.name == "news"
    assert [note.split(": ")[1] for note in actual.notes] == [
        "1 of 4 records dropped, which have no text"
    ] * 2
    with pytest.raises(DataError, match="line 2 has no 'title'"):
        TextClasses(path, text=("title",)).load()
    with pytest.raises(DataError, match="no column 'head'"):
        TextClasses(path, text=("head", "body")).load()
    with pytest.raises(ConfigError, match=r"a list is needed, such as \['body'\]"):
        TextClasses(path, text="body")  # type: ignore[arg-type]
    for wrong in (None, 0.5, True):
        bad = write(tmp_path / "bad.jsonl", [*rows, {"title": "t", "body": "b", "label": wrong}])
        with pytest.raises(DataError, match="line 5: 'label' must be text or a whole number"):
            TextClasses(bad, text=("title", "body")).load()


def test_optional_libraries_are_imported_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optional = {"transformers", "tokenizers", "datasets", "pyarrow", "peft", "PIL"}
    for file in Path(data.__file__).parent.rglob("*.py"):
        imported = re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
        assert not set(imported) & optional, file
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the library datasets: pip install 'fedlowrank\[language\]'"):
        read_split("owner/name", None, "train", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"needs the library pyarrow: pip install 'fedlowrank\[language\]'"):
        read_file(tmp_path / "a.parquet")


# The authors' own files


@pytest.mark.data
def test_real_texts(real: str) -> None:
    gsm8k = Gsm8k(f"{real}/gsm8k").load()
    assert (len(gsm8k.train), len(gsm8k.test)) == (7473, 1319)
    assert all("\n#### " in r.response for r in gsm8k.train)
    bare = Gsm8k(f"{real}/gsm8k", annotations=False).load()
    assert not any("<<" in r.response for r in [*bare.train, *bare.test])
    code = CodeAlpaca(f"{real}/codealpaca/code_alpaca_2k.jsonl.gz").load()
    assert len(code.train) == 2015
    dolly_texts = Dolly(f"{real}/dolly15k/dolly.jsonl.gz", held_out_category="creative_writing").load()
    assert (len(dolly_texts.train), len(dolly_texts.test)) == (15011 - 709, 709)
    bank = TextClasses(f"{real}/banking77/train.jsonl.gz", f"{real}/banking77/test.jsonl.gz").load()
    assert len({r.label for r in bank.train}) == 77
    shakespeare = Speakers(f"{real}/shakespeare/by_speaker.jsonl.gz", speaker=("play", "speaker")).load()
    assert len({r.client for r in shakespeare.train}) == 1228
