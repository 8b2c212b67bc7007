"""Where the leaves of a pass lie in a module of PEFT, so that another library's trainer can train them there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core import tree
from ...core.contract.task import Batch
from ...core.contract.training_request import Request
from ...core.errors import TaskError
from ...models.architecture import Architecture
from ...models.stateless import Slot, exchange_slots
from ...training.steps import refill

_APART = 0.5
"""Standard deviation of what is added to every leaf: large, so that no factor is zero and a small penalty is seen."""


@dataclass(frozen=True)
class Place:
    """Where a leaf is used.

    Attributes:
        slot: the module's table of parameters and a name in it.
        layer: of PEFT, whose scale is multiplied by ``factor``; None where that is 1.
        factor: by which the method multiplies the leaf.
    """

    slot: Slot
    layer: Any = None
    factor: float = 1.0


@dataclass(frozen=True)
class Placement:
    """Where all leaves of a pass lie.

    Attributes:
        leaves: places of each leaf, in the order of the tree; several where weights are tied.
        others: parameters that the method exchanges and does not train, such as a base that moved.
        value: the method's loss of a batch at ``probe``.
        probe: leaves near the start at which ``value`` is the loss.
    """

    leaves: Sequence[Sequence[Place]]
    others: Sequence[tuple[Slot, Tensor]]
    value: float
    probe: Sequence[Tensor]

    @contextlib.contextmanager
    def install(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Put parameters in the places of the leaves within a block."""
        slots: list[tuple[dict[str, Any], str, Any]] = [
            (*slot, nn.Parameter(t, requires_grad=False)) for slot, t in self.others
        ]
        scales: list[tuple[dict[str, Any], str, Any]] = []
        for places, parameter in zip(self.leaves, parameters, strict=True):
            for place in places:
                slots.append((*place.slot, parameter))
                if place.layer is not None:
                    (name,) = place.layer.scaling
                    scales.append((place.layer.scaling, name, place.layer.scaling[name] * place.factor))
        with exchange_slots(slots), exchange_slots(scales):
            yield


def find_places(request: Request, batch: Batch, model: Architecture, generator: torch.Generator) -> Placement:
    """Find where the leaves of a pass lie, by what the module holds while the method's loss of a batch is computed.

    Args:
        request: the pass.
        batch: the first.
        model: whose module the loss calls.
        generator: of the probe, on the CPU.

    Raises:
        TaskError: if a leaf is no parameter of the module, nor a multiple of one.
    """
    paths = [path for path, _ in tree.leaves(request.start)]
    probe = [
        t.detach() + _APART * torch.randn(t.shape, generator=generator).to(t)
        for _, t in tree.leaves(request.start)
    ]
    leaves = [t.clone().requires_grad_() for t in probe]
    seen: list[tuple[Slot, Tensor]] = []

    def look(*_: Any) -> None:
        if not seen:
            seen.extend(
                ((layer._parameters, own), p)
                for layer in model.module.modules()
                for own, p in layer._parameters.items()
                if p is not None
            )

    before = {
        (id(layer._parameters), own): p
        for layer in model.module.modules()
        for own, p in layer._parameters.items()
    }
    hook = model.module.register_forward_pre_hook(look)
    # without dropout and noise, as the loss that it is compared with
    mode = model.training
    model.set_training(False)
    try:
        value = float(request.loss(refill(request.start, leaves), batch, *request.constants).detach())
    finally:
        hook.remove()
        model.set_training(mode)
    places: list[list[Place]] = [[] for _ in leaves]
    others: list[tuple[Slot, Tensor]] = []
    for slot, now in seen:
        if now is before[id(slot[0]), slot[1]]:
            if now.requires_grad:
                # the method does not train it, and its gradient is no part of the norm that is clipped
                others.append((slot, now.detach()))
            continue
        if not now.requires_grad:
            others.append((slot, now.detach()))
            continue
        found = _match(now, leaves)
        if found is None:
            raise TaskError(
                f"the parameter {_name(model.module, slot)} is made of several parts of what the method trains, as "
                "where it trains several models, so no trainer can train it in the module. Take trainer = 'own'"
            )
        leaf, factor = found
        places[leaf].append(Place(slot, None if factor == 1 else _layer(model.module, slot), factor))
    lost = [path for path, where in zip(paths, places, strict=True) if not where]
    if lost:
        raise TaskError(
            f"what the method trains at {lost[0]} is no parameter of the module, as where a method trains several "
            "models, so no trainer can train it there. Take trainer = 'own'"
        )
    return Placement(places, others, value, probe)


def _match(now: Tensor, leaves: Sequence[Tensor]) -> tuple[int, float] | None:
    """The place of the leaf that a parameter is, or is a multiple of, and the factor."""
    for i, leaf in enumerate(leaves):
        if now is leaf:
            return i, 1.0
    for i, leaf in enumerate(leaves):
        if leaf.numel() != now.numel():
            continue
        a, b = leaf.detach().flatten().double(), now.detach().flatten().double()
        factor = float((a @ b) / (a @ a))
        if torch.allclose(b, factor * a, rtol=1e-5, atol=0.0) and leaf.shape == now.shape:
            # a reshaped or copied leaf is one, too
            return i, 1.0 if abs(factor - 1) < 1e-6 else factor
    return None


def _name(module: nn.Module, slot: Slot) -> str:
    """The name of a slot, for messages."""
    return next(f"{n}.{slot[1]}" for n, layer in module.named_modules() if layer._parameters is slot[0])


def _layer(module: nn.Module, slot: Slot) -> Any:
    """The layer of PEFT that holds a factor, whose scale multiplies it."""
    name = _name(module, slot)
    for kind in (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B."):
        if kind in f".{name}.":
            return module.get_submodule(name.partition(kind)[0])
    raise TaskError(
        f"the method multiplies the parameter {name}, so no trainer can train it in the module. Take trainer = 'own'"
    )
