"""FedIT: federated instruction tuning, FedAvg of LoRA factors.

Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024.
arXiv:2305.05644, Algorithm 1.

    server, each round t:   send B, A to each client of S_t                                download
    client i:               train B_i, A_i by E epochs                                     local_update
    server:                 B = Σ n_i B_i / Σ n_i,  A = Σ n_i A_i / Σ n_i                  server_update

The mean of factors is not the factors of the mean: B A holds products B_i A_j of different clients. That is
the method, and its known error. Entry by entry means need one rank, and one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.lora import lora_of
from ..core.client_model import ClientModel
from ..core.contribution import Mean
from ..core.method import ClientInfo, ClientView, Method, ServerView, Task
from ..core.tree import Params, tree
from ..core.update import Update
from ..linalg.pair import Factors
from .families.lora import (
    Message,
    Scaling,
    Tuning,
    factors_of,
    initial_factors,
    leaves_of,
    placed,
    received,
    tune,
)


@tree
class Server:
    """The mean factors, and what is shared beside them."""

    factors: Factors
    rest: Params
    scaling: Scaling


@dataclass(frozen=True)
class FedIT(Method[Server, Params, Message, Message]):
    """Means of B and of A.

    Attributes:
        tuning: rank, scale, head and form on the wire.
    """

    tuning: Tuning = Tuning()

    title = "FedIT"
    citation = "Zhang et al., ICASSP 2024, arXiv:2305.05644"

    def remarks(self, task: Task) -> list[str]:
        """Ranks that are above what a layer can have."""
        return self.tuning.remarks(task, self.title)

    def server_init(self, task: Task) -> Server:
        """A random A, and B = 0."""
        rank, model = self.tuning.equal_rank(task, self.title), task.common_model(self.title)
        return Server(
            initial_factors(task, rank),
            self.tuning.shared_rest(model),
            self.tuning.scaling_of(lora_of(model)),
        )

    def client_init(self, task: Task, client: ClientInfo) -> Params:
        """The head, where it is personal."""
        return self.tuning.own_rest(task.model(client))

    def download(self, server: Server, client: ClientInfo) -> Message:
        """B and A."""
        return self.tuning.message(server.factors, server.rest)

    def local_update(self, state: Params, down: Message, view: ClientView) -> tuple[Params, Message]:
        """Train both factors."""
        start = leaves_of(received(down), state | down.rest)
        end = tune(view, start, self.tuning.scale(view), self.optimizer)
        kept = self.tuning.kept(end)
        return kept, self.tuning.message(factors_of(end), end["rest"])

    def contribution(self, upload: Message, client: ClientInfo, server: Server) -> Mean:
        """Both factors and what is shared beside, weighted by n_i."""
        return Mean((received(upload), upload.rest), client.examples)

    def server_update(self, server: Server, total: tuple[Factors, Params], view: ServerView) -> Server:
        """Means, weighted by n_i."""
        factors, rest = total
        return Server(factors, rest, server.scaling)

    def update(self, down: Message, client: ClientInfo, task: Task) -> Update:
        """Relative to what was sent, in the client's scale."""
        return Update(down, self.tuning.scale_of(task, client))

    def client_model(self, state: Params, down: Message, view: ClientView) -> ClientModel:
        """The model with the mean factors."""
        leaves = leaves_of(received(down), state | down.rest)
        return ClientModel(view.model.initial | placed(view.model, leaves, self.tuning.scale(view), {}, {}))
