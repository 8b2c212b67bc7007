"""LoRA adapters on a frozen base: which settings of PEFT are allowed, the one live slot, and its factors by layer.

A model has a single adapter slot. Clients' states are :data:`~fedlowrank.linalg.pair.Factors`; they enter the model
as leaves of ``torch.func.functional_call`` under the names that :func:`parameters` gives them, at any rank.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..adapters.lora import is_gaussian_initial
from ..core.errors import ConfigError, TaskError, did_you_mean
from ..core.key import Key
from ..core.tree import Params
from ..linalg.pair import Factors, Pair
from ..models.architecture import build_module
from .base import head_modules, peft
from .refused_settings import REFUSED_SETTINGS

ADAPTER = "default"
"""Name of the slot. PEFT loses layers where an adapter's name is also a part of a module's name."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model."""

Head = Literal["shared", "personal", "frozen"]


def lora_config(fields: Mapping[str, Any] | Any) -> Any:
    """A ``peft.LoraConfig`` from its fields as PEFT names them.

    Args:
        fields: names and values, or a ``LoraConfig``, which is checked and copied.

    Raises:
        ConfigError: for an unknown field, a value that PEFT refuses, or a feature that changes the base or the algebra
            of the update, by its name and with the reason.
        DataError: if peft is missing.
    """
    library = peft()
    known = {f.name: f for f in dataclasses.fields(library.LoraConfig)}
    if isinstance(fields, library.LoraConfig):
        values = {name: getattr(fields, name) for name in known}
    elif isinstance(fields, Mapping):
        values = dict(fields)
    else:
        raise ConfigError(f"lora: a {type(fields).__name__} is neither a dict of settings nor a LoraConfig")
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"lora: peft's LoraConfig has no setting {name!r}. {did_you_mean(name, known)}")
        reason = REFUSED_SETTINGS.get(name)
        if reason is None and known[name].metadata.get("is_lora_variant"):
            reason = "it is another update than s·B A"
        if value and reason is not None:
            raise ConfigError(f"lora: {name} = {value!r} cannot be used in federated training: {reason}.")
    if str(getattr(values.get("peft_type"), "value", values.get("peft_type") or "LORA")) != "LORA":
        raise ConfigError(f"lora: peft_type = {values['peft_type']!r}; only LORA is federated here")
    if values.get("bias", "none") != "none":
        raise ConfigError(
            f"lora: bias = {values['bias']!r} cannot be used in federated training: it trains the base's biases."
        )
    initial = values.get("init_lora_weights", True)
    if is_gaussian_initial(initial) is None:
        raise ConfigError(
            f"lora: init_lora_weights = {initial!r} cannot be used in federated training: an adapter must begin as "
            "B = 0 on an unchanged base. Take true (Kaiming uniform) or 'gaussian'."
        )
    try:
        made = library.LoraConfig(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora: {error}") from error
    number = (int, float)
    if not isinstance(made.r, int) or made.r < 1:
        raise ConfigError(f"lora: r must be a whole number of at least 1; it is {made.r!r}")
    if not isinstance(made.lora_alpha, number) or not 0 < made.lora_alpha < math.inf:
        raise ConfigError(f"lora: lora_alpha must be above 0; it is {made.lora_alpha!r}")
    if not isinstance(made.lora_dropout, number) or not 0 <= made.lora_dropout < 1:
        raise ConfigError(f"lora: lora_dropout must be in [0, 1); it is {made.lora_dropout!r}")
    return made


def scale_of(config: Any, rank: int | None = None, alpha: float | None = None) -> float:
    """The scale s of an update s·B A: α/r, or α/√r with ``use_rslora`` (Kalajdzievski, arXiv:2312.03732, eq. 8).

    Args:
        config: a ``LoraConfig``.
        rank: r; by default the config's.
        alpha: α; by default the config's.
    """
    r = config.r if rank is None else rank
    a = config.lora_alpha if alpha is None else alpha
    return float(a / math.sqrt(r) if config.use_rslora else a / r)


@dataclasses.dataclass(frozen=True)
class Layer:
    """An adapted layer of a base, and where its factors live in the model that PEFT made.

    Attributes:
        name: dotted, within the base model.
        kind: conv1d is the layer of ``transformers`` with a weight [k, d]; a convolution's k is I·k1·k2.
        d: width of the layer's output, of an embedding its dimension.
        k: width of its input, of an embedding its number of entries.
        kernel: sizes of a convolution's kernel, else empty.
        a: name of the parameter A in the model.
        b: name of the parameter B.
    """

    name: str
    kind: Literal["linear", "conv1d", "embedding", "convolution"]
    d: int
    k: int
    kernel: tuple[int, ...]
    a: str
    b: str

    @property
    def rank(self) -> int:
        """The largest rank that factors of this layer can have."""
        return min(self.d, self.k)

    def parameters(self, pair: Pair) -> Params:
        """A pair as the two parameters of the model; a convolution's get the shapes of its two kernels."""
        a, b = pair.a, pair.b
        if self.kernel:
            a = a.reshape(pair.rank, -1, *self.kernel)
            b = b.reshape(*b.shape, *(1 for _ in self.kernel))
        return {self.a: a, self.b: b}

    def pair(self, params: Mapping[str, Tensor]) -> Pair:
        """The pair of this layer among a model's parameters."""
        return Pair(params[self.b].flatten(1), params[self.a].flatten(1))


def attach(
    model: Any, config: Any, key: Key, head: Head = "shared", modules: tuple[str, ...] | None = None
) -> Any:
    """Put a LoRA slot on every target layer of a base, in place. One factor is zero, so the model computes what the base does.

    Args:
        model: a base without adapters; a ``transformers`` model or any module.
        config: of :func:`lora_config`. It is copied; the slot's own, with the target modules that PEFT found, is
            ``peft_config["default"]`` of the result.
        key: of the factor that is random, see :func:`initial`. torch's global generator is as before.
        head: whether the modules of the head are trained (shared, personal) or frozen.
        modules: names of the head's modules, commonly ``Loaded.head``; None finds them. They get no adapter.

    Returns:
        A ``peft.PeftModel`` in evaluation mode. Only factors, and the head's parameters, require gradients.

    Raises:
        TaskError: if target modules match no layer, a rank is above a layer's dimension, or a layer is of a kind that
            is not supported.
    """
    if head not in ("shared", "personal", "frozen"):
        raise ConfigError(
            f"head = {head!r} is no choice. {did_you_mean(str(head), ('shared', 'personal', 'frozen'))}"
        )
    library = peft()
    before = [n for n, m in model.named_modules() if hasattr(m, "lora_A")]
    if before:
        raise TaskError(
            f"the model has a LoRA adapter already, at {before[0]} and {len(before) - 1} other layers"
        )
    if any(ADAPTER in name.split(".") for name, _ in model.named_modules()):
        raise TaskError(
            f"a module of the model is called {ADAPTER!r}, the name of the adapter; PEFT would lose layers"
        )
    made = lora_config(config)
    given, made.inference_mode = made.exclude_modules, False
    whole = head_modules(model) if modules is None else modules
    made.exclude_modules = _excluding(given, whole)
    names = {n: m for n, m in model.named_modules() if n and _weight(m) is not None}
    chosen = _chosen(model, made, names)
    for name in chosen:
        _check(name, names[name], made.r)
    transposed = {kind_of(names[name]) == "conv1d" for name in chosen}
    # PEFT sets it layer by layer and warns each time that it is not as the layer has it
    made.fan_in_fan_out = any(transposed)
    causal = not whole and hasattr(model, "prepare_inputs_for_generation")
    made.task_type = made.task_type or ("SEQ_CLS" if whole else "CAUSAL_LM" if causal else None)
    # the class for classification would put a copy of the head beside the head
    which = library.PeftModelForCausalLM if causal else library.PeftModel

    def wrap() -> nn.Module:
        with warnings.catch_warnings():
            # two warnings of PEFT to itself: transformers renamed a property, and both kinds of layers are adapted
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
    own, where = dict(tuned.named_parameters()), layers(tuned)
    first = parameters(where, initial(where, made.r, key, made.init_lora_weights))
    with torch.no_grad():
        for name, value in first.items():
            own[name].copy_(value)
    for name, parameter in own.items():
        inside = name.removeprefix(PREFIX)
        if any(inside.startswith(f"{module}.") for module in whole):
            parameter.requires_grad_(head != "frozen")
    return tuned.eval()


def layers(model: Any) -> dict[str, Layer]:
    """The adapted layers of a model of :func:`attach`, by their dotted names in the base, in the model's order."""
    out: dict[str, Layer] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        name, kind = path.removeprefix(PREFIX), kind_of(module.base_layer)
        if kind == "embedding":
            names = [f"{path}.{s}.{ADAPTER}" for s in ("lora_embedding_A", "lora_embedding_B")]
        else:
            names = [f"{path}.{s}.{ADAPTER}.weight" for s in ("lora_A", "lora_B")]
        d, k, kernel = _shape(module.base_layer)
        out[name] = Layer(name, kind, d, k, kernel, *names)
    return out


def initial(
    where: Mapping[str, Layer],
    rank: int,
    key: Key,
    init: bool | str = True,
    dtype: torch.dtype = torch.float32,
) -> Factors:
    """Factors to begin with, as PEFT draws them: A random and B zero, of an embedding A zero and B random.

    A is Kaiming uniform with a = √5, U(-1/√k, 1/√k), or with ``"gaussian"`` N(0, 1/r²). An embedding's B is N(0, 1).
    Components are drawn one by one, so that but for ``"gaussian"`` factors of a lower rank are the first components of
    those of a higher one.

    Args:
        where: of :func:`layers`.
        rank: r, of all layers.
        key: every layer draws from one of its own.
        init: as ``init_lora_weights``.
        dtype: of the factors.
    """
    out: Factors = {}
    for name, layer in where.items():
        draw = (key / "lora" / name).generator()
        rows = torch.empty(rank, layer.d if layer.kind == "embedding" else layer.k)
        for row in rows:
            if layer.kind == "embedding":
                row.normal_(generator=draw)
            elif is_gaussian_initial(init):
                row.normal_(0, 1 / rank, generator=draw)
            else:
                row.uniform_(-1 / math.sqrt(layer.k), 1 / math.sqrt(layer.k), generator=draw)
        rows = rows.to(dtype)
        if layer.kind == "embedding":
            out[name] = Pair(rows.mT.contiguous(), rows.new_zeros(rank, layer.k))
        else:
            out[name] = Pair(rows.new_zeros(layer.d, rank), rows)
    return out


def parameters(where: Mapping[str, Layer], factors: Factors) -> Params:
    """Factors as parameters by their names in the model, for ``torch.func.functional_call``.

    Raises:
        TaskError: if a layer is not adapted, or a pair has not the layer's dimensions.
    """
    out: Params = {}
    for name, pair in factors.items():
        if name not in where:
            raise TaskError(f"no layer {name!r} is adapted. {did_you_mean(name, where)}")
        layer = where[name]
        if (pair.b.shape[0], pair.a.shape[1]) != (layer.d, layer.k) or pair.a.shape[0] != pair.rank:
            raise TaskError(
                f"factors B {list(pair.b.shape)} and A {list(pair.a.shape)} do not fit the layer {name}, "
                f"[{layer.d}, {layer.k}]"
            )
        out |= layer.parameters(pair)
    return out


def factors_of(model: Any) -> Factors:
    """Copies of the factors that the slot of a model holds now."""
    own = dict(model.named_parameters())
    pairs = {name: layer.pair(own) for name, layer in layers(model).items()}
    return {name: Pair(p.b.detach().clone(), p.a.detach().clone()) for name, p in pairs.items()}


def set_scale(model: Any, scale: float) -> None:
    """Set the scale s by which the slot's B A is multiplied, in every layer; it does not follow the rank by itself."""
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            module.scaling[ADAPTER] = float(scale)


def target_names(model: Any) -> str:
    """Short names of the layers that could be adapted, with how often each occurs: ``"key x 6, query x 6"``."""
    short = Counter(n.rpartition(".")[2] for n, m in model.named_modules() if n and _weight(m) is not None)
    return ", ".join(f"{name} x {count}" for name, count in sorted(short.items()))


def _excluding(given: Any, head: tuple[str, ...]) -> Any:
    """``exclude_modules`` with the head's modules, and all within them, added to what the user excludes."""
    if not head:
        return given
    own = "|".join(rf"{re.escape(name)}(\..*)?" for name in head)
    if not given:
        return own
    if isinstance(given, str):
        return f"(?:{given})|{own}"
    return "|".join(rf"(.*\.)?{re.escape(name)}" for name in sorted(given)) + f"|{own}"


def _chosen(model: Any, config: Any, names: Mapping[str, nn.Module]) -> list[str]:
    """Names of the layers that the target modules match; each name that the user lists must match one."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if config.target_modules is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in USUAL:
            raise TaskError(
                f"PEFT knows no usual target modules for a model of type {kind!r}; set target_modules. "
                f"Layers that can be adapted: {target_names(model)}."
            )
        config.target_modules = set(USUAL[kind])
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        output = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules = {
            n for n, m in names.items() if kind_of(m) in ("linear", "conv1d") and m is not output
        }
        config.target_modules = {n for n in config.target_modules if check_target_module_exists(config, n)}
    targets = config.target_modules
    found = [name for name in names if check_target_module_exists(config, name)]
    wanted = [] if isinstance(targets, str) else sorted(targets)
    unmatched = [t for t in wanted if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unmatched or not found:
        what = ", ".join(map(repr, unmatched)) or repr(targets)
        raise TaskError(
            f"target_modules: {what} matches no layer of the {type(model).__name__}"
            f"{'' if unmatched else ' that is not excluded'}. Layers that can be adapted: {target_names(model)}."
        )
    return found


def _weight(module: Any) -> Tensor | None:
    """The weight of a layer that can have an adapter, or None for any other module."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and (type(module).__name__ == "Conv1D" or isinstance(module, _LAYERS)):
        return weight
    return None


_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kind_of(module: nn.Module) -> Literal["linear", "conv1d", "embedding", "convolution"]:
    """Which of the kinds of :class:`Layer` a layer is."""
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "linear" if isinstance(module, nn.Linear) else "convolution"


def _shape(module: Any) -> tuple[int, int, tuple[int, ...]]:
    """d, k and the kernel of a layer."""
    kind = kind_of(module)
    if kind == "linear":
        # not the weight's shape: a quantized weight is packed
        return module.out_features, module.in_features, ()
    if kind == "conv1d":
        return module.weight.shape[1], module.weight.shape[0], ()
    if kind == "embedding":
        return module.embedding_dim, module.num_embeddings, ()
    kernel = tuple(module.kernel_size)
    return module.out_channels, module.in_channels * math.prod(kernel), kernel


def _check(name: str, module: Any, rank: int) -> None:
    if kind_of(module) == "convolution" and (module.groups > 1 or any(s != 1 for s in module.dilation)):
        raise TaskError(
            f"the layer {name} is a convolution with groups or dilation, which PEFT cannot adapt exactly"
        )
    d, k, _ = _shape(module)
    if rank > min(d, k):
        raise TaskError(
            f"rank {rank} is above what the layer {name}, [{d}, {k}], can have: at most {min(d, k)}"
        )
