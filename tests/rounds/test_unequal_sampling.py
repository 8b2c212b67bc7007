"""Clients drawn by size and by loss: probabilities, weights that make the mean unbiased, rounds that can be told beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank import Federation, Privacy, Robust, RunSettings, simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.standalone import Standalone
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.rounds.participation.participants import Participants
from fedlowrank.rounds.participation.unequal_sampling import draw_by_size, weights_by_size
from fedlowrank.rounds.run import Run
from fedlowrank.testing.check import small_federation
from fedlowrank.trust.trust_settings import Clipping, SecureSums
from tests.methods.setting import CLASSES, Net, make_arrays

SIZES = (23, 9, 31, 14)


def federation() -> Federation:
    make: Any = {"m": lambda: Net(6)}
    return Federation.from_arrays(make_arrays(), make, classes=CLASSES)


def generators(count: int) -> list[torch.Generator]:
    return [(Key((0,)) / i).generator() for i in range(count)]


# Σ of m n_k / n, where it is at most 1; worked out by hand
PROBABILITIES = {
    "none is certain": ((23, 9, 31, 14), 2, [46 / 77, 18 / 77, 62 / 77, 28 / 77]),
    # 90 of 100 for 2: certain; the second place is drawn among the others
    "one is certain": ((90, 1, 3, 6), 2, [1, 0.1, 0.3, 0.6]),
    # once 80 is certain, 15 of 20 for 1 is not; of 3 it is, for 2 of 20
    "one after the other": ((80, 15, 3, 2), 3, [1, 1, 0.6, 0.4]),
    "one has nothing": ((5, 0, 5), 1, [0.5, 0, 0.5]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROBABILITIES)
def test_each_client_is_drawn_with_exactly_its_probability(name: str) -> None:
    sizes, count, expected = PROBABILITIES[name]
    draws = [draw_by_size(sizes, count, g) for g in generators(3000)]
    assert all(len(set(d)) == count and d == sorted(d) for d in draws)
    actual = np.bincount(np.concatenate(draws), minlength=len(sizes)) / len(draws)
    p = np.array(expected)
    assert (np.abs(actual - p) <= 4 * np.sqrt(p * (1 - p) / len(draws))).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_weights_are_inverse_probabilities_and_their_sum_is_no_random_number(
    sizes: list[int], data: Any
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    weights = weights_by_size(sizes, count)
    draws = [draw_by_size(sizes, count, g) for g in generators(5)]
    # the mean over the drawn clients divides by this sum
    assert len({sum(weights[i] for i in d) for d in draws}) == 1
    assert all(len(d) == min(count, sum(n > 0 for n in sizes)) for d in draws)
    if count >= sum(n > 0 for n in sizes):
        # all take part: the weights are n_k
        assert len({w / n for w, n in zip(weights, sizes, strict=True) if n}) <= 1


def test_the_weighted_mean_is_the_one_over_all_clients_in_expectation() -> None:
    sizes, values = np.array([90, 4, 8, 30, 6]), np.array([1.0, -3.0, -2.0, 4.0, -2.5])
    weights = np.array(weights_by_size(sizes.tolist(), 3))
    means = [
        np.average(values[d], weights=weights[d])
        for d in (draw_by_size(sizes.tolist(), 3, g) for g in generators(4000))
    ]
    error = np.std(means) / np.sqrt(len(means))
    assert np.mean(means) == pytest.approx(np.average(values, weights=sizes), abs=4 * error)
    # n_k as weights, as after a uniform draw, would count large clients twice
    twice = [
        np.average(values[d], weights=sizes[d])
        for d in (draw_by_size(sizes.tolist(), 3, g) for g in generators(4000))
    ]
    assert abs(np.mean(twice) - np.average(values, weights=sizes)) > 8 * error


def trained(fed: Federation, client: int) -> Params:
    """A client's model after the first round, trained alone from the common initial weights."""
    run = Run(Standalone(batch_size=8), fed, RunSettings(rounds=1), Sequential())
    run.step()
    return run.personal_params(fed.infos[client])


