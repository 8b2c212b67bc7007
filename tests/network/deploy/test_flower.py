"""Flower itself: its simulation, and a deployment whose processes are killed.

All methods are in benchmarks/network/equality_with_sequential.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError
from fedlowrank.engines import Sequential
from fedlowrank.network.deploy import process_tree
from fedlowrank.network.deploy.flower_process import find_free_port
from fedlowrank.network.flower import from_records, to_records
from fedlowrank.network.persistence.client_memory import ClientMemory
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage import checkpoint
from fedlowrank.storage.lock import exclusive, is_in_use
from tests.network.deployments import (
    COMMAND,
    CommandProcess,
    count_rounds,
    make_deployment_tables,
    wait_while_running,
    write_tables,
)


def gone_over_again(made: ExperimentConfig, records: list[Any]) -> Run:
    """The run in this process, losing just the replies that the records name."""
    run = Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())
    for record in records[1:]:
        run.step(lost_replies=record.lost)
    return run


def assert_equal(run: Run, out: Path, folder_of: Callable[[int], Path]) -> None:
    stored = checkpoint.load(out / "checkpoint")
    assert stored.round == run.round
    assert tree.equal(stored.server, run.state.server)
    name = json.loads((out / "network.json").read_text())["run"]
    for i in range(3):
        stamp = stored.clients.get(i, {"stamp": 0})["stamp"]
        assert (stamp > 0) == (i in run.state.clients)
        assert tree.equal(ClientMemory(folder_of(i) / name).read_state(stamp), run.state.clients.get(i))


def test_a_message_is_words_and_one_buffer() -> None:
    payload = bytes(range(256)) * 10
    records = to_records('{"a": 1}', payload)
    assert from_records(records) == ('{"a": 1}', payload)
    assert len(records.array_records["payload"]) == 1


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedhl", pytest.param("scaffold", marks=pytest.mark.full)])
def test_a_simulation_by_flower_is_the_sequential_run(tmp_path: Path, method: str) -> None:
    pytest.importorskip("ray")
    file = write_tables(tmp_path / "t.toml", make_deployment_tables(method))
    out = tmp_path / "run"
    # a process of its own: Ray leaves threads and warnings behind
    done = subprocess.run(
        [*COMMAND, "run", str(file), "--engine", "flower", "-o", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "FLWR_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = ExperimentConfig.parse(make_deployment_tables(method))
    records = RunRecord.load(out).rounds
    run = gone_over_again(made, records)
    assert [r.lost for r in records] == [{}, {}, {}]
    assert_equal(run, out, lambda i: out.with_name("run.clients") / str(i))
    # evaluation rode on the orders: no round lacks it
    measured = run.evaluate()
    assert measured is not None
    actual = [c for c in records[-1].measured.columns if c.name == "loss"]
    assert actual == [c for c in measured.columns if c.name == "loss" and c.series != "server"]


@pytest.mark.full
@pytest.mark.timeout(840)
def test_a_deployment_whose_client_and_server_are_killed_ends_as_the_sequential_run(
    tmp_path: Path, processes: list[CommandProcess]
) -> None:
    # long enough that the orphans do not end by themselves before they are found
    planned = make_deployment_tables("scaffold", rounds=12)
    file, out, port = write_tables(tmp_path / "t.toml", planned), tmp_path / "run", find_free_port()
    subprocess.run(
        [*COMMAND, "keys", str(tmp_path / "keys"), "--clients", "3"], check=True, stdout=subprocess.DEVNULL
    )

    def serve(*more: str) -> CommandProcess:
        where = ("--keys", str(tmp_path / "keys" / "server"), "--port", str(port), "-o", str(out))
        processes.append(CommandProcess(tmp_path / "serve.log", "serve", str(file), *where, *more))
        return processes[-1]

    def join(client: int) -> CommandProcess:
        keys, folder = tmp_path / "keys" / f"client-{client}", tmp_path / f"client-{client}"
        where = ("--server", f"127.0.0.1:{port}", "--keys", str(keys), "--folder", str(folder))
        processes.append(
            CommandProcess(tmp_path / f"join{client}.log", "join", str(file), "--client", str(client), *where)
        )
        return processes[-1]

    server = serve()
    clients = [join(i) for i in range(3)]
    wait_while_running(lambda: count_rounds(out) >= 1, 300, server, *clients)
    # its order is under way or about to come
    clients[1].kill()
    clients[1].start()
    wait_while_running(lambda: count_rounds(out) >= 2, 300, server)
    # the command alone: what it started goes on, and holds the port and the run folder
    orphans = set(process_tree.find_descendants(server.process.pid))
    server.process.kill()
    server.process.wait()
    assert orphans <= set(process_tree.list_living_processes())
    before = count_rounds(out)
    server = serve("--resume")
    wait_while_running(lambda: "was left running; it is ended" in server.log.read_text(), 60, server)
    wait_while_running(lambda: not orphans & set(process_tree.list_living_processes()), 10)
    wait_while_running(lambda: server.process.poll() is not None, 400)
    assert server.process.returncode == 0, server.log.read_text()[-3000:]
    for client in clients:
        client.process.wait(60)
        assert client.process.returncode == 0, client.log.read_text()[-3000:]
    records = RunRecord.load(out).rounds
    assert len(records) == 13
    assert 2 <= before < 12
    assert any("1" in r.lost for r in records)
    run = gone_over_again(ExperimentConfig.parse(planned), records)
    assert_equal(run, out, lambda i: tmp_path / f"client-{i}")
    for i in range(3):
        assert list((tmp_path / f"client-{i}").glob("*/model/model.safetensors"))


def test_in_flowers_simulation_no_update_is_shortened_unless_the_file_says_so() -> None:
    from fedlowrank.network.flower import _remove_default_bounds

    plain = make_deployment_tables("fedavg")
    del plain["network"]
    actual = _remove_default_bounds(ExperimentConfig.parse(plain)).network
    assert (actual.limits.update_ratio, actual.limits.refuse_ratio, actual.max_fall) == (0, 30, 0)
    chosen = {**plain, "network": {"max_fall": 0.1, "limits": {"update_ratio": 2.0}}}
    actual = _remove_default_bounds(ExperimentConfig.parse(chosen)).network
    assert (actual.limits.update_ratio, actual.max_fall) == (2, 0.1)


def test_the_app_for_flwr_run_holds_the_experiment(tmp_path: Path) -> None:
    import tomllib

    from fedlowrank.cli.deployment.network_commands import app

    planned = make_deployment_tables("fedavg")
    app(write_tables(tmp_path / "t.toml", planned), [], None, tmp_path / "app")
    actual = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    made = ExperimentConfig.parse(json.loads(actual["config"]["experiment"]))
    assert made == ExperimentConfig.parse(planned)
    assert actual["components"] == {
        "serverapp": "fedlowrank.network.flower:server",
        "clientapp": "fedlowrank.network.flower:client",
    }
    assert made.run.rounds == 2


def list_content(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without its locks, which every command that asks for one opens."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("locked", "has_run"), [("run", True), ("run.clients", True), ("run.clients", False)]
)
def test_a_simulation_that_runs_is_not_moved_by_a_refused_command(
    locked: str, force: bool, has_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlowrank.cli.deployment.network_commands import run_simulation
    from fedlowrank.network import flower

    def begin(made: Any, run: Path, clients: Path, hold_folders: Any, **_: Any) -> None:
        with hold_folders():
            pytest.fail("it began")

    monkeypatch.setattr(flower, "run_flower_simulation", begin)
    made = ExperimentConfig.parse(make_deployment_tables("fedavg"))
    state = tmp_path / "run.clients" / "0" / "abc" / "000003.tree"
    state.parent.mkdir(parents=True)
    state.write_text("the state of a client")
    # a simulation locks the clients' folders before there is a run folder, and while Ray starts and ends
    for folder in ("run", "run.clients") if has_run else ("run.clients",):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "network.json").write_text("{}")
    before = list_content(tmp_path)
    with exclusive(tmp_path / locked), pytest.raises(CheckpointError) as caught:
        run_simulation(made, "fedavg", tmp_path / "run", resume=False, force=force, config={})
    assert ("exists already" if has_run and not force else "in use by process") in str(caught.value)
    assert list_content(tmp_path) == before


def test_a_simulation_moves_run_and_clients_aside_and_locks_the_new_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlowrank.cli.deployment.network_commands import run_simulation
    from fedlowrank.network import flower

    in_use: list[bool] = []

    def begin(made: Any, run: Path, clients: Path, hold_folders: Any, **_: Any) -> None:
        # what is refused before leaves everything as it was
        assert list_content(tmp_path) == {"run/old": b"old", "run.clients/old": b"old"}
        with hold_folders():
            in_use.append(is_in_use(clients))

    monkeypatch.setattr(flower, "run_flower_simulation", begin)
    made = ExperimentConfig.parse(make_deployment_tables("fedavg"))
    for folder in ("run", "run.clients"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "old").write_text("old")
    run_simulation(made, "fedavg", tmp_path / "run", resume=False, force=True, config={})
    assert in_use == [True]
    assert list_content(tmp_path) == {"run.old-1/old": b"old", "run.clients.old-1/old": b"old"}
    assert not is_in_use(tmp_path / "run.clients")
