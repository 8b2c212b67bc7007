"""DP-FedAvg here and in pfl on MNIST: the same clients, model, local SGD, clipping norm, noise and sampling.

    pip install pfl                  # pfl 0.6 may live in an interpreter of its own
    python benchmarks/peers/private_training_against_pfl.py --python PATH [--data data/mnist] [--results runs/private_peers.jsonl]

Clients, C and σ are those of ``benchmarks/trust/accuracy_by_epsilon.py`` at ε = 4 (by the accountant rdp). Compared are ε of the
accountants, accuracy of the final model on the official test part, and CPU time a round. Every arm is a
process on one thread; arms take turns round by round, in an order that rotates. Both simulators train the
same clients in each round on the same order of examples; pfl gets its examples already in that order.
Nothing is evaluated between rounds. A first run of a few rounds clips and adds no noise: there the final
weights must be equal up to rounding. What is in the file of results is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.simulator_task import Clock, next_turn

WARM, PLAIN, BUDGET = 4, 6, 4.0
"""Rounds that are not timed, rounds of the run without noise, and ε."""

ARMS = ("vectorized", "sequential", "pfl")
TITLES = {"vectorized": "fedlowrank, vectorized", "sequential": "fedlowrank, sequential", "pfl": "pfl"}

Plan = dict[str, np.ndarray[Any, Any]]


def settings_of(plan: Plan) -> Any:
    """Settings of a run here."""
    from trust.accuracy_by_epsilon import DELTA, protocol

    from fedlowrank import RunSettings
    from fedlowrank.trust.trust_settings import Clipping, Privacy

    more: dict[str, Any] = {"clipping": Clipping(norm=float(plan["clip"]))}
    if plan["noise"] > 0:
        more["privacy"] = Privacy("central", noise=float(plan["noise"]), delta=DELTA)
    rounds = len(plan["sizes"])
    return RunSettings(**protocol(seed=int(plan["seed"]), rounds=rounds, evaluate_every=10**6, **more))


def here(engine: str, plan: Plan, clock: Clock, data: str) -> list[np.ndarray[Any, Any]]:
    """fedlowrank: whole rounds, with all that it counts, checks and charges."""
    import torch
    from trust.accuracy_by_epsilon import federation, inner, method_of

    from fedlowrank.data.datasets.idx import Mnist
    from fedlowrank.engines import ENGINES
    from fedlowrank.testing.check import RunWithoutEvaluation

    torch.set_num_threads(1)
    fed = federation(Mnist(data).load(), int(plan["seed"]))
    run = RunWithoutEvaluation(method_of("fedavg"), fed, settings_of(plan), ENGINES[engine]())
    for _ in plan["sizes"]:
        clock(run.step)
    return [t.numpy() for t in inner(run.state.server, True).values()]


def pfl(plan: Plan, clock: Clock) -> list[np.ndarray[Any, Any]]:
    """Run pfl by its own loop, its Gaussian mechanism applied centrally."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import HyperParam, NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(1)
    np.random.seed(int(plan["seed"]))  # noqa: NPY002 - pfl draws its seeds from it

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)]
            self.inner = nn.Sequential(nn.Flatten(), *layers)

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            del eval
            return functional.cross_entropy(self.inner(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            del x, y
            return {}

    module = Model()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.from_numpy(plan[f"p{i}"]))
    x, y = torch.from_numpy(plan["x"]), torch.from_numpy(plan["y"])
    queue = zip(plan["clients"].tolist(), torch.from_numpy(plan["orders"]), strict=True)
    datasets = iter(Dataset(raw_data=[x[c][o], y[c][o]]) for c, o in queue)
    data = FederatedDataset(lambda _: next(datasets), lambda: 0)
    clip, noise, sizes = float(plan["clip"]), float(plan["noise"]), plan["sizes"].tolist()
    mechanism = GaussianMechanism(clip, noise) if noise else NormClippingOnly(2.0, clip)
    backend = SimulatedBackend(data, data, postprocessors=[CentrallyAppliedPrivacyMechanism(mechanism)])
    central = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central)

    class Cohort(HyperParam, TrainingProcessCallback):  # type: ignore[misc]
        """Clients of the round, as Poisson sampling drew them; lets a round begin when it is its turn."""

        def __init__(self) -> None:
            self.round = 0

        def value(self) -> int:
            return int(sizes[min(self.round, len(sizes) - 1)])

        def on_train_begin(self, *, model: Any) -> Any:
            del model
            clock.begin()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            del aggregate_metrics, model, central_iteration
            clock.end()
            self.round += 1
            if self.round < len(sizes):
                clock.begin()
            return False, Metrics()

    cohort = Cohort()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(sizes),
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=float(plan["lr"]), local_batch_size=int(plan["batch"])
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=int(plan["batch"])),
        callbacks=[cohort],
    )
    return [p.detach().numpy() for p in module.parameters()]


