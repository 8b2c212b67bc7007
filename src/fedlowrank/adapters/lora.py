"""LoRA factors of a whole module: where they are, and what parameters they make (Hu et al. 2021, arXiv:2106.09685).

An adapted weight is W + s·B A. Three kinds of modules give the same :class:`LoRA`:

- wrapped by PEFT: the factors are parameters of its layers, and so the update is applied to activations;
- wrapped by :func:`fedlowrank.adapters.lora_layers.add_lora`, our own layers: likewise;
- any other: s·B A is added to the weight itself, for every linear layer and convolution outside the head.

The scale s is not part of the factors. In the first two kinds the module multiplies by a scale of its own, so B is given to it
times the ratio of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import TaskError
from ..core.key import Key
from ..core.model import Model
from ..core.tree import Params
from ..linalg.pair import Factors, Pair


@dataclass(frozen=True)
class AdaptedLayer:
    """One weight that can be adapted.

    Attributes:
        weight: name of the weight's parameter.
        shape: of the weight as a matrix, (d, k): the update is B A of ``[d, r]`` and ``[r, k]``.
        stored: the shape that the weight's parameter has.
        transposed: whether it is stored as ``[k, d]``.
        a: name of the parameter that holds A, or None where the update is added to the weight.
        b: name of the parameter that holds B, or None.
        a_tail: shape of A's parameter after r.
        b_tail: shape of B's parameter after (d, r).
        embedding: whether it is the weight of an embedding, whose A begins at zero and whose B is random.
    """

    weight: str
    shape: tuple[int, int]
    stored: tuple[int, ...]
    transposed: bool = False
    a: str | None = None
    b: str | None = None
    a_tail: tuple[int, ...] = ()
    b_tail: tuple[int, ...] = ()
    embedding: bool = False

    def folded(self, update: Tensor) -> Tensor:
        """An update ``[d, k]`` in the form of the weight's parameter."""
        return (update.mT if self.transposed else update).reshape(self.stored)


