"""Clients in processes of their own: the sequential engine's bits, whoever does the work and whatever happens
to it."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedlowrank import Federation
from fedlowrank.core import tree
from fedlowrank.core.errors import (
    ConfigError,
    FedlowrankError,
    LossError,
    NonFiniteError,
    SingleValueError,
    TaskError,
)
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines import Processes, Sequential, processes
from fedlowrank.engines.engine import ClientJob
from fedlowrank.engines.processes import WorkerDiedError, WorkerError
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.simulate import simulate
from fedlowrank.testing.check import small_federation
from fedlowrank.trust.trust_settings import Clipping
from tests.support.engine_runs import has_same_end, run_to_end

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedslr", "floral", "pfedlora"])
def test_the_sequential_engine_s_bits(name: str) -> None:
    assert has_same_end(run_to_end(METHODS[name](), Processes()), run_to_end(METHODS[name](), Sequential()))


@pytest.mark.full
def test_records_are_the_same_but_for_time() -> None:
    actual = [
        simulate("ditto", small_federation(False), rounds=3, engine=e).rounds
        for e in ("processes", "sequential")
    ]
    for a, b in zip(*actual, strict=True):
        assert dataclasses.replace(a, seconds={}, cpu_seconds={}) == dataclasses.replace(
            b, seconds={}, cpu_seconds={}
        )


@pytest.mark.full
def test_messages_longer_than_the_shared_memory_go_through_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_to_end(FedAvg(), Sequential())
    monkeypatch.setattr(processes, "SHARED_BYTES", 4096)
    assert has_same_end(run_to_end(FedAvg(), Processes()), whole)


@pytest.mark.full
def test_work_is_done_by_as_many_processes_as_cores_and_the_longest_is_begun_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Processes(workers=7)
    run = run_to_end(FedAvg(), engine, rounds=1)
    assert len(engine.costs) == 4  # of five clients, 80 % took part
    assert all(c > 0 for c in engine.costs.values())
    engine.costs = {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}
    asked: list[int] = []
    ask = processes.ForkedWorker.ask
    seen: set[int] = set()

    def noted(self: processes.ForkedWorker, words: dict[str, Any], bodies: Any) -> None:
        asked.append(words["client"])
        seen.add(self.process.pid or 0)
        ask(self, words, bodies)

    monkeypatch.setattr(processes.ForkedWorker, "ask", noted)
    infos = run.federation.infos
    jobs = [ClientJob(run.state_of(i), run.method.download(run.state.server, i), i) for i in infos]
    outcomes = list(engine.run(run.method, run.federation, run.task, 1, jobs))
    # the one of which nothing is known is begun at once; the outcomes come in the order of the jobs
    assert asked == [4, 1, 3, 2, 0]
    assert len(seen) == len(engine._pool) == 2
    order = list(Sequential().run(run.method, run.federation, run.task, 1, jobs))
    assert all(tree.equal(a.upload, b.upload) for a, b in zip(outcomes, order, strict=True))
    engine.close()


def test_a_process_has_one_thread() -> None:
    engine = Processes()
    actual = engine.each(lambda _: {"threads": torch.get_num_threads(), "pid": os.getpid()}, range(5))
    assert {f["threads"] for f in actual} == {1}
    assert len({f["pid"] for f in actual}) == 2
    assert os.getpid() not in {f["pid"] for f in actual}


@pytest.mark.full
def test_what_is_found_of_each_comes_in_their_order() -> None:
    assert Processes().each(lambda i: {"n": i * i}, range(7)) == [{"n": i * i} for i in range(7)]


@dataclasses.dataclass(frozen=True)
class Broken(FedAvg):
    """Fails at one client."""

    how: Any = "raise"

    def local_update(self, state: Any, down: Any, view: Any) -> Any:
        if view.info.id == 1:
            if self.how == "raise":
                raise ValueError("no such thing")
            os.kill(os.getpid(), self.how)
        return super().local_update(state, down, view)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: no such thing"),
        (signal.SIGKILL, "trained client 1 in round 1 was killed, perhaps for lack of memory"),
        (signal.SIGTERM, r"trained client 1 in round 1 was ended by signal 15 \(Terminated\)"),
    ],
)
def test_a_failure_is_told_and_leaves_no_process_behind(how: Any, said: str) -> None:
    engine = Processes()
    run = Run(Broken(how=how), small_federation(False), RunSettings(rounds=2), engine)
    with pytest.raises(WorkerError, match=said):
        run.step()
    assert run.round == 0
    assert engine._pool == []
    # and it can be used again
    assert has_same_end(run_to_end(FedAvg(), engine), run_to_end(FedAvg(), Sequential()))


class OwnError(TaskError):
    """An error of the user's, whose constructor takes something else than its message."""

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} is out of luck", python="Call help().", command="Type help.")
        self.client = client


