"""What every client's own model is worth on its own validation and test examples, and what it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.client_model import ClientModel, Parts, Predictor
from ..core.key import Key
from ..core.loss import pointwise_loss
from ..core.method import ClientInfo, Method, Task
from ..core.model import Model
from ..core.tree import Params
from ..data.dataset import ClientData, Examples
from ..data.federation import Federation
from ..engines.base import Engine, client_view
from ..linalg.matricize import count_parameters
from ..models.client_buffers import install_buffers
from ..training.local_data import chunk_size, gather
from .records import Accuracy

AnyMethod = Method[Any, Any, Any, Any]
SPLITS = ("val", "test")


@dataclass(frozen=True)
class ClientEvaluation:
    """What one client's models are worth, and what they take.

    Attributes:
        accuracy: series by name, the headline first; in each, the number of each split.
        risk: the mean loss on the same examples, in the same form.
        parameters: how many numbers the model of each series takes.
        routes: its share of each cluster, if the method has clusters.
    """

    accuracy: dict[str, dict[str, float | None]]
    risk: dict[str, dict[str, float | None]]
    parameters: dict[str, int]
    routes: list[float] | None = None


@dataclass(frozen=True)
class Evaluation:
    """What every client's model is worth, and what it takes.

    Attributes:
        accuracy: series by name, the headline first; in each the splits; in each one number a client.
        risk: the mean loss on the same examples, in the same form.
        routes: each client's share of each cluster; None if the method has no clusters, or if not all clients
            are known.
        parameters: series by name; in each, how many numbers the model of each client takes; None if not all
            are known.
    """

    accuracy: Accuracy
    risk: Accuracy
    routes: list[list[float]] | None
    parameters: dict[str, list[int]] | None


def evaluate(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    server: Any,
    state_of: Callable[[ClientInfo], Any],
    round: int,
) -> Evaluation:
    """Accuracy, loss, routes and size of every client's model, those that never took part included.

    Args:
        method: says how a client infers.
        federation: the clients.
        task: what is learnt.
        engine: executes what a method does to its model before it infers (adaptation on *training* data).
        server: its state after the round.
        state_of: state of a client, fresh for one that never took part.
        round: counted from 0.
    """

    def one(info: ClientInfo) -> dict[str, Any]:
        client = local_model(method, federation, task, engine, state_of(info), info, round, server=server)
        return asdict(evaluate_client(client, federation.clients[info.id]))

    return gather_evaluations([ClientEvaluation(**found) for found in engine.each(one, federation.infos)])


def evaluate_client(client: LocalModel, data: ClientData) -> ClientEvaluation:
    """What one client's models are worth on its own examples."""
    accuracy: dict[str, dict[str, float | None]] = {}
    risk: dict[str, dict[str, float | None]] = {}
    device = data.train.y.device
    # a layer that is not standard may draw random numbers in evaluation, too
    draws = contextlib.nullcontext() if client.model.is_standard else client.key.global_generators(device)
    with torch.inference_mode(), draws:
        predictors = client.predictors
        for name, predict in predictors.items():
            scores = {split: measure(predict, getattr(data, split)) for split in SPLITS}
            accuracy[name] = {split: s.accuracy for split, s in scores.items()}
            risk[name] = {split: s.risk for split, s in scores.items()}
        sizes = {name: client.count_parameters(name) for name in predictors}
        # four digits tell a route; all of a float would make the records of many clients large
        shares = client.client_model.routes
        routes = None if shares is None else [float(f"{p:.4f}") for p in shares.tolist()]
    return ClientEvaluation(accuracy, risk, sizes, routes)


def gather_evaluations(found: Sequence[ClientEvaluation | None]) -> Evaluation:
    """The evaluations of all clients in the order of their identifiers, None for a client that is not heard of.

    Raises:
        ValueError: if none is.
    """
    known = [f for f in found if f is not None]
    series = next(iter(known)).accuracy if known else {}
    if not known:
        raise ValueError("no client was evaluated")

    def table(kind: str) -> Accuracy:
        def one(f: ClientEvaluation | None, name: str, split: str) -> float | None:
            return None if f is None else getattr(f, kind).get(name, {}).get(split)

        return {name: {split: [one(f, name, split) for f in found] for split in SPLITS} for name in series}

    whole = len(known) == len(found)
    routes = [f.routes for f in known if f.routes is not None]
    sizes = {name: [f.parameters[name] for f in known] for name in series} if whole else None
    return Evaluation(table("accuracy"), table("risk"), routes if whole and routes else None, sizes)


