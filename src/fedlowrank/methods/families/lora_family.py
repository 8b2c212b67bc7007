"""What federated LoRA methods share: how factors begin, are trained and are sent (Hu et al. 2021).

A client of rank r holds factors B ``[d, r]`` and A ``[r, k]`` of every adapted weight; its model is W_0 + s·B
A. A server works on updates in the unit of the weights: an upload is multiplied by s, what is sent is divided
by it, so that no aggregator knows of α or r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...adapters.lora.adapted_layers import AdaptedLayer
from ...adapters.lora.lora_factors import LoRA, lora_of, parameters_beside_factors
from ...adapters.lora.rank_limits import describe_lowered_ranks
from ...adapters.wire_format import PackedFactors, Quantized, Rounded, WireType, pack_factors
from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.contract.method import Batch, ClientInfo, ClientView, PaddedDimensions, Task
from ...core.contract.model import Model
from ...core.errors import LoweredRankWarning, TaskError, warn_user
from ...core.learning.batch_losses import task_loss
from ...core.learning.optimizer import Optimizer
from ...core.tree import Params, join_path, tree_dataclass
from ...core.tree import leaves as tensors_of
from ...linalg.pair import Factors, Pair, truncate_pair

Leaves = dict[str, dict[str, Tensor]]
"""What is trained: ``a`` and ``b``, the factors by layer, and ``rest``, parameters trained whole, by name."""

Penalty = Callable[[Leaves], Tensor]
"""A term of the loss that depends on what is trained alone."""


@tree_dataclass
class Scaling:
    """The scale s of a client's update by its rank: ``scale · (rank0 / r)^power``.

    It is part of a server's state where ``download``, which gets no task, divides by s.

    Attributes:
        scale: s at rank0.
        rank0: the rank that the adapter's configuration names.
        power: 0 for equal scales; 1 for α/r and 1/2 for α/√r with one α.
    """

    scale: float
    rank0: int
    power: float

    def at(self, rank: int) -> float:
        """The scale s of a client of that rank."""
        return self.scale * float((self.rank0 / rank) ** self.power)


@tree_dataclass
class Message:
    """What travels: factors, and where they are shared the parameters that are trained whole."""

    factors: PackedFactors
    rest: Params


DEFAULT_RANK = 8
"""Rank of clients where neither they nor the method nor the model name one."""


@dataclass(frozen=True)
class Tuning(CheckedFields):
    """How LoRA clients train and what they send.

    Attributes:
        rank: of clients that do not bring one; None for that of the model's LoRA layers (``lora.r``), or for 8
            where the model has none. A rank above what a layer can have is lowered, with a warning: to the largest
            that a layer of the model can have, so that the scale α/r is that of the lowered rank; and in layers that
            can have less to min(d, k), under the same scale.
        scaling: equal: all clients have the scale of the configuration, α_i = c·r_i; alpha: they have its α,
            so that the scale α/r_i (rsLoRA: α/√r_i) falls with the rank.
        head: what is trained beside the factors, a classification head say: shared, averaged by examples;
            personal, kept by each client; frozen, at its initial values.
        wire: the form in which factors travel: float32 (as they are), bfloat16 or int8.
    """

    section = "tuning"

    rank: int | None = None
    scaling: Literal["equal", "alpha"] = "equal"
    head: Literal["shared", "personal", "frozen"] = "shared"
    wire: WireType = "float32"

    def __post_init__(self) -> None:
        if self.rank is not None:
            object.__setattr__(self, "rank", check_minimum("tuning.rank", self.rank, 1))

    def rank_of(self, client: ClientInfo, lora: LoRA) -> int:
        """Rank of a client's factors.

        Args:
            client: whose.
            lora: of its model. A rank above :attr:`LoRA.largest_rank` counts as it. A layer that can have less has
                fewer components, under the same scale.
        """
        return min(self._wanted_rank(client, lora), lora.largest_rank)

    def rank_within(self, client: ClientInfo, factors: Mapping[str, Pair]) -> int:
        """Rank of a client's factors, where those of the client with the largest rank are given."""
        asked, largest = self.rank if client.rank is None else client.rank, rank_of_factors(factors)
        # without a rank all clients have that of the model
        return largest if asked is None else min(asked, largest)

    def _wanted_rank(self, client: ClientInfo, lora: LoRA) -> int:
        return client.rank or self.rank or lora.rank or DEFAULT_RANK

    def remarks(self, task: Task, method: str) -> list[str]:
        """Ranks that are above what a layer can have."""
        lora = lora_of(task.common_model(method))
        shapes, asked = lora.shapes, {self._wanted_rank(c, lora) for c in task.clients}
        return [t for r in sorted(asked) for t in describe_lowered_ranks(dict.fromkeys(shapes, r), shapes)]

    def ranks(self, task: Task, method: str) -> list[int]:
        """The rank of every client; warns of those that are above what a layer can have.

        Raises:
            TaskError: if models differ, or some clients bring a rank and others have none.
        """
        lora = lora_of(task.common_model(method))
        without = [client.id for client in task.clients if client.rank is None]
        if self.rank is None and 0 < len(without) < len(task.clients):
            raise TaskError(
                f"{method}: client {without[0]} has no rank, and others have one. Give all clients a rank, or set "
                "tuning.rank for those without"
            )
        for remark in self.remarks(task, method):
            warn_user(f"{method}: {remark}", LoweredRankWarning)
        found = [self.rank_of(client, lora) for client in task.clients]
        if lora.principal and lora.rank is not None and min(found) < lora.rank:
            client = task.clients[found.index(min(found))]
            raise TaskError(
                f"{method}: the factors begin at the {lora.rank} principal components of each weight (init_lora_weights), and "
                f"client {client.id} of rank {min(found)} would begin without some of them. Give all clients rank {lora.rank}, "
                "or take init_lora_weights = true"
            )
        return found

    def equal_rank(self, task: Task, method: str) -> int:
        """The one rank of all clients.

        Raises:
            TaskError: if ranks differ.
        """
        found = self.ranks(task, method)
        if len(set(found)) > 1:
            other = next(i for i, r in enumerate(found) if r != found[0])
            raise TaskError(
                f"{method} averages factors entry by entry, so all clients need one rank, but client "
                f"{task.clients[0].id} has {found[0]} and client {task.clients[other].id} has "
                f"{found[other]}. Give all the same rank, or choose a method for unequal ranks: fedhl, "
                "hetlora, flexlora or flora."
            )
        return found[0]

    def scaling_of(self, lora: LoRA) -> Scaling:
        """The scale of each rank under a model's configuration."""
        power = 0.0 if self.scaling == "equal" else 0.5 if lora.rslora else 1.0
        own = min(self.rank or DEFAULT_RANK, lora.largest_rank) if lora.rank is None else lora.rank
        return Scaling(lora.scale, own, power)

    def scale(self, view: ClientView, rank: int | None = None) -> float:
        """The scale s of a client's update, at its own rank or at another one."""
        lora = lora_of(view.model)
        own = self.rank_of(view.info, lora) if rank is None else rank
        return self.scaling_of(lora).at(own)

    def scale_of(self, task: Task, client: ClientInfo) -> float:
        """The scale s of a client's update at its own rank."""
        lora = lora_of(task.model(client))
        return self.scaling_of(lora).at(self.rank_of(client, lora))

    def personal_rest(self, leaves: Leaves) -> Params:
        """What a client keeps of its trained leaves: a personal rest."""
        return leaves["rest"] if self.head == "personal" else {}

    def shared_rest(self, model: Model) -> Params:
        """What is trained whole and lies with the server."""
        return parameters_beside_factors(model) if self.head == "shared" else {}

    def own_rest(self, model: Model) -> Params:
        """What is trained whole and lies with each client."""
        return parameters_beside_factors(model) if self.head == "personal" else {}

    def message(self, factors: Factors, rest: Params) -> Message:
        """Factors and rest as they travel; a personal rest does not."""
        return Message(pack_factors(factors, self.wire), rest if self.head == "shared" else {})


