"""Who is believed to be a client, who is rejected with which words, and who is asked again."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.network.messages import Registration, RegistrationRequest, digest_sections
from fedlowrank.network.persistence.input_columns import MAX_CHARACTERS, digest_columns, shorten_columns
from fedlowrank.network.persistence.registry import (
    MAX_EXAMPLES,
    MAX_REGISTRATION_BYTES,
    ClientRegistry,
    DuplicateClientError,
    UnregisteredNodeError,
)
from fedlowrank.network.transport import Response
from tests.support.local_network import PLAIN, fuzz, small

MADE = small("scaffold")
ALL = {100, 101, 102}
CLASSES = ["setosa", "versicolor", "virginica"]


def form(width: int = 4, classes: Any = None, **fields: Any) -> bytes:
    whole = {"x": torch.zeros(0, width), "y": torch.zeros(0, dtype=torch.int64), "classes": CLASSES}
    return tree.encode({**whole, **({} if classes is None else {"classes": classes}), **fields})


def registration(client: int, **fields: Any) -> Registration:
    return dataclasses.replace(
        Registration(client, 40 + client, (5, 5 + client), digest_sections(MADE.to_dict()), client_count=3),
        **fields,
    )


def from_(node: int, header: Registration | str, payload: bytes | None = None) -> Response:
    text = header if isinstance(header, str) else header.to_json()
    return Response(node, "registration", text, form() if payload is None else payload)


def registry(**fields: Any) -> ClientRegistry:
    return ClientRegistry(MADE, 3, **fields)


def asked(found: ClientRegistry, present: set[int]) -> list[int]:
    return [p.node for p in found.make_requests(present)]


def test_nodes_are_asked_until_they_say_who_they_are() -> None:
    actual = registry()
    assert asked(actual, ALL) == [100, 101, 102]
    assert actual.register(from_(101, registration(1)), ALL) == 1
    # one that says nothing is asked again, one that answered is not
    assert asked(actual, ALL) == [100, 102]
    with pytest.raises(UnregisteredNodeError, match="did not register: error 8"):
        actual.register(Response(100, "registration", problem="error 8"), ALL)
    assert asked(actual, ALL) == [100, 102]
    assert actual.register(from_(100, registration(2)), ALL) == 2
    assert actual.sizes == (0, 41, 42)
    assert actual.find_reachable(ALL) == {1, 2}
    assert actual.find_reachable({100}) == {2}
    assert actual.count_examples() == {
        1: {"train": 41, "val": 5, "test": 6},
        2: {"train": 42, "val": 5, "test": 7},
    }
    assert actual.rejections == {}


def test_a_client_whose_node_is_gone_is_known_and_comes_back_elsewhere() -> None:
    actual = registry()
    actual.register(from_(100, registration(0)), ALL)
    actual.registered[0].node = None
    assert actual.sizes == (40, 0, 0)
    assert actual.find_reachable(ALL) == set()
    # at the same node, if it is there after all, or at another
    assert asked(actual, {100}) == [100]
    actual.register(from_(102, registration(0, examples=50)), {100, 102})
    assert actual.sizes == (50, 0, 0)
    assert actual.find_reachable({102}) == {0}


def test_a_client_that_is_here_twice_is_refused_until_the_first_is_gone() -> None:
    actual = registry()
    actual.register(from_(100, registration(0)), {100, 101})
    with pytest.raises(
        UnregisteredNodeError, match="client 0 is connected already; stop the other one"
    ) as error:
        actual.register(from_(101, registration(0, examples=7)), {100, 101})
    assert isinstance(error.value.__cause__, DuplicateClientError)
    assert actual.sizes == (40, 0, 0)
    assert actual.find_reachable({100, 101}) == {0}
    # it is asked again, for the first may have gone
    assert asked(actual, {100, 101}) == [101]
    assert actual.register(from_(101, registration(0, examples=7)), {101}) == 0
    assert actual.sizes == (7, 0, 0)
    assert actual.rejections == {}
    # and a node that registers twice is the same client
    assert actual.register(from_(101, registration(0, examples=8)), {101}) == 0
    assert actual.sizes == (8, 0, 0)


other = digest_sections({**MADE.to_dict(), "run": {**MADE.to_dict()["run"], "seed": 9}})
REJECTIONS: dict[str, tuple[Any, bytes | None, str]] = {
    "another experiment": (registration(1, sections=other), None, r"section\(s\) run differ"),
    "a section too many": (registration(1, sections={**registration(1).sections, "x": "1"}), None, r"section\(s\) x differ"),
    "a section too few": (registration(1, sections={}), None, r"data, defaults, method, model, partition, run, "),
    "a section with a nasty name": (
        registration(1, sections={**registration(1).sections, "a\n12:00:00 finished": "1"}),
        None,
        "one with an invalid name differ",
    ),
    "another version of the messages": (registration(1, protocol=1), None, "speaks version 1 of the messages, this server 9"),
    "another number of clients": (
        registration(1, client_count=4), None, "computes with 4 clients, the server with 3: .* Set network.clients"
    ),
    "a client that does not say how many there are": (registration(1, client_count=0), None, "computes with 0 clients"),
    "a number above": (registration(3), None, "says it is client 3, but clients go from 0 to 2"),
    "a number below": (registration(-1), None, "says it is client -1, but clients go from 0 to 2"),
    "no example": (registration(1, examples=0), None, "says it has 0 examples"),
    "fewer than none": (registration(1, examples=-5), None, "says it has -5 examples"),
    "fewer than none to test": (registration(1, sizes=(3, -1)), None, "says it has 41 examples, and .3, -1. to"),
    "more than there are": (registration(1, examples=MAX_EXAMPLES + 1), None, "says it has 1099511627777 examples"),
    "more to test than there are": (registration(1, sizes=(0, 10**200)), None, "says it has 41 examples, and .0, 1000"),
    "no JSON": ("who?", None, "the message is no valid Registration: the whole: Invalid JSON"),
    "other fields": ('{"client": 1}', None, "the message is no valid Registration: examples: "),
    "no number": (registration(1).to_json().replace('"client": 1', '"client": true'), None, "is no valid Registration: client: "),
    "a nasty field": (json.dumps({"client": 1, "sections": {"a\nb": 1}}), None, "the message is no valid Registration: "),
    "a long text": (
        registration(1, base={"x" * MAX_REGISTRATION_BYTES: "a"}), None, f"takes more than {MAX_REGISTRATION_BYTES} bytes"
    ),
    "a large body": (registration(1), bytes(MAX_REGISTRATION_BYTES), f"takes more than {MAX_REGISTRATION_BYTES} bytes"),
    "no tree": (registration(1), b"tree?", "are no encoded tree|are not an encoded tree"),
    "no examples' form": (registration(1), tree.encode([1]), "the form of the examples cannot be read"),
    "no inputs": (registration(1), form(x=3), "the form of the examples cannot be read"),
    "inputs in a list": (registration(1), form(x=[torch.zeros(0, 4)]), "the form of the examples cannot be read"),
    "inputs that are words": (registration(1), form(x={"a": "b"}), "the form of the examples cannot be read"),
    "classes that are none": (registration(1), form(classes=3), "the form of the examples cannot be read"),
    "columns that are numbers": (registration(1), form(columns=[1]), "inputs without names"),
    "classes that are numbers": (registration(1), form(classes=[1]), "classes without names"),
    "labels of another type": (registration(1), form(y=torch.zeros(0, dtype=torch.int32)), "the labels must be int64"),
    "an example": (registration(1), form(x=torch.ones(1, 4), y=torch.ones(1, dtype=torch.int64)), "holds examples"),
    "other columns": (registration(1), form(5), r"examples of another form: .*float32 \[5\].* but the others' .*float32 \[4\]"),
    "other classes": (registration(1), form(classes=["a", "b", "c"]), 'another form: .*"a", "b", "c"'),
    "another base": (registration(1, base={"config.json": "a"}), None, "another base model than the others: config.json is not"),
}  # fmt: skip


@pytest.mark.parametrize("why", REJECTIONS)
def test_an_unregistered_node_is_rejected_with_the_reason_and_not_asked_again(why: str) -> None:
    header, payload, text = REJECTIONS[why]
    actual = registry()
    actual.register(from_(100, registration(0)), ALL)
    actual.fix_form(ALL)
    with pytest.raises(UnregisteredNodeError, match=text) as error:
        actual.register(from_(101, header, payload), ALL)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1100
    assert actual.registered.keys() == {0}
    assert actual.rejections == {101: str(error.value).removeprefix("a node was rejected: ")}
    assert asked(actual, ALL) == [102]
    # unless it went away and came back
    assert asked(actual, {100}) == []
    assert asked(actual, ALL) == [101, 102]
    assert actual.rejections == {}


def test_a_key_is_the_proof_of_who_one_is() -> None:
    actual = registry(keys={100: 0, 101: 1})
    for node, client, whose in (
        (100, 1, "that of client 0"),
        (102, 2, "not registered"),
        (102, 0, "not registered"),
    ):
        with pytest.raises(
            UnregisteredNodeError, match=f"it says it is client {client}, but its key is {whose}"
        ):
            actual.register(from_(node, registration(client)), ALL)
    assert actual.register(from_(101, registration(1)), ALL) == 1
    assert actual.registered.keys() == {1}


def test_examples_are_limited() -> None:
    actual = registry(max_examples=41)
    actual.register(from_(101, registration(1)), ALL)
    with pytest.raises(
        UnregisteredNodeError, match=r"says it has 42 examples, above limits\.max_examples = 41"
    ):
        actual.register(from_(102, registration(2)), ALL)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_most_say_what_examples_look_like_whoever_came_first(odd: int) -> None:
    for strange in ((registration(odd), form(5)), (registration(odd, base={"config.json": "abc"}), form())):
        actual = registry()
        actual.register(from_(100 + odd, *strange), ALL)
        for i in {0, 1, 2} - {odd}:
            actual.register(from_(100 + i, registration(i)), ALL)
        assert actual.find_majority(ALL) == sorted({0, 1, 2} - {odd})
        actual.fix_form(ALL)
        assert actual.registered.keys() == {0, 1, 2} - {odd}
        assert f"client {odd} has " in actual.rejections[100 + odd]
        assert asked(actual, ALL) == []
        with pytest.raises(UnregisteredNodeError, match=r"has examples of another form|has another base"):
            actual.register(from_(100 + odd, *strange), ALL)
        assert actual.register(from_(100 + odd, registration(odd)), ALL) == odd


def test_clients_whose_rows_call_for_another_format_of_prompts_are_told_both() -> None:
    actual = registry()
    for i, written in enumerate(("verbatim", "verbatim", "alpaca")):
        actual.register(from_(100 + i, registration(i), form(format=written)), ALL)
    (client, why), *_ = actual.fix_form(ALL).items()
    assert (client, actual.registered.keys()) == (2, {0, 1})
    assert "client 2 writes prompts in the format 'alpaca' and the other clients in 'verbatim'" in why
    assert "Set language.format" in why
    # the folder of a client of an earlier release has no format
    assert actual.register(from_(103, registration(2), form()), ALL | {103}) == 2
    # auto is none that a client can have found
    for wrong in ("auto", 7):
        with pytest.raises(UnregisteredNodeError, match="holds an unknown format of prompts"):
            registry().register(from_(100, registration(0), form(format=wrong)), ALL)


def test_a_client_that_left_before_the_form_was_fixed_is_rejected_too() -> None:
    actual = registry()
    actual.register(from_(100, registration(0), form(5)), {100})
    actual.register(from_(101, registration(1)), {101})
    assert actual.find_majority({101}) == [1]
    actual.fix_form({101})
    assert actual.registered.keys() == {1}
    assert registry().find_majority(ALL) == []
    registry().fix_form(ALL)


def test_what_was_known_before_a_restart() -> None:
    actual, again = registry(), registry()
    for i in (0, 2):
        actual.register(from_(100 + i, registration(i)), ALL)
    again.restore(actual.count_examples())
    assert again.count_examples() == actual.count_examples()
    assert again.sizes == actual.sizes == (40, 0, 42)
    assert again.find_reachable(ALL) == set()
    assert again.find_majority(ALL) == []
    assert asked(again, ALL) == [100, 101, 102]


# -- the federation


def test_the_federation_is_that_of_the_data_but_for_the_data() -> None:
    actual, whole = registry(), MADE.federation()
    for info in whole.infos:
        data = whole.clients[info.id]
        header = registration(info.id, examples=info.example_count, sizes=(len(data.val), len(data.test)))
        actual.register(from_(100 + info.id, header), ALL)
    actual.fix_form(ALL)
    made = actual.build_federation()
    assert list(made.infos) == list(whole.infos)
    assert made.classes == whole.classes
    assert tree.equal(made.architectures["mlp"].initial, whole.architectures["mlp"].initial)
    assert {len(d.train) + len(d.val) + len(d.test) for d in made.clients} == {0}
    assert actual.update_federation(made) is made
    actual.register(from_(101, registration(1, examples=7)), ALL)
    later = actual.update_federation(made)
    assert [i.example_count for i in later.infos] == [
        whole.infos[0].example_count,
        7,
        whole.infos[2].example_count,
    ]
    assert later.architectures is made.architectures


def test_without_anybody_there_is_no_federation() -> None:
    with pytest.raises(UnregisteredNodeError, match="no client has registered"):
        registry().build_federation()


def test_the_servers_own_base_must_be_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": "a", "model.safetensors": "here"}
    language = SimpleNamespace(files=files)
    monkeypatch.setattr(ExperimentConfig, "load_language", lambda self, classes, prompt_format: language)
    actual = registry()
    actual.register(from_(100, registration(0, base={"config.json": "a", "model.safetensors": "there"})), ALL)
    actual.fix_form(ALL)
    with pytest.raises(
        UnregisteredNodeError, match=r"another base model than the clients: model\.safetensors differs\. Copy"
    ):
        actual.build_federation()


# -- anything at all

tensors = st.sampled_from(
    [torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 0), torch.zeros(()), torch.zeros(0, 10**9), torch.zeros(2, 4),
     torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)]
)  # fmt: skip
trees = st.recursive(
    PLAIN | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tried(found: ClientRegistry, response: Response) -> None:
    before = dict(found.registered)
    refusal = ""
    try:
        assert found.register(response, ALL) in range(3)
    except UnregisteredNodeError as error:
        refusal = str(error)
    if refusal:
        assert refusal.isprintable()
        assert len(refusal) < 1100
        assert found.registered == before


def settled() -> ClientRegistry:
    actual = registry()
    actual.register(from_(100, registration(0)), ALL)
    actual.fix_form(ALL)
    return actual


@pytest.mark.full
@fuzz(100)
@given(st.sampled_from([100, 101]), st.text(max_size=30), st.binary(max_size=60))
def test_any_header_and_payload(node: int, header: str, payload: bytes) -> None:
    tried(settled(), from_(node, header, payload))
    tried(settled(), from_(node, registration(1), payload))


@pytest.mark.full
@fuzz(100)
@example("base", "a\n" * 1000)
@example("examples", 10**4000)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(Registration)]), PLAIN | st.lists(PLAIN, max_size=3)
)
def test_any_value_in_a_field_is_registered_or_refused(name: str, value: Any) -> None:
    for actual in (settled(), registry()):
        tried(actual, from_(101, json.dumps({**dataclasses.asdict(registration(1)), name: value})))


@pytest.mark.full
@fuzz(100)
@given(st.sampled_from(["x", "y", "classes", "format", ""]), trees)
def test_any_form_is_registered_or_refused(name: str, value: Any) -> None:
    payload = form(**{name: value}) if name else tree.encode(value)
    tried(settled(), from_(101, registration(1), payload))
    # nobody else is there to compare with: it may be believed, and then be no use, but breaks nothing
    actual = registry()
    tried(actual, from_(101, registration(1), payload))
    actual.fix_form(ALL)
    assert len(actual.find_majority(ALL)) == len(actual.registered)


def test_tables_with_other_columns_are_rejected_with_the_names_and_told_without_those_of_others() -> None:
    actual = registry()
    same = form(columns=["age", "bmi", "ward=a", "ward=b"])
    for node in (100, 101):
        actual.register(from_(node, registration(node - 100), same), ALL)
    actual.register(from_(102, registration(2), form(columns=["bmi", "age", "ward=a", "ward=\nc"])), ALL)
    (client, why), *_ = actual.fix_form(ALL).items()
    assert client == 2
    assert 'input 1 is "bmi" and theirs "age", input 2 is "age" and theirs "bmi"' in why
    assert 'input 4 is "ward=\\nc" and theirs "ward=b"' in why
    assert "data.features" in why
    assert "encode such a column as numbers beforehand" in why
    (notice,) = actual.take_notices(ALL)
    told = RegistrationRequest.from_json(notice.header).rejection
    assert notice.node == 102
    assert 'input 1 is "bmi", input 2 is "age", input 4 is "ward=\\nc"' in told
    assert "ward=b" not in told
    # each is told once, and a table without names is another form, too
    assert actual.take_notices(ALL) == []
    with pytest.raises(UnregisteredNodeError, match="has other columns than the other clients"):
        actual.register(from_(102, registration(2), form(columns=["age", "bmi", "ward=a"])), ALL)
    with pytest.raises(UnregisteredNodeError, match="has other columns than the other clients"):
        actual.register(from_(102, registration(2), form()), ALL)
    assert actual.register(from_(102, registration(2), same), ALL) == 2


def test_a_digest_of_columns_is_compared_as_the_names_are() -> None:
    actual = registry()
    for node in (100, 101):
        actual.register(from_(node, registration(node - 100), form(columns=[digest_columns("ab")])), ALL)
    actual.fix_form(ALL)
    with pytest.raises(UnregisteredNodeError, match=r"the same in another order\. List the columns"):
        actual.register(from_(102, registration(2), form(columns=[digest_columns("ba")])), ALL)
    assert shorten_columns(["x" * MAX_CHARACTERS, "y"]) == [digest_columns(["x" * MAX_CHARACTERS, "y"])]
    assert shorten_columns(["x", "y"]) == ["x", "y"]
