"""Plain text cut into passages, which joined must give the text again."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.errors import ConfigError, DataError
from fedlowrank.data.text.passages import Lines, Speakers, cut_passages
from tests.data.made_datasets import write


@pytest.mark.full
@given(
    text=st.text(alphabet="ab \n\r\u2028é"),
    unit=st.sampled_from(["characters", "lines"]),
    length=st.integers(1, 9),
)
def test_passages_join_to_the_text(text: str, unit: Any, length: int) -> None:
    actual = cut_passages(text, unit, length)
    assert "".join(actual) == text
    sizes = [len(p) if unit == "characters" else p.count("\n") for p in actual]
    assert all(size == length for size in sizes[:-1])
    assert all(size <= length for size in sizes[-1:])


def test_speakers_are_clients_and_keep_their_last_passages_for_the_test(tmp_path: Path) -> None:
    rows = [
        {"play": "p", "speaker": "LORD", "text": "abcdefghij"},
        {"play": "p", "speaker": "KING", "text": "xyz"},
        {"play": "q", "speaker": "LORD", "text": "klmn    opqr"},
    ]
    path = write(tmp_path / "by_speaker.jsonl.gz", rows)
    actual = Speakers(path, length=4, test_share=0.4).load()
    # LORD: abcd efgh ij klmn (blank) opqr: round(.4 · 5) = 2 for the test; KING has one passage
    assert [(r.client, r.response) for r in actual.train] == [
        ("LORD", "abcd"),
        ("LORD", "efgh"),
        ("LORD", "ij"),
        ("KING", "xyz"),
    ]
    assert [(r.client, r.response) for r in actual.test] == [("LORD", "klmn"), ("LORD", "opqr")]
    assert all(r.prompt == r.input == "" for r in actual.train)
    assert actual.notes == (
        "1 blank passages dropped",
        "1 of 2 speakers have too few passages for the test part",
    )
    # one passage at least stays for training
    nearly_all = Speakers(path, length=4, test_share=0.99).load()
    assert [r.response for r in nearly_all.train] == ["abcd", "xyz"]
    apart = Speakers(path, length=4, speaker=("play", "speaker")).load()
    assert list(dict.fromkeys(r.client for r in apart.train)) == ["p, LORD", "p, KING", "q, LORD"]
    assert (apart.test, actual.name) == (None, "by_speaker")
    with pytest.raises(DataError, match="too few passages per speaker"):
        Speakers(path, length=100, test_share=0.1).load()
    with pytest.raises(DataError, match=r"line 2 names no speaker in 'speaker'"):
        Speakers(write(tmp_path / "b.jsonl", [rows[0], {"text": "a", "speaker": ""}])).load()
    with pytest.raises(ConfigError, match=r"a list is needed, such as \['speaker'\]"):
        Speakers(path, speaker="speaker")  # type: ignore[arg-type]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n\n\nfive"))
    actual = Lines(str(tmp_path / "t.txt.gz"), "lines", 2, 0.5).load()
    assert [r.response for r in actual.train] == ["one\ntwo\n"]
    assert [r.response for r in actual.test] == ["five"]
    assert actual.notes == ("1 blank passages dropped",)
    (tmp_path / "e.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        Lines(str(tmp_path / "e.txt")).load()
    with pytest.raises(DataError, match="cannot read"):
        Lines(str(tmp_path / "gone.txt")).load()
    with pytest.raises(ConfigError, match=r"Lines\.unit"):
        Lines("t", "words")  # type: ignore[arg-type]
