"""FlexLoRA: the mean of whole updates, and for each client its best approximation of the client's rank.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
NeurIPS 2024. arXiv:2402.11505, Algorithm 1.

    server, each round t:   W = U Σ Vᵀ; send U_r Σ_r and V_rᵀ to each client i of S_t, r = r_i  download
    client i:               train B_i, A_i by E epochs                                          local_update
    server:                 W = Σ p_i s_i B_i A_i,  p_i = n_i / Σ n                             server_update

What a client's rank cuts off is lost with the next mean: the bias that FedHL removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..adapters.lora import lora_of
from ..core.client_model import ClientModel
from ..core.contribution import Each, Mean
from ..core.method import ClientInfo, ClientView, Method, ServerView, Task
from ..core.tree import Params, tree
from ..core.update import Update
from ..linalg.delta import Delta, DeltaForm, Split, initial_deltas, update_deltas
from ..linalg.pair import Factors
from .families.effective_delta import first_components, ranks_of, weighted_blocks, whole
from .families.lora import (
    Message,
    Scaling,
    Tuning,
    factors_of,
    initial_factors,
    leaves_of,
    placed,
    rank_of_factors,
    received,
    tune,
)


@tree
class Server:
    """The mean update W of every layer, further initial components, and the shared rest."""

    delta: dict[str, Delta]
    drawn: Factors
    rest: Params
    scaling: Scaling


@dataclass(frozen=True)
class FlexLoRA(Method[Server, Params, Message, Message]):
    """Means of updates, truncated for each client.

    Attributes:
        split: which factor takes the singular values: B, as in the authors' code, A, or sqrt for both.
        form: how the server holds W.
        tuning: rank, scale, head and form on the wire.
    """

    split: Split = "B"
    form: DeltaForm = DeltaForm()
    tuning: Tuning = Tuning()

    title = "FlexLoRA"
    citation = "Bai et al., NeurIPS 2024, arXiv:2402.11505"
    forgets = "the server factorizes anew in every round, and gradients of other factors say nothing of these"

    def remarks(self, task: Task) -> list[str]:
        """Ranks that are above what a layer can have."""
        return self.tuning.remarks(task, self.title)

    def server_init(self, task: Task) -> Server:
        """W = 0."""
        ranks, model = self.tuning.ranks(task, self.title), task.common_model(self.title)
        drawn, lora = initial_factors(task, max(ranks)), lora_of(model)
        rest, scaling = self.tuning.shared_rest(model), self.tuning.scaling_of(lora)
        return Server(initial_deltas(lora.shapes, self.form, max(ranks)), drawn, rest, scaling)

    def client_init(self, task: Task, client: ClientInfo) -> Params:
        """The head, where it is personal."""
        return self.tuning.own_rest(task.model(client))

    def download(self, server: Server, client: ClientInfo) -> Message:
        """The first r_i components."""
        rank = self.tuning.rank_of(client, rank_of_factors(server.drawn))
        factors = first_components(server.delta, server.drawn, rank, self.split, server.scaling.at(rank))
        return self.tuning.message(factors, server.rest)

    def local_update(self, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
        """Train both factors."""
        end = tune(
            view, leaves_of(received(down), state | down.rest), self.tuning.scale(view), self.optimizer
        )
        kept = self.tuning.kept(end)
        return kept, self.tuning.message(factors_of(end), end["rest"])

    def contribution(self, upload: Message, client: ClientInfo, server: Server) -> dict[str, Any]:
        """The factors, for their products are averaged; and what is shared beside, weighted by n_i."""
        return {"factors": Each(received(upload)), "rest": Mean(upload.rest, client.examples)}

    def server_update(self, server: Server, total: dict[str, Any], view: ServerView) -> Server:
        """W = Σ p_i s_i B_i A_i."""
        factors, weights = list(total["factors"].values()), [float(c.examples) for c in view.replied]
        scales = [server.scaling.at(rank_of_factors(f)) for f in factors]
        shares = {n: [w / sum(weights) for w in weights] for n in server.delta}
        blocks = weighted_blocks(shares, scales, factors)
        return Server(
            update_deltas(server.delta, blocks, previous=0.0), server.drawn, total["rest"], server.scaling
        )

    def update(self, down: Message, client: ClientInfo, task: Task) -> Update:
        """Relative to what was sent, in the client's scale."""
        return Update(down, self.tuning.scale_of(task, client))

    def client_model(self, state: Params, down: Message, view: ClientView) -> ClientModel:
        """The model with the first r_i components."""
        leaves = leaves_of(received(down), state | down.rest)
        return ClientModel(view.model.initial | placed(view.model, leaves, self.tuning.scale(view), {}, {}))

    def metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Rank of W."""
        return {"ranks": dict(ranks_of(server.delta))}

    def server_model(self, server: Server, state: Params, view: ClientView) -> Params:
        """The model with all of W."""
        return whole(view.model, server.delta, state | server.rest)
