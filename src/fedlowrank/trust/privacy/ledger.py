"""The privacy ledger of a run: a file of the rounds that were charged."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ...core.arguments.bounds import check_bounds
from ...core.errors import CheckpointError, ConfigError
from ...core.io.atomic_files import as_checkpoint_error, sync_folder
from .accounting import Accountant, Sampling, composed_epsilon, local_epsilon


@dataclass(frozen=True)
class Charge:
    """One line of the ledger.

    Attributes:
        round: index of the round, from 0.
        noise: σ, in units of the clipping norm, of everything that the round released.
        clip: C, the clipping norm.
        sampling: how the clients were drawn.
        clients: identifiers of the clients that were charged, ascending. Central privacy charges the round even if no
            client was drawn.
        branch: number of times that a run over a network had gone back to an earlier round.
    """

    round: int
    noise: float
    clip: float
    sampling: Sampling
    clients: tuple[int, ...]
    branch: int = 0

    def __post_init__(self) -> None:
        bounds = {"round": ">= 0", "noise": "> 0", "clip": "> 0", "branch": ">= 0"}
        check_bounds(self, bounds, "privacy ledger")
        if list(self.clients) != sorted(set(self.clients)):
            raise ConfigError(
                f"privacy ledger: round {self.round} names a client twice; name each client once"
            )


class PrivacyLedger:
    """Charged rounds, in memory and in an append-only file with one JSON line for each.

    Charge a round *before* anything of it is released: a line that a kill cut off then belongs to a
    release that never happened, and reading drops it. The file names the clients that were drawn; amplification by
    sampling holds only as long as the file stays with the server.

    Args:
        path: path of the file, commonly ``privacy.jsonl`` in the run folder; None keeps the ledger in memory.

    Attributes:
        path: path of the file, or None.

    Raises:
        CheckpointError: if a complete line cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._charges: list[Charge] = []
        self._known: set[Charge] = set()
        self._releases: Counter[int] = Counter()
        # Σ σ⁻² of a client's releases
        self._precision: defaultdict[int, float] = defaultdict(float)
        # noise of each release, by draw of clients
        self._draws: defaultdict[tuple[int, Sampling, tuple[int, ...]], list[float]] = defaultdict(list)
        # bytes of the file, and of its complete lines
        self._size = self._whole = 0
        if path is not None and path.exists():
            with as_checkpoint_error(f"cannot read {path}"):
                data = path.read_bytes()
            lines = data.split(b"\n")[:-1]
            for number, line in enumerate(lines, 1):
                self._add(_decode(line, f"{path}, line {number}"))
            self._size, self._whole = len(data), data.rfind(b"\n") + 1

    def charge(
        self,
        round: int,
        noise: float,
        clip: float,
        sampling: Sampling,
        client_ids: Iterable[int],
        *,
        seeded: bool,
        branch: int = 0,
    ) -> bool:
        """Charge a round; the charge is on disk when this returns.

        Args:
            round: index of the round, from 0.
            noise: σ, in units of the clipping norm, of everything that the round releases.
            clip: C, the clipping norm.
            sampling: how the clients were drawn.
            client_ids: identifiers of the clients that are charged.
            seeded: whether the noise comes from the seed of the run, so that a round that is repeated after a
                resume releases the same bytes: a line that the ledger already has is not written again. With noise from
                the operating system each repetition is a further release.
            branch: number of times that a run over a network has gone back to an earlier round.

        Returns:
            Whether a line was added.

        Raises:
            CheckpointError: if the file cannot be written or another process wrote to it; nothing is charged then.
        """
        charge = _charge(round, noise, clip, sampling, sorted(client_ids), branch)
        if seeded and charge in self._known:
            return False
        if self.path is not None:
            self._append(self.path, _encode(charge) + b"\n")
        self._add(charge)
        return True

    def copy_in_memory(self) -> PrivacyLedger:
        """A ledger with the same charges and without a file."""
        return _ledger_of(self._charges)

    def before_repeats(self, round: int, noise: float) -> PrivacyLedger:
        """The ledger without the charges that a run with seeded noise makes again.

        Args:
            round: index of the next round, from 0. A run that was stopped after its checkpoint had charged rounds from
                this one on.
            noise: σ of the run. A charge with another σ is of a release that the run does not repeat.
        """
        if not any(charge.round >= round for charge in self._charges):
            return self
        return _ledger_of(c for c in self._charges if c.round < round or c.noise != noise)

    def has(
        self, round: int, noise: float, clip: float, sampling: Sampling, client_ids: Iterable[int]
    ) -> bool:
        """Whether exactly this charge was made before; see :meth:`charge`."""
        return _charge(round, noise, clip, sampling, sorted(client_ids)) in self._known

    def rounds(self) -> int:
        """Number of charged rounds; a round that was charged twice counts twice."""
        return len(self._charges)

    def count_charges(self) -> Counter[int]:
        """Number of times that each round was charged."""
        return Counter(charge.round for charge in self._charges)

    def count_repeats(self, current_round: int) -> dict[int, int]:
        """Charges of each round that was charged more than once, or that a run had reached before it went back.

        Args:
            current_round: index of the current round; later ones were charged before the run went back.
        """
        return {t: count for t, count in self.count_charges().items() if count > 1 or t > current_round}

    def clients_of(self, round: int, noise: float | None = None) -> tuple[int, ...] | None:
        """Identifiers of the clients charged for a round, with this noise or any; None if it was not charged."""
        charges = (c for c in self._charges if c.round == round and noise in (None, c.noise))
        return next((c.clients for c in charges), None)

    def clients_in_branch(self, round: int, branch: int) -> set[int]:
        """Identifiers of the clients charged for a round since the run last went back."""
        charges = (c for c in self._charges if (c.round, c.branch) == (round, branch))
        return {client_id for charge in charges for client_id in charge.clients}

    @property
    def noise(self) -> float | None:
        """σ of the last charge; None if the ledger is empty."""
        return self._charges[-1].noise if self._charges else None

    def noises(self) -> list[float]:
        """The different σ of the charges, ascending."""
        return sorted({charge.noise for charge in self._charges})

    def clients(self) -> list[int]:
        """Identifiers of the clients that were charged at least once, ascending."""
        return sorted(self._releases)

    def releases(self, client_id: int) -> int:
        """Number of times that a client was charged; a round that was charged twice counts twice."""
        return self._releases[client_id]

    def spent(self, kind: Literal["central", "local"], delta: float, accountant: Accountant) -> float:
        """ε of all charged rounds.

        A round that was charged again for the same clients is one draw with several releases. Sampling
        amplifies the draw once, so the releases count as one with the combined noise.

        Args:
            kind: ``central`` for ε of the models that the server releases, ``local`` for ε of the client that was
                charged most.
            delta: δ, at which ε is computed.
            accountant: name of the accountant, as in :func:`fedlowrank.trust.privacy.accounting.epsilon`.

        Returns:
            ε, 0 for an empty ledger.
        """
        if kind == "local":
            max_precision = max(self._precision.values(), default=None)
            return 0.0 if max_precision is None else local_epsilon(max_precision**-0.5, 1, delta, accountant)
        return composed_epsilon(self.draws(), delta, accountant)

    def draws(self) -> Counter[tuple[float, Sampling]]:
        """Number of draws by their combined noise and sampling, in the form from which ε is computed."""
        return Counter((_combine(noise), sampling) for (_, sampling, _), noise in self._draws.items())

    def draws_if_repeated(self, round: int, noise: float) -> list[Counter[tuple[float, Sampling]]]:
        """The results of :meth:`draws` after a further release of an earlier draw of a round, one for each such draw."""
        counts = []
        for (draw_round, sampling, _), noises in self._draws.items():
            if draw_round == round:
                draws = self.draws()
                draws[_combine(noises), sampling] -= 1
                draws[_combine([*noises, noise]), sampling] += 1
                counts.append(draws)
        return counts

    def precision(self, client_id: int) -> float:
        """Σ σ⁻² of a client's releases."""
        return self._precision.get(client_id, 0.0)

    def _add(self, charge: Charge) -> None:
        self._charges.append(charge)
        self._known.add(charge)
        self._draws[charge.round, charge.sampling, charge.clients].append(charge.noise)
        for client_id in charge.clients:
            self._releases[client_id] += 1
            self._precision[client_id] += charge.noise**-2

    def _append(self, path: Path, line: bytes) -> None:
        with as_checkpoint_error(f"cannot write {path}"):
            is_new = not path.exists()
            with path.open("xb" if is_new else "r+b", buffering=0) as file:
                file_size = os.fstat(file.fileno()).st_size
                if file_size != self._size:
                    raise CheckpointError(
                        f"{path} has {file_size} bytes, not {self._size}: something else wrote to it. "
                        "End the other process and resume the run"
                    )
                try:
                    # remove the part of a line that a kill or a full disk left
                    file.truncate(self._whole)
                    file.seek(self._whole)
                    if file.write(line) != len(line):
                        raise CheckpointError(f"cannot write {path}: the disk is full")
                    os.fsync(file.fileno())
                finally:
                    self._size = os.fstat(file.fileno()).st_size
            if is_new:
                sync_folder(path.parent)
        self._whole += len(line)


