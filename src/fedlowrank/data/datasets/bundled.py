"""Data sets that are included in scikit-learn and need no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...core.arguments.field_checks import CheckedFields
from ..dataset import Dataset, Examples


class _Bundled(CheckedFields):
    """A data set of scikit-learn; all examples are the training part."""

    name: ClassVar[str]

    def load(self) -> Dataset:
        """Load the examples as float32."""
        # imported here, because it takes as long as all other imports of the package
        import sklearn.datasets

        bunch = getattr(sklearn.datasets, f"load_{self.name}")()
        x = bunch.images[:, None] / 16.0 if self.name == "digits" else bunch.data
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        labels = torch.from_numpy(bunch.target.astype(np.int64))
        return Dataset(self.name, Examples(inputs, labels), None, tuple(map(str, bunch.target_names)))


@dataclass(frozen=True)
class Digits(_Bundled):
    """Handwritten digits, 1,797 images [1, 8, 8] in [0, 1] of 10 classes, without an official test part.

    Source: the test part of Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), as
    bundled with scikit-learn.
    """

    name = "digits"


@dataclass(frozen=True)
class Wine(_Bundled):
    """Chemical analyses of wines, 178 rows of 13 features, 3 cultivars, without an official test part.

    The features have different units: normalize them. Source: Aeberhard and Forina (UCI, 1991), as bundled
    with scikit-learn.
    """

    name = "wine"


@dataclass(frozen=True)
class BreastCancer(_Bundled):
    """Wisconsin diagnostic breast cancer, 569 rows of 30 features, 2 classes, without an official test part.

    The features have different units: normalize them. Source: Wolberg et al. (UCI, 1995), as bundled with
    scikit-learn.
    """

    name = "breast_cancer"


@dataclass(frozen=True)
class Iris(_Bundled):
    """Irises, 150 rows of 4 lengths in cm, 3 species, without an official test part.

    Source: Fisher (1936), as bundled with scikit-learn.
    """

    name = "iris"
