"""Evaluation against plain loops over clients; which clients and rounds are evaluated, and when checkpoints are written."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import ClientModel, ClientView, Federation, simulate
from fedlowrank.engines import Sequential
from fedlowrank.methods import METHODS, FedAvg
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage import checkpoint
from fedlowrank.storage.run_files import RECORDS_FILE, read_lines
from tests.results.evaluation.evaluated_models import (
    CountingModule,
    assert_measures,
    build_linear,
    compute_measures,
    make_federation,
)

torch.set_num_threads(1)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ifca", "fedper"])
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_numbers_of_every_client_by_a_plain_loop(method: str, engine: Any) -> None:
    made = make_federation(Headed if method == "fedper" else build_linear)
    result = simulate(method, made, rounds=2, engine=engine, participation=0.6)
    model = made.architectures["model"].module

    def scores(info: Any, x: Tensor) -> Tensor:
        actual: Tensor = torch.func.functional_call(model, result.run.personal_params(info), (x,))
        return actual

    for split in ("val", "test"):
        assert_measures(result.rounds[-1], "personal", split, compute_measures(result.run, split, scores))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.body(x)))
        return scores


def evaluated_batches(made: Any, method: str = "fedavg") -> list[int]:
    """Sizes of the batches of the second evaluation of a run."""
    run = Run(METHODS[method](), made, RunSettings(rounds=2), Sequential())
    run.step()
    module = run.federation.architectures["model"].module
    module.batches.clear()
    run.evaluate()
    actual: list[int] = list(module.batches)
    return actual


def test_clients_that_share_a_model_are_one_pass_and_others_are_not() -> None:
    made = make_federation(CountingModule)
    total = sum(len(c.val) + len(c.test) for c in made.clients)
    assert evaluated_batches(made) == [total]
    assert sorted(evaluated_batches(make_federation(CountingModule), "standalone")) == sorted(
        n for c in made.clients for n in (len(c.val), len(c.test)) if n
    )


def test_a_module_that_mixes_the_examples_of_a_batch_is_evaluated_client_by_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make_federation(lambda: CountingModule(lambda x: x - x.mean(0)))
    with caplog.at_level(logging.WARNING):
        result = simulate("fedavg", made, rounds=2)
    assert caplog.text.count("mixes the examples of a batch") == 1
    weight = result.personal(0)
    expected = compute_measures(
        result.run,
        "test",
        lambda _, x: functional.linear(x - x.mean(0), weight["layer.weight"], weight["layer.bias"]),
    )
    assert_measures(result.rounds[-1], "personal", "test", expected)


def test_a_module_that_draws_random_numbers_sees_the_draws_of_each_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noisy = lambda: CountingModule(lambda x: x + torch.randn(6))  # noqa: E731
    with caplog.at_level(logging.WARNING):
        together = simulate("fedavg", make_federation(noisy), rounds=1)
    assert "draws random numbers" in caplog.text
    # a client's numbers do not depend on who else is evaluated
    alone = simulate("fedavg", make_federation(noisy), rounds=1, evaluate_clients=1)
    assert alone.rounds[-1].measured is not None
    (only,) = alone.rounds[-1].measured.client_ids
    assert alone.accuracy()[only] == together.accuracy()[only]
    assert alone.rounds[-1].values("loss") == [together.rounds[-1].values("loss")[only]]


def test_a_hook_sees_the_examples_of_one_client_at_a_time() -> None:
    seen: list[int] = []

    def hooked() -> nn.Module:
        module = build_linear()
        module.register_forward_hook(lambda _, x, __: seen.append(len(x[0])))  # type: ignore[arg-type]
        return module

    made = make_federation(hooked)
    run = Run(METHODS["fedavg"](), made, RunSettings(rounds=2), Sequential())
    seen.clear()
    run.record_initial_models()
    assert seen == [n for c in made.clients for n in (len(c.val), len(c.test)) if n]


def test_a_subset_of_clients_is_the_same_in_every_round_and_said_in_the_record(tmp_path: Path) -> None:
    made = make_federation(build_linear, clients=40)
    run: dict[str, Any] = {"rounds": 3, "evaluate_clients": 6, "representations": 0}
    result = simulate("fedavg", made, folder=tmp_path / "run", **run)
    everyone = simulate("fedavg", made, rounds=3).rounds
    assert result.rounds[0].measured is not None
    chosen = result.rounds[0].measured.client_ids
    assert len(set(chosen)) == 6
    for actual, whole in zip(result.rounds, everyone, strict=True):
        assert actual.measured is not None
        assert actual.measured.client_ids == chosen
        for kind in ("accuracy", "loss"):
            everybody = whole.values(kind)
            assert actual.values(kind) == pytest.approx([everybody[i] for i in chosen], rel=1e-5)
    assert [i for i, v in enumerate(result.accuracy()) if v is not None] == chosen
    # on the disk a record holds the numbers of those clients alone, and is read back whole
    assert RunRecord.load(tmp_path / "run").rounds == result.rounds
    for line in read_lines(tmp_path / "run"):
        assert b"null" not in line.split(b'"measured":')[1].split(b'"ranks"')[0]


def test_a_record_takes_at_most_twenty_bytes_for_each_client(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    arrays = [(torch.randn(60, 16, generator=generator), torch.arange(60) % 4) for _ in range(100)]
    on = Federation.from_arrays(arrays, torch.nn.Linear(16, 4))
    simulate("fedavg", on, folder=tmp_path / "run", rounds=5, evaluate_every=1)
    assert (tmp_path / "run" / RECORDS_FILE).stat().st_size / (6 * 100) < 20


def test_of_more_than_a_thousand_clients_five_hundred_are_evaluated() -> None:
    made = make_federation(build_linear, clients=1001, examples=2)
    run = Run(METHODS["fedavg"](), made, RunSettings(participation=0.01), Sequential())
    assert len(run.record_initial_models().values()) == 500
    assert (
        len(Run(METHODS["fedavg"](), made, RunSettings(evaluate_clients=1001), Sequential()).evaluated)
        == 1001
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("participation", "rounds", "interval"), [(1.0, 400, 2), (0.1, 400, 8), (0.1, 100, 2)]
)
def test_the_interval_of_evaluations_by_hand(participation: float, rounds: int, interval: int) -> None:
    g = torch.Generator().manual_seed(0)

    def some(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)

    data = [{"train": some(40), "val": some(10), "test": some(14)} for _ in range(20)]
    made = Federation.from_arrays(data, lambda: nn.Linear(6, 3), classes=3)
    run = Run(
        METHODS["fedavg"](batch_size=20),
        made,
        RunSettings(rounds=rounds, participation=participation),
        Sequential(),
    )
    run.record_initial_models()
    run.step()
    # a forward pass costs 2·6·3 an example, a step as much again for the weights and nothing for the inputs
    training, evaluation = 40 * 20 * participation * 2 * 36, 20 * 24 * 36
    assert evaluation / interval <= training / 4 or interval == rounds // 50
    assert interval == 1 or evaluation / (interval - 1) > training / 4
    assert run.evaluate_every == interval
    assert [t for t in range(rounds + 1) if run_is_due(run, t)][-1] == rounds


def run_is_due(run: Run, t: int) -> bool:
    run.state = type(run.state)(t, run.state.server, run.state.clients)
    return run.is_due()


def test_an_interval_is_the_same_after_a_resume(tmp_path: Path) -> None:
    made = make_federation(build_linear, clients=40)
    settings: dict[str, Any] = {"rounds": 100, "participation": 0.05, "representations": 0}
    whole = simulate("fedavg", made, folder=tmp_path / "whole", **settings)

    def stop(record: RoundRecord) -> None:
        if record.round == 31:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", made, folder=tmp_path / "run", on_round=stop, **settings)
    again = simulate("fedavg", made, folder=tmp_path / "run", resume=True, **settings)
    assert whole.run.evaluate_every == 2
    assert [r.untimed() for r in again.rounds] == [r.untimed() for r in whole.rounds]
    assert [r.round for r in whole.rounds if not r.is_evaluated] == list(range(3, 100, 2))


def test_checkpoints_are_ten_seconds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    seen = []

    def tick(record: RoundRecord) -> None:
        nonlocal clock
        clock += 3.0
        seen.append(checkpoint.rounds_kept(tmp_path / "run" / "checkpoint")[-1])

    simulate(
        "fedavg",
        make_federation(build_linear),
        folder=tmp_path / "run",
        rounds=10,
        on_round=tick,
        representations=0,
    )
    # rounds 0, 4 and 8 come 12 seconds after the one before; the last round is always saved
    assert seen == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 10]


@pytest.mark.parametrize(("states_one_model", "made"), [(True, 1), (False, 7)])
def test_a_method_of_one_model_makes_it_once_for_all_clients(states_one_model: bool, made: int) -> None:
    calls: list[int] = []

    class Counted(FedAvg):
        one_model = states_one_model

        def client_model(self, state: Any, down: Any, view: ClientView) -> ClientModel:
            calls.append(view.info.id)
            return ClientModel(down)

    run = Run(Counted(), make_federation(build_linear), RunSettings(rounds=1), Sequential())
    actual = run.evaluate()
    assert len(calls) == made
    assert actual is not None
    plain = Run(FedAvg(), make_federation(build_linear), RunSettings(rounds=1), Sequential()).evaluate()
    assert plain is not None
    assert actual == plain
