"""Finds steps on a single example, which batch normalization or a contrastive loss cannot use, before a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ...core.contract import AnyMethod, Pass
from ...core.errors import ConfigError, DataError, SingleValueError
from ...core.io.text import format_count
from ...data.federation import Federation
from ...models.architecture import Architecture

NEAREST = 32
"""Batch sizes below the sum of the batch size and this number are tried."""


def check_single_examples(
    method: AnyMethod, federation: Federation, untrained_ids: Collection[int] = ()
) -> None:
    """Raise SingleValueError if a client's batch normalization would see one example alone.

    If a loss compares the examples of a batch, a client without a batch of two examples is an error.

    The check covers all clients before the first round, because a client that is not drawn in the first rounds may be
    drawn later, and because every client is evaluated.

    Args:
        method: method that defines the passes over local data.
        federation: clients with their data.
        untrained_ids: identifiers of clients that are only evaluated.

    Raises:
        ConfigError: if such a loss is used with batch size 1.
        DataError: if a client has a single example to compare by such a loss.
        SingleValueError: if a batch normalization would see one example alone.
    """
    if federation.loss.couples:
        _check_batches_of_pairs(method, federation, untrained_ids)
    layers = {name: _layer(model) for name, model in federation.architectures.items()}
    if not any(layers.values()):
        return
    passes = method.local_passes()
    sizes = {
        info.id: n
        for info, data in zip(federation.infos, federation.clients, strict=True)
        if layers[info.architecture] and (n := len(data.train))
    }
    counts = {i: n for i, n in sizes.items() if i not in untrained_ids}
    for i, n in sizes.items():
        model = federation.architectures[federation.infos[i].architecture]
        if n == 1 and (model.statistics or i in counts):
            raise SingleValueError(
                str(layers[model.name]),
                f"{federation.infos[i].title} has 1 training example",
                f"Give every client at least 2 ({_few(sizes)}; partition.min_size), leave those clients out, "
                "or use a normalization that treats examples singly (nn.GroupNorm).",
            )
    pass_by_client = {
        i: name
        for i, n in counts.items()
        for name, sweep in list(passes.items())[::-1]
        if sweep.has_batch_of_one(n)
    }
    if pass_by_client:
        i, name = next(iter(pass_by_client.items()))
        size, layer = passes[name].batch_size, layers[federation.infos[i].architecture]
        other_count = len(pass_by_client) - 1
        other_clients = f", as at {format_count(other_count, 'other client')}" if other_count else ""
        raise SingleValueError(
            str(layer),
            f"{federation.infos[i].title} has {counts[i]} training examples, of which batches of {size} leave a batch of one "
            f"(pass {name!r}){other_clients}",
            _advice(method, passes.values(), size, counts.values()),
        )


def _check_batches_of_pairs(
    method: AnyMethod, federation: Federation, untrained_ids: Collection[int]
) -> None:
    """Refuse passes in which a pair never meets another pair: their loss is 0 for any model."""
    loss = federation.loss.kind
    for sweep in method.local_passes().values():
        if sweep.batch_size == 1:
            raise ConfigError(
                f"batch_size = 1: loss {loss!r} compares each pair with the others of its batch. Set batch_size to at least 2, "
                f"for {method.title}; more pairs are more negatives."
            )
        for info, data in zip(federation.infos, federation.clients, strict=True):
            n = len(data.train)
            if n and info.id not in untrained_ids and sweep.examples_of(n) == 1:
                raise DataError(
                    f"{info.title} trains on 1 of {n} pairs, and loss {loss!r} compares each pair with the others of its batch. "
                    "Give every client more pairs to train on (partition.min_size, split.train), or leave that client out."
                )


def _layer(model: Architecture) -> str | None:
    """Find the first batch normalization for which one example is one value of each channel."""
    return model.layer_with_single_value() if model.couples else None


def _few(sizes: dict[int, int]) -> str:
    """List the clients that have one example."""
    single_ids = [str(i) for i, n in sizes.items() if n == 1]
    return f"client{'s' * (len(single_ids) > 1)} {', '.join(single_ids[:5])}{', ...' * (len(single_ids) > 5)} with 1"


def _advice(method: AnyMethod, passes: Iterable[Pass], size: int, sizes: Iterable[int]) -> str:
    """Suggest other settings, checked so that they solve the problem."""
    passes, sizes = list(passes), set(sizes)

    def helps(batch_size: int, drop_last: bool) -> bool:
        new_passes = [replace(p, batch_size=batch_size, drop_last=drop_last or p.drop_last) for p in passes]
        return not any(p.has_batch_of_one(n) for p in new_passes for n in sizes)

    suggestions = (
        ["drop_last = true (or defaults.drop_last=true for all methods)"] if helps(size, True) else []
    )
    batch_sizes = sorted(range(2, size + NEAREST), key=lambda b: (abs(b - size), b))
    new_size = next((b for b in batch_sizes if helps(b, False)), None)
    if new_size is not None:
        suggestions.append(f"batch_size = {new_size}, with which no client has one")
    if not suggestions:
        return "Give every client more examples, or use a normalization that treats examples singly (nn.GroupNorm)."
    return f"Set {', or '.join(suggestions)}, for {method.title}."
