"""What is refused and how it is said; limits; messages made by hand; the memory that a large upload takes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, Lengths, OneOf
from fedlowrank.core.errors import ConfigError
from fedlowrank.linalg.pair import Pair
from fedlowrank.network.validation.upload_forms import Template
from fedlowrank.network.validation.uploads import Blocklist, RefusedReplyError, inspect_upload
from tests.network.validation.attacked_rounds import CASES, LIMITS, judged, message, raw

CLIENT = ClientInfo(7, 100, "m")


def refusal(value: Any, template: Template, limits: Limits = LIMITS) -> RefusedReplyError | None:
    """The error by which an upload is refused, or None."""
    try:
        inspect_upload(tree.encode(value), template, CLIENT, limits)
    except RefusedReplyError as error:
        return error
    return None


def test_plain_values_are_of_the_expected_kind() -> None:
    one = torch.ones(1)
    form = {
        "x": 1.5, "n": 3, "s": "word", "b": True, "none": None, "l": [1, "two"], "t": (2.5,), "p": Pair(one, one)
    }  # fmt: skip
    template = Template.of(form)
    for changes in ({}, {"x": -1e308, "n": 10**4000, "b": False, "l": [7, "two"], "t": (0.0,)}):
        assert refusal({**form, **changes}, template) is None
    wrong: dict[str, list[Any]] = {
        "x": [math.nan, math.inf, -math.inf, 1, True, "1.5", None, torch.tensor(1.5)],
        "n": [3.0, True, "3", None, torch.tensor(3)],
        "s": ["words", "", 1, None],
        "b": [1, 0, None, "True"],
        "none": [0, False, {}, [], ""],
        "l": [(1, "two"), [1], [1, "two", 3], [1, "2"], ["two", 1], {"0": 1, "1": "two"}],
        "t": [[2.5], (2.5, 2.5), (), (math.nan,)],
        "p": [{"b": one, "a": one}, Pair(one, torch.ones(2))],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        actual = refusal({**form, name: value}, template)
        assert actual is not None, (name, value)
        assert actual.path.split("/")[1] == name


def test_the_message_names_client_path_and_what_was_expected() -> None:
    lengths = Lengths({"u": torch.zeros(0, 5)}, 9)
    template = Template.of({"layers": [{"a/b": torch.zeros(2, 3)}, {"a/b": torch.zeros(4)}], "m": lengths})

    def reason(layer: Any = None, u: Any = None) -> str:
        second = {"a/b": torch.ones(4)} if layer is None else layer
        factor = torch.ones(3, 5) if u is None else u
        actual = refusal({"layers": [{"a/b": torch.ones(2, 3)}, second], "m": {"u": factor}}, template)
        return "" if actual is None else str(actual).removeprefix("the reply of client 7 was refused at ")

    assert reason() == ""
    half = {"a/b": torch.ones(4).bfloat16()}
    assert reason(half) == "/layers/1/a~1b: expected float32 [4], found bfloat16 [4]"
    other = {"c": torch.ones(4)}
    assert reason(other) == "/layers/1: expected a dict of 1 parts, found one without 'a/b' and with 'c'"
    assert reason(u=torch.ones(10, 5)) == "/m/u: expected float32 [1..9, 5], found float32 [10, 5]"
    assert reason(u=torch.ones(3, 4)) == "/m/u: expected float32 [3, 5], found float32 [3, 4]"
    nan = {"a/b": torch.tensor([1.0, math.nan, 1, 1])}
    assert reason(nan) == "/layers/1/a~1b: it holds a NaN or an infinity"
    many = refusal({"x" * 10_000: 1, **{str(i): 1 for i in range(1000)}}, template)
    assert len(str(many)) < 600


def test_a_message_has_one_line_whatever_a_client_calls_itself() -> None:
    with pytest.raises(RefusedReplyError) as error:
        inspect_upload(message({"c": "a\nERROR\x1b[31m: forged", "d": {}}), Template.of(None), CLIENT, LIMITS)
    assert "holds a a?ERROR?[31m: forged, which" in str(error.value)
    with pytest.raises(RefusedReplyError) as error:
        inspect_upload(tree.encode({"a\nb": 1}), Template.of({"x": 1}), CLIENT, LIMITS)
    assert str(error.value).isprintable()


def test_booleans_are_counted_before_they_are_unpacked() -> None:
    mask = torch.zeros(100, dtype=torch.bool)
    template = Template.of({"m": mask, "n": [mask, OneOf(torch.zeros(50), mask)]})
    assert template.bools == 300
    assert refusal({"m": mask, "n": [mask, mask]}, template) is None
    actual = refusal({"m": mask, "n": [mask, torch.zeros(101, dtype=torch.bool)]}, template)
    assert "more booleans than it may; the last are the 101 at /n/1" in str(actual)


def test_a_common_length_is_common_and_within_its_bounds() -> None:
    form = Lengths([torch.zeros(0), torch.zeros(2, 0)], 3)
    template = Template.of({"a": form, "b": form, "c": OneOf(torch.zeros(2), form)})

    def passes(a: int, also: int, b: int, c: Any) -> bool:
        value = {"a": [torch.ones(a), torch.ones(2, also)], "b": [torch.ones(b), torch.ones(2, b)], "c": c}
        return refusal(value, template) is None

    whole, factors = torch.ones(2), [torch.ones(2), torch.ones(2, 2)]
    assert passes(3, 3, 1, whole)
    assert passes(1, 1, 3, factors)
    for a, also, b in ((3, 2, 1), (1, 3, 1), (4, 4, 1), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)):
        assert not passes(a, also, b, whole)
    for c in (
        torch.ones(3),
        [torch.ones(4), torch.ones(2, 4)],
        [torch.ones(2)],
        None,
        [torch.ones(1), torch.ones(2, 2)],
    ):
        assert not passes(1, 1, 1, c)


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_kind_of_number_is_looked_at(name: str) -> None:
    dtype = getattr(torch, name)
    # beyond the first chunk, too
    for size, where in ((1, 0), (3, 2), (150_000, 149_999), (150_000, 70_000)):
        template = Template.of({"x": torch.ones(size).to(dtype)})
        assert refusal({"x": torch.ones(size).to(dtype)}, template) is None
        # float8_e4m3fn has no infinity
        for bad in (math.nan,) if name == "float8_e4m3fn" else (math.nan, math.inf):
            wide = torch.ones(size, dtype=torch.float32)
            wide[where] = bad
            actual = str(refusal({"x": wide.to(dtype)}, template))
            assert actual.endswith("at /x: it holds a NaN or an infinity")


# -- limits and bans


INTEGER = "input should be a valid integer"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_bytes": 0}, "limits: max_bytes must be >= 1; it is 0"),
        ({"max_bytes": 1.5}, f"limits.max_bytes: {INTEGER}, got a number with a fractional part; it is 1.5"),
        ({"max_bytes": True}, f"limits.max_bytes: {INTEGER}; it is True"),
        ({"max_norm": 0.0}, "limits: max_norm must be > 0; it is 0.0"),
        ({"max_norm": -1}, "limits: max_norm must be > 0; it is -1"),
        ({"max_norm": float("nan")}, "limits: max_norm must be > 0; it is nan"),
        ({"max_norm": float("inf")}, "limits: max_norm must be > 0; it is inf"),
        ({"max_norm": "1"}, "limits.max_norm: input should be a valid number; it is '1'"),
        ({"max_examples": 0}, "limits: max_examples must be >= 1; it is 0"),
        ({"max_examples": "9"}, f"limits.max_examples: {INTEGER}; it is '9'"),
        ({"update_ratio": 0.5}, "limits: update_ratio must be >= 1, or 0 for no bound; it is 0.5"),
        (
            {"examples_ratio": float("nan")},
            "limits: examples_ratio must be >= 1, or 0 for no bound; it is nan",
        ),
        ({"ban_after": -1}, "limits: ban_after must be >= 0; it is -1"),
        ({"ban_after": None}, f"limits.ban_after: {INTEGER}; it is None"),
        ({"ban_after": False}, f"limits.ban_after: {INTEGER}; it is False"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Limits(**wrong)
    assert str(error.value) == says


VALUE = {
    "w": torch.tensor([3.0, 0.0]),
    "half": torch.tensor([4.0]).bfloat16(),
    "n": torch.tensor([10**6]),
    "x": 12.0,
}
TEMPLATE = Template.of(VALUE)


def test_the_norm_is_that_of_all_floating_point_numbers() -> None:
    data = tree.encode(VALUE)
    inspect_upload(data, TEMPLATE, CLIENT, Limits(max_norm=13.0))
    with pytest.raises(RefusedReplyError, match=r"client 7 .* norm is 13, above limits.max_norm = 12.9"):
        inspect_upload(data, TEMPLATE, CLIENT, Limits(max_norm=12.9))


def test_the_norm_of_large_numbers_does_not_overflow() -> None:
    wide = {"w": torch.full((70_000,), 1e300, dtype=torch.float64), "v": torch.full((4,), 3e38)}
    template, data = Template.of(wide), tree.encode(wide)
    inspect_upload(data, template, CLIENT, Limits())
    norm = 1e300 * 70_000**0.5
    inspect_upload(data, template, CLIENT, Limits(max_norm=norm * 1.001))
    with pytest.raises(RefusedReplyError, match=r"norm is 2.646e\+302"):
        inspect_upload(data, template, CLIENT, Limits(max_norm=norm * 0.999))


def test_bytes_are_limited_before_they_are_looked_at() -> None:
    data = tree.encode(VALUE)
    assert TEMPLATE.bytes == len(data)
    inspect_upload(data, TEMPLATE, CLIENT, Limits(max_bytes=len(data)))
    with pytest.raises(RefusedReplyError, match=rf"it has {len(data)} bytes; at most {len(data) - 1} "):
        inspect_upload(data, TEMPLATE, CLIENT, Limits(max_bytes=len(data) - 1))
    most = 2 * len(data) + 65536
    with pytest.raises(RefusedReplyError, match="not an encoded tree"):
        inspect_upload(b"\1" + b"\0" * (most - 1), TEMPLATE, CLIENT, Limits())
    with pytest.raises(RefusedReplyError, match=f"at most {most} "):
        inspect_upload(b"x" * (most + 1), TEMPLATE, CLIENT, Limits())


def test_clients_are_blocked_after_so_many_refusals_and_stay_so() -> None:
    counts: dict[int, int] = {}
    blocklist = Blocklist(3, counts)
    assert [blocklist.add_refusal(5) for _ in range(3)] == [False, False, True]
    assert not blocklist.add_refusal(12)
    assert counts == {5: 3, 12: 1}
    assert [blocklist.is_blocked(i) for i in (5, 12, 0)] == [True, False, False]
    assert not Blocklist(0, counts).add_refusal(5)


# -- messages made by hand


HAND_MADE: dict[str, bytes] = {
    "a deep skeleton": message(json.loads('{"l":[' * 300 + '"t"' + "]}" * 300)),
    "a header that is nested without end": raw(b"[" * 60_000),
    "a skeleton that is nested without end": raw(
        json.dumps({"__metadata__": {"tree": '{"l":[' * 9000}}).encode() + b" " * 7
    ),
    "a tensor larger than its data": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[1000000000,1000],"data_offsets":[0,8]}}', b"\0" * 8
    ),
    "a product that overflows": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'
    ),
    "a shape that no integer holds": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}'
    ),
    "a negative shape": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"\0" * 4
    ),
    "offsets that run backwards": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}', b"\0" * 8
    ),
    "tensors that overlap": raw(
        b'{"__metadata__":{"tree":"\\"t\\""},"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"/a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', b"\0" * 12
    ),
    "bits that are not there": message({"d": {"m": {"b": [10**12]}}}, **{"/m": torch.zeros(2, dtype=torch.uint8)}),
    "bits of a product of zero": message({"b": [0, 2**63]}, **{"": torch.zeros(0, dtype=torch.uint8)}),
    "bools that are not packed": message("t", **{"": torch.ones(3, dtype=torch.bool)}),
    "a list as a plain value": message({"v": [1, [2, {"x": None}]]}),
    "a dict as a plain value": message({"v": {"a": 1}}),
    "a class of unknown settings": message({"c": "fedlowrank.linalg.delta:DeltaForm", "d": {"kind": {"v": "no such"}}}),
    "a class that is none": message({"c": "os:system", "d": {"a": {"v": "true"}}}),
    "a number with too many digits": raw(json.dumps({"__metadata__": {"tree": '{"v":' + "9" * 5000 + "}"}}).encode()),
    "keys that stand twice": raw(
        b'{"__metadata__":{"tree":"{\\"d\\":{\\"a\\":{\\"v\\":1},\\"a\\":\\"t\\"}}"},'
        b'"/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"/a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "lone surrogates": raw(b'{"__metadata__":{"tree":"{\\"d\\":{\\"\\\\ud800\\":{\\"v\\":1}}}"}}'),
}  # fmt: skip


@pytest.mark.few(18)
@pytest.mark.parametrize("what", HAND_MADE)
def test_messages_made_by_hand_are_refused(what: str) -> None:
    for name in CASES:
        assert judged(name, HAND_MADE[what]) is None
    with pytest.raises(RefusedReplyError):
        inspect_upload(HAND_MADE[what], Template.of(torch.zeros(1)), ClientInfo(0, 1, "m"), LIMITS)


BOMBS = """
import json, resource, sys, time
import safetensors.torch, torch
torch.set_num_threads(1)
from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract.method import ClientInfo
from fedlowrank.network.validation.upload_forms import Template
from fedlowrank.network.validation.uploads import RefusedReplyError, inspect_upload

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
client, size = ClientInfo(0, 1, "m"), 48_000_000
value = {str(i): torch.full((size // 32,), 0.5) for i in range(8)}
template, data = Template.of(value), tree.encode(value)
del value
small = Template.of({"x": torch.zeros(4), "m": torch.zeros(4, dtype=torch.bool)})
inspect_upload(tree.encode({"x": torch.zeros(4), "m": torch.zeros(4, dtype=torch.bool)}), small, client, Limits())
# the peak of what came before is not ours
held = bytearray(3 * size)
del held
before = peak()
held = inspect_upload(data, template, client, Limits(max_norm=1e9))
print(json.dumps({"more": (peak() - before) / size, "held": sum(t.nbytes for t in held.values()) / size}))
del held

def raw(header, body=b""): return len(header).to_bytes(8, "little") + header + body
bits = {"tree": json.dumps({"d": {"m": {"b": [8 * size]}}})}
meta = lambda text: b'{"__metadata__":{"tree":' + json.dumps(text).encode() + b"}}"
bombs = {
    "lists": (raw(meta("{\\"v\\":[" + "[]," * (size // 4) + "[]]}")), template),
    "header": (raw(b'{"a":[' + b"{}," * (size // 4) + b"{}]}"), template),
    "lie": ((2**62).to_bytes(8, "little") + data[8:], template),
    "bits": (tree.encode({"x": torch.zeros(4), "m": torch.zeros(400_000, dtype=torch.bool)}), small),
    "many bits": (safetensors.torch.save({"/m": torch.zeros(size, dtype=torch.uint8)}, bits), template),
    "tensors": (tree.encode({str(i): torch.zeros(0) for i in range(20_000)}), template),
    "large": (data, small),
}
for name, (bomb, form) in bombs.items():
    before, clock = peak(), time.perf_counter()
    try:
        inspect_upload(bomb, form, client, Limits())
        print(json.dumps({"name": name, "passed": True}))
    except RefusedReplyError as error:
        print(json.dumps({"name": name, "more": (peak() - before) / 1e6, "seconds": time.perf_counter() - clock}))
"""


@pytest.mark.full
def test_a_large_upload_is_held_once_and_bombs_take_neither_memory_nor_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMBS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    first, *bombs = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["held"] == 1
    assert first["more"] < 1.2
    assert len(bombs) == 7
    for actual in bombs:
        assert "passed" not in actual, actual
        assert actual["more"] < 30, actual
        assert actual["seconds"] < 3, actual
