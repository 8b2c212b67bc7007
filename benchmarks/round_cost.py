"""CPU time of a federated round against the same SGD steps in a bare PyTorch loop.

    python benchmarks/round_cost.py [--rounds 15] [--engine sequential]

CNN of 419,558 parameters (conv5×5-16, pool, conv5×5-32, pool, FC 500, FC 10), 100 clients of 50 images 3×32×32, 10 clients a
round, batches of 32, one epoch, FedAvg. The bare loop does nothing federated: it loads the weights, makes a
``torch.optim.SGD`` and steps through the very same batches. Both arms run in one process on one thread, in turn; the figure is
the median over rounds of the ratio of their CPU times. The round contains sampling, the copies, counting of bytes and FLOPs,
and the server's mean; evaluation is not in either arm.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, ClientInfo, Federation, RunSettings
from fedlowrank.engine import ENGINES
from fedlowrank.engine.run import Run
from fedlowrank.methods import FedAvg
from fedlowrank.models.architecture import build
from fedlowrank.models.cnn import CNN, FAMILY
from fedlowrank.tree import Params


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = [
        {"train": (torch.randn(50, 3, 32, 32, generator=generator), torch.randint(0, 10, (50,), generator=generator))}
        for _ in range(100)
    ]
    return Federation.from_arrays(clients, lambda: CNN((3, 32, 32), 10, *FAMILY["cnn"]), classes=10)


def bare_loop(
    model: nn.Module, weights: Params, fed: Federation, infos: list[ClientInfo], orders: list[list[Tensor]]
) -> float:
    """CPU seconds of the same steps with nothing around them."""
    start = time.process_time()
    model.train()
    for info, order in zip(infos, orders, strict=True):
        model.load_state_dict(weights)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        data = fed.clients[info.id].train
        for index in order:
            optimiser.zero_grad()
            loss = functional.cross_entropy(model(data.x[index]), data.y[index])
            loss.backward()
            optimiser.step()
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--engine", choices=list(ENGINES), default="sequential")
    args = options.parse_args()
    torch.set_num_threads(1)
    fed = federation()
    settings = RunSettings(rounds=args.rounds + 3, participation=0.1, evaluate_every=10**6)
    run = Run(FedAvg(batch_size=32, optimiser=SGD(lr=0.01)), fed, settings, ENGINES[args.engine]())
    model = build(lambda: CNN((3, 32, 32), 10, *FAMILY["cnn"]), fed.key)
    ratios = []
    for t in range(args.rounds + 3):
        infos = run.participants(t)
        # the same batches, in the same order, known beforehand: the bare loop pays for gathering them, as we do
        orders = [run.engine.trainer(run.method, fed, t, info).data.order("local") for info in infos]
        weights = {n: p.clone() for n, p in run.state.server.items()}
        # who goes first alternates, so that neither arm always finds the warmer cache
        if t % 2:
            record, bare = run.step(), bare_loop(model, weights, fed, infos, orders)
        else:
            bare, record = bare_loop(model, weights, fed, infos, orders), run.step()
        ours = record.cpu_seconds["train"] + record.cpu_seconds["server"]
        if t >= 3:  # the first rounds warm caches and count FLOPs
            ratios.append(ours / bare)
            print(
                f"round {t:3d}: bare loop {bare * 1e3:7.1f} ms, {args.engine} {ours * 1e3:7.1f} ms, ratio {ratios[-1]:.3f}"
            )
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"{record.steps} steps a round; ratio: median {statistics.median(ratios):.3f}, quartiles {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
