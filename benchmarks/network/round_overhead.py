"""What the network costs: seconds a round and bytes, against the same run in one process and against Flower's own floor.

    python benchmarks/network/round_overhead.py [--clients 10,50] [--deployed 4] [--rounds 6] [--out docs/results/network.md]

The floor is a Flower app without this package: a client that imports torch and sends back what it got, of the same size, at as
many nodes. What is compared is the time of one wave of messages, the median over all rounds but the first, floor and ours in
one run of this script. The work of a client (a small network, handwritten digits) takes milliseconds. Bytes: what records count
is the encoded trees; what is sent besides are the words of the messages and Flower's frames.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid, ServerApp

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.io.atomic_files import write_json
from fedlowrank.network.client import prepare
from fedlowrank.network.deploy.flower_app import write_app, write_own_app
from fedlowrank.network.deploy.flower_process import FlowerProcess, find_free_port
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from fedlowrank.network.flower import (
    EXPERIMENT,
    OUT,
    GridTransport,
    from_records,
    make_server_app,
    run_flower_simulation,
    to_records,
)
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import Exchange, NodeMessage
from fedlowrank.rounds.simulate import simulate
from fedlowrank.storage.run_files import read_lines

SIZE = 100_000
"""Bytes of the floor's messages, about those of ours."""

ATTEMPTS = 4
"""How often a node is asked whose message was lost, as a busy server loses some; the time counts to the wave."""


def tables(clients: int, rounds: int) -> dict[str, Any]:
    """FedAvg of a small network on handwritten digits; all clients in every round."""
    return {
        "name": f"overhead-{clients}",
        "method": "fedavg",
        "data": {"source": "digits"},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"names": ["mlp"], "hidden": [320]},
        "run": {"rounds": rounds, "representations": 0, "evaluate_every": rounds},
    }


def waves(grid: Grid, nodes: int, rounds: int) -> list[float]:
    """Seconds of each wave of messages that clients send back unread; a lost message is sent again."""
    carrier, found = GridTransport(grid), []
    while len(carrier.nodes()) < nodes:
        time.sleep(0.1)
    # a node whose sign of life is late is missing for a moment
    known = sorted(carrier.nodes())
    for t in range(rounds):
        missing, problems, start = set(known), list[str](), time.perf_counter()
        for attempt in range(ATTEMPTS):
            messages = [NodeMessage(n, "order", "{}", bytes(SIZE)) for n in sorted(missing)]
            for reply in Exchange(carrier, 300.0).run_round_trip(messages, f"{t}-{attempt}", 300.0):
                if reply.problem:
                    problems.append(reply.problem)
                else:
                    missing.discard(reply.node)
            if not missing:
                break
        else:
            raise RuntimeError(f"{len(missing)} nodes did not answer {ATTEMPTS} messages each: {problems}")
        found.append(time.perf_counter() - start)
        if attempt:
            print(f"wave {t}: {attempt + 1} attempts {problems}", file=sys.stderr)
    return found


def echo() -> ClientApp:
    """A client that does nothing."""
    app = ClientApp()

    @app.train("order")
    def order(message: FlowerMessage, context: Context) -> FlowerMessage:
        import torch

        torch.set_num_threads(1)
        del context
        return FlowerMessage(to_records(*from_records(message.content)), reply_to=message)

    return app


def floor_main(grid: Grid, context: Context) -> None:
    """The floor's server in a deployment; its figures go to a file."""
    config = context.run_config
    found = waves(grid, int(config["nodes"]), int(config["rounds"]))
    Path(str(config["out"])).write_text(json.dumps(found))


floor_client = echo()
floor_server = ServerApp()
floor_server.main()(floor_main)


def in_simulation(base: Path, clients: int, rounds: int) -> tuple[list[float], list[float], dict[str, int]]:
    """Seconds of the floor's waves, of ours, and bytes of ours."""
    from flwr.simulation import run_simulation

    floor: list[float] = []
    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}

    def measure(grid: Grid, context: Context) -> None:
        del context
        floor.extend(waves(grid, clients, rounds))

    run_simulation(make_server_app(measure), echo(), clients, backend_config=resources)
    made = ExperimentConfig.parse(tables(clients, rounds))
    out = base / f"sim-{clients}"
    run_flower_simulation(made, out, base / f"sim-{clients}.clients")
    return floor, *figures(out)


def figures(out: Path) -> tuple[list[float], dict[str, int]]:
    """Seconds of every round's wave, and bytes of a run."""
    rows = [json.loads(line) for line in read_lines(out)][1:]
    counted = sum(r["bytes_down"] + r["bytes_up"] for r in rows)
    return [r["seconds"]["train"] for r in rows], {
        "counted": counted,
        "messages": 2 * sum(len(r["participants"]) for r in rows),
    }


