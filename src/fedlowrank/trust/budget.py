"""What a run may spend of its clients' privacy, and what it has spent."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from ..core.errors import ConfigError
from .accounting import Sampling, epsilon, local_epsilon, local_noise_for, noise_for, rounds_within
from .ledger import Ledger
from .settings import Privacy

logger = logging.getLogger(__name__)


class Budget:
    """The privacy budget of a run.

    Args:
        privacy: settings, of a kind that is not none.
        sampling: how the clients of a round are drawn.
        rounds: of the run.
        participation: share of the clients in a round.
        seeded: noise comes from the seed of the run, so that a round that is done again releases the same.

    Attributes:
        noise: σ.
        most: rounds that the budget allows: of all clients where privacy is central, of each client where it
            is local.
        ledger: of what was spent.

    Raises:
        ConfigError: if one round exceeds the budget.
    """

    def __init__(
        self, privacy: Privacy, sampling: Sampling, rounds: int, participation: float, *, seeded: bool
    ) -> None:
        self.privacy, self.sampling, self.rounds, self.seeded = privacy, sampling, rounds, seeded
        self.ledger = Ledger()
        self.most = rounds
        if float(privacy.delta or 0) > 1 / sampling.clients:
            logger.warning(
                "privacy.delta = %g is above 1 / clients = %.3g: to publish one client's data whole would be "
                "as private",
                privacy.delta,
                1 / sampling.clients,
            )
        limit, delta, accountant = privacy.epsilon, float(privacy.delta or 0), privacy.accountant
        self.is_local = privacy.kind == "local"
        if privacy.noise is not None:
            self.noise = privacy.noise
        elif self.is_local:
            # who is drawn more often than that sits out in the end
            times = max(1, math.ceil(rounds * participation))
            self.noise = local_noise_for(float(limit or 0), delta, times, accountant)
        else:
            self.noise = noise_for(float(limit or 0), delta, rounds, sampling, accountant)
        # refuses an accountant that has no bound for these draws
        self.epsilon_of(0)
        if limit is None:
            return
        if (one := self.epsilon_of(1)) > limit:
            raise ConfigError(
                f"privacy.epsilon = {limit:g} is less than the {one:.4g} that one round costs with "
                f"privacy.noise = {self.noise:g}. Raise either"
            )
        if self.is_local:
            # two clipped updates of a client differ by up to 2C
            everyone = Sampling("all", 1)
            self.most = rounds_within(limit, self.noise / 2, delta, everyone, accountant, rounds)
        else:
            self.most = rounds_within(limit, self.noise, delta, sampling, accountant, rounds)

    def epsilon_of(self, rounds: int) -> float:
        """ε after so many rounds; of a client that took part in all of them where privacy is local."""
        delta, accountant = float(self.privacy.delta or 0), self.privacy.accountant
        if self.is_local:
            return local_epsilon(self.noise, rounds, delta, accountant)
        return epsilon(self.noise, rounds, delta, self.sampling, accountant)

    def open(self, path: Path) -> None:
        """Keep the ledger in a file from now on, and take in what it holds."""
        self.ledger = Ledger(path)

    def charge(self, round: int, clip: float, clients: Iterable[int]) -> None:
        """Charge a round before anything of it is released; see :meth:`Ledger.charge`."""
        self.ledger.charge(round, self.noise, clip, self.sampling, clients, seeded=self.seeded)

    def spent(self) -> float:
        """ε until now: of the models that the server released, or of the client that sent most."""
        kind: Literal["central", "local"] = "local" if self.is_local else "central"
        return self.ledger.spent(kind, float(self.privacy.delta or 0), self.privacy.accountant)

    def describe(self) -> dict[str, float]:
        """ε until now, with its δ and the noise multiplier σ."""
        return {"epsilon": self.spent(), "delta": float(self.privacy.delta or 0), "noise": self.noise}

    def allowed(self, clients: Sequence[int], round: int) -> list[int]:
        """The clients that may take part in a round."""
        # of a round that is done again with the same noise, nothing new is released
        again = self.ledger.clients_of(round) if self.seeded else None
        if self.is_local:
            charged = again or ()
            return [i for i in clients if i in charged or self.ledger.releases(i) < self.most]
        return list(clients) if again is not None or self.ledger.rounds() < self.most else []
