"""Losses against ``torch.nn.functional`` and formulas: values, gradients, parts of a batch, padding, settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlowrank import Batch, Loss, task_loss
from fedlowrank.core.errors import ConfigError, LossError
from fedlowrank.core.learning.losses import as_loss

WEIGHTS = (0.5, 2.0, 1.0)
W = torch.tensor(WEIGHTS, dtype=torch.float64)
POSITIVE = (3.0, 0.5, 1.0)
P = torch.tensor(POSITIVE, dtype=torch.float64)


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    y = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        y.view(-1)[::4] = ignored
    return y


def reals(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def zeros_and_ones(*shape: int) -> Tensor:
    return (reals(*shape) > 0).double()


def focal(scores: Tensor, y: Tensor) -> Tensor:
    """-Σ w (1 - p)^1.5 log p / Σ w, with the probability p of each label."""
    p = scores.softmax(1).gather(1, y[:, None])[:, 0]
    return -(W[y] * (1 - p) ** 1.5 * p.log()).sum() / W[y].sum()


def binary_focal(scores: Tensor, y: Tensor) -> Tensor:
    p = torch.where(y == 1, scores.sigmoid(), 1 - scores.sigmoid())
    return (-((1 - p) ** 2) * p.log() * torch.where(y == 1, P, 1.0)).mean()


def next_token(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100)


CASES: dict[str, tuple[Loss, tuple[int, ...], Tensor, Any]] = {
    "auto": (Loss(), (7, 3), labels(7), F.cross_entropy),
    "cross_entropy": (Loss("cross_entropy"), (7, 3), labels(7), F.cross_entropy),
    "weights": (
        Loss("cross_entropy", class_weights=WEIGHTS, label_smoothing=0.2),
        (7, 3),
        labels(7),
        lambda s, y: F.cross_entropy(s, y, W, label_smoothing=0.2),
    ),
    "ignored examples": (
        Loss("cross_entropy", ignore_index=9, class_weights=WEIGHTS),
        (7, 3),
        labels(7, ignored=9),
        lambda s, y: F.cross_entropy(s, y, W, ignore_index=9),
    ),
    "pixels": (
        Loss("cross_entropy", ignore_index=255, class_weights=WEIGHTS, label_smoothing=0.1),
        (7, 3, 2, 4),
        labels(7, 2, 4, ignored=255),
        lambda s, y: F.cross_entropy(s, y, W, ignore_index=255, label_smoothing=0.1),
    ),
    "tokens": (
        Loss("cross_entropy"),
        (7, 5, 3),
        labels(7, 5, ignored=-100),
        lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
    ),
    "next_token": (Loss("next_token"), (7, 5, 3), labels(7, 5, ignored=-100), next_token),
    "bce": (Loss("bce"), (7, 3), zeros_and_ones(7, 3), F.binary_cross_entropy_with_logits),
    "bce of one output": (
        Loss("bce", pos_weight=3.0),
        (7, 1),
        zeros_and_ones(7, 1),
        lambda s, y: F.binary_cross_entropy_with_logits(s, y, pos_weight=P[:1]),
    ),
    "bce of pixels": (
        Loss("bce", pos_weight=POSITIVE),
        (7, 3, 2, 2),
        zeros_and_ones(7, 3, 2, 2),
        lambda s, y: F.binary_cross_entropy_with_logits(s, y, pos_weight=P[:, None, None]),
    ),
    "mse": (Loss("mse"), (7, 3, 2), reals(7, 3, 2), F.mse_loss),
    "huber": (
        Loss("huber", delta=0.5),
        (7, 3),
        reals(7, 3),
        lambda s, y: F.huber_loss(s, y, delta=0.5),
    ),
    "focal": (Loss("focal", gamma=1.5, class_weights=WEIGHTS), (7, 3), labels(7), focal),
    "focal at 0": (Loss("focal", gamma=0), (7, 3), labels(7), F.cross_entropy),
    "binary focal": (Loss("focal", pos_weight=POSITIVE), (7, 3), zeros_and_ones(7, 3), binary_focal),
    "own": (
        as_loss(lambda s, y: (s[:, 0] - y) ** 4),
        (7, 3),
        labels(7),
        lambda s, y: ((s[:, 0] - y) ** 4).mean(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_a_batch_is_that_of_torch(name: str) -> None:
    loss, shape, y, wanted = CASES[name]
    scores = (3 * reals(*shape)).requires_grad_()
    batch = Batch(None, y, loss=loss)
    value, expected = task_loss(scores, batch), wanted(scores, y)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    (grad,), (right,) = torch.autograd.grad(value, scores), torch.autograd.grad(expected, scores)
    torch.testing.assert_close(grad, right, rtol=1e-6, atol=1e-9)
    # two clients of one batch, the second with one example of padding
    both = torch.cat([scores, scores.flip(0)])
    mask = torch.tensor([True] * len(y) + [True] * (len(y) - 1) + [False])
    two = task_loss(both, Batch(None, torch.cat([y, y.flip(0)]), mask, client_count=2, loss=loss))
    short = wanted(scores[1:], y[1:])
    torch.testing.assert_close(two, torch.stack([expected, short]), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in CASES if n != "own"])
def test_a_loss_of_scores_in_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    loss, shape, y, wanted = CASES[name]
    y = y.to(dtype).float() if y.is_floating_point() else y
    scores = (3 * reals(*shape)).to(dtype).requires_grad_()
    exact = scores.detach().double().requires_grad_()
    value, expected = (
        task_loss(scores, Batch(None, y, loss=loss)),
        wanted(exact, y.double() if y.is_floating_point() else y),
    )
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=1e-6)
    (grad,), (right,) = torch.autograd.grad(value, scores), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(grad.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_of_scores_in_full_precision_are_those_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    y, scores = labels(7, 5, ignored=-100), reals(7, 5, 3).to(dtype)
    text, place = (y[:, 1:] >= 0).nonzero(as_tuple=True)
    actual = F.cross_entropy(scores[text, place], y[:, 1:][text, place], reduction="none")
    sums = torch.zeros(7, 4, dtype=dtype).index_put((text, place), actual).sum(1)
    assert torch.equal(Loss("next_token").each(scores, y), sums / (y[:, 1:] >= 0).sum(1).clamp(min=1))
    assert torch.equal(
        Loss().each(scores[:, 0], y[:, 1].abs() % 3),
        F.cross_entropy(scores[:, 0], y[:, 1].abs() % 3, reduction="none"),
    )


def test_a_batch_of_which_no_label_counts_has_no_loss() -> None:
    y = torch.full((3,), -100)
    scores = torch.zeros(3, 2, requires_grad=True)
    value = task_loss(scores, Batch(None, y, loss=Loss("cross_entropy")))
    assert value.item() == 0
    assert not torch.autograd.grad(value, scores)[0].any()


def test_an_example_that_is_certain_has_a_finite_gradient() -> None:
    scores = torch.tensor([[90.0, -90.0]], requires_grad=True)
    for loss, y in (
        (Loss("focal", gamma=0.5), torch.tensor([0])),
        (Loss("focal", gamma=0.5), torch.tensor([[1.0, 0.0]])),
    ):
        value = task_loss(scores, Batch(None, y, loss=loss))
        assert torch.autograd.grad(value, scores)[0].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "focl"}, "there is no loss 'focl'. Did you mean 'focal'.*'module:function'"),
        ({"gamma": 1.0}, "loss.gamma = 1.0 does nothing with loss.kind = 'auto': set loss.kind to 'focal'"),
        ({"kind": "mine:f", "gamma": 1.0}, "loss.gamma = 1.0 does nothing with loss.kind = 'mine:f'"),
        ({"kind": "huber", "class_weights": [1, 2]}, "set loss.kind to 'cross_entropy' or 'focal'"),
        ({"kind": "focal", "label_smoothing": 0.1}, "set loss.kind to 'cross_entropy'"),
        ({"kind": "focal", "gamma": -1}, "gamma must be >= 0"),
        ({"kind": "huber", "delta": 0}, "delta must be > 0"),
        ({"kind": "cross_entropy", "label_smoothing": 2}, "label_smoothing must be >= 0 and <= 1"),
        ({"kind": "cross_entropy", "class_weights": [0, 0]}, "class_weights must be at least 0"),
        ({"kind": "bce", "pos_weight": [1.0, 0.0]}, "pos_weight must be above 0"),
        ({"kind": "bce", "weight": 1.0}, "Loss has no argument 'weight'"),
    ],
)
def test_settings_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(**fields)


def test_weights_may_be_tensors() -> None:
    assert Loss("focal", class_weights=torch.tensor([1.0, 2.0])).class_weights == (1.0, 2.0)
    assert Loss("bce", pos_weight=torch.tensor([4.0])).pos_weight == (4.0,)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (F.cross_entropy, r"gave a tensor \[\] for 7 examples.*Leave out the mean"),
        (lambda s, y: s, r"gave a tensor \[7, 3\].*flatten\(1\).mean\(1\)"),
        (lambda s, y: 1.0, "gave a float"),
    ],
)
def test_a_function_gives_one_number_an_example(function: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        task_loss(reals(7, 3), Batch(None, labels(7), loss=as_loss(function)))


def test_a_loss_is_a_name_a_table_or_a_function() -> None:
    assert as_loss("bce") == as_loss({"kind": "bce"}) == Loss("bce")
    for wrong in (3, torch.nn.CrossEntropyLoss):
        with pytest.raises(ConfigError, match="loss must be a name such as 'focal'"):
            as_loss(wrong)
