"""Optimizers as values: update rules for a gradient, with a learning rate that may change from round to round.

The update rules are those of ``torch.optim.SGD`` and ``torch.optim.AdamW``. They work in place on lists of tensors,
so that a pass over local data needs no optimizer object, and on tensors with a leading client axis, so that many
clients can step together. Engines pass in float32 copies of half-precision parameters and round them after the step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from ..arguments.bounds import check_minimum
from ..arguments.field_checks import CheckedFields
from ..arguments.switch import Switch, check_switch
from ..errors import ConfigError
from ..tree import tree_dataclass


@dataclass(frozen=True)
class Schedule(CheckedFields):
    """How the learning rate changes from round to round; within a round, :class:`LocalSchedule` changes it.

    Attributes:
        kind: kind of the schedule: constant; exponential: ``factor ** round``; step: ``factor ** (round // every)``;
            cosine: from 1 to ``floor`` in ``rounds`` rounds by half a cosine, then ``floor``.
        factor: factor of the kinds exponential and step.
        every: number of rounds between two changes, for the kind step.
        rounds: number of rounds until ``floor``, for the kind cosine, which needs it.
        floor: lowest share of the learning rate, for the kind cosine.
        warmup: number of rounds of linear growth from ``1 / (warmup + 1)`` before the schedule begins.
    """

    kind: Literal["constant", "exponential", "step", "cosine"] = "constant"
    factor: float = 1.0
    every: int = 1
    rounds: int | None = None
    floor: float = 0.0
    warmup: int = 0

    switch: ClassVar[Switch] = Switch(
        "kind",
        {"factor": ("exponential", "step"), "every": ("step",), "rounds": ("cosine",), "floor": ("cosine",)},
    )

    def __post_init__(self) -> None:
        _check_schedule(self, "schedule", "rounds")
        if self.kind == "cosine" and self.rounds is None:
            raise ConfigError(
                "schedule.kind = 'cosine' needs schedule.rounds, the number of rounds until schedule.floor: set it, such as "
                "to the run.rounds of the run"
            )

    def scale(self, round: int) -> float:
        """Factor on the learning rate in a round, counted from 0."""
        return _scale(self, round, self.rounds or 1)

    def is_over(self, round: int, steps: int | None = None) -> bool:
        """Whether the learning rate has fallen to 0 by this round, counted from 0, and stays 0; ``steps`` is not read."""
        del steps
        return self.rounds is not None and self.floor == 0 and round >= self.warmup + self.rounds


@dataclass(frozen=True)
class LocalSchedule(CheckedFields):
    """How the learning rate changes over the local steps of a pass; it begins again in every round, or continues for ``rounds``.

    The factor multiplies that of :class:`Schedule` and is the same for all parameters.

    Attributes:
        kind: kind of the schedule: constant; exponential: ``factor ** step``; step: ``factor ** (step // every)``;
            cosine: from 1 to ``floor`` by half a cosine, then ``floor``; linear: from 1 to ``floor`` on a line, then
            ``floor``. The kinds follow ``torch.optim.lr_scheduler``, with a step of the schedule after each step of
            the optimizer.
        factor: factor of the kinds exponential and step.
        every: number of local steps between two changes, for the kind step.
        steps: number of local steps until ``floor``, for the kinds cosine and linear; None for the steps of the
            client's pass after the warm-up, so that the learning rate falls faster for clients with fewer examples.
        floor: lowest share of the learning rate, for the kinds cosine and linear.
        warmup: number of local steps of linear growth from ``1 / (warmup + 1)`` before the schedule begins.
        rounds: number of rounds over which the schedule continues, as that of a trainer over a whole run; None to
            begin again in every round. Its progress follows the round, however often the client took part.
    """

    kind: Literal["constant", "exponential", "step", "cosine", "linear"] = "constant"
    factor: float = 1.0
    every: int = 1
    steps: int | None = None
    floor: float = 0.0
    warmup: int = 0
    rounds: int | None = None

    switch: ClassVar[Switch] = Switch(
        "kind",
        {
            "factor": ("exponential", "step"),
            "every": ("step",),
            "steps": ("cosine", "linear"),
            "floor": ("cosine", "linear"),
        },
    )

    def __post_init__(self) -> None:
        _check_schedule(self, "local_schedule", "steps")
        if self.rounds is not None:
            check_minimum("local_schedule.rounds", self.rounds, 1)
        if self.rounds is not None and self.is_constant:
            raise ConfigError(
                f"local_schedule.rounds = {self.rounds} does nothing where the learning rate is constant: set "
                "local_schedule.kind, such as cosine, or local_schedule.warmup"
            )

    @property
    def is_constant(self) -> bool:
        """Whether the schedule leaves every learning rate unchanged."""
        return self.kind == "constant" and not self.warmup

    @property
    def depends_on_total(self) -> bool:
        """Whether clients with different numbers of steps have different learning rates."""
        return self.kind in ("cosine", "linear") and self.steps is None

    def scale(self, step: int, total: int, round: int = 0) -> float:
        """Factor on the learning rate at a step.

        Args:
            step: index of the step in the pass, from 0.
            total: number of steps of the pass.
            round: index of the round, from 0.
        """
        if self.rounds is not None:
            step, total = round * total + step, self.rounds * total
        return _scale(self, step, max(1, total - self.warmup) if self.steps is None else self.steps)

    def is_over(self, round: int, steps: int | None = None) -> bool:
        """Whether the learning rate has fallen to 0 by this round and stays 0.

        Args:
            round: index of the round, from 0.
            steps: number of steps of the pass in a round; without it, a schedule whose end is a number of steps counts as
                not over.
        """
        if self.rounds is None or self.floor or self.kind not in ("cosine", "linear"):
            return False
        if self.steps is None:
            return round >= self.rounds
        return steps is not None and round * steps >= self.warmup + self.steps


def _check_schedule(schedule: Schedule | LocalSchedule, title: str, length: str) -> None:
    """Refuse numbers out of range, fields that the kind does not read, and a factor that changes nothing.

    Args:
        schedule: schedule to check in its ``__post_init__``.
        title: title of the setting.
        length: name of the field that holds the duration until ``floor``.
    """
    s, duration = schedule, getattr(schedule, length)
    is_long = duration is None or duration >= 1
    if not (0 < s.factor < math.inf and s.every >= 1 and is_long and 0 <= s.floor <= 1 and s.warmup >= 0):
        raise ConfigError(
            f"{title}: factor must be > 0, every and {length} >= 1, floor within [0, 1] and warmup >= 0; "
            f"they are {s.factor}, {s.every}, {duration}, {s.floor} and {s.warmup}"
        )
    check_switch(s, s.switch, title)
    if s.kind in ("exponential", "step") and s.factor == 1:
        raise ConfigError(
            f"{title}.factor = {s.factor} with {title}.kind = {s.kind!r} changes no learning rate: set "
            f"{title}.factor, such as 0.99, or leave the schedule out"
        )


def _scale(schedule: Schedule | LocalSchedule, step: int, length: int) -> float:
    """Factor on the learning rate at a round or step, from 0; after the warm-up, ``floor`` is reached in ``length`` of them."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    t = step - schedule.warmup
    if schedule.kind == "exponential":
        return schedule.factor**t
    if schedule.kind == "step":
        return schedule.factor ** (t // schedule.every)
    progress = min(t / length, 1.0)
    if schedule.kind == "cosine":
        return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * progress)) / 2
    return 1 - (1 - schedule.floor) * progress if schedule.kind == "linear" else 1.0


@tree_dataclass
class OptimizerState:
    """State of an optimizer for the parameters of a pass.

    Attributes:
        slots: trees like the parameters, in float32 for half precision: the momentum, or the running means of
            gradients and of their squares. A parameter that has taken no step has an empty entry.
        step_counts: number of steps of each parameter, as :meth:`_Optimizer.count_kept` counts them.
    """

    slots: list[Any]
    step_counts: list[int]


@dataclass(frozen=True)
class Group(CheckedFields):
    """Settings for some of the parameters that differ from the optimizer's.

    Attributes:
        lr: learning rate, or None for the optimizer's.
        weight_decay: weight decay, or None for the optimizer's.
    """

    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of each tensor in a list."""

    lr: list[float]
    weight_decay: list[float]


class _Optimizer(CheckedFields):
    """Base class of SGD and AdamW: their common settings and learning rates."""

    lr: float
    weight_decay: float
    clip: float | None
    schedule: Schedule
    groups: Mapping[str, Group]
    keep: bool
    local_schedule: LocalSchedule

    def count_kept(self, steps: int) -> int:
        """Reduce the number of steps taken to what the next step depends on, for a kept state."""
        return steps

    def rates(self, paths: Sequence[str], round: int) -> Rates:
        """Learning rate and weight decay of each parameter in a round.

        Args:
            paths: JSON pointer of each parameter in the tree that is trained (``/router/theta``).
            round: index of the round, from 0.

        Raises:
            ConfigError: if a group matches no parameter.
        """
        scale = self.schedule.scale(round)
        groups = [self._group(path) for path in paths]
        unused_names = set(self.groups) - {name for name, _ in groups}
        if unused_names:
            tops = sorted({p.split("/")[1] for p in paths if "/" in p})
            raise ConfigError(
                f"optimizer.groups: {sorted(unused_names)} match no parameter; the tree begins with {tops}"
            )
        return Rates(
            [scale * (self.lr if g.lr is None else g.lr) for _, g in groups],
            [self.weight_decay if g.weight_decay is None else g.weight_decay for _, g in groups],
        )

    def learning_rate(self, round: int) -> float:
        """Learning rate of parameters outside every group in a round, counted from 0, before the local schedule."""
        return self.lr * self.schedule.scale(round)

    def total_rate(self, round: int, steps: int) -> float:
        """Sum of the learning rates over all local steps of a pass, for parameters outside every group."""
        if self.local_schedule.is_constant:
            return steps * self.learning_rate(round)
        return self.learning_rate(round) * sum(
            self.local_schedule.scale(t, steps, round) for t in range(steps)
        )

    def _group(self, path: str) -> tuple[str | None, Group]:
        parts = path.split("/")[1:]
        best: tuple[str | None, Group] = (None, Group())
        depth = 0
        for name, group in self.groups.items():
            prefix = name.split("/")
            # whole components only: the role of a parameter never comes from a substring of its name
            if parts[: len(prefix)] == prefix and len(prefix) > depth:
                best, depth = (name, group), len(prefix)
        return best

    def _check(self) -> None:
        rates = {"lr": self.lr, "weight_decay": self.weight_decay}
        for name, group in self.groups.items():
            rates |= {
                f"groups.{name}.lr": group.lr or 0.0,
                f"groups.{name}.weight_decay": group.weight_decay or 0.0,
            }
        invalid_names = [n for n, v in rates.items() if not 0 <= v < math.inf]
        if self.clip is not None and not self.clip > 0:
            invalid_names.append("clip")
        if self.clip == math.inf:
            # the word of a file, which has no None
            object.__setattr__(self, "clip", None)
        if invalid_names:
            raise ConfigError(
                f"optimizer: {', '.join(invalid_names)} out of range; rates must be finite and not negative, clip > 0; "
                f"got {self}"
            )

    @abstractmethod
    def step(
        self, params: list[Tensor], grads: list[Tensor], memory: list[list[Tensor]], rates: Rates, count: int
    ) -> None:
        """Update ``params`` in place.

        Args:
            params: parameters to update.
            grads: gradients of the parameters, left unchanged (autograd may return one tensor for two parameters).
            memory: lists of tensors kept from step to step; empty at the first step.
            rates: learning rate and weight decay of each parameter.
            count: number of steps taken before in this pass.
        """


@dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``.

    Attributes:
        lr: learning rate.
        momentum: factor on the running sum of gradients, which is reset at the start of every pass unless it is kept.
        weight_decay: multiple of the parameters added to their gradient.
        nesterov: whether to use Nesterov momentum.
        clip: upper bound on the norm of the whole gradient; None, or infinity (``inf`` in a file), for no clipping.
        schedule: change of the learning rate from round to round.
        groups: settings of parts of the tree, by path (``router`` or ``adapters/fc1``).
        keep: whether each client keeps the momentum of every pass from round to round, as one ``torch.optim.SGD`` for
            all rounds would; otherwise it is 0 at the start of every pass. The momentum includes all terms that a
            method adds to the gradient.
        local_schedule: change of the learning rate over the local steps of a pass.
        kind: always ``sgd``.
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip: float | None = None
    schedule: Schedule = Schedule()
    groups: Mapping[str, Group] = field(default_factory=dict)
    keep: bool = False
    local_schedule: LocalSchedule = LocalSchedule()
    kind: Literal["sgd"] = "sgd"

    def __post_init__(self) -> None:
        self._check()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum must lie in [0, 1); it is {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov needs a momentum > 0")
        if self.keep and self.momentum == 0:
            raise ConfigError(
                "optimizer.keep = true does nothing without a momentum, for plain SGD keeps nothing: set "
                "optimizer.momentum, such as 0.9, or leave optimizer.keep out"
            )

    def count_kept(self, steps: int) -> int:
        """Return 1 if there was a step, else 0, because the momentum does not depend on their number."""
        return min(steps, 1)

    def step(
        self, params: list[Tensor], grads: list[Tensor], memory: list[list[Tensor]], rates: Rates, count: int
    ) -> None:
        """See the base class; ``memory`` holds the momentum."""
        if any(rates.weight_decay):
            grads = list(torch._foreach_add(grads, torch._foreach_mul(params, rates.weight_decay)))
        if self.momentum:
            if count == 0:
                memory.append([g.clone() for g in grads])
            else:
                torch._foreach_mul_(memory[0], self.momentum)
                torch._foreach_add_(memory[0], grads)
            ahead = torch._foreach_add(grads, memory[0], alpha=self.momentum) if self.nesterov else memory[0]
            grads = list(ahead)
        _add_scaled(params, grads, [-lr for lr in rates.lr])


@dataclass(frozen=True)
class AdamW(_Optimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    Attributes:
        lr: learning rate.
        beta1: decay of the running mean of gradients.
        beta2: decay of the running mean of squared gradients.
        eps: term added to the root of the running mean of squared gradients.
        weight_decay: weight decay; every step subtracts the share ``lr * weight_decay`` of each parameter.
        clip: upper bound on the norm of the whole gradient; None, or infinity (``inf`` in a file), for no clipping.
        schedule: change of the learning rate from round to round.
        groups: settings of parts of the tree, by path (``router`` or ``adapters/fc1``).
        keep: whether each client keeps the running means and the number of steps of every pass from round to round,
            as one ``torch.optim.AdamW`` for all rounds would; otherwise they are reset at the start of every pass.
            The running means include all terms that a method adds to the gradient.
        local_schedule: change of the learning rate over the local steps of a pass.
        kind: always ``adamw``.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float | None = None
    schedule: Schedule = Schedule()
    groups: Mapping[str, Group] = field(default_factory=dict)
    keep: bool = False
    local_schedule: LocalSchedule = LocalSchedule()
    kind: Literal["adamw"] = "adamw"

    def __post_init__(self) -> None:
        self._check()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 < self.eps < math.inf):
            raise ConfigError(
                f"optimizer: beta1 and beta2 must lie in [0, 1) and eps be > 0 and finite; got {self}"
            )

    def step(
        self, params: list[Tensor], grads: list[Tensor], memory: list[list[Tensor]], rates: Rates, count: int
    ) -> None:
        """See the base class; ``memory`` holds the two running means."""
        if count == 0:
            memory.extend([[torch.zeros_like(p) for p in params] for _ in range(2)])
        first, second = memory
        torch._foreach_mul_(
            params, [1 - lr * wd for lr, wd in zip(rates.lr, rates.weight_decay, strict=True)]
        )
        torch._foreach_lerp_(first, grads, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - self.beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1 - self.beta2 ** (count + 1)))
        torch._foreach_add_(root, self.eps)
        sizes = [-lr / (1 - self.beta1 ** (count + 1)) for lr in rates.lr]
        torch._foreach_addcdiv_(params, first, root, sizes)


def _kind(value: Any) -> str:
    kind = value.get("kind", "sgd") if isinstance(value, Mapping) else getattr(value, "kind", "")
    return str(kind)


class _ByKind:
    """Tells pydantic how to choose between the optimizers; pydantic is imported only if a file is read."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Discriminator, Tag

        tagged = Annotated[SGD, Tag("sgd")] | Annotated[AdamW, Tag("adamw")]
        return handler.generate_schema(Annotated[tagged, Discriminator(_kind)])


Optimizer = Annotated[SGD | AdamW, _ByKind()]
"""One of the optimizers above; ``kind`` selects it in a configuration file, with the default ``sgd``."""


def drop_groups(optimizer: Optimizer, frozen_paths: Sequence[str], trained_paths: Sequence[str]) -> Optimizer:
    """Leave out groups that match only parameters that a pass does not train, because another pass trains them.

    Args:
        optimizer: optimizer of both passes.
        frozen_paths: JSON pointers of the parameters that the pass does not train.
        trained_paths: those of the parameters that it trains.
    """
    matched_frozen, matched_trained = (
        {optimizer._group(path)[0] for path in paths} for paths in (frozen_paths, trained_paths)
    )
    groups = {n: g for n, g in optimizer.groups.items() if n not in matched_frozen - matched_trained}
    return replace(optimizer, groups=groups)


def refuse_keep(path: str, optimizer: Any, title: str, reason: str) -> None:
    """Refuse ``keep`` of an optimizer whose state a method cannot use in the next round.

    Args:
        path: path of the setting.
        optimizer: value of the setting; anything but an optimizer is accepted.
        title: title of the method.
        reason: reason why the method cannot use the state.

    Raises:
        ConfigError: if the optimizer keeps its state; the message names the setting and the reason.
    """
    if isinstance(optimizer, _Optimizer) and optimizer.keep:
        raise ConfigError(f"{title}: {path}.keep = true is refused, because {reason}. Leave {path}.keep out")


def clip(grads: list[Tensor], bound: float) -> list[Tensor]:
    """Scale gradients so that their joint norm is at most ``bound``."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    scaled_grads = torch._foreach_mul(grads, torch.clamp(bound / (norm + 1e-6), max=1.0))
    # the factor is float64 if a gradient is, which would widen gradients without axes
    return [scaled.to(g.dtype) for scaled, g in zip(scaled_grads, grads, strict=True)]


def _add_scaled(targets: list[Tensor], tensors: list[Tensor], scales: list[float]) -> None:
    """Compute ``targets += scales * tensors`` in place, in one call if all scales are equal."""
    if all(s == scales[0] for s in scales):
        if scales and scales[0] != 0:
            torch._foreach_add_(targets, tensors, alpha=scales[0])
    else:
        torch._foreach_add_(targets, torch._foreach_mul(tensors, scales))