ERRORS: dict[str, Callable[[], Exception]] = {
    "message": lambda: LossError("the loss is no single number. Return its mean."),
    "advice": lambda: ConfigError("lr is wrong.", python="Set lr=1.", command="Set methods.fedavg.lr=1."),
    "fields": lambda: SingleValueError("body.1", "client 1"),
    "own": lambda: OwnError(1),
    "no package": lambda: KeyError("b"),
}


@dataclasses.dataclass(frozen=True)
class Raising(FedAvg):
    """Raises one of the errors at a client."""

    kind: str = "message"

    def local_update(self, state: Any, down: Any, view: Any) -> Any:
        if view.info.id == 1:
            raise ERRORS[self.kind]()
        return super().local_update(state, down, view)


@pytest.mark.parametrize("kind", ["message", "advice", "fields", "own"])
def test_an_error_of_the_package_is_that_of_the_sequential_engine(kind: str) -> None:
    errors = []
    for engine in (Sequential(), Processes()):
        run = Run(Raising(kind=kind), small_federation(False), RunSettings(rounds=1), engine)
        with pytest.raises(FedlowrankError) as raised:
            run.step()
        errors.append(raised.value)
        engine.close()
    expected, actual = errors
    assert type(actual) is type(expected)
    assert type(actual) is not WorkerError
    assert str(actual) == str(expected)
    assert vars(actual) == vars(expected)
    # the traceback of the worker is still at hand
    assert isinstance(actual.__cause__, WorkerError)
    assert "in local_update" in str(actual.__cause__)


def test_the_error_of_a_dead_worker_can_be_sent_to_another_process() -> None:
    for exit_code in (-signal.SIGKILL, -signal.SIGTERM, 1, None):
        expected = WorkerDiedError(exit_code, "client 1 in round 1")
        actual = pickle.loads(pickle.dumps(expected))  # noqa: S301
        assert (type(actual), str(actual), vars(actual)) == (WorkerDiedError, str(expected), vars(expected))


def test_another_error_comes_with_its_traceback() -> None:
    run = Run(Raising(kind="no package"), small_federation(False), RunSettings(rounds=1), Processes())
    with pytest.raises(WorkerError, match="Traceback"):
        run.step()


def test_an_error_while_items_are_mapped_keeps_its_class() -> None:
    def fail(_: int) -> Any:
        raise ERRORS["advice"]()

    with pytest.raises(ConfigError) as raised:
        Processes().each(fail, range(3))
    assert raised.value.for_command == "lr is wrong. Set methods.fedavg.lr=1."


@pytest.mark.full
def test_training_that_diverges_is_the_client_s() -> None:
    method = FedAvg(optimizer=SGD(lr=1e30))
    for engine in (Processes(), Sequential()):
        run = Run(method, small_federation(False), RunSettings(rounds=2), engine)
        run.step()
        with pytest.raises(NonFiniteError, match="client 0, round 2") as error:
            run.step()
        assert (error.value.client_id, error.value.step) == (0, 0)
        engine.close()


