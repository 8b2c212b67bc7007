"""Memory of a simulation of many clients that each keep an adapter of their own: ``python benchmarks/many_clients.py``.

FedSA-LoRA on a small network: every client keeps its own B. All clients take part in one round, so all states exist at its end; a
second round reads them all again. Memory is what the process has at most, less what it has once the package is imported.
"""

from __future__ import annotations

import argparse
import time

import torch
from memory import peak, resident

from fedlowrank.core import tree
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.methods import METHODS
from fedlowrank.models.mlp import MLP
from fedlowrank.simulation.run import Run
from fedlowrank.simulation.settings import RunSettings


def main() -> None:
    """Print a row a number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default="100,1000,10000")
    parser.add_argument("--engine", default="sequential")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| clients | numbers a client keeps | states, MiB | data, MiB | peak memory, MiB | ms a client and round |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for count in map(int, args.clients.split(",")):
        before = resident()
        generator = torch.Generator().manual_seed(0)
        x, y = (
            torch.randn(count, 10, 64, generator=generator),
            torch.randint(10, (count, 10), generator=generator),
        )
        data = [{"train": pair} for pair in zip(x.unbind(), y.unbind(), strict=True)]
        fed = Federation.from_arrays(data, lambda: MLP(64, (256, 256), 10), classes=10)
        run = Run(
            METHODS["fedsa_lora"](), fed, RunSettings(rounds=2, evaluate_every=10**6), ENGINES[args.engine]()
        )
        run.is_due = lambda: False  # type: ignore[method-assign]
        start = time.process_time()
        for _ in range(2):
            run.step()
        spent = (time.process_time() - start) / 2 / count
        run.engine.close()
        states = run.state.clients
        held = sum(tree.nbytes(s) for s in states.values()) / 2**20
        numbers = tree.numel(next(iter(states.values())))
        most = peak() - before
        cells = (
            f"{count} | {numbers:,} | {held:.0f} | {x.nbytes / 2**20:.0f} | {most:.0f} | {1e3 * spent:.2f}"
        )
        print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
