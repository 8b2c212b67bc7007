"""Refuses models and losses that compute with values outside of their parameters and buffers.

All clients, methods and runs call one module. A client has parameters and buffers of its own, but a counter in an attribute,
a list of earlier inputs or a frozen parameter that ``forward`` changes goes from one client to the next, and no checkpoint has
it.

An attribute that changes is no error by itself: a module may keep attention weights for a plot, or a mask for later calls.
What counts is whether the scores depend on it. A copy of the module is therefore called a few times, and equal parameters,
buffers, inputs and random numbers must give equal scores. State that takes effect only after more calls is not detected.
Frozen parameters may not change at all, which every training pass checks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, TaskError
from ..core.io.text import list_first
from ..core.key import Key
from ..core.learning.losses import Loss
from ..core.tree import Params, map_leaves
from .architecture import Architecture
from .fingerprint import BASE_ATTRIBUTES, as_dense, describe_attributes
from .module_copy import copy_module, is_compiled
from .placement import is_placed
from .standard import is_of_libraries, remove_hooks

logger = logging.getLogger(__name__)

_KEY = Key(("hidden state",))

_TOLERANCE = 1e-5
"""Bound on the difference of equal scores, relative to the largest: a compiled function may round its first calls otherwise."""

_MAX_NAMES = 3


def refuse_hidden_state(model: Architecture) -> None:
    """Refuse a model whose scores depend on values that its forward passes keep outside of parameters and buffers.

    A copy of the module without hooks takes four training passes, the two in the middle with parameters that are 1 % smaller, as
    after a step of training: a forward that iterates until it converges might never end with others. Its scores must be the same
    in the first and the last pass, and in evaluation mode before and after them, also with other parameters, in place of which a
    module may keep what it has computed from the first ones. A model is checked once; one of standard layers,
    one whose repeatability is declared, and one that accelerate has placed are not checked.

    Args:
        model: model whose module is copied.

    Raises:
        TaskError: if the scores differ or a frozen parameter changes; the message names the attributes or the parameter.
    """
    if _is_known(model) or "is without hidden state" in model.cache:
        return
    try:
        trial_model = model.to(str(model.device), runs_hooks=False)
        _refuse_shared_layers(model.module, trial_model.module)
        remove_hooks(trial_model.module)
        _call_uncompiled(trial_model.module)
        versions = record_frozen_versions(trial_model)
        batch = map_leaves(_add_row, model.example)
        nearby = trial_model.nearby_params()
        before = _score(trial_model, batch, is_training=False)
        nearby_before = _score(trial_model, batch, is_training=False, params=nearby)
        first, *_, last = [
            _score(trial_model, batch, is_training=True, scale=s) for s in (1.0, 0.99, 0.99, 1.0)
        ]
        nearby_after = _score(trial_model, batch, is_training=False, params=nearby)
        after = _score(trial_model, batch, is_training=False)
        shared_buffer = _find_shared_buffer(model.module, trial_model, batch)
        changed_parameters = [
            n
            for n, p in _list_frozen(model).items()
            if not _is_equal(p, trial_model.module.get_parameter(n), tolerance=0)
        ]
    except Exception as error:  # noqa: BLE001 - the user's code may fail by anything, and training reports its errors
        logger.info(
            "Model %s is not checked for state outside of its parameters and buffers: %s: %s",
            model.name,
            type(error).__name__,
            error,
        )
        return
    refuse_changed_parameters(trial_model, versions)
    if changed_parameters:
        raise _frozen_parameter_error(model.name, changed_parameters[0])
    if shared_buffer:
        raise TaskError(
            f"model {model.name}: its forward changes the buffer {shared_buffer[0]}, whose memory is also that of "
            f"{list_first(shared_buffer[1:], _MAX_NAMES)}. Each client has its own tensor in place of the buffer, and the others "
            "do not see it. Register the buffer in one layer alone, and read it there (self.first.steps)"
        )
    scores = (
        ("training", first, last),
        ("evaluation", before, after),
        ("evaluation", nearby_before, nearby_after),
    )
    for mode, score, repeated_score in scores:
        if not _is_equal(score, repeated_score, _TOLERANCE):
            raise _hidden_state_error(model, mode, _list_changes(model.module, trial_model.module))
    model.cache["is without hidden state"] = True


def record_frozen_versions(model: Architecture) -> list[int]:
    """Record how often each frozen parameter has been changed in place, for :func:`refuse_changed_parameters`."""
    return [p._version for p in _list_frozen(model).values()]


def refuse_changed_parameters(model: Architecture, versions: list[int], owner: str = "") -> None:
    """Raise TaskError if a frozen parameter has been changed in place, by which the module of all clients has changed.

    Args:
        model: model whose module has been called.
        versions: versions of the frozen parameters before the calls, by :func:`record_frozen_versions`.
        owner: client that called the module, for the message.
    """
    for (name, p), version in zip(_list_frozen(model).items(), versions, strict=True):
        if p._version != version:
            raise _frozen_parameter_error(model.name, name, owner)


def refuse_hidden_loss_state(loss: Loss, scores: Tensor, y: Tensor, key: Key) -> None:
    """Refuse a loss of the user that is a module and whose values depend on attributes that its forward passes keep.

    Changes of buffers and parameters are refused at each call; see :meth:`fedlowrank.core.learning.losses.Loss.each`.

    Args:
        loss: loss of the task.
        scores: scores of a few examples.
        y: their targets.
        key: key of the random numbers of each trial.

    Raises:
        ConfigError: if a copy of the module gives other values when it is called again; the message names the attributes.
    """
    if not isinstance(loss.function, nn.Module):
        return
    values = []
    try:
        trial_loss = copy_module(loss.function, runs_hooks=False)
        for _ in range(3):
            with torch.no_grad(), key.global_generators(scores.device):
                values.append(trial_loss(scores.clone(), y.clone()))
    except Exception as error:  # noqa: BLE001 - the user's code may fail by anything, and training reports its errors
        logger.info(
            "The loss %s is not checked for values that it keeps: %s: %s",
            loss.kind,
            type(error).__name__,
            error,
        )
        return
    if not all(_is_equal(values[0], value, _TOLERANCE) for value in values[1:]):
        raise ConfigError(
            f"the loss {loss.kind} gives other values when it is called again with the same scores, targets and random numbers: "
            f"{_list_changes(loss.function, trial_loss)}. All clients and all evaluations call one loss, so such a value would "
            "go from one to the next, and a resumed run would lose it. Compute it in the model's forward and keep it in a buffer "
            "of the model (register_buffer), of which each client has its own"
        )


def _find_shared_buffer(module: nn.Module, trial_model: Architecture, x: Any) -> list[str]:
    """Find a buffer that a training pass changes and to which there are several references, and list these."""
    trial_model = trial_model.with_buffers({})
    _ = _score(trial_model, x, is_training=True)
    references: dict[int, list[str]] = {}
    for path, layer in trial_model.module.named_modules():
        attributes = {n: v for n, v in vars(layer).items() if n not in BASE_ATTRIBUTES}
        for name, value in (*layer._buffers.items(), *attributes.items()):
            for tensor in _items(value):
                if isinstance(tensor, Tensor) and tensor.numel():
                    references.setdefault(_memory(tensor), []).append(f"{path}.{name}".lstrip("."))
    first_buffers = dict(module.named_buffers())
    for name, buffer in trial_model.module.named_buffers():
        first = first_buffers.get(name)
        is_changed = (
            name in trial_model.changed_buffers or first is None or not _is_equal(buffer, first, tolerance=0)
        )
        if is_changed and len(names := references.get(_memory(buffer), [])) > 1:
            return names
    return []


def _items(value: Any) -> Iterable[Any]:
    """The values of a dict, the items of a list or tuple, or the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _memory(tensor: Tensor) -> int:
    """Address of the memory of a tensor, which its views have, too."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _is_known(model: Architecture) -> bool:
    """Whether a model keeps no state by its layers or by declaration, or is placed by accelerate, so that it cannot be copied."""
    return is_of_libraries(model.module) or model.may_run_again or is_placed(model.module)


def _list_frozen(model: Architecture) -> dict[str, Tensor]:
    """List the frozen parameters whose values must not change, once for each copy of the module.

    An embedding with ``max_norm`` rescales the rows that it reads, to the same values each time.
    """
    if "frozen parameters" not in model.cache:
        frozen_parameters: dict[str, Tensor] = {}
        if not _is_known(model):
            frozen_parameters = {
                f"{path}.{n}".lstrip("."): p
                for path, layer in model.module.named_modules()
                if getattr(layer, "max_norm", None) is None
                for n, p in layer.named_parameters(recurse=False)
                # inference tensors have no version
                if not p.requires_grad and not p.is_inference()
            }
        model.cache["frozen parameters"] = frozen_parameters
    frozen: dict[str, Tensor] = model.cache["frozen parameters"]
    return frozen


def _call_uncompiled(module: nn.Module) -> None:
    """Let modules of ``torch.compile`` call their code itself: each new shape would be compiled, and only a few may be."""
    for layer in module.modules():
        if is_compiled(layer):
            layer.__dict__["forward"] = layer.get_submodule("_orig_mod").__call__


def _add_row(x: Tensor) -> Tensor:
    """Make a batch of one example and a second one whose numbers lie between those of the first and zero."""
    return torch.cat([x[:1], 0.5 * x[:1] if x.is_floating_point() else x[:1]])


def _refuse_shared_layers(module: nn.Module, copied_module: nn.Module) -> None:
    """Raise TaskError if a copy has a layer of the original, as one whose ``__deepcopy__`` returns itself."""
    if shared := {*module.modules()} & {*copied_module.modules()}:
        raise TaskError(f"a copy of the module has the original layer {type(next(iter(shared))).__name__}")


def _score(
    model: Architecture, x: Any, *, is_training: bool, scale: float = 1.0, params: Params | None = None
) -> Tensor:
    """Compute scores with scaled parameters and identity batch normalization; attributes that change stay changed."""
    params = model.initial if params is None else params
    copies = {n: (scale * p.detach()).requires_grad_(is_training) for n, p in params.items()}
    model.set_training(is_training)
    try:
        with torch.set_grad_enabled(is_training), _KEY.global_generators(model.device):
            return model.apply(copies | model.neutral_statistics, x).detach()
    finally:
        model.set_training(False)


def _is_equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether tensors are equal up to a difference relative to the largest finite number; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = as_dense(a), as_dense(b)
    bound = tolerance * float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tolerance and a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)


def _list_changes(before: nn.Module, after: nn.Module) -> str:
    """List the attributes in which two copies of a module differ, for a message."""
    layers = dict(before.named_modules())
    changes = []
    for path, layer in after.named_modules():
        old_values = describe_attributes(layers[path]) if path in layers else {}
        subject = f"layer {path!r}" if path else "the module itself"
        changes += [
            f"{name!r} of {subject} ({type(layer).__name__})"
            for name, value in describe_attributes(layer).items()
            if old_values.get(name) != value
        ]
        changes += [
            f"{name!r} of {subject} ({type(layer).__name__}), a buffer that is None at first and must begin as a tensor"
            for name, buffer in layer._buffers.items()
            if buffer is not None and path in layers and layers[path]._buffers.get(name) is None
        ]
    if not changes:
        return "no attribute shows it, so look for global variables, counters in objects and random generators of its own"
    return f"forward changes the attribute{'s' if len(changes) > 1 else ''} {list_first(changes, _MAX_NAMES)}"


def _hidden_state_error(model: Architecture, mode: str, changes: str) -> TaskError:
    return TaskError(
        f"model {model.name}: the same parameters, buffers, inputs and random numbers give other scores in {mode} mode after "
        f"a few training passes: {changes}. All clients, methods and runs call one module, so such a value would go from one to "
        "the next, and a resumed run would lose it. Register each value on which scores depend as a buffer, of which each client "
        "has its own: self.register_buffer('steps', torch.zeros(())). Draw random numbers from the global generators of torch, "
        "numpy or random, which are seeded for each client"
    )


def _frozen_parameter_error(model_name: str, parameter_name: str, owner: str = "") -> TaskError:
    layer, _, name = parameter_name.rpartition(".")
    subject = f"self.{layer}" if layer else "self"
    return TaskError(
        f"{f'{owner}: ' if owner else ''}model {model_name}: its forward changes the frozen parameter {parameter_name} "
        "(requires_grad=False). All clients, methods and runs share the frozen parameters, so the change would go from one to "
        "the next, and a resumed run would lose it. Make it a buffer, of which each client has its own: weight = "
        f"{subject}.{name}.detach(); del {subject}.{name}; {subject}.register_buffer({name!r}, weight)"
    )