@pytest.mark.full
@pytest.mark.parametrize("sampling", ["size", "loss"])
def test_a_round_takes_the_plain_mean_where_no_client_is_certain(sampling: Any) -> None:
    fed = federation()
    assert tuple(i.example_count for i in fed.infos) == SIZES
    run = Run(
        FedAvg(batch_size=8), fed, RunSettings(rounds=1, participation=0.5, sampling=sampling), Sequential()
    )
    record = run.step()
    models = [trained(fed, i) for i in record.participants]
    assert len(models) == 2
    expected = {n: (models[0][n] + models[1][n]) / 2 for n in models[0]}
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12), run.state.server, expected
    )


@pytest.mark.full
def test_a_client_that_is_always_drawn_keeps_its_weight() -> None:
    fed = Federation.from_arrays(make_arrays(sizes=(90, 9, 12, 9)), {"m": lambda: Net(6)}, classes=CLASSES)
    run = Run(
        FedAvg(batch_size=8), fed, RunSettings(rounds=1, participation=0.5, sampling="size"), Sequential()
    )
    first, other = run.step().participants
    assert first == 0
    a, b = trained(fed, 0), trained(fed, other)
    # 90 of 120 examples, and 30 for those of which the second client is drawn
    expected = {n: (90 * a[n] + 30 * b[n]) / 120 for n in a}
    tree.map_leaves(
        lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-12), run.state.server, expected
    )


@pytest.mark.full
def test_the_highest_last_loss_comes_first_and_before_it_who_was_never_drawn() -> None:
    fed = federation()
    protocol = RunSettings(rounds=12, participation=0.25, sampling="loss", candidates=4)
    run = Run(FedAvg(batch_size=8), fed, protocol, Sequential())
    last: dict[int, float] = {}
    for t in range(12):
        # the replies of rounds 2 and 7 are lost, and with them the losses, a first one and a known one
        is_lost = t in (2, 7)
        record = run.step({str(i): "lost" for i in range(4)} if is_lost else None)
        (chosen,) = record.participants
        unknown = set(range(4)) - last.keys()
        assert chosen in (unknown or {max(last, key=lambda i: last[i])})
        others = [loss for i, loss in last.items() if i != chosen]
        # one that cannot be reached does not take every round
        last[chosen] = sum(others) / len(others) if is_lost else record.training_losses["local"]
    assert len(last) == 4


