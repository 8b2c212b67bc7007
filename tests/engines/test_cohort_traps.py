"""What clients of a cohort could get from each other, and do not: user code, data and settings that invite it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, Federation
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, ClientView, Mean
from fedlowrank.core.learning.optimizer import LocalSchedule
from fedlowrank.core.tree import Params, sub
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.averaging import supervised_loss
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)

FedAvg: Any = METHODS["fedavg"]


def clients_of(*sizes: int, shape: tuple[int, ...] = (6,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, *shape, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def compare(method: Any, federation: Federation, rounds: int = 3, **settings: Any) -> tuple[Run, Run]:
    """Runs by the vectorized and by the sequential engine, whose servers are equal."""
    runs = []
    for engine in ("vectorized", "sequential"):
        run = Run(method, federation, RunSettings(rounds=rounds, **settings), ENGINES[engine]())
        for _ in range(rounds):
            run.step()
        runs.append(run)
    actual, expected = (tree.tensors(run.state.server) for run in runs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    return runs[0], runs[1]


@pytest.mark.parametrize(
    "schedule",
    [
        LocalSchedule("cosine"),
        LocalSchedule("linear", warmup=2),
        LocalSchedule("cosine", rounds=3),
        LocalSchedule("exponential", factor=0.9),
        LocalSchedule("cosine", steps=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [None, [1, 2, 4, 1, 2, 4]])
def test_a_schedule_within_a_pass_is_that_of_each_client(schedule: LocalSchedule, ranks: Any) -> None:
    # the smallest ones, of which one is compared, do not leave the warm-up
    sizes = [100, 100, 60, 60, 25, 25]
    name = "fedavg" if ranks is None else "hetlora"
    federation = Federation.from_arrays(clients_of(*sizes), perceptron, rank=ranks)
    optimizer = SGD(lr=0.3, local_schedule=schedule)
    compare(METHODS[name](batch_size=10, optimizer=optimizer), federation)


def pooled_vectors() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 8)), nn.Flatten(), nn.Linear(8, 3)
    )


def pooled_images() -> nn.Module:
    convolution = nn.Conv2d(1, 4, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedproto"])
@pytest.mark.parametrize(
    ("model", "shapes"), [(pooled_vectors, [(5, 6), (4, 6)]), (pooled_images, [(1, 8, 8), (1, 6, 6)])]
)
def test_clients_with_inputs_of_other_shapes_do_not_see_each_other(
    name: str, model: Callable[[], nn.Module], shapes: list[tuple[int, ...]]
) -> None:
    data = [pair for k in range(6) for pair in clients_of(30 + 2 * k, shape=shapes[k % 2])]
    federation = Federation.from_arrays(data, model, head="4")
    compare(METHODS[name](batch_size=10, optimizer=SGD(lr=0.1)), federation)


@dataclass(frozen=True)
class Own(FedAvg):  # type: ignore[misc]
    """FedAvg whose update is changed by code of a user's own."""

    code: Callable[[Params, ClientView], Params] = lambda end, _: end

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Params]:
        end = view.train(supervised_loss(view.model), down, "local", self.optimizer)
        # the engine compares a cohort with one client in the first round only
        return state, sub(down, self.code(end, view) if view.round > 0 else end)

    def contribution(self, _: Any, upload: Params, client: ClientInfo) -> Any:
        return Mean(upload, client.example_count)

    def server_update(self, server: Any, total: Any, view: Any) -> Any:
        return tree.cast_like(sub(server, total), server)


def times(params: Params, factor: Any) -> Params:
    return {name: p * factor for name, p in params.items()}


def changes_the_answer(end: Params, view: ClientView) -> Params:
    end["2.bias"] = end["2.bias"] * 0.5
    # a question that divides the cohort, after which the code runs again
    return times(end, 0.9) if float(end["2.bias"].sum()) > 0 else end


def looks_up_the_count(end: Params, view: ClientView) -> Params:
    return times(end, {32: 0.5}.get(view.info.example_count, 1.0))


def looks_for_the_count(end: Params, view: ClientView) -> Params:
    return times(end, 0.5 if view.info.example_count in {32, 24} else 1.0)


def looks_for_itself(end: Params, view: ClientView) -> Params:
    return times(end, 0.5 if view.info in view.task.clients[:3] else 1.0)


def catches_all(end: Params, view: ClientView) -> Params:
    try:
        share = 0.5 if float(end["2.bias"].sum()) > 0 else 0.8
    except Exception:  # noqa: BLE001 - as users write it
        share = 0.0
    return times(end, share)


def divides_a_number(end: Params, view: ClientView) -> Params:
    total = end["0.weight"].square().sum()
    return {**end, "2.bias": end["2.bias"] * (total * 25 / view.info.example_count)}


def counts_steps(end: Params, view: ClientView) -> Params:
    return times(end, 1 / view.steps("local"))