@dataclass(frozen=True)
class LoRA:
    """The adapted weights of a module.

    Attributes:
        sites: by name of the layer in the base model.
        base: the weights that updates are added to, by the name of their parameter.
        scale: s by which the module itself multiplies B A; 1 where the update is added to the weight.
        rank: that the module was made for, or None.
        rslora: whether α is divided by √r instead of r.
        gaussian: whether the initial A is normal and not uniform, as ``init_lora_weights = "gaussian"`` of PEFT asks.
        memo: what others derived from it and keep for all clients.
    """

    sites: Mapping[str, AdaptedLayer]
    base: Mapping[str, Tensor]
    scale: float = 1.0
    rank: int | None = None
    rslora: bool = False
    gaussian: bool = False
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(d, k) of every adapted weight."""
        return {name: site.shape for name, site in self.sites.items()}

    def check_rank(self, rank: int, whose: str) -> None:
        """Raise TaskError where a rank is above a dimension."""
        for name, (d, k) in self.shapes.items():
            if not 1 <= rank <= min(d, k):
                raise TaskError(
                    f"{whose} has rank {rank}, but layer {name} is {d} × {k}, so its rank is from 1 to {min(d, k)}. Lower the "
                    "rank, or leave that layer out of target_modules."
                )

    def draw(self, rank: int, key: Key, like: Tensor | None = None) -> Factors:
        """Seeded factors to begin with, drawn as PEFT draws them; their product is zero.

        A ``[rank, k]`` is uniform in ±1/√k, or with ``gaussian`` N(0, 1/rank²), and B ``[d, rank]`` is zero. Of an embedding A is
        zero and B is N(0, 1). Clients of lower rank take the first components; of a normal A that leaves the deviation
        1/rank of this, the largest rank.

        Args:
            rank: r.
            key: every layer draws from one of its own.
            like: a tensor of the type and device that factors get; None for float32.
        """
        found: Factors = {}
        for name, site in self.sites.items():
            (d, k), generator = site.shape, (key / name).generator()
            if site.embedding:
                b, a = torch.randn(rank, d, generator=generator).mT, torch.zeros(rank, k)
            elif self.gaussian:
                b, a = torch.zeros(d, rank), torch.randn(rank, k, generator=generator) / rank
            else:
                b, a = torch.zeros(d, rank), (torch.rand(rank, k, generator=generator) * 2 - 1) / math.sqrt(k)
            target = like if like is not None else a
            found[name] = Pair(b.to(target).contiguous(), a.to(target))
        return found

    def place(
        self,
        factors: Factors,
        scale: float | Tensor,
        frozen: Factors | None = None,
        moved: Params | None = None,
    ) -> Params:
        """The parameters under which the module computes W + s·B A (+ B' A' of a frozen second adapter).

        Args:
            factors: B and A of every layer, of any rank.
            scale: s, a number or a tensor without dimensions.
            frozen: a further update, with a scale of 1.
            moved: weights W by the name of their parameter, where they are not those of the module.
        """
        found: Params = dict(moved or {})
        for name, pair in factors.items():
            site = self.sites[name]
            more = None if frozen is None else frozen.get(name)
            if site.a is None or site.b is None:
                update = pair.dense() * scale
                if more is not None:
                    update = update + more.dense().to(update.dtype)
                w = found.get(site.weight, self.base[site.weight])
                found[site.weight] = w + site.folded(update).to(w.dtype)
                continue
            same = not isinstance(scale, Tensor) and scale == self.scale
            a, b = pair.a, pair.b if same else pair.b * (scale / self.scale)
            if more is not None and more.rank:
                a = torch.cat([more.a.to(a.dtype), a])
                b = torch.cat([(more.b / self.scale).to(b.dtype), b], 1)
            found[site.a] = a.reshape(-1, *site.a_tail) if site.a_tail else a
            found[site.b] = b.reshape(*b.shape, *site.b_tail) if site.b_tail else b
        return found

    def moved(self, updates: Mapping[str, Tensor]) -> Params:
        """The weights themselves with dense updates ``[d, k]`` added, in the weights' own type."""
        found = {}
        for name, update in updates.items():
            site = self.sites[name]
            w = self.base[site.weight]
            # added in the finer of both types
            found[site.weight] = (w + site.folded(update)).to(w.dtype)
        return found

    def in_slots(self, params: Params, slots: Params) -> Params:
        """Parameters whose factors have the ranks that the module was made for; the model stays the same.

        Factors of lower rank are padded with zeros. Where the rank is higher, s·B A is added to the weight and the factors are
        zero.

        Args:
            params: of one model, with factors of any rank.
            slots: all parameters of the module.
        """
        found = dict(params)
        for site in self.sites.values():
            if site.a is None or site.b is None or site.a not in params or site.b not in params:
                continue
            a, b, rank = params[site.a], params[site.b], slots[site.a].shape[0]
            pair = Pair(b.flatten(1), a.flatten(1))
            if pair.rank > rank:
                weight = params.get(site.weight, slots[site.weight])
                update = site.folded(pair.dense() * self.scale)
                found[site.weight] = (weight + update.to(weight.device)).to(weight.dtype)
                pair = truncate_pair(pair, 0)
            pair = zero_pad_pair(pair, rank)
            found[site.a], found[site.b] = (
                pair.a.reshape(rank, *a.shape[1:]),
                pair.b.reshape(-1, rank, *b.shape[2:]),
            )
        return found

    def updates(self, factors: Factors, scale: float) -> dict[str, Tensor]:
        """s·B A ``[d, k]`` of every layer."""
        return {name: pair.dense() * scale for name, pair in factors.items()}


def lora_of(model: Model) -> LoRA:
    """Where the weights of a model take low-rank updates, found once for each model.

    Raises:
        TaskError: as :func:`find_lora`.
    """
    if "lora" not in model.cache:
        model.cache["lora"] = find_lora(model.module, model.head_name)
    found: LoRA = model.cache["lora"]
    return found


