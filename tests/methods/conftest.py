from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedlowrank import Loss
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from tests.golden import contrast_and_mixture_reference, floral_reference, reference

SMOOTHED_SHARE = 0.3


@pytest.fixture(params=[Sequential, Vectorized])
def engine(request: pytest.FixtureRequest) -> type[Engine]:
    """Golden tests are of clients one by one, and of clients at once."""
    return request.param


@pytest.fixture
def smoothed_loss(monkeypatch: pytest.MonkeyPatch) -> Loss:
    """The cross-entropy with smoothed labels, which the NumPy references then minimize, too.

    The gradient of the cross-entropy is softmax - t with one-hot targets t; with smoothed labels t = (1 - ε) one-hot
    + ε/C. So a reference whose targets are smoothed is that of ``Loss("cross_entropy", label_smoothing=ε)``: in
    training, in the choice of a cluster, and in steps before inference.
    """
    for golden in (reference, floral_reference, contrast_and_mixture_reference):
        monkeypatch.setattr(golden, "one_hot", smooth_labels)
        if hasattr(golden, "cross_entropy"):
            monkeypatch.setattr(golden, "cross_entropy", compute_smoothed_cross_entropy)
    return Loss("cross_entropy", label_smoothing=SMOOTHED_SHARE)


def smooth_labels(y: Any, classes: int) -> Any:
    """Compute targets in which every class has its part of the smoothed share."""
    return (1 - SMOOTHED_SHARE) * np.eye(classes)[y] + SMOOTHED_SHARE / classes


def compute_smoothed_cross_entropy(scores: Any, y: Any) -> float:
    """Compute the mean cross-entropy of smoothed labels."""
    return float(-(smooth_labels(y, scores.shape[1]) * np.log(reference.softmax(scores))).sum(1).mean())
