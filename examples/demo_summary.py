"""Print the summary of `make demo-all`: three lines for each idea, with results of the runs in a folder.

python examples/demo_summary.py runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fedlowrank import METHODS, load_rounds, load_runs

IDEAS = (
    ("floral", "standalone", "Groups of clients whose labels contradict each other"),
    ("pfedlora", "standalone", "Different architectures, little data for each client"),
    ("fedslr", "fedavg", "A low-rank global model, fewer bytes to the clients"),
    ("fedhl", "hetlora", "LoRA ranks from 16 to 1"),
)
"""Method, whose folder is ``demo-`` and its name; simple baseline; problem that the method solves."""


def summarize_idea(folder: Path, method: str, baseline: str) -> list[str]:
    """Compare a method with its simple baseline and with the other methods.

    Args:
        folder: with the runs of the comparison.
        method: name of the method.
        baseline: name of the simple baseline.

    Returns:
        Three lines: the paired difference to the baseline, all methods by accuracy, and bytes.
    """
    tests = load_runs(folder, last=True, series="all").query("split == 'test'")
    by_client = tests.groupby(["method", "series", "seed"])["accuracy"].mean() * 100
    clients = by_client.drop(index=["server", "gkr"], level="series", errors="ignore").droplevel("series")
    difference = (clients[method] - clients[baseline]).dropna()
    means = clients.groupby("method").mean().sort_values(ascending=False)
    gap = difference.mean()
    order = "tied with" if abs(gap) < 0.05 else f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}"
    higher = f"above it in {(difference > 0).sum()} of {len(difference)} seeds"
    first = (
        f"{METHODS[method].title} {means[method]:.1f} %, {order} the simple baseline {METHODS[baseline].title} "
        f"({means[baseline]:.1f} %); {higher}."
    )
    ranking = "Clients' mean test accuracy: " + _join(means, "{:.1f} %")
    if "server" in by_client.index.get_level_values("series"):
        server = by_client.xs("server", level="series").groupby("method").mean()
        ranking += " Server's model: " + _join(server.sort_values(ascending=False), "{:.1f} %")
    return [first, ranking, _describe_bytes(folder)]


def _describe_bytes(folder: Path) -> str:
    rounds = load_rounds(folder)
    runs = rounds.groupby(["method", "seed"])
    total = runs["bytes_down"].sum().groupby("method").mean().sort_values() / 1e6
    last = runs["bytes_down"].last().groupby("method").mean().loc[total.index] / 1e3
    parts = [
        f"{METHODS[name].title} {total[name]:.1f} MB ({last[name]:.0f} kB in the last round)"
        for name in total.index
    ]
    return "Bytes to the clients: " + ", ".join(parts) + "."


def _join(values: pd.Series, form: str) -> str:
    return (
        ", ".join(f"{METHODS[str(name)].title} {form.format(value)}" for name, value in values.items()) + "."
    )


def main() -> None:
    """Print the summary of every idea."""
    parser = argparse.ArgumentParser(description="Print three lines for each comparison of `make demo-all`.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--language", action="store_true", help="the folder is of `make demo-language`")
    arguments = parser.parse_args()
    ideas = [
        (arguments.folder / f"demo-{method}", method, baseline, problem)
        for method, baseline, problem in IDEAS
    ]
    if arguments.language:
        ideas = [(arguments.folder, "fedhl", "hetlora", "A small language model, LoRA ranks from 16 to 1")]
    for folder, method, baseline, problem in ideas:
        print(f"\n{METHODS[method].title}: {problem}")
        for line in summarize_idea(folder, method, baseline):
            print(f"  {line}")


if __name__ == "__main__":
    main()
