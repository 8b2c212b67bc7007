"""Clients on the workers of a Ray cluster: the sequential engine's bits, whichever worker dies."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedlowrank.core.errors import ConfigError, FedlowrankError, NonFiniteError, TaskError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.data.pixels import Pixels
from fedlowrank.engines import Ray, Sequential, ray_cluster
from fedlowrank.engines.processes import WorkerError
from fedlowrank.engines.ray_worker import decode_partition, encode_partition, share
from fedlowrank.methods import METHODS
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import small_federation
from tests.support.engine_runs import has_same_end, run_to_end

# of Ray's own code
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
slow = pytest.mark.full
STORE = 200 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        environment.delenv("RAY_ADDRESS", raising=False)
        # workers import the methods of this file
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        made.add_node(num_cpus=1, object_store_memory=STORE)
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


class UnluckyError(TaskError):
    """An error of the user's, whose constructor takes something else than its message."""

    def __init__(self, client: int) -> None:
        super().__init__(f"client {client} is out of luck", python="Call help().", command="Type help.")
        self.client = client


@dataclasses.dataclass(frozen=True)
class Deadly(FedAvg):
    """Fails at client 1: by an exception, or by the end of its process, once or always."""

    how: str = "raise"
    note: str = ""

    def local_update(self, state: Any, down: Any, view: Any) -> Any:
        if (view.info.id, view.round) == (1, 1):
            if self.how == "raise":
                raise ValueError("no such thing")
            if self.how == "package error":
                raise UnluckyError(1)
            if self.how == "always" or not Path(self.note).exists():
                Path(self.note).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(state, down, view)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'fedlowrank\[ray\]'"):
        run_to_end(FedAvg(), Ray(), rounds=1)


def test_a_partition_holds_the_training_data_of_its_clients_alone() -> None:
    on = small_federation(False)
    data = encode_partition(on, [0, 3])
    actual = decode_partition(data)
    assert list(actual) == [0, 3]
    assert all(torch.equal(actual[i][0].y, on.clients[i].train.y) for i in actual)
    assert all(torch.equal(actual[i][0].inputs, on.clients[i].train.inputs) for i in actual)
    shared = share(FedAvg(), on, on.task(1), None)
    assert {len(c.train) for c in shared.federation.clients} == {0}
    assert all(a is shared.task.architectures[n] for n, a in shared.federation.architectures.items())


def test_images_that_are_stored_as_bytes_stay_bytes() -> None:
    images = torch.randint(4, (2, 6, 3, 2, 2)).float()
    clients = [{"train": (x, torch.arange(6) % 2)} for x in images]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    on = Federation.from_arrays(clients, model).pack_images()
    (train, _) = decode_partition(encode_partition(on, [1]))[1]
    assert isinstance(train.x, Pixels)
    assert torch.equal(train.inputs, images[1])
    empty = share(FedAvg(), on, on.task(1), None).federation.clients[0].train
    assert isinstance(empty.x, Pixels)
    assert len(empty) == 0


@pytest.mark.usefixtures("cluster")
def test_the_sequential_engine_s_bits() -> None:
    assert has_same_end(
        run_to_end(METHODS["scaffold"](), Ray()), run_to_end(METHODS["scaffold"](), Sequential())
    )


@slow
@pytest.mark.usefixtures("cluster")
def test_two_architectures() -> None:
    on = small_federation(True)
    assert len(on.architectures) == 2
    method = METHODS["pfedlora"]()
    assert has_same_end(run_to_end(method, Ray(), on), run_to_end(method, Sequential(), on))


@slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["fedit", "fedhl", "fedspa"])
def test_low_rank_and_masked_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # several windows a round
    monkeypatch.setattr(ray_cluster, "MEAN_CLIENTS_PER_TASK", 1)
    monkeypatch.setattr(ray_cluster, "MAX_WINDOWS", 2)
    method = METHODS[name]()
    assert has_same_end(run_to_end(method, Ray()), run_to_end(method, Sequential()))


@slow
@pytest.mark.usefixtures("cluster")
def test_training_that_diverges_is_the_client_s() -> None:
    method = FedAvg(optimizer=SGD(lr=1e30))
    said = []
    for engine in (Ray(), Sequential()):
        run = Run(method, small_federation(False), RunSettings(rounds=2), engine)
        run.step()
        with pytest.raises(NonFiniteError, match="client 0, round 2") as error:
            run.step()
        said.append(str(error.value))
        engine.close()
    assert said[0] == said[1]


@slow
@pytest.mark.usefixtures("cluster")
def test_an_exception_of_a_method_comes_out_with_its_text() -> None:
    engine = Ray()
    run = Run(Deadly(), small_federation(False), RunSettings(rounds=2), engine)
    run.step()
    with pytest.raises(WorkerError, match="ValueError: no such thing"):
        run.step()
    assert run.round == 1
    # and it can be used again
    assert has_same_end(run_to_end(FedAvg(), engine), run_to_end(FedAvg(), Sequential()))