@dataclass(frozen=True)
class LocalModel:
    """The model of one client, with what its use needs.

    Attributes:
        client_model: as the method gives it.
        model: the client's architecture, with its own buffers and normalization statistics.
        key: randomness of inference.
        server: parameters of the server's own model, where it is not what clients are sent.
    """

    client_model: ClientModel
    model: Model
    key: Key
    server: Params | None = None

    @property
    def predictors(self) -> dict[str, Predictor]:
        """Functions from inputs to scores by series, the headline first."""
        series: dict[str, Params | Predictor] = dict(self.client_model.series)
        if not series:
            series["personal"] = self.client_model.whole()
        if self.server is not None:
            series["server"] = self.server
        return {
            name: value if callable(value) else partial(self.model.apply, value)
            for name, value in series.items()
        }

    @property
    def parts(self) -> Mapping[str, Parts]:
        """The parts of each series whose model takes fewer numbers than its weights."""
        return self.client_model.parts

    def personal(self) -> Params:
        """Parameters of the whole model, with the client's own statistics of batch normalizations."""
        return self.model.whole(self.client_model.whole())

    def count_parameters(self, series: str) -> int:
        """Parameter count of the model of a series."""
        return (
            count_parameters(self.parts[series], self.model.initial)
            if series in self.parts
            else self.model.parameters
        )


def local_model(
    method: AnyMethod,
    federation: Federation,
    task: Task,
    engine: Engine,
    state: Any,
    info: ClientInfo,
    round: int,
    *,
    server: Any = None,
    down: Any = None,
) -> LocalModel:
    """The model that a client would use now.

    Args:
        method: says which.
        federation: the clients.
        task: what is learnt.
        engine: executes what a method does to its model before it infers, such as adaptation on *training*
            data.
        state: of the client.
        info: who it is.
        round: counted from 0.
        server: state of the server, where it is known here.
        down: what the client was sent, where the server is elsewhere.
    """
    trainer = engine.trainer(method, federation, round, info)
    known = server is not None or down is None
    state, task = install_buffers(task, state)
    view = client_view(federation, task, round, info, trainer)
    view = replace(view, model=view.model.with_local_statistics(lambda: (b.x for b in trainer.data.chunks())))
    with torch.inference_mode(False):
        message = tree.canonical(method.download(server, info)) if known else down
        made = method.client_model(state, message, view)
        whole = method.server_model(server, state, view) if known else None
    return LocalModel(made, view.model, view.key / "evaluation", whole)


@dataclass(frozen=True)
class Score:
    """What a predictor is worth on some examples; None where there are none.

    Attributes:
        accuracy: share of examples whose highest score is their label's (of language models: of tokens that
            are predicted); None for a regression, too.
        risk: mean loss; of language models the exponential of it is the perplexity.
    """

    accuracy: float | None
    risk: float | None


def measure(predict: Callable[[Any], Tensor], examples: Examples) -> Score:
    """Accuracy and mean loss of a predictor; of language models, over the tokens that count."""
    n = len(examples)
    if n == 0:
        return Score(None, None)
    right = torch.zeros((), dtype=torch.int64, device=examples.y.device)
    lost, count = (torch.zeros((), dtype=torch.float64, device=examples.y.device) for _ in range(2))
    for index in torch.split(torch.arange(n, device=examples.y.device), chunk_size(examples)):
        batch = gather(examples, index)
        scores = predict(batch.x)
        each, weights = pointwise_loss(scores, batch.y), batch.weights
        lost += each.sum() if weights is None else (each * weights).sum()
        count += len(batch) if weights is None else weights.sum()
        if examples.tokens:
            right += (scores[:, :-1].argmax(-1) == batch.y[:, 1:]).sum()
        elif not examples.regression:
            right += (scores.argmax(-1) == batch.y).sum()
    if float(count) == 0:
        # texts in which no token is to be predicted
        return Score(None, None)
    return Score(None if examples.regression else float(right / count), float(lost / count))
