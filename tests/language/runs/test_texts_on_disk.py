"""``data.on_disk``: the same tokens, notes and training bit for bit, without tokens in memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.core.key import Key
from fedlowrank.data.text import table
from fedlowrank.data.text.on_disk.lazy_records import LazyRecords, LineRows, join_records, list_facts
from fedlowrank.data.text.on_disk.mapped_examples import MappedExamples, TensorFile
from fedlowrank.data.text.on_disk.token_file import TokenFile
from fedlowrank.data.text.packing import Sample
from fedlowrank.data.text.rows.text_rows import TextRows
from fedlowrank.data.text.text_records import Instruction, hold_out
from fedlowrank.data.text.tokens import TextSettings, tokenize
from tests.language.text_experiments import make_row_tables, run_rounds
from tests.support.byte_tokenizers import byte_tokenizer

torch.set_num_threads(1)


def write_rows(folder: Path, kind: str) -> list[str]:
    """Two files of rows of several lengths, some of which are dropped or truncated; as JSON lines or parquet."""
    files = []
    for site in (0, 1):
        rows: list[dict[str, Any]] = []
        for i in range(14):
            answer = "" if i == 5 else "the fox " * (1 + i % 4 + 30 * (i == 7))
            rows.append({"prompt": f"who is {i}? é", "completion": answer, "kind": "ab"[i % 2]})
        if kind == "messages":
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": r["prompt"]},
                        {"role": "assistant", "content": r["completion"] + "."},
                    ]
                }
                for r in rows
            ]
        path = folder / f"site{site}.{'parquet' if kind == 'parquet' else 'jsonl'}"
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            # blank lines and a byte order mark
            path.write_text("\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
        files.append(str(path))
    return files


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lines": ("jsonl", {"client_by_file": True}, {"format": "plain", "context": 60}),
    "parquet": ("parquet", {"category_column": "kind"}, {"format": "plain", "context": 60}),
    "left": ("jsonl", {"test_share": 0.2}, {"context": 60, "truncate": "left"}),
    "messages": ("messages", {}, {"context": 60, "truncate": "turns"}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_bit_for_bit(name: str, llama: Path, tmp_path: Path) -> None:
    kind, data, language = CASES[name]
    if kind == "messages":
        llama = shutil.copytree(llama, tmp_path / "base")
        tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
        tokenizer.save_pretrained(llama)
    files = write_rows(tmp_path, kind)
    runs = []
    for on_disk in (False, True):
        tables = make_row_tables(
            llama, {"path": files, "on_disk": on_disk, "cache": str(tmp_path / "cache"), **data}, **language
        )
        if name != "lines":
            tables["partition"] = {"kind": "iid", "clients": 2}
        runs.append(run_rounds(tables))
    plain, mapped = runs
    for one, other in zip(plain.federation.clients, mapped.federation.clients, strict=True):
        for part in ("train", "val", "test"):
            a, b = getattr(one, part), getattr(other, part)
            assert torch.equal(a.y, b.y)
            assert a.x.keys() == b.x.keys()
            assert all(torch.equal(t, b.x[n]) for n, t in a.x.items())
    assert plain.federation.notes == mapped.federation.notes
    assert any("dropped" in note for note in plain.federation.notes) == (kind != "messages")
    assert any("longer than" in note for note in plain.federation.notes)
    assert tree.equal(plain.state.server, mapped.state.server)
    train: Any = mapped.federation.clients[0].train
    assert isinstance(train, MappedExamples)
    # files of tokens have no name, so nothing is left to delete
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_file() and p.stat().st_size]


def is_in_file(t: torch.Tensor) -> bool:
    """Whether the memory of a tensor is a mapped file, by the kernel's table of mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= t.data_ptr() < high:
            return line.split()[4] != "0"
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the table of mappings of Linux")
def test_tokens_of_clients_lie_in_files(llama: Path, tmp_path: Path) -> None:
    tables = make_row_tables(
        llama, {"path": write_rows(tmp_path, "jsonl"), "on_disk": True, "client_by_file": True}, context=60
    )
    federation = ExperimentConfig.parse(tables).federation()
    for client in federation.clients:
        x: Any = client.train.x
        assert all(is_in_file(t) for t in (*x.values(), client.train.y))
    assert not is_in_file(torch.zeros(10))


