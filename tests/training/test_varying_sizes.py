"""Operations whose result's size depends on values give each client of a cohort what it gets alone, or ask for a division."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlowrank.training.client_tensors.client_tensor import NoRuleError, to_client_tensor, without_rows
from fedlowrank.training.client_tensors.control_flow import DifferingError, unwrap_client_tensor

torch.set_num_threads(1)

CLIENTS = 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(CLIENTS, *shape, generator=torch.Generator().manual_seed(len(shape)))


def masks(*counts: int, size: int = 6) -> Tensor:
    """A mask of each client with so many entries."""
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(size, generator=generator) for _ in counts])
    return order < torch.tensor(counts)[:, None]


EQUAL = masks(3, 3, 3, 3)
PLACES = torch.stack(
    [torch.randperm(6, generator=torch.Generator().manual_seed(k))[:3] for k in range(CLIENTS)]
)

OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    # name: what a client computes, and its values in all clients
    "places of a mask": (lambda m: m.nonzero()[:, 0], (EQUAL,)),
    "places in a matrix": (lambda m: torch.nonzero(m), (EQUAL.reshape(CLIENTS, 2, 3),)),
    "entries by mask": (lambda t, m: t[m], (drawn(6), EQUAL)),
    "entries of a matrix by mask": (lambda t, m: t[m], (drawn(2, 3), EQUAL.reshape(CLIENTS, 2, 3))),
    "rows by mask": (lambda t, m: t[m], (drawn(6, 5), EQUAL)),
    "rows by place": (lambda t, i: t[i], (drawn(6, 5), PLACES)),
    "entries by place and None": (lambda t, i: t[i, None], (drawn(6), PLACES)),
    "rows by a matrix of places": (lambda t, i: t[i[:, None]], (drawn(6, 5), PLACES)),
    "into a mask": (lambda m, v: torch.zeros(6).masked_scatter(m, v), (EQUAL, drawn(3))),
    "filled places": (lambda t, i: t.index_fill(0, i, 7.0), (drawn(6), PLACES)),
    "added rows": (lambda i, v: torch.ones(6, 5).index_add(0, i, v, alpha=-1), (PLACES, drawn(3, 5))),
    "added numbers": (lambda t, i, v: t.index_add(0, i, v), (drawn(6), PLACES, drawn(3))),
    "order": (lambda t: t.argsort(descending=True, stable=True), (torch.sign(drawn(6)),)),
    "bound by a tensor": (lambda t, b: t.clamp(max=b), (drawn(6), drawn())),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cohort_gets_what_its_clients_get_alone(name: str) -> None:
    operation, values = OPERATIONS[name]
    with without_rows():
        actual = operation(*[to_client_tensor(v) for v in values])
    expected = torch.stack([operation(*[v[k] for v in values]) for k in range(CLIENTS)])
    assert torch.equal(unwrap_client_tensor(actual), expected)
    assert unwrap_client_tensor(actual).dtype == expected.dtype


def test_places_and_masks_that_all_clients_share() -> None:
    t, shared = drawn(4, 5), torch.tensor([2, 0, 1, 3])
    with without_rows():
        # as many places as clients: they are no rows of a batch here
        rows = to_client_tensor(t)[shared]
        by_mask = to_client_tensor(t)[torch.tensor([True, False, True, False])]
        constant = shared[to_client_tensor(PLACES % 4)]
    assert torch.equal(unwrap_client_tensor(rows), t[:, shared])
    assert torch.equal(unwrap_client_tensor(by_mask), t[:, [0, 2]])
    assert torch.equal(unwrap_client_tensor(constant), shared[PLACES % 4])


@pytest.mark.parametrize(
    "operation",
    [lambda m: m.nonzero(), lambda m: torch.arange(6)[m], lambda m: torch.zeros(6).masked_scatter(m, to_client_tensor(drawn(2)))],
    ids=["places", "entries", "scatter"],
)  # fmt: skip
def test_clients_with_other_counts_divide_the_cohort(operation: Callable[[Tensor], Any]) -> None:
    with without_rows(), pytest.raises(DifferingError) as error:
        operation(to_client_tensor(masks(2, 3, 2, 3)))
    assert error.value.parts() == {"2": [0, 2], "3": [1, 3]}


def test_what_one_client_may_not_do_has_no_rule() -> None:
    with without_rows(), pytest.raises(NoRuleError, match="fewer entries"):
        torch.zeros(6).masked_scatter(to_client_tensor(EQUAL), to_client_tensor(drawn(2)))
    with without_rows(), pytest.raises(NoRuleError, match="not rows"):
        torch.zeros(2, 5).index_add(0, to_client_tensor(PLACES), to_client_tensor(drawn(3, 5)))


def test_within_a_step_no_size_depends_on_values() -> None:
    with pytest.raises(NoRuleError, match="within a step"):
        to_client_tensor(EQUAL).nonzero()
