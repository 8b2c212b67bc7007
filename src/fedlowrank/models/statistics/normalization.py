"""Batch normalization without running statistics: by the batch in training, by local data at inference.

Running statistics are neither averaged nor sent. In training at a client, a batch is normalized by its own
statistics. For inference, the statistics are computed from the client's own training data under the very parameters
it infers by. They need no place in a state, are never out of date, and are the same in every engine.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import SingleValueError, TaskError
from ...core.tree import Params
from ..complex_parameters import complex_names, with_complex
from ..fused_inference import find_bypassed_layer, without_fused_inference
from ..placement import PlacedStateless, is_placed
from ..standard import HOOK_TABLES
from ..stateless import ABSENT, SavedSlots, Stateless, is_within, restore_slots, tied_names
from .pooled_statistics import Chunks, pooled_statistics, single_value

_BATCH = nn.modules.batchnorm._BatchNorm
_NAME = re.compile(r"Norm(\dd)?$")
_INSTANCE = nn.modules.instancenorm._InstanceNorm


class FunctionalModule:
    """A module as a function of parameters, and of statistics if they are among the parameters.

    The module itself is called, so its hooks run and later changes of its attributes take effect.

    Args:
        module: module to call; only its own ``forward`` may change it.
        skipped_name: dotted name of a submodule that is replaced by the identity, such as the head. It stays in
            place, because ``forward`` may read its attributes. Its hooks do not run.
        frozen_layers: batch normalizations that the module keeps in evaluation mode, and which are therefore not changed.
        backward_slots: slots of the module before a backward pass, shared by all functions that call the same module.
        track_running_stats: whether batch normalizations use and change their running statistics as in PyTorch, like
            any other buffer.

    Attributes:
        names: names of the running statistics, as in ``state_dict``.
    """

    def __init__(
        self,
        module: nn.Module,
        skipped_name: str | None = None,
        frozen_layers: frozenset[nn.Module] = frozenset(),
        backward_slots: SavedSlots | None = None,
        track_running_stats: bool = False,
    ) -> None:
        self._module = module
        self._stateless = PlacedStateless(module) if is_placed(module) else Stateless(module)
        self._coupling = {
            n: m
            for n, m in module.named_modules()
            if isinstance(m, _BATCH) and m not in frozen_layers and not is_within(n, skipped_name)
        }
        self._layers = {
            n: m for n, m in self._coupling.items() if _has_statistics(m) and not track_running_stats
        }
        self._untracked = {n: m for n, m in self._coupling.items() if not _has_statistics(m)}
        self.names = tuple(s for n in self._layers for s in _statistics_of(n))
        self._aliases = tied_names(module)
        self._complex = complex_names(module)
        self._inference = nullcontext if find_bypassed_layer(module) is None else without_fused_inference
        # the module itself, because its __dict__ would be another object after pickling
        self._skipped = None if skipped_name is None else module.get_submodule(skipped_name)
        self._backward_slots: SavedSlots = [] if backward_slots is None else backward_slots

    def __call__(self, params: Params, x: Any, buffers: Params | None = None) -> Tensor:
        """Compute scores of inputs; a dict of inputs is passed as keyword arguments.

        Args:
            params: parameters, with or without statistics of batch normalizations.
            x: inputs ``[b, ...]``, or a dict of inputs.
            buffers: further buffers by name; ``forward`` replaces their values.
        """
        self.release()
        saved_slots: SavedSlots = []
        tensors = {**self._with_aliases(params), **(buffers or {})}
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        try:
            self._install(tensors, saved_slots)
            with self._inference():
                out: Any = self._module(*args, **kwargs)
            if buffers is not None:
                for name in buffers:
                    buffers[name] = self._stateless.current(name)
                    if not isinstance(buffers[name], Tensor):
                        raise TaskError(
                            f"forward sets the buffer {name} of the model {type(self._module).__name__} to "
                            f"{buffers[name]!r}; let it stay a tensor, which each client keeps"
                        )
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise SingleValueError(
                self.layer_with_single_value(params, x) or type(self._module).__name__
            ) from error
        finally:
            restore_slots(saved_slots)
        # Hugging Face's models return their scores as an attribute
        scores = out if isinstance(out, Tensor | tuple) else getattr(out, "logits", None)
        if not isinstance(scores, Tensor):
            mode = " in training mode" if self._module.training else ""
            raise TaskError(
                f"the model {type(self._module).__name__} returns a {type(out).__name__}{mode}, but it must return one tensor of "
                "scores [b, classes]. Wrap it in a module whose forward returns that entry; for auxiliary heads, which are "
                "trained, too, return the stacked scores and give a loss of your own."
            )
        return scores

    def keep_for_backward(self, scores: Tensor, params: Params) -> None:
        """Let a backward pass find the parameters of this forward pass in the module.

        ``torch.utils.checkpoint`` recomputes activations when the gradient is taken. By then the module holds its own
        parameters again, so the gradient would silently be that of another model. The parameters of the forward pass
        are therefore installed again when the gradient reaches these scores, and stay until :meth:`release`.
        """
        if scores.requires_grad and scores.grad_fn is not None:

            def install(_: Tensor) -> None:
                self.release()
                self._install(self._with_aliases(params), self._backward_slots)

            scores.register_hook(install)

    def release(self) -> None:
        """Restore the module's own tensors after a backward pass."""
        restore_slots(self._backward_slots)

    def _with_aliases(self, params: Params) -> Params:
        params = with_complex(params, self._complex) if self._complex else params
        tied_params = {
            alias: params[n] for n, aliases in self._aliases.items() if n in params for alias in aliases
        }
        return params | tied_params if tied_params else params

    def _install(self, params: Params, saved_slots: SavedSlots) -> None:
        """Replace tensors, the head, and the mode of batch normalizations."""
        uses_batch = bool(self.names) and self.names[0] not in params
        for layer in self._layers.values():
            # normalizes by the batch without changing the running statistics, or by the statistics that are
            # given
            for flag, value in (("training", uses_batch), ("track_running_stats", not uses_batch)):
                saved_slots.append((layer.__dict__, flag, layer.__dict__[flag]))
                layer.__dict__[flag] = value
        if self._skipped is not None:
            table = self._skipped.__dict__
            replacements: dict[str, Any] = {
                "forward": _pass_on,
                **{hooks: OrderedDict() for hooks in HOOK_TABLES},
            }
            for name, replacement in replacements.items():
                saved_slots.append((table, name, table.get(name, ABSENT)))
                table[name] = replacement
        self._stateless.install(params, saved_slots)

    def neutral(self) -> Params:
        """Make statistics that change nothing, mean 0 and variance 1, for inputs that are no batch.

        They include those of normalizations without running statistics.
        """
        reference = next(self._module.parameters(), torch.zeros(()))
        statistics = {n: torch.zeros_like(self._stateless.current(n)) for n in self.names}
        for name, layer in self._untracked.items():
            parameter = reference if layer.weight is None else layer.weight
            for n in _statistics_of(name):
                statistics[n] = torch.zeros(
                    layer.num_features, dtype=parameter.dtype, device=parameter.device
                )
        return {n: t + 1 if n.endswith("running_var") else t for n, t in statistics.items()}

    def statistics(self, params: Params, chunks: Chunks) -> Params:
        """Compute the running statistics of data under these parameters; see :mod:`.pooled_statistics`.

        Args:
            params: parameters of the module.
            chunks: chunks of the data; neither their sizes nor the order of examples matter.

        Raises:
            SingleValueError: if a layer sees one value of each channel, which has no variance.
        """
        saved_slots: SavedSlots = []
        try:
            self._stateless.install(self._with_aliases(params), saved_slots)
            with self._inference():
                pooled_by_layer = pooled_statistics(self._module, self._layers | self._untracked, chunks)
        finally:
            restore_slots(saved_slots)
        statistics = self.neutral()
        for name in self._layers.keys() & pooled_by_layer.keys():
            for n, t in zip(_statistics_of(name), pooled_by_layer[name], strict=True):
                statistics[n] = t.to(statistics[n])
        return {n: statistics[n] for n in self.names}

    def layer_with_single_value(self, params: Params, x: Any) -> str | None:
        """Find the name of the first batch normalization for which these inputs are one value of each channel."""
        saved_slots: SavedSlots = []
        try:
            self._stateless.install(self._with_aliases(params), saved_slots)
            return single_value(self._module, self._coupling, x)
        finally:
            restore_slots(saved_slots)


