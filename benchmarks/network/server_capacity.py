"""How many clients a server carries: memory, CPU and seconds a round, beside a minimal Flower app of the same sizes.

    python benchmarks/network/server_capacity.py [--clients 50,200] [--rounds 4] [--out docs/results/network-capacity.md]

The server is a SuperLink with the ServerApp of ``fedlowrank serve``, as processes, without TLS. The clients are threads, a
hundred in a process: each has its own connection, node and folder, pulls and pushes its own messages, and answers by the
installed client runtime, one after another within a process. So the server has the load of that many sites; the sites
together have the memory of a few. A client trains a network of 100 kB on a few handwritten digits. The minimal app is that of
``benchmarks/network/round_overhead.py``: the same nodes send 100 kB back unread, and the server drops them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.io.atomic_files import write_json
from fedlowrank.network.client import prepare
from fedlowrank.network.deploy.flower_app import write_app, write_own_app
from fedlowrank.network.deploy.server_processes import SuperLink
from fedlowrank.network.flower import EXPERIMENT, OUT

THREADS = 100
"""Clients in a process."""


class Measured(NamedTuple):
    """What a run took.

    Attributes:
        seconds: of a round, the median over all but the first.
        memory: MiB of the server's processes together (resident), at most.
        cpu: CPU seconds of the server's processes for a round.
        disk: MiB of the server's database at the end.
    """

    seconds: float
    memory: float
    cpu: float
    disk: float


def tables(clients: int, rounds: int) -> dict[str, Any]:
    """FedAvg of a small network on handwritten digits; all clients in every round."""
    return {
        "name": f"capacity-{clients}",
        "method": "fedavg",
        "data": {"source": "digits"},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"names": ["mlp"], "hidden": [320]},
        "run": {"rounds": rounds, "representations": 0, "evaluate_every": rounds},
        "network": {"wait": 600.0, "deadline": max(120.0, 3.0 * clients), "min_replies": clients},
    }


def be_clients(address: str, base: Path, first: int, last: int, kind: str) -> None:
    """Run clients as threads of this process until it is terminated."""
    from flwr.supernode.fleet_http_connection import http_request_response
    from round_overhead import echo

    from fedlowrank.network import flower
    from fedlowrank.network.deploy.node import Connection, Node, PinnedApp, choose_pause

    torch.set_num_threads(1)
    # what a message was given up for stands in the log
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    is_ours = kind == "ours"
    app, one_at_a_time = flower.client if is_ours else echo(), threading.Lock()

    class AnyApp(PinnedApp):
        """Of the minimal app, too."""

        def refusal(self, run: Any) -> None:
            """Answer all messages."""

    class OpenNode(Node):
        """Of the minimal app, whose clients have no experiment that says how large an order is."""

        def _max_bytes(self, kind: str) -> int:
            return super()._max_bytes(kind) if is_ours else 1 << 20

    def answer(message: Any, context: Any) -> Any:
        with one_at_a_time:
            return app(message, context)

    def be_client(i: int) -> None:
        folder = base / "clients" / str(i)
        (folder / "flower").mkdir(parents=True, exist_ok=True)
        with http_request_response(address, True, None, None) as calls:
            node = OpenNode(Connection(*calls), answer, AnyApp("", ""), folder, folder / "flower")  # type: ignore[arg-type]
            since = time.monotonic()
            while True:
                if node.step():
                    since = time.monotonic()
                else:
                    time.sleep(choose_pause(time.monotonic() - since))

    threads = [threading.Thread(target=be_client, args=(i,), daemon=True) for i in range(first, last)]
    for thread in threads:
        thread.start()
        # two hundred do not come in the same second
        time.sleep(0.05)
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def sites(address: str, base: Path, clients: int, kind: str) -> Iterator[None]:
    """So many clients, in processes of their own."""
    started = []
    try:
        for first in range(0, clients, THREADS):
            last = min(clients, first + THREADS)
            arguments = ["--be", kind, "--server", address, "--base", str(base), "--range", f"{first}-{last}"]
            log = (base / f"{kind}-{first}.log").open("wb")
            started.append(
                subprocess.Popen([sys.executable, __file__, *arguments], stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


class Watch(threading.Thread):
    """Samples the memory and CPU time of the processes of a server."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.memory, self.cpu, self.over = (
            psutil.Process(pid),
            0,
            dict[int, float](),
            threading.Event(),
        )

    def run(self) -> None:
        """Sample twice a second."""
        while not self.over.wait(0.5):
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self.root, *self.root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_info().rss
                        times = process.cpu_times()
                        self.cpu[process.pid] = times.user + times.system
            self.memory = max(self.memory, total)


