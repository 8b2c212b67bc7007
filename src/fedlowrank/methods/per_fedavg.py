"""Per-FedAvg: personalized federated learning with theoretical guarantees, a model-agnostic meta-learning approach.

A. Fallah, A. Mokhtari, A. Ozdaglar. NeurIPS 2020. arXiv:2002.07948, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                         download
    client k:               from θ^t, for every batch, halved into B1 and B2,
                              θ' = θ - α ∇f_k(θ; B1)
                              FO:  θ ← θ - β ∇f_k(θ'; B2)
                              HF:  g = ∇f_k(θ'; B2)
                                   θ ← θ - β (g - α [∇f_k(θ + δg; B1) - ∇f_k(θ - δg; B1)] / 2δ)
                            send θ_k                                                            local_update
    server:                 θ^{t+1} = 1/|S_t| Σ_{k∈S_t} θ_k                                     server_update
    inference:              θ - α ∇f_k(θ; one batch of the *training* data)                     personal

β is the learning rate of ``optimizer``, 0.001 by default. B1 and B2 are every other example of a batch, which is in random
order; a batch of one example is both. The first order variant takes the inner gradient as a constant. The Hessian-free one
takes its Hessian-vector product on B1, where the paper draws a third batch; so its step is the gradient of f_k(θ'(θ); B2) up
to the error of the finite difference. Replies weigh the same, as in the paper; ``weights = "examples"`` is n_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.loss import task_loss
from ..core.means import mean_of
from ..core.method import Batch, ClientInfo, ClientView, Method, Pass, Predictor, Reply, ServerView, Task
from ..core.optimizer import SGD, Optimizer
from ..core.tree import Params, add, dot, map, sub  # noqa: A004


def half(batch: Batch, which: Literal[0, 1]) -> Batch:
    """Every other example of a batch, from the first or the second on; of a single example, that one.

    Padding stands behind the examples, so the halves are the same whether a batch is padded or not.
    """
    rows = torch.arange(which, max(len(batch), 2), 2, device=batch.y.device)
    count = rows.new_tensor(len(batch)) if batch.mask is None else batch.mask.sum()
    at = torch.minimum(rows, count - 1)
    mask = None if batch.mask is None else rows < count.clamp(min=2)
    x = {n: t[at] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[at]
    return Batch(x, batch.y[at], mask)


@dataclass(frozen=True)
class PerFedAvg(Method[Params, None, Params, Params]):
    """A common model from which one step on a client's own data leads to a good personal one.

    Attributes:
        optimizer: of the outer step; its learning rate is β.
        alpha: α ≥ 0, size of the inner step and of the one before inference.
        variant: first_order, or hessian_free with a product by finite differences.
        delta: δ > 0, of the finite difference.
        weights: of a reply: uniform, or the client's number of training examples n_k.
    """

    optimizer: Optimizer = SGD(lr=0.001)
    alpha: float = 0.01
    variant: Literal["first_order", "hessian_free"] = "first_order"
    delta: float = 0.001
    weights: Literal["uniform", "examples"] = "uniform"

    title = "Per-FedAvg"
    citation = "Fallah et al., NeurIPS 2020, arXiv:2002.07948"
    streams = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.alpha < math.inf and 0 < self.delta < math.inf):
            raise ConfigError(f"Per-FedAvg: alpha must be >= 0 and delta > 0; they are {self.alpha} and {self.delta}")

    def passes(self) -> dict[str, Pass]:
        """Local training, and the step before inference."""
        return {"local": Pass(self.epochs, self.batch_size), "adapt": Pass(1, self.batch_size, steps=1)}

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
        """Steps on the loss after the inner step."""
        del state
        model, alpha, delta, free = view.model, self.alpha, self.delta, self.variant == "hessian_free"

        def risk(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        def loss(theta: Params, batch: Batch) -> Tensor:
            gradient = torch.func.grad(risk)
            one, two, here = half(batch, 0), half(batch, 1), map(torch.detach, theta)
            inner = gradient(here, one)
            value = risk(add(theta, inner, -alpha), two)
            if free:
                outer = gradient(add(here, inner, -alpha), two)
                change = sub(gradient(add(here, outer, delta), one), gradient(add(here, outer, -delta), one))
                # adds to the gradient and nothing to the value
                value = value - alpha / (2 * delta) * dot(change, sub(theta, here))
            return value

        return None, view.train(loss, down, "local", self.optimizer)

    def server_update(self, server: Params, replies: Iterable[Reply[Params]], view: ServerView) -> Params:
        """Mean of the replies."""
        del server, view
        return mean_of(replies, equally=self.weights != "examples")

    def personal(self, state: None, down: Params, view: ClientView) -> Params:
        """θ after one step of size α on a batch of the client's training data."""
        del state
        model = view.model

        def risk(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        return view.train(risk, down, "adapt", SGD(lr=self.alpha))

    def predictor(self, state: None, down: Params, view: ClientView) -> dict[str, Predictor]:
        """The adapted model, and the common one."""
        adapted = self.personal(state, down, view)
        return {"adapted": lambda x: view.model.apply(adapted, x), "global": lambda x: view.model.apply(down, x)}
