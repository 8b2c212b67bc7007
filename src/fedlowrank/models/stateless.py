"""A module as a function of its parameters, many times a second."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..tree import Params


class Stateless:
    """What ``torch.func.functional_call`` does, without its search for every name in every call.

    Args:
        module: whose submodules, parameters and buffers are in place already.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, layer in module.named_modules(remove_duplicate=False):
            for table in (layer._parameters, layer._buffers):
                for own in table:
                    self._places[f"{prefix}.{own}".lstrip(".")] = table, own

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Call the module with some of its parameters and buffers exchanged.

        Raises:
            KeyError: if it has no parameter or buffer of a name.
        """
        before: list[tuple[dict[str, Any], str, Tensor | None]] = []
        try:
            for name, tensor in params.items():
                table, own = self._places[name]
                before.append((table, own, table[own]))
                table[own] = tensor
            return self.module(*args, **kwargs)
        finally:
            # backwards, for a layer that has two names is exchanged twice
            for table, own, tensor in reversed(before):
                table[own] = tensor
