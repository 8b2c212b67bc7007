"""Federated LoRA on text classification and Dolly, as Markdown tables: ``python docs/fedhl_table.py RUNS``.

RUNS holds a folder for each experiment of ``experiments/fedhl/cpu`` (``agnews-high``, ...) as ``fedlowrank compare``
leaves them. All figures are of the last round: the mean over clients, then mean ± standard deviation over seeds. "Per client" is
each client's own model, of its own rank; "server" is the server's model on the same examples.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from fedlowrank import config, experiment
from fedlowrank.record import RoundRecord, RunRecord

FILES = Path(__file__).resolve().parents[1] / "experiments" / "fedhl" / "cpu"


def finished(folder: Path) -> list[RoundRecord] | None:
    """The rounds of a run that came to its end, or None."""
    run = RunRecord.load(folder)
    return run.rounds if run.status["state"] == "finished" else None


def mean(values: list[float | None]) -> float:
    """Over the clients that have test examples."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known)


def over_seeds(values: list[float], digits: int) -> str:
    """Mean and standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def row(runs: list[list[RoundRecord]], tokens: bool) -> list[str]:
    """What the runs of one method came to."""
    cells = []
    for series in ("personal", "server"):
        found = []
        for rounds in runs:
            measured = (rounds[-1].risk if tokens else rounds[-1].accuracy) or {}
            # where a method has no series of the server, clients are sent the server's own model
            split = measured.get(series) or next(iter(measured.values()))
            found.append(mean(split["test"]) * (1 if tokens else 100))
        cells.append(over_seeds(found, 3 if tokens else 1))
    lowest = [sorted(v for v in _headline(r, tokens) if v is not None) for r in runs]
    cells.append(over_seeds([(ends[-1] if tokens else ends[0] * 100) for ends in lowest], 3 if tokens else 1))
    cells += [f"{sum(getattr(r, way) for r in runs[0]) / 1e6:.1f}" for way in ("bytes_up", "bytes_down")]
    return [*cells, str(len(runs))]


def _headline(rounds: list[RoundRecord], tokens: bool) -> list[float | None]:
    return next(iter(((rounds[-1].risk if tokens else rounds[-1].accuracy) or {}).values()))["test"]


def main(runs: Path) -> None:
    """Print a table an experiment."""
    for path in sorted(FILES.glob("*.toml")):
        if path.stem.startswith("base-") or not (runs / path.stem).is_dir():
            continue
        made = experiment.load(config.read(path))
        tokens = path.stem.endswith("stories")
        what = "held-out loss" if tokens else "test accuracy, %"
        print(f"### {made.header.title}\n\nRanks {list(made.ranks)}, {made.run.rounds} rounds; {what}.\n")
        print("| method | per client | server | worst client | MB up | MB down | seeds |")
        print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name in made.compared:
            folders = sorted((runs / path.stem).glob(f"{name}-s[0-9]*"))
            found = [r for folder in folders if (r := finished(folder)) is not None]
            if found:
                print(f"| {made.title(name)} | {' | '.join(row(found, tokens))} |")
        print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
