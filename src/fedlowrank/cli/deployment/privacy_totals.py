"""The command ``fedlowrank privacy``: the privacy budget that every run of this site has spent, and the totals."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from ...trust.privacy.ledger import PrivacyLedger
from ...trust.privacy.site_ledger import (
    NoiseKind,
    SiteRun,
    list_accounts,
    read_entries,
    state_folder,
    total_epsilon_of,
)
from ..terminal import OUT, say

_WHOSE: dict[NoiseKind, str] = {
    "local": "of a client's data, by its own noise",
    "central": "of a client's data, if the server adds the noise that the experiment says",
    "server": "of a server's clients",
}


def privacy() -> int:
    """Print a row for every run of the site, and the total of all runs on the same data."""
    folder = state_folder() / "privacy"
    ledger = read_entries(folder)
    if not ledger:
        say(f"no run of this site has spent privacy; the ledger would be in {folder}")
        return 0
    for names in list_accounts(ledger):
        OUT.print(_account([ledger[name] for name in names]))
    say(f"the ledger: {folder}")
    return 0


def _account(runs: list[tuple[SiteRun, PrivacyLedger]]) -> Table:
    """Table of the runs on the same data, and their total."""
    kind = runs[0][0].kind
    table = Table("began", "method", "folder", "releases", "σ", "δ", "ε", title=f"privacy {_WHOSE[kind]}")
    for run, ledger in runs:
        noise = ", ".join(f"{sigma:.4g}" for sigma in ledger.noises())
        epsilon = total_epsilon_of(kind, [ledger], run.delta, run.accountant)
        table.add_row(
            run.began,
            escape(run.method),
            escape(run.folder),
            str(ledger.rounds()),
            noise,
            *_numbers(run.delta, epsilon),
        )
    # the smallest δ is the strictest statement, and holds for the others
    delta, accountant = min(run.delta for run, _ in runs), runs[-1][0].accountant
    total = total_epsilon_of(kind, [ledger for _, ledger in runs], delta, accountant)
    releases = sum(ledger.rounds() for _, ledger in runs)
    table.add_section()
    runs_text = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    table.add_row("total", "", runs_text, str(releases), "", *_numbers(delta, total))
    return table


def _numbers(delta: float, epsilon: float) -> tuple[str, str]:
    return f"{delta:g}", f"{epsilon:.4g}"
