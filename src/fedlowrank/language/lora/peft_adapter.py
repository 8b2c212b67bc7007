"""The LoRA adapter of a frozen base: PEFT wraps the target layers, and factors are inserted by name.

A model has a single adapter. Clients' states are :data:`~fedlowrank.linalg.pair.Factors`; they enter the
model as arguments of ``torch.func.functional_call`` under the names of
:class:`~fedlowrank.adapters.lora.adapted_layers.AdaptedLayer`, at any rank.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ...adapters.lora.adapted_layers import (
    PEFT_PREFIX,
    AdaptedLayer,
    is_gaussian_initial,
    is_principal_initial,
)
from ...adapters.lora.lora_factors import find_lora
from ...adapters.lora.rank_limits import warn_lowered_ranks
from ...core.errors import TaskError
from ...core.key import Key
from ...linalg.pair import Factors, Pair, truncate_pair
from ...models.architecture import build_module
from ..optional import import_library
from .principal_start import start_from_weights

T = TypeVar("T")

ADAPTER = "default"
"""Name of the adapter. PEFT loses layers where an adapter's name is also a part of a module's name."""


def attach_adapter(
    model: Any, config: Any, key: Key, head: Sequence[str] = (), saved: Sequence[str] = ()
) -> Any:
    """Attach LoRA factors to the target layers of a base, in place; at first its outputs do not change.

    Args:
        model: a base without adapters; a ``transformers`` model or any module.
        config: of :func:`.peft_config.lora_config`. It is copied; the slot's own, with the target modules that PEFT found,
            is ``peft_config["default"]`` of the result. A rank above what a layer can have is lowered there,
            with a warning, as by :func:`fedlowrank.adapters.lora.lora_layers.add_lora`.
        key: of the factor that is random, see :func:`initial_peft_factors`. torch's global generator is as before.
        head: names of the modules that are trained whole (``LoadedBase.head``); they get no adapter.
        saved: further ones (:func:`.saved_modules.find_saved_modules`).

    Returns:
        A ``peft.PeftModel`` in evaluation mode. Only factors, and parameters of what is trained whole, require gradients.

    Raises:
        TaskError: if target modules match no layer, or a layer is of a kind that is not supported.
    """
    library = import_library("peft", "a LoRA adapter")
    before = [n for n, m in model.named_modules() if hasattr(m, "lora_A")]
    if before:
        raise TaskError(
            f"the model has a LoRA adapter already, at {before[0]} and {len(before) - 1} other layers"
        )
    if any(ADAPTER in name.split(".") for name, _ in model.named_modules()):
        raise TaskError(
            f"a module of the model is called {ADAPTER!r}, the name of the adapter; PEFT would lose layers"
        )
    made = copy.deepcopy(config)
    given, made.inference_mode = made.exclude_modules, False
    whole = [*head, *saved]
    made.exclude_modules = _exclude_head(given, whole)
    # they need no copy beside them: their values travel
    made.modules_to_save = None
    init, made.init_lora_weights = made.init_lora_weights, True
    names = _adaptable_layers(model)
    chosen = _find_targets(model, made, names)
    shapes = {name: _matrix_shape(name, names[name]) for name in chosen}
    wanted = _by_layer(made, "rank_pattern", chosen, made.r)
    alphas = _by_layer(made, "alpha_pattern", chosen, made.lora_alpha)
    warn_lowered_ranks("LoRA", wanted, shapes)
    ranks = {name: min(wanted[name], *shape) for name, shape in shapes.items()}
    # the scale of a layer that can have less than it was given is that of the rank that another one has
    most = max(ranks.values())
    scales = {
        name: alphas[name] / (math.sqrt(r) if made.use_rslora else r)
        for name, r in ((name, min(wanted[name], most)) for name in chosen)
    }
    made.r = most
    # whole names, for PEFT takes a key for the end of a name
    made.rank_pattern = {f"^{re.escape(n)}$": r for n, r in ranks.items() if r < most}
    made.alpha_pattern = {}
    transposed = {_kind_of(names[name]) == "conv1d" for name in chosen}
    # PEFT sets it layer by layer and warns each time that it is not as the layer has it
    made.fan_in_fan_out = any(transposed)
    causal = not head and hasattr(model, "prepare_inputs_for_generation")
    made.task_type = made.task_type or ("SEQ_CLS" if head else "CAUSAL_LM" if causal else None)
    # the class for classification would put a copy of the head beside the head
    which = library.PeftModelForCausalLM if causal else library.PeftModel

    def wrap() -> nn.Module:
        with warnings.catch_warnings():
            # two warnings of PEFT to itself: transformers renamed a property, and both kinds of layers are
            # adapted
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            if len(transposed) > 1:
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            wrapped: nn.Module = which(model, made, adapter_name=ADAPTER)
        return wrapped

    try:
        tuned: Any = build_module(wrap, key)
    except ValueError as error:
        raise TaskError(f"PEFT cannot adapt the {type(model).__name__}: {error}") from error
    slot = tuned.peft_config[ADAPTER]
    slot.exclude_modules, slot.fan_in_fan_out = given, any(transposed)
    slot.rank_pattern, slot.alpha_pattern = dict(config.rank_pattern), dict(config.alpha_pattern)
    for name in chosen:
        tuned.get_submodule(f"{PEFT_PREFIX}{name}").scaling[ADAPTER] = scales[name]
    own, adapted = dict(tuned.named_parameters()), find_lora(tuned, None).layers
    with torch.no_grad():
        for layer, pair in initial_peft_factors(adapted, made.r, key, init).items():
            own_pair = truncate_pair(pair, adapted[layer].largest_rank)
            for name, value in adapted[layer].as_parameters(own_pair).items():
                own[name].copy_(value)
    slot.init_lora_weights = init
    if is_principal_initial(init):
        start_from_weights(tuned, chosen, ADAPTER, init.lower())
    for name, parameter in own.items():
        if any(name.startswith(f"{PEFT_PREFIX}{module}.") for module in whole):
            parameter.requires_grad_()
    return tuned.eval()


def initial_peft_factors(
    layers: Mapping[str, AdaptedLayer], rank: int, key: Key, init: bool | str = True
) -> Factors:
    """Random initial factors as PEFT's: A random and B zero, of an embedding A zero and B random.

    A is Kaiming uniform with a = √5, U(-1/√k, 1/√k), or with ``"gaussian"`` N(0, 1/r²). An embedding's B is
    N(0, 1). Components are sampled one by one, so that but for ``"gaussian"`` factors of a lower rank are the
    first components of those of a higher one.

    Args:
        layers: by name.
        rank: r, of all layers.
        key: source of randomness; each layer has its own subkey.
        init: as ``init_lora_weights``.
    """
    found: Factors = {}
    for name, layer in layers.items():
        generator, (d, k) = (key / "lora" / name).generator(), layer.shape
        rows = torch.empty(rank, d if layer.embedding else k)
        for row in rows:
            if layer.embedding:
                row.normal_(generator=generator)
            elif is_gaussian_initial(init):
                row.normal_(0, 1 / rank, generator=generator)
            else:
                row.uniform_(-1 / math.sqrt(k), 1 / math.sqrt(k), generator=generator)
        if layer.embedding:
            found[name] = Pair(rows.mT.contiguous(), rows.new_zeros(rank, k))
        else:
            found[name] = Pair(rows.new_zeros(d, rank), rows)
    return found


def _by_layer(config: Any, pattern: str, names: Sequence[str], usual: T) -> dict[str, T]:
    """A number of each layer by the patterns of a configuration, as PEFT reads them.

    Raises:
        TaskError: if a pattern is that of no layer.
    """
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, T] = getattr(config, pattern)
    keys = {name: get_pattern_key(list(patterns), name) for name in names}
    if unused := [key for key in patterns if key not in keys.values()]:
        raise TaskError(
            f"lora.{pattern}: {unused[0]!r} matches no adapted layer, or only such that an earlier key matches. Leave it out, or "
            "name the layer in target_modules"
        )
    return {name: patterns.get(key, usual) for name, key in keys.items()}


def _describe_adaptable_layers(model: Any) -> str:
    """Short names of the layers that could be adapted, with their counts: ``"key x 6, query x 6"``."""
    short = Counter(name.rpartition(".")[2] for name in _adaptable_layers(model))
    return ", ".join(f"{name} x {count}" for name, count in sorted(short.items()))


def _exclude_head(given: Any, head: Sequence[str]) -> Any:
    """``exclude_modules`` with the head's modules, and all within them, added to what the user excludes."""
    if not head:
        return given
    own = "|".join(rf"{re.escape(name)}(\..*)?" for name in head)
    if not given:
        return own
    if isinstance(given, str):
        return f"(?:{given})|{own}"
    return "|".join(rf"(.*\.)?{re.escape(name)}" for name in sorted(given)) + f"|{own}"


