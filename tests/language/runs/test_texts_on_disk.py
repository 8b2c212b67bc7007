"""``data.on_disk``: the same tokens, notes and training bit for bit, without tokens in memory."""

from __future__ import annotations

import json
import shutil
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
from fedlowrank.data.text.on_disk.lazy_records import LazyList, LineRows, join_lists
from fedlowrank.data.text.on_disk.mapped_examples import MappedExamples, map_tensor
from fedlowrank.data.text.text_records import hold_out
from tests.language.text_experiments import make_row_tables, run_rounds

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


def test_lazy_lists_are_lists() -> None:
    read: list[int] = []

    def square(i: int) -> int:
        read.append(i)
        return i * i

    plain = [i * i for i in range(20)]
    lazy = join_lists([LazyList(square, np.arange(a, b)) for a, b in ((0, 7), (7, 7), (7, 20))])
    assert read == []
    assert lazy[9] == 81
    assert read == [9]
    assert list(lazy) == plain
    assert list(lazy[3:17:2]) == plain[3:17:2]
    for share in (0.0, 0.3):
        (train, test), (own_train, own_test) = (hold_out(rows, share, Key((1,))) for rows in (plain, lazy))
        assert list(own_train) == train
        assert (None if own_test is None else list(own_test)) == test
        assert isinstance(own_train, LazyList)


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
    with pytest.raises(DataError, match="no file for tokens can be made"):
        map_tensor((2, 3), tmp_path / "missing")


def test_taken_rows_are_those_of_the_tensors(tmp_path: Path) -> None:
    ids = torch.arange(5000 * 3).reshape(5000, 3)
    examples = MappedExamples({"input_ids": ids, "attention_mask": ids + 1}, ids + 2, folder=tmp_path)
    index = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:3333]
    taken: Any = examples.take(index)
    assert torch.equal(taken.y, ids[index] + 2)
    assert torch.equal(taken.x["attention_mask"], ids[index] + 1)
    assert len(examples.take(index[:0])) == 0
