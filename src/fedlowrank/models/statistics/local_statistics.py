"""Statistics of batch normalizations for inference at a client, computed from its training data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ...core.errors import naming
from ...core.tree import Params
from .normalization import FunctionalModule
from .pooled_statistics import Chunks

MAX_KEPT_STATISTICS = 8
"""Maximum number of models whose statistics are kept: as many as a method compares, such as those of its clusters."""


class LocalStatistics:
    """Statistics of one client's training data under the parameters with which it infers.

    Args:
        chunks: inputs of the training data, a few at a time.
        owner: name of the client, for errors.
    """

    def __init__(self, chunks: Chunks, owner: str = "") -> None:
        self._chunks, self._owner = chunks, owner
        self._known: list[tuple[FunctionalModule, Params, Params]] = []

    def complete(self, code: FunctionalModule, params: Params, buffers: Params) -> Params:
        """Add the statistics of the data to parameters.

        Args:
            code: code of the model.
            params: parameters of the model.
            buffers: the client's own buffers by name, which are not changed.
        """
        for known_code, known_params, statistics in self._known:
            if (
                known_code is code
                and known_params.keys() == params.keys()
                and all(_is_same(known_params[n], params[n]) for n in known_params)
            ):
                return params | statistics
        copies = {n: b.clone() for n, b in buffers.items()}
        with naming(self._owner):
            statistics = code.statistics(params | copies, self._chunks)
        self._known = [*self._known[1 - MAX_KEPT_STATISTICS :], (code, params, statistics)]
        return params | statistics


_OF_TOTALS: ContextVar[LocalStatistics | None] = ContextVar("statistics of totals", default=None)


@contextlib.contextmanager
def infer_by(chunks: Chunks, owner: str = "") -> Iterator[None]:
    """Normalize every model within this block by the statistics of these data, as a client does when it infers."""
    token = _OF_TOTALS.set(LocalStatistics(chunks, owner))
    try:
        yield
    finally:
        _OF_TOTALS.reset(token)


_IN_PASS: ContextVar[bool] = ContextVar("training pass", default=False)


@contextlib.contextmanager
def train_by_batches() -> Iterator[None]:
    """Normalize every model within this block by the statistics of each batch, as in training.

    A method may train a model before it infers; its models for inference normalize by all training data elsewhere.
    """
    token = _IN_PASS.set(True)
    try:
        yield
    finally:
        _IN_PASS.reset(token)


def is_training_pass() -> bool:
    """Whether this is within a block :func:`train_by_batches`."""
    return _IN_PASS.get()


def current_statistics() -> LocalStatistics | None:
    """Get the statistics of the enclosing block :func:`infer_by`; None outside of such a block."""
    return _OF_TOTALS.get()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))
