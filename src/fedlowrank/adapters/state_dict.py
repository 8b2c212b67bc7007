"""A client's model as one state dict, which loads into a module with ``load_state_dict``."""

from __future__ import annotations

from torch import nn

from ..core.contract import Model
from ..core.tree import Params
from ..models.packed_weights import is_of_bitsandbytes
from .lora.lora_factors import lora_of


def full_state_dict(model: Model, params: Params) -> Params:
    """Build the state dict of a client's model; tensors that no client changes are the module's own.

    Frozen tensors are not copied: every client's state dict has the module's own. LoRA factors get the ranks of the
    module's own factors, see :meth:`fedlowrank.adapters.lora.lora_factors.LoRA.match_module_ranks`.
    """
    state = _read_state(model.module)
    if any(n in state and t.shape != state[n].shape for n, t in params.items()):
        params = lora_of(model).match_module_ranks(params, state)
    state |= params
    first_names: dict[int, str] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        # a parameter with two names is trained under its first name
        first_name = first_names.setdefault(id(parameter), name)
        if first_name in params and name in state:
            state[name] = params[first_name]
    return state


def _read_state(module: nn.Module) -> Params:
    """Read the state of a module as it can be loaded: without what bitsandbytes adds of its layers, which they refuse."""
    state: Params = dict(module.state_dict())
    layers = tuple(f"{name}." for name, layer in module.named_modules() if is_of_bitsandbytes(layer))
    if not layers:
        return state
    own_names = {n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
    return {n: t for n, t in state.items() if n in own_names or not n.startswith(layers)}
