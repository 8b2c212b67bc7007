"""Finds the parameters of a PEFT module that a pass trains, so that another library's trainer can train them in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core import tree
from ...core.contract import Batch
from ...core.contract.training_request import Request
from ...core.errors import TaskError
from ...models.architecture import Architecture
from ...models.stateless import Slot, exchange_slots
from ...training.steps import refill

_PROBE_DEVIATION = 0.5
"""Standard deviation of the noise added to every leaf: large, so that no factor is zero and a small penalty changes the loss."""


@dataclass(frozen=True)
class LeafSlot:
    """The place of a leaf in the module.

    Attributes:
        slot: table of a module's parameters, and a name in this table.
        layer: layer of PEFT whose scale is multiplied by ``factor``; None if ``factor`` is 1.
        factor: factor by which the method multiplies the leaf.
    """

    slot: Slot
    layer: Any = None
    factor: float = 1.0


@dataclass(frozen=True)
class Placement:
    """The places of all leaves of a pass in the module.

    Attributes:
        leaves: places of each leaf, in the order of the tree; several where weights are tied.
        exchanged_tensors: parameters that the method replaces and does not train, such as a changed base.
        value: loss of a batch at ``probe``, computed by the method.
        probe: values of the leaves at which ``value`` is computed: initial values plus noise.
    """

    leaves: Sequence[Sequence[LeafSlot]]
    exchanged_tensors: Sequence[tuple[Slot, Tensor]]
    value: float
    probe: Sequence[Tensor]

    @contextlib.contextmanager
    def install(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Put parameters in the places of the leaves within a block."""
        slots: list[tuple[dict[str, Any], str, Any]] = [
            (*slot, nn.Parameter(t, requires_grad=False)) for slot, t in self.exchanged_tensors
        ]
        scales: list[tuple[dict[str, Any], str, Any]] = []
        for leaf_slots, parameter in zip(self.leaves, parameters, strict=True):
            for leaf_slot in leaf_slots:
                slots.append((*leaf_slot.slot, parameter))
                if leaf_slot.layer is not None:
                    (name,) = leaf_slot.layer.scaling
                    scales.append(
                        (leaf_slot.layer.scaling, name, leaf_slot.layer.scaling[name] * leaf_slot.factor)
                    )
        with exchange_slots(slots), exchange_slots(scales):
            yield


def find_leaf_slots(
    request: Request, batch: Batch, model: Architecture, generator: torch.Generator
) -> Placement:
    """Find the places of a pass's leaves: the module's parameters while the method's loss of a batch is computed.

    Args:
        request: request of the pass.
        batch: first batch of the pass.
        model: architecture whose module the loss calls.
        generator: source of randomness of the probe, on the CPU.

    Raises:
        TaskError: if a leaf is neither a parameter of the module nor a multiple of one.
    """
    paths = [path for path, _ in tree.leaves(request.start)]
    probe = [
        t.detach() + _PROBE_DEVIATION * torch.randn(t.shape, generator=generator).to(t)
        for _, t in tree.leaves(request.start)
    ]
    leaves = [t.clone().requires_grad_() for t in probe]
    used_parameters: list[tuple[Slot, Tensor]] = []

    def record_parameters(*_: Any) -> None:
        if not used_parameters:
            used_parameters.extend(
                ((layer._parameters, parameter_name), p)
                for layer in model.module.modules()
                for parameter_name, p in layer._parameters.items()
                if p is not None
            )

    former_parameters = {
        (id(layer._parameters), parameter_name): p
        for layer in model.module.modules()
        for parameter_name, p in layer._parameters.items()
    }
    hook = model.module.register_forward_pre_hook(record_parameters)
    # evaluated without dropout and noise, like the loss with which it is compared
    was_training = model.training
    model.set_training(False)
    try:
        value = float(request.loss(refill(request.start, leaves), batch, *request.constants).detach())
    finally:
        hook.remove()
        model.set_training(was_training)
    slots_by_leaf: list[list[LeafSlot]] = [[] for _ in leaves]
    exchanged_tensors: list[tuple[Slot, Tensor]] = []
    for slot, parameter in used_parameters:
        if parameter is former_parameters[id(slot[0]), slot[1]]:
            if parameter.requires_grad:
                # the method does not train it, so its gradient must not count in the clipped norm
                exchanged_tensors.append((slot, parameter.detach()))
            continue
        if not parameter.requires_grad:
            exchanged_tensors.append((slot, parameter.detach()))
            continue
        match = _find_leaf(parameter, leaves)
        if match is None:
            raise TaskError(
                f"the parameter {_find_slot_name(model.module, slot)} is made of several parts of what the method trains, as "
                "where it trains several models, so no trainer can train it in the module. Take trainer = 'own'"
            )
        leaf_index, factor = match
        slots_by_leaf[leaf_index].append(
            LeafSlot(slot, None if factor == 1 else _find_lora_layer(model.module, slot), factor)
        )
    missing_paths = [path for path, leaf_slots in zip(paths, slots_by_leaf, strict=True) if not leaf_slots]
    if missing_paths:
        raise TaskError(
            f"what the method trains at {missing_paths[0]} is no parameter of the module, as where a method trains several "
            "models, so no trainer can train it there. Take trainer = 'own'"
        )
    return Placement(slots_by_leaf, exchanged_tensors, value, probe)


def _find_leaf(parameter: Tensor, leaves: Sequence[Tensor]) -> tuple[int, float] | None:
    """Find the leaf that a parameter equals or is a multiple of; returns its index and the factor."""
    for i, leaf in enumerate(leaves):
        if parameter is leaf:
            return i, 1.0
    for i, leaf in enumerate(leaves):
        if leaf.numel() != parameter.numel():
            continue
        a, b = leaf.detach().flatten().double(), parameter.detach().flatten().double()
        factor = float((a @ b) / (a @ a))
        if torch.allclose(b, factor * a, rtol=1e-5, atol=0.0) and leaf.shape == parameter.shape:
            # a copy of a leaf counts as the leaf
            return i, 1.0 if abs(factor - 1) < 1e-6 else factor
    return None


def _find_slot_name(module: nn.Module, slot: Slot) -> str:
    """Find the name of a slot, for messages."""
    return next(f"{n}.{slot[1]}" for n, layer in module.named_modules() if layer._parameters is slot[0])


def _find_lora_layer(module: nn.Module, slot: Slot) -> Any:
    """Find the layer of PEFT to which a factor belongs."""
    name = _find_slot_name(module, slot)
    for infix in (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B."):
        if infix in f".{name}.":
            return module.get_submodule(name.partition(infix)[0])
    raise TaskError(
        f"the method multiplies the parameter {name}, so no trainer can train it in the module. Take trainer = 'own'"
    )
