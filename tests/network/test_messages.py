"""Headers of messages: any text is a valid message or a MessageError, and no text of another machine breaks a line of a log."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from fedlowrank.network.messages import (
    LOCAL_FIELDS,
    Answer,
    Header,
    MessageError,
    Order,
    Registration,
    digest_sections,
    to_one_line,
)
from tests.support.client_tables import make_client_table

REGISTRATION = Registration(
    2, 40, (5, 6), {"run": "ab", "data": "cd"}, {"config.json": "ef"}, {"torch": "2"}, 3
)
ORDER = Order("a1b2", 3, 2, True, False, False, 1)
FOUND = make_client_table({
    "accuracy": {"personal": {"val": [0.5], "test": [None]}, "global": {"val": [1.0], "test": [0.0]}},
    "loss": {"personal": {"val": [0.1], "test": [None]}, "global": {"val": [1e-300], "test": [3.0]}},
    "parameters": {"personal": {"": [10]}, "global": {"": [2**40]}},
    "route": {"0": {"": [0.25]}, "1": {"": [0.75]}},
})  # fmt: skip
ANSWER = Answer(1, "a1b2", 3, "", "", 7, 2**70, {"local": 0.1 + 0.2}, FOUND)
SAMPLES: list[Header] = [
    REGISTRATION,
    ORDER,
    ANSWER,
    Order("a", 0, 0, False, True, True),
    Answer(0, "a", 0, "a\nreason", "disk"),
]


@pytest.mark.parametrize("header", SAMPLES, ids=repr)
def test_headers_are_read_back_unchanged(header: Header) -> None:
    assert type(header).from_json(header.to_json()) == header


def test_a_loss_that_is_not_finite_crosses_for_the_receiver_to_judge() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        actual = Answer.from_json(dataclasses.replace(ANSWER, losses={"local": loss}).to_json())
        assert repr(actual.losses["local"]) == repr(loss)


@pytest.mark.parametrize(
    ("name", "value"),
    [("client", True), ("client", "1"), ("client", 1.0), ("round", None), ("steps", 1.5), ("kind", "tired"),
     ("losses", []), ("losses", {"a": "1"}), ("evaluation", {}), ("run", 3), ("run", ...)],
)  # fmt: skip
def test_a_field_that_is_missing_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    fields = {**dataclasses.asdict(ANSWER), name: value}
    with pytest.raises(MessageError, match=rf"the message is no valid Answer: {name}"):
        Answer.from_json(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def test_deep_and_long_texts_are_refused_and_harm_nothing() -> None:
    surrogate = json.dumps({**dataclasses.asdict(ANSWER), "run": "\ud800"})
    digits = json.dumps(dataclasses.asdict(ANSWER)).replace('"steps": 7', f'"steps": {"9" * 100_000}')
    for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 5000, digits, surrogate):
        with pytest.raises(MessageError) as error:
            Answer.from_json(text)
        assert str(error.value).isprintable()
        assert len(str(error.value)) <= 500


def test_no_text_of_a_client_makes_a_line_of_its_own() -> None:
    with pytest.raises(MessageError) as error:
        Answer.from_json(
            json.dumps({**dataclasses.asdict(ANSWER), "losses": {"x\n12:00:00 finished\n": None}})
        )
    assert "\n" not in str(error.value)
    for text in ("a\nb", "a\rb", "a\x1b[2Jb", "a\u2028b", "a\x85b", "a\x00b"):
        assert to_one_line(text).isprintable()
        assert to_one_line(text).startswith("a ")
    assert to_one_line("ä € 日 " * 3) == "ä € 日 " * 3
    assert len(to_one_line("x" * 9999)) == 500


TABLES: dict[str, Any] = {
    "name": "n",
    "method": "fedavg",
    "data": {"source": "folder", "path": "/here", "normalize": "scale"},
    "run": {"rounds": 3, "seed": 1, "threads": 2},
    "model": {"names": ["mlp"]},
    "network": {"wait": 3},
    "title": "T",
}


def test_sections_leave_out_what_may_differ_and_nothing_else() -> None:
    known = digest_sections(TABLES)
    assert known.keys() == {"method", "data", "run", "model"}
    for field in LOCAL_FIELDS:
        section, name = field.split(".")
        assert (
            digest_sections({**TABLES, section: {**TABLES.get(section, {}), name: "other"}}).items()
            >= known.items()
        )
    for section, fields in {
        # of a file that has none it is that of the file, which may differ between machines
        "name": "m",
        "title": "U",
        "network": {"wait": 9},
        "seeds": [1],
        "compare": ["fedavg"],
        "local": {"dtype": "bfloat16", "device": "cuda"},
    }.items():
        assert digest_sections({**TABLES, section: fields}) == known
    others: dict[str, Any] = {
        "method": "fedprox",
        "data": {**TABLES["data"], "normalize": "none"},
        "run": {**TABLES["run"], "seed": 2},
        "model": {"names": ["mlp"], "hidden": [3]},
    }
    for section, value in others.items():
        actual = digest_sections({**TABLES, section: value})
        assert [s for s in known if actual[s] != known[s]] == [section]
    # the order of fields says nothing
    assert digest_sections({k: TABLES[k] for k in reversed(TABLES)}) == known
    assert digest_sections({**TABLES, "run": {k: TABLES["run"][k] for k in reversed(TABLES["run"])}}) == known
