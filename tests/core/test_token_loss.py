"""Losses and scores of sequences are means over the tokens that count, whatever the padding and however a
batch is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.contract import Batch, ClientInfo, Pass
from fedlowrank.core.key import Key
from fedlowrank.core.learning.batch_losses import task_loss
from fedlowrank.core.learning.losses import AUTO
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import client_key
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.models.architecture import Architecture
from fedlowrank.results.evaluation.pools import ScoringPool
from fedlowrank.results.evaluation.scoring import measure_predictor
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.local_data import LocalData, chunk_size, gather
from tests.support.standard_layers import standard_layers

torch.set_num_threads(1)

WORDS, WIDTH = 11, 6
NO = -100


class Model(nn.Module):
    """Means of the embeddings so far, a layer, and scores of the next word."""

    head_name = "head"

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        draw = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.7, generator=draw)
        self.to(dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask[..., None].to(self.words.weight.dtype)
        sums = (self.words(input_ids) * seen).cumsum(1) / seen.cumsum(1).clamp(min=1)
        return self.head(self.layer(sums).tanh())


@pytest.fixture(scope="module", autouse=True)
def _standard_modules() -> Iterator[None]:
    with standard_layers(Model):
        yield


def texts(lengths: Sequence[int], width: int, seed: int = 0, silent: float = 0.3) -> Examples:
    """Random texts padded on the right, some tokens of which do not count."""
    rng = np.random.default_rng(seed)
    ids, mask, labels = (np.zeros((len(lengths), width), dtype=np.int64) for _ in range(3))
    labels += NO
    for i, n in enumerate(lengths):
        ids[i, :n], mask[i, :n] = rng.integers(1, WORDS, n), 1
        labels[i, :n] = np.where(rng.random(n) < silent, NO, ids[i, :n])
        # at least one counts, and the first never does: nothing comes before it
        labels[i, n - 1] = ids[i, n - 1]
    return Examples(
        {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)},
        torch.from_numpy(labels),
    )


def widened(examples: Examples, more: int) -> Examples:
    """The same texts with further columns of padding."""
    wide = {n: nn.functional.pad(t, (0, more)) for n, t in examples.x.items()}
    return Examples(wide, nn.functional.pad(examples.y, (0, more), value=NO))


def by_hand(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Mean negative log-likelihood and share of right guesses over the tokens that count, one by one."""
    lost, right = [], []
    for i, row in enumerate(labels):
        for t in range(1, len(row)):
            if row[t] != NO:
                z = scores[i, t - 1] - scores[i, t - 1].max()
                lost.append(np.log(np.exp(z).sum()) - z[row[t]])
                right.append(scores[i, t - 1].argmax() == row[t])
    return float(np.mean(lost)), float(np.mean(right))


def federation(
    clients: Sequence[Examples], by_length: bool = False, dtype: torch.dtype = torch.float64
) -> Federation:
    some = {n: t[:1] for n, t in clients[0].x.items()}
    data = [ClientData(e, e.take(torch.arange(0)), e) for e in clients]
    infos = [ClientInfo(i, len(e), "m", 1 + i) for i, e in enumerate(clients)]
    return Federation(data, infos, {"m": Architecture("m", Model(dtype), some)}, (), by_length=by_length)


LENGTHS = ((3, 9, 2, 12, 7, 5, 4), (17, 2, 6, 20, 3))
METHOD = FedAvg(optimizer=SGD(lr=0.5), batch_size=4, epochs=2)


def ends(
    clients: Sequence[Examples],
    method: Any = METHOD,
    engine: Any = Sequential,
    by_length: bool = False,
    **kw: Any,
) -> Run:
    on = federation(clients, by_length)
    run = Run(method, on, RunSettings(rounds=2, **kw), engine())
    for _ in range(2):
        run.step()
    return run


