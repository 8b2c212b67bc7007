"""Batch normalization without running statistics: by the batch in training, by local data at inference.

Running statistics are neither averaged nor sent. Where a client trains, a batch is normalized by itself.
Where it infers, the statistics are those that its own training data give under the very parameters it infers
by: nothing to keep in a state, nothing that is out of date, and the same in every engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import TaskError
from ..core.tree import Params
from .stateless import SavedSlots, Stateless, is_within, restore

_BATCH = nn.modules.batchnorm._BatchNorm
_NAME = re.compile(r"Norm(\dd)?$")
_INSTANCE = nn.modules.instancenorm._InstanceNorm

Chunks = Callable[[], Iterable[Any]]
"""The inputs of a client's training data, a few at a time."""


class FunctionalModule:
    """A module as a function of parameters, and of statistics where they are among the parameters.

    The module itself is called, so its hooks run and attributes that the user sets later count.

    Args:
        module: left as it is, but for what its own ``forward`` changes.
        without: dotted name of a submodule that passes its input on instead, such as the head.
        frozen: batch normalizations that the module keeps in evaluation mode, and which are therefore left
            alone.
        backward_slots: the module's slots before a backward pass, shared by all that call the same module.

    Attributes:
        names: of the running statistics, as in ``state_dict``.
    """

    def __init__(
        self,
        module: nn.Module,
        without: str | None = None,
        frozen: frozenset[nn.Module] = frozenset(),
        backward_slots: SavedSlots | None = None,
    ) -> None:
        self._module = module
        self._stateless = Stateless(module)
        layers = {
            n: m
            for n, m in module.named_modules()
            if _has_statistics(m) and m not in frozen and not is_within(n, without)
        }
        self._layers = list(layers.values())
        self.names = tuple(f"{n}.{s}".lstrip(".") for n in layers for s in ("running_mean", "running_var"))
        self._aliases = _aliases(module)
        self._without: SavedSlots = []
        if without is not None:
            parent, _, leaf = without.rpartition(".")
            self._without = [(module.get_submodule(parent)._modules, leaf, nn.Identity())]
        self._backward_slots: SavedSlots = [] if backward_slots is None else backward_slots

    def __call__(self, params: Params, x: Any, buffers: Params | None = None) -> Tensor:
        """Scores of inputs; a dict of inputs is passed as keyword arguments.

        Args:
            params: parameters, and statistics of batch normalizations or none.
            x: inputs.
            buffers: further buffers by name; replaced by what ``forward`` makes of them.
        """
        self.release()
        saved: SavedSlots = []
        given = {**self._with_aliases(params), **(buffers or {})}
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        try:
            self._install(given, saved)
            out: Any = self._module(*args, **kwargs)
            if buffers is not None:
                for name in buffers:
                    buffers[name] = self._stateless.current(name)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise TaskError(
                "a batch of a single example cannot be normalized by itself. Choose a batch size that "
                "leaves no client a last batch of one example, or a model without batch normalization."
            ) from error
        finally:
            restore(saved)
        # Hugging Face's models return their scores as an attribute
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(scores, Tensor):
            raise TaskError(
                f"the model {type(self._module).__name__} returns a {type(out).__name__}, but it must return "
                "one tensor of scores [b, classes]. Wrap it in a module whose forward returns that entry."
            )
        return scores

    def keep_for_backward(self, scores: Tensor, params: Params) -> None:
        """Let a backward pass find the parameters of this forward pass in the module again.

        ``torch.utils.checkpoint`` computes activations a second time when the gradient is taken. By then the
        module holds its own parameters again, so the gradient would silently be that of another model. They
        are installed once more when the gradient reaches these scores, and stay until :meth:`release`.
        """
        if scores.requires_grad and scores.grad_fn is not None:

            def install(_: Tensor) -> None:
                self.release()
                self._install(self._with_aliases(params), self._backward_slots)

            scores.register_hook(install)

    def release(self) -> None:
        """Give the module its own tensors back after a backward pass."""
        restore(self._backward_slots)

    def _with_aliases(self, params: Params) -> Params:
        tied = {more: params[n] for n, others in self._aliases.items() if n in params for more in others}
        return params | tied if tied else params

    def _install(self, params: Params, saved: SavedSlots) -> None:
        """Exchange tensors, the head, and the mode of batch normalizations."""
        by_batch = bool(self.names) and self.names[0] not in params
        for layer in self._layers:
            # by the batch, and without a change to the running statistics; or by the statistics that are
            # given
            for flag, value in (("training", by_batch), ("track_running_stats", not by_batch)):
                saved.append((layer.__dict__, flag, layer.__dict__[flag]))
                layer.__dict__[flag] = value
        for table, name, value in self._without:
            saved.append((table, name, table[name]))
            table[name] = value
        self._stateless.install(params, saved)

    def neutral(self) -> Params:
        """Statistics that change nothing: mean 0 and variance 1, for inputs that are no batch."""
        return {
            n: torch.full_like(self._stateless.current(n), float(n.endswith("running_var")))
            for n in self.names
        }

    def statistics(self, params: Params, chunks: Chunks) -> Params:
        """Running statistics of data under these parameters: means of the chunks' mean and unbiased variance.

        Args:
            params: of the module.
            chunks: of the data; their sizes should be like each other.
        """
        found = self.neutral()
        saved: SavedSlots = []
        given = self._with_aliases(params)
        try:
            self._stateless.install({**given, **found}, saved)
            for layer in self._layers:
                # without momentum the statistics are the plain mean over calls
                for flag, value in (("training", True), ("track_running_stats", True), ("momentum", None)):
                    saved.append((layer.__dict__, flag, layer.__dict__[flag]))
                    layer.__dict__[flag] = value
                saved.append((layer._buffers, "num_batches_tracked", layer.num_batches_tracked))
                layer._buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
            with torch.no_grad():
                for x in chunks():
                    self._module(**x) if isinstance(x, dict) else self._module(x)
        finally:
            restore(saved)
        return found