def refuse_principal(task: Task, method: str, reason: str) -> None:
    """Refuse factors that begin at a part of the base's weights (PiSSA, OLoRA) where a method cannot have them.

    Args:
        task: with the model.
        method: its title.
        reason: what the method does, for the message.

    Raises:
        TaskError: if the factors of the model begin so.
    """
    if lora_of(task.common_model(method)).principal:
        raise TaskError(
            f"{method} {reason}, so factors cannot begin at a part of the base's weights. Take init_lora_weights = true, or "
            "another method"
        )


def rank_of_factors(factors: Mapping[str, Pair | Rounded | Quantized]) -> int:
    """The rank of a client's factors: that of its widest layer, for others may have less."""
    return max(pair.b.shape[1] for pair in factors.values())


def initial_factors(task: Task, rank: int) -> Factors:
    """Random initial factors, the same for all clients and methods; see :meth:`LoRA.initial_factors`."""
    model = next(iter(task.architectures.values()))
    return lora_of(model).initial_factors(rank, task.key / "lora")


def starting_factors(task: Task, method: str, rank: int, scale: float) -> Factors:
    """What clients begin with: the trained factors of the model, and random ones beyond their rank.

    Args:
        task: with the model.
        method: its title, for messages.
        rank: of all layers that can have it.
        scale: s of the product.

    Raises:
        TaskError: if trained factors have a higher rank.
    """
    lora, found = lora_of(next(iter(task.architectures.values()))), initial_factors(task, rank)
    for name, trained in lora.trained.items():
        drawn = found[name]
        if trained.rank > drawn.rank:
            raise TaskError(
                f"{method}: the adapter that the model starts from has rank {trained.rank} (layer {name}), and clients have "
                f"rank {rank}. Set lora.ranks to at least {trained.rank}, or choose fedhl, flexlora or flora, whose server "
                "holds an update of any rank"
            )
        # B beyond the rank is zero, or of an embedding A
        b = torch.cat([trained.b * (lora.scale / scale), drawn.b[:, trained.rank :]], 1)
        found[name] = Pair(b, torch.cat([trained.a, drawn.a[trained.rank :]]))
    return found


