"""FedIT: federated instruction tuning, FedAvg of LoRA factors.

Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024.
arXiv:2305.05644, Algorithm 1.

    server, each round t:   send B, A to each client of S_t                                download
    client i:               train B_i, A_i by E epochs                                     local_update
    server:                 B = Σ n_i B_i / Σ n_i,  A = Σ n_i A_i / Σ n_i                  server_update

The mean of factors is not the factors of the mean: B A holds products B_i A_j of different clients. That is the
method, and its known error. Elementwise means need the same rank and the same scale for all clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import Method, Task
from ..core.tree import Params
from .shared.lora_clients import (
    MeanFactors,
    average_factors,
    build_factors_of_rank,
    describe_factor_update,
    describe_ranks,
    initial_rest,
    model_with_factors,
    send_factors,
    store_mean_factors,
    train_factors,
)
from .shared.lora_family import LoRATraining, Message


@dataclass(frozen=True)
class FedIT(Method[MeanFactors, Params, Message, Message]):
    """Means of B and of A.

    Attributes:
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    training: LoRATraining = LoRATraining()

    title = "FedIT"
    citation = "Zhang et al., ICASSP 2024, arXiv:2305.05644"

    def server_init(self, task: Task) -> MeanFactors:
        """A random A and B = 0, or the model's trained factors."""
        rank, model = self.training.require_equal_rank(task, self.title), task.common_model(self.title)
        return MeanFactors(
            build_factors_of_rank(self, task, rank), self.training.read_initial_shared_rest(model)
        )

    remarks = describe_ranks
    client_init = initial_rest
    download = send_factors
    local_update = train_factors
    contribution = average_factors
    server_update = store_mean_factors  # B = Σ n_i B_i / Σ n_i,  A = Σ n_i A_i / Σ n_i
    describe_update = describe_factor_update
    client_model = model_with_factors
