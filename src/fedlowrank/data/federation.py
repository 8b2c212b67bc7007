"""The clients of a run: who they are, what they hold, which models they have."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import DataError, TaskError
from ..core.key import Key
from ..core.method import ClientInfo, Task
from ..core.tree import Params
from ..models.architecture import Architecture, architecture_of
from .augment import UNCHANGED, Augment
from .dataset import ClientData, Examples
from .given import ONE_HOT, Pair, examples_of, is_one_hot
from .pixels import Pixels, pack

# Examples that are looked at together.
_ROWS = 4096


class Companion(Protocol):
    """What belongs to models besides their code."""

    def describe(self) -> dict[str, Any]:
        """What a resumed run must find unchanged, as JSON."""
        ...

    def write(self, run: Any, folder: Path, merged: bool = False) -> list[Path]:
        """Write the models of a :class:`fedlowrank.simulation.run.Run` in the form that others read; returns the folders."""
        ...

    def write_one(self, folder: Path, params: Params, round: int, client: int | None) -> Path:
        """Write one model likewise, a client's or, by None, the server's."""
        ...


@dataclass(frozen=True)
class Federation:
    """Clients, their data and their models.

    Attributes:
        clients: data of each client.
        infos: description of each client, in the same order; ``infos[i].id == i``.
        architectures: models by name.
        classes: names of the classes; empty for a regression.
        seed: of everything random in a run on this federation: participants, order of examples, initial values.
        name: for reports.
        notes: what a reader of the class counts should know.
        augment: how the images of training batches are changed at random.
        by_length: of texts: whether training batches are of examples of like length.
        companion: what else belongs to the models, such as a tokenizer, and writes them in the form that others read.
        here: identifiers of the clients whose data lie on this machine, or None for all; the others' are empty.
    """

    clients: Sequence[ClientData]
    infos: Sequence[ClientInfo]
    architectures: Mapping[str, Architecture]
    classes: tuple[str, ...]
    seed: int = 0
    name: str = "federation"
    notes: tuple[str, ...] = ()
    augment: Augment = UNCHANGED
    by_length: bool = False
    companion: Companion | None = None
    here: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if not self.clients or len(self.clients) != len(self.infos):
            raise DataError(
                f"a federation needs one description a client; {len(self.clients)} clients, {len(self.infos)}"
            )
        for i, (info, data) in enumerate(zip(self.infos, self.clients, strict=True)):
            if info.id != i:
                raise DataError(f"the client at place {i} has the identifier {info.id}; identifiers count from 0")
            if not len(data.train) and (self.here is None or i in self.here):
                raise DataError(f"client {i} has no training example")
            if info.architecture not in self.architectures:
                raise TaskError(f"client {i} holds model {info.architecture!r}; known: {sorted(self.architectures)}")
            for part in ("train", "val", "test"):
                held: Examples = getattr(data, part)
                if (held.regression or held.tokens) == bool(self.classes):
                    kind = "real targets" if held.regression else "labels of tokens" if held.tokens else "class labels"
                    raise DataError(
                        f"client {i}: {part} has {kind}, but the federation names "
                        f"{len(self.classes)} classes; a regression has none, and all clients learn the same kind of task"
                    )
            try:
                self.augment.check(data.train.x)
            except DataError as error:
                raise DataError(f"client {i}: {error}") from error
        if self.clients[0].train.regression:
            self._check_outputs()
        elif self.classes and self.companion is None:
            # a companion makes the head for the number of classes itself
            self._check_scores()

    def _check_scores(self) -> None:
        """Refuse models without a score for every class, which training would tell by an index out of bounds."""
        held = {i.architecture: i.id for i in reversed(self.infos) if len(self.clients[i.id].train)}
        for name, client in held.items():
            shape = list(_outputs(self.architectures[name], self.clients[client].train).shape)
            if len(shape) != 2 or shape[0] != 1 or shape[1] < len(self.classes):
                raise TaskError(
                    f"client {client}: model {name} makes {shape} of one example, but there are {len(self.classes)} classes; "
                    f"it must make [1, {len(self.classes)}], one score for each class"
                )

    def _check_outputs(self) -> None:
        """Refuse models that a regression's loss would broadcast against its targets without a word."""
        clients = reversed(list(enumerate(self.clients)))
        targets = {e.y.shape[1]: i for i, d in clients for e in (d.train, d.val, d.test)}
        if len(targets) > 1:
            found = ", ".join(f"{d} at client {i}" for d, i in sorted(targets.items()))
            raise DataError(f"all clients need targets of one width [n, d], but d is {found}")
        width = next(iter(targets))
        for info, data in zip(self.infos, self.clients, strict=True):
            if not len(data.train):
                continue
            out = _outputs(self.architectures[info.architecture], data.train)
            if tuple(out.shape) != (1, width):
                raise TaskError(
                    f"client {info.id}: model {info.architecture} makes {list(out.shape)} of one example, but its "
                    f"target is [1, {width}]"
                )

    @property
    def key(self) -> Key:
        """Root of all randomness."""
        return Key((self.seed,))

    def task(self, rounds: int) -> Task:
        """What is to be learnt in a run of that many rounds."""
        return Task(self.architectures, self.infos, len(self.classes), rounds, self.key / "init")

    def to(self, device: str) -> Federation:
        """The same with data and initial parameters on a device; what clients have in common goes there once."""
        if device == "cpu":
            return self
        moved: dict[int, Tensor] = {}

        def move(t: Tensor) -> Tensor:
            return moved[id(t)] if id(t) in moved else moved.setdefault(id(t), t.to(device))

        def of(examples: Examples) -> Examples:
            x = examples.x
            if isinstance(x, dict):
                return Examples({n: move(t) for n, t in x.items()}, move(examples.y))
            inputs = Pixels(move(x.codes), move(x.table)) if isinstance(x, Pixels) else move(x)
            return Examples(inputs, move(examples.y))

        architectures = {n: a.to(device) for n, a in self.architectures.items()}
        return replace(self, clients=self._changed(of), architectures=architectures)

    @property
    def is_packed(self) -> bool:
        """Whether images are kept as bytes."""
        return isinstance(self.clients[0].train.x, Pixels)

    def packed(self) -> Federation:
        """The same with images as bytes, a quarter of the memory; what is made of them has the very bits it had before.

        Raises:
            DataError: if the inputs are no images, or a channel takes more than 256 values, over all clients.
        """
        if self.is_packed:
            return self
        held = {id(e.x): e.x for e in self._parts()}
        images = {i: x for i, x in held.items() if isinstance(x, Tensor)}
        if len(images) < len(held):
            raise DataError("only images can be kept as bytes; these are inputs by name, as of texts.")
        made = dict(zip(images, pack(list(images.values())), strict=True))
        return replace(self, clients=self._changed(lambda e: Examples(made[id(e.x)], e.y)))

    def unpacked(self) -> Federation:
        """The same with images as float32, the inverse of :meth:`packed`."""
        if not self.is_packed:
            return self
        return replace(self, clients=self._changed(lambda e: Examples(e.inputs, e.y)))

    def _changed(self, change: Callable[[Examples], Examples]) -> list[ClientData]:
        """What the clients hold with all examples changed; those that several of them share once."""
        made = {id(e): change(e) for e in {id(e): e for e in self._parts()}.values()}
        return [replace(c, train=made[id(c.train)], val=made[id(c.val)], test=made[id(c.test)]) for c in self.clients]

    def _parts(self) -> Iterator[Examples]:
        for client in self.clients:
            yield from (client.train, client.val, client.test)

    def fingerprint(self) -> list[str]:
        """One digest a client of all its examples, so that a resumed run notices other data."""
        return [_digest(c) for c in self.clients]

    def describe(self) -> list[dict[str, Any]]:
        """One row a client: identifier, architecture, sizes and class counts of its splits, its cluster if known.

        The counts of a regression are empty.
        """
        rows = []
        for info, data in zip(self.infos, self.clients, strict=True):
            splits = {s: getattr(data, s) for s in ("train", "val", "test")}
            counts = {
                s: [] if e.regression or e.tokens else torch.bincount(e.y, minlength=len(self.classes)).tolist()
                for s, e in splits.items()
            }
            sizes = {s: len(e) for s, e in splits.items()}
            row = {"id": info.id, "architecture": info.architecture, **sizes, "classes": counts}
            known = {"rank": info.rank, "cluster": info.cluster}
            rows.append({**row, **{n: v for n, v in known.items() if v is not None}})
        return rows

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[Pair | Mapping[str, Pair]],
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, nn.Module | Callable[[], nn.Module]],
        *,
        head: str | None = None,
        architecture: Sequence[str] | None = None,
        rank: Sequence[int] | None = None,
        cluster: Sequence[int] | None = None,
        classes: Sequence[str] | int | None = None,
        val: float = 0.1,
        test: float = 0.1,
        seed: int = 0,
        name: str = "federation",
        augment: Augment = UNCHANGED,
    ) -> Federation:
        """A federation of one's own data and models.

        Args:
            clients: of each client either inputs and labels ``(x [n, ...], y [n])``, to be divided, or a dict of such
                pairs under ``train`` and optionally ``val`` and ``test``; tensors, arrays of numpy or data frames. Labels are
                whole numbers from 0. Real targets ``y [n, d]`` make a regression, with d = 1 for a single number.
            model: a module (its parameters are where training starts), a factory of modules (drawn from the seed), or
                several of them by name.
            head: dotted name of the submodule that is the head; see :class:`Architecture`.
            architecture: name of each client's model. By default client k holds the (k mod number)-th.
            rank: of each client's low-rank parts.
            cluster: each client's ground-truth task, counted from 0, for methods with optimal routing.
            classes: their names or their number. By default the largest label plus one. A regression has none.
            val: share of the examples held back for validation, where the client brings no split of its own.
            test: share held back for testing.
            seed: of everything random.
            name: for reports.
            augment: how the images of training batches are changed at random.

        Raises:
            DataError: if an array does not fit; the message names the client.
            TaskError: if a model does not fit.
        """
        key = Key((seed,))
        data = [_client_data(c, i, val, test, key / "split" / i) for i, c in enumerate(clients)]
        if not data:
            raise DataError("a federation needs at least one client")
        names = _class_names(data, classes)
        if not names and all(is_one_hot(d.train.y) for d in data):
            warnings.warn(ONE_HOT, stacklevel=2)
        x = data[0].train.x
        example = {n: t[:1] for n, t in x.items()} if isinstance(x, dict) else x[:1]
        models = model if isinstance(model, Mapping) else {"model": model}
        known = {n: architecture_of(n, m, example, head, key / "init" / n) for n, m in models.items()}
        held = (
            list(architecture) if architecture is not None else [list(known)[i % len(known)] for i in range(len(data))]
        )
        ranks = list(rank) if rank is not None else [None] * len(data)
        clusters = list(cluster) if cluster is not None else [None] * len(data)
        if {len(held), len(ranks), len(clusters)} != {len(data)}:
            raise DataError(
                f"{len(data)} clients, but {len(held)} architectures, {len(ranks)} ranks and {len(clusters)} clusters"
            )
        if any(c is not None and c < 0 for c in clusters):
            raise DataError(f"clusters count from 0, but there is a {min(c for c in clusters if c is not None)}")
        infos = [
            ClientInfo(i, len(d.train), a, r, c)
            for i, (d, a, r, c) in enumerate(zip(data, held, ranks, clusters, strict=True))
        ]
        return cls(data, infos, known, names, seed, name, augment=augment)


