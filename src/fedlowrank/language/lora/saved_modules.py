"""Finds the modules of a base that are trained whole beside the factors: PEFT's ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.errors import ConfigError, did_you_mean
from ...models.stateless import is_within, names_of_parameters


def find_saved_modules(model: Any, names: Sequence[str], head: Sequence[str] = ()) -> tuple[str, ...]:
    """Find the modules of a base whose names end in one of the given names, as PEFT does.

    Args:
        model: base without adapters.
        names: suffixes of names, such as ``"lm_head"`` or ``"norm"``.
        head: modules that are already trained whole; they and the modules within them are left out.

    Returns:
        Full names of the modules, in the order of the model.

    Raises:
        ConfigError: if a name matches no module with parameters, or if a module is quantized or shares a tensor with
            another module: PEFT would store a copy, and the other module would keep the old tensor.
    """
    matching_names: list[str] = []
    modules = {n: m for n, m in model.named_modules() if n and any(True for _ in m.parameters())}
    for name in names:
        matches = [n for n in modules if n.endswith(name)]
        if not matches:
            short_names = {n.rpartition(".")[2] for n in modules}
            raise ConfigError(
                f"lora.modules_to_save: {name!r} is the end of no module's name in the {type(model).__name__}. "
                f"{did_you_mean(name, short_names)}"
            )
        matching_names += matches
    selected_names = [n for n in modules if n in matching_names and not _is_within_any(n, head)]
    outer_names = tuple(
        n for n in selected_names if not _is_within_any(n, [other for other in selected_names if other != n])
    )
    owners = names_of_parameters(model)
    for module in outer_names:
        for parameter_name, parameter in modules[module].named_parameters():
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"lora.modules_to_save: {module} is quantized and cannot be trained whole. Leave it out, or load the "
                    "base without quantize"
                )
            other = [
                p for p in owners[id(parameter)] if not _is_within_any(p.rpartition(".")[0], outer_names)
            ]
            if other:
                raise ConfigError(
                    f"lora.modules_to_save: {module}.{parameter_name} and {other[0]} are one tensor (tied weights), and an "
                    "adapter of PEFT would hold one of them alone. Leave it out, or name a base whose weights are not tied"
                )
    return outer_names


def _is_within_any(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of the given modules or within one of them."""
    return any(is_within(name, module) for module in modules)
