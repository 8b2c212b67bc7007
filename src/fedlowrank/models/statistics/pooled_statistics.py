"""Statistics of batch normalizations over all examples of a client, computed from chunks of them.

The definition is one forward pass over all examples as a single batch, in training mode: a layer's mean and unbiased
variance are those of all its inputs, and a deeper layer's inputs have been normalized over all examples by the layers
before it. The result depends neither on the order of the examples nor on the size of chunks.

The moments of chunks are pooled exactly (Chan, Golub, LeVeque, 1979), in float64. A deeper layer's inputs from a
chunk are known only once the statistics of the layers before it are, so data of several chunks take one sweep for
each call of a batch normalization; data of one chunk take a single sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import SingleValueError
from ..stateless import exchange_slots

Chunks = Callable[[], Iterable[Any]]
"""The inputs of a client's training data, a few at a time."""

Call = tuple[str, int]
"""A layer's name, with the number of earlier calls of the layer in the forward pass."""


@dataclass(frozen=True)
class Moments:
    """Moments of a normalization's inputs, in float64.

    Attributes:
        count: number of values of each channel.
        mean: means of the channels ``[d]``.
        squares: sums of squared deviations from the means ``[d]``.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(x: Tensor) -> Moments:
        """Compute the moments of inputs ``[b, d, ...]``."""
        x = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
        count = x.numel() // max(1, x.shape[1])
        return Moments(count, mean.double(), variance.double() * count)

    def pooled_with(self, other: Moments) -> Moments:
        """Pool the moments of two sets of inputs."""
        count, difference = self.count + other.count, other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        squares = self.squares + other.squares + difference.square() * (self.count * other.count / count)
        return Moments(count, mean, squares)


def pooled_statistics(
    module: nn.Module, layers: Mapping[str, nn.Module], chunks: Chunks
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute mean and unbiased variance of each layer's inputs, for all examples as a single batch.

    A layer that is called several times gets the mean over its calls, as PyTorch's running statistics without momentum.

    Args:
        module: module in evaluation mode, with the parameters to use.
        layers: batch normalizations of the module by name, including those without running statistics.
        chunks: chunks of the data.

    Returns:
        Mean and variance ``[d]`` in float64 of each layer that the forward pass calls.

    Raises:
        SingleValueError: if a layer sees one value of each channel, which has no variance.
    """
    calls: dict[str, list[Moments]] = {}
    for (name, _), moments in _all_calls(module, layers, chunks).items():
        if moments.count < 2:
            raise SingleValueError(name)
        calls.setdefault(name, []).append(moments)
    return {
        name: (
            torch.stack([m.mean for m in moments_of_calls]).mean(0),
            torch.stack([m.squares / (m.count - 1) for m in moments_of_calls]).mean(0),
        )
        for name, moments_of_calls in calls.items()
    }


def single_value(module: nn.Module, layers: Mapping[str, nn.Module], x: Any) -> str | None:
    """Find the name of the first layer for which these inputs are one value of each channel, or None.

    Args:
        module: module in evaluation mode.
        layers: batch normalizations of the module by name.
        x: inputs ``[b, ...]``, or a dict of inputs.
    """
    calls = _all_calls(module, layers, lambda: [x])
    return next((name for (name, _), moments in calls.items() if moments.count < 2), None)


def _all_calls(module: nn.Module, layers: Mapping[str, nn.Module], chunks: Chunks) -> dict[Call, Moments]:
    """Compute the moments of all calls of the layers, in order."""
    slots = [
        (table, name, value)
        for layer in layers.values()
        for table, name, value in (
            (layer.__dict__, "training", False),
            *((layer._buffers, n, layer._buffers[n]) for n in ("running_mean", "running_var")),
        )
    ]
    moments_by_call: dict[Call, Moments] = {}
    with exchange_slots(slots), torch.no_grad():
        while True:
            new_moments, count = _sweep(module, layers, chunks, moments_by_call)
            # the inputs of a later call are right only once all calls before it are known
            final_moments = dict(list(new_moments.items())[: None if count == 1 else 1])
            moments_by_call |= final_moments
            if len(final_moments) == len(new_moments):
                return moments_by_call


def _sweep(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    chunks: Chunks,
    moments_by_call: Mapping[Call, Moments],
) -> tuple[dict[Call, Moments], int]:
    """Compute the moments of all calls that are not known yet, in the order of calls, and count the chunks."""
    new_moments: dict[Call, Moments] = {}
    calls: Counter[str] = Counter()

    def normalize_by_moments(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        call, x = (name, calls[name]), args[0] if args else kwargs["input"]
        calls[name] += 1
        moments = moments_by_call.get(call)
        if moments is None:
            # a forward pass that differentiates is recorded
            moments = Moments.of(x.detach())
            new_moments[call] = new_moments[call].pooled_with(moments) if call in new_moments else moments
        reference: Any = x if layer.weight is None else layer.weight
        layer._buffers["running_mean"] = moments.mean.to(reference)
        layer._buffers["running_var"] = (moments.squares / moments.count).to(reference)

    # read before hooks are installed, because the division of data may depend on the module's class
    count, inputs = 0, iter(chunks())
    hooks = [
        layer.register_forward_pre_hook(partial(normalize_by_moments, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        for x in inputs:
            count += 1
            calls.clear()
            _ = module(**x) if isinstance(x, dict) else module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return new_moments, count