def _find_targets(model: Any, config: Any, names: Mapping[str, nn.Module]) -> list[str]:
    """Names of the layers that the target modules match; each name that the user lists must match one."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    if config.target_modules is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in DEFAULT_TARGETS:
            raise TaskError(
                f"PEFT knows no usual target modules for a model of type {kind!r}; set target_modules. "
                f"Layers that can be adapted: {_describe_adaptable_layers(model)}."
            )
        config.target_modules = set(DEFAULT_TARGETS[kind])
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        output = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules = {
            n for n, m in names.items() if _kind_of(m) in ("linear", "conv1d") and m is not output
        }
        config.target_modules = {n for n in config.target_modules if check_target_module_exists(config, n)}
    targets = config.target_modules
    found = [name for name in names if check_target_module_exists(config, name)]
    wanted = [] if isinstance(targets, str) else sorted(targets)
    unmatched = [t for t in wanted if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unmatched or not found:
        what = ", ".join(map(repr, unmatched)) or repr(targets)
        raise TaskError(
            f"target_modules: {what} matches no layer of the "
            f"{type(model).__name__}{'' if unmatched else ' that is not excluded'}. Layers that can be "
            f"adapted: {_describe_adaptable_layers(model)}."
        )
    return found


def _adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if n and _kind_of(m) is not None}


def _kind_of(module: nn.Module) -> Literal["linear", "conv1d", "embedding", "convolution"] | None:
    """Which kind of layer it is; None if it can have no adapter."""
    if not isinstance(getattr(module, "weight", None), Tensor):
        return None
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear"
    return "convolution" if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else None


def _matrix_shape(name: str, module: Any) -> tuple[int, int]:
    """(d, k) of a layer's weight as a matrix; raises TaskError for one that cannot be adapted exactly."""
    kind = _kind_of(module)
    if kind == "convolution" and (module.groups > 1 or any(s != 1 for s in module.dilation)):
        raise TaskError(
            f"the layer {name} is a convolution with groups or dilation, which PEFT cannot adapt exactly"
        )
    if kind == "linear":
        # not the weight's shape: a quantized weight is packed
        return module.out_features, module.in_features
    d, k = module.weight.shape[0], module.weight[0].numel()
    # stored as [k, d]
    return (d, k) if kind == "convolution" else (k, d)
