"""FedAvg: communication-efficient learning of deep networks from decentralized data.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. AISTATS 2017. arXiv:1602.05629, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                 download
    client k:               θ_k ← SGD on F_k from θ^t, E epochs; send θ_k               local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

The mean is over the sampled clients, as in the paper's fourth version; ``weights = "uniform"`` gives every client the same.
BatchNorm normalizes by the batch in training and by each client's own statistics at inference, which are neither averaged nor
sent (:mod:`fedlowrank.models.normalization`); its scales and shifts are averaged as any parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core.loss import task_loss
from ..core.means import mean_of
from ..core.method import Batch, ClientInfo, ClientView, Method, Reply, ServerView, Task
from ..core.tree import Params


@dataclass(frozen=True)
class FedAvg(Method[Params, None, Params, Params]):
    """Federated averaging of whole models.

    Attributes:
        weights: of a reply: the client's number of training examples n_k, or uniform.
    """

    weights: Literal["examples", "uniform"] = "examples"

    title = "FedAvg"
    citation = "McMahan et al., AISTATS 2017, arXiv:1602.05629"
    streams = True

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights."""
        return task.common_model(self.title).initial

    def client_init(self, task: Task, client: ClientInfo) -> None:
        """A client keeps nothing."""
        del task, client

    def download(self, server: Params, client: ClientInfo) -> Params:
        """θ^t."""
        del client
        return server

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """SGD on F_k from θ^t."""
        del state
        model = view.model

        def loss(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        return None, view.train(loss, down, "local", self.optimizer)

    def server_update(self, server: Params, replies: Iterable[Reply[Params]], view: ServerView) -> Params:
        """Mean of the replies."""
        del server, view
        return mean_of(replies, equally=self.weights != "examples")

    def personal(self, state: None, down: Params, view: ClientView) -> Params:
        """The global model."""
        del state, view
        return down
