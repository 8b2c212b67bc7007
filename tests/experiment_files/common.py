"""The experiment files, and data sets in place of those that they name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fedlowrank.config.comparison import list_combinations
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.sections import data_section
from fedlowrank.data.dataset import Dataset, Examples

ROOT = Path(__file__).resolve().parents[2] / "experiments"
PFEDLORA = ROOT / "pfedlora"
FEDSLR = ROOT / "fedslr"
FILES = sorted(p for p in ROOT.rglob("*.toml"))


def runnable(folder: Path) -> list[Path]:
    """The files of a folder that are experiments: bases hold what several share and are not run by themselves."""
    return [p for p in FILES if p.is_relative_to(folder) and not p.name.startswith("base")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def loaded(path: Path, *overrides: str) -> ExperimentConfig:
    return ExperimentConfig.read(path, overrides)


def forget() -> None:
    """Parse files anew: experiments name the classes of their sources, which some tests replace."""
    loaded.cache_clear()
    data_section._load.cache_clear()


def variants(path: Path) -> Iterator[ExperimentConfig]:
    """The experiment for each value that it varies."""
    for varied in list_combinations(loaded(path).vary):
        yield loaded(path, *(f"{field}={value}" for field, value in varied.items()))


@dataclass(frozen=True)
class BlankCifar10:
    """As many images of each class as CIFAR-10 has, of one gray pixel: data are shared out by labels."""

    path: str
    classes: ClassVar[int] = 10
    parts: ClassVar[tuple[int, int]] = (50_000, 10_000)

    def load(self) -> Dataset:
        train, test = (Examples(torch.zeros(n, 1, 1, 1), torch.arange(n) % self.classes) for n in self.parts)
        return Dataset("blank", train, test, tuple(map(str, range(self.classes))))


@dataclass(frozen=True)
class BlankCifar100(BlankCifar10):
    """The same of CIFAR-100."""

    classes: ClassVar[int] = 100


@dataclass(frozen=True)
class BlankTiny(BlankCifar10):
    """The same of TinyImageNet."""

    size: int = 32
    classes: ClassVar[int] = 200
    parts: ClassVar[tuple[int, int]] = (100_000, 10_000)


@dataclass(frozen=True)
class Noise:
    """Small random images in place of any data set."""

    path: str
    labels: str = "fine"
    parts: ClassVar[tuple[int, int]] = (240, 80)

    def load(self) -> Dataset:
        classes = 20 if self.labels == "coarse" else 10
        generator = torch.Generator().manual_seed(0)
        train, test = (
            Examples(torch.rand(n, 3, 8, 8, generator=generator), torch.arange(n) % classes)
            for n in self.parts
        )
        return Dataset("noise", train, test, tuple(map(str, range(classes))))