def pfl_accountants(noises: list[float], rate: float, rounds: int, delta: float) -> dict[str, Any]:
    """ε of pfl's accountants for each noise, and versions of its interpreter."""
    from importlib.metadata import version

    from pfl.privacy.privacy_accountant import (
        PLDPrivacyAccountant,
        PRVPrivacyAccountant,
        RDPPrivacyAccountant,
    )

    kinds = {"rdp": RDPPrivacyAccountant, "pld": PLDPrivacyAccountant, "prv": PRVPrivacyAccountant}
    found: dict[str, Any] = {
        name: [kind(rounds, rate, "gaussian", delta=delta, noise_parameter=s).epsilon for s in noises]
        for name, kind in kinds.items()
    }
    found["versions"] = {name: version(name) for name in ("pfl", "torch", "dp-accounting", "numpy")}
    return found


def run_arm(arm: str, folder: Path, data: str) -> None:
    """In a process of its own: run, and leave the final weights in the folder."""
    warnings.simplefilter("ignore")
    plan = dict(np.load(folder / "plan.npz"))
    found = pfl(plan, Clock()) if arm == "pfl" else here(arm, plan, Clock(), data)
    np.savez(folder / f"{arm}.npz", *found)


class Runner:
    """An arm in a process of its own, which waits for its turn before every round."""

    def __init__(self, arm: str, folder: Path, python: str, data: str) -> None:
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
        script = str(Path(__file__).resolve())
        command = [python, script, "--run", arm, "--folder", str(folder), "--data", data]
        self.arm, self._errors = arm, (folder / f"{arm}.err").open("w+")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env={**os.environ, **one}, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def round(self) -> float:
        """CPU milliseconds of the next round."""
        return 1e3 * next_turn(self._process, self._errors, self.arm)["cpu"]

    def close(self) -> None:
        """Wait until it has left its weights."""
        self._process.communicate()


def make_plan(fed: Any, seed: int, rounds: int, clip: float, noise: float) -> Plan:
    """Examples, initial weights, who trains in which order, and how updates are protected."""
    import torch
    from trust.accuracy_by_epsilon import BATCH, LR, method_of, protocol

    from fedlowrank import RunSettings
    from fedlowrank.engines import ENGINES
    from fedlowrank.rounds.run import Run

    run = Run(
        method_of("fedavg"), fed, RunSettings(**protocol(seed=seed, rounds=rounds)), ENGINES["sequential"]()
    )
    cohorts = [[(t, i) for i in run.participants(t)] for t in range(rounds)]
    everyone = [job for cohort in cohorts for job in cohort]
    orders = [torch.cat(run.engine.trainer(run.method, fed, t, i).data.order("local")) for t, i in everyone]
    scalars = {"seed": seed, "clip": clip, "noise": noise, "batch": BATCH, "lr": LR}
    return {
        **{name: np.array(value) for name, value in scalars.items()},
        "x": np.stack([c.train.inputs.numpy() for c in fed.clients]),
        "y": np.stack([c.train.y.numpy() for c in fed.clients]),
        "sizes": np.array([len(cohort) for cohort in cohorts]),
        "clients": np.array([i.id for _, i in everyone]),
        "orders": torch.stack(orders).numpy(),
        **{f"p{i}": t.numpy() for i, t in enumerate(run.state.server.values())},
    }


