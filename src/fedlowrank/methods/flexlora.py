"""FlexLoRA: averages whole updates, and sends each client the best approximation of its rank.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
NeurIPS 2024. arXiv:2402.11505, Algorithm 1.

    server, each round t:   W = U Σ Vᵀ; send U_r Σ_r and V_rᵀ to each client i of S_t, r = r_i  download
    client i:               train B_i, A_i by E epochs                                          local_update
    server:                 W = Σ p_i s_i B_i A_i,  p_i = n_i / Σ n                             server_update

The components beyond a client's rank are lost in the next mean: this is the bias that FedHL removes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..adapters.lora.lora_factors import lora_of
from ..core.contract import ClientInfo, ClientView, Method, ServerView, Task
from ..core.tree import Params, tree_dataclass
from ..linalg.delta import Delta, DeltaForm, FactorSplit, update_deltas
from ..linalg.pair import Factors
from .shared.effective_delta import (
    build_client_factors,
    build_server_model,
    build_starting_deltas,
    build_update_terms,
    measure_ranks,
)
from .shared.lora_clients import (
    CollectedFactors,
    collect_factors,
    describe_factor_update,
    describe_ranks,
    initial_rest,
    model_with_factors,
    train_factors,
)
from .shared.lora_family import LoRATraining, Message, Scaling, draw_initial_factors, measure_rank


@tree_dataclass
class ServerState:
    """The mean update W of every layer, the initial factors, and the shared parameters beside them."""

    delta: dict[str, Delta]
    initial_factors: Factors
    rest: Params
    scaling: Scaling


@dataclass(frozen=True)
class FlexLoRA(Method[ServerState, Params, Message, Message]):
    """Means of updates, truncated for each client.

    Attributes:
        split: factor that takes the singular values: B, as in the authors' code, A, or sqrt for both.
        delta_form: form in which the server stores W.
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    split: FactorSplit = "B"
    delta_form: DeltaForm = DeltaForm()
    training: LoRATraining = LoRATraining()

    title = "FlexLoRA"
    citation = "Bai et al., NeurIPS 2024, arXiv:2402.11505"
    keep_refusal = (
        "the server factorizes anew in every round, and gradients of other factors say nothing of these"
    )

    def server_init(self, task: Task) -> ServerState:
        """W = 0, or the update of the model's trained factors."""
        ranks, model = self.training.resolve_ranks(task, self.title), task.common_model(self.title)
        initial_factors = draw_initial_factors(task, max(ranks))
        rest, scaling = (
            self.training.read_initial_shared_rest(model),
            self.training.build_scaling(lora_of(model)),
        )
        return ServerState(
            build_starting_deltas(model, self.delta_form, max(ranks)), initial_factors, rest, scaling
        )

    def download(self, server: ServerState, client: ClientInfo) -> Message:
        """The first r_i components of W."""
        rank = self.training.find_rank_within(client, server.initial_factors)
        factors = build_client_factors(
            server.delta, server.initial_factors, rank, self.split, server.scaling.scale_at(rank)
        )
        return self.training.pack_message(factors, server.rest)

    remarks = describe_ranks
    client_init = initial_rest
    local_update = train_factors
    contribution = collect_factors
    describe_update = describe_factor_update
    client_model = model_with_factors

    def server_update(self, server: ServerState, total: CollectedFactors, view: ServerView) -> ServerState:
        """The new mean W = Σ p_i s_i B_i A_i."""
        factors = [total["factors"][c.id] for c in view.replied]
        weights = [float(c.example_count) for c in view.replied]
        scales = [server.scaling.scale_at(measure_rank(f)) for f in factors]
        shares = {n: [w / sum(weights) for w in weights] for n in server.delta}
        terms = build_update_terms(shares, scales, factors)
        return replace(
            server, delta=update_deltas(server.delta, terms, previous_weight=0.0), rest=total["rest"]
        )

    def server_metrics(self, server: ServerState) -> dict[str, dict[str, float]]:
        """The rank of W."""
        return {"ranks": dict(measure_ranks(server.delta))}

    def server_model(self, server: ServerState, state: Params, view: ClientView) -> Params:
        """The model with all of W."""
        return build_server_model(view.model, server.delta, state | server.rest)
