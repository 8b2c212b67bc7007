"""Orders of a server, made by hand."""

from __future__ import annotations

from typing import Any

from fedlowrank.core import tree
from fedlowrank.network.messages import Order
from fedlowrank.rounds.run import Run

RUN_NAME = "0123456789abcdef"


def encode_download(run: Run, add: float = 0.0) -> bytes:
    down = run.method.download(run.state.server, run.federation.infos[1])
    return tree.encode(tree.map_leaves(lambda t: t + add, down) if add else down)


def make_order(run: Run, /, **fields: Any) -> Order:
    given = {"run": RUN_NAME, "round": run.round, "stamp": 0, "train": True, "evaluate": False}
    return Order(**{**given, **fields})
