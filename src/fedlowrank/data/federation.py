"""Federations: the clients of a run, their data and their models."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.arguments.bounds import check_minimum
from ..core.arguments.field_checks import check_arguments
from ..core.contract import ClientInfo, Task
from ..core.errors import ConfigError, DataError, TaskError, did_you_mean, warn_user
from ..core.io.text import list_first
from ..core.key import Key
from ..core.learning.losses import AUTO, Loss, as_loss, class_axis
from ..core.learning.preference_losses import REFERENCE
from ..core.tree import Params
from ..models.architecture import (
    Architecture,
    build_architecture,
    choose_heads,
    choose_types,
    describe_example,
    looks_up_ids,
)
from ..models.hidden_state import refuse_hidden_loss_state, refuse_hidden_state
from .augment import NO_AUGMENT, Augment
from .dataset import ClientData, Examples
from .input_types import InputTypes, convert_named_input, is_image, is_integer
from .partitioning.partitions import read_partitions
from .pixels import Pixels, pack_images
from .targets import check_scores, fit_loss
from .user_data.array_copies import ArrayCopies
from .user_data.columns import Columns
from .user_data.feature_names import FeatureNames, match_columns
from .user_data.user_arrays import (
    COLUMN_WARNING,
    TARGET_WARNINGS,
    find_label_warning,
    find_target_warning,
    find_untested_warning,
    make_client,
    name_classes,
    take_first_input,
)
from .user_data.user_clients import read_user_clients
from .user_data.user_labels import number_labels, number_text_labels

logger = logging.getLogger(__name__)

# number of examples hashed at a time: images stored as bytes become four times as large
_HASH_ROWS = 4096
_MAX_SHOWN_MODELS = 5


class Companion(Protocol):
    """An object that belongs to the models besides their code, such as a tokenizer."""

    def describe(self) -> dict[str, Any]:
        """Properties that must be the same when a run is resumed, as JSON."""
        ...

    def answer(self, run: Any) -> list[dict[str, Any]]:
        """Answers of a :class:`fedlowrank.rounds.run.Run`'s models to fixed prompts, as rows for its report."""
        ...

    def write(self, run: Any, folder: Path) -> list[Path]:
        """Export the models of a :class:`fedlowrank.rounds.run.Run` for other libraries.

        Returns:
            The folders of the models.
        """
        ...

    def write_one(self, folder: Path, params: Params, round: int, client: int | None) -> Path:
        """Export one model in the same way: a client's, or the server's if ``client`` is None."""
        ...


