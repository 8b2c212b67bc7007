"""Rules for tensors of many clients against a loop over the clients: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlowrank.training.client_tensors.client_tensor import (
    RULES,
    ClientTensor,
    NoRuleError,
    to_client_tensor,
    without_rows,
)

K, B, C = 3, 4, 2
"""Clients, examples of each, and clusters: no two are equal, nor equal to any width below."""

Shapes = list[tuple[int, ...]]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


SHARED = random(5, 6)
LABELS = torch.tensor([0, 4, 2, 2, 1, 3, 0, 0, 4, 4, 1, 2])
NUMBER = torch.tensor(3.0, dtype=torch.float64)


def topped(t: Tensor) -> Tensor:
    """All but the two largest values replaced."""
    actual: Tensor = t.scatter(0, t.detach().sort(descending=True, stable=True).indices[2:], -math.inf)
    return actual.softmax(0)


# of the parameters of one client; the results are parameters
OWN: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "arithmetic": (lambda v, w: (v + 2 * w - v * w / 3 + 1) / (1 + w.square()), [(5, 6), (5, 6)]),
    "reflected": (lambda w: 1 - w + 2 / (3 + w.abs()) + 2.0 ** w, [(5,)]),
    "powers": (lambda w: w**2 + (w.abs() + 1).sqrt() + torch.exp(-w) + w.sigmoid().log(), [(5,)]),
    "scaled sum": (lambda v, w: torch.add(v, w, alpha=-0.3) + torch.sub(v, w, alpha=0.2), [(5, 6), (5, 6)]),
    "a number in a tensor": (lambda w: w * NUMBER + NUMBER, [(5, 6)]),
    "a vector beside a matrix": (lambda v, w: w * v - v, [(6,), (5, 6)]),
    "a column beside a matrix": (lambda v, w: w * v[:, None], [(5,), (5, 6)]),
    "a scalar beside a matrix": (lambda v, w: w * v + v / w, [(), (5, 6)]),
    "a scalar of a wider type": (lambda v, w: w.float() * v + v / w.float(), [(), (5, 6)]),
    "a shared matrix": (lambda w: SHARED + w * SHARED, [(5, 6)]),
    "comparisons": (lambda v, w: torch.where((v > w) & ~(v > 1) | (w >= 1), v, 0.0), [(5, 6), (6,)]),
    "bounds": (lambda v, w: v.clamp(min=-0.1, max=0.3) + torch.maximum(v, w) - w.clamp(0, 1), [(6,), (6,)]),
    "further functions": (
        lambda w: torch.relu(w).tanh() - 1 / w.square().rsqrt() + (w - 9).reciprocal() + torch.minimum(w, -w), [(5,)]
    ),
    "equality": (
        lambda v, w: torch.where((v.sign() == w.sign()) | (v <= w) & (w.isnan() | (v != w.ne(v).eq(w > 0))), v, w).nan_to_num(),
        [(6,), (6,)],
    ),
    "types": (
        lambda w: w.to(torch.float32).double() + torch.zeros_like(w) + torch.ones_like(w) * w.is_floating_point()
        + w.float().contiguous(), [(5, 6)],
    ),
    "constants": (lambda v, w: v.detach() * w + w.detach().clone(), [(5, 6), (5, 6)]),
    "signs": (lambda w: w.sign() * (w.abs() - 0.3).clamp(min=0), [(5, 6)]),
    "sums": (lambda w: w.sum() * w.sum(0) + w.mean(-1, keepdim=True) + w.amax(dim=0) + torch.mean(w), [(5, 6)]),
    "a sum over two dimensions": (lambda w: w.sum((0, -1)), [(5, 6, 2)]),
    "inner product": (lambda v, w: torch.stack([(v * w).sum(), v.square().sum()]).sum(), [(5,), (5,)]),
    "truth": (lambda w: torch.where(torch.stack([w.isfinite().all(), (w > 9).any()]).all(), w, 2 * w), [(5,)]),
    "softmax": (lambda w: (w / 2).softmax(0) + functional.log_softmax(w, dim=-1), [(5,)]),
    "softmax of rows": (lambda w: w.softmax(-1) + w.logsumexp(1, keepdim=True), [(5, 6)]),
    "the largest": (topped, [(5,)]),
    "numbers as indices": (lambda w: w[1] + w[-1] * w[0, 2], [(5, 6)]),
    "slices": (lambda w: w[1:3, ..., 0] * w[:2, None, 1].squeeze(1), [(5, 6)]),
    "iteration": (lambda w: sum(a * b for a, b in zip(w, w.unbind(), strict=True)), [(5, 6)]),
    "length": (lambda w: w * len(w) + w.numel() + w.dim() + w.size(1) + w.size()[0] + w.shape[-1], [(5, 6)]),
    "shapes": (lambda w: w.reshape(3, 10).view((6, -1)).flatten(0) * w.flatten() + w.view(30), [(5, 6)]),
    "order": (lambda w: w.movedim(0, 1).permute(1, 2, 0).transpose(0, -1), [(5, 6, 2)]),
    "new dimensions": (lambda w: w.unsqueeze(0) + w.unsqueeze(-3) + w.unflatten(1, (1, 6)).squeeze(1), [(5, 6)]),
    "new last dimension": (lambda w: w.unsqueeze(-1) * w.unsqueeze(2), [(5, 6)]),
    "stack": (lambda v, w: torch.stack([v, w]) + torch.stack((w, v), -1).movedim(-1, 0), [(5,), (5,)]),
    "cat": (lambda v, w: torch.cat([v, w]).mT @ torch.cat([v, w], dim=0), [(5, 6), (2, 6)]),
    "matrices": (lambda a, b: b @ a, [(2, 6), (5, 2)]),
    "transposes": (lambda a, b: b @ a.T.T + (a.t() @ b.mT).mT, [(6, 1), (5, 6)]),
    "vectors": (lambda a, b, c: (b @ a) @ c * (a @ a) + (c @ b) @ a, [(6,), (5, 6), (5,)]),
    "many matrices": (lambda u, v: u @ v.mT, [(C, 5, 2), (C, 6, 2)]),
    "one matrix beside many": (lambda u, v: u @ v, [(5, 2), (C, 2, 6)]),
    "mixture of low-rank updates": (
        lambda u, v, pi: (u * pi[:, None, None]).movedim(0, 1).flatten(1) @ v.movedim(0, 1).flatten(1).mT,
        [(C, 5, 2), (C, 6, 2), (C,)],
    ),
    "mixture of weights": (lambda pi, w: torch.tensordot(pi, w, 1), [(C,), (C, 5, 6)]),
    "mixture of scalars": (lambda pi, w: torch.tensordot(pi, w, 1), [(C,), (C,)]),
    "norms": (lambda w: torch.linalg.matrix_norm(w.mT @ w, keepdim=True) + w, [(C, 5, 5)]),
    "systems": (lambda a, b: torch.linalg.solve_ex(a @ a.mT, b).result, [(5, 5), (5, 2)]),
    "singular values": (lambda w: torch.linalg.svd(w, full_matrices=False)[1], [(5, 6)]),
}  # fmt: skip

# of the rows of one client and its parameters
BESIDE_ROWS: dict[str, tuple[Callable[..., Any], Shapes, tuple[int, ...]]] = {
    "a scalar": (lambda x, a: a * x + x / a - a, [()], (6,)),
    "a scalar beside values": (lambda x, a: x * a, [()], ()),
    "a vector": (lambda x, v: x * v + v, [(6,)], (6,)),
    "a matrix": (lambda x, w: x - w, [(6, 2)], (6, 2)),
    "a vector beside matrices": (lambda x, v: v - x, [(2,)], (6, 2)),
    "one row": (lambda x, w: x * w, [(1, 6)], (6,)),
    "a choice": (lambda x, v: torch.where(x > v, x, v), [(6,)], (6,)),
    "a number too": (lambda x, v: torch.where(x > 0, x * NUMBER, v), [(6,)], (6,)),
    "a product with a vector": (lambda x, v: x @ v, [(6,)], (6,)),
    "a product with a vector of sequences": (lambda x, v: x @ v, [(6,)], (7, 6)),
    "a product with a matrix": (lambda x, w: x @ w, [(6, 5)], (7, 6)),
    "a mixture of outputs": (lambda x, pi: sum(p * (i + x) for i, p in enumerate(pi)), [(C,)], (6,)),
    "labels": (lambda x, w: (x - w[LABELS[: len(x)]]).square(), [(5, 6)], (6,)),
}


def own(params: list[Tensor], k: int) -> list[Tensor]:
    return [p[k] for p in params]


def agree(found: Any, expected: Any, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    if not found.requires_grad:
        assert not expected.requires_grad
        return
    weights = random(*expected.shape)
    for a, b in zip(
        *(torch.autograd.grad((t * weights).nan_to_num(0).sum(), leaves, allow_unused=True, materialize_grads=True)
          for t in (found, expected)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", OWN)
def test_a_function_of_stacked_parameters_is_that_of_each_client(name: str) -> None:
    f, shapes = OWN[name]
    params = [random(K, *shape).requires_grad_() for shape in shapes]
    actual = f(*map(to_client_tensor, params))
    assert type(actual) is ClientTensor
    agree(actual.as_subclass(Tensor), torch.stack([f(*own(params, k)) for k in range(K)]), params)


@pytest.mark.parametrize("name", BESIDE_ROWS)
def test_beside_rows(name: str) -> None:
    f, shapes, example = BESIDE_ROWS[name]
    params = [random(K, *shape).requires_grad_() for shape in shapes]
    x = random(K * B, *example).requires_grad_()
    if name == "labels":
        p, rows = params[0], x.unflatten(0, (K, B))
        labels = LABELS.reshape(K, B)
        expected = torch.cat([(rows[k] - p[k][labels[k]]).square() for k in range(K)])
    else:
        expected = torch.cat([f(rows, *own(params, k)) for k, rows in enumerate(x.chunk(K))])
    actual = f(x, *map(to_client_tensor, params))
    assert type(actual) is Tensor
    agree(actual, expected, [x, *params])


def test_a_mean_of_each_client_beside_its_scalar() -> None:
    means, a = random(K).requires_grad_(), random(K, 5).requires_grad_()
    s = to_client_tensor(a)
    agree(means - 2 * (s * s).sum(), means - 2 * a.square().sum(1), [means, a])


def test_a_gradient_within_a_loss() -> None:
    w, x = random(K, 5, 6), random(K * B, 6)

    def loss(w: Tensor, x: Tensor, clients: int) -> Tensor:
        at = w.detach().requires_grad_()
        value = functional.linear(x, at).square().sum(1).reshape(clients, -1).mean(1)
        (g,) = torch.autograd.grad(value.sum(), [at])
        moved: Tensor = functional.linear(x, torch.add(w, g, alpha=-0.1)).square().sum(1)
        return moved.reshape(clients, -1).mean(1)

    leaf = w.clone().requires_grad_()
    actual = loss(to_client_tensor(leaf), x, K)
    leaves = [w[k].clone().requires_grad_() for k in range(K)]
    expected = torch.cat([loss(p, rows, 1) for p, rows in zip(leaves, x.chunk(K), strict=True)])
    torch.testing.assert_close(actual, expected)
    (all_of_them,) = torch.autograd.grad(actual.sum(), leaf)
    torch.testing.assert_close(all_of_them, torch.stack(torch.autograd.grad(expected.sum(), leaves)))


@pytest.mark.parametrize("rows", [K, 2 * K])
def test_without_a_batch_every_other_tensor_is_shared(rows: int) -> None:
    w, shared = random(K, C, rows, 6), random(rows, 6)
    with without_rows():
        actual = to_client_tensor(w) * shared
    assert type(actual) is ClientTensor
    torch.testing.assert_close(actual.as_subclass(Tensor), w * shared)
    right = random(K, 6, 5)
    with without_rows():
        actual = shared @ to_client_tensor(right)
    torch.testing.assert_close(actual.as_subclass(Tensor), shared @ right)


REFUSED: dict[str, Callable[[ClientTensor, Tensor], Any]] = {
    "no rule": lambda w, x: torch.linalg.qr(w),
    "a change in place": lambda w, x: w.mul_(2),
    "an entry that is set": lambda w, x: w.__setitem__(0, 1.0),
    "a number of Python": lambda w, x: float(w.sum()),
    "the clients' dimension": lambda w, x: w.sum(-3),
    "the clients' dimension of a scalar": lambda w, x: w.sum().unbind(),
    "a dimension that is not there": lambda w, x: w.softmax(2),
    "all dimensions kept": lambda w, x: w.amax(keepdim=True),
    "the length of a scalar": lambda w, x: len(w.sum()),
    "an index by truth values": lambda w, x: w[w > 0],
    "an index by a list": lambda w, x: w[[0, 1]],
    "an index by labels of another batch": lambda w, x: w[torch.arange(4)],
    "a value for each row": lambda w, x: x[:, 0] * w[:, 0],
    "another number of dimensions": lambda w, x: x[:, 0] * w,
    "rows of another batch": lambda w, x: x[:-1] * w[0],
    "a shared vector beside rows": lambda w, x: torch.where(x > 0, random(6), w[0]),
    "a tensor by name": lambda w, x: torch.add(w, other=w),
    "a shared tensor in a list": lambda w, x: torch.stack([w, random(5, 6)]),
    "a product from the left": lambda w, x: w @ x.mT,
    "chosen dimensions of a norm": lambda w, x: torch.linalg.matrix_norm(w, dim=(0, 1)),
    "another sum of products": lambda w, x: torch.tensordot(w[0], w[0], 0),
    "a transpose of no matrix": lambda w, x: w[0].T,
    "systems of other sizes": lambda w, x: torch.linalg.solve_ex(w[:, :5], w[0][:5]),
    "a gradient by a shared tensor": lambda w, x: torch.autograd.grad(w.sum(), [x]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_uncertain_is_refused_by_name(name: str) -> None:
    with pytest.raises(NoRuleError, match="torch"):
        REFUSED[name](to_client_tensor(random(K, 5, 6)), random(K * B, 6))


def test_every_rule_is_among_these(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    class Counting(dict[Any, Any]):
        def __getitem__(self, func: Any) -> Any:
            used.add(getattr(func, "__name__", str(func)))
            return super().__getitem__(func)

    monkeypatch.setattr("fedlowrank.training.client_tensors.client_tensor.RULES", Counting(RULES))
    for f, shapes in OWN.values():
        f(*[to_client_tensor(random(K, *shape)) for shape in shapes])
    for f, shapes, example in BESIDE_ROWS.values():
        f(random(K * B, *example), *[to_client_tensor(random(K, *shape)) for shape in shapes])
    # those of layers are in test_client_tensor.py, those of control flow in test_control_flow.py, those of varying sizes in
    # test_varying_sizes.py, and a gradient has a test of its own
    here = {f for f, rule in RULES.items() if not rule.__module__.endswith(("control_flow", "varying_sizes"))}
    layers = {"conv1d", "conv2d", "conv3d", "embedding", "group_norm", "layer_norm", "linear"}
    assert {f.__name__ for f in here} - used - {"argmax", "argmin", "cumsum"} == layers | {
        "grad",
        "requires_grad_",
    }
