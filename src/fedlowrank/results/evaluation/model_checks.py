"""Checks of the models by which a client and the server infer: their parameters, and the scores of a method's functions.

A forward pass takes a parameter that it is not given from the module, where it has its initial value. A model that lacks
one would therefore be evaluated without an error, and with wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.lora.lora_factors import lora_of
from ...core.contract import AnyMethod, ClientInfo, ClientModel, EngineModel
from ...core.contract.client_model import Predictor
from ...core.contract.hook_results import check_client_model, describe_kind, name_class
from ...core.errors import TaskError
from ...core.io.text import list_first
from ...core.tree import Params
from ...data.federation import Federation
from ...data.targets import check_scores

_MAX_NAMES = 5
"""Maximum number of parameters that one message names."""


@dataclass(frozen=True)
class _Origin:
    """The hook that returned parameters, for messages.

    Attributes:
        title: class and hook, and the part of its result.
        code: how the hook returns parameters, with ``{}`` in their place.
        argument: argument of the hook that holds the shared parameters.
        advice: where a missing parameter may have been lost.
    """

    title: str
    code: str
    argument: str
    advice: str


def check_models(
    method: AnyMethod,
    client_model: Any,
    server_params: Any,
    model: EngineModel,
    federation: Federation,
    info: ClientInfo,
) -> ClientModel:
    """Check the models that the hooks ``client_model`` and ``server_model`` return.

    Args:
        method: method of the hooks.
        client_model: result of ``client_model``.
        server_params: result of ``server_model``.
        model: architecture of the client.
        federation: federation with the loss and the form of targets.
        info: record of the client.

    Returns:
        The model of the client. What its functions return is checked at every call.

    Raises:
        TaskError: if parameters are missing, have other shapes, or are not those of the architecture.
    """
    method_name = name_class(method)
    result = check_client_model(method, client_model)
    advice = "See what server_init and server_update return"
    hook = f"{method_name}.client_model"
    default = (
        "Without a client_model of its own a client uses what download returns, by default the server's state"
    )
    origin = _Origin(f"{hook}: params", "ClientModel({})", "down", f"{default}. {advice}")
    params, series = result.params, dict(result.series)
    if callable(params):
        params = partial(_compute_params, params, origin, model)
    else:
        check_parameters(origin, params, model)
    if server_params is not None:
        server_origin = _Origin(f"{method_name}.server_model: its result", "return {}", "server", advice)
        # what no client trains, such as the layers without factors of a plain module with LoRA
        untrained_names = (
            set() if callable(params) else {n for n, t in model.initial.items() if params[n] is t}
        )
        check_parameters(server_origin, server_params, model, untrained_names)
    for name, value in series.items():
        title = f"{hook}: series {name!r}"
        if callable(value):
            series[name] = partial(_compute_scores, value, title, federation, info)
        elif value is not result.params:
            check_parameters(replace(origin, title=title), value, model)
    return replace(result, params=params, series=series)


def check_parameters(
    origin: _Origin, params: Any, model: EngineModel, optional_names: Collection[str] = ()
) -> None:
    """Raise TaskError if parameters are not those of a whole model.

    All trained parameters must be among them, in their shapes; LoRA factors may have another rank. Frozen parameters and
    buffers may be among them, such as moved base weights and statistics of batch normalizations.

    Args:
        origin: hook that returned the parameters.
        params: parameters by name.
        model: architecture with the initial parameters.
        optional_names: trained parameters that may be left out, because their initial values are meant.
    """
    initial = model.initial
    if (
        isinstance(params, dict)
        and params.keys() == initial.keys()
        and all(isinstance(t, Tensor) and t.shape == initial[n].shape for n, t in params.items())
    ):
        return
    _check_tensors(origin, params, model)
    missing_names = [n for n in initial if n not in params and n not in optional_names]
    extra_names = [n for n in params if n not in initial and _get_tensor(model.module, n) is None]
    if missing_names:
        extra = f" (and has {_list_names(extra_names)}, which the model has not)" if extra_names else ""
        raise TaskError(
            f"{origin.title} lacks {_list_names(missing_names)} of model {model.name!r}{extra}, and would be evaluated with "
            "initial values there. If the client's state holds what is missing, write "
            f"{origin.code.format(f'{{**{origin.argument}, **state}}')}; if the initial values are meant, write "
            f"{origin.code.format(f'{{**view.model.initial, **{origin.argument}}}')}. {origin.advice}"
        )
    if extra_names:
        raise TaskError(
            f"{origin.title} has {_list_names(extra_names)}, which model {model.name!r} has not. Its parameters are "
            f"{_list_names([*initial])}"
        )
    _check_shapes(origin, params, model)


def _check_tensors(origin: _Origin, params: Any, model: EngineModel) -> None:
    """Refuse what is no dict of tensors, such as a dict of whole models."""
    if not isinstance(params, dict):
        raise TaskError(f"{origin.title} must be a dict of parameters by name; it is {describe_kind(params)}")
    for name, value in params.items():
        if not isinstance(value, Tensor):
            is_model = isinstance(value, dict) and value.keys() >= model.initial.keys()
            advice = (
                f"Write {origin.code.format(f'{origin.argument}[{name!r}]')}"
                if is_model
                else f"The parameters of model {model.name!r} are {_list_names([*model.initial])}"
            )
            raise TaskError(
                f"{origin.title} must be a dict of parameters by name; at {name!r} it holds {describe_kind(value)}. {advice}"
            )


def _check_shapes(origin: _Origin, params: Params, model: EngineModel) -> None:
    """Refuse shapes other than those of the model, up to the rank of LoRA factors."""
    rank_dimensions: dict[str, int] | None = None
    for name, value in params.items():
        expected = model.initial.get(name)
        shape = _real_shape(value)
        expected_shape = _real_shape(_get_tensor(model.module, name) if expected is None else expected)
        if shape == expected_shape:
            continue
        if rank_dimensions is None:
            rank_dimensions = _find_rank_dimensions(model)
        rank_dimension = rank_dimensions.get(name)
        if rank_dimension is None or _drop(shape, rank_dimension) != _drop(expected_shape, rank_dimension):
            raise TaskError(
                f"{origin.title} has {name!r} with shape {[*shape]}, and in model {model.name!r} it has shape "
                f"{[*expected_shape]}"
            )


def _find_rank_dimensions(model: EngineModel) -> dict[str, int]:
    """Find the LoRA factors among the parameters of a model, each with the dimension of its rank."""
    try:
        layers = lora_of(model).layers.values()
    except TaskError:
        return {}
    factors = [(layer.a, 0) for layer in layers] + [(layer.b, 1) for layer in layers]
    return {name: dimension for name, dimension in factors if name is not None}


def _drop(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return shape[:dimension] + shape[dimension + 1 :]


def _real_shape(t: Any) -> tuple[int, ...]:
    """Shape of a parameter as real numbers, ``[..., 2]`` for a complex one."""
    return (*t.shape, 2) if t.is_complex() else tuple(t.shape)


def _get_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Get the parameter or buffer of a module by its dotted name; None if there is none."""
    layer_name, _, local_name = name.rpartition(".")
    try:
        layer = module.get_submodule(layer_name)
    except AttributeError:
        return None
    # a LoRA layer has a property of the name of its weight
    return layer._parameters.get(local_name, layer._buffers.get(local_name))


