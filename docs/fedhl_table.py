"""Federated LoRA on text classification and Dolly, as Markdown tables: ``python docs/fedhl_table.py [RUNS]``.

RUNS holds a folder for each experiment of ``experiments/fedhl/cpu`` (``agnews-high``, ...) as ``fedlowrank compare`` leaves them;
the figures of its finished runs are entered into ``docs/results/fedhl_small.csv``, one row a run, from which the tables are
made. All are of the last round: the mean over clients, then the mean over seeds ± the half-width of its 95 % confidence interval
(Student's t with n - 1 degrees of freedom for n seeds). "Per client" is each client's own model, of its own rank; "server" is the
server's model on the same examples.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.report.metrics import half_width
from fedlowrank.simulation.records import RunRecord

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "experiments" / "fedhl" / "cpu"
FIGURES = ROOT / "docs" / "results" / "fedhl_small.csv"
FIELDS = ("experiment", "method", "seed", "per_client", "server", "worst", "bytes_up", "bytes_down")


def figures(folder: Path, stem: str) -> dict[str, str] | None:
    """One row, or None if the run did not come to its end."""
    run = RunRecord.load(folder)
    if run.status["state"] != "finished":
        return None
    last, tokens = run.rounds[-1], stem.endswith("stories")
    measured = (last.risk if tokens else last.accuracy) or {}
    own = [v for v in next(iter(measured.values()))["test"] if v is not None]
    # where a method has no series of the server, clients are sent the server's own model
    server = [v for v in measured.get("server", next(iter(measured.values())))["test"] if v is not None]
    values = [statistics.mean(own), statistics.mean(server), max(own) if tokens else min(own)]
    totals = [sum(getattr(r, way) for r in run.rounds) for way in ("bytes_up", "bytes_down")]
    name, _, seed = folder.name.rpartition("-s")
    return dict(
        zip(FIELDS, [stem, name, seed, *(f"{v:.5f}" for v in values), *map(str, totals)], strict=True)
    )


def known_rows() -> list[dict[str, str]]:
    """The rows of the CSV file."""
    with FIGURES.open(newline="") as file:
        return list(csv.DictReader(file))


def entered(runs: Path) -> list[dict[str, str]]:
    """All rows that are known, those of these runs in the place of older ones."""
    known = {
        (r["experiment"], r["method"], int(r["seed"])): r for r in (known_rows() if FIGURES.exists() else ())
    }
    for folder in sorted(runs.glob("*/*-s[0-9]*")):
        if (FILES / f"{folder.parent.name}.toml").exists() and (row := figures(folder, folder.parent.name)):
            known[row["experiment"], row["method"], int(row["seed"])] = row
    rows = [known[key] for key in sorted(known)]
    with FIGURES.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def over_seeds(rows: list[dict[str, str]], field: str, scale: float, digits: int) -> str:
    """Mean and half-width of its 95 % interval."""
    return interval([float(r[field]) * scale for r in rows], digits)


def interval(values: list[float], digits: int) -> str:
    """Mean of the seeds and half-width of its 95 % interval; the mean alone of one seed."""
    mean = f"{statistics.mean(values):.{digits}f}".replace("-", "−")
    return (
        f"{mean} ± {half_width(statistics.stdev(values), len(values)):.{digits}f}"
        if len(values) > 1
        else mean
    )


def table(rows: list[dict[str, str]], stem: str) -> str:
    """The table of an experiment, as Markdown with its heading."""
    made, tokens = ExperimentConfig.read(FILES / f"{stem}.toml"), stem.endswith("stories")
    scale, digits = (1.0, 3) if tokens else (100.0, 1)
    what = "held-out loss" if tokens else "test accuracy, %"
    lines = [
        f"### {made.title.partition(': ')[2]}\n\nRanks {list(made.lora.ranks)}; {what}.\n",
        "| method | per client | server | worst client | MB up | MB down | seeds |",
        "| :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in made.compared_methods:
        found = [r for r in rows if (r["experiment"], r["method"]) == (stem, name)]
        if found:
            cells = [over_seeds(found, f, scale, digits) for f in ("per_client", "server", "worst")]
            cells += [f"{float(found[0][way]) / 1e6:.1f}" for way in ("bytes_up", "bytes_down")]
            lines.append(f"| {made.method_title(name)} | {' | '.join(cells)} | {len(found)} |")
    return "\n".join(lines)


def differences(rows: list[dict[str, str]]) -> str:
    """Accuracy of FedHL's server minus that of its clients' own models, seed by seed, as a Markdown table."""
    lines = ["| FedHL | seed by seed | mean |", "| :--- | ---: | ---: |"]
    for stem in sorted({r["experiment"] for r in rows if not r["experiment"].endswith("stories")}):
        mine = [r for r in rows if (r["experiment"], r["method"]) == (stem, "fedhl")]
        gaps = [100 * (float(r["server"]) - float(r["per_client"])) for r in mine]
        each = ", ".join(f"{gap:+.1f}".replace("-", "−").replace("+0.0", "0.0") for gap in gaps)
        title = ExperimentConfig.read(FILES / f"{stem}.toml").title.partition(": ")[2]
        lines.append(f"| {title} | {each} | {interval(gaps, 1)} |")
    return "\n".join(lines)


def main(runs: Path | None) -> None:
    """Print a table an experiment, then the differences."""
    rows = entered(runs) if runs else known_rows()
    for stem in sorted({r["experiment"] for r in rows}):
        print(table(rows, stem), end="\n\n")
    print(differences(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
