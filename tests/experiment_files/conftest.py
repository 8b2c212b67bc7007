from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedlowrank.config import assembly
from fedlowrank.config.sections import data_section
from fedlowrank.data import federation, sources
from fedlowrank.data.federation import Federation
from tests.experiment_files.common import BlankCifar10, BlankCifar100, BlankTiny, Noise, forget

torch.set_num_threads(1)


@pytest.fixture
def blank_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sources that give blank images in the official numbers, and no models."""
    monkeypatch.setitem(sources.SOURCES, "cifar10", BlankCifar10)
    monkeypatch.setitem(sources.SOURCES, "cifar100", BlankCifar100)
    monkeypatch.setitem(sources.SOURCES, "folder", BlankTiny)
    # the models take seconds to draw and are not at issue
    monkeypatch.setattr(assembly, "build_architecture", lambda name, *rest, **more: name)
    monkeypatch.setattr(assembly, "choose_heads", lambda *_: [])
    # there is no model that could be checked
    monkeypatch.setattr(Federation, "_check_outputs", lambda self: [])
    monkeypatch.setattr(Federation, "_check_lookups", lambda self: None)
    monkeypatch.setattr(federation, "refuse_hidden_state", lambda model: None)
    monkeypatch.setattr(data_section, "normalize", lambda dataset, how: dataset)
    forget()
    yield
    forget()


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sources that give a few small random images."""
    for name in ("cifar10", "cifar100", "mnist"):
        monkeypatch.setitem(sources.SOURCES, name, Noise)
    forget()
    yield
    forget()