@dataclass(frozen=True)
class Federation:
    """Clients, their data and their models.

    Attributes:
        clients: data of each client.
        infos: description of each client, in the same order; ``infos[i].id == i``.
        architectures: models by name.
        classes: names of the classes; empty for a regression.
        seed: seed of a run on this federation: it determines participants, order of examples and initial values.
        name: name of the federation in reports.
        notes: warnings for the reader of the class counts.
        augment: augmentation of the training images.
        by_length: whether training batches of texts hold examples of similar length.
        companion: object that belongs to the models, such as a tokenizer; exports them for other libraries.
        local_ids: ids of the clients whose data are on this machine, or None for all; the others have no examples.
        remarks: advice to the user on how the models fit the data; computed if None.
        choices: choices of :meth:`from_arrays` that the user left open: types of inputs, heads.
        loss: loss that every method minimizes and every evaluation reports: a :class:`fedlowrank.Loss`, its name, or
            a function ``loss(scores, targets)`` that gives one number for each example and has no trainable parameters.
        feature_names: names of the columns of inputs that were given as data frames, by the name of the input; a
            single input has the empty name. Predictions match the columns of data frames by these names.
        byte_inputs: names of the inputs that were given as unsigned bytes, which are divided by 255.
    """

    clients: Sequence[ClientData]
    infos: Sequence[ClientInfo]
    architectures: Mapping[str, Architecture]
    classes: tuple[str, ...]
    seed: int = 0
    name: str = "federation"
    notes: tuple[str, ...] = ()
    augment: Augment = NO_AUGMENT
    by_length: bool = False
    companion: Companion | None = None
    local_ids: frozenset[int] | None = None
    remarks: tuple[str, ...] | None = None
    choices: tuple[str, ...] = ()
    loss: Loss = AUTO
    feature_names: FeatureNames = field(default_factory=dict)
    byte_inputs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.clients or len(self.clients) != len(self.infos):
            raise DataError(f"there are {len(self.clients)} clients, but {len(self.infos)} infos")
        loss = as_loss(self.loss).with_function()
        object.__setattr__(self, "loss", fit_loss(loss, self.clients, self.classes))
        for i, (info, data) in enumerate(zip(self.infos, self.clients, strict=True)):
            if info.id != i:
                raise DataError(f"the client at index {i} has the id {info.id}; ids count from 0")
            if not len(data.train) and (self.local_ids is None or i in self.local_ids):
                raise DataError(f"{info.title} has no training example")
            if info.architecture not in self.architectures:
                raise TaskError(
                    f"{info.title} has model {info.architecture!r}; known: {[*self.architectures]}"
                )
            for part, examples in (("train", data.train), ("val", data.val), ("test", data.test)):
                self._check_kind(examples, info.title, part)
            if self.augment.is_active:
                try:
                    self.augment.check(data.train.x)
                except DataError as error:
                    raise DataError(f"{info.title}: {error}") from error
                if data.train.y.ndim > 2:
                    raise DataError(
                        f"{info.title}: augment.flip and augment.crop change images and not the labels of their pixels. Leave "
                        "augment out"
                    )
        if self.clients[0].train.is_regression:
            self._check_target_widths()
        # a companion makes the head for the number of classes itself
        if self.clients[0].train.is_regression or (self.classes and self.companion is None):
            remarks = tuple(self._check_outputs())
        else:
            remarks = ()
        if self.remarks is None:
            if self.companion is None:
                self._check_lookups()
                for model in self.architectures.values():
                    refuse_hidden_state(model)
            object.__setattr__(self, "remarks", remarks)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{part}={sum(len(getattr(client, part)) for client in self.clients)}"
            for part in ("train", "val", "test")
        )
        return (
            f"Federation(name={self.name!r}, clients={len(self.clients)}, {sizes}, classes={len(self.classes)}, "
            f"models={list_first(list(self.architectures), _MAX_SHOWN_MODELS)})"
        )

    def _check_kind(self, examples: Examples, title: str, part: str) -> None:
        """Reject targets of another kind than those of the other clients."""
        predicts_tokens = self.loss.predicts_tokens(examples.y) or self.loss.compares_texts
        if (examples.is_regression or predicts_tokens) != bool(self.classes):
            return
        kind = "token labels" if predicts_tokens else "class labels"
        kind = "real targets" if examples.is_regression else kind
        raise DataError(
            f"{title}: {part} has {kind}, but the federation names {len(self.classes)} classes; a "
            "regression has none, and all clients learn the same kind of task"
        )

    def _check_target_widths(self) -> None:
        """Reject clients of a regression with targets of different widths."""
        clients = reversed(list(enumerate(self.clients)))
        widths = {
            tuple(e.y.shape[1:]): self.infos[i].title for i, d in clients for e in (d.train, d.val, d.test)
        }
        if len(widths) > 1:
            widths_text = ", ".join(
                f"{'x'.join(map(str, width))} at {title}" for width, title in sorted(widths.items())
            )
            raise DataError(f"all clients need targets of one width [n, d], but d is {widths_text}")

    def _check_outputs(self) -> list[str]:
        """Reject models with too few scores, outputs that would broadcast, or scores without a gradient.

        Returns:
            A remark for each model whose outputs fit another loss or other classes.
        """
        remarks: dict[str, str] = {}
        infos = [i for i in self.infos if len(self.clients[i.id].train)]
        first_clients = {
            (i.architecture, _describe_input_shape(self.clients[i.id].train)): i.id for i in reversed(infos)
        }
        for (name, _), client_id in first_clients.items():
            examples = self.clients[client_id].train
            example, title = _take_first_input(examples), self.infos[client_id].title
            try:
                scores, trainable = self.architectures[name].probe_gradient(example)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise TaskError(
                    f"{title}: model {name} does not take its inputs: {error}. {describe_example(example)} "
                    "Inputs of all clients with the same model need one shape that the model takes."
                ) from error
            shape = list(scores.shape)
            prefix = f"{title}: model {name} makes {shape} of one example, but"
            target_warning = next((note for note in self.notes if note in TARGET_WARNINGS), "")
            check_scores(self.loss, scores, examples, len(self.classes), prefix, target_warning)
            if not scores.is_floating_point():
                raise TaskError(
                    f"{title}: model {name} makes scores of type {scores.dtype}, by which nothing can be "
                    "learnt; it must return floating-point numbers, those before an argmax or a rounding"
                )
            if not trainable:
                raise TaskError(
                    f"{title}: no gradient of the scores of model {name} reaches its parameters, so "
                    "nothing can be learnt. Look for detach(), torch.no_grad(), torch.inference_mode(), argmax "
                    "or rounding in its forward, as it is in training mode."
                )
            if self.remarks is None and self.loss.is_custom:
                self._refuse_trained_loss(scores, examples)
            is_new = self.remarks is None and name not in remarks and not self.loss.is_custom
            if (
                is_new
                and (not examples.is_regression or self.loss.is_binary(examples.y))
                and (remark := self._describe_scores(name, client_id, scores))
            ):
                remarks[name] = remark
        return list(remarks.values())

    def _refuse_trained_loss(self, scores: Tensor, examples: Examples) -> None:
        """Raise ConfigError if the user's loss trains parameters or keeps state, given scores of the first example."""
        with torch.enable_grad(), (self.key / "loss").global_generators(scores.device):
            try:
                losses = self.loss.each(scores.detach(), examples.y[:1].clone())
            except ConfigError:
                raise
            except Exception:  # noqa: BLE001 - the user's code may need several examples; training reports its errors
                return
        refuse_hidden_loss_state(self.loss, scores.detach(), examples.y[:1], self.key / "loss")
        if losses.requires_grad:
            raise ConfigError(
                f"the loss {self.loss.kind} computes with trainable parameters of its own, and clients train only the parameters "
                "of the model. Compute what needs them in the model's forward, or freeze them: p.requires_grad_(False)"
            )

    def _check_lookups(self) -> None:
        """Reject a client whose inputs hold a number that a table of its model lacks.

        Each model gets two examples of each input shape, made of the smallest and the largest numbers of all clients.
        Only if one fails are the examples themselves tried.
        """
        groups: dict[tuple[str, str], list[tuple[str, Examples]]] = {}
        for info, data in zip(self.infos, self.clients, strict=True):
            for part, examples in (("train", data.train), ("val", data.val), ("test", data.test)):
                if len(examples) and not isinstance(examples.x, Pixels):
                    group = groups.setdefault((info.architecture, _describe_input_shape(examples)), [])
                    group.append((f"{info.title} ({part})", examples))
        for (name, _), group in groups.items():
            model, inputs = self.architectures[name], [_name_inputs(examples) for _, examples in group]
            if not model.has_embedding and not any(is_integer(x) for x in inputs[0].values()):
                continue
            for bound in (torch.amin, torch.amax):
                extreme = {
                    n: bound(torch.stack([bound(x[n], 0) for x in inputs]), 0)[None] for n in inputs[0]
                }
                if _find_missing_row(model, extreme) is not None:
                    _name_missing_row(model, group)

    def _describe_scores(self, name: str, client_id: int, scores: Tensor) -> str:
        """Describe what a user should know about the scores [1, outputs] of a model for a client's example."""
        are_probabilities = bool(((scores >= 0) & (scores <= 1)).all())
        # not reached by language models, whose vocabulary may be wider than the tokens that occur
        is_binary = not self.classes
        outputs = scores.shape[class_axis(scores)]
        has_extra_scores = not is_binary and outputs > len(self.classes)
        if not are_probabilities and not has_extra_scores:
            return ""
        layer, operation = self.architectures[name].last_layer(
            _take_first_input(self.clients[client_id].train)
        )
        location = f" in its {layer}" if layer else ""
        # a softmax over the batch maps a single example to ones; another forward may reshape the output of a softmax
        distance = abs(float(scores.sum()) - 1) if outputs > 1 and not is_binary else 1.0
        if operation == "softmax" and distance > 0.05:
            operation = ""
        elif not operation and distance < 1e-5:
            operation = "softmax"
        faults = []
        if are_probabilities and operation:
            loss_name, activation = (
                ("binary cross-entropy", "sigmoid") if is_binary else ("cross-entropy", "softmax")
            )
            faults.append(
                f"ends in a {operation}{location}, but the loss is the {loss_name}, which applies a {activation} itself, so "
                f"that gradients become small. Leave the {operation} out"
            )
        if has_extra_scores:
            faults.append(
                f"makes {outputs} scores{location}, but there are {len(self.classes)} classes over all clients. Name "
                "the classes if there are more (classes=...), or give it as many outputs as classes"
            )
        return f"{self.infos[client_id].title}: model {name} " + "; it ".join(faults) + "." if faults else ""

    @property
    def key(self) -> Key:
        """Root key of all randomness."""
        return Key((self.seed,))

    def task(self, rounds: int) -> Task:
        """Learning task of a run with that many rounds."""
        target = self.clients[0].train.y[:0]
        key = self.key / "init"
        return Task(self.architectures, self.infos, len(self.classes), rounds, key, self.loss, target)

    def with_loss(self, loss: Any) -> Federation:
        """Return the same federation with another loss; see :attr:`loss`."""
        notes = tuple(note for note in self.notes if note not in TARGET_WARNINGS)
        return replace(self, loss=loss, notes=notes, remarks=None)

    def to(self, device: str) -> Federation:
        """Return the same federation with data and initial parameters on a device.

        Tensors with rows of one type and shape become slices of one tensor, so that a cohort's batch is one selection
        of rows; shared tensors are moved once.
        """
        if device == "cpu":
            return self
        tensors = {id(t): t for examples in self._all_examples() for t in _list_tensors(examples)}
        moved_tensors = dict(zip(tensors, _move_together(list(tensors.values()), device), strict=True))

        def move_examples(examples: Examples) -> Examples:
            x, y = examples.x, moved_tensors[id(examples.y)]
            if isinstance(x, dict):
                return Examples({n: moved_tensors[id(t)] for n, t in x.items()}, y)
            return Examples(
                Pixels(moved_tensors[id(x.codes)], moved_tensors[id(x.table)])
                if isinstance(x, Pixels)
                else moved_tensors[id(x)],
                y,
            )

        architectures = {n: a.to(device) for n, a in self.architectures.items()}
        return replace(self, clients=self._map_examples(move_examples), architectures=architectures)

    @property
    def is_packed(self) -> bool:
        """Whether images are stored as bytes."""
        return isinstance(self.clients[0].train.x, Pixels)

    def pack_images(self) -> Federation:
        """Return the same federation with images stored as bytes, without loss, in a quarter of the memory.

        Raises:
            DataError: if the inputs are no images, or a channel has more than 256 values over all clients.
        """
        if self.is_packed:
            return self
        inputs = {id(e.x): e.x for e in self._all_examples()}
        images = {i: x for i, x in inputs.items() if isinstance(x, Tensor)}
        if len(images) < len(inputs):
            raise DataError("only images can be stored as bytes; these are named inputs, e.g. of texts.")
        pixels = dict(zip(images, pack_images(list(images.values())), strict=True))
        return replace(self, clients=self._map_examples(lambda e: Examples(pixels[id(e.x)], e.y)))

    def unpack_images(self) -> Federation:
        """Return the same federation with images as float32, the inverse of :meth:`pack_images`."""
        if not self.is_packed:
            return self
        return replace(self, clients=self._map_examples(lambda e: Examples(e.inputs, e.y)))

    def _map_examples(self, change: Callable[[Examples], Examples]) -> list[ClientData]:
        """Apply a function to the examples of all clients; examples that several clients share are changed once."""
        changed_examples = {id(e): change(e) for e in {id(e): e for e in self._all_examples()}.values()}
        return [
            replace(
                client,
                train=changed_examples[id(client.train)],
                val=changed_examples[id(client.val)],
                test=changed_examples[id(client.test)],
            )
            for client in self.clients
        ]

    def _all_examples(self) -> Iterator[Examples]:
        for client in self.clients:
            yield from (client.train, client.val, client.test)

    def fingerprint(self) -> list[str]:
        """One hash of all examples for each client, so that a resumed run detects different data."""
        return [hash_examples(c) for c in self.clients]

    def describe(self) -> list[dict[str, Any]]:
        """One row per client: id, architecture, sizes of its parts, class counts if any, rank, cluster."""
        counts = {part: self._count_classes(part) for part in ("train", "val", "test")}
        rows = []
        for i, (info, data) in enumerate(zip(self.infos, self.clients, strict=True)):
            sizes = {"train": len(data.train), "val": len(data.val), "test": len(data.test)}
            name_field = {"name": info.name} if info.name else {}
            row = {"id": info.id, **name_field, "architecture": info.architecture, **sizes}
            classes = {part: part_counts[i] for part, part_counts in counts.items()}
            optional_fields = {"rank": info.rank, "cluster": info.cluster}
            rows.append(
                {**row, "classes": classes, **{n: v for n, v in optional_fields.items() if v is not None}}
            )
        return rows

    def client(self, client: int | str) -> ClientInfo:
        """Find the client with a number or a name.

        Raises:
            ConfigError: if there is no such client.
        """
        if isinstance(client, str):
            names = {info.name: info for info in self.infos if info.name}
            if client in names:
                return names[client]
            hint = did_you_mean(client, names) if names else "They have no names."
            raise ConfigError(f"there is no client {client!r}. {hint}")
        try:
            index = operator.index(client)
        except TypeError as error:
            raise ConfigError(
                f"a client is given by its number, a whole number such as 0, or by its name, not by {client!r}"
            ) from error
        if not 0 <= index < len(self.infos):
            raise ConfigError(
                f"there is no client {client}; they are numbered from 0 to {len(self.infos) - 1}"
            )
        return self.infos[index]

    def _count_classes(self, part: str) -> list[list[int]]:
        """Count the examples of each class in a part of every client; empty lists without class labels."""
        labels = [getattr(client, part).y for client in self.clients]
        if not self.classes or self.clients[0].train.is_dense:
            return [[] for _ in labels]
        # one count over all clients: client i's label c is the number i * classes + c
        sizes = torch.tensor([y.shape[0] for y in labels])
        offsets = torch.arange(len(labels)).mul_(len(self.classes)).repeat_interleave(sizes)
        flat_labels = torch.cat([y.cpu() for y in labels])
        if self.loss.kind != "auto":
            counts = flat_labels != self.loss.ignore_index
            flat_labels, offsets = flat_labels[counts], offsets[counts]
        flat_labels = flat_labels.add(offsets)
        counts = torch.bincount(flat_labels, minlength=len(labels) * len(self.classes))
        table: list[list[int]] = counts.reshape(len(labels), -1).tolist()
        return table

    @classmethod
    @check_arguments
    def from_arrays(
        cls,
        clients: Any,
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, nn.Module | Callable[[], nn.Module]],
        *,
        client: Any = None,
        target: Any = None,
        features: Sequence[Any] | None = None,
        split: Any = None,
        head: str | None = None,
        architecture: Sequence[str] | None = None,
        rank: Sequence[int | None] | None = None,
        cluster: Sequence[int] | None = None,
        classes: Sequence[str] | int | None = None,
        val: float = 0.1,
        test: float = 0.1,
        seed: int = 0,
        name: str = "federation",
        augment: Augment = NO_AUGMENT,
        loss: Any = AUTO,
    ) -> Federation:
        """Make a federation of your own data and models.

        Args:
            clients: a list with the data of each client; a dict of them by the clients' names; or one
                ``pandas.DataFrame`` with the rows of all clients, see ``client``. The data of a client are a pair of
                inputs and labels ``(x [n, ...], y [n])``, a ``torch.utils.data.Dataset`` with a length, a data frame
                with a column ``target``, or a dict of columns, and are divided at random. To set the parts yourself,
                give a dict of these under ``train`` and optionally ``val`` and ``test``, or a tuple ``(train, test)``
                or ``(train, val, test)``. Arrays are tensors, numpy arrays, data frames or lists, and are copied; x
                may be a dict of them, which the model gets as keyword arguments. Data frames are matched by the names
                of their columns. Rows of a pair are matched by position, and their indices must be equal. Arrays of
                unsigned bytes are pixels and are divided by 255, with a warning if they may be no pixels; other inputs
                become float32 and keep their values. Whole numbers stay int64 if the model looks them up: it accepts them,
                and has an ``nn.Embedding`` or refuses float32. See :mod:`fedlowrank.data.input_types`. Labels are
                whole numbers, booleans or text. Text is numbered in sorted order. Whole numbers stay unchanged if
                each is an index of the model's scores or if the loss is a function of your own; otherwise they are
                numbered in sorted order, with a warning.
                Real targets ``y [n, d]`` make a regression, with d = 1 for a single number.
            model: a module (its parameters are the initial ones), a factory of modules (initialized from the seed),
                or several of them by name. A module is used directly, but its parameters, buffers, attributes and
                modes are not changed here. It is called on single examples to find out what it accepts and returns;
                its hooks run then.
            client: column that names the client of each row, for one data frame.
            target: column of the labels (text, booleans, whole numbers) or of the real targets of data frames, or a
                list of columns, which are real targets whatever their types. For examples or clients that are dicts it is
                the key; by default ``label``, ``labels``, ``target``, ``targets`` or ``y``.
            features: columns of data frames or keys of dicts that are the inputs; by default all others.
            split: column that names the part of each row of one data frame: ``train``, ``val`` or ``test``.
            head: dotted name of the submodule that is the head; see :class:`Architecture`. By default the
                ``nn.Linear`` that the forward ends in, if it has one score for each class.
            architecture: name of each client's model. By default client k has model number k mod the number of
                models.
            rank: rank of each client's low-rank parts, lowered with a warning if it is larger than a layer allows.
            cluster: index of each client's ground-truth task, from 0, for methods with optimal routing.
            classes: names or number of the classes. By default the largest label plus one, or the sorted labels if
                they are text.
            val: share of the examples for validation, for clients without given parts.
            test: share of the examples for testing, for clients without given parts.
            seed: seed of all randomness.
            name: name of the federation in reports.
            augment: augmentation of the training images.
            loss: loss that every method minimizes and every evaluation reports: a name (``"cross_entropy"``,
                ``"bce"``, ``"mse"``, ``"huber"``, ``"focal"``), a :class:`fedlowrank.Loss` with options, or a
                function ``loss(scores, targets)`` that gives one number for each example. By default the
                cross-entropy for labels, and half the squared error for real targets. For ``bce``, ``mse`` and
                ``huber`` numbers of any type become real targets, and ``[n]`` becomes the targets ``[n, 1]`` of one
                output.

        Raises:
            DataError: if an array does not fit the others; the message names the client.
            TaskError: if a model does not fit the data.
        """
        for part, share in (("val", val), ("test", test)):
            if not 0 <= share < 1:
                raise DataError(
                    f"Federation.from_arrays: {part} is a share of the examples, at least 0 and below 1; it is {share}"
                )
        key = Key((seed,))
        user_clients, feature_names = match_columns(
            read_user_clients(clients, Columns(client, target, features, split), key)
        )
        loss = as_loss(loss).with_function()
        user_clients, classes_given = number_text_labels(user_clients, classes, loss)
        titles = [user_client.title for user_client in user_clients]
        models = model if isinstance(model, Mapping) else {"model": model}
        first_input = take_first_input(user_clients[0])
        types = _choose_input_types(models, first_input, key / "init")
        copies = ArrayCopies()
        data = [
            make_client(user_client, i, val, test, key, types, copies, loss)
            for i, user_client in enumerate(user_clients)
        ]
        choices = types.choices(first_input)
        example = _take_first_input(data[0].train)
        try:
            architectures = {
                n: build_architecture(n, m, example, head, key / "init" / n) for n, m in models.items()
            }
        except TaskError as error:
            if not choices:
                raise
            raise TaskError(f"{error} {' '.join(choices)}") from error
        is_column = target is not None and not isinstance(target, list | tuple)
        column_warning = COLUMN_WARNING if is_column else ""
        warnings = [
            types.warning(),
            find_target_warning([d.train.y for d in data], column_warning) if loss.kind == "auto" else None,
            find_untested_warning(user_clients, data, test),
        ]
        if classes_given is None:
            data, classes_given, note = number_labels(data, _count_outputs(architectures), loss)
            parts = [e.y for d in data for e in (d.train, d.val, d.test)]
            # only a function of the user's own knows what its labels mean
            warnings.append(note or (None if loss.is_custom else find_label_warning(parts)))
        class_names = name_classes(data, classes_given, titles, loss)
        notes = tuple(note for note in warnings if note)
        for choice in choices:
            logger.info(choice)
        if not data[0].train.is_dense and data[0].train.y.ndim < 3:
            choices += choose_heads(architectures, len(class_names) or data[0].train.y.shape[-1])
        if architecture is None:
            architecture_names = list(architectures)
            architecture = [architecture_names[i % len(architecture_names)] for i in range(len(data))]
        ranks = [None] * len(data) if rank is None else list(rank)
        for index, client_rank in enumerate(ranks):
            if client_rank is not None:
                check_minimum(f"Federation.from_arrays.rank, value {index}", client_rank, 1)
        clusters = [None] * len(data) if cluster is None else list(cluster)
        if {len(architecture), len(ranks), len(clusters)} != {len(data)}:
            raise DataError(
                f"{len(data)} clients, but {len(architecture)} architectures, {len(ranks)} ranks and "
                f"{len(clusters)} clusters"
            )
        if cluster is not None and min(cluster) < 0:
            raise DataError(f"clusters count from 0, but there is a {min(cluster)}")
        infos = [
            ClientInfo(i, len(d.train), a, r, c, user_client.name)
            for i, (d, a, r, c, user_client) in enumerate(
                zip(data, architecture, ranks, clusters, user_clients, strict=True)
            )
        ]
        federation = cls(
            data,
            infos,
            architectures,
            class_names,
            seed,
            name,
            notes,
            augment=augment,
            choices=tuple(choices),
            loss=loss,
            feature_names=feature_names,
            byte_inputs=types.scaled,
        )
        for note in (*notes, *(federation.remarks or ())):
            warn_user(note)
        return federation

    @classmethod
    def from_datasets(
        cls,
        datasets: Any,
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, nn.Module | Callable[[], nn.Module]],
        **options: Any,
    ) -> Federation:
        """Make a federation of torch data sets: another name of :meth:`from_arrays`, which accepts them, too.

        Args:
            datasets: a list with a data set, or a tuple (train, test) of data sets, for each client; or a dict of
                these by the clients' names. Each data set is read once into memory.
            model: model or models, as for :meth:`from_arrays`.
            **options: further options of :meth:`from_arrays`.

        Raises:
            DataError: if an example does not fit the others; the message names the client.
            TaskError: if a model does not fit the data.
        """
        return cls.from_arrays(datasets, model, **options)

    @classmethod
    @check_arguments
    def from_partitions(
        cls,
        partitions: Any,
        model: nn.Module | Callable[[], nn.Module] | Mapping[str, nn.Module | Callable[[], nn.Module]],
        *,
        label: str = "label",
        features: Sequence[str] = (),
        split: str = "train",
        size: int | None = None,
        channels: int = 3,
        seed: int = 0,
        **options: Any,
    ) -> Federation:
        """Make a federation of Hugging Face data sets, one for each client.

        A data set with a transform (``with_transform``) is read once through it, when the federation is made.

        Args:
            partitions: a sequence of ``datasets.Dataset``, or of ``DatasetDict`` with the splits ``train`` and
                optionally ``val`` and ``test``; or a ``FederatedDataset`` of the library flwr-datasets, whose
                partitions are all loaded.
            model: model or models, as for :meth:`from_arrays`.
            label: column of the labels: classes, whole numbers from 0 on, booleans, or text; or of real targets, numbers or
                lists of numbers. Whole numbers are real targets if ``loss`` is ``"bce"``, ``"mse"`` or ``"huber"``.
            features: columns of the inputs; by default the one image column, or else all numeric columns.
            split: name of the split that the partitioner of a ``FederatedDataset`` divides.
            size: height and width to which every image is resized, or None to keep the common size.
            channels: number of channels of images: 3 for color, 1 for gray levels.
            seed: seed of all randomness, including that of transforms.
            **options: further options ``val``, ``test``, ``head``, ``loss`` and so on of :meth:`from_arrays`.

        Raises:
            DataError: if ``datasets`` is missing or a partition does not fit the others.
            TaskError: if a model does not fit the data.
        """
        loss = as_loss(options.get("loss", AUTO))
        key = Key((seed,)) / "transform"
        clients, classes = read_partitions(partitions, label, features, split, size, channels, loss, key)
        return cls.from_arrays(clients, model, **{"classes": classes or None, "seed": seed, **options})


