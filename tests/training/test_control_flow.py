"""What control flow asks of a cohort: one answer where all agree, else a division by the answers; all against a loop over the
clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, ClientView
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params
from fedlowrank.engines import ENGINES
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation
from fedlowrank.training.client_tensors.client_tensor import (
    RULES,
    ClientTensor,
    NoRuleError,
    to_client_tensor,
    with_rows,
    without_rows,
)
from fedlowrank.training.client_tensors.control_flow import (
    DifferingError,
    select_clients,
    split_clients,
    stack_clients,
    unwrap_client_tensor,
)
from fedlowrank.training.cohorts.cohort_view import CohortInfo, CohortKey
from tests.support.counting_engine import CountingEngine

K = 3

ASKED: dict[str, Callable[[Tensor], Any]] = {
    "truth": lambda t: bool((t > 0).all()),
    "int": lambda t: int(t.sum()),
    "float": lambda t: float(t.mean()),
    "item": lambda t: t.sum().item(),
    "list": lambda t: t[0].tolist(),
    "equal": lambda t: torch.equal(t, torch.ones(2, 3)),
    "equal, as a method": lambda t: t.equal(torch.ones(2, 3)),
    "index": lambda t: [10, 20, 30, 40][t[0].argmax()],
}


@pytest.mark.parametrize("what", ASKED)
def test_a_number_is_that_of_all_clients_or_they_differ(what: str) -> None:
    ask = ASKED[what]
    same, other = torch.ones(2, 3), torch.tensor([[-1.0, 0, 9], [5, 6, 7]])
    with without_rows():
        assert ask(to_client_tensor(torch.stack([same] * K))) == ask(same)
        with pytest.raises(DifferingError) as error:
            ask(to_client_tensor(torch.stack([same, other, same])))
    assert error.value.values[0] == error.value.values[2] != error.value.values[1]


def test_within_a_step_control_flow_is_refused() -> None:
    with with_rows(), pytest.raises(NoRuleError, match="control flow within a step"):
        bool(to_client_tensor(torch.ones(K)))


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(
    "copy",
    [
        torch.tensor,
        lambda t: torch.tensor(t, dtype=torch.float64),
        lambda t: torch.as_tensor(t, dtype=torch.float64),
        torch.ones(1).new_tensor,
    ],
)
def test_a_copy_for_which_torch_asks_no_rule_is_refused(copy: Callable[[Tensor], Tensor]) -> None:
    with without_rows(), pytest.raises(NoRuleError, match="without clients"):
        copy(to_client_tensor(torch.arange(K * 2.0).reshape(K, 2)))


SHARED = torch.arange(12.0).reshape(3, 4) / 7

COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "a shared matrix on the left": lambda t: SHARED.mT @ t,
    "a shared matrix on the right": lambda t: t @ SHARED,
    "cat": lambda t: torch.cat([t, SHARED.mT]),
    "stack": lambda t: torch.stack([t, SHARED[:, :3]]),
    "tensordot": lambda t: torch.tensordot(torch.ones(3), t, 1),
    "svd": lambda t: torch.linalg.svd(t, full_matrices=False).S,
    "largest": lambda t: t.argmax(1) + torch.argmin(t, 0),
    "largest of all": lambda t: t.argmax(),
    "cumsum": lambda t: t.cumsum(1),
    "rows": lambda t: list(t)[1],
    "zeros": lambda t: t + t.new_zeros(3) + t.new_ones(3) + t.new_tensor([1.0, 2, 3]),
    "to": lambda t: t.to(torch.float64),
    "to another's type": lambda t: t.to(SHARED.double()),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_without_a_batch_the_result_is_that_of_each_client(what: str) -> None:
    compute, own = COMPUTED[what], [torch.randn(3, 3, generator=Key((k,)).generator()) for k in range(K)]
    with without_rows():
        actual = compute(to_client_tensor(torch.stack(own)))
    assert type(actual) is ClientTensor
    torch.testing.assert_close(unwrap_client_tensor(actual), torch.stack([compute(t) for t in own]))


def test_a_stacked_tensor_says_of_itself_what_that_of_one_client_says() -> None:
    one = torch.zeros(2, 3, dtype=torch.complex64)
    many = to_client_tensor(torch.stack([one] * K))
    for ask in (
        lambda t: t.nbytes,
        lambda t: t.element_size(),
        lambda t: t.is_complex(),
        lambda t: t.is_contiguous(),
        lambda t: t.stride(),
        lambda t: (t.shape, t.ndim, len(t), t.numel(), t.dtype),
    ):
        assert ask(many) == ask(one)


def test_every_rule_of_control_flow_is_among_these(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    class Recording(dict[Any, Any]):
        def __getitem__(self, func: Any) -> Any:
            used.add(func)
            return super().__getitem__(func)

    monkeypatch.setattr("fedlowrank.training.client_tensors.client_tensor.RULES", Recording(RULES))
    for what in ASKED:
        test_a_number_is_that_of_all_clients_or_they_differ(what)
    for what in COMPUTED:
        test_without_a_batch_the_result_is_that_of_each_client(what)
    test_a_stacked_tensor_says_of_itself_what_that_of_one_client_says()
    here = {f for f, rule in RULES.items() if rule.__module__.endswith("control_flow")}
    assert {f.__name__ for f in here - used} <= {
        "cumsum",
        "argmax",
        "argmin",
        "cat",
        "stack",
        "svd",
        "tensordot",
        "matmul",
    }


# What a method sees of a cohort


def infos(*clusters: int) -> list[ClientInfo]:
    return [ClientInfo(i, 10 + i, "net", cluster=c) for i, c in enumerate(clusters)]


def test_an_attribute_of_the_info_is_what_all_agree_in() -> None:
    assert CohortInfo(infos(1, 1, 1)).cluster == 1  # type: ignore[comparison-overlap]
    with pytest.raises(DifferingError) as error:
        _ = CohortInfo(infos(1, 0, 1)).cluster
    assert error.value.values == [1, 0, 1]
    assert unwrap_client_tensor(CohortInfo(infos(0, 0)).example_count).tolist() == [10, 11]


def test_a_draw_is_what_each_client_draws_alone() -> None:
    keys = [Key((i,)) for i in range(K)]

    def draw(g: torch.Generator, n: int) -> Tensor:
        return torch.rand(n, 2, generator=g)

    actual = unwrap_client_tensor(
        (CohortKey(keys) / "noise").draw(draw, to_client_tensor(torch.tensor([3, 1, 2])))
    )
    for k, n in enumerate((3, 1, 2)):
        assert torch.equal(actual[k, :n], (keys[k] / "noise").draw(draw, n))
        assert not actual[k, n:].any()
    with pytest.raises(NoRuleError, match=r"Key\.draw"):
        CohortKey(keys).generator()


def test_trees_of_clients_are_stacked_where_they_differ_and_split_again() -> None:
    shared = torch.ones(2)
    trees = [{"w": torch.full((2, 2), float(k)), "base": shared, "n": 4} for k in range(K)]
    actual = stack_clients(trees)
    assert type(actual["w"]) is ClientTensor
    assert actual["base"] is shared
    assert all(tree.equal(a, b) for a, b in zip(split_clients(actual, K), trees, strict=True))
    some = select_clients(actual, [2, 0])
    assert unwrap_client_tensor(some["w"])[:, 0, 0].tolist() == [2, 0]
    with pytest.raises(NoRuleError, match="differ in form"):
        stack_clients([{"w": torch.ones(2)}, {"w": torch.ones(3)}])


# Methods whose control flow depends on tensors


@dataclass(frozen=True)
class Again(METHODS["fedavg"]):  # type: ignore[misc]
    """FedAvg whose clients train once more where the first bias of the head grew."""

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """Train, look at a number, and maybe train again."""
        _, end = super().local_update(state, down, view)
        if end["head.bias"][0] > down["head.bias"][0]:
            _, end = super().local_update(state, end, view)
        return None, end


def states(method: Any, engine: Any, rounds: int = 3) -> tuple[Any, list[Any]]:
    run = Run(method, small_federation(False), RunSettings(rounds=rounds), engine)
    records = [run.step() for _ in range(rounds)]
    return run.state.server, records


def test_clients_that_take_another_way_are_parted_and_train_nothing_twice() -> None:
    engine = CountingEngine()
    (one, expected), (other, records) = states(Again(), ENGINES["sequential"]()), states(Again(), engine)
    for n in one:
        torch.testing.assert_close(other[n], one[n], rtol=1e-4, atol=1e-6)
    assert [r.steps for r in records] == [r.steps for r in expected]
    # all five together, and then those together that go on; the others do not train again
    assert engine.sizes[0] == 5
    assert any(1 < size < 5 for size in engine.sizes[1:])
    assert engine.sizes.count(5) == 3


@dataclass(frozen=True)
class Sorted(METHODS["fedavg"]):  # type: ignore[misc]
    """FedAvg with an operation between training and upload that has no rule."""

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """Train, and send the weights by their ranks."""
        _, end = super().local_update(state, down, view)
        return None, {n: torch.logcumsumexp(t, 0) for n, t in end.items()}


def test_what_has_no_rule_between_verbs_costs_no_training(caplog: pytest.LogCaptureFixture) -> None:
    engine = CountingEngine()
    with caplog.at_level("INFO", "fedlowrank.engines"):
        (one, expected), (other, records) = (
            states(Sorted(), ENGINES["sequential"]()),
            states(Sorted(), engine),
        )
    for n in one:
        torch.testing.assert_close(other[n], one[n], rtol=1e-4, atol=1e-6)
    assert engine.sizes == [5, 5, 5]
    assert [r.steps for r in records] == [r.steps for r in expected]
    (message,) = [m for m in caplog.messages if m.startswith("engine vectorized")]
    assert f"{Sorted.title} goes on with one client after another: torch.logcumsumexp has no rule" in message


@pytest.mark.parametrize("wrong", ["state", "upload"])
def test_a_rule_that_is_wrong_is_found_by_a_client_alone(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(RULES, torch.square, lambda t: to_client_tensor(unwrap_client_tensor(t) * 2))

    @dataclass(frozen=True)
    class Squared(METHODS["fedavg"]):  # type: ignore[misc]
        def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Params]:
            _, end = super().local_update(None, down, view)
            squares = {n: torch.square(t) for n, t in end.items()}
            return (squares, end) if wrong == "state" else (None, squares)

    with caplog.at_level("INFO", "fedlowrank.engines"):
        (one, _), (other, _) = (states(Squared(), e) for e in (ENGINES["sequential"](), Vectorized()))
    assert tree.equal(one, other)
    assert "gives another state or upload for many clients at once than for one alone" in caplog.text