def parameters_beside_factors(model: Model) -> Params:
    """The initial values of what is trained beside LoRA factors: the head, and whatever else is not frozen."""
    factors = {n for s in lora_of(model).sites.values() for n in (s.a, s.b) if n is not None}
    if factors:
        return {n: p for n, p in model.initial.items() if n not in factors}
    return {} if model.head_name is None else model.head_of(model.initial)


def find_lora(module: nn.Module, head: str | None) -> LoRA:
    """Where a module has LoRA factors; of one that has none, its linear layers and convolutions outside the head.

    Args:
        module: any module.
        head: name of its head, which is trained whole.

    Raises:
        TaskError: if it has no layer that can be adapted, layers with different scales, or an adapter of PEFT that does not
            begin at zero on an unchanged base.
    """
    found: dict[str, AdaptedLayer] = {}
    scales: dict[float, str] = {}
    ranks: set[int] = set()
    rslora = False
    for name, layer in module.named_modules():
        held = _find_factors(layer)
        if held is not None:
            site = _wrapped_layer(name, layer, *held)
            found[name.removeprefix("base_model.model.")] = site
            scales.setdefault(held[2], name)
            ranks.add(held[3])
            rslora = rslora or held[4]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if found:
        if len(scales) > 1:
            told = ", ".join(f"{s:g} at {n}" for s, n in scales.items())
            raise TaskError(
                f"the LoRA layers of this model have different scales α/r ({told}); give all the same"
            )
        sites = found
        return LoRA(
            sites,
            {s.weight: parameters[s.weight] for s in sites.values()},
            next(iter(scales)),
            max(ranks),
            rslora,
            _uses_gaussian_initial(module),
        )
    sites = _unwrapped_layers(module, head)
    return LoRA(sites, {s.weight: parameters[s.weight].detach() for s in sites.values()})


def is_gaussian_initial(initial: Any) -> bool | None:
    """Whether a value of PEFT's ``init_lora_weights`` asks for a normal A; None if it is not one that is known here."""
    if initial is True:
        return False
    return True if isinstance(initial, str) and initial.lower() == "gaussian" else None


def _uses_gaussian_initial(module: nn.Module) -> bool:
    """What the configurations of PEFT within a module ask for."""
    found = set()
    for layer in module.modules():
        configs = getattr(layer, "peft_config", None)
        for config in configs.values() if isinstance(configs, Mapping) else ():
            initial = getattr(config, "init_lora_weights", True)
            found.add(is_gaussian_initial(initial))
            if None in found:
                raise TaskError(
                    f"the model's adapter was made with init_lora_weights = {initial!r}, but in federated training an adapter "
                    "must begin as a zero update of an unchanged base. Make it with True (Kaiming uniform) or 'gaussian'."
                )
    return True in found


Held = tuple[str, str, float, int, bool]


def _find_factors(layer: nn.Module) -> Held | None:
    """Names of the parameters A and B within a layer that has them, its scale, its rank and whether that is rsLoRA's."""
    if getattr(layer, "base_layer", None) is None:
        return None
    scaling: Any = getattr(layer, "scaling", None)
    if isinstance(scaling, dict):
        adapters = [n for n in scaling if n in layer.lora_A or n in layer.lora_embedding_A]  # type: ignore[operator]
        if len(adapters) != 1:
            raise TaskError(
                f"a PEFT layer holds the adapters {sorted(scaling)}; keep one, for the clients' are in their trees"
            )
        n = adapters[0]
        names = (
            (f"lora_A.{n}.weight", f"lora_B.{n}.weight")
            if n in layer.lora_A  # type: ignore[operator]
            else (f"lora_embedding_A.{n}", f"lora_embedding_B.{n}")
        )
        if n in layer.lora_A:  # type: ignore[operator]
            _check_convolution(layer.base_layer, layer.lora_A[n])  # type: ignore[index]
        rs = bool(getattr(layer, "use_rslora", {}).get(n, False))
        return *names, float(scaling[n]), int(layer.r[n]), rs  # type: ignore[index]
    if isinstance(scaling, float) and hasattr(layer, "lora_A"):
        return "lora_A", "lora_B", scaling, int(layer.lora_A.shape[0]), bool(layer.rslora)  # type: ignore[index]
    return None


