"""Sixty clients with about 30 handwritten digits each, whose labels four groups count in four ways."""

import torch
from sklearn.datasets import load_digits

from fedlowrank import SGD, Federation, Router, methods, simulate

x, y = load_digits(return_X_y=True)
# a client of group g = k mod 4 calls the digit d by the label d + g
clients = [(x[k::60].astype("float32") / 16, (y[k::60] + k % 4) % 10) for k in range(60)]


def net() -> torch.nn.Module:  # the federation's seed draws its weights
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


federation = Federation.from_arrays(clients, net, seed=0)
local = {"epochs": 5, "batch_size": 32, "optimizer": SGD(lr=1.0)}
mixture = methods.FederatedFloral(clusters=4, rank=0.1, router=Router(lr=1.0, noise=1.0), **local)
for method in (methods.Standalone(**local), methods.FedAvg(**local), mixture):
    result = simulate(method, federation, rounds=40, evaluate_every=10)
    print(f"{method.title}: {result.mean_accuracy():.1%} of the test digits, mean over clients")
