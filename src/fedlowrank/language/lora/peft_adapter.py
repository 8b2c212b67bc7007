"""Attaches a LoRA adapter to a frozen base: PEFT wraps the target layers, and factors are inserted by name.

A model has a single adapter. The state of a client is :data:`~fedlowrank.linalg.pair.Factors` of any rank, which are
arguments of ``torch.func.functional_call`` under the names of
:class:`~fedlowrank.adapters.lora.adapted_layers.AdaptedLayer`.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
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
from ...core.errors import ConfigError, TaskError, warn_user
from ...core.key import Key
from ...linalg.pair import Factors, Pair, keep_first_components
from ...models.architecture import build_module
from ..device_map import place_factors
from ..optional_packages import import_library
from .new_tokens import find_output_layer, find_token_layers, name_rows
from .principal_start import start_from_weights

T = TypeVar("T")

ADAPTER = "default"
"""Name of the adapter. PEFT loses layers if the name of an adapter is also a part of a module's name."""


def attach_adapter(
    model: Any,
    config: Any,
    key: Key,
    head: Sequence[str] = (),
    saved_modules: Sequence[str] = (),
    token_ids: Sequence[int] = (),
) -> Any:
    """Attach LoRA factors to the target layers of a base, in place. The initial factors do not change the outputs.

    Args:
        model: base without adapters, a ``transformers`` model or any module.
        config: result of :func:`.peft_config.make_lora_config`; it is copied. ``peft_config["default"]`` of the result
            is the copy with the target modules that PEFT found. A rank above the maximum rank of a layer is lowered,
            with a warning, as by :func:`fedlowrank.adapters.lora.lora_layers.add_lora`.
        key: source of randomness, see :func:`sample_initial_factors`. torch's global generator does
            not change.
        head: names of the modules that are trained whole (``LoadedBase.head``); they get no adapter.
        saved_modules: further modules that are trained whole (:func:`.saved_modules.find_saved_modules`).
        token_ids: tokens whose rows of the embedding are trained (:mod:`.new_tokens`).

    Returns:
        A ``peft.PeftModel`` in evaluation mode. Only factors, parameters of modules that are trained whole, and rows of
        tokens require gradients; the rows are float32.

    Raises:
        ConfigError: if a module that is trained whole is not in memory.
        TaskError: if target modules match no layer, or a layer is of an unsupported kind.
    """
    library = import_library("peft", "a LoRA adapter")
    adapted_names = [n for n, m in model.named_modules() if hasattr(m, "lora_A")]
    if adapted_names:
        raise TaskError(
            f"the model has a LoRA adapter already, at {adapted_names[0]} and {len(adapted_names) - 1} other layers"
        )
    if any(ADAPTER in name.split(".") for name, _ in model.named_modules()):
        raise TaskError(
            f"a module of the model is called {ADAPTER!r}, the name of the adapter; PEFT would lose layers"
        )
    adapter_config = copy.deepcopy(config)
    user_excluded, adapter_config.inference_mode = adapter_config.exclude_modules, False
    whole_modules = [*head, *saved_modules]
    adapter_config.exclude_modules = _exclude_head(user_excluded, whole_modules)
    # PEFT would copy these modules; their parameters are trained in place
    adapter_config.modules_to_save = None
    init, adapter_config.init_lora_weights = adapter_config.init_lora_weights, True
    adaptable = _find_adaptable_layers(model)
    target_names = _find_targets(model, adapter_config, adaptable)
    token_layers = find_token_layers(model, token_ids, whole_modules, target_names)
    adapter_config.trainable_token_indices = token_layers or None
    shapes = {name: _compute_matrix_shape(name, adaptable[name]) for name in target_names}
    requested_ranks = _match_patterns(adapter_config, "rank_pattern", target_names, adapter_config.r)
    alphas = _match_patterns(adapter_config, "alpha_pattern", target_names, adapter_config.lora_alpha)
    warn_lowered_ranks("LoRA", requested_ranks, shapes)
    ranks = {name: min(requested_ranks[name], *shape) for name, shape in shapes.items()}
    # a layer whose rank is lowered gets the scale of the largest rank that a layer has
    max_rank = max(ranks.values())
    scales = {
        name: alphas[name] / (math.sqrt(r) if adapter_config.use_rslora else r)
        for name, r in ((name, min(requested_ranks[name], max_rank)) for name in target_names)
    }
    adapter_config.r = max_rank
    # patterns of whole names, because PEFT matches a plain key with the end of a name
    adapter_config.rank_pattern = {f"^{re.escape(n)}$": r for n, r in ranks.items() if r < max_rank}
    adapter_config.alpha_pattern = {}
    transposed_flags = {_find_layer_kind(adaptable[name]) == "conv1d" for name in target_names}
    # PEFT sets it for each layer and warns if the value does not fit the layer
    adapter_config.fan_in_fan_out = any(transposed_flags)
    is_causal = not head and hasattr(model, "prepare_inputs_for_generation")
    adapter_config.task_type = adapter_config.task_type or (
        "SEQ_CLS" if head else "CAUSAL_LM" if is_causal else None
    )
    # PeftModelForSequenceClassification would copy the head
    wrapper_class = library.PeftModelForCausalLM if is_causal else library.PeftModel

    def wrap() -> nn.Module:
        with warnings.catch_warnings():
            # PEFT warns of a property that transformers renamed, and of layers with and without transposed weights
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            if len(transposed_flags) > 1:
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            wrapped: nn.Module = wrapper_class(model, adapter_config, adapter_name=ADAPTER)
        return wrapped

    try:
        peft_model: Any = build_module(wrap, key)
    except ValueError as error:
        raise TaskError(f"PEFT cannot adapt the {type(model).__name__}: {error}") from error
    place_factors(peft_model)
    model_config = peft_model.peft_config[ADAPTER]
    model_config.exclude_modules, model_config.fan_in_fan_out = user_excluded, any(transposed_flags)
    model_config.rank_pattern, model_config.alpha_pattern = (
        dict(config.rank_pattern),
        dict(config.alpha_pattern),
    )
    for name in target_names:
        layer = peft_model.get_submodule(f"{PEFT_PREFIX}{name}")
        if not hasattr(layer, "scaling"):
            raise TaskError(f"PEFT has given the layer {name} no factors. Leave it out of target_modules")
        layer.scaling[ADAPTER] = scales[name]
    parameters, adapted_layers = dict(peft_model.named_parameters()), find_lora(peft_model, None).layers
    with torch.no_grad():
        for layer, pair in sample_initial_factors(adapted_layers, adapter_config.r, key, init).items():
            layer_pair = keep_first_components(pair, adapted_layers[layer].largest_rank)
            for name, value in adapted_layers[layer].as_parameters(layer_pair).items():
                parameters[name].copy_(value)
    model_config.init_lora_weights = init
    if is_principal_initial(init):
        start_from_weights(peft_model, target_names, ADAPTER, init.lower())
    for name, parameter in parameters.items():
        if any(name.startswith(f"{PEFT_PREFIX}{module}.") for module in whole_modules):
            if parameter.is_meta:
                raise ConfigError(
                    f"language.device_map: {name.removeprefix(PEFT_PREFIX)} is trained whole, so it must be in the memory of a "
                    "device. Place it there by a table of devices"
                )
            parameter.requires_grad_()
    output_layer = find_output_layer(model)
    if token_layers and isinstance(getattr(output_layer, "original_module", None), nn.Linear):
        # TRL reads the bias of the output layer, which PEFT's wrapper does not have
        output_layer.register_parameter("bias", None)
    for name in name_rows(token_layers).values():
        parameters[f"{name}.{ADAPTER}"].data = parameters[f"{name}.{ADAPTER}"].data.float()
    return peft_model.eval()


