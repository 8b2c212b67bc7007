"""Sources of data sets by name."""

from __future__ import annotations

from typing import Protocol

from .arrays import Arrays
from .dataset import Dataset
from .datasets.bundled import BreastCancer, Digits, Iris, Wine
from .datasets.cifar import Cifar10, Cifar100
from .datasets.csv_table import Csv
from .datasets.huggingface import HuggingFace
from .datasets.idx import Mnist
from .datasets.images import Folder
from .datasets.leaf import Femnist
from .datasets.shakespeare import Shakespeare
from .datasets.synthetic import LowRankTeacher, SyntheticLinear, SyntheticMLP


class Source(Protocol):
    """A data set that can be loaded; its settings are the fields of a dataclass."""

    def load(self) -> Dataset:
        """Read the data set into memory.

        Raises:
            DataError: if the data set cannot be read; the message says what was expected and what was found.
        """
        ...


SOURCES: dict[str, type] = {
    "digits": Digits,
    "wine": Wine,
    "breast_cancer": BreastCancer,
    "iris": Iris,
    "mnist": Mnist,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "folder": Folder,
    "arrays": Arrays,
    "csv": Csv,
    "femnist": Femnist,
    "shakespeare": Shakespeare,
    "huggingface": HuggingFace,
    "synthetic_linear": SyntheticLinear,
    "synthetic_mlp": SyntheticMLP,
    "low_rank_teacher": LowRankTeacher,
}
"""Sources by name."""
