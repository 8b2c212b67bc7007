"""Accuracy against ε of FedAvg, pFedLoRA and Standalone on MNIST: 1,000 clients, central privacy of clients.

    python benchmarks/trust/accuracy_by_epsilon.py [--data data/mnist] [--results runs/privacy.jsonl] [--figure privacy.svg]
    python benchmarks/trust/accuracy_by_epsilon.py --partition dirichlet --epsilons 1,inf
    python benchmarks/trust/accuracy_by_epsilon.py --check

Each client has 60 of the 60,000 training images and 20 images of the official test part in the mixture of its
classes. Clients are drawn by Poisson sampling with q = 0.1; the noise multiplier σ follows from ε, δ = 1e-4
and the number of rounds. The clipping norm C is the median norm of the updates of the first round, before any
noise, of the same seed and method; ε = inf clips, too, and adds no noise. A run that is in the file of
results is not repeated.

``--check`` compares one private round of FedAvg with the same round computed by numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from fedlowrank import METHODS, SGD, Federation, Key, RunSettings, simulate
from fedlowrank.core import tree
from fedlowrank.data.clients import make_clients
from fedlowrank.data.dataset import Dataset
from fedlowrank.data.datasets.idx import Mnist
from fedlowrank.data.partitioning.partition import EqualDirichlet, Iid, Partition
from fedlowrank.data.partitioning.split import Matched
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import ClientJob
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run import Run
from fedlowrank.testing.check import RunWithoutEvaluation
from fedlowrank.trust.protection import Protected
from fedlowrank.trust.trust_settings import Clipping, Privacy
from fedlowrank.trust.updates import compute_update

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.seed_statistics import mean_and_half_width

CLIENTS, RATE, ROUNDS, DELTA = 1000, 0.1, 50, 1e-4
BATCH, LR, WIDTH = 20, 0.2, 8
EPSILONS = (0.25, 1.0, 2.0, 4.0, 8.0, math.inf)
TITLES = {"fedavg": "FedAvg", "pfedlora": "pFedLoRA"}
PASSES = {"standalone": 1, "standalone 10": 10}
"""Epochs a round of clients that train alone; more passes cost no privacy."""


def model() -> MLP:
    """784 → 32 → 10, 25,450 parameters."""
    return MLP(784, (32,), 10)


def federation(data: Dataset, seed: int, partition: str = "iid") -> Federation:
    """1,000 clients with 60 training and 20 test images each."""
    rules: dict[str, Partition] = {"iid": Iid(CLIENTS), "dirichlet": EqualDirichlet(CLIENTS, 0.5)}
    clients = make_clients(data, rules[partition], Matched(val=0.0, test_per_client=20), Key((seed,)))
    arrays = [{"train": (c.train.x, c.train.y), "test": (c.test.x, c.test.y)} for c in clients]
    return Federation.from_arrays(arrays, model, classes=10, seed=seed)


def method_of(name: str) -> Any:
    """The method with the settings of all runs."""
    more = {"width": WIDTH} if name == "pfedlora" else {}
    epochs = PASSES.get(name, 1)
    return METHODS[name.split()[0]](epochs=epochs, batch_size=BATCH, optimizer=SGD(lr=LR), **more)


def protocol(**more: Any) -> dict[str, Any]:
    """Settings of a run."""
    common: dict[str, Any] = {"rounds": ROUNDS, "sampling": "poisson", "participation": RATE}
    return common | {"engine": "vectorized", "evaluate_every": ROUNDS} | more


def first_updates(method: Any, fed: Federation) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Updates of the clients of the first round, without clipping and noise, in float64."""
    run = Run(method, fed, RunSettings(**protocol(seed=fed.seed)), ENGINES["vectorized"]())
    infos = run.participants(0)
    jobs = [ClientJob(run.state_of(i), method.download(run.state.server, i), i) for i in infos]
    found = []
    for job, result in zip(jobs, run.engine.run(method, fed, run.task, 0, jobs), strict=True):
        update = compute_update(
            result.upload, method.describe_update(job.down, job.client, run.task).reference
        )
        found.append({path: t.double().numpy() for path, t in update.items()})
    return found


