"""FLoRAL without a federation: one module with C mixed adaptors, for a plain PyTorch training loop.

Almansoori, Horváth, Takáč, "Collaborative and Efficient Personalization with Mixtures of Adaptors",
arXiv:2410.03497. The federated method of the same name is :class:`fedlowrank.methods.FederatedFloral`; both
use :mod:`fedlowrank.adapters.mixtures.mixture_adaptors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import check_arguments
from ...core.errors import ConfigError, TaskError, warn_user
from ...core.key import Key
from ...core.tree import Params
from ...models.module_copy import copy_module
from ...models.stateless import names_of_parameters
from ..setting_comparison import is_readable, is_same_setting
from ..substitution import (
    add_forward_hooks,
    get_submodule,
    lock_module,
    named_tensors,
    set_submodule,
    substitute_parameters,
)
from .adapted_parameters import (
    KINDS,
    NO_PATTERN,
    Include,
    Kind,
    find_adapted_parameters,
    find_norms_with_statistics,
    warn_adapted_ranks,
)
from .mixture import (
    EPS,
    BatchNormAdaptor,
    Construction,
    LowRankAdaptor,
    OffsetAdaptor,
    Pairs,
    as_offsets,
    check_ranks_or_budgets,
    main_statistics,
    reparameterize,
)
from .mixture_adaptors import Adaptors, center_adaptors, initial_adaptors, mix_weights, precondition_adaptors
from .parameter_budget import ParameterBudget, compute_budget, unadapted_warning
from .router import Route, Router, parse_route

_LEARNED = Router()
CONSTRUCTIONS = get_args(Construction)


class Floral(nn.Module):
    """Any module with a mixture of C low-rank adaptors: each weight w becomes w + α Σ_c π_c a_c (§3.2).

    A forward pass is one pass of the module with mixed weights, whatever C is. It is exact for any stride,
    padding, dilation, groups, shared weights and layers used twice, and equals the module at the start.

    :attr:`base` is the module itself, not a copy; its parameters train unless they are frozen. Adaptors are named
    after the parameters they adapt: ``adaptors.layer1.0.weight.u``. Code that bypasses this module's forward
    (``model.base.generate(...)``) needs ``model.merge()``. Activation checkpointing inside the base is
    refused: it would recompute layers without adaptors; checkpoint the whole wrapper instead. Other
    recomputation in the backward pass (reversible blocks) is not recognized and gives wrong gradients. A layer must
    read its weight as its own attribute. A warning names weights without adaptors, such as those of an LSTM.

    Args:
        model: any module with linear layers, attention, convolutions, embeddings or normalizations.
        rank: rank of the updates, an integer; or a budget ρ in (0, 1), a share of each parameter's size (rank 1 at
            least). A rank above the largest rank of a weight is lowered for that weight, with a warning.
        num_clusters: number C of clusters.
        rank_pattern: ranks or budgets of single layers, by suffix of their names, such as ``{"head": 10}``.
        alpha: factor α on the adaptors.
        construction: construction of the updates of convolutions; see :mod:`fedlowrank.adapters.mixtures.mixture`.
        kinds: kinds of parameters that are adapted: linear, convolution, embedding, bias, norm.
        include: predicate of a layer's name and the layer, true for layers to adapt. It is called for layers that
            hold parameters, not for modules that contain them.
        exclude: predicate of the same form, true for layers that are not adapted.
        router: settings of θ: temperature, noise, top and routing. Its ``lr`` is used by :meth:`parameter_groups`;
            ``update``, ``keep`` and ``adapt`` concern the federated method only.
        reparameterize: whether γ, β of a BatchNorm are adapted with respect to the main statistics (eq. 42).
            Otherwise each adaptor has its own running statistics and BN(x; γ, β) + α Σ_c π_c BN_c(x; γ_c, β_c) is
            computed. These statistics start at the main ones, and a batch updates those of the adaptors with a
            share. As in PyTorch, ``layer.training`` decides between statistics of the batch and running ones.
        seed: seed of the random factors, for which torch's generator is not used. The router's noise uses torch's
            generator, as dropout does, so that activation checkpointing replays the noise.

    Attributes:
        base: module with the main weights.
        theta: router logits θ ``[C]``, in float32 if the weights have half precision. :meth:`parameters` yields them first;
            the type of the weights is ``next(model.base.parameters()).dtype``.

    Raises:
        TaskError: if no parameter can be adapted, a layer is lazy, or a layer cannot be adapted exactly.
        ConfigError: if a setting is out of range.

    Example:
        >>> model = Floral(nn.Linear(4, 2), rank=1, num_clusters=3)
        >>> optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.1)
        >>> model(torch.ones(5, 4)).square().mean().backward()
        >>> model.precondition_()
        >>> optimizer.step()
        >>> type(model.merge()).__name__
        'Linear'
    """

    @check_arguments
    def __init__(
        self,
        model: nn.Module,
        rank: float = 0.01,
        num_clusters: int = 4,
        *,
        rank_pattern: Mapping[str, float] = NO_PATTERN,
        alpha: float = 1.0,
        construction: Construction = "balanced",
        kinds: tuple[Kind, ...] = KINDS,
        include: Include | None = None,
        exclude: Include | None = None,
        router: Router = _LEARNED,
        reparameterize: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_settings(model, rank, rank_pattern, num_clusters, alpha, router, include, exclude)
        is_included = None if include is None and exclude is None else partial(_is_included, include, exclude)
        options = (construction, tuple(kinds), is_included, rank_pattern)
        self._adapted = find_adapted_parameters(model, rank, *options)
        self.base = model
        self.clusters, self.alpha, self.construction, self.router = num_clusters, alpha, construction, router
        self._route: list[float] | None = None
        # names of γ and β, by layer, of the BatchNorm layers whose adaptors have their own statistics
        self._norms_with_statistics = (
            {} if reparameterize else find_norms_with_statistics(model, self._adapted)
        )
        tied_names = names_of_parameters(model).values()
        self._tied_names = [names for names in tied_names if len(names) > 1 and names[0] in self._adapted]
        # neither method has type annotations in torch
        self.register_load_state_dict_pre_hook(_complete_ties)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_restore_ties)  # type: ignore[no-untyped-call]
        weights = {name: p.detach() for name, p in self._weights().items()}
        reference = weights[next(iter(self._adapted))]
        warn_adapted_ranks("Floral", self._adapted)
        if remark := unadapted_warning(model, self._adapted, is_included):
            hint = "Linear layers, attention, convolutions, embeddings and normalizations can have them"
            warn_user(f"{remark}. {hint}; to silence this, exclude=... the others.")
        self.theta = nn.Parameter(
            reference.new_zeros(num_clusters, dtype=torch.promote_types(reference.dtype, torch.float32))
        )
        self.adaptors = nn.Module()
        layers = {gamma: layer for layer, (gamma, _) in self._norms_with_statistics.items()}
        for name, a in initial_adaptors(
            self._adapted, num_clusters, Key((seed,)) / "adaptors", construction, weights
        ).items():
            if isinstance(a, Pairs):
                leaf: nn.Module = LowRankAdaptor(a)
            else:
                leaf = BatchNormAdaptor(a, self._layer(layers[name])) if name in layers else OffsetAdaptor(a)
            set_submodule(self.adaptors, name, leaf)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the base with mixed weights.

        Raises:
            TaskError: if the router's routing is optimal and no route was set, or gradients would be wrong
                because the base uses activation checkpointing.
        """
        pi = self._shares(noisy=self.training)
        offset_names = {name for names in self._norms_with_statistics.values() for name in names}
        adaptors = {name: a for name, a in self.adapted().items() if name not in offset_names}
        hooks = [
            (self._layer(layer), partial(self._add_term, node, beta, pi))
            for layer, node, beta in self._norms()
        ]
        with lock_module(self.base):
            mixed_weights = mix_weights(self._weights(), adaptors, pi, self.alpha, self.construction)
            # both are undone after this pass, so that the base stays unchanged
            with (
                add_forward_hooks(hooks),
                substitute_parameters(self.base, {name: mixed_weights[name] for name in adaptors}),
            ):
                return self.base(*args, **kwargs)

    @property
    def pi(self) -> Tensor:
        """The current shares π ``[C]``, without noise and gradient."""
        return self._shares(noisy=False).detach()

    def route(self, to: Route | None) -> None:
        """Fix π, or let it be learnt again. A fixed route is in the state dict; θ then gets no gradient.

        In distributed training θ gets a gradient of zeros instead, because ``DistributedDataParallel`` waits for
        one.

        Args:
            to: index of a cluster, for its one-hot; shares of all C clusters; or None, to learn π.

        Raises:
            ConfigError: if there is no such cluster, or the shares are not C numbers >= 0 that sum to 1.
        """
        self._route = None if to is None else parse_route(to, self.clusters)

    def merge(self, pi: Route | None = None) -> nn.Module:
        """Copy the base as a plain module with the mixture in its weights; shared weights stay shared.

        Args:
            pi: index of a cluster, or shares of all C clusters; by default the current :attr:`pi`.

        Returns:
            The copy, which computes the same function as this module without noise. If BatchNorm adaptors have
            their own statistics, this holds in evaluation mode only.
        """
        shares = self.pi if pi is None else self.theta.new_tensor(parse_route(pi, self.clusters))
        with torch.no_grad():
            weights = self._weights()
            mixed_weights = mix_weights(
                weights, self._offsets(self.adapted()), shares, self.alpha, self.construction
            )
            merged_module = copy_module(self.base)
            for name, p in merged_module.named_parameters():
                if name in mixed_weights:
                    p.copy_(mixed_weights[name])
        return merged_module

    def adapted(self) -> Adaptors:
        """The adaptors by name of the parameter: low-rank updates, or offsets ``[C, ...]``.

        The tensors are the parameters themselves, not copies.
        """
        adaptors: Adaptors = {}
        for name in self._adapted:
            node = get_submodule(self.adaptors, name)
            adaptors[name] = (
                Pairs(node.u, node.v) if isinstance(node, LowRankAdaptor) else cast(Tensor, node.offset)
            )
        return adaptors

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: θ has the router's learning rate and no weight decay."""
        other_parameters = [p for p in self.parameters() if p.requires_grad and p is not self.theta]
        return [
            {"params": other_parameters},
            {"params": [self.theta], "lr": self.router.lr, "weight_decay": 0.0},
        ]

    def parameter_budget(self) -> ParameterBudget:
        """The parameters that adaptors add, for each adapted parameter; it prints as a table."""
        return compute_budget(self.base, self._adapted, self.clusters)

    @torch.no_grad()
    def precondition_(self, eps: float = EPS) -> None:
        """Precondition the gradients of low-rank updates in place (appendix D); gradients that are None stay None.

        Call it once between ``backward()`` and ``step()``, before clipping; or register it once as a hook:
        ``optimizer.register_step_pre_hook(lambda *_: model.precondition_())``.

        Args:
            eps: ε of the preconditioner.
        """
        pairs = {
            n: a
            for n, a in self.adapted().items()
            if isinstance(a, Pairs) and not (a.u.grad is a.v.grad is None)
        }
        gradients: Adaptors = {n: Pairs(_gradient(a.u), _gradient(a.v)) for n, a in pairs.items()}
        for name, direction in precondition_adaptors(self._weights(), gradients, dict(pairs), eps).items():
            for p, g in (
                (pairs[name].u, cast(Pairs, direction).u),
                (pairs[name].v, cast(Pairs, direction).v),
            ):
                if p.grad is not None:
                    p.grad.copy_(g)

    @torch.no_grad()
    def center_(self, weights: Sequence[float] | Tensor | None = None) -> None:
        """Move the mean adaptor into the base (appendix E).

        The merged model of every mixture is unchanged except for the parts that exceed the rank (offsets are
        exact). For frozen parameters, adaptors keep only the residual.

        Args:
            weights: weights p(c) of the mean, C numbers that sum to 1; by default all equal.

        Raises:
            TaskError: if every adapted parameter is frozen.
            ConfigError: if the weights are not C numbers that sum to 1.
        """
        p = parse_route([1 / self.clusters] * self.clusters if weights is None else weights, self.clusters)
        base, adaptors = self._weights(), self.adapted()
        trainable_adaptors = {
            name: a for name, a in self._offsets(adaptors).items() if base[name].requires_grad
        }
        if not trainable_adaptors:
            raise TaskError("there is nothing to center: every adapted parameter of the base is frozen")
        centered_base, residual = center_adaptors(
            base, trainable_adaptors, self.theta.new_tensor(p), self.alpha, self.construction
        )
        for layer, node, _ in self._norms():
            gamma, beta = self._norms_with_statistics[layer]
            if gamma in residual and beta in residual:
                bn, g, b = self._layer(layer), cast(Tensor, residual[gamma]), cast(Tensor, residual[beta])
                residual[gamma], residual[beta] = reparameterize(
                    g, b, main_statistics(bn), node.statistics, bn.eps
                )
        for name, a in residual.items():
            base[name].copy_(centered_base[name])
            adaptor = adaptors[name]
            if isinstance(adaptor, Pairs) and isinstance(a, Pairs):
                adaptor.u.copy_(a.u)
                adaptor.v.copy_(a.v)
            else:
                cast(Tensor, adaptor).copy_(cast(Tensor, a))

    def get_extra_state(self) -> Tensor:
        """The settings by which the adaptors are mixed and the fixed route ``[4 + C]``, a tensor like all other states.

        The settings are α, the index of the construction, the temperature, and top (0 for None). Without a fixed route
        its entries are NaN.
        """
        route = [math.nan] * self.clusters if self._route is None else self._route
        return torch.tensor([*self._mixing_settings().values(), *route], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Set the fixed route of :meth:`get_extra_state`; a state on the meta device or of integers sets nothing.

        Raises:
            ConfigError: if the state has another number of entries, or was made with other settings, under which its
                adaptors give another model.
        """
        if not is_readable(state):
            return
        settings = self._mixing_settings()
        if state.shape != (size := (len(settings) + self.clusters,)):
            raise ConfigError(
                f"the state's _extra_state has the shape {[*state.shape]}, but this model with num_clusters={self.clusters} "
                f"needs {[*size]}: {len(settings)} settings and the route. The state is of a model with another num_clusters, "
                "or another version of fedlowrank saved it"
            )
        for (name, own_value), value in zip(settings.items(), state, strict=False):
            if not is_same_setting(value, own_value):
                raise ConfigError(
                    f"the state is of a model with another {name} ({float(value):g}; this model has {own_value:g}), so its "
                    "adaptors would give another model here. Make this model with the settings of that one"
                    + (f"; the constructions are numbered {CONSTRUCTIONS}" if name == "construction" else "")
                )
        route = state[len(settings) :].tolist()
        self._route = None if math.isnan(route[0]) else route

    def extra_repr(self) -> str:
        """The settings that the submodules do not show."""
        settings = f"clusters={self.clusters}, alpha={self.alpha}, construction={self.construction!r}"
        return f"{settings}, router={self.router}"

    def _shares(self, noisy: bool) -> Tensor:
        if self._route is not None:
            fixed_route = self.theta.new_tensor(self._route)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # a gradient of zeros: DistributedDataParallel needs a gradient of every parameter
                return torch.where(torch.ones_like(fixed_route, dtype=torch.bool), fixed_route, self.theta)
            return fixed_route
        if self.router.routing == "optimal":
            raise TaskError(
                "the router's routing is 'optimal', but no route is set; call route(cluster) first"
            )
        if not noisy or self.router.noise == 0:
            return self.router.shares(self.theta)
        # drawn from torch's CPU generator, whose state activation checkpointing restores before it recomputes
        key = Key((int(torch.randint(2**62, ())),))
        return self.router.shares(self.theta + self.router.noises(key, 1, self.theta)[0])

    def _mixing_settings(self) -> dict[str, float]:
        """The settings that the state's tensors depend on, as numbers."""
        return {
            "alpha": self.alpha,
            "construction": CONSTRUCTIONS.index(self.construction),
            "router.temperature": self.router.temperature,
            "router.top": self.router.top or 0,
        }

    def _weights(self) -> Params:
        tensors = named_tensors(self.base)
        return {name: tensors[name] for name in self._adapted}

    def _layer(self, name: str) -> _BatchNorm:
        return cast(_BatchNorm, get_submodule(self.base, name))

    def _norms(self) -> Iterator[tuple[str, BatchNormAdaptor, Tensor]]:
        """The adapted BatchNorm layers with statistics for each adaptor: name, γ_c with the statistics, β_c."""
        for layer, (gamma, beta) in self._norms_with_statistics.items():
            node, beta_node = (get_submodule(self.adaptors, name) for name in (gamma, beta))
            yield layer, cast(BatchNormAdaptor, node), cast(Tensor, beta_node.offset)

    def _offsets(self, original_adaptors: Adaptors) -> Adaptors:
        """Convert each BatchNorm's adaptors to offsets of γ and β, by the current statistics; others are unchanged."""
        adaptors = dict(original_adaptors)
        for layer, node, beta in self._norms():
            bn = self._layer(layer)
            offsets = as_offsets(node.offset, beta, main_statistics(bn), node.statistics, bn.eps)
            adaptors.update(zip(self._norms_with_statistics[layer], offsets, strict=True))
        return adaptors

    def _add_term(
        self,
        node: BatchNormAdaptor,
        beta: Tensor,
        pi: Tensor,
        layer: _BatchNorm,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Tensor:
        x = args[0] if args else kwargs["input"]
        return torch.add(
            output, node.term(x, beta, pi, layer, layer.training).to(output.dtype), alpha=self.alpha
        )


def _check_settings(
    model: nn.Module,
    rank: float,
    rank_pattern: Mapping[str, float],
    num_clusters: int,
    alpha: float,
    router: Router,
    include: Any,
    exclude: Any,
) -> None:
    if not isinstance(model, nn.Module):
        raise TaskError(f"Floral wraps an nn.Module; it was given {type(model).__name__}")
    for argument, predicate in (("include", include), ("exclude", exclude)):
        if predicate is not None and not callable(predicate):
            raise ConfigError(
                f"Floral.{argument} must be a function of a layer's name and the layer; it is {predicate!r}. For a "
                f"list of names write {argument}=lambda name, layer: name in {predicate!r}"
            )
    check_ranks_or_budgets("Floral", rank, rank_pattern)
    check_minimum("Floral.num_clusters", num_clusters, 1)
    if not 0 < alpha < math.inf:
        raise ConfigError(f"Floral.alpha must be > 0; it is {alpha}")
    if router.update != "gradient":
        raise ConfigError(
            f"router: update = {router.update!r} needs the losses of all clusters after every round, which a "
            "plain loop does not have; use 'gradient', or route(shares)"
        )


def _complete_ties(model: Floral, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give all names of a tied weight the entry of one of them, if a state that is loaded does not have the others."""
    for tied_names in model._tied_names:
        names = [f"{prefix}base.{name}" for name in tied_names]
        entries = [state[name] for name in names if name in state]
        for name in names if entries else ():
            state.setdefault(name, entries[0])


def _restore_ties(model: Floral, _: Any) -> None:
    """Share tied weights again after ``load_state_dict(assign=True)``, which gives each layer a parameter of its own.

    Raises:
        TaskError: if their values differ.
    """
    for names in model._tied_names:
        paths = [name.rpartition(".") for name in names]
        slots = [(get_submodule(model.base, path)._parameters, attribute) for path, _, attribute in paths]
        shared_parameter, *others = (cast(Tensor, table[attribute]) for table, attribute in slots)
        for name, parameter in zip(names[1:], others, strict=True):
            if parameter is not shared_parameter and not torch.equal(parameter, shared_parameter):
                raise TaskError(
                    f"{names[0]} and {name} are one parameter of the base, but the loaded state has two values. Load it "
                    "without assign=True, or make both entries equal"
                )
        for table, attribute in slots:
            table[attribute] = cast(nn.Parameter, shared_parameter)


def _is_included(include: Include | None, exclude: Include | None, name: str, layer: nn.Module) -> bool:
    return (include is None or include(name, layer)) and not (exclude is not None and exclude(name, layer))


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