def _list_names(names: list[str]) -> str:
    return list_first([repr(n) for n in names], _MAX_NAMES)


def _compute_params(compute: Callable[[], Any], origin: _Origin, model: EngineModel) -> Params:
    """Compute parameters by a function of the method, and check them."""
    params: Params = compute()
    check_parameters(origin, params, model)
    return params


def _compute_scores(
    function: Predictor, title: str, federation: Federation, info: ClientInfo, x: Any
) -> Tensor:
    """Compute the scores of examples by a function of the method, and check their form without reading their values.

    Raises:
        TaskError: if the scores are no tensor, are not one row for each example, or do not fit the targets.
    """
    scores: Any = function(x)
    if not isinstance(scores, Tensor):
        raise TaskError(
            f"{title}: its function returned {describe_kind(scores)}. It must return a tensor of scores, [b, classes] of b "
            "examples"
        )
    inputs = next(iter(x.values())) if isinstance(x, dict) else x
    example_count, shape = inputs.shape[0], scores.shape
    if not shape or shape[0] != example_count:
        raise TaskError(
            f"{title}: its function returned {[*shape]} of {example_count} examples. It must return one row of scores for each "
            "example, [b, classes] of b examples"
        )
    examples = federation.clients[info.id].train
    # labels of pixels and tokens have the size of their inputs, which may be others than those of the training examples
    if not examples.is_dense and examples.y.ndim <= 2 and not federation.loss.compares_texts:
        # a meta tensor, because the scores may be those of many clients
        one_example = torch.empty(1, *shape[1:], device="meta")
        prefix = f"{title}: its function makes {[*one_example.shape]} of one example, but"
        check_scores(federation.loss, one_example, examples, len(federation.classes), prefix)
    return scores
