"""Which files of a model folder its digest is of, and how two bases are compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fedlowrank.core.errors import DataError
from fedlowrank.storage.base_files import (
    combine_file_digests,
    compare_base_files,
    digest_base_files,
    find_base_files,
)

OTHERS = ("README.md", "generation_config.json", "training_args.bin", "optimizer.pt", "pytorch_model.bin")


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(f"content of {name}")
    return folder


def test_weights_layers_and_tokens_count_and_nothing_else(tmp_path: Path) -> None:
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    write(tmp_path, *names, *OTHERS, "vocab.json", "merges.txt")
    expected = {n: hashlib.blake2b(f"content of {n}".encode(), digest_size=16).hexdigest() for n in names}
    assert digest_base_files(tmp_path) == expected
    assert list(digest_base_files(tmp_path)) == sorted(names)


def test_a_vocabulary_counts_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "pytorch_model.bin", "vocab.json", "merges.txt", "special_tokens_map.json")
    expected = ["config.json", "merges.txt", "pytorch_model.bin", "special_tokens_map.json", "vocab.json"]
    assert find_base_files(tmp_path) == expected


def test_of_weights_in_several_files_all_that_the_index_names_count(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write(tmp_path, "config.json", "model-00009-of-00009.safetensors", *shards)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}))
    assert find_base_files(tmp_path) == ["config.json", *shards, index.name]
    before = digest_base_files(tmp_path)
    (tmp_path / shards[1]).write_text("other")
    assert compare_base_files(digest_base_files(tmp_path), before) == f"{shards[1]} differs"
    (tmp_path / shards[1]).unlink()
    with pytest.raises(DataError, match=rf"the file {shards[1]} of the base model cannot be read"):
        digest_base_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(DataError, match="is no index of weights"):
        digest_base_files(tmp_path)


def test_a_comparison_names_the_files_and_no_text_that_breaks_a_line() -> None:
    ours = {"a": "1", "b": "2"}
    assert compare_base_files(ours, ours) == ""
    assert compare_base_files({"b": "3", "c": "4"}, ours) == "a is missing, b differs, c is not expected"
    assert compare_base_files({**ours, "x\ny": "1"}, ours) == "a file with an invalid name is not expected"
    many = {str(i): "" for i in range(9)}
    assert compare_base_files(many, {}).endswith("4 is not expected and 4 more files")


def test_the_digest_of_all_files_depends_on_names_and_contents_and_not_on_their_order() -> None:
    assert combine_file_digests({"a": "1", "b": "2"}) == combine_file_digests({"b": "2", "a": "1"})
    digests = {combine_file_digests(f) for f in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"})}
    assert len(digests) == 4
    assert combine_file_digests({}) == ""
