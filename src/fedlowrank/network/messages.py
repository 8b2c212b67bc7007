"""Messages between server and clients: a header in JSON, and at most one tree as bytes (the payload).

Downloads and uploads are encoded by :func:`fedlowrank.core.tree.encode`, one buffer for each message.
Everything else is in the header, whose fields are validated before they are used.
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
from ..results.measurements import ClientTable

H = TypeVar("H", bound="Header")

Step = Literal["", "announce", "share", "mask", "agree", "reveal"]
"""Name of a step of a secure sum; "" if there is none."""

PROTOCOL_VERSION = 9
"""Version of the messages, which increases with every change of their form."""


class MessageError(FedlowrankError):
    """A message does not have the required form."""


class RefusedOrderError(FedlowrankError):
    """A client refuses a message. The text contains none of the client's data and may be sent."""


@dataclass(frozen=True)
class Header:
    """The part of a message that is not a tree."""

    def to_json(self) -> str:
        """Encode the header as it is sent."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls: type[H], text: str) -> H:
        """Inverse of :meth:`to_json`; raises MessageError if the text is something else."""
        try:
            header: H = _ADAPTERS[cls].validate_json(text, strict=True)
        except pydantic.ValidationError as error:
            first_error = error.errors(include_url=False)[0]
            field_path = ".".join(map(str, first_error["loc"])) or "the whole"
            raise MessageError(
                to_one_line(
                    f"the message is no valid {cls.__name__}: {field_path[:200]}: {first_error['msg']}"
                )
            ) from error
        return header


def to_one_line(text: str, max_length: int = 500) -> str:
    """Shorten another machine's text to one line, so that it cannot forge a line of a log."""
    return "".join(c if c.isprintable() else " " for c in text[:max_length])


@dataclass(frozen=True)
class Registration(Header):
    """A client's registration. The payload is the form of its examples, without any example.

    Attributes:
        client: identifier of the client.
        examples: number of its training examples.
        sizes: numbers of its validation and test examples.
        sections: digest of each section of its experiment that must equal the server's.
        base: digest of each file of its base model, by name; empty without one.
        versions: versions of the client's software, by name.
        client_count: number of all clients with which it computes, which must equal the server's.
        protocol: version of the messages, :data:`PROTOCOL_VERSION`.
    """

    client: int
    examples: int
    sizes: tuple[int, int]
    sections: dict[str, str]
    base: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    client_count: int = 0
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class RegistrationRequest(Header):
    """The server's request to register, or its rejection of a client. There is no payload.

    Attributes:
        run: identifier of the run.
        rejection: the reason why the client does not take part; "" asks it to register.
    """

    run: str = ""
    rejection: str = ""


@dataclass(frozen=True)
class Order(Header):
    """The server's request to a client in a round. The payload is the download.

    Attributes:
        run: identifier of the run; a client separates the states of different runs.
        round: number of completed rounds, 0 in the first.
        stamp: stamp of the state to build on: the number of rounds completed when the server accepted the
            client's last reply, 0 if it never did. The stamp acknowledges that reply.
        train: whether to train, or only to commit the state and evaluate.
        evaluate: whether to evaluate the models before training.
        last: whether the run is over, so that the client writes its model.
        branch: number of times that the run went back to an earlier checkpoint; only then are rounds repeated.
        step: step of a secure sum (:mod:`.secure.member`); "" without one. The step ``mask`` is that of the training.
        parcel: messages of other clients in the previous step, by client.
        repeats: number of releases, with the server's noise, of each round that was released more than once, or that the
            run had reached before it went back to an earlier checkpoint.
    """

    run: str
    round: int
    stamp: int
    train: bool
    evaluate: bool
    last: bool = False
    branch: int = 0
    step: Step = ""
    parcel: dict[str, str] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(Header):
    """A client's reply to an order. The payload is its upload, empty if it did not train.

    Attributes:
        client: identifier of the client.
        run: identifier of the run, as in the order.
        round: number of completed rounds, as in the order.
        problem: the reason why there is no upload although the client should train, or "".
        kind: kind of the problem: state (the state to build on is missing), training (a NaN), disk, or other.
        steps: number of optimizer steps.
        flops: number of floating-point operations of the training.
        losses: mean loss of each pass, by name.
        evaluation: evaluation of the client's models, if the order asks for it.
        parcel: messages of this step of a secure sum, by the client that receives them.
    """

    client: int
    run: str
    round: int
    problem: str = ""
    kind: Literal["", "state", "training", "disk", "other"] = ""
    steps: int = 0
    flops: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    evaluation: ClientTable | None = None
    parcel: dict[str, str] = field(default_factory=dict)


# built once, because building an adapter takes longer than reading a message
_ADAPTERS: dict[type[Header], pydantic.TypeAdapter[Any]] = {
    c: pydantic.TypeAdapter(c) for c in (Registration, RegistrationRequest, Order, Answer)
}

LOCAL_FIELDS = frozenset({
    "data.path", "data.test", "language.path", "language.offline", "run.device", "run.threads", "run.engine",
    "run.checkpoint_every", "run.target", "run.representations", "run.adapters", "run.keep_best",
    "run.micro_batch",
    "run.client_memory", "run.pixels", "run.keep_checkpoints", "run.patience", "run.callbacks", "run.log",
})  # fmt: skip
"""Fields in which a client may differ from the server: paths, its machine, the server's own settings."""

_UNSHARED_SECTIONS = frozenset(
    {"name", "local", "network", "reference", "compare", "seeds", "vary", "title", "paper"}
)
"""Sections that are not compared."""


def digest_sections(tables: Mapping[str, Any]) -> dict[str, str]:
    """Digest of each section of an experiment in which server and clients must agree."""
    digests = {}
    for section, value in tables.items():
        if section in _UNSHARED_SECTIONS:
            continue
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if f"{section}.{k}" not in LOCAL_FIELDS}
            if not value:
                continue
        text = json.dumps(value, sort_keys=True)
        digests[section] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return digests
