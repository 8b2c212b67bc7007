"""LG-FedAvg: think locally, act globally, federated learning with local and global representations.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. 2020.
arXiv:2001.01523, Algorithm 1 (supervised form, without the adversarial fairness term).

    server, each round t:   send the global head h^t to each client k of S_t            download
    client k:               (φ_k, h_k) ← SGD on F_k from (φ_k, h^t), jointly, E epochs;
                            keep φ_k; send h_k                                          local_update
    server:                 h^{t+1} = Σ_{k∈S_t} n_k h_k / Σ_{k∈S_t} n_k                 server_update

A client infers with its own representation φ_k and the head as aggregated after the round, not with the head it sent.

Differences from the paper: the paper starts from models pre-trained by FedAvg; here all start from initial weights.

Choices: heads are averaged with the weights n_k, as in FedAvg, over the sampled clients. h^0 is the head of
the first client's architecture; the φ_k of one architecture begin with the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.errors import TaskError
from ..core.learning.batch_losses import supervised_loss
from ..core.tree import Params


@dataclass(frozen=True)
class LGFedAvg(Method[Params, Params, Params, Params]):
    """Private representations, shared head."""

    title = "LG-FedAvg"
    citation = "Liang et al. 2020, arXiv:2001.01523"
    heterogeneous = True

    def server_init(self, task: Task) -> Params:
        """h^0, the head of the first client's architecture; all heads must have its shapes and types."""
        first_model = task.model(task.clients[0])
        head = first_model.head_of(first_model.initial)
        for client in task.clients:
            model = task.model(client)
            other_head = model.head_of(model.initial)
            if _forms(other_head) != _forms(head):
                raise TaskError(
                    f"{self.title} shares the head, but the heads of client {task.clients[0].id} "
                    f"({first_model.name}) and client {client.id} ({model.name}) differ: {_forms(head)} and "
                    f"{_forms(other_head)}"
                )
        return head

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """The representation φ_k at the architecture's initial weights."""
        model = task.model(client)
        return model.body_of(model.initial)

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """Joint SGD on φ_k and h."""
        model = view.model
        params = view.train(supervised_loss(model), state | down, "local", self.optimizer)
        return model.body_of(params), model.head_of(params)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the heads, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The client's own representation with the global head as received."""
        return ClientModel(state | down)


def _forms(params: Params) -> str:
    return ", ".join(f"{n} {tuple(p.shape)} {p.dtype}".replace("torch.", "") for n, p in params.items())