def _outputs(model: Architecture, examples: Examples) -> Tensor:
    """What a model makes of the first example."""
    x = examples.x
    with torch.inference_mode():
        return model.probe({n: t[:1] for n, t in x.items()} if isinstance(x, dict) else x[:1])


def _class_names(data: Sequence[ClientData], classes: Sequence[str] | int | None) -> tuple[str, ...]:
    """Names of the classes that users gave or that the labels imply; none for a regression."""
    kinds = {d.train.regression: i for i, d in reversed(list(enumerate(data)))}
    if len(kinds) > 1:
        raise DataError(
            f"client {kinds[True]} has real targets and client {kinds[False]} class labels; all must learn the same task"
        )
    if True in kinds:
        if classes:
            raise DataError(
                f"client {kinds[True]} has real targets, a regression, which has no classes; leave them out. For a "
                "classification give labels [n], whole numbers; of one-hot rows, y.argmax(1)."
            )
        return ()
    top = max(int(e.y.max()) for d in data for e in (d.train, d.val, d.test) if len(e) and not e.regression) + 1
    if classes is None:
        classes = top
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
    if top > len(names):
        raise DataError(f"there is a label {top - 1} but only {len(names)} classes; labels count from 0")
    return names


def _client_data(given: Pair | Mapping[str, Pair], client: int, val: float, test: float, key: Key) -> ClientData:
    if isinstance(given, Mapping):
        unknown = set(given) - {"train", "val", "test"}
        if unknown or "train" not in given:
            raise DataError(
                f"client {client}: splits must be 'train' and optionally 'val' and 'test', not {sorted(given)}"
            )
        parts = {s: examples_of(p, client) for s, p in given.items()}
        empty = _take(parts["train"], torch.arange(0))
        return ClientData(parts["train"], parts.get("val", empty), parts.get("test", empty))
    everything = examples_of(given, client)
    n = len(everything)
    n_val, n_test = round(n * val), round(n * test)
    if n - n_val - n_test < 1:
        raise DataError(f"client {client} has {n} examples, too few for shares of {val} and {test} besides training")
    order = torch.randperm(n, generator=key.generator())
    return ClientData(
        _take(everything, order[n_val + n_test :]),
        _take(everything, order[:n_val]),
        _take(everything, order[n_val:][:n_test]),
    )


def _take(examples: Examples, index: Tensor) -> Examples:
    return examples.take(index)


def _digest(data: ClientData) -> str:
    state = hashlib.blake2b(digest_size=16)
    for examples in (data.train, data.val, data.test):
        parts = examples.x.values() if isinstance(examples.x, dict) else [examples.x]
        for t in (*parts, examples.y):
            state.update(repr((t.dtype, tuple(t.shape))).encode())
            # a few at a time, for images that are bytes take four times as much as numbers
            for start in range(0, len(t), _ROWS):
                state.update(t[start : start + _ROWS].detach().cpu().contiguous().numpy())
    return state.hexdigest()