def _choose_input_types(
    models: Mapping[str, nn.Module | Callable[[], nn.Module]],
    first_input: Tensor | dict[str, Tensor] | None,
    key: Key,
) -> InputTypes:
    """Choose the types in which the models get inputs, given one input."""
    if isinstance(first_input, dict):
        example = {
            n: t if is_integer(t) and not is_image(t) else convert_named_input(t)
            for n, t in first_input.items()
        }
        return InputTypes(named_dtypes=choose_types(models, example, key))
    return InputTypes(
        looks_up_ids=first_input is not None
        and is_integer(first_input)
        and all(looks_up_ids(m, first_input.long(), key / n) for n, m in models.items())
    )


def _count_outputs(architectures: Mapping[str, Architecture]) -> int:
    """Number of scores that all models have for an example."""
    for name, model in architectures.items():
        if model.example_scores.ndim == 0:
            raise TaskError(
                f"model {name} makes one number of a batch with one example, but it must return scores [b, outputs]. "
                "Leave squeeze() out of its forward"
            )
    return min(int(a.example_scores.shape[-1]) for a in architectures.values())


def _take_first_input(examples: Examples) -> Tensor | dict[str, Tensor]:
    """Inputs of the first example, as a batch of 1."""
    x = examples.x
    return {n: t[:1] for n, t in x.items()} if isinstance(x, dict) else x[:1]