@pytest.mark.full
def test_candidates_are_drawn_by_size() -> None:
    # one candidate a round is sampling by size; of all but one, the one that is missing may be the highest
    fed = federation()
    protocols: list[dict[str, Any]] = [{"sampling": "loss", "candidates": 1}, {"sampling": "size"}]
    one, size = (Run(FedAvg(), fed, RunSettings(participation=0.25, **p), Sequential()) for p in protocols)
    sizes = [i.example_count for i in fed.infos]
    draws = [one.client_sampler.draw(t, sizes, {0: 9.0}) for t in range(400)]
    assert draws == [size.client_sampler.draw(t, sizes) for t in range(400)]
    actual = np.bincount(np.concatenate(draws), minlength=4) / 400
    assert actual == pytest.approx(np.array(SIZES) / sum(SIZES), abs=0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", ["size", "loss"])
def test_a_resumed_run_has_the_same_bits(sampling: Any, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def kill(record: Any) -> None:
        if record.round == 4:
            raise KilledError

    def run(folder: Path, resume: bool = False, **more: Any) -> Result:
        return simulate(
            FedAvg(batch_size=8), federation(), engine="sequential", rounds=8, participation=0.25, sampling=sampling,
            checkpoint_every=2, folder=folder, resume=resume, **more,
        )  # fmt: skip

    whole = run(tmp_path / "whole")
    with pytest.raises(KilledError):
        run(tmp_path / "half", on_round=kill)
    # the checkpoint alone is enough
    (tmp_path / "half" / "metrics.jsonl.gz").unlink()
    again = run(tmp_path / "half", resume=True)
    assert [r.participants for r in again.rounds[-4:]] == [r.participants for r in whole.rounds[-4:]]
    assert tree.equal(again.run.state.server, whole.run.state.server)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "privacy": (
        lambda: RunSettings(
            sampling="size", privacy=Privacy("central", noise=1.0, delta=1e-3), clipping=Clipping(norm=1.0)
        ),
        r"'size' does not go with run\.privacy, because the accountant",
    ),
    "secure": (lambda: RunSettings(sampling="loss", secure=SecureSums(on=True)), r"run\.secure, because"),
    "robust": (lambda: RunSettings(sampling="loss", robust=Robust("median")), r"run\.robust, because"),
    "candidates": (lambda: RunSettings(sampling="size", candidates=3), "candidates = 3 does nothing"),
    "too few": (
        lambda: Run(FedAvg(), federation(), RunSettings(sampling="loss", candidates=1), Sequential()),
        r"candidates = 1 must be at least the 4 clients of a round and at most the 4",
    ),
    "too many": (
        lambda: Run(FedAvg(), federation(), RunSettings(sampling="loss", candidates=5), Sequential()),
        "at most the 4 that may train",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()


UNFIT = {
    ("fednova", "loss"): "true number of examples",
    ("fednova", "size"): "true number of examples",
    ("scaffold", "size"): "large clients would count twice",
    ("fedslr", "size"): "large clients would count twice",
    ("fedhl", "size"): "single replies by a rule of its own",
    ("floral", "size"): None,
    ("scaffold", "loss"): None,
    ("fedhl", "loss"): None,
}


@pytest.mark.few(7)
@pytest.mark.parametrize(("name", "sampling"), UNFIT)
def test_methods_whose_weights_are_others_say_so(name: str, sampling: Any) -> None:
    method, reason = METHODS[name](), UNFIT[name, sampling]
    on, protocol = small_federation(method.heterogeneous), RunSettings(sampling=sampling, participation=0.5)
    if reason is None:
        Run(method, on, protocol, Sequential()).step()
        return
    with pytest.raises(TaskError, match=reason):
        Run(method, on, protocol, Sequential())


@pytest.mark.parametrize(
    ("clients", "share", "sampling", "expected"),
    [
        (2, 0.75, "fixed", 2.0), (1, 0.3, "fixed", 1.0), (10, 0.25, "fixed", 3.0), (10, 1.0, "fixed", 10.0),
        (10, 0.25, "poisson", 2.5), (1, 0.3, "poisson", 0.3),
    ],
)  # fmt: skip
def test_the_expected_number_of_participants_is_the_mean_of_the_draws(
    clients: int, share: float, sampling: Any, expected: float
) -> None:
    draws = Participants(clients, RunSettings(participation=share, sampling=sampling), Key((0,)))
    assert draws.expected == expected
    assert np.mean([len(draws.draw(t)) for t in range(2000)]) == pytest.approx(expected, abs=0.12)


def test_noised_sums_are_divided_by_the_clients_that_train() -> None:
    def change(share: float) -> np.ndarray:
        privacy = Privacy("central", noise=1e-6, delta=1e-5)
        settings = RunSettings(rounds=1, participation=share, clipping=Clipping(1e3), privacy=privacy)
        run = Run(FedAvg(), small_federation(False, client_count=2), settings, Sequential())
        before = [t.clone() for t in tree.tensors(run.state.server)]
        run.step()
        after = tree.tensors(run.state.server)
        return np.concatenate([(b - a).numpy().ravel() for a, b in zip(before, after, strict=True)])

    # both clients train in either case
    np.testing.assert_allclose(change(0.75), change(1.0), rtol=1e-3, atol=1e-6)
