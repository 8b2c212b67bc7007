"""Models that local training evaluates but does not train, such as a teacher or the model received."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...core.contract import Model


@contextlib.contextmanager
def in_eval_mode(model: Model) -> Iterator[None]:
    """Put a model in evaluation mode within this block, as ``model.eval()`` does, and restore its mode afterwards.

    Dropout is off. Batch normalizations without running statistics still use those of the batch.
    """
    if not model.training:
        yield
        return
    model.module.eval()
    try:
        yield
    finally:
        model.module.train()
