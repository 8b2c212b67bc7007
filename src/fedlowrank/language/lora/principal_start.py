"""Initializes factors by components of the base's weights: PiSSA and OLoRA, by PEFT's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...core.errors import TaskError
from ...models.stateless import names_of_parameters


def start_from_weights(model: Any, names: Sequence[str], adapter: str, init: str) -> None:
    """Move a part of each base weight into its initial factors, in place.

    The outputs of the model do not change. PiSSA moves the r largest singular triplets, OLoRA the first r columns of
    the QR decomposition.

    Args:
        model: model (``peft.PeftModel``) whose layers have their final scales.
        names: names of the adapted layers in the base.
        adapter: name of the adapter.
        init: initialization, ``"pissa"`` or ``"olora"``.

    Raises:
        TaskError: if a layer is not linear, is quantized, or shares its weight with another module, whose weight would
            then change.

    Source:
        Meng et al., "PiSSA", NeurIPS 2024, arXiv:2404.02948; Büyükakyüz, "OLoRA", 2024, arXiv:2406.01775.
    """
    owners = names_of_parameters(model)
    layers: Mapping[str, Any] = {name: model.get_submodule(f"{PEFT_PREFIX}{name}") for name in names}
    for name, layer in layers.items():
        base = layer.base_layer
        if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
            kind = (
                "quantized" if isinstance(base, nn.Linear) else f"no linear layer but {type(base).__name__}"
            )
            raise TaskError(
                f"init_lora_weights = {init!r} needs the weight of a linear layer, and {name} is {kind}. Leave the layer out of "
                "target_modules, or take init_lora_weights = true"
            )
        if len(owners[id(base.weight)]) > 1:
            tied_name = next(p for p in owners[id(base.weight)] if not p.startswith(f"{PEFT_PREFIX}{name}."))
            raise TaskError(
                f"init_lora_weights = {init!r} takes a part of the weight of {name}, which is that of "
                f"{tied_name.removeprefix(PEFT_PREFIX)}, too. Leave it out of target_modules, or take init_lora_weights = true"
            )
    for layer in layers.values():
        if init == "pissa":
            layer.pissa_init(adapter, init)
        else:
            layer.olora_init(adapter)
        for factor in (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight):
            factor.data = factor.data.contiguous()