def accuracy(weights: list[np.ndarray[Any, Any]], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Of the model with these weights."""
    a, a_bias, b, b_bias = weights
    hidden = np.maximum(x.reshape(len(x), -1) @ a.T + a_bias, 0)
    return float(((hidden @ b.T + b_bias).argmax(-1) == y).mean())


def compare(plan: Plan, args: argparse.Namespace) -> tuple[Any, Any]:
    """CPU milliseconds of every round, and final weights, by arm."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.savez(folder / "plan.npz", **plan)  # type: ignore[arg-type]
        runners = [Runner(a, folder, args.python if a == "pfl" else sys.executable, args.data) for a in ARMS]
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for t in range(len(plan["sizes"])):
            for runner in [*runners[t % len(runners) :], *runners[: t % len(runners)]]:
                times[runner.arm].append(runner.round())
        for runner in runners:
            runner.close()
        return times, {arm: list(np.load(folder / f"{arm}.npz").values()) for arm in ARMS}


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the file of results lacks; all rows by what they are of."""
    from trust.accuracy_by_epsilon import (
        CLIENTS,
        DELTA,
        EPSILONS,
        RATE,
        ROUNDS,
        federation,
        first_updates,
        method_of,
        norm,
    )

    from fedlowrank.data.datasets.idx import Mnist
    from fedlowrank.trust.privacy.accounting import Sampling, epsilon, noise_for

    lines = args.results.read_text().splitlines() if args.results.exists() else []
    rows = {row["of"]: row for row in map(json.loads, lines)}

    def keep(of: str, **row: Any) -> None:
        rows[of] = {"of": of, **row}
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a") as file:
            file.write(json.dumps(rows[of]) + "\n")

    sampling = Sampling("poisson", CLIENTS, rate=RATE)
    if "accountants" not in rows:
        noises = [noise_for(e, DELTA, ROUNDS, sampling, "rdp") for e in EPSILONS if e < math.inf]
        mine: dict[str, Any] = {
            kind: [epsilon(s, ROUNDS, DELTA, sampling, kind) for s in noises]  # type: ignore[arg-type]
            for kind in ("rdp", "pld")
        }
        script = [args.python, str(Path(__file__).resolve()), "--run", "accountants"]
        asked = json.dumps({"noises": noises, "rate": RATE, "rounds": ROUNDS, "delta": DELTA})
        said = subprocess.run([*script, "--asked", asked], check=True, capture_output=True, text=True).stdout
        theirs = json.loads(said.splitlines()[-1])
        keep("accountants", noises=noises, here=mine, pfl=theirs)
    noise = noise_for(BUDGET, DELTA, ROUNDS, sampling, "rdp")
    left = [(f"plain {PLAIN}", 0, PLAIN, 0.0)]
    left += [(f"seed {seed}", seed, ROUNDS, noise) for seed in range(args.seeds)]
    data = Mnist(args.data).load()
    assert data.test is not None
    x, y = data.test.inputs.numpy(), data.test.y.numpy()
    for of, seed, rounds, sigma in left:
        if of in rows:
            continue
        fed = federation(data, seed)
        clip = statistics.median(map(norm, first_updates(method_of("fedavg"), fed)))
        plan = make_plan(fed, seed, rounds, clip, sigma)
        times, weights = compare(plan, args)
        largest = max(float(np.abs(w).max()) for w in weights["pfl"])
        pairs = {
            arm: max(float(np.abs(a - b).max()) for a, b in zip(weights[arm], weights["pfl"], strict=True))
            for arm in ARMS
        }
        keep(
            of,
            clip=clip,
            noise=sigma,
            cpu={arm: spent[WARM:] for arm, spent in times.items()},
            accuracy={arm: accuracy(w, x, y) for arm, w in weights.items()},
            differs={arm: apart / largest for arm, apart in pairs.items()},
        )
        print(
            of,
            rows[of]["accuracy"],
            {a: statistics.median(s) for a, s in rows[of]["cpu"].items()},
            flush=True,
        )
    return rows


def report(rows: dict[str, Any], seeds: int) -> list[str]:
    """Tables of the page."""
    from importlib.metadata import version

    from trust.accuracy_by_epsilon import EPSILONS, interval_in_percent

    found = rows["accountants"]
    lines = [
        "| ε set | σ | rdp | pld | pfl, RDP | pfl, PLD | pfl, PRV |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for i, (budget, noise) in enumerate(zip(EPSILONS, found["noises"], strict=False)):
        values = [found["here"]["rdp"][i], found["here"]["pld"][i]]
        values += [found["pfl"][kind][i] for kind in ("rdp", "pld", "prv")]
        lines.append(f"| {budget:g} | {noise:.4f} | " + " | ".join(f"{v:.4f}" for v in values) + " |")
    lines += [
        "",
        "| simulator | accuracy / % | CPU ms a round | CPU / pfl |",
        "| :--- | ---: | ---: | ---: |",
    ]
    runs = [rows[f"seed {seed}"] for seed in range(seeds)]
    for arm in ARMS:
        mean, width = interval_in_percent([run["accuracy"][arm] for run in runs])
        times = [t for run in runs for t in run["cpu"][arm]]
        ratios = [a / b for run in runs for a, b in zip(run["cpu"][arm], run["cpu"]["pfl"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells = [TITLES[arm], f"{mean:.1f} ± {width:.1f}", f"{statistics.median(times):.0f}"]
        cells.append("1" if arm == "pfl" else f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    for arm in ("vectorized", "sequential"):
        gaps = [run["accuracy"][arm] - run["accuracy"]["pfl"] for run in runs]
        lines.append(
            "{}, points above pfl in the same seed: {:+.2f} ± {:.2f}".format(arm, *interval_in_percent(gaps))
        )
    plain = rows[f"plain {PLAIN}"]
    differs = {arm: f"{share:.1e}" for arm, share in plain["differs"].items() if arm != "pfl"}
    lines.append(f"without noise, after {PLAIN} rounds, weights differ from pfl's by: {differs}")
    mine = {name: version(name) for name in ("torch", "dp-accounting", "numpy")}
    lines.append(
        f"Python {platform.python_version()}, here {mine}, pfl's interpreter {found['pfl']['versions']}"
    )
    return lines


def main() -> None:
    """Measure what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that has pfl")
    parser.add_argument("--data", default="data/mnist", help="folder of the IDX files")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/private_peers.jsonl"), help="finished runs"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--asked", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run == "accountants":
        print(json.dumps(pfl_accountants(**json.loads(args.asked))))
    elif args.run:
        run_arm(args.run, args.folder, args.data)
    else:
        print("\n".join(report(measure_all(args), args.seeds)))


if __name__ == "__main__":
    main()