def scale_factors(factors: Factors, scale: float) -> Factors:
    """Factors of ``scale`` times the product. B is scaled, and A keeps its initial size."""
    return {n: Pair(p.b * scale, p.a) for n, p in factors.items()}


def truncate_factors(factors: Factors, rank: int) -> Factors:
    """The first columns of every B and rows of every A."""
    return {n: truncate_pair(p, rank) for n, p in factors.items()}


def leaves_of(factors: Factors, rest: Params) -> Leaves:
    """Factors and rest as they are trained."""
    return {
        "a": {n: p.a for n, p in factors.items()},
        "b": {n: p.b for n, p in factors.items()},
        "rest": rest,
    }


def factors_of(leaves: Leaves) -> Factors:
    """The factors among trained leaves."""
    return {n: Pair(b, leaves["a"][n]) for n, b in leaves["b"].items()}


def model_parameters(
    model: Model, leaves: Leaves, scale: float | Tensor, frozen: Factors, moved: Params
) -> Params:
    """The parameters of a client's model.

    Args:
        model: its architecture.
        leaves: factors and rest.
        scale: s.
        frozen: a second adapter that is not trained, of scale 1; may be empty.
        moved: weights of the base that are no longer the initial ones; may be empty.
    """
    return lora_of(model).insert_factors(factors_of(leaves), scale, frozen, moved) | leaves["rest"]