def _ledger_of(charges: Iterable[Charge]) -> PrivacyLedger:
    """A ledger in memory with these charges."""
    ledger = PrivacyLedger()
    for charge in charges:
        ledger._add(charge)
    return ledger


def _combine(noises: list[float]) -> float:
    """Noise of the one Gaussian release that reveals as much as these releases of one value: (Σ σ⁻²)^(-1/2)."""
    return noises[0] if len(noises) == 1 else float(sum(noise**-2 for noise in noises) ** -0.5)


def _charge(
    round: int, noise: float, clip: float, sampling: Sampling, clients: Iterable[int], branch: int = 0
) -> Charge:
    return Charge(int(round), float(noise), float(clip), sampling, tuple(map(int, clients)), int(branch))


def _encode(charge: Charge) -> bytes:
    sampling = {name: value for name, value in asdict(charge.sampling).items() if value is not None}
    table = asdict(charge) | {"sampling": sampling}
    if not charge.branch:
        # the form of most ledgers
        del table["branch"]
    # without a checksum, a line with a damaged digit would be a different charge
    return json.dumps(table | {"check": zlib.crc32(json.dumps(table).encode())}).encode()


def _decode(line: bytes, location: str) -> Charge:
    try:
        value = json.loads(line)
        del value["check"]
        sampling = Sampling(**value.pop("sampling"))
        charge = _charge(sampling=sampling, **value)
        if _encode(charge) != line:
            raise ValueError("it is not as it was written")
    except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{location}: this is no charge of the privacy ledger ({error}). What was spent is no longer known; "
            "restore the file from a copy"
        ) from error
    return charge
