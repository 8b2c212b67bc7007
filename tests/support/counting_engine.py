"""An engine that counts how many clients it executes together."""

from __future__ import annotations

from typing import Any

from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.training.cohorts.cohort_trainer import CohortTrainer


class CountingEngine(Vectorized):
    """Counts how many clients were executed together.

    Attributes:
        sizes: of every group of more than one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

        sizes = self.sizes

        class CountingTrainer(CohortTrainer):
            def _train_parts(self, *args: Any) -> Any:
                sizes.append(len(self.client_trainers))
                return super()._train_parts(*args)

        self.cohort_trainer = CountingTrainer  # type: ignore[misc]  # of this engine alone
