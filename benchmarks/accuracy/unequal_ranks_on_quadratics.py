"""Unequal ranks where the truth is known: linear regressions W* x of 10 clients with LoRA ranks 32 to 2.

    python benchmarks/accuracy/unequal_ranks_on_quadratics.py [--rounds 30] [--seeds 3]

Every client has inputs x ~ N(0, I) and targets (W* + δ D_i) x without noise; W* and D_i are random matrices of full rank with
decaying singular values. The base is zero, so the server's W should become W* (the clients' mean). Printed as Markdown: the
relative error ‖W - W*‖ / ‖W*‖ of the server's model, after the last round and at the best round.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from fedlowrank import Federation
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

RANKS = [32, 32, 16, 16, 8, 8, 4, 4, 2, 2]
SIZE = (48, 40)
EXAMPLES = 200
NAMES = ["fedhl", "flora", "flexlora", "hetlora"]


def matrix(key: Key, decay: float = 0.9) -> Tensor:
    """A random ``[48, 40]`` matrix with singular values 1, decay, decay², ..."""
    generator = key.generator()
    u, _, vt = torch.linalg.svd(
        torch.randn(SIZE, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return (u * decay ** torch.arange(min(SIZE), dtype=torch.float64)) @ vt


def problem(seed: int, disagreement: float) -> tuple[Federation, Tensor]:
    """Clients, and the mean of what they should find."""
    key = Key(("quadratics", seed))
    truth = matrix(key / "truth")
    own = [truth + disagreement * matrix(key / "own" / i) for i in range(len(RANKS))]
    clients = []
    for i, w in enumerate(own):
        x = torch.randn(EXAMPLES, SIZE[1], generator=(key / "x" / i).generator(), dtype=torch.float64)
        clients.append(
            {"train": (x.float(), (x @ w.mT).float()), "test": (x[:1].float(), (x[:1] @ w.mT).float())}
        )

    def zero() -> nn.Module:
        made = nn.Linear(SIZE[1], SIZE[0], bias=False)
        nn.init.zeros_(made.weight)
        return nn.Sequential(made)

    return Federation.from_arrays(clients, zero, rank=RANKS, seed=seed), sum(own[1:], own[0]) / len(own)


def errors(name: str, seed: int, disagreement: float, rounds: int, lr: float) -> list[float]:
    """Relative error of the server's model after every round."""
    federation, truth = problem(seed, disagreement)
    cls: Any = METHODS[name]
    method = cls(epochs=5, batch_size=50, optimizer=SGD(lr=lr, clip=1.0), training=LoRATraining())
    run = Run(method, federation, RunSettings(rounds=rounds, evaluate_every=10**6), Sequential())
    found = []
    for _ in range(rounds):
        run.step()
        server = run.local_model(federation.infos[0]).server
        if server is None:
            raise AssertionError(f"{name} has no model of the server's own")
        w = next(w for n, w in server.items() if n.endswith("weight")).double()
        found.append(float((w - truth).norm() / truth.norm()))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for title, disagreement in (("clients agree (δ = 0.01)", 0.01), ("clients disagree (δ = 1)", 1.0)):
        print(f"\n{title}, {args.rounds} rounds, {args.seeds} seeds\n")
        print("| method | relative error, last round | best round |\n| :--- | ---: | ---: |")
        for name in NAMES:
            runs = [errors(name, seed, disagreement, args.rounds, args.lr) for seed in range(args.seeds)]
            last, best = ([f(r) for r in runs] for f in (lambda r: r[-1], min))
            spread = [f"{statistics.mean(v):.4f} ± {statistics.pstdev(v):.4f}" for v in (last, best)]
            print(f"| {METHODS[name].title} | {spread[0]} | {spread[1]} |", flush=True)


if __name__ == "__main__":
    main()