def train_leaves(
    view: ClientView,
    start: Leaves,
    scale: float,
    optimizer: Optimizer,
    *,
    fixed: Leaves | None = None,
    frozen: Factors | None = None,
    moved: Params | None = None,
    penalty: Penalty | None = None,
) -> Leaves:
    """Train some leaves by the pass ``local``.

    Args:
        view: the client's.
        start: what is trained.
        scale: s.
        optimizer: of the pass.
        fixed: leaves that are not trained.
        frozen: see :func:`model_parameters`.
        moved: see :func:`model_parameters`.
        penalty: added to the loss, a function of the trained leaves.

    Returns:
        The trained leaves.

    Raises:
        TaskError: if no factor changed although the learning rate is not 0: no gradient reaches them.
    """
    model, held, more = view.model, fixed or {}, frozen or {}
    # a layer with a scale of its own is trained in the module's own factors
    scaled = {n: layer for n, layer in lora_of(model).layers.items() if layer.ratio != 1}
    # a scale of its own differs between clients, which are to be trained together all the same
    own = (
        None
        if scale == lora_of(model).scale
        else next(iter(start["b"].values())).new_tensor(scale, dtype=torch.float64)
    )

    def loss(
        leaves: Leaves, batch: Batch, fixed: Leaves, frozen: Factors, moved: Params, own: Tensor | None
    ) -> Tensor:
        leaves = _scale_layers(leaves, scaled, 1)
        params = model_parameters(
            model, fixed | leaves, lora_of(model).scale if own is None else own, frozen, moved
        )
        value = task_loss(model.apply(params, batch.x), batch)
        return value if penalty is None else value + penalty(leaves)

    ranks = PaddedDimensions(
        {"/a": 0, "/b": 1},
        {"/0/a": 0, "/0/b": 1}
        | {f"{join_path('/1', n)}/{factor}": axis for n in more for factor, axis in (("b", 1), ("a", 0))},
    )
    given = held, more, moved or {}, own
    start = _scale_layers(start, scaled, -1)
    end: Leaves = view.train(loss, start, "local", optimizer, constants=given, padded=ranks)
    paths = [path for path, _ in tensors_of(start)]
    rates = zip(paths, optimizer.rates(paths, view.round).lr, strict=True)
    trains = any(lr for path, lr in rates if path.startswith(("/a/", "/b/")))
    # a schedule over rounds may have ended, whether counted in rounds or in steps
    steps, schedule = view.steps("local"), optimizer.local_schedule
    trains = trains and any(schedule.scale(t, steps, view.round) for t in range(steps))
    if trains and not _any_changed(lora_of(model), start, end):
        raise TaskError(
            f"{view.info.title}, round {view.round}: training changed no LoRA factor. No gradient "
            "reaches them; is the adapted layer used in the forward pass, and is the adapter active?"
        )
    return _scale_layers(end, scaled, 1)


def _scale_layers(leaves: Leaves, layers: Mapping[str, AdaptedLayer], power: Literal[1, -1]) -> Leaves:
    """Leaves with the factor that begins at zero times a power of its layer's ratio, in some layers."""
    if not layers:
        return leaves

    def scaled(factor: str, name: str, t: Tensor) -> Tensor:
        layer = layers.get(name)
        if layer is None or layer.zero != factor:
            return t
        return t * (layer.ratio if power == 1 else 1 / layer.ratio)

    return leaves | {f: {n: scaled(f, n, t) for n, t in leaves[f].items()} for f in ("a", "b") if f in leaves}


def _any_changed(lora: LoRA, start: Leaves, end: Leaves) -> bool:
    """Whether one of the factors that are zero at the start changed, or none is zero.

    The other factor tells nothing, for weight decay moves it without a gradient; and a large factor may stay what
    it is because a step is below its rounding.
    """
    first = [(site.zero, name) for name, site in lora.layers.items()]
    zero = [(f, name) for f, name in first if name in start.get(f, {}) and not start[f][name].any()]
    return not zero or any(not torch.equal(start[f][name], end[f][name]) for f, name in zero)