def refuse_instance_statistics(name: str, module: nn.Module) -> None:
    """Raise TaskError if an InstanceNorm keeps running statistics, which belong neither to client nor server."""
    for layer_name, m in module.named_modules():
        if isinstance(m, _INSTANCE) and m.track_running_stats:
            raise TaskError(
                f"model {name}: {layer_name} is an InstanceNorm with running statistics, which have no owner in a "
                "federation. Set track_running_stats=False, or use GroupNorm."
            )


def frozen_normalizations(module: nn.Module) -> frozenset[nn.Module]:
    """Find the batch normalizations that the module's own ``train`` keeps in evaluation mode."""
    module.train()
    frozen_layers = frozenset(m for m in module.modules() if _has_statistics(m) and not m.training)
    module.eval()
    return frozen_layers


def batch_normalizations(module: nn.Module) -> dict[str, nn.Module]:
    """Find the batch normalizations of a module by name, including those that it keeps in evaluation mode."""
    return {n: m for n, m in module.named_modules() if isinstance(m, _BATCH)}


def normalization_parameters(module: nn.Module, layers: Literal["batch", "all"] = "all") -> set[str]:
    """Find the names of the scales and shifts of a module's normalization layers.

    Args:
        module: module whose names are listed, as in ``named_parameters``.
        layers: kinds of layers: batch normalizations, those of PyTorch and subclasses of them; or also all other
            normalization layers of PyTorch, and classes named ``...Norm``.
    """
    ids = {
        id(p)
        for m in module.modules()
        if isinstance(m, _BATCH)
        or (layers == "all" and any(_NAME.search(c.__name__) for c in type(m).__mro__))
        for p in m.parameters(recurse=False)
    }
    return {n for n, p in module.named_parameters() if id(p) in ids}


def zero_normalizations(params: Params, module: nn.Module) -> Params:
    """Set the scales and shifts of normalization layers to zero in the parameters of a module."""
    names = normalization_parameters(module)
    return {n: torch.zeros_like(p) if n in names else p for n, p in params.items()}


def _statistics_of(layer: str) -> tuple[str, str]:
    """Names of the running statistics of a layer."""
    return f"{layer}.running_mean".lstrip("."), f"{layer}.running_var".lstrip(".")


def _pass_on(x: Any) -> Any:
    return x


def _has_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _BATCH) and layer.running_mean is not None
