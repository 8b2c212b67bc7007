"""Data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .dataset import Dataset, Examples


def _sklearn() -> Any:
    """Its data sets; imported when they are wanted, for that takes as long as all else of this package."""
    import sklearn.datasets

    return sklearn.datasets


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8x8 pixels, 1,797 images of 10 classes, without an official test part.

    Source: the test part of Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), as bundled
    with scikit-learn.
    """

    def load(self) -> Dataset:
        """The images as [n, 1, 8, 8] in [0, 1] (gray levels 0..16 divided by 16)."""
        raw = _sklearn().load_digits()
        return _dataset("digits", raw, raw.images[:, None] / 16.0)


@dataclass(frozen=True)
class Wine:
    """Chemical analyses of wines, 178 rows of 13 features, 3 cultivars, without an official test part.

    The features have units of their own: use it with normalization. Source: Aeberhard and Forina (UCI, 1991), as
    bundled with scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [178, 13] in their own units."""
        raw = _sklearn().load_wine()
        return _dataset("wine", raw, raw.data)


@dataclass(frozen=True)
class BreastCancer:
    """Wisconsin diagnostic breast cancer, 569 rows of 30 features, 2 classes, without an official test part.

    The features have units of their own: use it with normalization. Source: Wolberg et al. (UCI, 1995), as bundled
    with scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [569, 30] in their own units."""
        raw = _sklearn().load_breast_cancer()
        return _dataset("breast_cancer", raw, raw.data)


@dataclass(frozen=True)
class Iris:
    """Irises, 150 rows of 4 lengths in cm, 3 species, without an official test part.

    Source: Fisher (1936), as bundled with scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [150, 4] in cm."""
        raw = _sklearn().load_iris()
        return _dataset("iris", raw, raw.data)


def _dataset(name: str, raw: Any, x: np.ndarray) -> Dataset:
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    labels = torch.from_numpy(raw.target.astype(np.int64))
    return Dataset(name, Examples(inputs, labels), None, tuple(str(c) for c in raw.target_names))
