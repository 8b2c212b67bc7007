"""One round of many methods, in which one reply is the attacker's; and what may become of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, ServerView
from fedlowrank.core.contract.contribution import Aggregator
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientJob
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.network.validation.upload_forms import Template
from fedlowrank.network.validation.uploads import (
    FAULT_TYPES,
    RefusedReplyError,
    Templates,
    inspect_upload,
    make_contribution,
    update_server,
    update_without_faulty,
)
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from tests.methods.setting import Net, make_arrays
from tests.support.method_calls import Reply

torch.set_num_threads(1)

LIMITS = Limits()
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedkd": {"energy_start": 0.5},
    "fd": {},
    "fedproto": {},
    "fedspa": {},
    "ifca": {"clusters": 2},
    "floral": {"clusters": 2},
    "feddyn": {},
    "hetlora": {"prune": 0.6, "training": LoRATraining(wire="int8")},
    "fedhl": {"training": LoRATraining(wire="bfloat16")},
    "flora": {},
}


def aggregate(method: Any, server: Any, replies: list[Reply], view: Any) -> tuple[Any, dict[int, str]]:
    """The server's next state and the refused replies, as :class:`NetworkRun` goes about it."""
    actual, refused, known = Aggregator([r.client.id for r in replies]), {}, {r.client.id: r for r in replies}
    for client, upload in replies:
        try:
            actual.add(client.id, make_contribution(method, server, upload, client))
        except RefusedReplyError as error:
            refused[client.id] = str(error)
            actual.skip(client.id)
    if not actual.contributed:
        return server, refused
    view = dataclasses.replace(view, replied=[known[i].client for i in actual.contributed])
    try:
        return update_server(method, server, actual.finish(), view), refused
    except FAULT_TYPES:

        def contribution(client: ClientInfo) -> Any:
            return method.contribution(server, known[client.id].upload, client)

        new, faulty = update_without_faulty(
            method, server, contribution, view, lambda clients: Aggregator([c.id for c in clients])
        )
        if not faulty:
            raise
        return new, refused | faulty


@dataclass(frozen=True)
class Situation:
    """A round of which one reply is the attacker's."""

    run: Run
    replies: list[Reply]
    template: Template
    view: ServerView

    @property
    def me(self) -> ClientInfo:
        return self.replies[1].client

    @property
    def upload(self) -> Any:
        return self.replies[1].upload

    def sent(self, upload: Any) -> tuple[Any, dict[int, str]]:
        """The server's next state, and whom it blames."""
        replies = [self.replies[0], Reply(self.me, upload), *self.replies[2:]]
        with warnings.catch_warnings():
            # of numbers that kill a model; a warning is no harm
            warnings.simplefilter("ignore")
            return aggregate(self.run.method, self.run.state.server, replies, self.view)


@functools.cache
def situation(name: str) -> Situation:
    method = METHODS[name](optimizer=SGD(lr=0.3), batch_size=8, **CASES[name])
    ranks = (2, 3, 4, 5)
    federation = Federation.from_arrays(
        make_arrays(), lambda: Net(9, 10, dtype=torch.float32), classes=4, rank=ranks
    )
    run = Run(method, federation, RunSettings(rounds=6, evaluate_every=99), Sequential())
    run.step()
    infos = federation.infos
    jobs = [ClientJob(run.state_of(i), method.download(run.state.server, i), i) for i in infos]
    outcomes = run.engine.run(method, federation, run.task, 1, jobs)
    replies = [Reply(i, o.upload) for i, o in zip(infos, outcomes, strict=True)]
    template = Templates(method, run.task).of(infos[1], jobs[1].down)
    return Situation(run, replies, template, ServerView(run.task, 1, federation.key / "server" / 1))


def numbers(value: Any) -> Iterator[float | Tensor]:
    """Every floating-point tensor and number of a tree, by another walk than the package's."""
    if isinstance(value, Tensor):
        yield from [value] * value.dtype.is_floating_point
    elif isinstance(value, float):
        yield value
    else:
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
        )
        for child in (
            inner if inner is not None else vars(value).values() if hasattr(value, "__dict__") else ()
        ):
            yield from numbers(child)


def finite(value: Any) -> bool:
    return all(
        bool(torch.isfinite(x.double()).all()) if isinstance(x, Tensor) else math.isfinite(x)
        for x in numbers(value)
    )


def outline(value: Any, fixed: bool) -> list[tuple[Any, ...]]:
    """Paths and types of a tree; with ``fixed`` the shapes, too."""
    rows = [(p, t.dtype, t.ndim, tuple(t.shape) if fixed else None) for p, t in tree.leaves(value)]
    return sorted(rows, key=str)


def judged(name: str, data: bytes) -> Any:
    """What becomes of such bytes: None if refused, else an upload that did no harm to the server."""
    s = situation(name)
    refused = []
    try:
        actual = inspect_upload(data, s.template, s.me, LIMITS)
    except RefusedReplyError as error:
        refused.append(error)
    if refused:
        assert refused[0].client == s.me.id
        assert len(str(refused[0])) < 2000
        return None
    assert finite(actual)
    if name not in ("fedkd", "hetlora"):
        assert outline(actual, name not in ("fd", "fedproto")) == outline(
            s.upload, name not in ("fd", "fedproto")
        )
    try:
        server, dropped = s.sent(actual)
    except FAULT_TYPES:
        return actual
    assert finite(server)
    assert set(dropped) <= {s.me.id}
    return actual


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the nodes of a tree are."""
    inner = tree.children(value, "") or ()
    return [path, *(p for key, child in inner for p in paths(child, (*path, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = dict(tree.children(value, "") or ())[key]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The tree with another node there."""
    if not path:
        return new
    return tree.rebuild(
        value, [(k, put(v, path[1:], new) if k == path[0] else v) for k, v in tree.children(value, "") or ()]
    )


def message(skeleton: Any, **named: Tensor) -> bytes:
    return safetensors.torch.save(named or {"": torch.zeros(3)}, {"tree": json.dumps(skeleton)})


def raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data