def test_lazy_records_are_lists() -> None:
    read: list[int] = []

    def make(i: int) -> Instruction:
        return Instruction(f"{i}", category="ab"[i % 2], client=f"site {i // 7}")

    def read_numbers(numbers: np.ndarray) -> Iterator[Instruction]:
        for i in numbers.tolist():
            read.append(i)
            yield make(i)

    plain = [make(i) for i in range(20)]
    lazy = join_records(
        [
            LazyRecords(read_numbers, np.arange(a, b), list_facts(plain[a:b]))
            for a, b in ((0, 7), (7, 7), (7, 20))
        ]
    )
    assert read == []
    assert lazy[9] == plain[9]
    assert lazy[-1] == plain[-1]
    assert read == [9, 19]
    assert list(lazy) == plain
    assert list(lazy[3:17:2]) == plain[3:17:2]
    assert list(lazy.select(np.array([19, 0, 8, 7, 6]))) == [plain[i] for i in (19, 0, 8, 7, 6)]
    assert list(lazy[5:5]) == []
    for share in (0.0, 0.3):
        (train, test), (own_train, own_test) = (hold_out(rows, share, Key((1,))) for rows in (plain, lazy))
        assert list(own_train) == train
        assert (None if own_test is None else list(own_test)) == test
        assert isinstance(own_train, LazyRecords)
        assert own_train.facts.categories.tolist() == [r.category for r in train]
        assert own_train.facts.clients.tolist() == [r.client for r in train]


def test_rows_are_read_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the columns, for what is known of the records, and for their tokens."""
    lines: list[str] = []
    parse = table._parse

    def count_lines(text: str, location: str) -> Any:
        lines.append(location)
        return parse(text, location)

    monkeypatch.setattr(table, "_parse", count_lines)
    for form in ("jsonl", "messages"):
        files = write_rows(tmp_path, form)
        for data in ({"client_by_file": True}, {"category_column": "kind"} if form == "jsonl" else {}):
            lines.clear()
            texts = TextRows(tuple(files), on_disk=True, cache=str(tmp_path), **data).load()
            tokenize(texts, byte_tokenizer("chatml"), TextSettings("auto", 60, truncate="right"))
            counts = Counter(lines)
            assert len(counts) == 28
            # rows without a text are read twice, and the first record also for the kind of all
            empty_count = 2 if form == "jsonl" else 0
            assert sorted(counts.values())[:-1] == [2] * empty_count + [3] * (27 - empty_count)


def test_line_rows_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n\n  \n{"a": 2}\n\xff\xfe\n')

    def parse(line: str, where: str) -> dict[str, Any]:
        actual: dict[str, Any] = json.loads(line)
        return actual

    rows = LineRows(file, parse)
    assert [rows[0], rows[1]] == [{"a": 1}, {"a": 2}]
    assert rows.lines.tolist() == [1, 4, 5]
    with pytest.raises(DataError, match=r"rows\.jsonl', line 5 is not text in UTF-8"):
        rows[2]


def test_what_cannot_lie_on_disk_is_refused(llama: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,completion\na,b\n")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) for _ in range(8)))
    lines = write_rows(tmp_path, "jsonl")
    for path, language, error, words in (
        (str(rows), {}, DataError, r"data\.on_disk reads \.jsonl and \.parquet"),
        (str(pairs), {}, ConfigError, r"not for rows of the kind 'preferences'"),
        (lines, {"packing": True}, ConfigError, r"not for language\.packing"),
    ):
        tables = make_row_tables(llama, {"path": path, "on_disk": True}, **language)
        tables["partition"] = {"kind": "iid", "clients": 2}
        with pytest.raises(error, match=words):
            ExperimentConfig.parse(tables).federation()
    with pytest.raises(DataError, match="tokens cannot be written to a file"):
        TensorFile(tmp_path / "missing")


def test_taken_rows_are_those_of_the_tensors(tmp_path: Path) -> None:
    ids = torch.arange(5000 * 3).reshape(5000, 3)
    examples = MappedExamples({"input_ids": ids, "attention_mask": ids + 1}, ids + 2, folder=tmp_path)
    index = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:3333]
    taken: Any = examples.take(index)
    assert torch.equal(taken.y, ids[index] + 2)
    assert torch.equal(taken.x["attention_mask"], ids[index] + 1)
    assert len(examples.take(index[:0])) == 0


def test_a_full_disk_is_an_error_with_the_folder(tmp_path: Path) -> None:
    file = TensorFile(tmp_path)
    with file:
        file.write(np.arange(6).reshape(2, 3)[:, ::2])
        assert file.map((2, 2)).tolist() == [[0, 2], [3, 5]]
    with Path("/dev/full").open("wb", buffering=0) as full:
        file._file = full
        with pytest.raises(DataError, match=f"tokens cannot be written to a file in '{tmp_path}'"):
            file.write(np.zeros(1 << 16, np.int64))


@pytest.mark.parametrize("tokens", [100, 20_000], ids=["buffered", "written"])
def test_tokens_beyond_the_largest_file_are_an_error_with_the_folder(tmp_path: Path, tokens: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal of a file that grows beyond the limit, and raises OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(DataError, match=f"tokens cannot be written to a file in '{tmp_path}'"):
            TokenFile([Sample([1] * tokens, [1] * tokens)], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
