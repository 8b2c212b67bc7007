"""Write docs/first-day.md: the commands of a first day, run in a fresh folder, with their output and times.

Usage: ``python docs/site/record_first_day.py --python ENV/bin/python``, where ENV has the wheel of fedlowrank and nothing of
this clone. Files come from docs/how-to/extend.md and experiments/demo/first.toml. A command that fails stops the script.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).parents[1]
FIRST, LAST = 5, 12
"""Lines of a command's output that the page shows, from its beginning and from its end."""

STEPS: list[tuple[str, str, str]] = [
    (
        "Is it there?",
        "Install the wheel as on [installation](installation.md).",
        "fedlowrank --version",
    ),
    (
        "A first comparison",
        "`first.toml` is `experiments/demo/first.toml` of the repository: handwritten digits, 10 clients of 2 classes each.",
        "fedlowrank compare first.toml -o runs/first",
    ),
    (
        "Your data",
        "This file and those below are shown on [extend it in ten lines](how-to/extend.md).",
        "python my_data.py && fedlowrank data my_data.toml",
    ),
    (
        "Methods on your data",
        "Two methods, one command.",
        "fedlowrank compare my_data.toml --methods fedavg,ditto -o runs/data",
    ),
    (
        "Your model",
        "",
        "fedlowrank run mine.toml --method fedrep -o runs/model \"model.names=['my_model:small']\"",
    ),
    (
        "Your method",
        "First the battery, then a comparison with FedAvg. Both average with the same weights, so their accuracies are equal.",
        "fedlowrank check my_method:WeightedMean",
    ),
    ("", "", "fedlowrank compare mine.toml --methods fedavg,my_method:WeightedMean -o runs/method"),
    (
        "Your metric",
        "",
        "fedlowrank run mine.toml --method fedavg -o runs/metric \"run.metrics=['my_metric:recall_of_zero']\"",
    ),
    (
        "A grid",
        "2 methods and 2 learning rates: 4 runs, two at a time.",
        "fedlowrank compare mine.toml --methods fedavg,fedprox --vary defaults.optimizer.lr=0.1,0.5 "
        "--jobs 2 -o runs/grid",
    ),
    (
        "A report",
        "One page of all runs of a folder; open it in a browser.",
        "fedlowrank report runs/grid -o report.html",
    ),
]


def record(command: str, folder: Path, environment: dict[str, str]) -> tuple[str, float, float]:
    """Run a command in a folder.

    Returns:
        Output, wall-clock seconds, CPU seconds.

    Raises:
        SystemExit: if the command fails, with its output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    found = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    output = found.stdout.replace(str(folder), "~/first-day")
    if found.returncode:
        raise SystemExit(f"{command}\nfailed with exit code {found.returncode}:\n{output}")
    return output, wall, cpu


def trim(output: str) -> str:
    """The first and the last lines that are not empty, without spaces at their ends, and how many are left out."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    between = len(lines) - FIRST - LAST
    if between <= 1:
        return "\n".join(lines)
    return "\n".join([*lines[:FIRST], f"... ({between} more lines)", *lines[-LAST:]])


def make_page(python: Path) -> str:
    """Run all commands.

    Args:
        python: interpreter of an environment with the wheel.
    """
    parts = []
    total = 0.0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        page = (DOCS / "how-to" / "extend.md").read_text()
        for name, text in re.findall(r"ave (?:it|this) as `([\w.]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL):
            (folder / name).write_text(text)
        shutil.copy(DOCS.parent / "experiments" / "demo" / "first.toml", folder)
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        path = f"{python.absolute().parent}{os.pathsep}{kept['PATH']}"
        environment = kept | {"PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        for title, text, command in STEPS:
            output, wall, cpu = record(command, folder, environment)
            total += wall
            print(f"{wall:6.1f} s  {command}", file=sys.stderr)
            heading = f"## {title}\n\n" if title else ""
            words = f"{text}\n\n" if text else ""
            shown = f"```sh\n{command}\n```\n\n```text\n{trim(output)}\n```\n\n"
            parts.append(f"{heading}{words}{shown}{wall:.1f} s, {cpu:.1f} s of CPU time.\n")
    head = (
        "# The first day\n\nCommands in a folder `~/first-day`, with their output and times on a machine with "
        f"{os.cpu_count()} cores and no GPU, {total:.0f} s in all. The first {FIRST} and the last {LAST} "
        "lines of each output are shown, without empty ones. "
        "`python docs/site/record_first_day.py --python ENV/bin/python` ran them with the wheel in a fresh environment "
        "and wrote this page.\n\n"
    )
    return head + "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="interpreter with the wheel"
    )
    (DOCS / "first-day.md").write_text(make_page(parser.parse_args().python))
