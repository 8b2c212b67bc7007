"""The ledger of a site: privacy of the same data that all its runs have spent, whatever their folders.

STATE/privacy/NAME.json     a run: kind, digests of the data, δ, accountant, folder, start time
STATE/privacy/NAME.jsonl    its charges, as :class:`.ledger.PrivacyLedger` writes them

STATE is ``$FEDLOWRANK_STATE``, else ``$XDG_STATE_HOME/fedlowrank``, else ``~/.local/state/fedlowrank``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock

from ...core.errors import CheckpointError, ConfigError
from ...core.io.atomic_files import as_checkpoint_error, read_json, write_json
from ...core.io.private_files import make_private_folder
from ...data.overlap import MAX_SKETCH_DIGESTS, measure_overlap
from .accounting import Accountant, Sampling, local_epsilon, total_epsilon
from .ledger import PrivacyLedger

STATE_VARIABLE = "FEDLOWRANK_STATE"
"""Name of the environment variable that sets the state folder."""

MIN_SHARED_DATA = 0.1
"""Smallest overlap, as a share of the smaller data set, at which two data sets of a client count as the same."""

NoiseKind = Literal["local", "central", "server"]


def state_folder() -> Path:
    """The folder in which a site stores what outlives its runs."""
    state, state_home = os.environ.get(STATE_VARIABLE), os.environ.get("XDG_STATE_HOME")
    if state:
        return Path(state)
    try:
        return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "fedlowrank"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no home folder for the ledger of privacy; set {STATE_VARIABLE}"
        ) from error


def open_state(name: str = "privacy") -> Path:
    """Open a subfolder of the site's state folder, by default that of the ledger, and make it if it does not exist.

    Raises:
        ConfigError: if other users can read it, or there is no home folder.
        CheckpointError: if it cannot be made.
    """
    state = state_folder()
    try:
        make_private_folder(state)
        make_private_folder(state / name)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. It is to hold what a site must not forget between runs: set {STATE_VARIABLE} to a "
            "folder that can be written"
        ) from error
    return state / name


@dataclass(frozen=True)
class SiteRun:
    """A run that spends privacy.

    Attributes:
        kind: ``local``: a client adds noise to its own update; ``central``: a client's data are protected by noise that its
            server is to add; ``server``: the data of a server's clients are protected by noise that this server adds.
        data: for a client, a sketch of its data (:mod:`fedlowrank.data.overlap`); for a server, one digest for each
            client.
        delta: δ of the run.
        accountant: name of the run's accountant.
        method: name of the run's method.
        folder: folder of the run when the run began.
        began: date and time when the run began (UTC).
    """

    kind: NoiseKind
    data: tuple[str, ...] = field(repr=False)
    delta: float
    accountant: Accountant
    method: str = ""
    folder: str = ""
    began: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def concerns(self, other: SiteRun) -> bool:
        """Whether both runs spend the privacy of the same data, or, for servers, have a client with the same data."""
        if self.kind != other.kind:
            return False
        if self.kind == "server":
            return not set(self.data).isdisjoint(other.data)
        return measure_overlap(self.data, other.data) >= MIN_SHARED_DATA

    def with_data_of(self, other: SiteRun) -> SiteRun:
        """The run with the data of both runs."""
        data = sorted({*self.data, *other.data})
        return dataclasses.replace(
            self, data=tuple(data if self.kind == "server" else data[:MAX_SKETCH_DIGESTS])
        )


class SiteLedger:
    """The charges of a run and of all other runs of the site on the same data.

    Each method reads what other processes have written meanwhile. Make a decision and its charge within one
    :meth:`locked` block.

    Args:
        name: name of the run, unique within the site; letters, digits, ``-``.
        run: description of the run.

    Raises:
        ConfigError: if other users can read the folder.
        CheckpointError: if the folder cannot be written, or a file in it is damaged.
    """

    def __init__(self, name: str, run: SiteRun) -> None:
        if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name):
            raise ConfigError(f"{name!r:.200} cannot be the name of a run")
        self.name, self.run = name, run
        self.folder = open_state()
        self._lock = FileLock(self.folder / "lock", mode=0o600)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other processes from the ledger within the block; blocks may be nested."""
        with as_checkpoint_error(f"cannot lock {self.folder}"):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def charge(
        self, round: int, noise: float, clip: float, sampling: Sampling, client_ids: Iterable[int]
    ) -> None:
        """Charge a round; the charge is on disk when this returns; see :meth:`PrivacyLedger.charge`."""
        with self.locked():
            path = self.folder / f"{self.name}.json"
            stored_run = _read(path) if path.exists() else None
            run = self.run if stored_run is None else stored_run.with_data_of(self.run)
            if run != stored_run:
                # write it again, because the examples of a client may change during a run
                write_json(path, dataclasses.asdict(run))
            PrivacyLedger(path.with_suffix(".jsonl")).charge(
                round, noise, clip, sampling, client_ids, seeded=False
            )

    def follow(
        self,
        rounds: int,
        noise: float,
        clip: float,
        sampling: Sampling,
        client_id: int,
        limit: float | None,
        *,
        trains: bool,
        repeats: Mapping[int, int] | None = None,
    ) -> float:
        """Charge the rounds of a server that adds noise, including those in which the client was not drawn.

        Sampling amplifies privacy because the drawn clients are secret, so every round costs the same. A round that the
        server released again after a resume costs again.

        Args:
            rounds: number of rounds of the run, including the current one.
            noise: σ of a round.
            clip: C, the clipping norm.
            sampling: how the clients of a round are drawn.
            client_id: number of the client.
            limit: ε that must not be exceeded, or None.
            trains: whether the last of the rounds takes place now, possibly as a repetition; otherwise all are over.
            repeats: number of releases of each round that was released more than once, or that the run had reached before
                it went back; None for none.

        Returns:
            ε of all runs on the data after these rounds. Nothing is charged if it exceeds the limit.
        """
        with self.locked():
            ledger = PrivacyLedger(self.folder / f"{self.name}.jsonl").copy_in_memory()
            charges, releases = ledger.count_charges(), dict.fromkeys(range(rounds), 1) | dict(repeats or {})
            missing = {t: count - charges[t] for t, count in releases.items()}
            if trains:
                missing[rounds - 1] = max(1, missing[rounds - 1])
            uncharged_rounds = [t for t, count in missing.items() for _ in range(count)]
            for t in uncharged_rounds:
                ledger.charge(t, noise, clip, sampling, [client_id], seeded=False)
            draws = ledger.draws() + self.draws_of_others()
            epsilon = total_epsilon(draws, self.run.delta, self.run.accountant)
            if limit is None or epsilon <= limit:
                for t in uncharged_rounds:
                    self.charge(t, noise, clip, sampling, [client_id])
            return epsilon

    def find_other_ledgers(self) -> list[PrivacyLedger]:
        """The ledgers of other runs on the same data."""
        entries = read_entries(self.folder)
        stored_run = entries.pop(self.name, (self.run, None))[0]
        return [
            ledger for run, ledger in entries.values() if run.concerns(self.run) or run.concerns(stored_run)
        ]

    def precision(self) -> float:
        """Σ σ⁻² of all releases of the data, by this run and by the others."""
        run_ledger = PrivacyLedger(self.folder / f"{self.name}.jsonl")
        return sum(_precision(ledger) for ledger in (run_ledger, *self.find_other_ledgers()))

    def draws_of_others(self) -> Counter[tuple[float, Sampling]]:
        """Draws of the other runs on the same data, counted as in :meth:`PrivacyLedger.draws`."""
        return sum((ledger.draws() for ledger in self.find_other_ledgers()), Counter())


