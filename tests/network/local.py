"""A carrier of messages within one process, that loses, doubles, delays and changes what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedlowrank import experiment
from fedlowrank.network.messages import Order
from fedlowrank.network.party import Party, prepare
from fedlowrank.network.transport import Delivery, Parcel

Fault = Callable[[Parcel, Delivery], list[Delivery]]


def intact(parcel: Parcel, delivery: Delivery) -> list[Delivery]:
    return [delivery]


@dataclass
class LocalTransport:
    """Nodes are 100 + client; every message opens its party anew, as Flower's processes do."""

    folders: dict[int, Path]
    fault: Fault = intact
    away: set[int] = field(default_factory=set)
    log: list[Parcel] = field(default_factory=list)
    waiting: list[Delivery] = field(default_factory=list)

    def nodes(self) -> set[int]:
        return {100 + i for i in self.folders if i not in self.away}

    def send(self, parcels: Sequence[Parcel], group: str, seconds: float) -> None:
        for parcel in parcels:
            self.log.append(parcel)
            self.waiting += self.fault(parcel, self.answered(parcel))

    def answered(self, parcel: Parcel) -> Delivery:
        party = Party(self.folders[parcel.node - 100])
        if parcel.kind == "hello":
            words, body = party.hello()
        else:
            words, body = party.answer(Order.from_json(parcel.words), parcel.body)
        return Delivery(parcel.node, parcel.kind, words.to_json(), body)

    def receive(self) -> list[Delivery]:
        # the last one first: the order of arrival must not matter
        found, self.waiting = self.waiting[::-1], []
        return found

    def forget(self) -> None:
        self.waiting = []


def local(made: experiment.Experiment, base: Path, fault: Fault = intact) -> LocalTransport:
    shares = made.shares()
    folders = {i: base / f"client-{i}" for i in range(len(shares.data))}
    for i, folder in folders.items():
        prepare(folder, made.tables, i, shares)
    return LocalTransport(folders, fault)


def changed(delivery: Delivery, **fields: object) -> Delivery:
    return replace(delivery, **fields)
