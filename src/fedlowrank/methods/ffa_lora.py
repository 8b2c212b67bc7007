"""FFA-LoRA: A stays at its random initial value, B alone is trained and averaged: no cross terms.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024. arXiv:2403.12313.

    server, each round t:   send B to each client of S_t                                   download
    client i:               train B_i by E epochs, A_0 frozen                              local_update
    server:                 B = Σ n_i B_i / Σ n_i                                          server_update

A_0 is drawn from the seed that all share, or is that of an adapter that all start from, so it never travels.
Σ p_i B_i A_0 = (Σ p_i B_i) A_0: the mean is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.lora.lora_factors import lora_of
from ..core.contract.client_model import ClientModel
from ..core.contract.method import ClientView, Method, ServerView, Task
from ..core.errors import TaskError
from ..core.tree import Params, tree_dataclass
from ..linalg.pair import Factors, Pair
from .families.lora_clients import (
    adapted_model,
    average_factors,
    describe_factor_update,
    describe_ranks,
    initial_rest,
    leaves_of_message,
    send_factors,
)
from .families.lora_family import (
    Leaves,
    Message,
    Tuning,
    refuse_principal,
    starting_factors,
    train_leaves,
)


@tree_dataclass
class ServerState:
    """The mean B (with an A of no rows), and what is shared beside it."""

    factors: Factors
    rest: Params


@dataclass(frozen=True)
class FFALoRA(Method[ServerState, Params, Message, Message]):
    """A frozen, mean of B.

    Attributes:
        tuning: rank, scale, head and form on the wire.
    """

    tuning: Tuning = Tuning()

    title = "FFA-LoRA"
    citation = "Sun et al., ICLR 2024, arXiv:2403.12313"

    def server_init(self, task: Task) -> ServerState:
        """B = 0, or the model's trained one.

        Raises:
            TaskError: if ranks differ, or an embedding is adapted.
        """
        rank, model = self.tuning.equal_rank(task, self.title), task.common_model(self.title)
        refuse_principal(
            task,
            self.title,
            "sends B alone, and A, which every machine finds by itself, may have other signs",
        )
        embeddings = [n for n, site in lora_of(model).layers.items() if site.embedding]
        if embeddings:
            raise TaskError(
                f"FFA-LoRA freezes A, which for an embedding begins at zero, so {embeddings[0]} would not "
                "learn. Leave embeddings out of target_modules, or choose fedit or fedsa_lora."
            )
        return ServerState(_without_a(self._factors(task, rank)), self.tuning.shared_rest(model))

    remarks = describe_ranks
    client_init = initial_rest
    download = send_factors
    contribution = average_factors
    describe_update = describe_factor_update

    def local_update(self, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
        """Train B."""
        fixed, start = self._leaves(state, down, view)
        end = train_leaves(view, start, self.tuning.scale(view), self.optimizer, fixed=fixed)
        kept = self.tuning.personal_rest(end)
        factors = {n: Pair(b, b.new_zeros(0, 1)) for n, b in end["b"].items()}
        return kept, self.tuning.message(factors, end["rest"])

    def server_update(
        self, server: ServerState, total: tuple[Factors, Params], view: ServerView
    ) -> ServerState:
        """The mean of B, weighted by n_i."""
        factors, rest = total
        return ServerState(factors, rest)

    def client_model(self, state: Params, down: Message, view: ClientView) -> ClientModel:
        """The model with the mean B."""
        fixed, start = self._leaves(state, down, view)
        return adapted_model(view, fixed | start, self.tuning.scale(view))

    def _factors(self, task: Task, rank: int) -> Factors:
        scale = self.tuning.scaling_of(lora_of(task.common_model(self.title))).at(rank)
        return starting_factors(task, self.title, rank, scale)

    def _leaves(self, state: Params, down: Message, view: ClientView) -> tuple[Leaves, Leaves]:
        """A, which is not trained, and the rest, which is."""
        leaves = leaves_of_message(down, state)
        rank = self.tuning.rank_of(view.info, lora_of(view.model))
        a = {n: p.a for n, p in self._factors(view.task, rank).items()}
        return {"a": a}, {"b": leaves["b"], "rest": leaves["rest"]}


def _without_a(factors: Factors) -> Factors:
    return {n: Pair(p.b, p.a.new_zeros(0, 1)) for n, p in factors.items()}
