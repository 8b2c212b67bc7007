"""Ditto: fair and robust federated learning through personalization.

T. Li, S. Hu, A. Beirami, V. Smith. ICML 2021. arXiv:2012.04221, Algorithm 1.

    server, each round t:   send w^t to each client k of the sample S_t                 download
    client k, pass global:  w_k ← SGD on F_k from w^t, E epochs; send w_k
           pass personal:   E epochs of v_k ← v_k - η (∇F_k(v_k) + λ (v_k - w^t)); keep v_k
                                                                                        local_update
    server:                 w^{t+1} = Σ_{k∈S_t} n_k w_k / Σ_{k∈S_t} n_k                 server_update

The anchor of the personal model is w^t as received, not the w_k just trained. The pass for w comes first, as in the
paper, so it sees the examples in FedAvg's order and w is FedAvg's model bit for bit whatever λ; the pass for v has an
order of its own.

Differences from the paper: w is averaged with weights n_k, as FedAvg, where the paper leaves the solver of the global
problem open.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, ClientModel, ClientView, Method, Pass, ProximalTerm, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params


@dataclass(frozen=True)
class Ditto(Method[Params, Params, Params, Params]):
    """FedAvg, and a personal model with a proximal term towards the global one.

    Attributes:
        lam: λ ≥ 0, weight of the proximal term.
        personal_epochs: number of epochs of the personal model; None for as many as the global model trains.
    """

    lam: float = 0.1
    personal_epochs: int | None = None

    title = "Ditto"
    citation = "Li et al., ICML 2021, arXiv:2012.04221"
    bounds = {"lam": ">= 0", "personal_epochs": ">= 1"}

    def passes(self) -> dict[str, Pass]:
        """One pass for each model; the position of a pass determines its order of examples."""
        personal_pass = None if self.personal_epochs is None else Pass(self.personal_epochs, self.batch_size)
        return {"global": self.main_pass, "personal": personal_pass or self.main_pass}

    def server_init(self, task: Task) -> Params:
        """w^0, the common initial weights."""
        return task.common_model(self.title).initial

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """v_k starts at the common initial weights."""
        return task.model(client).initial

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """FedAvg's local training of w, then SGD on F_k(v) + λ/2 ‖v - w^t‖²."""
        loss = supervised_loss(view.model)
        w = view.train(loss, down, "global", self.optimizer)
        v = view.train(
            loss, state, "personal", self.optimizer, proximal_term=ProximalTerm(self.lam, center=down)
        )
        return v, w

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The personal model v_k, and w as a second series."""
        return ClientModel(state, {"personal": state, "global": down})
