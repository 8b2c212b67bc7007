"""Data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .dataset import Dataset, Examples


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8x8 pixels, 1,797 images of 10 classes, without an official test part.

    Source: the test part of Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), as
    bundled with scikit-learn.
    """

    def load(self) -> Dataset:
        """The images as [n, 1, 8, 8] in [0, 1] (gray levels 0..16 divided by 16)."""
        return _load("digits")


@dataclass(frozen=True)
class Wine:
    """Chemical analyses of wines, 178 rows of 13 features, 3 cultivars, without an official test part.

    The features have different units: normalize them. Source: Aeberhard and Forina (UCI, 1991), as bundled
    with scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [178, 13] in their own units."""
        return _load("wine")


@dataclass(frozen=True)
class BreastCancer:
    """Wisconsin diagnostic breast cancer, 569 rows of 30 features, 2 classes, without an official test part.

    The features have different units: normalize them. Source: Wolberg et al. (UCI, 1995), as bundled with
    scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [569, 30] in their own units."""
        return _load("breast_cancer")


@dataclass(frozen=True)
class Iris:
    """Irises, 150 rows of 4 lengths in cm, 3 species, without an official test part.

    Source: Fisher (1936), as bundled with scikit-learn.
    """

    def load(self) -> Dataset:
        """The rows as [150, 4] in cm."""
        return _load("iris")


def _load(name: str) -> Dataset:
    # Imported here, because that takes as long as all other imports of the package.
    import sklearn.datasets

    raw = getattr(sklearn.datasets, f"load_{name}")()
    x = raw.images[:, None] / 16.0 if name == "digits" else raw.data
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    labels = torch.from_numpy(raw.target.astype(np.int64))
    return Dataset(name, Examples(inputs, labels), None, tuple(map(str, raw.target_names)))
