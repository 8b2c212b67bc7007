"""Accuracy of honest clients under attacks, by the rule with which the server guards its mean.

    python benchmarks/trust/accuracy_under_attacks.py --data data/mnist [--results robustness.jsonl]
        [--page docs/results/robustness.md] [--only-page]
        [--methods fedavg,...] [--attacks none,...] [--rules mean,...] [--seeds 0,1,2]

The protocol is that of ``experiments/trust/mnist-attacks.toml``; method, attack, rule and seed are laid over
it. Every finished run is one line of the file of results, so that an interrupted table goes on where it
stopped. Lines of another protocol are left out. The page's text above ``## Tables`` stays as it is; what
follows is written anew.

Without ``--methods``, ``--attacks`` and ``--rules`` the runs are those of PLAN. FedHL's server must see single
replies: median and trimmed mean leave none, and the weights of the geometric median have no place beside its
own p_i.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.data.federation import Federation
from fedlowrank.report.figures.style import drawing
from fedlowrank.results.evaluation.backdoor import backdoor_success
from fedlowrank.rounds.simulate import simulate
from fedlowrank.trust.attacks import hostile_clients
from fedlowrank.trust.trust_settings import Attack

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.result_pages import replace_tables
from helpers.seed_statistics import mean_and_half_width

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "experiments" / "trust" / "mnist-attacks.toml"
HEADING = "## Tables"

ATTACKS = (
    "none", "label_flip", "sign_flip", "scaled", "gaussian", "alie", "inner_product", "backdoor", "examples",
)  # fmt: skip
RULES = ("mean", "median", "trimmed_mean", "geometric_median", "norm_bound", "krum", "multi_krum")
PLAN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fedavg": (ATTACKS, RULES),
    "pfedlora": (ATTACKS, ("mean", "median", "norm_bound", "multi_krum")),
    "fedhl": (ATTACKS, ("mean", "norm_bound", "krum", "multi_krum")),
    "floral": (ATTACKS, ("mean", "median", "geometric_median", "norm_bound", "multi_krum")),
}
"""Attacks and rules of each method."""

TITLES = {"fedavg": "FedAvg", "pfedlora": "pFedLoRA", "floral": "FLoRAL", "fedhl": "FedHL"}

Row = dict[str, Any]
Cells = dict[tuple[str, str, str], dict[int, Row]]
"""Runs by method, attack and rule, in each by seed."""


def digest(experiment: ExperimentConfig) -> str:
    """What the protocol is known by, wherever the data lie."""
    tables = experiment.to_dict()
    tables["data"].pop("path", None)
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:12]


@functools.lru_cache(maxsize=1)
def federation_of(path: Path, data: str, seed: int) -> tuple[ExperimentConfig, Federation]:
    """The protocol with that seed, and the clients, the same for all methods, attacks and rules."""
    found = ExperimentConfig.read(path, [f"run.seed={seed}", f"data.path={json.dumps(data)}"])
    return found, found.federation()


def run(base: ExperimentConfig, federation: Federation, method: str, attack: str, rule: str) -> Row:
    """One run, as a line of the file of results."""
    e = base.overlay({"run": {"attack": {"kind": attack}, "robust": {"rule": rule}}})
    began = time.process_time()
    settings = {name: getattr(e.run, name) for name in vars(e.run)}
    try:
        found = simulate(e.build_method(method), federation, **settings)
    except FedlowrankError as error:
        return {"error": f"{type(error).__name__}: {error}", "cpu": round(time.process_time() - began, 2)}
    # those that would be hostile are left out without an attack, too
    hostile = hostile_clients(len(federation.infos), e.run.attack.share, federation.key / "hostile")
    known = [a for i, a in enumerate(found.accuracy()) if i not in hostile and a is not None]
    row = {
        "accuracy": round(sum(known) / len(known), 6),
        "lost": sum(len(record.lost) for record in found.rounds),
        "cpu": round(time.process_time() - began, 2),
    }
    if attack in ("none", "backdoor"):
        honest = [i for i in federation.infos if i.id not in hostile]
        success = (
            found.rounds[-1].server_metrics["backdoor"]["success"]
            if attack == "backdoor"
            else backdoor_success(federation, honest, Attack("backdoor"), found.run.local_model)
        )
        row["success"] = None if success is None else round(success, 6)
    return row


def planned(given: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Method, seed, attack and rule of every run."""
    for method in given.methods or PLAN:
        attacks, rules = PLAN[method]
        yield from itertools.product([method], given.seeds, given.attacks or attacks, given.rules or rules)


def read(path: Path, protocol: str) -> Cells:
    """Finished runs of one protocol."""
    found: Cells = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # the last line of a run that was killed
            continue
        if row["protocol"] == protocol:
            found.setdefault((row["method"], row["attack"], row["rule"]), {})[row["seed"]] = row
    return found