def _name_inputs(examples: Examples) -> dict[str, Tensor]:
    """Inputs by name; a single input has the empty name."""
    inputs = examples.inputs
    return inputs if isinstance(inputs, dict) else {"": inputs}


def _find_missing_row(model: Architecture, inputs: Mapping[str, Tensor]) -> IndexError | None:
    """Find the error of a forward pass that looks up a row beyond its table; None if there is none."""
    try:
        with torch.no_grad():
            model.probe(inputs.get("", inputs))
    except IndexError as error:
        return error
    except Exception:  # noqa: BLE001 - forward is the user's code and may reject an example that no client has
        return None
    return None


def _name_missing_row(model: Architecture, group: Sequence[tuple[str, Examples]]) -> None:
    """Raise TaskError for the first example that looks up a row beyond a table of the model, if there is one."""
    for title, examples in group:
        inputs = _name_inputs(examples)
        for i in range(len(examples)):
            example = {n: x[i : i + 1] for n, x in inputs.items()}
            if error := _find_missing_row(model, example):
                bounds = ", ".join(f"{int(x.min())} to {int(x.max())}" for x in example.values() if x.numel())
                raise TaskError(
                    f"{title}: model {model.name} looks up a number that its table lacks, at example {i} (numbers from "
                    f"{bounds}): {error}. An nn.Embedding(n, ...) has the numbers from 0 to n - 1: count those of all clients"
                ) from error