@slow
@pytest.mark.usefixtures("cluster")
def test_an_error_of_the_package_is_that_of_the_sequential_engine() -> None:
    errors = []
    for engine in (Sequential(), Ray()):
        run = Run(Deadly(how="package error"), small_federation(False), RunSettings(rounds=2), engine)
        run.step()
        with pytest.raises(FedlowrankError) as raised:
            run.step()
        errors.append(raised.value)
        engine.close()
    expected, actual = errors
    assert type(actual) is type(expected) is UnluckyError
    assert str(actual) == str(expected)
    assert vars(actual) == vars(expected)
    # the traceback of the worker is still at hand
    assert isinstance(actual.__cause__, WorkerError)
    assert "in local_update" in str(actual.__cause__)


@slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("workers", [1, 2])
def test_clients_of_a_worker_that_dies_are_run_again(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = Deadly(how="once", note=str(tmp_path / "died"))
    with caplog.at_level("WARNING", logger="fedlowrank.engines"):
        actual = run_to_end(method, Ray(workers=workers))
    assert Path(method.note).exists()
    assert has_same_end(actual, run_to_end(FedAvg(), Sequential()))
    (warning,) = [r.getMessage() for r in caplog.records if "died" in r.getMessage()]
    assert "of its clients are run again" in warning
    assert "process " in warning


@slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_was_dead_before_it_got_clients_did_not_die_with_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # a second death with the same clients would end the run
    monkeypatch.setattr(ray_cluster, "MAX_ATTEMPTS", 2)
    submit, submitted = ray_cluster._submit, []

    def kill_all_workers(pool: Any, block: Any) -> None:
        submit(pool, block)
        submitted.append(block)
        if len(submitted) == 2:
            # the first worker's clients go to the second one before Ray has noticed its death
            for worker in pool.owners:
                os.kill(int(worker.location.split()[1]), signal.SIGKILL)

    monkeypatch.setattr(ray_cluster, "_submit", kill_all_workers)
    with caplog.at_level("WARNING", logger="fedlowrank.engines"):
        actual = run_to_end(FedAvg(), Ray())
    assert len([r for r in caplog.records if "died" in r.getMessage()]) == 2
    assert has_same_end(actual, run_to_end(FedAvg(), Sequential()))


@slow
@pytest.mark.usefixtures("cluster")
def test_a_client_that_always_kills_its_worker_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "MAX_ATTEMPTS", 2)
    run = Run(
        Deadly(how="always", note=str(tmp_path / "died")),
        small_federation(False),
        RunSettings(rounds=2),
        Ray(),
    )
    run.step()
    with pytest.raises(WorkerError, match=r"died 2 times while they trained clients \[1, 3\]"):
        run.step()
    assert run.round == 1


@slow
@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_pickled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(6, 3)
    model.lock = threading.Lock()  # type: ignore[assignment]
    clients = [(torch.randn(20, 6), torch.arange(20) % 3) for _ in range(2)]
    with pytest.raises(ConfigError, match="cannot be pickled"):
        run_to_end(FedAvg(), Ray(), Federation.from_arrays(clients, model), rounds=1)


SCRIPT = """
import torch
from dataclasses import dataclass
from fedlowrank import Federation, Method, simulate, supervised_loss
from fedlowrank.core import tree
from fedlowrank.methods.fedavg import FedAvg

@tree.tree_dataclass
class Count:
    rounds: int

@dataclass(frozen=True)
class Counts(FedAvg):
    def client_init(self, client, task):
        return Count(0)

    def local_update(self, state, down, view):
        _, upload = super().local_update(None, down, view)
        return Count(state.rounds + 1), upload

if __name__ == "__main__":
    clients = [(torch.ones(8, 2), torch.arange(8) % 2) for _ in range(3)]
    run = simulate(Counts(), Federation.from_arrays(clients, torch.nn.Linear(2, 2)), rounds=2, engine="ray").run
    print("rounds of the client:", run.state.clients[0].rounds)
"""


@slow
def test_a_script_with_classes_of_its_own_finds_the_cluster_by_its_address(
    cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    actual = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "rounds of the client: 2" in actual.stdout, actual.stderr


@slow
def test_a_node_that_dies_in_a_round(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the last test: the node does not come back
    monkeypatch.setattr(ray_cluster, "MEAN_CLIENTS_PER_TASK", 1)
    monkeypatch.setattr(ray_cluster, "MAX_WINDOWS", 2)
    engine, method, on = Ray(), METHODS["scaffold"](), small_federation(False, client_count=10)
    run = Run(method, on, RunSettings(rounds=2), engine)
    results = engine.run

    def dying(*arguments: Any) -> Iterator[Any]:
        for i, result in enumerate(results(*arguments)):
            if i == 1:
                assert engine._pool is not None
                pids = [int(w.location.split()[1]) for w in engine._pool.owners]
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
                # a worker notices that its node is gone a moment later, and answers until then
                end = time.monotonic() + 60
                while all(psutil.pid_exists(p) for p in pids) and time.monotonic() < end:
                    time.sleep(0.1)
            yield result

    monkeypatch.setattr(engine, "run", dying)
    with caplog.at_level("WARNING", logger="fedlowrank.engines"):
        run.step()
    assert [r.getMessage() for r in caplog.records if "clients are run again" in r.getMessage()]
    monkeypatch.setattr(engine, "run", results)
    run.step()
    engine.close()
    whole = Run(method, on, RunSettings(rounds=2), Sequential())
    for _ in range(2):
        whole.step()
    assert has_same_end(run, whole)
