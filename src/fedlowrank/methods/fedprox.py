"""FedProx: federated optimization in heterogeneous networks.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. MLSys 2020. arXiv:1812.06127, Algorithm 2.

    server, each round t:   send θ^t to each client k of the sample S_t                 download
    client k:               θ_k ≈ argmin F_k(θ) + μ/2 ‖θ - θ^t‖² by SGD from θ^t        local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

The proximal term enters as μ (θ - θ^t) added to the gradient, which is its derivative. Departures: the paper samples clients
with probability n_k/n and averages uniformly; here the sample is uniform and the mean weighted by n_k, as for FedAvg, so that
μ = 0 is FedAvg exactly. All clients do the same number of epochs (no stragglers). BatchNorm is treated as in FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..core.errors import ConfigError
from ..core.loss import task_loss
from ..core.means import mean_of
from ..core.method import Batch, ClientInfo, ClientView, Method, Pull, Reply, ServerView, Task
from ..core.tree import Params


@dataclass(frozen=True)
class FedProx(Method[Params, None, Params, Params]):
    """FedAvg with a pull of every local model towards the global one.

    Attributes:
        mu: μ ≥ 0, strength of the pull; the paper tunes it over 0.001, 0.01, 0.1 and 1.
    """

    mu: float = 0.01

    title = "FedProx"
    citation = "Li et al., MLSys 2020, arXiv:1812.06127"
    streams = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"FedProx: mu must be >= 0; it is {self.mu}")

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
        """SGD on F_k(θ) + μ/2 ‖θ - θ^t‖²."""
        del state
        model = view.model

        def loss(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        return None, view.train(loss, down, "local", self.optimizer, pull=Pull(self.mu, towards=down))

    def server_update(self, server: Params, replies: Iterable[Reply[Params]], view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        del server, view
        return mean_of(replies)

    def personal(self, state: None, down: Params, view: ClientView) -> Params:
        """The global model."""
        del state, view
        return down
