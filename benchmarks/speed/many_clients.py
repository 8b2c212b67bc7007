"""Memory and time of a simulation of many clients that each keep an adapter of their own.

    python benchmarks/speed/many_clients.py

FedSA-LoRA on a small network: every client keeps its own B. By default all clients take part in one round, so all states
exist at its end; a second round reads them all again. Memory of the driver is what it has at most, less what it has once the
package is imported. Memory of all processes is the most of what they have together at one of the looks that are taken every
half second; shared pages count once (PSS).

    python benchmarks/speed/many_clients.py --clients 10000 --round 1000 --rounds 4 --engine ray --nodes 2
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from fedlowrank.core import tree
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import RunWithoutEvaluation

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.process_memory import measure_peak, measure_resident


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[None]:
    """Ray nodes of one core each on this machine, none if the count is 0."""
    if not count:
        yield
        return
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 400 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@contextlib.contextmanager
def watched(found: list[float]) -> Iterator[None]:
    """Note how much memory this process and those below it have together, MiB."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            found.append(total / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    """Print a row a number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="100,1000,10000")
    parser.add_argument("--engine", default="sequential", choices=[*ENGINES])
    parser.add_argument("--round", type=int, help="clients in a round (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=0, help="Ray nodes of one core to start here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| clients | numbers a client keeps | states, MiB | data, MiB | driver, MiB | all processes, MiB | first round, s "
        "| further rounds, s | ms a client and round |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with ray_nodes(args.nodes):
        for count in map(int, args.clients.split(",")):
            row(count, min(args.round or count, count), args.rounds, args.engine)


def row(count: int, sampled: int, rounds: int, engine: str) -> None:
    """Print the row of a number of clients, of which some take part in a round."""
    before = measure_resident()
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(count, 10, 64, generator=generator),
        torch.randint(10, (count, 10), generator=generator),
    )
    data = [{"train": pair} for pair in zip(x.unbind(), y.unbind(), strict=True)]
    fed = Federation.from_arrays(data, lambda: MLP(64, (256, 256), 10), classes=10)
    settings = RunSettings(rounds=rounds, participation=sampled / count, evaluate_every=10**6)
    run = RunWithoutEvaluation(METHODS["fedsa_lora"](), fed, settings, ENGINES[engine]())
    seconds, together = list[float](), list[float]()
    with watched(together):
        for _ in range(rounds):
            start = time.perf_counter()
            run.step()
            seconds.append(time.perf_counter() - start)
    run.engine.close()
    states = run.state.clients
    held = sum(tree.nbytes(s) for s in states.values()) / 2**20
    numbers = tree.numel(next(iter(states.values())))
    most, later = measure_peak() - before, statistics.median(seconds[1:] or seconds)
    cells = (
        f"{count} | {numbers:,} | {held:.0f} | {x.nbytes / 2**20:.0f} | {most:.0f} | {max(together, default=0):.0f} | "
        f"{seconds[0]:.1f} | {later:.1f} | {1e3 * later / sampled:.2f}"
    )
    print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
