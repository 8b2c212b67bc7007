"""What a function computes, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedlowrank.training.captured_variables import code_of, identity


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Settings."""

    scale: float
    parts: Any = ()

    def scaled(self, x: float) -> float:
        """A function of settings."""
        return x * self.scale


@dataclasses.dataclass
class Loose:
    """What may change."""

    scale: float


def make(value: Any) -> Callable[[], Any]:
    return lambda: value


def named(*, value: Any) -> Callable[[], Any]:
    def inner(*, v: Any = value) -> Any:
        return v

    return inner


def test_functions_are_equal_by_code_and_captured_values() -> None:
    assert make(1) is not make(1)
    assert identity(make(1)) == identity(make(1))
    assert hash(identity(make(1))) == hash(identity(make(1)))
    assert identity(make(1)) != identity(make(2))
    assert identity(make(1)) != identity(make(1.0))
    assert identity(make(True)) != identity(make(1))
    assert identity(make("a")) != identity(make("b"))
    assert identity(named(value=1)) == identity(named(value=1))
    assert identity(named(value=1)) != identity(named(value=2))
    assert identity(make(make(1))) == identity(make(make(1)))
    assert identity(make(make(1))) != identity(make(make(2)))
    assert identity(make([1, (2.0, {"a": None})])) == identity(make([1, (2.0, {"a": None})]))
    assert identity(make([1, (2.0, {"a": None})])) != identity(make([1, (2.0, {"a": 3})]))
    assert identity(make(Frozen(1.0).scaled)) == identity(make(Frozen(1.0).scaled))
    assert identity(make(Frozen(1.0).scaled)) != identity(make(Frozen(2.0).scaled))
    assert identity(lambda: 1) != identity(lambda: 2)


def test_other_things_count_by_being_the_same_or_as_the_caller_says() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    for a, b in [(one, other), (Loose(1.0), Loose(1.0)), (object(), object())]:
        assert identity(make(a)) == identity(make(a))
        assert identity(make(a)) != identity(make(b))
        assert identity(make(a), type) == identity(make(b), type)
        with pytest.raises(KeyError):
            identity(make(a), lambda value: {}[str(type(value))])


def test_what_a_function_refers_to_by_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> Any:
        return FACTOR, helper()

    before = identity(names)
    assert identity(names) == before
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert identity(names) != before
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert identity(names) == before
    monkeypatch.setitem(globals(), "helper", lambda: 1)
    assert identity(names) != before


FACTOR = 2


def helper() -> int:
    """Called by its name."""
    return 0


def test_a_function_may_refer_to_itself_and_to_what_is_not_there_yet() -> None:
    def itself(n: int) -> int:
        return 0 if n == 0 else itself(n - 1)

    assert identity(itself) == identity(itself)

    def early() -> int:
        return late

    before = identity(early, type)
    late = 1
    assert identity(early, type) != before


def test_code_of_ignores_objects_and_keeps_numbers() -> None:
    assert code_of(make(torch.zeros(1))) == code_of(make(torch.ones(2)))
    assert code_of(make(1)) != code_of(make(2))
    assert code_of(Frozen(1.0).scaled) == code_of(Frozen(2.0).scaled)
    assert code_of(torch.relu) == code_of(torch.relu) != code_of(torch.abs)