def sample_initial_factors(
    layers: Mapping[str, AdaptedLayer], rank: int, key: Key, init: bool | str = True
) -> Factors:
    """Sample initial factors as PEFT does: A random and B zero; for an embedding layer A zero and B random.

    A is Kaiming uniform with a = √5, U(-1/√k, 1/√k), or with ``"gaussian"`` N(0, 1/r²). B of an embedding is N(0, 1).
    The rank-one components are sampled one after another. So factors of a lower rank are the first components of the
    factors of a higher rank, except with ``"gaussian"``.

    Args:
        layers: adapted layers by name.
        rank: rank r of all layers.
        key: source of randomness; each layer has its own subkey.
        init: value of ``init_lora_weights``.
    """
    factors: Factors = {}
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
            factors[name] = Pair(rows.mT.contiguous(), rows.new_zeros(rank, k))
        else:
            factors[name] = Pair(rows.new_zeros(d, rank), rows)
    return factors


def _match_patterns(config: Any, pattern: str, names: Sequence[str], default: T) -> dict[str, T]:
    """Find the rank or α of each layer by the patterns of a configuration, as PEFT does.

    Raises:
        TaskError: if a pattern matches no layer.
    """
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, T] = getattr(config, pattern)
    keys = {name: get_pattern_key(list(patterns), name) for name in names}
    if extras := [key for key in patterns if key not in keys.values()]:
        raise TaskError(
            f"lora.{pattern}: {extras[0]!r} matches no adapted layer, or only such that an earlier key matches. Leave it out, or "
            "name the layer in target_modules"
        )
    return {name: patterns.get(key, default) for name, key in keys.items()}


