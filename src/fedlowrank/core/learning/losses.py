"""The loss that a task minimizes: a named loss with its options, or a function of the user.

A loss gives one number for each example, and a weight for each if its mean is no plain mean over examples. On one
batch the means equal those of ``torch.nn.functional`` with ``reduction="mean"``:

- ``cross_entropy``: over all labels that count, weighted by the weights of their classes, as PyTorch divides by the
  sum of these weights; labels of ``ignore_index`` do not count. If no label counts, the mean is 0, not NaN.
- ``focal``: for labels the same mean of -w_y (1 - p_y)^γ log p_y, so that γ = 0 is ``cross_entropy``; for real
targets
  the mean of the binary form over all entries, so that γ = 0 is ``bce`` (Lin et al. 2017, arXiv:1708.02002, eq. 5).
- ``bce``, ``mse``, ``huber``: over all entries of the targets. ``mse`` is ‖s - y‖²/d for d targets an example, where
  ``auto`` is ½ ‖s - y‖².
- ``next_token``: over all tokens that are predicted.
- ``dpo``, ``orpo``: over the pairs of responses; see :mod:`.preference_losses`.
- ``contrastive``: over the pairs of texts of a batch; see :mod:`.contrastive_losses`.
- a function of the user: over the examples.

Losses of half-precision scores are computed in float32; a function of the user receives the scores unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..arguments.bounds import check_bounds
from ..arguments.field_checks import CheckedFields
from ..arguments.switch import Switch, check_switch
from ..arguments.user_code import import_named
from ..errors import ConfigError, LossError, did_you_mean
from ..tree import wide_type
from .preference_losses import PREFERENCE_LOSSES, dpo_losses, mix_preferences, orpo_losses

IGNORE_INDEX = -100
"""Label that does not count in the loss, as in ``torch.nn.functional.cross_entropy``."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Function ``loss(scores, targets)`` that returns one number for each example, ``[b]``."""

KINDS: Mapping[str, str] = {
    "auto": "cross-entropy of labels, half the squared error of real targets, next token of texts",
    "cross_entropy": "of one label for each example, pixel or token",
    "next_token": "cross-entropy of each token given those before it, of language models",
    "bce": "binary cross-entropy of real targets in [0, 1]: several labels an example, or a score for each pixel",
    "mse": "mean squared error of real targets",
    "huber": "squared error up to delta, absolute error beyond",
    "focal": "cross-entropy, of real targets binary, with less weight on easy examples",
    "dpo": "direct preference optimization, of pairs of responses to one prompt",
    "contrastive": "each anchor finds its positive among those of its batch, of pairs of texts",
    "orpo": "odds ratio preference optimization, of pairs of responses to one prompt",
}
"""Losses by name."""

OF_LABELS = "cross_entropy", "next_token", "focal"
OF_REAL_TARGETS = "bce", "mse", "huber", "focal"
OF_BINARY_TARGETS = "bce", "focal"