def watched(link: SuperLink, app: Path) -> Watch:
    """Submit an app and watch the server until it is over."""
    assert link.pid is not None, "it has been started"
    watch = Watch(link.pid)
    watch.start()
    run = link.submit(app)
    while not (status := link.status(run)).is_finished:
        time.sleep(5)
    watch.over.set()
    watch.join()
    if not status.is_completed:
        raise RuntimeError(f"{status}: {link.tail(50)}")
    return watch


def measured(link: SuperLink, watch: Watch, seconds: list[float], rounds: int) -> Measured:
    """The figures of a run."""
    size = sum(p.stat().st_size for p in Path(link.process_folder).glob("superlink.db*"))
    cpu = sum(watch.cpu.values()) / rounds
    return Measured(statistics.median(seconds[1:]), watch.memory / 2**20, cpu, size / 2**20)


def ours(base: Path, clients: int, rounds: int) -> Measured:
    """The package's own server."""
    made, out = ExperimentConfig.parse(tables(clients, rounds)), base / "run"
    write_json(base / "experiment.json", made.to_dict())
    shares = made.shares()
    for i in range(clients):
        prepare(base / "clients" / str(i), made, i, shares)
    write_own_app(base / "app")
    variables = {EXPERIMENT: str(base / "experiment.json"), OUT: str(out)}
    with (
        SuperLink(base / "server", None, variables=variables) as link,
        sites(link.address, base, clients, "ours"),
    ):
        watch = watched(link, base / "app")
        from fedlowrank.storage.run_files import read_lines

        rows = [json.loads(line) for line in read_lines(out)][1:]
        if lost := [r["lost"] for r in rows if r["lost"]]:
            raise RuntimeError(f"replies were lost: {lost[0]}")
        return measured(link, watch, [r["seconds"]["train"] for r in rows], rounds)


def minimal(base: Path, clients: int, rounds: int) -> Measured:
    """A Flower app that does nothing."""
    result = base / "floor.json"
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    config = {"nodes": clients, "rounds": rounds, "out": str(result)}
    write_app(base / "app", "floor", "round_overhead:floor_server", "round_overhead:floor_client", config)
    with (
        SuperLink(base / "server", None, variables=path) as link,
        sites(link.address, base, clients, "floor"),
    ):
        watch = watched(link, base / "app")
        return measured(link, watch, json.loads(result.read_text()), rounds)


HEAD = """# Capacity of a server

    python benchmarks/network/server_capacity.py --out docs/results/network-capacity.md

One server, {clients} thin clients, {rounds} rounds of FedAvg with all clients in each; a model of 100 kB, without TLS. Clients
are threads, a hundred in a process, each with a connection, a node and a folder of its own; they share the machine with the
server ({machine}). The minimal app is a Flower app in which the same nodes send 100 kB back unread. Memory: resident, of all
processes of the server together, at most. CPU: of these processes over the whole run with the start and the registrations, over
the number of rounds. Database: of the SuperLink, at the end.

| clients | server | seconds a round | CPU seconds a round | memory, MiB | database, MiB |
| ---: | :--- | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="50,200")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    for hidden in ("--be", "--server", "--base", "--range"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        first, last = map(int, args.range.split("-"))
        be_clients(args.server, Path(args.base), first, last, args.be)
        return
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = []
    for clients in map(int, args.clients.split(",")):
        for title, how in (("fedlowrank", ours), ("minimal Flower app", minimal)):
            with tempfile.TemporaryDirectory(prefix="fedlowrank-capacity-") as name:
                m = how(Path(name), clients, args.rounds)
            rows.append(
                f"| {clients} | {title} | {m.seconds:.1f} | {m.cpu:.1f} | {m.memory:.0f} | {m.disk:.0f} |"
            )
            print(rows[-1], flush=True)
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    head = HEAD.format(clients=" and ".join(args.clients.split(",")), rounds=args.rounds, machine=machine)
    text = head + "\n".join(rows) + "\n"
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