@pytest.mark.parametrize(
    "code",
    [
        changes_the_answer,
        looks_up_the_count,
        looks_for_the_count,
        looks_for_itself,
        catches_all,
        divides_a_number,
        counts_steps,
    ],
)
def test_code_of_a_user_gives_each_client_its_own(code: Callable[[Params, ClientView], Params]) -> None:
    federation = Federation.from_arrays(clients_of(40, 40, 40, 30, 30, 30, 20), perceptron)
    compare(Own(code=code, batch_size=10, optimizer=SGD(lr=0.3)), federation)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": lambda n: torch.tensor(n) / 40,
    "the sum of torch.tensor": lambda n: torch.tensor(n).sum() / 40,
    "torch.tensor of a list": lambda n: torch.tensor([n, 1.0]).sum() / 40,
    "torch.tensor of a quotient": lambda n: torch.tensor(n / 3).mean() / 13,
    "torch.as_tensor": lambda n: torch.as_tensor(n, dtype=torch.float32).sum() / 40,
    "torch.full": lambda n: torch.full((), n) / 40,
    "new_tensor": lambda n: torch.ones(3).new_tensor(n).sum() / 40,
    "torch.ones": lambda n: torch.ones(n).sum() / 40,
    "float": lambda n: float(n) / 40,
    "a quotient": lambda n: n / 30,
    "a remainder": lambda n: n % 7 / 6,
    "round": lambda n: round(n / 7) / 5,
    "math.sqrt": lambda n: math.sqrt(n) / 6,
    "math.log": lambda n: math.log(n) / 4,
    "a format": lambda n: float(f"{n}") / 40,
    "a format with digits": lambda n: float(f"{n:.1f}") / 40,
    "str": lambda n: len(str(n)) / 2,
    "range": lambda n: sum(range(n)) / 800,
    "np.float64": lambda n: float(np.float64(n)) / 40,
    "np.sqrt": lambda n: float(np.sqrt(n)) / 6,
    "np.array": lambda n: float(np.array([n, 1]).sum()) / 40,
    "a chain": lambda n: 0.5 if 20 < n < 30 else 1.0,
    "max": lambda n: max(n, 25) / 40,
    "a slice": lambda n: torch.ones(100)[:n].sum() / 40,
}
"""Factors of the clients' weights, by the number of their examples."""


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("what", NUMBERS)
def test_the_number_of_examples_is_that_of_each_client(what: str) -> None:
    def scales(end: Params, view: ClientView) -> Params:
        return times(end, NUMBERS[what](view.info.example_count))

    federation = Federation.from_arrays(clients_of(40, 40, 40, 30, 30, 30, 20), perceptron)
    assert len({info.example_count for info in federation.infos}) == 3
    compare(Own(code=scales, batch_size=10, optimizer=SGD(lr=0.3)), federation, rounds=2)


def asks_for_nan(end: Params, view: ClientView) -> Params:
    unknown = end["0.weight"].sum() * math.nan if view.info.rank == 1 else end["0.weight"].sum()
    return end if float(unknown) < 1e9 else times(end, 0.5)


def test_a_question_that_is_answered_by_nan_ends() -> None:
    federation = Federation.from_arrays(clients_of(*[30] * 6), perceptron, rank=[1, 1, 1, 2, 2, 2])
    compare(Own(code=asks_for_nan, optimizer=SGD(lr=0.3)), federation, rounds=2)


def test_an_infinity_is_equal_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    def keeps_the_best(end: Params, view: ClientView) -> Params:
        return {**end, "2.bias": torch.minimum(end["2.bias"], torch.full_like(end["2.bias"], math.inf))}

    @dataclass(frozen=True)
    class Best(Own):
        def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Params]:
            _, upload = super().local_update(state, down, view)
            return {"best": torch.full_like(down["2.bias"], math.inf)}, upload

        def client_init(self, *_: Any) -> Any:
            return {"best": torch.zeros(3)}

    federation = Federation.from_arrays(clients_of(*[30] * 6), perceptron)
    with caplog.at_level(logging.INFO):
        compare(Best(code=keeps_the_best, optimizer=SGD(lr=0.3)), federation)
    assert not [m for m in caplog.messages if "gives another" in m]


def test_a_token_that_the_model_does_not_know_is_an_error() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
    data = [(torch.randint(7, (20, 2)), torch.randint(3, (20,))) for _ in range(6)]
    federation = Federation.from_arrays(data, model, val=0.0, test=0.0)
    # a federation of such data is refused
    federation.clients[2].train.inputs.fill_(7)
    run = Run(FedAvg(batch_size=10), federation, RunSettings(rounds=1), ENGINES["vectorized"]())
    with pytest.raises(IndexError):
        run.step()


def test_why_clients_go_one_by_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def clips(end: Params, view: ClientView) -> Params:
        return times(end, 1 / max(1.0, float(end["0.weight"].square().sum())))

    federation = Federation.from_arrays(clients_of(*range(20, 40)), perceptron)
    with caplog.at_level(logging.INFO):
        compare(Own(code=clips, batch_size=10), federation, rounds=2)
    assert "20 clients give 20 answers to its control flow" in caplog.text


class MeanOfTokens(nn.Module):
    """Scores of the mean embedding of the tokens that a mask marks, wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        marked = self.table(input_ids) * attention_mask[..., None]
        scores: Tensor = self.head(marked.sum(1) / attention_mask.sum(1, keepdim=True))
        return scores


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_tokens_may_be_padded_on_the_left_and_between(engine: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, lengths = (
        torch.randint(1, 20, (3, 12, 24), generator=generator),
        torch.randint(2, 12, (3, 12), generator=generator),
    )
    labels, places = torch.arange(12) % 3, torch.arange(24)

    def train(move: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        masks = (places < lengths[..., None]).long()
        clients = [
            ({"input_ids": move(t), "attention_mask": move(m)}, labels)
            for t, m in zip(tokens, masks, strict=True)
        ]
        federation = Federation.from_arrays(clients, MeanOfTokens, seed=0)
        run = Run(FedAvg(batch_size=4), federation, RunSettings(rounds=1), ENGINES[engine]())
        run.step()
        return run.state.server  # type: ignore[no-any-return]

    expected = train(lambda t: t)
    for move in (lambda t: t.flip(1), lambda t: t[:, torch.cat([places[::2], places[1::2]]).argsort()]):
        for name, value in train(move).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