def percent(values: list[float]) -> str:
    """A cell of a table."""
    mean, half = mean_and_half_width(100 * v for v in values)
    return f"{mean:.1f} ± {half:.1f}" if len(values) > 1 else f"{mean:.1f}"


def cell(runs: dict[int, Row], field: str) -> str:
    """Mean and interval of a field over seeds; what happened instead where runs failed."""
    failed = sum("error" in row for row in runs.values())
    if failed:
        return f"fails ({failed} of {len(runs)})"
    return percent([row[field] for row in runs.values()]) if runs else ""


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join([':---'] + ['---:'] * (len(head) - 1))} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def present(cells: Cells, method: str, place: int) -> list[str]:
    """Attacks (place 1) or rules (place 2) of a method's runs, in the usual order."""
    known = {key[place] for key in cells if key[0] == method}
    return [name for name in (ATTACKS, RULES)[place - 1] if name in known]


def differences(cells: Cells, method: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Accuracy of a rule minus the mean's in points, paired by seed: mean and half-width by attack and rule."""
    found = {}
    for (name, attack, rule), runs in cells.items():
        means = cells.get((method, attack, "mean"), {})
        pairs = [
            100 * (runs[s]["accuracy"] - means[s]["accuracy"])
            for s in runs
            if s in means and "error" not in runs[s] and "error" not in means[s]
        ]
        if name == method and rule != "mean" and len(pairs) > 1:
            found[attack, rule] = mean_and_half_width(pairs)
    return found


def established(cells: Cells, method: str) -> list[str]:
    """Which rules are better or worse than the mean by more than the interval, as lines of text."""
    lines = []
    for word, is_so in (
        ("better", lambda mean, half: mean > half),
        ("worse", lambda mean, half: mean < -half),
    ):
        by_attack: dict[str, list[str]] = {}
        for (attack, rule), (mean, half) in differences(cells, method).items():
            if is_so(mean, half):
                by_attack.setdefault(attack, []).append(f"{rule} {mean:+.1f} ± {half:.1f}".replace("-", "−"))
        listed = "; ".join(
            f"{'no attack' if a == 'none' else a}: {', '.join(by_attack[a])}"
            for a in present(cells, method, 1)
            if a in by_attack
        )
        lines.append(f"- {word} than the mean: {listed or 'no rule under any attack'}.")
    return lines


def sections(cells: Cells) -> list[str]:
    """The tables and what follows from them."""
    lines = [HEADING, ""]
    methods = [m for m in TITLES if any(key[0] == m for key in cells)]
    for method in methods:
        rules = present(cells, method, 2)
        rows = [
            [attack, *(cell(cells.get((method, attack, rule), {}), "accuracy") for rule in rules)]
            for attack in present(cells, method, 1)
        ]
        lines += [f"### {TITLES[method]}: accuracy of honest clients / %", ""]
        lines += table(["attack", *rules], rows)
        compared = len(differences(cells, method))
        lines += [
            "",
            f"Of {compared} paired differences to the mean, in points, the interval excludes 0 for:",
            "",
        ]
        lines += [*established(cells, method), ""]
    lines += ["### Backdoor: success / %", ""]
    rules = [rule for rule in RULES if any(key[2] == rule for key in cells)]
    rows = []
    for method, attack in itertools.product(methods, ("none", "backdoor")):
        found = [cell(cells.get((method, attack, rule), {}), "success") for rule in rules]
        rows.append([TITLES[method], attack, *found])
    lines += [*table(["method", "attack", *rules], rows), ""]
    cpu = sum(row["cpu"] for runs in cells.values() for row in runs.values())
    count = sum(map(len, cells.values()))
    lost = sum(row.get("lost", 0) for runs in cells.values() for row in runs.values())
    lines += [
        f"{count} runs took {cpu / 60:.0f} minutes of CPU time on one thread, torch {torch.__version__}. Replies "
        f"that the server dropped because they were not finite: {lost}.",
    ]
    return lines


def draw_accuracy(cells: Cells, path: Path) -> None:
    """Attack by rule for each method, colored by accuracy; in each cell the mean and its 95 % interval."""
    methods = [m for m in TITLES if any(key[0] == m for key in cells)]
    with drawing():
        figure = Figure(figsize=(10, 3.6 * -(-len(methods) // 2)), layout="constrained")
        panels = figure.subplots(-(-len(methods) // 2), 2, squeeze=False)
        for method, axes in itertools.zip_longest(methods, panels.flat):
            axes.grid(False)
            if method is None:
                axes.axis("off")
                continue
            attacks, rules = present(cells, method, 1), present(cells, method, 2)
            means, halves = (
                np.array([[_percent(cells, (method, a, r), "accuracy")[k] for r in rules] for a in attacks])
                for k in (0, 1)
            )
            # from chance, ten classes, on
            image = axes.imshow(means, vmin=10, vmax=90, cmap="viridis", aspect="auto")
            axes.set_title(TITLES[method])
            axes.set_xticks(range(len(rules)), [r.replace("_", "\n") for r in rules], fontsize=6.2)
            axes.set_yticks(range(len(attacks)), [a.replace("_", " ") for a in attacks])
            axes.set_xlabel("rule")
            axes.set_ylabel("attack")
            for (i, j), mean in np.ndenumerate(means):
                text = f"{mean:.0f} ± {halves[i, j]:.0f}" if np.isfinite(mean) else "–"
                color = "#ffffff" if mean < 57 else "#000000"
                axes.text(j, i, text, ha="center", va="center", color=color, fontsize=6.5)
        figure.colorbar(image, ax=panels, label="test accuracy / %", shrink=0.6)
        figure.savefig(path, format="svg", facecolor="#ffffff", metadata={"Date": None})


def draw_backdoor(cells: Cells, path: Path) -> None:
    """Success of the backdoor against accuracy: a small hollow point a seed, and the mean of each rule."""
    methods = [m for m in TITLES if any(key[:2] == (m, "backdoor") for key in cells)]
    with drawing():
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        panels = figure.subplots(1, len(methods), sharex=True, sharey=True, squeeze=False)[0]
        for method, axes in zip(methods, panels, strict=True):
            for i, (rule, marker) in enumerate(zip(RULES, "osD^vPX", strict=True)):
                x, y = (_values(cells, (method, "backdoor", rule), f) for f in ("accuracy", "success"))
                if x:
                    axes.plot(x, y, marker, color=f"C{i}", markerfacecolor="none", markersize=4)
                    axes.plot(
                        np.mean(x),
                        np.mean(y),
                        marker,
                        color=f"C{i}",
                        label=rule.replace("_", " "),
                        markersize=7,
                    )
            axes.set_title(TITLES[method])
            axes.set_ylim(-3, 103)
            axes.set_xlabel("test accuracy / %")
        figure.axes[0].set_ylabel("success of the backdoor / %")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.savefig(path, format="svg", facecolor="#ffffff", metadata={"Date": None})


def _values(cells: Cells, key: tuple[str, str, str], field: str) -> list[float]:
    """A field of every seed, in percent."""
    return [100 * row[field] for row in cells.get(key, {}).values() if row.get(field) is not None]


def _percent(cells: Cells, key: tuple[str, str, str], field: str) -> tuple[float, float]:
    """Mean over seeds and half-width of its 95 % interval, in percent; NaN without runs."""
    return mean_and_half_width(_values(cells, key, field))


def write_page(cells: Cells, page: Path) -> None:
    """Replace the page's part from the tables on, and its figures."""
    replace_tables(page, "Attacks and robust rules", HEADING, "\n".join(sections(cells)) + "\n")
    folder = page.parent / "figures"
    folder.mkdir(exist_ok=True)
    draw_accuracy(cells, folder / "robustness-accuracy.svg")
    draw_backdoor(cells, folder / "robustness-backdoor.svg")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    options.add_argument("--data", default="data/mnist", help="folder of MNIST's four idx files")
    options.add_argument("--experiment", type=Path, default=EXPERIMENT, help="file of the protocol")
    options.add_argument("--results", type=Path, default=Path("robustness.jsonl"), help="finished runs")
    options.add_argument("--page", type=Path, help="write tables to this page, figures beside it")
    options.add_argument("--only-page", action="store_true", help="write the page of the finished runs")
    options.add_argument("--methods", type=names)
    options.add_argument("--attacks", type=names)
    options.add_argument("--rules", type=names)
    options.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1, 2])
    given = options.parse_args()
    torch.set_num_threads(1)
    protocol = digest(ExperimentConfig.read(given.experiment))
    cells = read(given.results, protocol)
    for method, seed, attack, rule in () if given.only_page else planned(given):
        runs = cells.setdefault((method, attack, rule), {})
        if seed in runs:
            continue
        base, federation = federation_of(given.experiment, given.data, seed)
        found = run(base, federation, method, attack, rule)
        cut = {"protocol": protocol, "method": method, "attack": attack, "rule": rule, "seed": seed}
        runs[seed] = {**cut, **found}
        with given.results.open("a") as file:
            file.write(json.dumps(runs[seed]) + "\n")
        told = found.get("error") or f"{100 * found['accuracy']:.1f} % ({found['cpu']:.1f} CPU s)"
        print(method, attack, rule, seed, told, flush=True)
    if given.page:
        write_page({key: runs for key, runs in cells.items() if runs}, given.page)


if __name__ == "__main__":
    main()
