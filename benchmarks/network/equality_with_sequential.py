"""Every registered method over Flower, in its simulation and in a deployment on loopback, against the sequential engine.

    python benchmarks/network/equality_with_sequential.py [--methods fedavg,fedhl] [--rounds 4]
        [--out docs/results/network-equal.md]

The deployment is a SuperLink with TLS and registered keys, and four client nodes, each a process with a folder of its own that is
started anew for every method. A method passes if the server's state after the last round equals
the sequential engine's bit for bit, and so does every client's. Written as Markdown.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.io.atomic_files import write_json
from fedlowrank.methods import METHODS
from fedlowrank.network.client import prepare
from fedlowrank.network.deploy.flower_app import write_own_app
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, make_keys
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from fedlowrank.network.flower import EXPERIMENT, NODES, OUT, run_flower_simulation
from fedlowrank.network.persistence.client_memory import ClientMemory
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.simulate import simulate
from fedlowrank.storage import checkpoint

CLIENTS = 4


def tables(name: str, rounds: int) -> dict[str, Any]:
    """An experiment small enough for all methods: handwritten digits, unequal shares, unequal ranks where a method takes them."""
    equal = {"fedit", "ffa_lora", "fedsa_lora", "fedex_lora"}
    models = ["cnn_floral", "mlp"] if METHODS[name].heterogeneous else ["mlp"]
    return {
        "name": f"equal-{name}".replace("_", "-"),
        "method": name,
        "data": {"source": "digits"},
        "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5},
        "model": {"names": models, "hidden": [64]},
        "lora": {"ranks": [3] if name in equal else [4, 3, 2, 1]},
        "run": {"rounds": rounds, "participation": 0.75, "representations": 0, "evaluate_every": 2},
        "defaults": {"batch_size": 64},
        # shortened updates have other bits
        "network": {"max_fall": 0.0, "limits": {"update_ratio": 0.0}},
    }


def differences(run: Run, out: Path, clients: Sequence[Path]) -> list[str]:
    """What of a network run is not what the sequential engine has."""
    stored = checkpoint.load(out / "checkpoint")
    wrong = [] if tree.equal(stored.server, run.state.server) else ["server"]
    account = json.loads((out / "network.json").read_text())
    for i, folder in enumerate(clients):
        memory = ClientMemory(folder / account["run"])
        stamp = stored.clients.get(i, {"stamp": 0})["stamp"]
        mine = memory.read_state(stamp)
        if (stamp > 0) != (i in run.state.clients) or not tree.equal(mine, run.state.clients.get(i)):
            wrong.append(f"client {i}")
    return wrong


def simulated(made: ExperimentConfig, base: Path) -> tuple[Path, list[Path]]:
    """Run it in Flower's simulation."""
    out, folders = base / "sim", base / "sim.clients"
    run_flower_simulation(made, out, folders)
    return out, [folders / str(i) for i in range(CLIENTS)]


def deployed(
    made: ExperimentConfig, base: Path, link: SuperLink, places: Mapping[str, Path]
) -> tuple[Path, list[Path]]:
    """Run it on client nodes with keys."""
    write_json(places["experiment"], made.to_dict())
    app, folders, shares = base / "app", [base / f"client-{i}" for i in range(CLIENTS)], made.shares()
    write_own_app(app)
    with ExitStack() as stack:
        for i, folder in enumerate(folders):
            prepare(folder, made, i, shares, SiteSettings.simulated())
            own = ClientKeys.read(places["keys"] / f"client-{i}")
            node = SuperNode(folder / "flower", link.address, folder, own)
            node.start()
            stack.callback(node.close)
        run = link.submit(app)
        _wait_for_end(places["out"])
        while not (status := link.status(run)).is_finished:
            time.sleep(2)
    if not status.is_completed:
        raise RuntimeError(f"{status}: {link.tail(50)}")
    return places["out"].rename(base / "net"), folders


def _wait_for_end(out: Path, seconds: float = 300) -> None:
    """Wait until a run folder says that its run has ended: to ask Flower starts a process, which takes seconds of CPU time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        status = out / "status.json"
        if status.exists() and json.loads(status.read_text())["state"] != "running":
            return


def main() -> None:
    """Compare, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    lines = ["| method | simulation | deployment |", "| :--- | :--- | :--- |"]
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_keys(base / "keys", CLIENTS, [])
        keys = ServerKeys.read(base / "keys" / "server")
        places = {"experiment": base / "experiment.json", "out": base / "run", "keys": base / "keys"}
        variables = {
            EXPERIMENT: str(places["experiment"]),
            OUT: str(places["out"]),
            NODES: str(base / "nodes.json"),
        }
        with SuperLink(base / "server", keys, variables=variables) as link:
            nodes = {str(link.register(public)): i for i, public in keys.clients.items()}
            write_json(base / "nodes.json", nodes)
            for method in args.methods.split(","):
                made = ExperimentConfig.parse(tables(method, args.rounds))
                run = simulate(made.build_method(method), made.federation(), **dict(vars(made.run))).run
                found = []
                for how in (simulated, lambda m, b: deployed(m, b, link, places)):
                    wrong = differences(run, *how(made, base / method))
                    bad += bool(wrong)
                    found.append("equal" if not wrong else "differs: " + ", ".join(wrong))
                lines.append(f"| {METHODS[method].title} | {' | '.join(found)} |")
                print(lines[-1], flush=True)
    table = "\n".join(lines)
    if args.out:
        command = f"python benchmarks/network/equality_with_sequential.py --rounds {args.rounds}"
        head = f"# All methods over Flower\n\n    {command}\n\n"
        args.out.write_text(f"{head}{__doc__.split(chr(10) * 2, 2)[2].strip()}\n\n{table}\n")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
