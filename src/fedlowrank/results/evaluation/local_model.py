"""The models that clients would use now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, ClientModel, ClientView, EngineModel, Task
from ...core.contract.client_model import ModelSum, Predictor
from ...core.contract.hook_results import check_tree
from ...core.contract.training_request import Trainer
from ...core.key import Key
from ...core.tree import Params
from ...data.federation import Federation
from ...engines.engine import Engine
from ...linalg.matricize import count_parameters
from ...models.statistics.client_buffers import install_buffers
from ...training.hook_calls import check_single_call, seed_for_hook
from ...training.kept_optimizers import split_optimizers
from .model_checks import check_models


@dataclass(frozen=True)
class LocalModel:
    """The model of one client, with the objects that its use needs.

    Attributes:
        client_model: model as the method defines it.
        model: architecture of the client, with its own buffers and normalization statistics.
        key: key of the randomness of inference.
        server: parameters of the server's own model, if clients are sent something else.
    """

    client_model: ClientModel
    model: EngineModel
    key: Key
    server: Params | None = None

    @property
    def predictors(self) -> dict[str, Predictor]:
        """Functions from inputs to scores by series, the headline first."""
        return {
            name: value if callable(value) else partial(self.model.apply, value)
            for name, value in self._list_series().items()
        }

    @property
    def is_computed(self) -> bool:
        """Whether a function of the method computes scores or parameters at every use."""
        client_model = self.client_model
        return any(map(callable, client_model.series.values())) or (
            callable(client_model.params) and not client_model.series
        )

    def fixed_generators(self, device: torch.device) -> AbstractContextManager[None]:
        """Fix the random numbers of inference, because a nonstandard layer may draw some.

        Args:
            device: device of the examples.
        """
        return nullcontext() if self.model.is_standard else self.key.global_generators(device)

    @property
    def identity(self) -> Any:
        """Key that is equal for clients with the same tensors in the same module; None if a function computes the tensors."""
        # a function returns tensors at another memory address each time
        if self.is_computed:
            return None
        tensors = [
            (series, name, t.data_ptr())
            for series, params in self._list_series().items()
            for name, t in params.items()
        ]
        return id(self.model), tuple(tensors)

    def _list_series(self) -> dict[str, Any]:
        series: dict[str, Params | Predictor] = dict(self.client_model.series)
        if not series:
            series["personal"] = self.client_model.whole()
        if self.server is not None:
            series["server"] = self.server
        return series

    @property
    def parts(self) -> Mapping[str, ModelSum]:
        """Parts of each series whose model has fewer numbers in its parts than in its weights."""
        return self.client_model.parts

    @property
    def routes(self) -> list[float] | None:
        """Share of each cluster, rounded to four digits so that records of many clients stay small."""
        shares = self.client_model.routes
        return None if shares is None else [float(f"{p:.4f}") for p in shares.tolist()]

    def personal(self) -> Params:
        """Get the parameters of the whole model, with the client's own statistics of batch normalizations."""
        return self.model.inference_params(self.client_model.whole())

    def is_one_model(self, x: Any) -> bool:
        """Whether the parameters of :meth:`personal` give the scores of the client's inference.

        They do not if the client infers by several models, such as an ensemble.

        Args:
            x: inputs of a few examples.
        """
        if not callable(next(iter(self.client_model.series.values()), None)):
            return True
        params = tree.canonical(self.personal())
        with torch.inference_mode():
            full_scores, inferred_scores = (
                self.model.apply(params, x),
                next(iter(self.predictors.values()))(x),
            )
        return full_scores.shape == inferred_scores.shape and torch.allclose(
            full_scores, inferred_scores, rtol=1e-3, atol=1e-4
        )

    def count_parameters(self, series: str) -> int:
        """Count the parameters of the model of a series."""
        return (
            count_parameters(self.parts[series], self.model.initial)
            if series in self.parts
            else self.model.parameter_count
        )


def make_local_model(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    state: Any,
    info: ClientInfo,
    round: int,
    *,
    server: Any = None,
    download: Any = None,
    trainer: Trainer | None = None,
) -> LocalModel:
    """Make the model that a client would use now.

    Args:
        method: method that defines the model.
        federation: clients and their data.
        task: task that is learned.
        engine: engine that executes the changes that a method makes to its model before inference, such as adaptation
            on *training* data.
        state: state of the client.
        info: record of the client.
        round: index of the round, from 0.
        server: state of the server, if it is known here.
        download: message that the client was sent, if the server is elsewhere.
        trainer: trainer that executes the method's requests for the client's data; None for the engine's own.
    """
    engine_trainer = engine.trainer(method, federation, round, info)
    is_server_known = server is not None or download is None
    state, task = install_buffers(task, split_optimizers(state)[0])
    model = task.model(info).with_local_statistics(engine_trainer.inputs, engine_trainer.owner)
    view = ClientView(info, task, model, round, engine_trainer.data.key, trainer or engine_trainer)
    device, location = engine_trainer.data.examples.y.device, f"{info.title}, after round {round + 1}"
    with torch.inference_mode(False):
        message = download
        if is_server_known:
            message = tree.canonical(check_tree(method, "download", method.download(server, info)))
        with (
            seed_for_hook(method, "client_model", view.key, device),
            check_single_call(method, "client_model", location, model, state=state, down=message),
        ):
            client_model = method.client_model(state, message, view)
        with (
            seed_for_hook(method, "server_model", view.key, device),
            check_single_call(method, "server_model", location, model, state=state),
        ):
            server_params = method.server_model(server, state, view) if is_server_known else None
        client_model = check_models(method, client_model, server_params, model, federation, info)
    return LocalModel(client_model, model, view.key / "evaluation", server_params)


@dataclass(frozen=True)
class RoundModels:
    """Makes the models that clients would use after a round.

    Attributes:
        method: method that defines the models.
        federation: clients and their data.
        task: task that is learned.
        engine: engine that executes the changes that a method makes to its model before inference.
        server: state of the server after the round.
        state_of: function that maps a client to its state, a fresh one if the client never took part.
        round: index of the round, from 0.
        trainers: trainers by client, which execute the method's requests for the client's data; by default the
            engine's own.
    """

    method: AnyMethod
    federation: Federation
    task: Task
    engine: Engine
    server: Any
    state_of: Callable[[ClientInfo], Any]
    round: int
    trainers: Mapping[int, Trainer] = field(default_factory=dict)

    def make(self, info: ClientInfo) -> LocalModel:
        """Make the model of a client."""
        return make_local_model(
            self.method,
            self.federation,
            self.task,
            self.engine,
            self.state_of(info),
            info,
            self.round,
            server=self.server,
            trainer=self.trainers.get(info.id),
        )

    @property
    def is_global(self) -> bool:
        """Whether all clients use the server's own model unchanged."""
        models = self.task.architectures.values()
        return self.method.one_model and not any(model.buffers or model.couples for model in models)


@dataclass(frozen=True)
class SharedModel:
    """A model with the clients that use it."""

    model: LocalModel
    clients: list[ClientInfo]


def share_models(infos: Sequence[ClientInfo], round_models: RoundModels) -> list[SharedModel]:
    """Make the models of clients; clients with the same tensors share one model."""
    models_by_key: dict[Any, SharedModel] = {}
    is_global = round_models.is_global
    for info in infos:
        # the server's own model is made once for all clients of an architecture
        key: Any = info.architecture if is_global else None
        if key not in models_by_key:
            model = round_models.make(info)
            key = key or model.identity or info.id
            models_by_key.setdefault(key, SharedModel(model, []))
        models_by_key[key].clients.append(info)
    return list(models_by_key.values())
