"""Sources of data sets by name."""

from __future__ import annotations

from typing import Protocol

from .arrays import Arrays
from .bundled import BreastCancer, Digits, Iris, Wine
from .cifar import Cifar10, Cifar100
from .csv_table import Csv
from .dataset import Dataset
from .huggingface import HuggingFace
from .idx import Mnist
from .images import Folder
from .leaf import Femnist
from .shakespeare import Shakespeare
from .synthetic import LowRankTeacher, SyntheticLinear, SyntheticMLP


class Source(Protocol):
    """A data set that can be loaded; its settings are the fields of a dataclass."""

    def load(self) -> Dataset:
        """Read the data set into memory.

        Raises:
            DataError: if it cannot be read; the message says what was expected and what was found.
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