def _check_convolution(base: Any, inner: Any) -> None:
    """Refuse a convolution of PEFT whose A looks at other places of the input than the weight it stands beside."""
    if isinstance(base, nn.modules.conv._ConvNd):
        for setting in ("dilation", "padding_mode"):
            if getattr(base, setting) != getattr(inner, setting):
                raise TaskError(
                    f"PEFT's LoRA of a convolution ignores its {setting} = {getattr(base, setting)!r}, so it is no update of the "
                    "weight; leave the layer out of target_modules, or wrap the module by fedlowrank.adapters.lora_layers.add_lora"
                )


def _wrapped_layer(name: str, layer: nn.Module, a: str, b: str, *_: Any) -> AdaptedLayer:
    base = layer.base_layer
    weight: Tensor = base.weight  # type: ignore[union-attr,assignment]
    held = dict(layer.named_parameters())
    a_shape, b_shape = held[a].shape, held[b].shape
    d, k = b_shape[0], math.prod(a_shape[1:])
    # of embeddings [V, D] and Conv1D [k, d] the weight is the transpose of B A
    transposed = tuple(weight.shape) == (k, d) and (
        isinstance(base, nn.Embedding) or bool(getattr(layer, "fan_in_fan_out", 0))
    )
    if b_shape[1] != a_shape[0]:
        raise TaskError(
            f"layer {name} is a convolution with groups, whose LoRA is not one product B A; leave it out"
        )
    where = name + "." if name else ""
    return AdaptedLayer(
        f"{where}base_layer.weight",
        (d, k),
        tuple(weight.shape),
        transposed,
        where + a,
        where + b,
        tuple(a_shape[1:]) if len(a_shape) > 2 else (),
        tuple(b_shape[2:]),
        isinstance(base, nn.Embedding),
    )


def _unwrapped_layers(module: nn.Module, head: str | None) -> dict[str, AdaptedLayer]:
    found, seen = {}, set()
    for name, layer in module.named_modules():
        inside = head is not None and (name == head or name.startswith(f"{head}."))
        if inside or not isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) or id(layer.weight) in seen:
            continue
        seen.add(id(layer.weight))
        shape = tuple(layer.weight.shape)
        where = name + "." if name else ""
        found[name] = AdaptedLayer(f"{where}weight", (shape[0], math.prod(shape[1:])), shape)
    if not found:
        raise TaskError(
            "this model has no linear layer and no convolution outside its head, so there is nothing for LoRA to adapt"
        )
    return found


def zero_pad_pair(pair: Pair, rank: int) -> Pair:
    """The same product with zero columns of B and zero rows of A up to a rank."""
    more = rank - pair.rank
    if more <= 0:
        return pair
    return Pair(
        torch.cat([pair.b, pair.b.new_zeros(pair.b.shape[0], more)], 1),
        torch.cat([pair.a, pair.a.new_zeros(more, pair.a.shape[1])]),
    )


def truncate_pair(pair: Pair, rank: int) -> Pair:
    """The first columns of B and rows of A."""
    return Pair(pair.b[:, :rank].contiguous(), pair.a[:rank].contiguous())


def average_present_components(means: Factors, before: Factors, reached: Tensor) -> Factors:
    """Means of padded factors over those clients alone that have a component.

    Args:
        means: weighted means of all clients' zero-padded factors.
        before: value of a component that no client has.
        reached: sum of the weights of the clients that have each component ``[rank]``, descending; the first is that of all.
    """
    shares = (reached / reached[0]).tolist()
    found: Factors = {}
    for name, pair in means.items():
        share = pair.a.new_tensor(shares)
        b, a = torch.where(share > 0, pair.b / share, before[name].b), pair.a / share[:, None]
        found[name] = Pair(b, torch.where(share[:, None] > 0, a, before[name].a))
    return found
