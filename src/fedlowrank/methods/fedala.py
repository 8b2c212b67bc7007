"""FedALA: adaptive local aggregation for personalized federated learning.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan. AAAI 2023. arXiv:2212.01197, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                         download
    client k:               with u_k its last upper layers and u^t those received, element by element,
                            on a random share s of its examples, in mini-batches,
                              W_k ← clip(W_k - η ∇_W F_k(l^t, W_k u^t + (1 - W_k) u_k), 0, 1)
                              θ ← (l^t, W_k u^t + (1 - W_k) u_k), l^t the lower layers received
                            θ_k ← SGD on F_k from θ, E epochs; keep u_k and W_k; send θ_k       local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                         server_update
    inference:              (l^{t+1}, W_k u^{t+1} + (1 - W_k) u_k)                              client_model

All elements of W_k begin at 1. A client in its first round has no model of its own and trains the download;
W_k moves from its second round on, for ``first_epochs`` in that round and for one epoch in the following
ones. η = 0 leaves W_k at 1 and is FedAvg.

Choices: the upper layers are the model's head, or the last ``layers`` modules that have parameters of their
own (the authors' code counts parameter tensors). The paper trains W_k for the first time until the losses of
the last ten epochs hardly differ; a pass has a fixed length, and eleven epochs are the fewest after which
that rule may stop. The examples on which W_k is trained are drawn again in each round, s = 80% of them as in the
paper; the authors' code takes consecutive examples and skips the last, smaller mini-batch. Inference
takes W_k as it was last trained, where the paper trains it once more on the model received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, Model, Pass, ServerView, Task
from ..core.learning.batch_losses import supervised_loss, task_loss
from ..core.learning.optimizer import SGD
from ..core.tree import Params, map_leaves, tree_dataclass


@tree_dataclass
class ClientState:
    """The state of a client: its last upper layers, their weights W in [0, 1], and the number of rounds it trained."""

    upper: Params
    weights: Params
    rounds: int


def mix_upper_layers(weights: Params, received_upper: Params, personal_upper: Params) -> Params:
    """The mixture W u + (1 - W) u_k, exact at both ends."""
    return map_leaves(lambda w, u, v: w * u + (1 - w) * v, weights, received_upper, personal_upper)


def clip_weights(weights: Params, _: float, *constants: Params) -> Params:
    """Clip the weights to [0, 1]."""
    return map_leaves(lambda w: w.clamp(0, 1), weights)


@dataclass(frozen=True)
class FedALA(Method[Params, ClientState, Params, Params]):
    """FedAvg whose clients mix the upper layers received with their own, element by element.

    When to use: personal models for clients whose data differ, without more communication than FedAvg.

    Attributes:
        weights_lr: η ≥ 0, learning rate of the weights W.
        first_epochs: number of epochs that W trains in a client's second round.
        layers: p, number of last layers that count as upper layers; None for the head.
        data_share: s in (0, 1], share of a client's examples on which W is trained in a round.
    """

    weights_lr: float = 1.0
    first_epochs: int = 11
    layers: int | None = None
    data_share: float = 0.8

    title = "FedALA"
    citation = "Zhang et al., AAAI 2023, arXiv:2212.01197"
    bounds = {"weights_lr": ">= 0", "first_epochs": ">= 1", "layers": ">= 1", "data_share": "> 0 and <= 1"}

    def passes(self) -> dict[str, Pass]:
        """The pass of the model, and the passes of W in a client's second round and in the following ones."""
        return {
            "local": self.main_pass,
            "weights": Pass(1, self.batch_size, share=self.data_share),
            "first_weights": Pass(self.first_epochs, self.batch_size, share=self.data_share),
        }

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights; a model without a head is refused if ``layers`` is None."""
        model = task.common_model(self.title)
        self._select_upper(model, model.initial)
        return model.initial

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """All weights W are 1."""
        upper = self._select_upper(task.model(client), task.model(client).initial)
        return ClientState(upper, map_leaves(torch.ones_like, upper), 0)

    def _select_upper(self, model: Model, params: Params) -> Params:
        if self.layers is None:
            return model.head_of(params)
        module_names = list(dict.fromkeys(n.rpartition(".")[0] for n in model.initial))[-self.layers :]
        return {n: p for n, p in params.items() if n.rpartition(".")[0] in module_names}

    def local_update(self, state: ClientState, down: Params, view: ClientView) -> tuple[ClientState, Params]:
        """SGD on W, then on F_k from the mixture."""
        model, weights = view.model, state.weights

        def loss_of_weights(
            w: Params, batch: Batch, down: Params, received_upper: Params, personal_upper: Params
        ) -> Tensor:
            return task_loss(
                model.apply(down | mix_upper_layers(w, received_upper, personal_upper), batch.x), batch
            )

        received_upper, personal_upper = self._select_upper(model, down), state.upper
        if state.rounds > 0:
            pass_name = "first_weights" if state.rounds == 1 else "weights"
            constants = (down, received_upper, personal_upper)
            weights = view.train(
                loss_of_weights,
                weights,
                pass_name,
                SGD(lr=self.weights_lr),
                constants=constants,
                prox=clip_weights,
            )
        start = down | mix_upper_layers(weights, received_upper, personal_upper)
        theta = view.train(supervised_loss(model), start, "local", self.optimizer)
        return ClientState(self._select_upper(model, theta), weights, state.rounds + 1), theta

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total

    def client_model(self, state: ClientState, down: Params, view: ClientView) -> ClientModel:
        """The mixture with the upper layers received, and the global model as a second series."""
        upper = mix_upper_layers(state.weights, self._select_upper(view.model, down), state.upper)
        return ClientModel(down | upper, {"personal": down | upper, "global": down})
