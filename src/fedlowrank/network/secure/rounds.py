"""The rounds of a server that learns only totals: five exchanges with the clients instead of one.

The exchanges are keys, shares, the training with the masked vectors, signatures of the list of clients that replied, and
shares to remove the masks; see :mod:`.member`. A client that disappears is left out from then on; if too few are left,
the round has no result, and nothing of it is revealed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, Sum
from ...core.contract.contribution import Aggregator, contribution_leaves
from ...core.errors import ConfigError
from ...engines.engine import ClientJob, ClientResult
from ...training.trainer import Meter
from ...trust.secure_sums import FixedPoint, Vector
from ..messages import Answer, Step
from .contributions import count_numbers
from .leader import SumLeader, vector_from_bytes
from .member import MAX_CLIENTS, SecureSumError, min_participants
from .participation import from_parcel, parcel_by_client, to_parcel, unpack_announcement
from .signing import MemberKeys, Session

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StepEngine(Protocol):
    """The methods of a network engine that a secure sum needs."""

    def take_step(
        self, step: Step, parcels: Mapping[int, dict[str, str]], round: int
    ) -> Iterator[tuple[int, Answer | str]]:
        """Send a step to clients; yield the answer of each, or the reason why there is none."""
        ...

    def train_masked(
        self, jobs: Sequence[ClientJob], parcels: Mapping[int, dict[str, str]], round: int
    ) -> Mapping[int, ClientResult]:
        """Send the orders of the round with the clients' parcels; return the result of each client."""
        ...