# -- the mean over tokens ------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(2, 10), min_size=1, max_size=6),
    more=st.integers(0, 9),
    blank=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_the_loss_is_the_mean_over_tokens(lengths: list[int], more: int, blank: int, seed: int) -> None:
    examples, model = texts(lengths, 10, seed), Model()
    with torch.no_grad():
        scores = model(**examples.x)
        expected, _ = by_hand(scores.numpy(), examples.y.numpy())
        assert float(task_loss(scores, Batch(examples.x, examples.y))) == pytest.approx(expected, abs=1e-13)
        # with more columns of padding, and with examples that are padding
        wide = widened(examples, more)
        assert float(task_loss(model(**wide.x), Batch(wide.x, wide.y))) == pytest.approx(expected, abs=1e-13)
        padded = torch.cat([scores, torch.full((blank, *scores.shape[1:]), float("nan"), dtype=scores.dtype)])
        y = torch.cat([examples.y, torch.full((blank, 10), NO)])
        mask = torch.arange(len(y)) < len(lengths)
        assert float(task_loss(padded, Batch(None, y, mask))) == pytest.approx(expected, abs=1e-13)


def test_weights_count_the_tokens_that_are_predicted() -> None:
    y = torch.tensor([[4, NO, 5, 6], [1, 2, 3, 4], [7, NO, NO, NO]])
    batch = Batch(None, y)
    assert batch.weights.tolist() == [2, 3, 0]
    values = torch.tensor([1.0, 10.0, 99.0], dtype=torch.float64)
    assert float(batch.mean(values)) == pytest.approx(32 / 5)
    # a batch in which nothing counts has a loss of 0, not NaN
    assert float(Batch(None, y[2:]).mean(values[2:])) == 0
    assert Batch(None, torch.tensor([0, 1])).weights is None
    assert Batch(None, torch.zeros(3, 2)).weights is None
    each = AUTO.each(torch.zeros(3, 4, 8, dtype=torch.float64), y)
    assert each.tolist() == pytest.approx([np.log(8), np.log(8), 0])


# -- scores --------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [7, 700])
def test_accuracy_and_risk_against_numpy(n: int) -> None:
    rng = np.random.default_rng(5)
    examples, model = texts(rng.integers(2, 21, n).tolist(), 24, 3), Model()
    if n == 700:
        assert chunk_size(examples) == 4096 // 24
    with torch.no_grad():
        risk, accuracy = by_hand(model(**examples.x).numpy(), examples.y.numpy())
        actual = measure_predictor(lambda x: model(**x), ScoringPool([examples, widened(examples, 13)]))
    assert actual.loss == pytest.approx([risk, risk], abs=1e-12)
    assert actual.accuracy == pytest.approx([accuracy, accuracy], abs=1e-15)
    # a mean over texts would be another number
    alone = [examples.take(torch.tensor([i])) for i in range(7)]
    each = [by_hand(model(**e.x).detach().numpy(), e.y.numpy())[0] for e in alone]
    assert abs(np.mean(each) - risk) > 1e-3


# -- training ------------------------------------------------------------------------------------------------


def test_a_batch_without_its_padding_is_the_same_batch() -> None:
    examples = texts((3, 9, 2, 12, 7), 40)
    for index in ([0, 2], [1, 4, 0], [3]):
        batch = gather(examples, torch.tensor(index))
        width = batch.y.shape[1]
        assert width == -(-max((3, 9, 2, 12, 7)[i] for i in index) // 8) * 8
        assert all(t.shape == (len(index), width) for t in batch.x.values())
        whole = Batch({n: t[index] for n, t in examples.x.items()}, examples.y[index])
        model = Model()
        a, b = (task_loss(model(**k.x), k) for k in (batch, whole))
        grads = [torch.autograd.grad(v, list(model.parameters())) for v in (a, b)]
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
        for p, q in zip(*grads, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "method", [METHOD, FedHL(optimizer=SGD(lr=0.5), batch_size=4, epochs=2)], ids=lambda m: m.title
)
def test_padding_changes_no_run(method: Any) -> None:
    clients = [texts(n, 20, i) for i, n in enumerate(LENGTHS)]
    a, b = ends(clients, method), ends([widened(e, 11) for e in clients], method)
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-12), a.state.server, b.state.server
    )
    start = a.federation.architectures["m"].initial["head.weight"]
    server = a.state.server if isinstance(method, FedAvg) else a.state.server.rest
    assert float((server["head.weight"] - start).abs().max()) > 1e-2


