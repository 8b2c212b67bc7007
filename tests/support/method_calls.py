"""A method's functions called by hand, as the round loop and the evaluation call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fedlowrank.core.contract import AnyMethod, ClientInfo, ServerView
from fedlowrank.core.contract.contribution import Aggregator

Predict = Callable[[Any], Tensor]


class Reply(NamedTuple):
    """What one client sent back."""

    client: ClientInfo
    upload: Any


def server_update(method: AnyMethod, server: Any, replies: Sequence[Reply], view: ServerView) -> Any:
    """The server's next state, given the replies in the order in which they arrive."""
    aggregator = Aggregator(sorted(reply.client.id for reply in replies))
    for reply in replies:
        aggregator.add(reply.client.id, method.contribution(server, reply.upload, reply.client))
    view = dataclasses.replace(view, replied=sorted((reply.client for reply in replies), key=lambda c: c.id))
    return method.server_update(server, aggregator.finish(), view)


def personal(method: AnyMethod, state: Any, down: Any, view: Any) -> Any:
    """Parameters of a client's whole model."""
    return method.client_model(state, down, view).whole()


def routes(method: AnyMethod, state: Any, down: Any, view: Any) -> Tensor:
    """A client's share of each cluster."""
    actual = method.client_model(state, down, view).routes
    assert actual is not None
    return actual


def predictors(method: AnyMethod, state: Any, down: Any, view: Any) -> dict[str, Predict]:
    """How a client infers, by series."""
    made = method.client_model(state, down, view)
    series = dict(made.series) or {"personal": made.whole()}
    return {
        name: value if callable(value) else partial(view.model.apply, value) for name, value in series.items()
    }


def predictor(method: AnyMethod, state: Any, down: Any, view: Any) -> Predict:
    """How a client infers, by its headline series."""
    return next(iter(predictors(method, state, down, view).values()))
