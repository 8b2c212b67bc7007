"""Prepares a federation for a run: with its hostile clients, on its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median_low

from ...core.contract import AnyMethod, ClientInfo
from ...core.errors import ConfigError, DataError, TaskError
from ...data.federation import Federation
from ...models.coupling import find_coupling
from ...trust.attacks import claimed_examples, hostile_clients, poison, trigger_value
from ...trust.trust_settings import Robust
from ..logs.progress import tell
from ..participation.participants import draw_unseen
from ..run_settings import RunSettings

MOST_EXAMPLES = 10
"""Maximum number of examples of a client, in multiples of the median, where a rule weights by examples."""


def move_to_device(federation: Federation, settings: RunSettings) -> Federation:
    """Move a federation to the device of a run, with images and models in the form that the settings name."""
    if settings.statistics == "averaged":
        models = {n: a.with_running_statistics() for n, a in federation.architectures.items()}
        federation = dataclasses.replace(federation, architectures=models)
    if settings.pixels == "float32" or (settings.pixels == "auto" and settings.device == "cpu"):
        unpacked = federation.unpack_images() if settings.pixels == "float32" else federation
        return unpacked.to(settings.device)
    try:
        # packed before they are moved, so that bytes are moved
        federation = federation.pack_images()
    except DataError as error:
        # a server with remote clients holds no images
        if settings.pixels == "bytes" and any(len(c.train) for c in federation.clients):
            tell(f"run.pixels = 'bytes', but the inputs stay float32: {error}")
    return federation.to(settings.device)


def apply_attack(federation: Federation, settings: RunSettings) -> tuple[frozenset[int], Federation]:
    """Draw the hostile clients among those that may train, and apply the attack to their data and sizes in the federation."""
    attack, infos, clients = settings.attack, list(federation.infos), list(federation.clients)
    if attack.kind == "none":
        return frozenset(), federation
    unseen = draw_unseen(len(infos), settings.unseen, federation.key)
    trainable_ids = [i for i in range(len(infos)) if i not in unseen]
    hostile = hostile_clients(trainable_ids, attack.share, federation.key / "hostile")
    # the choice between the responses of a pair is a label, too
    classes = 2 if federation.loss.is_preference else len(federation.classes)
    value = trigger_value(clients) if attack.kind == "backdoor" else None
    for i in hostile:
        key = federation.key / "poison" / i
        clients[i] = poison(
            clients[i], attack, classes, key, value=value, ignored=federation.loss.ignore_index
        )
        infos[i] = dataclasses.replace(
            infos[i], example_count=claimed_examples(infos[i].example_count, attack)
        )
    return hostile, dataclasses.replace(federation, clients=clients, infos=infos)


def check_classes(method: AnyMethod, federation: Federation) -> None:
    """Raise TaskError if a method needs one class label for each example and the data have none."""
    if not method.needs_classes:
        return
    if not federation.classes:
        raise TaskError(
            f"{method.title} works on classes and cannot learn a task without them; choose another method"
        )
    if federation.clients[0].train.is_dense:
        raise TaskError(
            f"{method.title} works on one class for each example, and these data have labels of pixels or tokens; "
            "choose another method"
        )
    for i, client in enumerate(federation.clients if federation.loss.kind != "auto" else ()):
        if (client.train.y == federation.loss.ignore_index).any():
            raise TaskError(
                f"{method.title} works on the class of each example, and client {i} has examples with the label "
                f"{federation.loss.ignore_index}, which loss.ignore_index leaves out. Drop these examples, or choose "
                "another method"
            )


def check_parts(method: AnyMethod, federation: Federation, micro_batch: int | None) -> None:
    """Raise ConfigError if batches are taken in parts and a loss or a model couples the examples of a batch."""
    if micro_batch is not None and federation.loss.couples:
        raise ConfigError(
            f"run.micro_batch = {micro_batch} takes a batch in parts, and loss {federation.loss.kind!r} compares the examples "
            "of a batch with each other. Remove run.micro_batch; a smaller batch_size saves memory, too, with fewer negatives."
        )
    if micro_batch is not None and method.couples_examples:
        raise ConfigError(
            f"run.micro_batch = {micro_batch} takes a batch in parts, but the loss of {method.title} is no mean over "
            "the examples of a batch. Remove run.micro_batch; a smaller batch_size saves memory, too."
        )
    for name, model in federation.architectures.items() if micro_batch is not None else ():
        if reason := find_coupling(model):
            raise ConfigError(
                f"run.micro_batch = {micro_batch} takes a batch in parts, and their gradients add up to that "
                f"of the batch only where every example is treated by itself. In model {name!r}, {reason}. Remove "
                "run.micro_batch; a smaller batch_size saves memory, too."
            )


def compute_median_examples(clients: Sequence[ClientInfo]) -> int:
    """Compute the lower median of the numbers of examples of the clients that have any; 1 if none has.

    Over a network, a client that has not registered yet has none.
    """
    return median_low([client.example_count for client in clients if client.example_count] or [1])


def limit_weight(client: ClientInfo, robust: Robust, median_examples: int) -> ClientInfo:
    """Replace a client's number of examples by the one that counts under a rule.

    Args:
        client: record with which the client describes itself.
        robust: settings of the rule.
        median_examples: median number of examples of the clients.
    """
    counted_examples = (
        median_examples
        if robust.weights == "equal"
        else min(client.example_count, MOST_EXAMPLES * median_examples)
    )
    return dataclasses.replace(client, example_count=counted_examples)