def test_clients_at_once_average_over_their_own_tokens() -> None:
    clients = [texts(n, 20, i) for i, n in enumerate(LENGTHS)]
    a, b = ends(clients), ends(clients, engine=Vectorized)
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-9), a.state.server, b.state.server
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_taken_in_parts_end_where_whole_ones_do(size: int) -> None:
    clients = [texts(n, 20, i) for i, n in enumerate(LENGTHS)]
    whole, parts = ends(clients), ends(clients, micro_batch=size)
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-12),
        whole.state.server,
        parts.state.server,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_taken_in_parts_end_where_whole_ones_do_in_single_precision(size: int) -> None:
    clients = [texts(n, 20, i) for i, n in enumerate(LENGTHS)]
    whole, parts = ends(clients), ends(clients, micro_batch=size)
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-7),
        whole.state.server,
        parts.state.server,
    )


def test_a_batch_in_which_nothing_counts_can_be_taken_in_parts() -> None:
    examples = texts((5, 4, 3), 8)
    silent = Examples(examples.x, torch.full_like(examples.y, NO))
    run = ends([silent], micro_batch=2)
    assert tree.equal(run.state.server, run.federation.architectures["m"].initial)


def test_a_run_is_descent_on_the_mean_over_tokens() -> None:
    examples = texts(LENGTHS[0], 20)
    run = Run(METHOD, federation([examples]), RunSettings(rounds=1), Sequential())
    run.step()
    data = LocalData(run.federation.infos[0], examples, METHOD.passes(), client_key(run.federation, 0, 0))
    model, steps = Model(), data.order("local")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in steps:
        optimizer.zero_grad()
        scores, y = model(**{n: t[i] for n, t in examples.x.items()}), examples.y[i]
        nn.functional.cross_entropy(
            scores[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1), ignore_index=NO
        ).backward()
        optimizer.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(run.state.server[n], p.detach(), rtol=0, atol=1e-12)


# -- order and cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_length", [True, False])
def test_every_example_is_seen_once_an_epoch(by_length: bool) -> None:
    n = 23
    lengths = np.random.default_rng(1).integers(1, 30, n)
    data = LocalData(
        ClientInfo(0, n, "m"),
        texts(lengths.tolist(), 30),
        {"local": Pass(3, 4)},
        Key((7,)),
        by_length=by_length,
    )
    order, per_epoch = data.order("local"), -(-n // 4)
    assert len(order) == data.steps("local") == 3 * per_epoch
    epochs = [order[i * per_epoch : (i + 1) * per_epoch] for i in range(3)]
    for epoch in epochs:
        assert sorted(i for step in epoch for i in step.tolist()) == list(range(n))
    assert len({str([s.tolist() for s in e]) for e in epochs}) == 3
    # sorted by length, five batches of four and one of three span little; at random nearly all
    spread = np.mean([np.ptp(lengths[s.numpy()]) for s in order])
    assert (spread < 7) if by_length else (spread > 12)
    assert [b.step for b in data.batches("local")] == list(range(3 * per_epoch))
    assert [len(b) for b in data.batches("local")] == [len(s) for s in order]


@pytest.mark.parametrize("by_length", [True, False])
def test_operations_are_counted_for_every_width(by_length: bool) -> None:
    lengths = (3, 9, 2, 12, 7, 5, 4, 17, 33, 2, 6, 20, 3)
    examples = texts(lengths, 40)
    on = federation([examples], by_length)
    record = Run(METHOD, on, RunSettings(rounds=1), Sequential()).step()
    data = LocalData(on.infos[0], examples, METHOD.passes(), client_key(on, 0, 0), by_length=by_length)
    tokens = [len(i) * -(-max(lengths[j] for j in i.tolist()) // 8) * 8 for i in data.order("local")]
    assert len(set(tokens)) > 2
    # two matrices of W·W and W·V: forward, and backward to weights and to inputs; two operations a product
    assert record.flops == sum(tokens) * 6 * (WIDTH * WIDTH + WIDTH * WORDS)
