"""A client that sends another update than it computed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fedlowrank.core import tree
from fedlowrank.network.messages import Registration
from fedlowrank.network.transport import NodeMessage
from fedlowrank.rounds.outcome.result import Result
from tests.support.local_network import (
    Fault,
    LocalTransport,
    replace_fields,
)

LIAR = 3


def make_liar(times: float = 1.0, examples: int | None = None, first: int = 1) -> Fault:
    """A client whose update is so many times the honest one from a round on, and that registers another n_k."""

    def fault(carrier: LocalTransport, message: NodeMessage) -> Any:
        actual = carrier.answered(message)
        # it confirms a notice of its rejection as it is
        if message.node != 100 + LIAR or not actual.header:
            return [actual]
        if message.kind == "registration":
            said = Registration.from_json(actual.header)
            more = said.examples if examples is None else examples
            return [replace_fields(actual, header=dataclasses.replace(said, examples=more).to_json())]
        if not actual.payload or json.loads(message.header)["round"] + 1 < first:
            return [actual]
        down, up = tree.decode(message.payload), tree.decode(actual.payload)
        return [
            replace_fields(
                actual, payload=tree.encode(tree.map_leaves(lambda d, u: d + times * (u - d), down, up))
            )
        ]

    return fault


def average_honest_accuracy(result: Result) -> float:
    """Of the last round, over the honest clients' test examples."""
    row = result.accuracy()
    honest = [v for i, v in enumerate(row) if i != LIAR and v is not None]
    return sum(honest) / len(honest)