def _describe_adaptable_layers(model: Any) -> str:
    """List the short names of layers that can be adapted, with their counts: ``"key x 6, query x 6"``."""
    short_names = Counter(name.rpartition(".")[2] for name in _find_adaptable_layers(model))
    return ", ".join(f"{name} x {count}" for name, count in sorted(short_names.items()))


def _exclude_head(user_excluded: Any, head: Sequence[str]) -> Any:
    """Add the head's modules, and all modules within them, to the user's ``exclude_modules``."""
    if not head:
        return user_excluded
    head_pattern = "|".join(rf"{re.escape(name)}(\..*)?" for name in head)
    if not user_excluded:
        return head_pattern
    if isinstance(user_excluded, str):
        return f"(?:{user_excluded})|{head_pattern}"
    return "|".join(rf"(.*\.)?{re.escape(name)}" for name in sorted(user_excluded)) + f"|{head_pattern}"


def _find_targets(model: Any, config: Any, adaptable: Mapping[str, nn.Module]) -> list[str]:
    """Find the layers that the target modules match; each name that the user lists must match a layer."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    if config.target_modules is None:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        if model_type not in DEFAULT_TARGETS:
            raise TaskError(
                f"PEFT knows no usual target modules for a model of type {model_type!r}; set target_modules. "
                f"Layers that can be adapted: {_describe_adaptable_layers(model)}."
            )
        config.target_modules = set(DEFAULT_TARGETS[model_type])
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        output_layer = find_output_layer(model)
        config.target_modules = {
            n
            for n, m in adaptable.items()
            if _find_layer_kind(m) in ("linear", "conv1d") and m is not output_layer
        }
        config.target_modules = {n for n in config.target_modules if check_target_module_exists(config, n)}
        config.target_modules -= _find_taken_for_experts(model, config)
        _warn_of_experts(model, sorted(config.target_modules))
    elif taken_names := sorted(_find_taken_for_experts(model, config)):
        raise TaskError(
            f"target_modules: PEFT takes {taken_names[0]!r} for the experts of a {model.config.model_type}, also in layers "
            "without experts, so that these get no factors. Leave it out, or set target_modules = 'all-linear', which does"
        )
    targets = config.target_modules
    matched_names = [name for name in adaptable if check_target_module_exists(config, name)]
    listed_targets = [] if isinstance(targets, str) else sorted(targets)
    unmatched_targets = [
        t for t in listed_targets if not any(n == t or n.endswith(f".{t}") for n in adaptable)
    ]
    if unmatched_targets or not matched_names:
        unmatched_text = ", ".join(map(repr, unmatched_targets)) or repr(targets)
        experts = [
            n for n in _find_experts(model) if any(f".{n}".endswith(f".{t}") for t in unmatched_targets)
        ]
        if experts:
            raise TaskError(
                f"target_modules: {experts[0]} holds the weights of all experts in one 3-dimensional parameter, which gets no "
                f"factors. Layers that can be adapted: {_describe_adaptable_layers(model)}."
            )
        raise TaskError(
            f"target_modules: {unmatched_text} matches no layer of the "
            f"{type(model).__name__}{'' if unmatched_targets else ' that is not excluded'}. Layers that can be "
            f"adapted: {_describe_adaptable_layers(model)}."
        )
    return matched_names


_CONVERSION = "peft.utils.transformers_weight_conversion"
"""Module of PEFT that changes targets; older releases do not have it and change none."""


def _find_taken_for_experts(model: Any, config: Any) -> set[str]:
    """Find the target modules that PEFT replaces by the parameters of experts, by which transformers 4 called them."""
    is_transformer = hasattr(getattr(model, "config", None), "model_type")
    if not is_transformer or isinstance(config.target_modules, str) or not find_spec(_CONVERSION):
        return set()
    with warnings.catch_warnings():
        # layers compiled by torch.jit, which these modules import
        warnings.simplefilter("ignore", DeprecationWarning)
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
        from transformers.conversion_mapping import get_model_conversion_mapping

    taken_names = set()
    for name in config.target_modules:
        trial = copy.deepcopy(config)
        trial.target_modules = {name}
        try:
            convert_peft_config_for_transformers(trial, model, get_model_conversion_mapping(model))
        except ValueError:
            # a name that PEFT takes for experts only together with another one
            taken_names.add(name)
        else:
            taken_names |= {name} - set(trial.target_modules)
    return taken_names


def _find_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Find the parameters that hold the weights of all experts of a layer, with their shapes ``[experts, ...]``."""
    layers = {f"{n}.weight" for n in _find_adaptable_layers(model)}
    return {n: tuple(p.shape) for n, p in model.named_parameters() if p.ndim == 3 and n not in layers}