@dataclass(frozen=True)
class Loss(CheckedFields):
    """The loss of a task; every method minimizes it, and every evaluation reports it.

    Attributes:
        kind: name of the loss: auto, cross_entropy, next_token, bce, mse, huber, focal, dpo, orpo or contrastive
            (:data:`KINDS`); or ``module:function`` of your own ``loss(scores, targets)``, which gives one number for
            each example ``[b]``.
        class_weights: weight of each class, for ``cross_entropy`` and ``focal``.
        label_smoothing: share of the target in [0, 1] that ``cross_entropy`` spreads evenly over the classes; for
            ``dpo`` the probability in [0, 0.5) that a pair is labeled the wrong way round.
        pos_weight: weight of positive targets for ``bce`` and ``focal``: one number, or one for each class (dimension
            1 of the targets).
        ignore_index: label that does not count, for ``cross_entropy`` and ``focal``.
        gamma: exponent γ ≥ 0 of ``focal``.
        delta: threshold δ > 0 of ``huber``.
        beta: coefficient β > 0 of ``dpo``, which sets how strongly the model is kept near its base.
        temperature: temperature τ > 0 of ``contrastive``, by which cosines are divided.
        odds_ratio_weight: weight λ ≥ 0 of the odds ratio in ``orpo`` beside the likelihood of the chosen response.

    Raises:
        ConfigError: if the kind does not exist, a number is out of range, or an option is set that the kind does not
            read.
    """

    kind: str = "auto"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    pos_weight: float | tuple[float, ...] | None = None
    ignore_index: int = IGNORE_INDEX
    gamma: float = 2.0
    delta: float = 1.0
    beta: float = 0.1
    odds_ratio_weight: float = 0.1
    temperature: float = 0.05

    switch: ClassVar[Switch] = Switch(
        "kind",
        {
            "class_weights": ("cross_entropy", "focal"),
            "label_smoothing": ("cross_entropy", "dpo"),
            "pos_weight": OF_BINARY_TARGETS,
            "ignore_index": ("cross_entropy", "focal"),
            "gamma": ("focal",),
            "delta": ("huber",),
            "beta": ("dpo",),
            "odds_ratio_weight": ("orpo",),
            "temperature": ("contrastive",),
        },
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not self.is_custom:
            raise ConfigError(
                f"loss.kind: there is no loss {self.kind!r}. {did_you_mean(self.kind, KINDS)} A function of your own is "
                "named 'module:function'."
            )
        check_switch(self, self.switch, "loss")
        bounds = {
            "gamma": ">= 0",
            "delta": "> 0",
            "beta": "> 0",
            "odds_ratio_weight": ">= 0",
            "temperature": "> 0",
        }
        smoothing = ">= 0 and < 0.5" if self.kind == "dpo" else ">= 0 and <= 1"
        check_bounds(self, {"label_smoothing": smoothing, **bounds}, "loss")
        weights = self.class_weights
        if weights is not None and (not weights or min(weights) < 0 or not max(weights) > 0):
            raise ConfigError(
                f"loss.class_weights must be at least 0, one of them above; they are {[*weights]}"
            )
        pos_weights = self.pos_weight if isinstance(self.pos_weight, tuple) else (self.pos_weight,)
        if any(w is not None and not w > 0 for w in pos_weights) or not pos_weights:
            raise ConfigError(f"loss.pos_weight must be above 0; it is {self.pos_weight!r}")

    @property
    def is_custom(self) -> bool:
        """Whether the loss is a function of the user."""
        return ":" in self.kind

    @property
    def function(self) -> LossFunction | None:
        """The user's function, once :func:`as_loss` or :meth:`with_function` has set it."""
        function: LossFunction | None = vars(self).get("_function")
        return function

    def with_function(self) -> Loss:
        """Return the loss with its function; a function of the user that is only named yet is imported, which runs its module.

        Raises:
            ConfigError: if the function cannot be imported or is no function.
        """
        if not self.is_custom or self.function is not None:
            return self
        return _with_function(self, import_named(self.kind, "loss"))

    @property
    def is_preference(self) -> bool:
        """Whether the loss compares the two responses of a pair."""
        return self.kind in PREFERENCE_LOSSES

    @property
    def couples(self) -> bool:
        """Whether the loss of an example depends on the other examples of its batch."""
        return self.kind == "contrastive"

    @property
    def compares_texts(self) -> bool:
        """Whether an example is a pair of texts without a class."""
        return self.is_preference or self.couples

    def mix_preferences(self, scores: Tensor, log_shares: Tensor) -> Tensor:
        """Scores of a mixture of preference models; see :func:`.preference_losses.mix_preferences`."""
        return mix_preferences(scores, log_shares, self.beta if self.kind == "dpo" else None)

    def predicts_tokens(self, y: Tensor) -> bool:
        """Whether scores predict the next token, so that they are shifted against the labels."""
        return self.kind == "next_token" or (self.kind == "auto" and y.ndim == 2 and _is_labels(y))

    def is_binary(self, y: Tensor) -> bool:
        """Whether every entry of the targets is a class of its own that is present or absent."""
        return self.kind in OF_BINARY_TARGETS and not _is_labels(y)

    def each(self, scores: Tensor, y: Tensor) -> Tensor:
        """Loss of each example ``[b]``, the mean over its labels or targets that count.

        Class weights multiply the losses, as in PyTorch with ``reduction="none"``.

        Args:
            scores: scores of a model; :func:`class_axis` gives the dimension of the classes.
            y: targets, as in :class:`fedlowrank.core.contract.task.Batch`.

        Raises:
            LossError: if a function of the user returns anything but a tensor ``[b]``.
            ConfigError: if a module of the user changes its buffers or parameters.
        """
        if self.is_custom:
            return self._own(scores, y)
        if self.couples:
            raise AssertionError("the loss of a pair needs its batch; see batch_losses.example_losses")
        if self.kind == "dpo":
            return dpo_losses(scores, y, self.beta, self.label_smoothing)
        if self.kind == "orpo":
            return orpo_losses(scores, y, self.odds_ratio_weight)
        if self.predicts_tokens(y):
            return _next_token(scores, y)
        if self.kind == "auto" and not _is_labels(y):
            return (scores - y).square().flatten(1).sum(1) / 2
        if self.kind == "auto" and y.ndim == 1:
            return functional.cross_entropy(_widen(scores), y, reduction="none")
        if not _is_labels(y):
            return self._of_real_targets(scores, y).flatten(1).mean(1)
        values = self._of_labels(scores, y)
        if y.ndim == 1:
            return values
        return values.flatten(1).sum(1) / (y != self.ignore_index).flatten(1).sum(1).clamp(min=1)

    def weigh(self, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Count the labels of each example that matter ``[b]``, and return their weights in the mean of a batch ``[b]``, too.

        The weight of an example is the sum of the class weights of these labels. None if all examples weigh 1. Texts
        whose next tokens are predicted are weighted by :attr:`fedlowrank.core.contract.task.Batch.weights`.
        """
        if (
            self.is_custom
            or self.compares_texts
            or not _is_labels(y)
            or self.predicts_tokens(y)
            or (y.ndim == 1 and self.kind == "auto")
        ):
            return None
        mask = y != self.ignore_index
        count = mask.reshape(len(y), -1).sum(1)
        if self.class_weights is None:
            return count, count
        class_weights = _constant(self.class_weights, torch.float32, y.device)
        weight = torch.where(mask, class_weights[y.where(mask, torch.zeros_like(y))], 0.0)
        return count, weight.reshape(len(y), -1).sum(1)

    def describe(self) -> dict[str, Any]:
        """Return the kind and the options that are not at their defaults, as JSON."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.init}
        return {
            name: value for name, (value, default) in values.items() if name == "kind" or value != default
        }

    def _of_labels(self, scores: Tensor, y: Tensor) -> Tensor:
        """Loss of each label, in the shape of the labels."""
        scores = _widen(scores)
        by_class = scores.movedim(class_axis(scores), 1)
        weight = (
            None if self.class_weights is None else _constant(self.class_weights, scores.dtype, scores.device)
        )
        is_focal = self.kind == "focal"
        values = functional.cross_entropy(
            by_class,
            y,
            None if is_focal else weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        if not is_focal:
            return values
        # 1 - p of the label, never 0: a power below 1 has no derivative at 0
        complement = (-torch.expm1(-values)).clamp(min=torch.finfo(values.dtype).tiny)
        focal = complement.pow(self.gamma) * values
        if weight is None:
            return focal
        return weight[y.where(y != self.ignore_index, torch.zeros_like(y))] * focal

    def _of_real_targets(self, scores: Tensor, y: Tensor) -> Tensor:
        """Loss of each entry of the targets."""
        scores = _widen(scores)
        if self.kind == "mse":
            return (scores - y).square()
        if self.kind == "huber":
            return functional.huber_loss(scores, y, reduction="none", delta=self.delta)
        pos_weight = None
        if self.pos_weight is not None:
            factors = self.pos_weight if isinstance(self.pos_weight, tuple) else (self.pos_weight,)
            pos_weight = _constant(factors, scores.dtype, scores.device).reshape(-1, *[1] * (y.ndim - 2))
        y = y.to(scores.dtype)
        if self.kind == "bce":
            return functional.binary_cross_entropy_with_logits(
                scores, y, pos_weight=pos_weight, reduction="none"
            )
        values = functional.binary_cross_entropy_with_logits(scores, y, reduction="none")
        complement = y * torch.sigmoid(-scores) + (1 - y) * torch.sigmoid(scores)
        focal = complement.clamp(min=torch.finfo(complement.dtype).tiny).pow(self.gamma) * values
        return focal if pos_weight is None else focal * (1 + (pos_weight - 1) * y)

    def _own(self, scores: Tensor, y: Tensor) -> Tensor:
        if self.function is None:
            raise AssertionError(f"the function {self.kind} is not imported")
        versions = _record_versions(self.function)
        try:
            losses: Any = self.function(scores, y)
        except IndexError as error:
            error.add_note(
                f"The loss {self.kind} is your own, so that it gets labels as they were given, and scores {[*scores.shape]}. If "
                "it counts classes from 0, number the labels so."
            )
            raise
        if changed_tensor := _find_changed_tensor(self.function, versions):
            raise ConfigError(
                f"the loss {self.kind} changes its {changed_tensor} when it is called. All clients and all evaluations call one "
                "loss, so the change would go from one to the next, and a resumed run would lose it. Compute it in the model's "
                "forward and keep it in a buffer of the model (register_buffer), of which each client has its own"
            )
        if not isinstance(losses, Tensor):
            raise LossError(
                f"the loss {self.kind} gave a {type(losses).__name__}; it must give a tensor [examples]"
            )
        if losses.shape != (len(y),):
            advice = {0: " Leave out the mean over examples (reduction='none').", 1: ""}.get(
                losses.ndim,
                " Take the mean over all but the first dimension, such as loss.flatten(1).mean(1).",
            )
            raise LossError(
                f"the loss {self.kind} gave a tensor {[*losses.shape]} for {len(y)} examples; it must give one number "
                f"for each example, [{len(y)}].{advice}"
            )
        return losses


def _record_versions(function: Any) -> dict[str, tuple[Tensor, int]]:
    """Record each parameter and buffer of a module, and how often it was changed in place; other functions have none."""
    if not isinstance(function, torch.nn.Module):
        return {}
    tensors = (
        *((f"parameter {n!r}", p) for n, p in function.named_parameters()),
        *((f"buffer {n!r}", b) for n, b in function.named_buffers()),
    )
    # inference tensors have no version
    return {n: (t, 0 if t.is_inference() else t._version) for n, t in tensors}


def _find_changed_tensor(function: Any, versions: Mapping[str, tuple[Tensor, int]]) -> str | None:
    """Find the first parameter or buffer of a module whose values have changed since its versions were recorded.

    A buffer that a first call makes, or moves to the device or type of the scores, is not one.
    """
    for name, (t, version) in _record_versions(function).items():
        former_tensor, former_version = versions.get(name, (t, version))
        is_same = former_tensor is t and former_version == version
        if not (is_same or (former_tensor is not t and torch.equal(former_tensor.to(t), t))):
            return name
    return None


AUTO = Loss()
"""The loss that follows from the targets."""


def as_loss(value: Any) -> Loss:
    """Convert a user's value to a loss: a loss, a name, a table of fields, or a function.

    Raises:
        ConfigError: if the value is none of these.
    """
    if isinstance(value, Loss):
        return value
    if isinstance(value, str):
        return Loss(value)
    if isinstance(value, Mapping):
        return Loss(**value)
    if callable(value) and not isinstance(value, type):
        inner = value.func if isinstance(value, functools.partial) else value
        definition = inner if hasattr(inner, "__qualname__") else type(inner)
        return _with_function(Loss(f"{definition.__module__}:{definition.__qualname__}"), value)
    raise ConfigError(
        f"loss must be a name such as 'focal', Loss(...) or a function loss(scores, targets), not {value!r}"
    )


def class_axis(scores: Tensor) -> int:
    """Dimension of scores that holds the classes.

    It is the last dimension for one label an example ``[b, C]`` and one label a token ``[b, T, C]``, and dimension 1
    for one label a pixel ``[b, C, H, W]``, as in PyTorch.
    """
    return 1 if scores.ndim > 3 else scores.ndim - 1


def _is_labels(y: Tensor) -> bool:
    return not y.is_floating_point()


def _next_token(scores: Tensor, y: Tensor) -> Tensor:
    """Mean over the tokens of each text that count; the scores at position t - 1 predict the token at t.

    On a CPU only the scores of tokens that count are used: answers to long questions have few, and over a large
    vocabulary the others take most of the memory and time of a loss. On a GPU, finding these tokens would wait for
    all earlier work.
    """
    targets = y[:, 1:]
    counts = targets != IGNORE_INDEX
    if finds_tokens(scores):
        text, position = counts.nonzero(as_tuple=True)
        losses = functional.cross_entropy(
            _widen(scores[text, position]), targets[text, position], reduction="none"
        )
        token_losses = losses.new_zeros(targets.shape).index_put((text, position), losses)
    else:
        token_losses = functional.cross_entropy(
            _widen(scores[:, :-1]).transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none"
        )
    return token_losses.sum(1) / counts.sum(1).clamp(min=1)


def _widen(scores: Tensor) -> Tensor:
    """Convert half-precision scores to float32, in which losses are computed; others are unchanged."""
    return scores.to(wide_type(scores.dtype))


def finds_tokens(scores: Tensor) -> bool:
    """Whether positions of tokens can be found without waiting for the device."""
    return scores.device.type == "cpu"


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert numbers to a tensor on a device, once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _with_function(loss: Loss, function: Any) -> Loss:
    """Attach a function of the user to its loss."""
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"loss: {loss.kind!r} is {function!r} and not a function loss(scores, targets)")
    loss_of_user = Loss(loss.kind)
    object.__setattr__(loss_of_user, "_function", function)
    return loss_of_user
