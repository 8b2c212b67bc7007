"""Secure sums of real processes with TLS and keys: the plain run's model, and a site that is killed at each step."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.engines.sequential import Sequential
from fedlowrank.network.deploy.flower_process import find_free_port
from fedlowrank.network.secure.contributions import encode_contribution, make_grid
from fedlowrank.network.secure.leader import vector_to_bytes
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage import checkpoint
from tests.network.deployments import (
    COMMAND,
    CommandProcess,
    count_rounds,
    make_deployment_tables,
    wait_while_running,
    write_tables,
)

STEPS = ["announce", "share", "mask", "agree", "reveal"]
MASKED = STEPS.index("mask")

# Python runs this module in every process at its start; the package has no such switch
DEATHS = """
import os, signal, sys
from pathlib import Path

if "fedlowrank.network.deploy.node" in sys.orig_argv:
    from fedlowrank.network.secure.participation import Participation

    ARMED = Path({armed!r})

    def dying(take):
        def taken(self, order, *more):
            if ARMED.exists() and ARMED.read_text() == order.step:
                ARMED.rename(ARMED.with_name(f"died-{{order.step}}-{{order.round + 1}}"))
                # `fedlowrank join`, which would start it again, and the node
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return take(self, order, *more)
        return taken

    Participation.step, Participation.mask = dying(Participation.step), dying(Participation.mask)
"""


class Deployment:
    """A server and its sites as processes, with keys of a roster.

    Args:
        folder: of the files.
        clients: how many sites there are.
        rounds: of the run.
        processes: closes all processes in the end.
    """

    def __init__(self, folder: Path, clients: int, rounds: int, processes: list[CommandProcess]) -> None:
        self.folder, self.out, self.processes = folder, folder / "server" / "run", processes
        planned = make_deployment_tables("scaffold", rounds=rounds)
        planned["partition"]["clients"] = clients
        del planned["lora"]
        planned["run.secure"] = {"on": True, "bits": 30, "bound": 8.0}
        # Flower counts a killed site as connected for up to a minute, and the server waits only for one that is not
        planned["network"] |= {"deadline": 15.0, "attempts": 6}
        file = write_tables(folder / "t.toml", planned)
        self.made = ExperimentConfig.read(file)
        keys, port = folder / "keys", find_free_port()
        subprocess.run(
            [*COMMAND, "keys", str(keys), "--clients", str(clients)], check=True, capture_output=True
        )
        where = ("--keys", str(keys / "server"), "--port", str(port), "-o", str(self.out))
        self.server = CommandProcess(folder / "serve.log", "serve", str(file), *where)
        processes.append(self.server)
        self.sites: list[CommandProcess] = []
        for client in range(clients):
            options = ["--server", f"127.0.0.1:{port}", "--keys", str(keys / f"client-{client}")]
            options += ["--client", str(client), "--folder", str(folder / f"client-{client}")]
            with self._hook(client):
                site = CommandProcess(folder / f"join{client}.log", "join", str(file), *options)
            self.sites.append(site)
            processes.append(site)

    @contextmanager
    def _hook(self, client: int) -> Iterator[None]:
        """Processes that are started now die where the file ``armed`` says."""
        hooks = self.folder / f"hooks-{client}"
        hooks.mkdir(exist_ok=True)
        (hooks / "sitecustomize.py").write_text(DEATHS.format(armed=str(hooks / "armed")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]))
            yield

    def kill_at(self, client: int, step: str) -> int:
        """Kill a site at a step of a later round, start it again, and wait until it is back; returns that round."""
        wait_while_running(lambda: count_rounds(self.out) >= 1, 400, self.server)
        hooks = self.folder / f"hooks-{client}"
        (hooks / "armed").write_text(step)
        wait_while_running(lambda: self.sites[client].process.poll() is not None, 100, self.server)
        (died,) = hooks.glob(f"died-{step}-*")
        with self._hook(client):
            self.sites[client].start()
        t = int(died.name.rpartition("-")[2])
        wait_while_running(lambda: count_rounds(self.out) > t and not self.lost()[-1], 200, self.server)
        return t

    def stop(self) -> None:
        """End the server and the sites after a round."""
        for one in self.processes:
            one.close()

    def lost(self) -> list[set[str]]:
        """The clients that each round lost, from the first round."""
        return [set(record.lost) for record in RunRecord.load(self.out).rounds[1:]]

    def plain(self, lost: list[set[str]], watch: Callable[[int, Any, int], None] | None = None) -> Run:
        """The run within this process without secure sums, in which these replies are lost."""
        tables = {"run": {"secure": {"on": False, "bits": 22, "bound": 8.0}}}
        made = self.made.overlay(tables)
        run = Run(made.build_method(made.default_method), made.federation(), made.run, Sequential())
        if watch is not None:
            contribute = run.contribute

            def watched(info: Any, upload: Any) -> Any:
                actual = contribute(info, upload)
                watch(info.id, actual, run.round)
                return actual

            run.contribute = watched  # type: ignore[method-assign]
        for names in lost:
            run.step(lost_replies=dict.fromkeys(names, "gone"))
        return run

    def assert_close(self, run: Run) -> None:
        """The server's model is that of a plain run, to the grid of the sums."""
        stored = checkpoint.load(self.out / "checkpoint")
        assert stored.round == run.round
        step = 8.0 / (2**29 - 1)
        pairs = list(zip(tree.tensors(stored.server), tree.tensors(run.state.server), strict=True))
        # and the rounding of float32; a reply more or less is ten times as much
        assert all(float((a - b).abs().max()) < 2 * run.round * (step + 2**-24) for a, b in pairs)

    def vectors(self, lost: list[set[str]], last: int = 1) -> list[bytes]:
        """The vectors that are added up in the last rounds of a plain run."""
        grid, actual = make_grid(self.made.run.secure, len(self.sites)), list[bytes]()

        def watch(client: int, contribution: Any, t: int) -> None:
            if t >= len(lost) - last:
                actual.append(vector_to_bytes(encode_contribution(contribution, grid, None)))

        self.plain(lost, watch)
        return actual


