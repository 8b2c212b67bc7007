"""From what clients hold to a federation: who they are, and their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..core.errors import ConfigError
from ..core.key import Key
from ..core.method import ClientInfo
from ..data.dataset import ClientData, Examples, Inputs, Stored
from ..data.federation import Federation
from ..models.architecture import Architecture, architecture_of
from .lora_section import lora_table, stretched

if TYPE_CHECKING:
    from ..language.federation import Language
    from .experiment import Experiment


@dataclass(frozen=True)
class Shares:
    """What the clients of an experiment hold.

    Attributes:
        data: of each client.
        classes: names of the classes; empty where there are none.
        notes: on the data set.
        language: the model that the texts were made into tokens for, or None.
    """

    data: tuple[ClientData, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    language: Language | None = None


def assemble(
    experiment: Experiment,
    shares: Shares,
    *,
    sizes: Sequence[int] | None = None,
    here: frozenset[int] | None = None,
) -> Federation:
    """The federation of an experiment.

    Args:
        experiment: says who the clients are and which models they have.
        shares: what they hold.
        sizes: training examples of each client, where the data of some lie elsewhere.
        here: whose data lie on this machine, or None for all; see :class:`Federation`.

    Raises:
        DataError: if a client's data do not fit.
        TaskError: if a model does not fit.
    """
    data, key = shares.data, Key((experiment.run.seed,))
    models = _models(experiment, shares, key)
    names = experiment.model.names if shares.language is None else tuple(models)
    ranks = stretched(experiment.ranks, len(data))
    counts = [len(d.train) for d in data] if sizes is None else sizes
    infos = [
        ClientInfo(i, n, names[i % len(names)], ranks[i], experiment.concept.cluster(i)) for i, n in enumerate(counts)
    ]
    held = {i.architecture for i in infos}
    return Federation(
        data,
        infos,
        {n: m for n, m in models.items() if n in held},
        shares.classes,
        experiment.run.seed,
        experiment.name,
        (*shares.notes, *(n for d in data for n in d.notes)),
        experiment.augment,
        shares.language is not None and shares.language.settings.by_length,
        shares.language,
        here,
    )


def _models(experiment: Experiment, shares: Shares, key: Key) -> Mapping[str, Architecture]:
    first = shares.data[0].train
    example = _example(first.x)
    if isinstance(example, dict):
        if shares.language is None:
            raise ConfigError(
                "data: the built-in models take one tensor; use Federation.from_arrays for dicts of inputs"
            )
        return {"language": shares.language.architecture(example)}
    table, head = lora_table({**experiment.table("lora"), "ranks": experiment.ranks}), experiment.model.head
    factories = experiment.model.factories(tuple(example.shape[1:]), _outputs(first, shares.classes))
    return {
        n: architecture_of(n, table.wrapped(f, head, key / "lora" / n), example, head, key / "init" / n)
        for n, f in factories.items()
    }


def _outputs(examples: Examples, classes: tuple[str, ...]) -> int:
    """Width of a model's output: the number of classes, or of the numbers of a target; 0 for labels of tokens."""
    return 0 if examples.tokens else len(classes) or examples.y.shape[1]


def _example(x: Stored) -> Inputs:
    """One input; zeros where the data lie elsewhere, for then only the shape is known."""
    if isinstance(x, dict):
        return {n: t[:1] if len(t) else torch.zeros(1, *t.shape[1:], dtype=t.dtype) for n, t in x.items()}
    return x[:1] if len(x) else torch.zeros(1, *x.shape[1:], dtype=x.dtype)
