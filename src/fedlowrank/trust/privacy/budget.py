"""Privacy budget of a run's clients, and how much of it the run has spent."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from ...core.arguments.shares import multiply_share
from ...core.errors import CheckpointError, ConfigError
from ..trust_settings import Privacy
from .accounting import (
    Sampling,
    epsilon,
    local_epsilon,
    local_noise_for,
    noise_for,
    rounds_within,
    total_epsilon,
)
from .ledger import PrivacyLedger
from .site_ledger import SiteLedger, total_epsilon_of

logger = logging.getLogger(__name__)


class Budget:
    """The privacy budget of a run.

    What may still be spent follows from ε of the ledger, never from a count of rounds. If a site is given
    (:meth:`count_site`), ε is that of all its runs on the same data.

    Args:
        privacy: settings of privacy, whose kind is not ``none``.
        sampling: how the clients of a round are drawn.
        rounds: number of rounds of the run, for which the noise is planned.
        participation: share of the clients in a round.
        seeded: whether noise comes from the seed of the run, so that a repeated round releases the same numbers.
        noise: σ of the first plan if a run is resumed; None to plan it.

    Attributes:
        noise: σ, the noise multiplier, the same in all rounds of a run.
        ledger: ledger of the rounds that were charged.
        branch: number of times that a run went back whose clients add the noise at their sites; None for any other
            run. Until such a run goes back, a client that gets the order of a round again sends the same update.

    Raises:
        ConfigError: if a single round exceeds the budget.
    """

    def __init__(
        self,
        privacy: Privacy,
        sampling: Sampling,
        rounds: int,
        participation: float,
        *,
        seeded: bool,
        noise: float | None = None,
    ) -> None:
        self.privacy, self.sampling, self.rounds, self.seeded = privacy, sampling, rounds, seeded
        self.ledger = PrivacyLedger()
        self.branch: int | None = None
        self._site: SiteLedger | None = None
        # for central privacy: number of rounds in the ledger up to which a further one is known to stay within the budget
        self._room_until = 0
        self._counted: Counter[tuple[float, Sampling]] = Counter()
        self._delta = float(privacy.delta or 0)
        if self._delta > 1 / sampling.clients:
            logger.warning(
                "privacy.delta = %g is above 1 / clients = %.3g: to publish one client's data whole would be "
                "as private",
                privacy.delta,
                1 / sampling.clients,
            )
        limit, accountant = privacy.epsilon, privacy.accountant
        self.is_local = privacy.kind == "local"
        if noise is not None:
            self.noise = noise
        elif privacy.noise is not None:
            self.noise = privacy.noise
        elif self.is_local:
            # a client that is drawn more often does not take part in the last rounds
            release_count = max(1, math.ceil(multiply_share(participation, rounds)))
            self.noise = local_noise_for(float(limit or 0), self._delta, release_count, accountant)
        else:
            self.noise = noise_for(float(limit or 0), self._delta, rounds, sampling, accountant)
        # raises an error if the accountant has no bound for these draws
        self.epsilon_of(0)
        if noise is None and limit is not None and (round_epsilon := self.epsilon_of(1)) > limit:
            raise ConfigError(
                f"privacy.epsilon = {limit:g} is less than the {round_epsilon:.4g} that one round costs with "
                f"privacy.noise = {self.noise:g}. Raise either"
            )

    def epsilon_of(self, rounds: int) -> float:
        """ε after this number of rounds; under local privacy, that of a client that took part in all of them."""
        accountant = self.privacy.accountant
        if self.is_local:
            return local_epsilon(self.noise, rounds, self._delta, accountant)
        return epsilon(self.noise, rounds, self._delta, self.sampling, accountant)

    def open(self, path: Path, completed_rounds: int = 0) -> None:
        """Keep the ledger in a file from now on, and read the charges that the file holds.

        Args:
            path: path of the file.
            completed_rounds: number of rounds that the run has completed, all of which the file must hold.

        Raises:
            CheckpointError: if the file cannot be read or lacks a round.
        """
        self.ledger, self._room_until = PrivacyLedger(path), 0
        for t in range(completed_rounds):
            self.require(t)

    def count_site(self, site: SiteLedger) -> str:
        """Charge the site's ledger, too, and count what all its runs on the same data have spent.

        Returns:
            A log message about what earlier runs have spent; "" if they spent nothing, or if the site was counted before.
        """
        is_new = self._site is None or self._site.name != site.name
        self._site, self._room_until = site, 0
        if not is_new or not (past_epsilon := self.spent_before()):
            return ""
        return (
            f"earlier runs of this site on the same data have spent ε = {past_epsilon:.4g} at δ = {self._delta:g}, which "
            "counts towards privacy.epsilon; `fedlowrank privacy` lists them"
        )

    def spent_before(self) -> float:
        """ε of the other runs of the site on the same data; 0 if no site is counted."""
        if self._site is None:
            return 0.0
        return total_epsilon_of(
            self._site.run.kind, self._site.find_other_ledgers(), self._delta, self.privacy.accountant
        )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes from spending the same budget between a decision and its charge."""
        with contextlib.nullcontext() if self._site is None else self._site.locked():
            yield

    def require(self, round: int) -> None:
        """Raise CheckpointError if the ledger lacks a round that was completed."""
        if self.ledger.clients_of(round) is None:
            raise CheckpointError(
                f"{self.ledger.path} lacks round {round + 1}, which was done: what was spent of the privacy budget "
                "is no longer known. Restore the file from a copy"
            )

    def charge(self, round: int, clip: float, client_ids: Iterable[int]) -> None:
        """Charge a round before anything of it is released; see :meth:`PrivacyLedger.charge`.

        With a :attr:`branch`, clients that were charged for the round in this branch are not charged again.

        Raises:
            ConfigError: if the round would exceed a central budget; nothing is charged.
        """
        client_ids = list(client_ids)
        if self.branch is not None:
            charged_ids = self.ledger.clients_in_branch(round, self.branch)
            client_ids = [i for i in client_ids if i not in charged_ids]
            if not client_ids and self.ledger.clients_of(round) is not None:
                return
        is_repeated = self.seeded and self.ledger.has(round, self.noise, clip, self.sampling, client_ids)
        with self.exclusive():
            if not (self.is_local or is_repeated or self._allows_release(round)):
                raise ConfigError(f"round {round + 1} cannot be done: {self.reason()}")
            if self.ledger.clients_of(round) is not None:
                # room that was found for further draws is not valid any more
                self._room_until = 0
            if self._site is not None and not is_repeated:
                # the site's ledger first: a kill in between then leaves too much charged and not too little
                self._site.charge(round, self.noise, clip, self.sampling, client_ids)
            self.ledger.charge(
                round,
                self.noise,
                clip,
                self.sampling,
                client_ids,
                seeded=self.seeded,
                branch=self.branch or 0,
            )

    def spent(self) -> float:
        """ε of this run until now: of the models that the server released, or of the client that was charged most."""
        return self._epsilon_of(self.ledger)

    def describe(self, completed_rounds: int) -> dict[str, float]:
        """ε after a number of rounds, with its δ and the noise multiplier σ.

        A resumed run repeats the rounds after its checkpoint. With seeded noise, these release the same numbers again, so
        that ε is that of an uninterrupted run.
        """
        ledger = self.ledger.before_repeats(completed_rounds, self.noise) if self.seeded else self.ledger
        return {"epsilon": self._epsilon_of(ledger), "delta": self._delta, "noise": self.noise}

    def _epsilon_of(self, ledger: PrivacyLedger) -> float:
        kind: Literal["central", "local"] = "local" if self.is_local else "central"
        return ledger.spent(kind, self._delta, self.privacy.accountant)

    def allowed(self, client_ids: Sequence[int], round: int) -> list[int]:
        """The clients that may take part in a round."""
        # a round that is repeated with the same noise releases nothing new
        charged_ids: Collection[int] | None = (
            self.ledger.clients_of(round, self.noise) if self.seeded else None
        )
        if self.branch is not None:
            charged_ids = self.ledger.clients_in_branch(round, self.branch)
        if not self.is_local:
            return list(client_ids) if charged_ids is not None or self._allows_release(round) else []
        # clients that sent equally often have the same Σ σ⁻², so there are few different values
        # the site's ledger counts as well, because the run folder may be older than it, and the run's ledger may be lost
        min_precision = 0.0 if self._site is None else self._site.precision()
        precisions = {i: max(self.ledger.precision(i), min_precision) for i in client_ids}
        epsilons = {p: self._local_after(p) for p in set(precisions.values())}
        limit = math.inf if self.privacy.epsilon is None else self.privacy.epsilon
        return [i for i in client_ids if i in (charged_ids or ()) or epsilons[precisions[i]] <= limit]

    def reason(self) -> str:
        """Explain why the budget allows no further round, and what to do."""
        owner, release = (" of each client", "update") if self.is_local else ("", "round")
        beginning = f"the privacy budget{owner}, privacy.epsilon = {self.privacy.epsilon}, is spent: "
        if past_epsilon := self.spent_before():
            return (
                f"{beginning}earlier runs of this site on the same data had ε = {past_epsilon:.4g}, this one {self.spent():.4g}, "
                f"and a further {release} with σ = {self.noise:.4g} exceeds it. Another folder changes nothing: the "
                "budget is that of the data (`fedlowrank privacy` lists the runs). A new run needs a larger "
                "privacy.epsilon, and all that was spent counts towards it"
            )
        return (
            f"{beginning}ε is {self.spent():.4g}, "
            f"and a further {release} with σ = {self.noise:.4g} exceeds it. A resumed run keeps its σ, also when it "
            "gets more rounds: plan a new run, in another folder, for more rounds or a larger privacy.epsilon"
        )

    def _local_after(self, precision: float) -> float:
        """ε of a client after a further release, given Σ σ⁻² of its earlier releases."""
        noise = (precision + self.noise**-2) ** -0.5
        return local_epsilon(noise, 1, self._delta, self.privacy.accountant)

    def _allows_release(self, round: int) -> bool:
        """Whether a central budget allows a further release in a round."""
        limit, charge_count = self.privacy.epsilon, self.ledger.rounds()
        if limit is None:
            return True
        other_draws = self._draws_of_others()
        # sampling amplifies a draw once, so a second release of one draw costs more than a further draw
        repeats = self.ledger.draws_if_repeated(round, self.noise)
        if any(total_epsilon(r + other_draws, self._delta, self.privacy.accountant) > limit for r in repeats):
            return False
        if charge_count >= self._room_until:
            # one search for many rounds, because a single ε by privacy loss distributions takes half a second
            self._room_until = charge_count + rounds_within(
                limit,
                self.noise,
                self._delta,
                self.sampling,
                self.privacy.accountant,
                self.rounds,
                self.ledger.draws() + other_draws,
            )
        return charge_count < self._room_until

    def _draws_of_others(self) -> Counter[tuple[float, Sampling]]:
        """The draws of the site's other runs on the same data."""
        if self._site is None:
            return Counter()
        draws = self._site.draws_of_others()
        if draws != self._counted:
            # room that was found for further draws is not valid any more
            self._counted, self._room_until = draws, 0
        return draws
