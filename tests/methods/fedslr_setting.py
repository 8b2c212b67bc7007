"""A training whose rate falls and whose weights decay, for FedSLR, LPGD and GPGD, and what their references take."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlowrank.core.learning.optimizer import SGD, Schedule

DECAY = 1e-2
OPTIMIZER = SGD(lr=0.2, weight_decay=DECAY, schedule=Schedule("exponential", factor=0.8))
DECAYING_LOCAL = {"optimizer": OPTIMIZER, "batch_size": 8, "epochs": 2}


def get_learning_rate(round: int) -> float:
    """Get the learning rate of a round."""
    return 0.2 * 0.8**round


def is_nonzero(values: Any) -> bool:
    """Whether no weight and no bias of a network is zero throughout."""
    return all(bool(np.abs(w).max() > 1e-3) for layer in values for w in layer)
