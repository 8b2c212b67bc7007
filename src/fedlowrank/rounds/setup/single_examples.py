"""Steps that see a single example, which a batch normalization cannot normalize: found before a run begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ...core.contract.method import AnyMethod, Pass
from ...core.errors import SingleValueError
from ...data.federation import Federation
from ...models.architecture import Architecture

NEAREST = 32
"""How far from the batch size another one is looked for."""


def check_single_examples(
    method: AnyMethod, federation: Federation, never_train: Collection[int] = ()
) -> None:
    """Raise SingleValueError if a client's batch normalization would see one example alone.

    It is asked before the first round, for all clients: one that is not drawn in the first rounds may be later,
    and every client is evaluated.

    Args:
        method: says the passes over local data.
        federation: the clients, with their data.
        never_train: identifiers of clients that are evaluated only.
    """
    layers = {name: _layer(model) for name, model in federation.architectures.items()}
    if not any(layers.values()):
        return
    passes = method.local_passes()
    sizes = {
        info.id: n
        for info, own in zip(federation.infos, federation.clients, strict=True)
        if layers[info.architecture] and (n := len(own.train))
    }
    trained = {i: n for i, n in sizes.items() if i not in never_train}
    for i, n in sizes.items():
        model = federation.architectures[federation.infos[i].architecture]
        if n == 1 and (model.statistics or i in trained):
            raise SingleValueError(
                str(layers[model.name]),
                f"{federation.infos[i].title} has 1 training example",
                f"Give every client at least 2 ({_few(sizes)}; partition.min_size), leave those clients out, "
                "or use a normalization that treats examples singly (nn.GroupNorm).",
            )
    found = {
        i: name
        for i, n in trained.items()
        for name, sweep in list(passes.items())[::-1]
        if sweep.has_batch_of_one(n)
    }
    if found:
        i, name = next(iter(found.items()))
        size, layer = passes[name].batch_size, layers[federation.infos[i].architecture]
        others = len(found) - 1
        more = f", as at {others} other client{'s' * (others > 1)}" if others else ""
        raise SingleValueError(
            str(layer),
            f"{federation.infos[i].title} has {trained[i]} training examples, of which batches of {size} leave a batch of one "
            f"(pass {name!r}){more}",
            _advice(method, passes.values(), size, trained.values()),
        )


def _layer(model: Architecture) -> str | None:
    """The first batch normalization for which one example is one value of each channel."""
    return model.layer_with_single_value() if model.couples else None


def _few(sizes: dict[int, int]) -> str:
    """Which clients have one example."""
    ones = [str(i) for i, n in sizes.items() if n == 1]
    return f"client{'s' * (len(ones) > 1)} {', '.join(ones[:5])}{', ...' * (len(ones) > 5)} with 1"


def _advice(method: AnyMethod, passes: Iterable[Pass], size: int, sizes: Iterable[int]) -> str:
    """What to set instead: checked, so that following it helps."""
    passes, sizes = list(passes), set(sizes)

    def helps(batch_size: int, drop_last: bool) -> bool:
        changed = [replace(p, batch_size=batch_size, drop_last=drop_last or p.drop_last) for p in passes]
        return not any(p.has_batch_of_one(n) for p in changed for n in sizes)

    cures = ["drop_last = true (or defaults.drop_last=true for all methods)"] if helps(size, True) else []
    near = sorted(range(2, size + NEAREST), key=lambda b: (abs(b - size), b))
    other = next((b for b in near if helps(b, False)), None)
    if other is not None:
        cures.append(f"batch_size = {other}, with which no client has one")
    if not cures:
        return "Give every client more examples, or use a normalization that treats examples singly (nn.GroupNorm)."
    return f"Set {', or '.join(cures)}, for {method.title}."
