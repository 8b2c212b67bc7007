"""Batch normalisation without an owner of its running statistics: by the batch in training, by local statistics at inference.

Running statistics are neither averaged nor sent. Where a client trains, a batch is normalised by itself. Where it infers,
the statistics are those that its own training data give under the very parameters it infers by: nothing to keep in a state,
nothing that is out of date, and the same in every engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TaskError
from ..tree import Params
from .stateless import Stateless

_BATCH = nn.modules.batchnorm._BatchNorm
_INSTANCE = nn.modules.instancenorm._InstanceNorm

Chunks = Callable[[], Iterable[Any]]
"""The inputs of a client's training data, a few at a time."""


class Code:
    """A module as a function of parameters, and of statistics where they are among the parameters.

    Args:
        module: left as it is; if it has batch normalisations with running statistics, a copy is used.

    Attributes:
        names: of the running statistics, as in ``state_dict``.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = [n for n, m in module.named_modules() if _keeps(m)]
        self.names = tuple(f"{n}.{s}".lstrip(".") for n in layers for s in ("running_mean", "running_var"))
        self._aliases = _aliases(module)
        self._batch = module
        if layers:
            self._batch, self._fixed = copy.deepcopy(module), copy.deepcopy(module).eval()
            for layer in self._batch.modules():
                if isinstance(layer, _BATCH) and _keeps(layer):
                    # buffers in place but not tracked: training uses the batch and changes nothing
                    layer.track_running_stats = False
            self._by_statistics = Stateless(self._fixed)
        self._by_batch = Stateless(self._batch)
        self.training(False)

    def training(self, mode: bool) -> None:
        """Switch dropout; without statistics batch normalisation uses the batch in both modes."""
        self._batch.train(mode)
        for layer in self._batch.modules():
            if _keeps(layer):
                layer.train()

    def __call__(self, params: Params, x: Any) -> Tensor:
        """Scores of inputs; a dict of inputs is passed as keyword arguments."""
        if not self.names:
            return self._call(self._by_batch, params, x)
        if self.names[0] in params:
            return self._call(self._by_statistics, params, x)
        try:
            return self._call(self._by_batch, params, x)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise TaskError(
                "a batch of a single example cannot be normalised by itself. Choose a batch size that leaves no client a last "
                "batch of one example, or a model without batch normalisation."
            ) from error

    def _call(self, code: Stateless, params: Params, x: Any) -> Tensor:
        tied = {more: params[n] for n, others in self._aliases.items() if n in params for more in others}
        given, named = (params | tied if tied else params), isinstance(x, dict)
        args, kwargs = ((), x) if named else ((x,), {})
        out: Any = code(given, *args, **kwargs)
        # Hugging Face's models return their scores as an attribute
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(scores, Tensor):
            raise TaskError(
                f"the model {type(self._batch).__name__} returns a {type(out).__name__}, but it must return one tensor of scores "
                "[b, classes]. Wrap it in a module whose forward returns that entry."
            )
        return scores

    def neutral(self) -> Params:
        """Statistics that change nothing: mean 0 and variance 1, for inputs that are no batch."""
        buffers = dict(self._fixed.named_buffers()) if self.names else {}
        return {n: torch.full_like(buffers[n], float(n.endswith("running_var"))) for n in self.names}

    def statistics(self, params: Params, chunks: Chunks) -> Params:
        """Running statistics that data have under these parameters: means over chunks of mean and unbiased variance.

        Args:
            params: of the module.
            chunks: of the data; their sizes should be like each other.
        """
        counter = copy.deepcopy(self._fixed)
        for layer in counter.modules():
            if isinstance(layer, _BATCH) and _keeps(layer):
                layer.train()
                # without momentum the statistics are the plain mean over calls
                layer.momentum = None
                layer.reset_running_stats()
        code = Stateless(counter)
        with torch.no_grad():
            for x in chunks():
                self._call(code, params, x)
        buffers = dict(counter.named_buffers())
        return {name: buffers[name] for name in self.names}


def refuse_instance_statistics(name: str, module: nn.Module) -> None:
    """Raise TaskError where an InstanceNorm keeps running statistics: it normalises each example by itself in training."""
    for layer, m in module.named_modules():
        if isinstance(m, _INSTANCE) and m.track_running_stats:
            raise TaskError(
                f"model {name}: {layer} is an InstanceNorm with running statistics, which have no owner in a federation. "
                "Set track_running_stats=False, or use GroupNorm."
            )


def _keeps(layer: nn.Module) -> bool:
    return isinstance(layer, _BATCH) and layer.running_mean is not None


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of a parameter that several layers hold, its further names, one a layer, by the first."""
    found: dict[int, list[str]] = {}
    for name, layer in module.named_modules():
        for own, p in layer.named_parameters(recurse=False):
            found.setdefault(id(p), []).append(f"{name}.{own}".lstrip("."))
    return {first: tuple(more) for first, *more in found.values() if more}