def norm(update: dict[str, np.ndarray[Any, Any]]) -> float:
    """Euclidean norm over all tensors of an update."""
    return math.sqrt(sum(float((t * t).sum()) for t in update.values()))


def inner(value: Any, protected: bool) -> Any:
    """The method's own state within that of a protected method."""
    return value.inner if protected else value


def adapter_accuracy(run: Run) -> float:
    """Mean over the clients of the accuracy of the server's adapter on the client's own representation."""
    protected = isinstance(run.method, Protected)
    theta, shares = inner(run.state.server, protected), []
    with torch.no_grad():
        for info, data in zip(run.federation.infos, run.federation.clients, strict=True):
            omega = inner(run.state_of(info), protected)
            scores = theta.apply(run.task.model(info).represent(omega, data.test.inputs), False)
            shares.append(float((scores.argmax(-1) == data.test.y).double().mean()))
    return statistics.fmean(shares)


def server_accuracy(run: Run, data: Dataset) -> float:
    """Accuracy of FedAvg's server model on the 10,000 images of the official test part."""
    assert data.test is not None
    module = model()
    server = inner(run.state.server, isinstance(run.method, Protected))
    module.load_state_dict({name: t.detach() for name, t in server.items()})
    with torch.no_grad():
        return float((module(data.test.inputs).argmax(-1) == data.test.y).double().mean())


def measure(data: Dataset, fed: Federation, name: str, epsilon: float, clip: float) -> dict[str, Any]:
    """One run as a row of results."""
    settings: dict[str, Any] = {}
    if name not in PASSES:
        settings["clipping"] = Clipping(norm=clip)
        if epsilon < math.inf:
            settings["privacy"] = Privacy("central", epsilon=epsilon, delta=DELTA)
    began = time.process_time()
    result = simulate(method_of(name), fed, **protocol(**settings))
    seconds, last = time.process_time() - began, result.rounds[-1]
    row: dict[str, Any] = {"accuracy": result.mean_accuracy(), "cpu": seconds, "rounds": last.round}
    row |= last.server_metrics.get("privacy", {})
    sent = tree.numel(inner(result.run.state.server, isinstance(result.run.method, Protected)))
    row["parameters"] = 0 if name in PASSES else sent
    if name == "pfedlora":
        row["adapter"] = adapter_accuracy(result.run)
    if name == "fedavg":
        row["server"] = server_accuracy(result.run, data)
    return row


def planned(seeds: int, epsilons: list[float]) -> Iterator[tuple[int, str, float]]:
    """Seed, method and ε of all runs; a whole seed before the next one."""
    for seed in range(seeds):
        for epsilon in epsilons[::-1]:
            for name in TITLES:
                yield seed, name, epsilon
        for name in PASSES:
            yield seed, name, math.inf


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Do the runs that the file of results lacks; all rows of it that are asked for."""
    setting = [args.partition, CLIENTS, RATE, ROUNDS, DELTA, BATCH, LR, WIDTH]
    rows = (
        [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    )
    rows = [row for row in rows if row["setting"] == setting]
    done = {(row["seed"], row["method"], float(row["of"])) for row in rows}
    left = [run for run in planned(args.seeds, args.epsilons) if run not in done]
    data = Mnist(str(args.data)).load() if left else None
    made: dict[int, Federation] = {}
    clips: dict[tuple[int, str], float] = {(row["seed"], row["method"]): row["clip"] for row in rows}
    for seed, name, epsilon in left:
        assert data is not None
        if seed not in made:
            made = {seed: federation(data, seed, args.partition)}
        if (seed, name) not in clips:
            norms = [0.0] if name in PASSES else map(norm, first_updates(method_of(name), made[seed]))
            clips[seed, name] = statistics.median(norms)
        row = {"setting": setting, "seed": seed, "method": name, "of": str(epsilon)}
        row["clip"] = clips[seed, name]
        row |= measure(data, made[seed], name, epsilon, row["clip"])
        rows.append(row)
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return [row for row in rows if row["seed"] < args.seeds]


def interval_in_percent(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval, in percent, see :func:`mean_and_half_width`."""
    return mean_and_half_width(100 * value for value in values)


