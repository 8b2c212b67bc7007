"""FedPer: federated learning with personalization layers.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. 2019. arXiv:1912.00818, Algorithms 1 and 2.

    server, each round t:   send the base φ^t to each client k of the sample S_t        download
    client k:               (φ_k, h_k) ← SGD on F_k from (φ^t, h_k), jointly, E epochs;
                            keep h_k; send φ_k                                          local_update
    server:                 φ^{t+1} = Σ_{k∈S_t} n_k φ_k / Σ_{k∈S_t} n_k                 server_update

A client infers with the base as aggregated after the round and its own head h_k. The personalization layers are the
model's head, which begins at the model's split point.

Differences from the paper: in the paper all clients take part in every round and the weights n_k are divided by the
examples of all clients; here both are over the sample. The paper draws the initial h_k separately at each client;
here all start from the common initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientView, Method, ServerView
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params
from .shared.personal_head import body_with_head, initial_body, initial_head


@dataclass(frozen=True)
class FedPer(Method[Params, Params, Params, Params]):
    """Shared representation, private heads, trained jointly."""

    title = "FedPer"
    citation = "Arivazhagan et al. 2019, arXiv:1912.00818"

    server_init = initial_body
    client_init = initial_head
    client_model = body_with_head

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """Joint SGD on φ and h_k."""
        model = view.model
        params = view.train(supervised_loss(model), down | state, "local", self.optimizer)
        return model.head_of(params), model.body_of(params)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the bases, weighted by n_k."""
        return total
