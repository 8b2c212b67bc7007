"""FedSA-LoRA: the matrices A are shared, the matrices B stay with their clients.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.
arXiv:2410.01463, Algorithm 1.

    server, each round t:   send A to each client of S_t                                   download
    client i:               train A_i, B_i by E epochs; keep B_i                           local_update
    server:                 A = Σ n_i A_i / Σ n_i                                          server_update
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..adapters.lora.lora_factors import lora_of
from ..adapters.wire_format import unpack_factors
from ..core.contract import ClientInfo, ClientModel, ClientView, Method, Task
from ..core.tree import Params, tree_dataclass
from ..linalg.pair import Factors, Pair
from .shared.factor_training import train_leaves
from .shared.lora_clients import (
    MeanFactors,
    average_factors,
    build_client_model,
    build_factors_of_rank,
    describe_factor_update,
    describe_ranks,
    send_factors,
    store_mean_factors,
)
from .shared.lora_family import (
    Leaves,
    LoRATraining,
    Message,
    refuse_principal_start,
)


@tree_dataclass
class ClientState:
    """The state of a client: its B by layer, and its head where that is personal."""

    b: dict[str, Tensor]
    rest: Params


@dataclass(frozen=True)
class FedSALoRA(Method[MeanFactors, ClientState, Message, Message]):
    """A averaged, B personal.

    Attributes:
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    training: LoRATraining = LoRATraining()

    title = "FedSA-LoRA"
    citation = "Guo et al., ICLR 2025, arXiv:2410.01463"

    def server_init(self, task: Task) -> MeanFactors:
        """A random A, or the model's trained one."""
        rank, model = self.training.require_equal_rank(task, self.title), task.common_model(self.title)
        refuse_principal_start(
            task,
            self.title,
            "sends A alone, and B, which every machine finds by itself, may have other signs",
        )
        a = {n: p.a for n, p in build_factors_of_rank(self, task, rank).items()}
        return MeanFactors(_drop_b(a), self.training.read_initial_shared_rest(model))

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """B = 0, or the model's trained one."""
        model = task.model(client)
        rank = self.training.find_rank(client, lora_of(model))
        return ClientState(
            {n: p.b for n, p in build_factors_of_rank(self, task, rank).items()},
            self.training.read_initial_personal_rest(model),
        )

    remarks = describe_ranks
    download = send_factors
    contribution = average_factors
    server_update = store_mean_factors  # A = Σ n_i A_i / Σ n_i
    describe_update = describe_factor_update

    def local_update(
        self, state: ClientState, down: Message, view: ClientView
    ) -> tuple[ClientState, Message]:
        """Train both factors, send A."""
        leaves = train_leaves(
            view, self._join_leaves(state, down), self.training.compute_scale(view), self.optimizer
        )
        new_state = ClientState(leaves["b"], self.training.select_personal_rest(leaves))
        return new_state, self.training.pack_message(_drop_b(leaves["a"]), leaves["rest"])

    def client_model(self, state: ClientState, down: Message, view: ClientView) -> ClientModel:
        """The model with the mean A and the client's own B."""
        return build_client_model(view, self._join_leaves(state, down), self.training.compute_scale(view))

    def _join_leaves(self, state: ClientState, down: Message) -> Leaves:
        a = {n: p.a for n, p in unpack_factors(down.factors).items()}
        return {"a": a, "b": state.b, "rest": state.rest | down.rest}


def _drop_b(a: dict[str, Tensor]) -> Factors:
    return {n: Pair(t.new_zeros(1, 0), t) for n, t in a.items()}
