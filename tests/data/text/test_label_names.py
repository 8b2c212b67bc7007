"""Labels and the names of classes where both may be whole numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fedlowrank.core.errors import DataError
from fedlowrank.core.key import Key
from fedlowrank.data.dataset import Dataset
from fedlowrank.data.text.rows.text_rows import TextRows
from fedlowrank.data.text.text_records import TokenLabeled
from fedlowrank.data.text.text_sources import TextClasses
from fedlowrank.data.text.tokens import TextSettings, tokenize
from fedlowrank.language.language_model import LanguageSettings, load_with_texts

library = pytest.importorskip("datasets")
library.disable_progress_bars()
torch.set_num_threads(1)


def make_tokenizer() -> Any:
    """A tokenizer whose only words are a and b."""
    model = tokenizers.models.WordLevel({"<pad>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="?")


def write_labels(folder: Path, labels: list[Any], name: str) -> str:
    """A file of a text with each label."""
    path = folder / name
    if name.endswith(".csv"):
        path.write_text("text,label\n" + "".join(f"a b,{label}\n" for label in labels))
    else:
        path.write_text("".join(json.dumps({"text": "a b", "label": label}) + "\n" for label in labels))
    return str(path)


def read_labels(path: str, classes: tuple[str, ...], source: Any = TextRows) -> Dataset:
    return tokenize(source(path, classes=classes).load(), make_tokenizer(), TextSettings(context=8))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["1", "0", "1"], ("1", "0")),
        (["5", "1", "3"], ("1", "2", "3", "4", "5")),
        # of this client only labels that are also numbers of classes
        (["1", "2"], ("1", "2", "3")),
        (["-1", "1", "0"], ("-1", "0", "1")),
        (["10", "9"], ("9", "10", "none")),
    ],
)
def test_labels_that_are_names_get_the_class_of_the_name(
    labels: list[str], classes: tuple[str, ...], tmp_path: Path
) -> None:
    numbers = [int(label) for label in labels]
    paths = [
        write_labels(tmp_path, labels, "cells.csv"),
        write_labels(tmp_path, labels, "texts.jsonl"),
        write_labels(tmp_path, numbers, "numbers.jsonl"),
    ]
    for path in paths:
        data = read_labels(path, classes)
        assert [data.classes[k] for k in data.train.y] == labels
        assert data.classes == classes
    for path in paths[1:]:
        data = read_labels(path, classes, TextClasses)
        assert [data.classes[k] for k in data.train.y] == labels


@pytest.mark.parametrize("labels", [[20_000, 0], [20_000, -1]])
def test_numbers_that_are_no_indices_are_refused(labels: list[int], tmp_path: Path) -> None:
    path = write_labels(tmp_path, labels, "a.jsonl")
    message = r"indices of classes, from 0 on; there is a 20000, and only 2 labels"
    with pytest.raises(DataError, match=message):
        read_labels(path, ())
    # before a head of so many classes is made
    settings = LanguageSettings("no such folder", "classification")
    with pytest.raises(DataError, match=message):
        load_with_texts(TextRows(path).load(), settings, {}, Key((0,)))


def test_cells_of_several_files_match_names(tmp_path: Path) -> None:
    # cells of the first file alone look like numbers
    write_labels(tmp_path, ["0", "1"], "a.csv")
    write_labels(tmp_path, ["none", "0"], "b.csv")
    data = read_labels(str(tmp_path / "*.csv"), ("1", "none", "0"))
    assert [data.classes[k] for k in data.train.y] == ["0", "1", "none", "0"]


def test_numbers_that_count_beside_names_that_are_numbers_are_refused(tmp_path: Path) -> None:
    stars = ("1", "2", "3", "4", "5")
    for path in (
        write_labels(tmp_path, ["0", "4"], "stars.csv"),
        write_labels(tmp_path, [4, 0], "stars.jsonl"),
    ):
        with pytest.raises(
            DataError, match=r"'stars' has a label 0 that is no class.* as they are in the rows"
        ):
            read_labels(path, stars)
    with pytest.raises(DataError, match=r"label '6' that is no class"):
        read_labels(write_labels(tmp_path, ["6", "1"], "texts.jsonl"), stars)
    with pytest.raises(DataError, match=r"label 6 that is no class"):
        read_labels(write_labels(tmp_path, ["6", "1"], "more.csv"), stars)
    # names that are no numbers: labels count from 0
    data = read_labels(write_labels(tmp_path, ["0", "2"], "words.csv"), ("bad", "fair", "good"))
    assert [data.classes[k] for k in data.train.y] == ["bad", "good"]


def test_numbers_of_a_data_set_with_names_count(tmp_path: Path) -> None:
    stars = ["1", "2", "3"]
    features = library.Features({"text": library.Value("string"), "label": library.ClassLabel(names=stars)})
    rows = {"text": ["a", "b", "a"], "label": [0, 1, 1]}
    library.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    for source in (TextRows, TextClasses):
        for classes in ((), tuple(stars)):
            data = read_labels(str(tmp_path / "saved"), classes, source)
            assert [data.classes[k] for k in data.train.y] == ["1", "2", "2"]


@pytest.mark.parametrize("is_text", [True, False])
def test_labels_of_words_match_names(is_text: bool, tmp_path: Path) -> None:
    # -100: a word without a label
    labels = ["2", "1"] if is_text else [2, -100]
    (tmp_path / "words.jsonl").write_text(json.dumps({"tokens": ["a", "b"], "labels": labels}))
    texts = TextRows(str(tmp_path / "words.jsonl"), classes=("2", "1")).load()
    assert isinstance(texts.train[0], TokenLabeled)
    data = tokenize(texts, make_tokenizer(), TextSettings(context=8))
    assert [data.classes[k] if k >= 0 else None for k in data.train.y[0]] == ["2", "1" if is_text else None]
    texts = TextRows(str(tmp_path / "words.jsonl"), classes=("1", "3")).load()
    with pytest.raises(DataError, match=r"label '?2'? that is no class"):
        tokenize(texts, make_tokenizer(), TextSettings(context=8))
