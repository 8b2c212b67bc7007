"""The command ``fedlowrank bench``."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from ..core.errors import ConfigError, did_you_mean
from ..core.io.atomic_files import write_atomically
from ..engines import ENGINES
from ..rounds.logs.console import console
from ..rounds.simulate import threads
from ..testing.bench import SUBJECTS, machine, time_defaults, time_rounds
from ..testing.bench_page import DEFAULTS_HEAD, HEAD, defaults_rows, page
from ..testing.bench_page import rows as rows_of

LONGER = 14
"""Times as many rounds as are timed of an engine: the interval of evaluations follows the rounds of a run."""


def bench(models: list[str] | None, engines: list[str], method: str, rounds: int, out: Path | None) -> int:
    """Time rounds, and print the table."""
    models = models or [*SUBJECTS]
    for what, names, known in (("model", models, list(SUBJECTS)), ("engine", engines, [*ENGINES])):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {what} {name!r} to time. {did_you_mean(name, known)}")
    if rounds < 1:
        raise ConfigError(f"--rounds must be >= 1; it is {rounds}")
    with threads(1), Progress(console=console(stderr=True), transient=True) as progress:
        bar = progress.add_task("timing", total=rounds * len(models))
        found, defaults = [], []
        for model in models:
            progress.update(bar, description=SUBJECTS[model].title)
            found.append(time_rounds(model, engines, rounds, method, on_round=lambda: progress.advance(bar)))
            if "sequential" in engines:
                defaults.append(time_defaults(model, "sequential", LONGER * rounds, method))
        head = machine()
    title = f"{method}, {rounds} rounds of 10 of 100 clients; below 1 is faster than the floor loop"
    shown = Table(*HEAD, title=title, caption=head, caption_justify="left")
    for row in rows_of(found):
        shown.add_row(*row)
    console().print(shown)
    added = Table(*DEFAULTS_HEAD, title=f"A run folder, evaluation and checkpoints, {LONGER * rounds} rounds")
    for row in defaults_rows(defaults):
        added.add_row(*row)
    console().print(added)
    if out is not None:
        options = f"--models {','.join(models)} --engines {','.join(engines)} --rounds {rounds}"
        command = f"fedlowrank bench --method {method} {options} -o {out}"
        write_atomically(out, page(command, title, found, defaults).encode())
    return 0
