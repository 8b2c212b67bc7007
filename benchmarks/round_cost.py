"""CPU time of a federated round against the same SGD steps in a bare PyTorch loop.

    python benchmarks/round_cost.py [--rounds 15] [--engine sequential] [--model cnn] [--method fedavg]

100 clients of 50 images 3×32×32, 10 clients a round, batches of 32, one epoch. Models: a CNN of 419,558 parameters (conv5×5-16,
pool, conv5×5-32, pool, FC 500, FC 10), and MLPs of 25, 99 and 200 thousand (784-32-10, 3072-32-10, 784-200-200-10). The bare
loop does nothing federated: it loads the weights, makes a ``torch.optim.SGD`` and steps through the very same batches. Both
arms run in one process on one thread, in turn; the figure is the median over rounds of the ratio of their CPU times. The round
contains sampling, the copies, counting of bytes and FLOPs, and the server's mean; evaluation is not in either arm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, ClientInfo, Federation, RunSettings
from fedlowrank.engine import ENGINES
from fedlowrank.engine.run import Run
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import build
from fedlowrank.models.cnn import CNN, FAMILY
from fedlowrank.models.mlp import MLP
from fedlowrank.tree import Params

MODELS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "cnn": ((3, 32, 32), lambda: CNN((3, 32, 32), 10, *FAMILY["cnn"])),
    "mlp25k": ((784,), lambda: MLP(784, (32,), 10)),
    "mlp99k": ((3072,), lambda: MLP(3072, (32,), 10)),
    "mlp200k": ((784,), lambda: MLP(784, (200, 200), 10)),
}


def plain_cnn() -> nn.Module:
    """The CNN as the bare loop has it: layers in the order in which papers write them."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def federation(model: str) -> Federation:
    generator = torch.Generator().manual_seed(0)
    shape, make = MODELS[model]
    clients = [
        {"train": (torch.randn(50, *shape, generator=generator), torch.randint(0, 10, (50,), generator=generator))}
        for _ in range(100)
    ]
    return Federation.from_arrays(clients, make, classes=10)


def bare_loop(
    model: nn.Module, weights: Params, fed: Federation, infos: list[ClientInfo], orders: list[list[Tensor]]
) -> float:
    """CPU seconds of the same steps with nothing around them."""
    start = time.process_time()
    model.train()
    names = model.state_dict().keys()
    weights = dict(zip(names, weights.values(), strict=True))
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
    options.add_argument("--model", choices=list(MODELS), default="cnn")
    options.add_argument("--method", choices=["fedavg", "fedprox", "scaffold"], default="fedavg")
    options.add_argument("--engine", choices=list(ENGINES), default="sequential")
    args = options.parse_args()
    torch.set_num_threads(1)
    fed = federation(args.model)
    settings = RunSettings(rounds=args.rounds + 3, participation=0.1, evaluate_every=10**6)
    run = Run(METHODS[args.method](batch_size=32, optimiser=SGD(lr=0.01)), fed, settings, ENGINES[args.engine]())
    model = build(plain_cnn if args.model == "cnn" else MODELS[args.model][1], fed.key)
    ratios = []
    for t in range(args.rounds + 3):
        infos = run.participants(t)
        # the same batches, in the same order, known beforehand: the bare loop pays for gathering them, as we do
        orders = [run.engine.trainer(run.method, fed, t, info).data.order("local") for info in infos]
        server = run.state.server
        weights = {n: p.clone() for n, p in (server if isinstance(server, dict) else server.model).items()}
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
