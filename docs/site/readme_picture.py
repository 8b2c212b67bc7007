"""Draw the picture of the README: the federation of ``examples/first.py`` over five seeds.

python docs/site/readme_picture.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits

from fedlowrank import SGD, Federation, Router, methods, simulate
from fedlowrank.report.statistics.run_statistics import curve_over_seeds

matplotlib.use("svg")

import matplotlib.pyplot as plt

TARGET = Path(__file__).parents[1] / "images" / "first.svg"
SEEDS, ROUNDS = range(5), 40


def net() -> torch.nn.Module:
    """The model of all clients; the federation's seed draws its initial weights."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def main() -> None:
    """Run every method on every seed, print the last round and draw all rounds."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    clients = [(x[k::60].astype("float32") / 16, (y[k::60] + k % 4) % 10) for k in range(60)]
    local = {"epochs": 5, "batch_size": 32, "optimizer": SGD(lr=1.0)}
    mixture = methods.FederatedFloral(clusters=4, rank=0.1, router=Router(lr=1.0, noise=1.0), **local)
    compared = {
        "FLoRAL: one model and four low-rank adaptors": mixture,
        "IFCA: four models": methods.IFCA(clusters=4, **local),
        "Standalone: every client alone": methods.Standalone(**local),
        "FedAvg: one model for all": methods.FedAvg(**local),
    }
    plt.rcParams.update({"svg.hashsalt": "fedlowrank", "svg.fonttype": "path"})
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for label, method in compared.items():
        curves, sent = [], 0
        for seed in SEEDS:
            federation = Federation.from_arrays(clients, net, seed=seed)
            result = simulate(method, federation, rounds=ROUNDS, evaluate_every=5)
            table = result.to_frame().query("split == 'test'").groupby("round")["accuracy"].mean()
            curves.append(100 * table)
            sent = sum(r.bytes_up + r.bytes_down for r in result.rounds)
        over_seeds = curve_over_seeds(curves)
        mean, half = over_seeds["mean"], over_seeds["ci"]
        axes.plot(mean.index, mean, label=label)
        axes.fill_between(mean.index, mean - half, mean + half, alpha=0.2, linewidth=0)
        print(f"{label}: {mean.iloc[-1]:.1f} ± {half.iloc[-1]:.1f} %, {sent / 1e6:.0f} MB")
    axes.set(xlabel="round", ylabel="test accuracy, mean over clients, %", xlim=(0, ROUNDS), ylim=(0, 100))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=2)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
