"""What the bounds of a server on updates cost honest clients: replies shortened or refused, and accuracy.

    python benchmarks/trust/update_bounds.py [--rounds 8] [--methods fedavg,scaffold] [--out docs/results/network-bounds.md]

Eight honest clients of 10 to 400 examples of two of four classes each, all methods, learning rates 0.1 and 0.3. Norms are
compared and updates shortened by the code of the server (:mod:`fedlowrank.network.validation`), within one process. Every
variant has the same seed, data and order of examples. A reply is one client's in one round. The text of the page above the
tables stays as it is: read it again beside new numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from fedlowrank.core.contract import AnyMethod, Task
from fedlowrank.core.errors import NonFiniteError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientJob, ClientResult
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.models import standard
from fedlowrank.network.answers import steps_of
from fedlowrank.network.validation.norm_clipping import Strikes, shorten_upload
from fedlowrank.network.validation.norms import NormBound, measure_norms, relative_steps
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.result_pages import replace_tables

EXAMPLES = (10, 15, 20, 40, 60, 90, 200, 400)
HEADING = "## Learning rate"
UNEQUAL_RANKS = ("fedhl", "hetlora", "flexlora", "flora")


@dataclass(frozen=True)
class Variant:
    """Bounds on updates.

    Attributes:
        title: in the table.
        ratio: usual norms that an update may have; 0 for no bound.
        strikes: see ``network.limits.strikes``.
        refuses: whether a longer update is refused, instead of shortened.
        promised: whether numbers of examples are promised, so that steps lengthen the bound and weights do not shorten it.
    """

    title: str
    ratio: float
    strikes: int = 3
    refuses: bool = False
    promised: bool = False


VARIANTS = (
    Variant("no bound", 0.0),
    Variant("refused above 3", 3.0, refuses=True, promised=True),
    Variant("shortened to the median", 1.0),
    Variant("shortened to 2", 2.0),
    Variant("shortened to 3 (default)", 3.0),
    Variant("shortened to 3, counts promised", 3.0, promised=True),
)


class Net(nn.Module):
    """A hidden layer of nine."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 10), nn.ReLU())
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[b, 4]``."""
        return self.head(self.body(x))


standard.LAYERS |= {Net}


def clients(unequal_ranks: bool, weigh: float) -> Federation:
    """The federation; n_k is at most ``weigh`` times the median."""
    generator = torch.Generator().manual_seed(0)
    weight, data = torch.randn(12, 4, generator=generator), []
    for i, n in enumerate(EXAMPLES):
        x = torch.randn(4 * n + 800, 12, generator=generator)
        y = (x @ weight).argmax(1)
        mine = ((y == i % 4) | (y == (i + 1) % 4)).nonzero().flatten()
        train, test = mine[:n], mine[n : n + 200]
        data.append({"train": (x[train], y[train]), "test": (x[test], y[test])})
    ranks = (1, 2, 4, 8, 1, 2, 4, 8) if unequal_ranks else (3,) * 8
    made = Federation.from_arrays(data, Net, classes=4, rank=ranks, cluster=[i % 2 for i in range(8)])
    most = int(weigh * median_low(EXAMPLES)) if weigh else max(EXAMPLES)
    infos = [dataclasses.replace(info, example_count=min(info.example_count, most)) for info in made.infos]
    return dataclasses.replace(made, infos=infos)


@dataclass
class Bounding(Sequential):
    """The sequential engine, whose updates are bounded as a server bounds them."""

    variant: Variant = VARIANTS[0]
    bound: NormBound = field(default_factory=lambda: NormBound(30.0))
    strikes: Strikes = field(default_factory=lambda: Strikes(3))
    replies: int = 0
    shortened: int = 0
    refused: int = 0

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Iterator[ClientResult]:
        """See the base class."""
        jobs = list(jobs)
        results = dict(
            zip((j.client.id for j in jobs), super().run(method, federation, task, round, jobs), strict=True)
        )
        references = {j.client.id: method.describe_update(j.down, j.client, task).reference for j in jobs}
        norms = {c: measure_norms(r.upload, references[c]) for c, r in results.items() if r.error is None}
        self.replies += len(norms)
        results |= self._bounded(method, federation, round, results, references, norms)
        self.bound.learn(norms, round)
        yield from results.values()

    def _bounded(
        self, method: AnyMethod, federation: Federation, round: int, results: Any, references: Any, norms: Any
    ) -> dict[int, ClientResult]:
        if not self.variant.ratio:
            return {}
        infos, ratio = federation.infos, self.variant.ratio
        passes = method.local_passes()
        steps = {c: sum(steps_of(passes, infos[c].example_count).values()) for c in norms}
        usual = median_low(i.example_count for i in infos)
        reach = {c: min(1.0, usual / infos[c].example_count) for c in norms}
        if self.variant.promised:
            reach = relative_steps(steps, norms)
        changed = {}
        for client in self.bound.find_outliers(norms, steps, round):
            self.refused += 1
            changed[client] = dataclasses.replace(results[client], lost="refused")
        ratios = {c: 1.0 if self.strikes.is_reached(c) else ratio for c in norms}
        if self.variant.refuses:
            ratios = dict.fromkeys(norms, ratio)
        found = self.bound.plan_shortenings(norms, ratios, reach, ratio, round)
        for client in norms.keys() - changed.keys():
            self.strikes.add(client, client in found and found[client].is_strike)
            if client in found and self.variant.refuses:
                self.refused += 1
                changed[client] = dataclasses.replace(results[client], lost="refused")
            elif client in found:
                self.shortened += 1
                upload = shorten_upload(results[client].upload, references[client], found[client].bounds)
                changed[client] = dataclasses.replace(results[client], upload=upload)
        return changed


@dataclass(frozen=True)
class Found:
    """What became of a run: shares of the replies, and test accuracy; NaN if it diverged."""

    shortened: float
    refused: float
    accuracy: float


def trial(name: str, lr: float, variant: Variant, rounds: int) -> Found:
    """Run a method on the honest clients."""
    engine = Bounding(variant=variant, strikes=Strikes(variant.strikes))
    federation = clients(name in UNEQUAL_RANKS, 0.0 if not variant.ratio or variant.promised else 3.0)
    method = METHODS[name](optimizer=SGD(lr=lr), batch_size=16, epochs=1)
    run = Run(method, federation, RunSettings(rounds=rounds, evaluate_every=rounds, on_nan="drop"), engine)
    try:
        records = [run.record_initial_models(), *(run.step() for _ in range(rounds))]
    except NonFiniteError:
        return Found(0.0, 0.0, float("nan"))
    accuracy = records[-1].mean(split="test")
    count = max(1, engine.replies)
    return Found(
        engine.shortened / count, engine.refused / count, float("nan") if accuracy is None else accuracy
    )


def table(found: dict[tuple[str, float, str], Found], names: Sequence[str], lr: float) -> list[str]:
    """Rows of one learning rate: for each method the share of replies and the accuracy of each variant."""
    rows = [
        "| method | " + " | ".join(v.title for v in VARIANTS) + " |",
        "| :--- |" + " ---: |" * len(VARIANTS),
    ]
    for name in names:
        cells = []
        for v in VARIANTS:
            one = found[name, lr, v.title]
            share = one.refused if v.refuses else one.shortened
            more = "" if not v.ratio else f" ({100 * share:.0f} %)"
            if one.refused and not v.refuses:
                more += f", {100 * one.refused:.0f} % refused"
            cells.append(f"{100 * one.accuracy:.1f}{more}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def summary(found: dict[tuple[str, float, str], Found], names: Sequence[str], lr: float) -> list[str]:
    """A row for each variant: what it does to replies and accuracy, over all methods."""
    rows = [
        "| bound | replies shortened | replies refused | accuracy, mean | change, mean | largest loss |",
        "| :--- | ---: | ---: | ---: | ---: | :--- |",
    ]
    base = {name: found[name, lr, VARIANTS[0].title].accuracy for name in names}
    for v in VARIANTS:
        mine = {name: found[name, lr, v.title] for name in names}
        known = [n for n in names if base[n] == base[n] and mine[n].accuracy == mine[n].accuracy]
        change = {n: mine[n].accuracy - base[n] for n in known}
        worst = min(known, key=lambda n: change[n])
        shortened, refused = (
            sum(getattr(one, kind) for one in mine.values()) / len(mine) for kind in ("shortened", "refused")
        )
        mean = sum(mine[n].accuracy for n in known) / len(known)
        rows.append(
            f"| {v.title} | {100 * shortened:.1f} % | {100 * refused:.1f} % | {100 * mean:.1f} | "
            f"{100 * sum(change.values()) / len(change):+.1f} | {worst} {100 * change[worst]:+.1f} |"
        )
    return rows


def main() -> None:
    """Run all, and print the tables or write them on the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rates", default="0.1,0.3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    names, rates = args.methods.split(","), [float(r) for r in args.rates.split(",")]
    found = {}
    for lr in rates:
        for name in names:
            for v in VARIANTS:
                found[name, lr, v.title] = trial(name, lr, v, args.rounds)
            print(lr, name, [found[name, lr, v.title] for v in VARIANTS], flush=True)
    lines = []
    for lr in rates:
        lines += [
            f"{HEADING} {lr:g}",
            "",
            *summary(found, names, lr),
            "",
            *table(found, names, lr),
            "",
        ]
    lines += [f"Methods: {len(names)}; rounds: {args.rounds}; torch {torch.__version__}.", ""]
    tables = "\n".join(lines)
    if args.out:
        replace_tables(args.out, "Bounds on updates: what they cost honest clients", HEADING, tables)
    else:
        print(tables)


if __name__ == "__main__":
    main()