class SecureRounds:
    """The secure sums of a run.

    Args:
        client_count: number of all clients.
        keys: public keys of all clients.
        grid: fixed-point grid of the numbers that are added.
        zero_contribution: contribution of zeros.

    Attributes:
        min_clients: smallest number of clients that must take each step.
        size: length of a vector.
        total: total of the last round; None if it had no result.
        contributed: identifiers of the clients whose contributions are in the total.
        reason: the reason why the last round had no result.

    Raises:
        ConfigError: if there are too many or too few clients.
    """

    def __init__(self, client_count: int, keys: MemberKeys, grid: FixedPoint, zero_contribution: Any) -> None:
        if not 3 <= client_count <= MAX_CLIENTS:
            raise ConfigError(
                f"run.secure: over a network, secure sums are for 3 to {MAX_CLIENTS} clients; there are {client_count}"
            )
        if missing_ids := [c for c in range(client_count) if c not in keys]:
            raise ConfigError(
                f"run.secure: the roster has no key of client {', '.join(map(str, missing_ids))}; enter all clients by "
                "`fedlowrank keys`, and give every site the roster"
            )
        self._clients, self._keys, self._grid, self._like = client_count, keys, grid, zero_contribution
        self.min_clients = min_participants(client_count)
        self.size = count_numbers(zero_contribution)
        self.total: Any = None
        self.contributed: list[int] = []
        self.reason = ""
        self._leader: SumLeader | None = None
        self._lost: dict[int, str] = {}

    def run(
        self, engine: StepEngine, jobs: Sequence[ClientJob], run: str, branch: int, round: int
    ) -> Iterator[ClientResult]:
        """Yield the result of each job; the total is known when the first is yielded."""
        self.total, self.contributed, self.reason, self._lost = None, [], "", {}
        leader = self._leader = SumLeader(self._clients, Session(run, branch, round), self._keys)
        results: dict[int, ClientResult] = {}
        try:
            vector = self._run_steps(engine, leader, jobs, round, results)
            self._check_weights(vector)
            self.total, self.contributed = self._grid.decode(vector, self._like), sorted(leader.replied)
        except SecureSumError as error:
            self.reason = f"this round's secure sum is lost: {error}"
            logger.info("round %d: %s", round + 1, self.reason)
        self._leader = None
        # a vector is sent with 8 bytes for each number
        zero_vector = torch.zeros((), dtype=torch.int64).expand(self.size)
        for job in jobs:
            client_id = job.client.id
            if client_id in self.contributed:
                yield dataclasses.replace(results[client_id], upload=zero_vector)
            else:
                reason = self._lost.get(client_id) or self.reason
                result = results.get(client_id, ClientResult(None, None, Meter()))
                yield dataclasses.replace(result, state=None, upload=None, lost=result.lost or reason)

    def bind(self, download_digest: str) -> None:
        """Record the digest of a client's download; raises SecureSumError if it differs from another client's."""
        assert self._leader is not None, "downloads are sent while a round runs"
        self._leader.bind(download_digest.encode())

    def add(self, client_id: int, masked_bytes: bytes) -> None:
        """Add the masked vector of a client; raises SecureSumError if it cannot be used."""
        assert self._leader is not None, "vectors arrive while a round runs"
        vector = vector_from_bytes(masked_bytes)
        if vector.size != self.size:
            raise SecureSumError(f"its vector has {vector.size} numbers, and {self.size} are contributed")
        self._leader.add(client_id, vector)

    def _check_weights(self, total: Vector) -> None:
        """Raise SecureSumError if the weights in a total are impossible, as with remaining masks or a client that lies."""
        max_weight = self._clients * round(self._grid.largest_weight / self._grid.unit)
        index, numbers = 0, total.view(np.int64)
        for _, leaf in contribution_leaves(self._like):
            if not isinstance(leaf, Sum):
                if not 0 <= (weight := int(numbers[index])) <= max_weight:
                    raise SecureSumError(
                        f"its total has a weight of {weight * self._grid.unit:g}, and {max_weight * self._grid.unit:g} is the "
                        "most: a client sent what it may not, or was sent another model than the others"
                    )
                index += 1
            index += sum(t.numel() for t in tree.tensors(leaf.value))

    def _run_steps(
        self,
        engine: StepEngine,
        leader: SumLeader,
        jobs: Sequence[ClientJob],
        round: int,
        results: dict[int, ClientResult],
    ) -> Vector:
        self._step(engine, "announce", {j.client.id: {} for j in jobs}, round, self._take_announcement)
        leader.check(len(leader.announced), "announced keys")
        key_parcel = to_parcel(leader.announced)
        self._step(engine, "share", dict.fromkeys(leader.announced, key_parcel), round, self._take_shares)
        leader.check(len(leader.sharers), "shared their secrets")
        boxes = {c: to_parcel(leader.boxes_for(c)) for c in leader.sharers}
        results |= engine.train_masked([j for j in jobs if j.client.id in boxes], boxes, round)
        leader.check(len(leader.replied), "sent their vectors")
        names = {str(c): "" for c in sorted(leader.replied)}
        self._step(engine, "agree", dict.fromkeys(leader.replied, names), round, self._take_signature)
        leader.check(len(leader.signatures), "signed who had replied")
        signature_parcel = to_parcel(leader.signatures)
        self._step(
            engine, "reveal", dict.fromkeys(leader.signatures, signature_parcel), round, self._take_revealed
        )
        return leader.compute_total()

    def _step(
        self,
        engine: StepEngine,
        step: Step,
        parcels: Mapping[int, dict[str, str]],
        round: int,
        take_answer: Callable[[int, dict[str, str]], None],
    ) -> None:
        """Take one step with the clients; those without a valid answer are left out."""
        for client_id, answer in engine.take_step(step, parcels, round):
            reason = answer if isinstance(answer, str) else answer.problem
            if isinstance(answer, Answer) and not reason:
                try:
                    take_answer(client_id, answer.parcel)
                except SecureSumError as error:
                    reason = str(error)
            if reason:
                self._lost[client_id] = f"client {client_id}, step {step} of the secure sum: {reason}"
                logger.info(self._lost[client_id])

    def _take_announcement(self, client_id: int, parcel: dict[str, str]) -> None:
        self._current_leader().announce(
            client_id, unpack_announcement(_take_only_part(parcel_by_client(parcel), client_id))
        )

    def _take_shares(self, client_id: int, parcel: dict[str, str]) -> None:
        self._current_leader().share(client_id, from_parcel(parcel))

    def _take_signature(self, client_id: int, parcel: dict[str, str]) -> None:
        self._current_leader().agree(client_id, _take_only_part(from_parcel(parcel), client_id))

    def _take_revealed(self, client_id: int, parcel: dict[str, str]) -> None:
        self._current_leader().reveal(client_id, from_parcel(parcel))

    def _current_leader(self) -> SumLeader:
        assert self._leader is not None, "steps belong to a round"
        return self._leader


def _take_only_part(parcel: dict[int, T], client_id: int) -> T:
    if parcel.keys() != {client_id}:
        raise SecureSumError("it sent parts of others")
    return parcel[client_id]


def check_one_download(method: AnyMethod, server: Any, clients: Sequence[ClientInfo]) -> None:
    """Raise ConfigError if clients get different models: masks cancel only among clients with the same one."""
    first_download = method.download(server, clients[0])
    for client in clients[1:]:
        if not tree.equal(method.download(server, client), first_download):
            raise ConfigError(
                f"run.secure: {method.title} sends client {client.id} another model than client {clients[0].id}, and "
                "over a network a secure sum is of clients with the same model; set run.secure.on = false"
            )


class SecureTotal(Aggregator):
    """Returns the total of a secure sum, which the engine has computed, instead of adding contributions.

    Args:
        client_ids: identifiers of the clients of the round.
        rounds: secure rounds that compute the total.
    """

    accepts_rows = False

    def __init__(self, client_ids: Sequence[int], rounds: SecureRounds) -> None:
        super().__init__(client_ids)
        self._rounds = rounds

    def add(self, client_id: int, contribution: Any) -> None:
        """Record that a client's contribution is in the total."""
        del contribution
        self.contributed.append(client_id)

    def skip(self, client_id: int) -> None:
        """Ignore a lost client, which is not in the total."""

    def finish(self) -> Any:
        """Return the total; None if the round had no result."""
        return self._rounds.total