def in_process(clients: int, rounds: int) -> list[float]:
    """Seconds of training of the rounds of the wire engine."""
    made = ExperimentConfig.parse(tables(clients, rounds))
    settings = dataclasses.asdict(dataclasses.replace(made.run, engine="wire"))
    return [
        r.seconds["train"]
        for r in simulate(made.build_method("fedavg"), made.federation(), **settings).rounds[1:]
    ]


class FlowerNode(FlowerProcess):
    """Flower's own SuperNode, which runs the floor's app; :class:`SuperNode` runs no app but fedlowrank's."""

    def start(self) -> None:
        """Start it."""
        self._prepare()
        command = [
            str(Path(sys.executable).with_name("flower-supernode")),
            "--insecure",
            "--superlink",
            self.address,
            "--host",
            "127.0.0.1",
        ]
        self._launch([*command, "--port", str(find_free_port())])


@contextmanager
def server(base: Path, **variables: str) -> Iterator[SuperLink]:
    """A server on loopback."""
    with SuperLink(base / "server", None, variables=variables) as link:
        yield link


def finished(link: SuperLink, run: int) -> None:
    """Wait for the end of a run."""
    while not (status := link.status(run)).is_finished:
        time.sleep(5)
    if not status.is_completed:
        raise RuntimeError(f"{status}: {link.tail(50)}")


def deployed(base: Path, clients: int, rounds: int) -> tuple[list[float], list[float], dict[str, int]]:
    """As :func:`in_simulation`, with clients on loopback."""
    result = base / "floor.json"
    # the floor's apps are objects of this file
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    with server(base / "a", **path) as link, ExitStack() as stack:
        for i in range(clients):
            flower_node = FlowerNode(base / "floor-nodes" / str(i), "supernode", link.address, path)
            flower_node.start()
            stack.callback(flower_node.close)
        config = {"nodes": clients, "rounds": rounds, "out": str(result)}
        write_app(
            base / "floor", "floor", "round_overhead:floor_server", "round_overhead:floor_client", config
        )
        finished(link, link.submit(base / "floor"))
    made, out = ExperimentConfig.parse(tables(clients, rounds)), base / "net"
    write_json(base / "experiment.json", made.to_dict())
    shares = made.shares()
    with (
        server(base / "b", **{EXPERIMENT: str(base / "experiment.json"), OUT: str(out)}) as link,
        ExitStack() as stack,
    ):
        for i in range(clients):
            folder = base / "clients" / str(i)
            prepare(folder, made, i, shares, SiteSettings.simulated())
            node = SuperNode(folder / "flower", link.address, folder, None)
            node.start()
            stack.callback(node.close)
        write_own_app(base / "app")
        finished(link, link.submit(base / "app"))
    return json.loads(result.read_text()), *figures(out)


def frame(payload: int) -> int:
    """Bytes by which Flower's records and our words exceed the tree in a message."""
    header = json.dumps(
        {
            "run": "0" * 16,
            "round": 1000,
            "stamp": 1000,
            "train": True,
            "evaluate": True,
            "sizes": None,
            "last": False,
        }
    )
    return len(recorddict_to_proto(to_records(header, bytes(payload))).SerializeToString()) - payload


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="10,50")
    parser.add_argument("--deployed", default="4")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    lines = [
        "| clients | where | in process, s | floor, s | fedlowrank, s | fedlowrank / floor |",
        "| ---: | :--- | ---: | ---: | ---: | ---: |",
    ]
    sizes = [
        "| clients | messages | counted, bytes | frames and headers, bytes | more |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    plan = [(int(n), "simulation") for n in args.clients.split(",")] + [
        (int(n), "deployment") for n in args.deployed.split(",") if n
    ]
    for clients, where in plan:
        with tempfile.TemporaryDirectory() as name:
            how = in_simulation if where == "simulation" else deployed
            floor, ours, counts = how(Path(name), clients, args.rounds)
        middle = [statistics.median(x[1:]) for x in (in_process(clients, args.rounds), floor, ours)]
        shown = " | ".join(f"{x:.3f}" for x in middle)
        lines.append(f"| {clients} | {where} | {shown} | {middle[2] / middle[1]:.2f} |")
        more = counts["messages"] * frame(counts["counted"] // counts["messages"])
        sizes.append(
            f"| {clients} | {counts['messages']} | {counts['counted']} | {more} | {100 * more / counts['counted']:.2f} % |"
        )
        print(lines[-1], sizes[-1], sep="\n", flush=True)
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    text = "\n".join(
        [f"Machine: {machine}; Flower with one process a message in the deployment.", "", *lines, "", *sizes]
    )
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
