"""Who is believed to be a client, who is turned away with which words, and who is asked again."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.network.messages import Hello, sections
from fedlowrank.network.registry import MOST_BYTES, MOST_EXAMPLES, Roster, StrangerError, TakenError
from fedlowrank.network.transport import Delivery

from .local import small

MADE = small("scaffold")
ALL = {100, 101, 102}
CLASSES = ["setosa", "versicolor", "virginica"]


def form(columns: int = 4, classes: Any = None, **fields: Any) -> bytes:
    whole = {"x": torch.zeros(0, columns), "y": torch.zeros(0, dtype=torch.int64), "classes": CLASSES}
    return tree.encode({**whole, **({} if classes is None else {"classes": classes}), **fields})


def hello(client: int, **fields: Any) -> Hello:
    return dataclasses.replace(
        Hello(client, 40 + client, (5, 5 + client), sections(MADE.to_dict())), **fields
    )


def from_(node: int, words: Hello | str, body: bytes | None = None) -> Delivery:
    text = words if isinstance(words, str) else words.to_json()
    return Delivery(node, "hello", text, form() if body is None else body)


def roster(**fields: Any) -> Roster:
    return Roster(MADE, 3, **fields)


def asked(found: Roster, present: set[int]) -> list[int]:
    return [p.node for p in found.questions(present)]


def test_nodes_are_asked_until_they_say_who_they_are() -> None:
    found = roster()
    assert asked(found, ALL) == [100, 101, 102]
    assert found.admit(from_(101, hello(1)), ALL) == 1
    # one that says nothing is asked again, one that answered is not
    assert asked(found, ALL) == [100, 102]
    with pytest.raises(StrangerError, match="did not say who it is: error 8"):
        found.admit(Delivery(100, "hello", problem="error 8"), ALL)
    assert asked(found, ALL) == [100, 102]
    assert found.admit(from_(100, hello(2)), ALL) == 2
    assert found.sizes == (0, 41, 42)
    assert found.reachable(ALL) == {1, 2}
    assert found.reachable({100}) == {2}
    assert found.rows() == {1: {"train": 41, "val": 5, "test": 6}, 2: {"train": 42, "val": 5, "test": 7}}
    assert found.strangers == {}


def test_a_client_whose_node_is_gone_is_known_and_comes_back_elsewhere() -> None:
    found = roster()
    found.admit(from_(100, hello(0)), ALL)
    found.leave(0)
    assert found.sizes == (40, 0, 0)
    assert found.reachable(ALL) == set()
    # at the same node, if it is there after all, or at another
    assert asked(found, {100}) == [100]
    found.admit(from_(102, hello(0, examples=50)), {100, 102})
    assert found.sizes == (50, 0, 0)
    assert found.reachable({102}) == {0}


def test_a_client_that_is_here_twice_is_refused_until_the_first_is_gone() -> None:
    found = roster()
    found.admit(from_(100, hello(0)), {100, 101})
    with pytest.raises(StrangerError, match="client 0 is here already; stop the other one") as error:
        found.admit(from_(101, hello(0, examples=7)), {100, 101})
    assert isinstance(error.value.__cause__, TakenError)
    assert found.sizes == (40, 0, 0)
    assert found.reachable({100, 101}) == {0}
    # it is asked again, for the first may have gone
    assert asked(found, {100, 101}) == [101]
    assert found.admit(from_(101, hello(0, examples=7)), {101}) == 0
    assert found.sizes == (7, 0, 0)
    assert found.strangers == {}
    # and whoever introduces itself a second time is the same
    assert found.admit(from_(101, hello(0, examples=8)), {101}) == 0
    assert found.sizes == (8, 0, 0)


other = sections({**MADE.to_dict(), "run": {**MADE.to_dict()["run"], "seed": 9}})
STRANGERS: dict[str, tuple[Any, bytes | None, str]] = {
    "another experiment": (hello(1, sections=other), None, r"section\(s\) run differ"),
    "a section too many": (hello(1, sections={**hello(1).sections, "x": "1"}), None, r"section\(s\) x differ"),
    "a section too few": (hello(1, sections={}), None, r"section\(s\) data, defaults, method, model, name, partition, run"),
    "a section with a nasty name": (
        hello(1, sections={**hello(1).sections, "a\n12:00:00 finished": "1"}),
        None,
        "one without a decent name differ",
    ),
    "another version of the messages": (hello(1, protocol=1), None, "speaks version 1 of the messages, this server 2"),
    "a number above": (hello(3), None, "says it is client 3, but clients go from 0 to 2"),
    "a number below": (hello(-1), None, "says it is client -1, but clients go from 0 to 2"),
    "no example": (hello(1, examples=0), None, "says it has 0 examples"),
    "fewer than none": (hello(1, examples=-5), None, "says it has -5 examples"),
    "fewer than none to test": (hello(1, sizes=(3, -1)), None, "says it has 41 examples, and .3, -1. to"),
    "more than there are": (hello(1, examples=MOST_EXAMPLES + 1), None, "says it has 1099511627777 examples"),
    "more to test than there are": (hello(1, sizes=(0, 10**200)), None, "says it has 41 examples, and .0, 1000"),
    "no JSON": ("who?", None, "the message is not a Hello: the whole: Invalid JSON"),
    "other fields": ('{"client": 1}', None, "the message is not a Hello: examples: "),
    "no number": (hello(1).to_json().replace('"client": 1', '"client": true'), None, "is not a Hello: client: "),
    "a nasty field": (json.dumps({"client": 1, "sections": {"a\nb": 1}}), None, "the message is not a Hello: "),
    "a long text": (hello(1, base="x" * MOST_BYTES), None, f"takes more than {MOST_BYTES} bytes"),
    "a large body": (hello(1), bytes(MOST_BYTES), f"takes more than {MOST_BYTES} bytes"),
    "no tree": (hello(1), b"tree?", "are no encoded tree|are not an encoded tree"),
    "no examples' form": (hello(1), tree.encode([1]), "the form of the examples is none"),
    "no inputs": (hello(1), form(x=3), "the form of the examples is none"),
    "inputs in a list": (hello(1), form(x=[torch.zeros(0, 4)]), "the form of the examples is none"),
    "inputs that are words": (hello(1), form(x={"a": "b"}), "the form of the examples is none"),
    "classes that are none": (hello(1), form(classes=3), "the form of the examples is none"),
    "classes that are numbers": (hello(1), form(classes=[1]), "classes without names"),
    "labels of another type": (hello(1), form(y=torch.zeros(0, dtype=torch.int32)), "the labels must be int64"),
    "an example": (hello(1), form(x=torch.ones(1, 4), y=torch.ones(1, dtype=torch.int64)), "holds examples"),
    "other columns": (hello(1), form(5), r"examples of another form: .*float32 \[5\].* but the others' .*float32 \[4\]"),
    "other classes": (hello(1), form(classes=["a", "b", "c"]), 'another form: .*"a", "b", "c"'),
    "another base": (hello(1, base="abc"), None, "another base model: its weights have the digest abc, the others' none"),
}  # fmt: skip


@pytest.mark.parametrize("why", STRANGERS)
def test_a_stranger_is_turned_away_with_the_reason_and_not_asked_again(why: str) -> None:
    words, body, text = STRANGERS[why]
    found = roster()
    found.admit(from_(100, hello(0)), ALL)
    found.settle(ALL)
    with pytest.raises(StrangerError, match=text) as error:
        found.admit(from_(101, words, body), ALL)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1100
    assert found.members.keys() == {0}
    assert found.strangers == {101: str(error.value).removeprefix("a node was turned away: ")}
    assert asked(found, ALL) == [102]
    # unless it went away and came back
    assert asked(found, {100}) == []
    assert asked(found, ALL) == [101, 102]
    assert found.strangers == {}


def test_a_key_is_the_proof_of_who_one_is() -> None:
    found = roster(keys={100: 0, 101: 1})
    for node, client, whose in ((100, 1, "that of client 0"), (102, 2, "nobody's"), (102, 0, "nobody's")):
        with pytest.raises(StrangerError, match=f"it says it is client {client}, but its key is {whose}"):
            found.admit(from_(node, hello(client)), ALL)
    assert found.admit(from_(101, hello(1)), ALL) == 1
    assert found.members.keys() == {1}


def test_examples_are_limited() -> None:
    found = roster(max_examples=41)
    found.admit(from_(101, hello(1)), ALL)
    with pytest.raises(StrangerError, match=r"says it has 42 examples, above limits\.max_examples = 41"):
        found.admit(from_(102, hello(2)), ALL)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_most_say_what_examples_look_like_whoever_came_first(odd: int) -> None:
    for strange in ((hello(odd), form(5)), (hello(odd, base="abc"), form())):
        found = roster()
        found.admit(from_(100 + odd, *strange), ALL)
        for i in {0, 1, 2} - {odd}:
            found.admit(from_(100 + i, hello(i)), ALL)
        assert found.usual(ALL) == sorted({0, 1, 2} - {odd})
        found.settle(ALL)
        assert found.members.keys() == {0, 1, 2} - {odd}
        assert f"client {odd} has " in found.strangers[100 + odd]
        assert asked(found, ALL) == []
        with pytest.raises(StrangerError, match=r"has examples of another form|has another base"):
            found.admit(from_(100 + odd, *strange), ALL)
        assert found.admit(from_(100 + odd, hello(odd)), ALL) == odd


def test_whoever_left_before_it_was_settled_is_turned_away_too() -> None:
    found = roster()
    found.admit(from_(100, hello(0), form(5)), {100})
    found.admit(from_(101, hello(1)), {101})
    assert found.usual({101}) == [1]
    found.settle({101})
    assert found.members.keys() == {1}
    assert roster().usual(ALL) == []
    roster().settle(ALL)


def test_what_was_known_before_a_restart() -> None:
    found, again = roster(), roster()
    for i in (0, 2):
        found.admit(from_(100 + i, hello(i)), ALL)
    again.remember(json.loads(json.dumps(found.rows())))
    assert again.rows() == found.rows()
    assert again.sizes == found.sizes == (40, 0, 42)
    assert again.reachable(ALL) == set()
    assert again.usual(ALL) == []
    assert asked(again, ALL) == [100, 101, 102]


# -- the federation ----------------------------------------------------------------------------------------------------


def test_the_federation_is_that_of_the_data_but_for_the_data() -> None:
    found, whole = roster(), MADE.federation()
    for info in whole.infos:
        data = whole.clients[info.id]
        words = hello(info.id, examples=info.examples, sizes=(len(data.val), len(data.test)))
        found.admit(from_(100 + info.id, words), ALL)
    found.settle(ALL)
    made = found.federation()
    assert list(made.infos) == list(whole.infos)
    assert made.classes == whole.classes
    assert tree.equal(made.architectures["mlp"].initial, whole.architectures["mlp"].initial)
    assert {len(d.train) + len(d.val) + len(d.test) for d in made.clients} == {0}
    assert found.updated(made) is made
    found.admit(from_(101, hello(1, examples=7)), ALL)
    later = found.updated(made)
    assert [i.examples for i in later.infos] == [whole.infos[0].examples, 7, whole.infos[2].examples]
    assert later.architectures is made.architectures


def test_without_anybody_there_is_no_federation() -> None:
    with pytest.raises(StrangerError, match="no client has introduced itself"):
        roster().federation()


def test_the_servers_own_base_must_be_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    language = SimpleNamespace(loaded=SimpleNamespace(digest="here"))
    monkeypatch.setattr(ExperimentConfig, "load_language", lambda self, classes: language)
    found = roster()
    found.admit(from_(100, hello(0, base="there")), ALL)
    found.settle(ALL)
    with pytest.raises(StrangerError, match="base model has the digest there, the server's here"):
        found.federation()


# -- anything at all ---------------------------------------------------------------------------------------------------

FUZZ = settings(
    max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck]
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
tensors = st.sampled_from(
    [torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 0), torch.zeros(()), torch.zeros(0, 10**9), torch.zeros(2, 4),
     torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)]
)  # fmt: skip
trees = st.recursive(
    plain | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tried(found: Roster, delivery: Delivery) -> None:
    before = dict(found.members)
    refusal = ""
    try:
        assert found.admit(delivery, ALL) in range(3)
    except StrangerError as error:
        refusal = str(error)
    if refusal:
        assert refusal.isprintable()
        assert len(refusal) < 1100
        assert found.members == before


def settled() -> Roster:
    found = roster()
    found.admit(from_(100, hello(0)), ALL)
    found.settle(ALL)
    return found


@FUZZ
@given(st.sampled_from([100, 101]), st.text(max_size=30), st.binary(max_size=60))
def test_any_words_and_bytes(node: int, words: str, body: bytes) -> None:
    tried(settled(), from_(node, words, body))
    tried(settled(), from_(node, hello(1), body))


@FUZZ
@example("base", "a\n" * 1000)
@example("examples", 10**4000)
@given(st.sampled_from([f.name for f in dataclasses.fields(Hello)]), plain | st.lists(plain, max_size=3))
def test_any_field(name: str, value: Any) -> None:
    for found in (settled(), roster()):
        tried(found, from_(101, json.dumps({**dataclasses.asdict(hello(1)), name: value})))


@FUZZ
@given(st.sampled_from(["x", "y", "classes", ""]), trees)
def test_any_form(name: str, value: Any) -> None:
    body = form(**{name: value}) if name else tree.encode(value)
    tried(settled(), from_(101, hello(1), body))
    # nobody else is there to compare with: it may be believed, and then be no use, but breaks nothing
    found = roster()
    tried(found, from_(101, hello(1), body))
    found.settle(ALL)
    assert len(found.usual(ALL)) == len(found.members)