def _describe_input_shape(examples: Examples) -> str:
    x = examples.x
    shapes = {n: t.shape[1:] for n, t in x.items()} if isinstance(x, dict) else x.shape[1:]
    return str(shapes)


def hash_examples(data: ClientData) -> str:
    """Hash a client's examples: inputs and targets of all three parts."""
    hasher = hashlib.blake2b(digest_size=16)
    for examples in (data.train, data.val, data.test):
        # the reference follows from the tokens and the base, up to rounding that differs between machines
        inputs = (
            [t for name, t in examples.x.items() if name != REFERENCE]
            if isinstance(examples.x, dict)
            else [examples.x]
        )
        for t in (*inputs, examples.y):
            hasher.update(repr((t.dtype, tuple(t.shape))).encode())
            for start in range(0, len(t), _HASH_ROWS):
                hasher.update(t[start : start + _HASH_ROWS].detach().cpu().contiguous().numpy())
    return hasher.hexdigest()


def _list_tensors(examples: Examples) -> list[Tensor]:
    x = examples.x
    if isinstance(x, dict):
        return [*x.values(), examples.y]
    return [x.codes, x.table, examples.y] if isinstance(x, Pixels) else [x, examples.y]


def _move_together(tensors: Sequence[Tensor], device: str) -> list[Tensor]:
    """Copy tensors to a device; those with rows of one type and shape share one piece of memory."""
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.dtype, t.shape[1:]), []).append(i)
    moved_tensors: dict[int, Tensor] = {}
    for (dtype, shape), indices in groups.items():
        sizes = [len(tensors[i]) for i in indices]
        buffer = torch.empty(sum(sizes), *shape, dtype=dtype, device=device)
        for i, rows in zip(indices, torch.split(buffer, sizes), strict=True):
            moved_tensors[i] = rows.copy_(tensors[i])
    return [moved_tensors[i] for i in range(len(tensors))]