def cell(values: list[float]) -> str:
    """Mean ± half-width, in percent."""
    return "{:.1f} ± {:.1f}".format(*interval_in_percent(values)) if values else ""


def differences(values: list[float], others: list[float]) -> str:
    """Mean difference of runs with the same seed ± half-width, in points."""
    return "{:+.2f} ± {:.2f}".format(
        *interval_in_percent([a - b for a, b in zip(values, others, strict=True)])
    )


HEAD = [
    "| ε | σ | FedAvg | FedAvg, official test | pFedLoRA, own models | pFedLoRA, through the adapter |",
    "| ---: | ---: | ---: | ---: | ---: | ---: |",
]


def table(rows: list[dict[str, Any]], epsilons: list[float]) -> list[str]:
    """Accuracy by ε, and what is sent."""

    def of(name: str, epsilon: float, field: str = "accuracy") -> list[float]:
        return [r[field] for r in rows if r["method"] == name and float(r["of"]) == epsilon and field in r]

    lines = list(HEAD)
    for epsilon in epsilons:
        noise = of("fedavg", epsilon, "noise")
        cells = [f"{epsilon:g}".replace("inf", "∞"), f"{noise[0]:.3f}" if noise else "0"]
        cells += [cell(of("fedavg", epsilon)), cell(of("fedavg", epsilon, "server"))]
        cells += [cell(of("pfedlora", epsilon)), cell(of("pfedlora", epsilon, "adapter"))]
        lines.append("| " + " | ".join(cells) + " |")
    for name, passes in PASSES.items():
        lines.append(f"Standalone, epochs a round {passes}: {cell(of(name, math.inf))}")
    finite = [e for e in epsilons if e < math.inf]
    lines += ["", "| method | parameters sent | C by seed | norm of the noise / qNC at each ε |"]
    lines.append("| --- | ---: | --- | --- |")
    for name, title in TITLES.items():
        found = [r for r in rows if r["method"] == name]
        clips = [f"{c:.3f}" for c in {r["seed"]: r["clip"] for r in found}.values()]
        count = found[0]["parameters"]
        ratios = [f"{of(name, e, 'noise')[0] * math.sqrt(count) / (RATE * CLIENTS):.2f}" for e in finite]
        lines.append(f"| {title} | {count:,} | {', '.join(clips)} | {', '.join(ratios)} |")
    lines += ["", "differences in points within a seed, mean ± half of the 95 % interval:"]
    for epsilon in finite:
        for name, field in (("fedavg", "accuracy"), ("pfedlora", "accuracy"), ("pfedlora", "adapter")):
            gaps = differences(of(name, epsilon, field), of(name, math.inf, field))
            lines.append(f"{TITLES[name]}, {field}, ε = {epsilon:g} minus ∞: {gaps}")
    gaps = differences(of("pfedlora", math.inf), of("standalone", math.inf))
    lines.append(f"pFedLoRA, own models, ε = ∞, minus Standalone: {gaps}")
    total = sum(r["cpu"] for r in rows)
    spent = {f"{r['epsilon']:.4f}" for r in rows if "epsilon" in r}
    lines += ["", f"{len(rows)} runs, {total / 60:.1f} CPU minutes; ε spent: {', '.join(sorted(spent))}"]
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against ε."""
    import matplotlib

    from fedlowrank.report.figures import style

    series = (
        ("FedAvg, global model", "fedavg", "accuracy"),
        ("pFedLoRA, own models", "pfedlora", "accuracy"),
        ("pFedLoRA, through the adapter", "pfedlora", "adapter"),
    )
    alone = {"standalone": "Standalone", "standalone 10": "Standalone, 10 epochs a round"}
    places = range(len(EPSILONS))
    with style.drawing(), style.final_colors():
        matplotlib.rcParams["svg.hashsalt"] = "fedlowrank"
        figure, axes = style.new_figure(3.2)
        styles = style.make_styles([title for title, _, _ in series] + [*alone.values()])
        handles = []
        for shift, (title, name, field) in enumerate(series):
            values = [
                [r[field] for r in rows if r["method"] == name and float(r["of"]) == e] for e in EPSILONS
            ]
            means, widths = zip(*map(interval_in_percent, values), strict=True)
            look = styles[title]
            handles.append(
                axes.errorbar(
                    [p + 0.06 * (shift - 1) for p in places], means, yerr=np.nan_to_num(widths),
                    color=look.color, marker=look.marker, markersize=5, linewidth=1.4, capsize=2.5,
                )
            )  # fmt: skip
        for name, title in alone.items():
            mean, _ = interval_in_percent([r["accuracy"] for r in rows if r["method"] == name])
            look = styles[title]
            dashes = "--" if name == "standalone" else ":"
            handles.append(axes.axhline(mean, color=look.color, linestyle=dashes, linewidth=1.4))
        axes.set_xticks(list(places), [f"{e:g}".replace("inf", "∞") for e in EPSILONS])
        axes.set_xlabel("ε (δ = 1e-4)")
        axes.set_ylabel("mean test accuracy / %")
        style.add_legend(figure, handles, [title for title, _, _ in series] + [*alone.values()])
        # no date inside, so that equal results give equal files
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def check(path: str) -> None:
    """Compare one private round of FedAvg with numpy: reference + (Σ clipped updates + noise) / (qN)."""
    fed = federation(Mnist(path).load(), 0)
    method = method_of("fedavg")
    updates = first_updates(method, fed)
    norms = [norm(u) for u in updates]
    clip = statistics.median(norms)
    total = {
        p: sum(u[p] * min(1.0, clip / s) for u, s in zip(updates, norms, strict=True)) for p in updates[0]
    }
    for noise in (1e-6, 2.0):
        settings = protocol(
            seed=0, clipping=Clipping(norm=clip), privacy=Privacy("central", noise=noise, delta=DELTA)
        )
        run = RunWithoutEvaluation(method, fed, RunSettings(**settings), ENGINES["vectorized"]())
        before = {p: t.double().numpy() for p, t in run.state.server.inner.items()}
        run.step()
        after = {p: t.double().numpy() for p, t in run.state.server.inner.items()}
        paths = {p.strip("/"): p for p in total}
        left = np.concatenate(
            [((after[p] - before[p]) * RATE * CLIENTS - total[paths[p]]).ravel() for p in before]
        )
        said = stats.kstest(left / (noise * clip), "norm").pvalue if noise > 1e-3 else math.nan
        print(
            f"σ = {noise:g}, C = {clip:.4f}, {len(updates)} clients for qN = {RATE * CLIENTS:g}: "
            f"the remainder of the sum has mean {left.mean():.2e}, standard deviation {left.std():.4e} "
            f"(σC = {noise * clip:.4e}), "
            f"p = {said:.2f} of a Kolmogorov-Smirnov test against N(0, σ²C²), {len(left):,} numbers"
        )


def main() -> None:
    """Run what is missing, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/mnist"), help="folder of the IDX files")
    parser.add_argument("--results", type=Path, default=Path("runs/privacy.jsonl"), help="finished runs")
    parser.add_argument("--partition", choices=("iid", "dirichlet"), default="iid")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", default=",".join(f"{e:g}" for e in EPSILONS))
    parser.add_argument("--figure", type=Path, help="SVG file to draw")
    parser.add_argument("--check", action="store_true", help="compare one round with numpy instead")
    args = parser.parse_args()
    args.epsilons = [float(e) for e in args.epsilons.split(",")]
    torch.set_num_threads(1)
    if args.check:
        check(str(args.data))
        return
    rows = measure_all(args)
    print("\n".join(table(rows, args.epsilons)))
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
