"""Does the Ensemble find the clusters of MNIST-LS? The package's against plain PyTorch, from the same initial models and others.

    python benchmarks/accuracy/ensemble_initial_models.py [--rounds 1500] [--seeds 4] [--data data/mnist] [--out FILE.csv]

Almansoori et al., arXiv:2410.03497, Table 1, reduced MNIST-LS: 300 clients in 4 clusters, 10 images each, 30 a round. Each client
mixes the outputs of 4 models by a router of its own, π = softmax(θ); both take one gradient step a round. Three arms:

- ``package``: :class:`fedlowrank.methods.ensemble.Ensemble`.
- ``plain, same models``: the loop below, begun at the package's 4 initial models of that seed; it draws clients and noise itself.
- ``plain, own models``: the same loop, begun at 4 models that PyTorch draws.

Printed: how many models are the largest share of a client, and the adjusted Rand index between that share and the true cluster;
of all clients, in the plain arms of those that have taken part.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedlowrank import Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.methods.ensemble import Ensemble

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "floral" / "mnist-ls-reduced.toml"
CLUSTERS, WIDTH = 4, 200
SHARES, ROUTER, RATE, NOISE = 0.1, 0.3, 0.1, 0.5
"""Participation; rates of θ and of the models; θ has noise uniform on ±0.5 in training."""

Models = list[Tensor]
Clients = list[tuple[Tensor, Tensor]]


def draw_models(seed: int) -> Models:
    """4 models as PyTorch draws them: W₁ ``[4, 200, 784]``, b₁, W₂ ``[4, 10, 200]``, b₂."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = [
            [*nn.Linear(784, WIDTH).parameters(), *nn.Linear(WIDTH, 10).parameters()] for _ in range(CLUSTERS)
        ]
    return [torch.stack([one[i].detach() for one in drawn]) for i in range(4)]


def package_models(method: Ensemble, federation: Federation) -> Models:
    """The 4 models that the package's Ensemble begins with."""
    server = method.server_init(federation.task(1))
    return [server[n].detach().clone() for n in ("body.1.weight", "body.1.bias", "head.weight", "head.bias")]


def train_plainly(clients: Clients, models: Models, rounds: int, seed: int) -> dict[int, Tensor]:
    """θ of every client that took part, by the paper's Algorithm 1 for whole models, one step a client and round."""
    generator = torch.Generator().manual_seed(seed)
    theta: dict[int, Tensor] = {}
    for _ in range(rounds):
        total, weights = [torch.zeros_like(w) for w in models], torch.zeros(CLUSTERS)
        for k in torch.randperm(len(clients), generator=generator)[: round(SHARES * len(clients))].tolist():
            x, y = clients[k]
            own = [w.clone().requires_grad_() for w in models]
            z = theta.get(k, torch.zeros(CLUSTERS)).clone().requires_grad_()
            pi = (z + (2 * torch.rand(CLUSTERS, generator=generator) - 1) * NOISE).softmax(0)
            hidden = (torch.einsum("bi,chi->cbh", x, own[0]) + own[1][:, None]).relu()
            scores = torch.einsum("cbh,coh->cbo", hidden, own[2]) + own[3][:, None]
            *gradients, slope = torch.autograd.grad(
                cross_entropy(torch.tensordot(pi, scores, 1), y), [*own, z]
            )
            theta[k] = z.detach() - ROUTER * slope
            share = theta[k].softmax(0) * len(y)
            for sum_, w, g in zip(total, own, gradients, strict=True):
                sum_ += share.reshape(-1, *[1] * (w.dim() - 1)) * (w.detach() - RATE * g)
            weights += share
        models = [t / weights.reshape(-1, *[1] * (t.dim() - 1)) for t in total]
    return theta


def train_package(method: Ensemble, federation: Federation, rounds: int) -> dict[int, Tensor]:
    """π of all clients after as many rounds of the package's Ensemble."""
    result = simulate(method, federation, rounds=rounds, participation=SHARES, evaluate_every=rounds)
    return {
        k: torch.tensor(route)
        for k, route in enumerate(result.measurements.routes()[result.rounds[-1].round])
    }


def judge(routes: dict[int, Tensor], truth: list[int]) -> tuple[int, float]:
    """How many models are a client's largest share, and the adjusted Rand index with the true clusters."""
    largest = [int(routes[k].argmax()) for k in routes]
    return len(set(largest)), float(adjusted_rand_score([truth[k] for k in routes], largest))


def main() -> None:
    """Run the arms and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--data", default="data/mnist")
    parser.add_argument("--out", type=Path, help="a CSV file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(given.seeds):
        made = ExperimentConfig.read(EXPERIMENT, [f"data.path={given.data}", f"run.seed={seed}"], "ensemble")
        federation, method = made.federation(), made.build_method("ensemble")
        assert isinstance(method, Ensemble)
        clients = [(torch.as_tensor(c.train.x).flatten(1), c.train.y) for c in federation.clients]
        truth = [k % CLUSTERS for k in range(len(clients))]
        for arm in ("package", "plain, same models", "plain, own models"):
            if arm == "package":
                routes = train_package(method, federation, given.rounds)
            else:
                start = package_models(method, federation) if "same" in arm else draw_models(seed)
                routes = train_plainly(clients, start, given.rounds, seed)
            count, index = judge(routes, truth)
            rows.append({"seed": seed, "arm": arm, "models": count, "rand_index": round(index, 3)})
            print(*rows[-1].values(), sep="  ", flush=True)
    if given.out:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
