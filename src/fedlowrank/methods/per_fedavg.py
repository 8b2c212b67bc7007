"""Per-FedAvg: personalized federated learning by model-agnostic meta-learning.

A. Fallah, A. Mokhtari, A. Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach. NeurIPS 2020. arXiv:2002.07948, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                         download
    client k:               from θ^t, for every batch, halved into B1 and B2,
                              θ' = θ - α ∇f_k(θ; B1)
                              FO:  θ ← θ - β ∇f_k(θ'; B2)
                              HF:  g = ∇f_k(θ'; B2)
                                   θ ← θ - β (g - α [∇f_k(θ + δg; B1) - ∇f_k(θ - δg; B1)] / 2δ)
                            send θ_k                                                            local_update
    server:                 θ^{t+1} = 1/|S_t| Σ_{k∈S_t} θ_k                                     server_update
    inference:              θ - α ∇f_k(θ; one batch of the *training* data)                     client_model

β is the learning rate of ``optimizer``, 0.001 by default. B1 and B2 are every other example of a batch, which
is in random order; a batch of one example is both. The first order variant takes the inner gradient as a
constant. The Hessian-free one takes its Hessian-vector product on B1, where the paper draws a third batch; so
its step is the gradient of f_k(θ'(θ); B2) up to the error of the finite difference. All replies have the same
weight, as in the paper; ``weighting = "examples"`` weights them by n_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.arguments.switch import Switch, check_switch
from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Mean, Method, Pass, ServerView, Task
from ..core.learning.batch_losses import gradient, supervised_loss, task_loss
from ..core.learning.optimizer import SGD, Optimizer
from ..core.tree import Params, add, dot, map_leaves, sub
from .shared.averaging import Weighting, reply_weight


def split_batch(batch: Batch, offset: Literal[0, 1]) -> Batch:
    """Select every other example of a batch, from the first or the second on; a single example is in both halves.

    Padding comes after the examples, so the halves are the same whether a batch is padded or not.
    """
    client_count, device = batch.client_count or 1, batch.y.device
    size = len(batch) // client_count
    rows = torch.arange(offset, max(size, 2), 2, device=device)
    count = torch.full((client_count, 1), size, device=device)
    if batch.mask is not None:
        count = batch.mask.reshape(client_count, size).sum(1, keepdim=True)
    first_rows = size * torch.arange(client_count, device=device)[:, None]
    indices = (first_rows + torch.minimum(rows, count - 1)).flatten()
    mask = None if batch.mask is None else (rows < count.clamp(min=2)).flatten()
    x = {n: t[indices] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[indices]
    return Batch(x, batch.y[indices], mask, client_count=batch.client_count, loss=batch.loss)


@dataclass(frozen=True)
class PerFedAvg(Method[Params, None, Params, Params]):
    """A common model from which one step on a client's own data leads to a good personal one.

    Attributes:
        optimizer: optimizer of the outer step; its learning rate is β.
        alpha: α ≥ 0, size of the inner step and of the one before inference.
        variant: form of the meta-gradient: first_order, or hessian_free with a product by finite differences.
        delta: δ > 0, step of the finite difference.
        weighting: weight of a reply in the mean: uniform, or the client's number of training examples n_k.
    """

    optimizer: Optimizer = SGD(lr=0.001)
    alpha: float = 0.01
    variant: Literal["first_order", "hessian_free"] = "first_order"
    delta: float = 0.001
    weighting: Weighting = "uniform"

    title = "Per-FedAvg"
    citation = "Fallah et al., NeurIPS 2020, arXiv:2002.07948"
    couples_examples = True
    bounds = {"alpha": ">= 0", "delta": "> 0"}

    def __post_init__(self) -> None:
        """Refuse a δ that the variant does not use."""
        super().__post_init__()
        check_switch(self, Switch("variant", {"delta": ("hessian_free",)}), self.title)

    def passes(self) -> dict[str, Pass]:
        """Local training, and the step before inference."""
        return {"local": self.main_pass, "adapt": Pass(1, self.batch_size, steps=1)}

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights."""
        return task.common_model(self.title).initial

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """Steps on the loss after the inner step."""
        model, alpha, delta, is_hessian_free = (
            view.model,
            self.alpha,
            self.delta,
            self.variant == "hessian_free",
        )

        def risk(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        def loss(theta: Params, batch: Batch) -> Tensor:
            first_half, second_half, detached_theta = (
                split_batch(batch, 0),
                split_batch(batch, 1),
                map_leaves(torch.detach, theta),
            )
            inner_gradient = gradient(risk, detached_theta, first_half)
            value = risk(add(theta, inner_gradient, -alpha), second_half)
            if is_hessian_free:
                outer_gradient = gradient(risk, add(detached_theta, inner_gradient, -alpha), second_half)
                forward_gradient, backward_gradient = (
                    gradient(risk, add(detached_theta, outer_gradient, d), first_half)
                    for d in (delta, -delta)
                )
                gradient_change = sub(forward_gradient, backward_gradient)
                # adds to the gradient and leaves the value unchanged
                value = value - alpha / (2 * delta) * dot(gradient_change, sub(theta, detached_theta))
            return value

        return None, view.train(loss, down, "local", self.optimizer)

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean[Params]:
        """θ_k, all with the same weight, or weighted by n_k."""
        return Mean(upload, reply_weight(client, self.weighting))

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies."""
        return total

    def client_model(self, state: None, down: Params, view: ClientView) -> ClientModel:
        """θ after one step of size α on a batch of the client's training data, and the common θ."""
        adapted_params = view.train(supervised_loss(view.model), down, "adapt", SGD(lr=self.alpha))
        return ClientModel(adapted_params, {"adapted": adapted_params, "global": down})