def _warn_of_experts(model: nn.Module, targets: Sequence[str]) -> None:
    """Warn if ``all-linear`` leaves out experts."""
    experts = _find_experts(model)
    if experts:
        name, shape = next(iter(experts.items()))
        short_names = sorted({n.rpartition(".")[2] for n in targets})
        size = sum(math.prod(s) for s in experts.values())
        share = size / sum(p.numel() for p in model.parameters())
        warn_user(
            f"lora.target_modules = 'all-linear' adapts {', '.join(short_names)} and no experts: {len(experts)} parameters, "
            f"such as {name} {list(shape)}, hold the weights of all experts of a layer and {share:.0%} of the model. Set "
            f"target_modules = {short_names} if that is what you want",
            RuntimeWarning,
        )


def _find_adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if n and _find_layer_kind(m) is not None}


def _find_layer_kind(module: nn.Module) -> Literal["linear", "conv1d", "embedding", "convolution"] | None:
    """Find the kind of a layer; None if the layer cannot have an adapter."""
    if not isinstance(getattr(module, "weight", None), Tensor):
        return None
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear" if _returns_tensor(module) else None
    return "convolution" if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else None


def _returns_tensor(layer: nn.Linear) -> bool:
    """Whether a linear layer returns one tensor; a router of experts may return several."""
    has_own_forward = type(layer).forward is not nn.Linear.forward
    if not has_own_forward or not type(layer).__module__.startswith("transformers.models."):
        return True
    example = layer.weight.new_zeros(1, layer.in_features)
    with torch.no_grad():
        return isinstance(layer(example), Tensor)


def _compute_matrix_shape(name: str, module: Any) -> tuple[int, int]:
    """Compute the shape (d, k) of a layer's weight as a matrix.

    Raises:
        TaskError: if PEFT cannot adapt the layer exactly.
    """
    kind = _find_layer_kind(module)
    if kind == "convolution" and (module.groups > 1 or any(s != 1 for s in module.dilation)):
        raise TaskError(
            f"the layer {name} is a convolution with groups or dilation, which PEFT cannot adapt exactly"
        )
    if kind == "linear":
        # a quantized weight is packed, so its own shape is another one
        return module.out_features, module.in_features
    d, k = module.weight.shape[0], module.weight[0].numel()
    # Conv1D and embeddings store [k, d]
    return (d, k) if kind == "convolution" else (k, d)
