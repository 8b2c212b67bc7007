"""FFA-LoRA: A stays at its random initial value, and only B is trained and averaged, so there are no cross terms.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024. arXiv:2403.12313.

    server, each round t:   send B to each client of S_t                                   download
    client i:               train B_i by E epochs, A_0 frozen                              local_update
    server:                 B = Σ n_i B_i / Σ n_i                                          server_update

A_0 is drawn from the common seed, or read from the common initial adapter, so it is never sent. Σ p_i B_i A_0 = (Σ
p_i B_i) A_0: the mean is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.lora.lora_factors import lora_of
from ..core.contract import ClientModel, ClientView, Method, Task
from ..core.errors import TaskError
from ..core.tree import Params
from ..linalg.pair import Factors, Pair
from .shared.factor_training import train_leaves
from .shared.lora_clients import (
    MeanFactors,
    average_factors,
    build_client_model,
    build_factors_of_rank,
    describe_factor_update,
    describe_ranks,
    initial_rest,
    read_leaves,
    send_factors,
    store_mean_factors,
)
from .shared.lora_family import (
    Leaves,
    LoRATraining,
    Message,
    refuse_principal_start,
)


@dataclass(frozen=True)
class FFALoRA(Method[MeanFactors, Params, Message, Message]):
    """A frozen, mean of B.

    Attributes:
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    training: LoRATraining = LoRATraining()

    title = "FFA-LoRA"
    citation = "Sun et al., ICLR 2024, arXiv:2403.12313"

    def server_init(self, task: Task) -> MeanFactors:
        """B is 0, or that of the model's trained factors.

        Raises:
            TaskError: if ranks differ, or an embedding is adapted.
        """
        rank, model = self.training.require_equal_rank(task, self.title), task.common_model(self.title)
        refuse_principal_start(
            task,
            self.title,
            "sends B alone, and A, which every machine finds by itself, may have other signs",
        )
        embedding_names = [n for n, layer in lora_of(model).layers.items() if layer.embedding]
        if embedding_names:
            raise TaskError(
                f"{self.title} freezes A, which for an embedding begins at zero, so {embedding_names[0]} would not "
                "learn. Leave embeddings out of target_modules, or choose fedit or fedsa_lora."
            )
        factors = _drop_a(build_factors_of_rank(self, task, rank))
        return MeanFactors(factors, self.training.read_initial_shared_rest(model))

    remarks = describe_ranks
    client_init = initial_rest
    download = send_factors
    contribution = average_factors
    server_update = store_mean_factors  # B = Σ n_i B_i / Σ n_i
    describe_update = describe_factor_update

    def local_update(self, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
        """Train B."""
        frozen_a, start = self._split_leaves(state, down, view)
        scale = self.training.compute_scale(view)
        leaves = train_leaves(view, start, scale, self.optimizer, fixed_leaves=frozen_a)
        factors = {n: Pair(b, b.new_zeros(0, 1)) for n, b in leaves["b"].items()}
        upload = self.training.pack_message(factors, leaves["rest"])
        return self.training.select_personal_rest(leaves), upload

    def client_model(self, state: Params, down: Message, view: ClientView) -> ClientModel:
        """The model with the mean B."""
        frozen_a, trained_leaves = self._split_leaves(state, down, view)
        return build_client_model(view, frozen_a | trained_leaves, self.training.compute_scale(view))

    def _split_leaves(self, state: Params, down: Message, view: ClientView) -> tuple[Leaves, Leaves]:
        """Split the leaves into A_0, which is not trained, and B with the rest, which are."""
        leaves = read_leaves(down, state)
        rank = self.training.find_rank(view.info, lora_of(view.model))
        a = {n: p.a for n, p in build_factors_of_rank(self, view.task, rank).items()}
        return {"a": a}, {"b": leaves["b"], "rest": leaves["rest"]}


def _drop_a(factors: Factors) -> Factors:
    return {n: Pair(p.b, p.a.new_zeros(0, 1)) for n, p in factors.items()}
