"""What server and clients say to each other: a few words as JSON, and at most one tree as bytes.

A download and an upload cross as the bytes that :func:`fedlowrank.core.tree.encode` gives, one buffer a message, so that what is
sent is what is counted. Everything else stands in the words, whose form is checked before anything is done with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pydantic

from ..core.errors import FedlowrankError
from ..simulation.evaluation import ClientEvaluation

W = TypeVar("W", bound="Words")

PROTOCOL = 2
"""Raised whenever messages change."""


class MessageError(FedlowrankError):
    """A message is not of the form it should have."""


@dataclass(frozen=True)
class Words:
    """The part of a message that is not tensors."""

    def to_json(self) -> str:
        """As it crosses."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls: type[W], text: str) -> W:
        """Inverse of :meth:`to_json`.

        Raises:
            MessageError: if the text is something else.
        """
        try:
            found: W = _ADAPTERS[cls].validate_json(text, strict=True)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise MessageError(
                plain(f"the message is not a {cls.__name__}: {where[:200]}: {first['msg']}")
            ) from error
        return found


def plain(text: str, most: int = 500) -> str:
    """What another machine wrote as one short line, so that no part of it can pass for a line of ours in a log."""
    return "".join(c if c.isprintable() else " " for c in text[:most])


@dataclass(frozen=True)
class Hello(Words):
    """A client introduces itself. The bytes beside hold the form of its examples without any example.

    Attributes:
        client: which client of the experiment it is.
        examples: training examples it has.
        sizes: examples of its validation and test parts.
        sections: digest of each section of its experiment that must be the server's.
        base: digest of its base model, or "".
        versions: of the software it runs.
        protocol: :data:`PROTOCOL`.
    """

    client: int
    examples: int
    sizes: tuple[int, int]
    sections: dict[str, str]
    base: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Order(Words):
    """What the server asks of a client in a round. The bytes beside are its download.

    Attributes:
        run: which run; a client keeps the states of different runs apart.
        round: rounds completed, so 0 in the first.
        stamp: on which of its states the client is to build: the number of rounds that were completed when the server
            accepted its last reply, 0 if it never did. By this number a reply is acknowledged.
        train: whether it is to train, or only to commit its state and to evaluate.
        evaluate: whether it is to evaluate its models as they stand before training.
        last: whether the run is over, so that the client writes its model down.
        branch: how often the run went back to an earlier checkpoint; only then may rounds be asked for again.
    """

    run: str
    round: int
    stamp: int
    train: bool
    evaluate: bool
    last: bool = False
    branch: int = 0


@dataclass(frozen=True)
class Answer(Words):
    """A client's reply to an order. The bytes beside are its upload, empty if it did not train.

    Attributes:
        client: who.
        run: as in the order.
        round: as in the order.
        problem: why it has no upload although it should train, or "".
        kind: of problem: state, it has not got the state it is to build on; training, a NaN; disk; other.
        steps: optimizer steps taken.
        flops: floating-point operations of its training.
        losses: mean loss of each pass.
        evaluation: of its models, if that was asked.
    """

    client: int
    run: str
    round: int
    problem: str = ""
    kind: Literal["", "state", "training", "disk", "other"] = ""
    steps: int = 0
    flops: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    evaluation: ClientEvaluation | None = None


# once, for to make one takes longer than to read a message
_ADAPTERS: dict[type[Words], pydantic.TypeAdapter[Any]] = {
    c: pydantic.TypeAdapter(c) for c in (Hello, Order, Answer)
}

LOCAL = frozenset({
    "data.path", "data.test", "language.path", "language.offline", "run.device", "run.threads", "run.engine",
    "run.checkpoint_every", "run.target", "run.representations", "run.adapters", "run.keep_best", "run.micro_batch",
    "run.client_memory", "run.pixels", "run.keep_checkpoints",
})  # fmt: skip
"""Fields in which a client may differ from the server: where its own things lie and how its machine computes."""

_UNSHARED = frozenset({"network", "reference", "compare", "seeds", "vary", "title", "paper"})


def sections(tables: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each section of an experiment in which server and clients must agree."""
    found = {}
    for section, value in tables.items():
        if section in _UNSHARED:
            continue
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if f"{section}.{k}" not in LOCAL}
        text = json.dumps(value, sort_keys=True)
        found[section] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return found
