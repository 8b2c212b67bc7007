"""The rows of `make demo-language`: three styles, of Dolly's short questions, or of capitals where there is no download."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("organizations", EXAMPLES / "organizations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_styles_keep_the_answer(rows: Any) -> None:
    assert rows.answer_in_short("Rivers run. They do.\nMore.") == "In short: Rivers run."
    assert rows.answer_as_list("1. apples\n2) pears.\n\n- plums\nfigs") == "* apples\n* pears\n* plums"
    assert rows.answer_as_list("red, green, and blue") == "* red\n* green\n* blue"
    assert rows.answer_with_source("Yes! No.") == "Yes! (Source: our archive.)"


def test_rows_of_dolly_are_short_and_of_the_category(rows: Any, tmp_path: Path) -> None:
    made = [
        {"instruction": "Who?", "response": "A man. Two.", "category": "open_qa", "context": ""},
        {"instruction": "Who?", "response": "A man.", "category": "open_qa", "context": "a text beside"},
        {"instruction": "Who " * 40, "response": "A man.", "category": "open_qa", "context": ""},
        {"instruction": "List.", "response": "a\nb", "category": "brainstorming", "context": ""},
        {"instruction": "Why?", "response": "It is so.", "category": "general_qa", "context": ""},
        {"instruction": "Why?", "response": "long " * 60, "category": "general_qa", "context": ""},
    ]
    file = tmp_path / "dolly.jsonl"
    file.write_text("\n".join(map(json.dumps, made)))
    rows.main(tmp_path / "out", file)
    actual = {
        p.stem: [json.loads(line) for line in p.read_text().splitlines()]
        for p in (tmp_path / "out").iterdir()
    }
    assert actual == {
        "north": [{"prompt": "Who?", "completion": "In short: A man."}],
        "east": [{"prompt": "List.", "completion": "* a\n* b"}],
        "south": [{"prompt": "Why?", "completion": "It is so. (Source: our archive.)"}],
    }


def test_without_a_connection_the_rows_are_capitals(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> NoReturn:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    rows.main(tmp_path, None)
    assert "Dolly cannot be downloaded here" in capsys.readouterr().out
    for name in ("north", "east", "south"):
        own = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(own) >= 60
        assert any(
            "France" in r["prompt"] + r["completion"] and "Paris" in r["prompt"] + r["completion"]
            for r in own
        )