@pytest.mark.full
def test_processes_end_with_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PARENT_CHECK_SECONDS", 0.1)
    note = tmp_path / "pids"
    child = os.fork()
    if child == 0:
        engine = Processes()
        run_to_end(FedAvg(), engine, rounds=1)
        engine._prepare(FedAvg(), small_federation(False), None)  # type: ignore[arg-type]
        note.with_suffix(".new").write_text(" ".join(str(w.process.pid) for w in engine._pool))
        note.with_suffix(".new").rename(note)
        time.sleep(60)
        os._exit(0)
    try:
        end = time.monotonic() + 60
        while not note.exists() and time.monotonic() < end:
            time.sleep(0.05)
        pids = [int(p) for p in note.read_text().split()]
        assert len(pids) == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while any(_alive(p) for p in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_alive(p) for p in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# User code may read values that change between rounds

FACTOR = [1.0]


def scaled_loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return FACTOR[0] * functional.cross_entropy(scores, y, reduction="none")


@dataclasses.dataclass(frozen=True)
class ScaledUpload(FedAvg):
    def local_update(self, state: Any, down: Any, view: Any) -> tuple[Any, Any]:
        state, upload = super().local_update(state, down, view)
        return state, tree.map_leaves(lambda t: FACTOR[0] * t, upload)


@pytest.mark.parametrize("user_code", ["loss", "method", "protected method"])
def test_workers_see_what_user_code_sees_now(user_code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for engine in (Processes(), Sequential()):
        monkeypatch.setitem(globals(), "FACTOR", [1.0])
        federation = small_federation(False)
        settings: dict[str, Any] = {"clipping": Clipping(10.0)} if user_code == "protected method" else {}
        data = [(c.train.x, c.train.y) for c in federation.clients]
        if user_code == "loss":
            federation = Federation.from_arrays(data, lambda: nn.Linear(6, 3), classes=3, loss=scaled_loss)
        method = FedAvg() if user_code == "loss" else ScaledUpload()
        run = Run(method, federation, RunSettings(rounds=3, evaluate_every=10, **settings), engine)
        for factor in (1.0, 0.5, 0.25):
            FACTOR[0] = factor
            run.step()
        ends.append(tree.encode(run.state.server))
        engine.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("change", ["a slope", "a dropout that ends"])
def test_workers_see_the_options_of_layers_as_they_are_now(change: str) -> None:
    ends = []
    for engine in (Processes(), Sequential()):
        data = [(c.train.x, c.train.y) for c in small_federation(False).clients]
        rectifier, dropout = nn.LeakyReLU(0.5), nn.Dropout(0.5 if "dropout" in change else 0.0)
        network = nn.Sequential(nn.Linear(6, 8), rectifier, dropout, nn.Linear(8, 3))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for layer in (network[0], network[3]):
                layer.reset_parameters()
        federation = Federation.from_arrays(data, network, classes=3)
        run = Run(FedAvg(), federation, RunSettings(rounds=3, evaluate_every=10), engine)
        for round_ in range(3):
            if change == "a slope":
                rectifier.negative_slope = 0.5 / (1 + round_)
            elif round_ == 1:
                dropout.p = 0.0
            run.step()
        ends.append(tree.encode(run.state.server))
        engine.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("engine", ["auto", "processes"])
def test_a_daemon_forks_no_workers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of multiprocessing.Pool, which may have no children."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    federation = small_federation(False)
    if engine == "processes":
        with pytest.raises(ConfigError, match=r"in a daemonic one.*engine = 'sequential'"):
            simulate("fedavg", federation, rounds=1, engine=engine)
    else:
        assert not processes.can_fork()
        assert simulate("fedavg", federation, rounds=1, engine=engine).rounds


def test_a_limit_of_the_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", fail)
    with pytest.raises(
        WorkerError, match=r"cannot share 512 MiB of memory: Cannot allocate memory.*'sequential'"
    ):
        run_to_end(FedAvg(), Processes())
