"""FedProx: federated optimization in heterogeneous networks.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. MLSys 2020. arXiv:1812.06127, Algorithm 2.

    server, each round t:   send θ^t to each client k of the sample S_t                 download
    client k:               θ_k ≈ argmin F_k(θ) + μ/2 ‖θ - θ^t‖² by SGD from θ^t        local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

The proximal term enters as μ (θ - θ^t) added to the gradient, which is its derivative.

Differences from the paper: the paper samples clients with probability n_k/n and averages uniformly; here the sample
is uniform and the mean weighted by n_k, as for FedAvg, so that μ = 0 is FedAvg exactly. All clients do the same
number of epochs (no stragglers). BatchNorm is treated as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientView, Method, ProximalTerm, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params


@dataclass(frozen=True)
class FedProx(Method[Params, None, Params, Params]):
    """FedAvg with a proximal term that keeps each local model near the global one.

    Attributes:
        mu: μ ≥ 0, weight of the proximal term; the paper tunes it over 0.001, 0.01, 0.1 and 1.
    """

    mu: float = 0.01

    title = "FedProx"
    citation = "Li et al., MLSys 2020, arXiv:1812.06127"
    one_model = True
    bounds = {"mu": ">= 0"}

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights."""
        return task.common_model(self.title).initial

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """SGD on F_k(θ) + μ/2 ‖θ - θ^t‖²."""
        return None, view.train(
            supervised_loss(view.model),
            down,
            "local",
            self.optimizer,
            proximal_term=ProximalTerm(self.mu, center=down),
        )

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total