def found_in(folder: Path, vectors: list[bytes]) -> list[Path]:
    """Files that hold eight numbers in a row of a vector."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    parts = [v[i : i + 64] for v in vectors for i in range(8, len(v) - 64, 64)]
    return [
        path for path in files if any(part in content for content in [path.read_bytes()] for part in parts)
    ]


@pytest.mark.full
@pytest.mark.timeout(840)
@pytest.mark.usefixtures("no_process_left")
def test_the_model_of_an_undisturbed_run_is_that_of_the_plain_run(
    tmp_path: Path, processes: list[CommandProcess]
) -> None:
    here = Deployment(tmp_path, 3, 2, processes)
    wait_while_running(lambda: here.server.process.poll() is not None, 300)
    assert here.server.process.returncode == 0, here.server.log.read_text()[-3000:]
    for site in here.sites:
        site.process.wait(60)
        assert site.process.returncode == 0, site.log.read_text()[-3000:]
    assert here.lost() == [set(), set()]
    here.assert_close(here.plain(here.lost()))
    vectors = here.vectors(here.lost(), 2)
    assert len(set(vectors)) == 6
    assert not found_in(here.out.parent, vectors)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("no_process_left")
def test_of_four_sites_one_is_killed_at_each_step(tmp_path: Path, processes: list[CommandProcess]) -> None:
    """Three are enough: a vector that had arrived is in the total, and the site takes part again later."""
    here = Deployment(tmp_path, 4, 1000, processes)
    died = {step: (i % 4, here.kill_at(i % 4, step)) for i, step in enumerate(STEPS)}
    here.stop()
    lost = here.lost()
    for step, (client, t) in died.items():
        assert lost[t - 1] == ({str(client)} if STEPS.index(step) <= MASKED else set()), step
    # no round gave nothing, and each that was not masked for lacks a site at most
    assert max(map(len, lost)) == 1
    here.assert_close(here.plain(lost))


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("no_process_left")
def test_of_three_sites_none_may_vanish_and_the_run_goes_on(
    tmp_path: Path, processes: list[CommandProcess]
) -> None:
    """The round in which one is killed is lost, and nothing of it is in the server's files."""
    here = Deployment(tmp_path, 3, 1000, processes)
    died = {step: here.kill_at(i % 3, step) for i, step in enumerate(STEPS[1:])}
    here.stop()
    lost, records = here.lost(), RunRecord.load(here.out).rounds
    for step, t in died.items():
        assert lost[t - 1] == {"0", "1", "2"}, step
        assert "and 3 must" in json.dumps(records[t].lost), step
        # the vectors that this round would have added up
        vectors = here.vectors([*lost[: t - 1], set()])
        assert len(set(vectors)) == 3
        assert not found_in(here.out.parent, vectors), step
    assert all(len(names) in (0, 3) for names in lost)
    here.assert_close(here.plain(lost))
