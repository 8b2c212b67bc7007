"""Exports a client's model from a run: a plain module, each layer in its cheapest form, and the savings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...adapters.deployment import (
    Latency,
    Layout,
    Size,
    compare_latency,
    deploy,
    load_deployed,
    measure_size,
    save_deployed,
)
from ...adapters.state_dict import full_state_dict
from ...core.contract import ClientInfo, EngineModel
from ...core.errors import ConfigError, did_you_mean
from ...core.learning.losses import class_axis
from ...core.tree import Params, canonical
from ...data.dataset import Inputs, Stored
from ...linalg.matricize import Weights, sum_parts, unpack_weights
from ...models.complex_parameters import as_real, with_complex
from ...models.module_copy import copy_module
from ...models.packed_weights import is_packed
from ...results.evaluation.local_model import LocalModel
from ..run import Run

LATENCY_BATCH_SIZE = 20
"""Batch size of the comparison of latency, as in FedSLR (Huang et al., arXiv:2302.11051, Table 9)."""


def export_model(
    run: Run, client: int | str, series: str | None = None, layout: Layout = "small"
) -> nn.Module:
    """Export the model that a client infers by, as a module that needs none of this package's training code.

    Args:
        run: run in its current state.
        client: number or name of the client. A client that never took part has the model it would begin with.
        series: name of one of the method's models; by default its headline. Another one can be exported only if the
            method says what it is made of (:attr:`fedlowrank.core.contract.client_model.ClientModel.parts`).
        layout: form of the layers, see :func:`fedlowrank.adapters.deployment.deploy`.

    Raises:
        ConfigError: if there is no such client or series, or if the client infers by more than one model.
    """
    model, parts = _parts(run, client, series)
    return _deployed(model, parts, layout)


@dataclass(frozen=True)
class Gain:
    """Savings of an exported model compared with the equal dense model.

    Attributes:
        size: sizes of the dense module and of the deployed one.
        latency: CPU times of a call of each module on a batch of at most 20 test inputs of the client.
        agreement: share of the client's test examples to which both modules give the same class.
        difference: largest absolute difference of a score.
        file: size of the file in bytes.
    """

    size: tuple[Size, Size]
    latency: tuple[Latency, Latency]
    agreement: float
    difference: float
    file: int


def write(run: Run, client: int, series: str | None, layout: Layout, path: Path, repeats: int = 30) -> Gain:
    """Write a client's model to a file, read it back, and compare it with the dense module.

    Args:
        run: run in its current state.
        client: identifier of the client.
        series: name of one of the method's models, see :func:`export_model`.
        layout: form of the deployed layers, see :func:`export_model`.
        path: path of the file, for :func:`fedlowrank.adapters.deployment.load_deployed`.
        repeats: number of timed calls.

    Raises:
        ConfigError: if :func:`export_model` raises it.
        CheckpointError: if the file cannot be written.
    """
    model, parts = _parts(run, client, series)
    dense = copy_module(model.module)
    state = dense.state_dict()
    templates = {n: as_real(state[n]) for part in parts for n in part if n in state}
    dense.load_state_dict(with_complex(sum_parts(parts, templates), model.complex), strict=False)
    save_deployed(_deployed(model, parts, layout), path)
    deployed_module = load_deployed(model.module, path)
    data = run.federation.clients[client]
    x = (data.test if len(data.test) else data.train).inputs
    with torch.inference_mode():
        deployed_scores, dense_scores = (
            m(**x) if isinstance(x, dict) else m(x) for m in (deployed_module, dense)
        )
    axis = class_axis(dense_scores)
    times = compare_latency({"dense": dense, "deployed": deployed_module}, _first(x), repeats)
    return Gain(
        (measure_size(dense), measure_size(deployed_module)),
        (times["dense"], times["deployed"]),
        float((deployed_scores.argmax(axis) == dense_scores.argmax(axis)).double().mean()),
        float((deployed_scores - dense_scores).abs().max()),
        path.stat().st_size,
    )


def _parts(run: Run, client: int | str, series: str | None) -> tuple[EngineModel, tuple[Weights, ...]]:
    """Get the architecture of a client's model and the parts that its weights are the sum of."""
    info = run.federation.client(client)
    model = run.local_model(info)
    headline = next(iter(model.predictors))
    name = headline if series is None else series
    if name not in model.predictors:
        raise ConfigError(
            f"{run.method.title} has no series {name!r}. {did_you_mean(name, model.predictors)}"
        )
    if name not in model.parts and name != headline:
        raise ConfigError(
            f"{run.method.title} does not say what its series {name!r} is made of; only {headline!r} can be "
            "exported"
        )
    if name in model.parts:
        first_part, *other_parts = model.parts[name]
        weights = sum_parts(model.parts[name], model.model.initial)
        # statistics of batch normalizations and other buffers belong to the client and to no part
        client_buffers = {n: t for n, t in model.model.inference_params(weights).items() if n not in weights}
        return model.model, ({**first_part, **client_buffers}, *other_parts)
    params = single_model(run, info, model)
    if any(map(is_packed, model.model.module.parameters())):
        raise ConfigError(
            "the weights of the base are quantized, so they cannot be exported; write adapters instead"
        )
    # includes the frozen tensors, and factors of the ranks that the module's layers have
    state = full_state_dict(model.model, params)
    return model.model, (canonical({n: as_real(t) for n, t in state.items()}),)


def single_model(run: Run, info: ClientInfo, model: LocalModel) -> Params:
    """Get the parameters of the one model that a client infers by.

    Args:
        run: run that the model belongs to.
        info: record of the client.
        model: model of the client in its current state.

    Raises:
        ConfigError: if the client infers by several models, such as an ensemble.
    """
    if not model.is_one_model(_first(run.federation.clients[info.id].train.x)):
        raise ConfigError(
            f"{run.method.title} infers by more than one model at {info.title} (an ensemble, a mixture of outputs, or "
            "distances to prototypes), and no single module computes the same. Ensemble with mix = 'weights', IFCA, FLoRAL, and "
            "FedProto with inference = 'classifier' infer by one."
        )
    return canonical(model.personal())


def _first(x: Stored) -> Inputs:
    """Take the first examples of a client."""
    return (
        {n: t[:LATENCY_BATCH_SIZE] for n, t in x.items()} if isinstance(x, dict) else x[:LATENCY_BATCH_SIZE]
    )


def _deployed(model: EngineModel, parts: tuple[Weights, ...], layout: Layout) -> nn.Module:
    first_part, *other_parts = parts
    # complex matrices have no smaller layout
    complex_weights = unpack_weights(
        {n: first_part[n] for n in model.complex if n in first_part}, model.initial
    )
    other_weights = (
        with_complex(sum_parts(other_parts, model.initial), model.complex) if other_parts else None
    )
    return deploy(
        model.module, {**first_part, **with_complex(complex_weights, model.complex)}, other_weights, layout
    )
