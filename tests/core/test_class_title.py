"""A class of a method that states no title is called after its base and itself, wherever its title is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.methods import METHODS
from fedlowrank.models.fingerprint import describe_callable
from fedlowrank.testing.check import small_federation
from fedlowrank.testing.purity import CalledTwice
from fedlowrank.trust.protection import Protected
from fedlowrank.trust.trust_settings import Compression, Trust

FedAvg: Any = METHODS["fedavg"]


class Own(FedAvg):  # type: ignore[misc]
    """States no title."""


class Further(Own):
    """Neither."""


class Titled(Own):
    """States one."""

    title = "Damped FedAvg"


class OwnWrapper(CalledTwice):
    """A wrapper that states no title."""


def test_a_class_without_a_title_is_called_after_its_base_and_itself() -> None:
    @dataclass(frozen=True)
    class Inner(Titled):
        beta: float = 0.5

    @dataclass(frozen=True, slots=True)
    class Slotted(Own):
        pass

    assert [c.title for c in (FedAvg, Own, Further, Titled, Inner)] == [
        "FedAvg", f"FedAvg ({__name__}:Own)", f"FedAvg ({__name__}:Further)", "Damped FedAvg", "Damped FedAvg (Inner)",
    ]  # fmt: skip
    assert Own().title == Own.title
    assert Inner().title == "Damped FedAvg (Inner)"
    assert Slotted.title == "FedAvg (Slotted)"


def test_an_error_names_the_class_itself() -> None:
    with pytest.raises(ConfigError, match=rf"^FedAvg \({__name__}:Own\): epochs"):
        Own(epochs=0)


def test_a_wrapper_has_the_title_of_the_method_within() -> None:
    task, trust = small_federation(False).task(1), Trust(compression=Compression("int8"))
    assert Protected(inner=Own(), task=task, trust=trust).title == Own.title
    assert CalledTwice(inner=Titled()).title == "Damped FedAvg"
    # one of a user's own is another method, too
    assert OwnWrapper(inner=FedAvg()).title == f"Wrapper ({__name__}:OwnWrapper)"


def test_such_a_title_is_no_part_of_the_code_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_callable(Own)
    monkeypatch.delattr(Own, "title")
    assert Own.title == "FedAvg"
    assert describe_callable(Own) == described


def test_a_misspelt_title_of_a_derived_class_is_found() -> None:
    class Misspelt(FedAvg):  # type: ignore[misc]
        titles = "Mine"

    with pytest.raises(ConfigError, match="Did you mean 'title'"):
        Misspelt()