def refuse_instance_statistics(name: str, module: nn.Module) -> None:
    """Raise TaskError if an InstanceNorm keeps running statistics, which have no owner."""
    for layer, m in module.named_modules():
        if isinstance(m, _INSTANCE) and m.track_running_stats:
            raise TaskError(
                f"model {name}: {layer} is an InstanceNorm with running statistics, which have no owner in a "
                "federation. Set track_running_stats=False, or use GroupNorm."
            )


def frozen_normalizations(module: nn.Module) -> frozenset[nn.Module]:
    """Batch normalizations that the module's own ``train`` keeps in evaluation mode."""
    module.train()
    frozen = frozenset(m for m in module.modules() if _has_statistics(m) and not m.training)
    module.eval()
    return frozen


def normalization_parameters(module: nn.Module, layers: Literal["batch", "all"] = "all") -> set[str]:
    """Names of the scales and shifts of a module's normalization layers.

    Args:
        module: of which the names are, as in ``named_parameters``.
        layers: batch normalizations, those of PyTorch and subclasses of them; or also all other normalization
            layers of PyTorch, and classes named ``...Norm``.
    """
    own = {
        id(p)
        for m in module.modules()
        if isinstance(m, _BATCH)
        or (layers == "all" and any(_NAME.search(c.__name__) for c in type(m).__mro__))
        for p in m.parameters(recurse=False)
    }
    return {n for n, p in module.named_parameters() if id(p) in own}


def zero_normalizations(params: Params, module: nn.Module) -> Params:
    """Parameters of a module, with zero for the scales and shifts of its normalization layers."""
    names = normalization_parameters(module)
    return {n: torch.zeros_like(p) if n in names else p for n, p in params.items()}


def _has_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _BATCH) and layer.running_mean is not None


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of a parameter that several layers hold, its further names, one a layer, by the first."""
    found: dict[int, list[str]] = {}
    for name, layer in module.named_modules():
        for own, p in layer.named_parameters(recurse=False):
            found.setdefault(id(p), []).append(f"{name}.{own}".lstrip("."))
    return {first: tuple(more) for first, *more in found.values() if more}