def read_entries(folder: Path) -> dict[str, tuple[SiteRun, PrivacyLedger]]:
    """Read all runs in a folder ``STATE/privacy``, by name, with their ledgers, in the order in which they began.

    Raises:
        CheckpointError: if a file is damaged, or a run has charges but no description.
    """
    entries = {}
    for path in folder.glob("*.jsonl"):
        description_path = path.with_suffix(".json")
        if not description_path.exists():
            raise CheckpointError(
                f"{path} are charges of a run that {description_path.name} does not describe: whose privacy was spent is no "
                "longer known. Restore that file from a copy."
            )
        with as_checkpoint_error(f"cannot read {path}"):
            status = path.stat()
        entries[path.stem] = _read(description_path), _ledger(path, status.st_size, status.st_mtime_ns)
    return dict(sorted(entries.items(), key=lambda item: (item[1][0].began, item[0])))


def list_accounts(entries: dict[str, tuple[SiteRun, PrivacyLedger]]) -> list[list[str]]:
    """Group the names of runs by data: runs on the same data share a list, even if only through a third run."""
    groups: list[list[str]] = []
    for name, (run, _) in entries.items():
        joined_groups = [
            group for group in groups if any(run.concerns(entries[member][0]) for member in group)
        ]
        groups = [group for group in groups if group not in joined_groups] + [
            [*(n for g in joined_groups for n in g), name]
        ]
    return groups


def total_epsilon_of(
    kind: NoiseKind, ledgers: Sequence[PrivacyLedger], delta: float, accountant: Accountant
) -> float:
    """ε of the charges of several runs on the same data; see :func:`.accounting.total_epsilon`."""
    if kind == "local":
        precision = sum(map(_precision, ledgers))
        return local_epsilon(precision**-0.5, 1, delta, accountant) if precision else 0.0
    draws: Counter[tuple[float, Sampling]] = sum((ledger.draws() for ledger in ledgers), Counter())
    return total_epsilon(draws, delta, accountant)


@functools.lru_cache(maxsize=1024)
def _ledger(path: Path, size: int, mtime_ns: int) -> PrivacyLedger:
    """A ledger for reading; it is read again if the size or the time of the file differs."""
    del size, mtime_ns
    return PrivacyLedger(path)


def _precision(ledger: PrivacyLedger) -> float:
    """Σ σ⁻² of a client's ledger, whatever identifier the client had in each run."""
    return sum(ledger.precision(client_id) for client_id in ledger.clients())


def _read(path: Path) -> SiteRun:
    table: dict[str, Any] = read_json(path, dict)
    try:
        run = SiteRun(**{**table, "data": tuple(table["data"])})
        if run.kind not in get_args(NoiseKind) or not all(isinstance(digest, str) for digest in run.data):
            raise ValueError("its fields are not as they were written")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not describe a run of the privacy ledger ({error}). Restore it from a copy."
        ) from error
    return run
