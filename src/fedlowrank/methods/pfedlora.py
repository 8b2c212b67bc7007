"""pFedLoRA (FedLoRA): model-heterogeneous personalized federated learning with LoRA tuning.

L. Yi, H. Yu, G. Wang, X. Liu, X. Li. arXiv:2310.13283, Algorithm 1. Client k's model is F_k = h_k ∘ f_k with
parameters ω_k.

    server, each round t:   send the adapter θ^{t-1} to each client k of the sample S           download
    client k, step 1:       freeze the adapter, train the model: for mini-batches (x, y), E epochs,
                              R = f_k(x);  ŷ1 = A(R; θ^{t-1});  ŷ2 = h_k(R)                     (eq. 3, 4)
                              ω_k ← ω_k - η_ω ∇[(1 - μ) CE(ŷ1, y) + μ CE(ŷ2, y)]                (eq. 5, 6)
    client k, step 2:       freeze the model, train the adapter: R̃ = f_k(x; ω_k^t),
                              θ_k ← θ_k - η_θ ∇ CE(A(R̃; θ_k), y), from θ^{t-1}                  (eq. 7-9)
                            keep ω_k^t; send θ_k^t                                              local_update
    server:                 θ^t = Σ_{k∈S} n_k θ_k^t / Σ_{k∈S} n_k  (eq. 10)                     server_update
    inference:              ŷ2, the client's own model alone                                    client_model

The gradient of CE(ŷ1) reaches f_k through R. The adapter is Linear(R → width) → [ReLU] → Linear(width →
classes): with ReLU on FC1's output it is the paper's *direct dimension reduction* (homogeneous models),
without ReLU on FC2's output its *matrix decomposition* (heterogeneous models). The model defines where the
representation ends (``model.split``).

Choices: the mean is over the sampled clients (the paper divides by the examples of all N, which loses scale
under partial participation). ``start = "svd"`` begins at the rank-width decomposition of the head of the
first client's initial model. Clients of one architecture begin with the same initial weights (in the paper each
client draws its own).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..adapters.pfedlora_adapter import PFedLoRAAdapter, initial_adapter, initial_adapter_from_head
from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, Pass, ServerView, Task
from ..core.errors import ConfigError
from ..core.learning.batch_losses import task_loss
from ..core.learning.optimizer import Optimizer
from ..core.tree import Params


@dataclass(frozen=True)
class PFedLoRA(Method[PFedLoRAAdapter, Params, PFedLoRAAdapter, PFedLoRAAdapter]):
    """A small shared adapter carries knowledge between models of any architecture.

    Attributes:
        mu: μ in [0.5, 1], weight of the model's own loss; the paper tunes it over 0.5, 0.6, ..., 0.9. At 1, the limit of
            the paper's [0.5, 1), the model trains exactly as with Standalone.
        width: hidden width d of the adapter; the paper tunes 20-80 (heterogeneous) and 100-500 (homogeneous).
        relu: whether a ReLU stands between the adapter's layers (direct dimension reduction) or not (matrix
            decomposition).
        start: initial values of the adapter: random, or svd of the head's weights.
        adapter_optimizer: optimizer of the adapter in step 2, with learning rate η_θ; None for the optimizer of the
            model.
    """

    mu: float = 0.9
    width: int = 40
    relu: bool = False
    start: Literal["random", "svd"] = "random"
    adapter_optimizer: Optimizer | None = None

    title = "pFedLoRA"
    citation = "Yi et al. 2023, arXiv:2310.13283"
    bounds = {"mu": ">= 0.5 and <= 1", "width": ">= 1"}
    heterogeneous = True
    needs_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.groups and self.adapter_optimizer is None:
            raise ConfigError(
                f"{self.title}: optimizer.groups are of the model or of the adapter, and no parameter is in both: set "
                "adapter_optimizer, without groups of the model"
            )

    def passes(self) -> dict[str, Pass]:
        """The passes of step 1 and step 2."""
        return {"model": self.main_pass, "adapter": self.main_pass}

    def server_init(self, task: Task) -> PFedLoRAAdapter:
        """The adapter θ^0."""
        input_width, first_model = task.common_width(self.title), task.model(task.clients[0])
        key = task.key / "pfedlora"
        adapter = initial_adapter(input_width, self.width, task.classes, key)
        if self.start == "svd":
            adapter = initial_adapter_from_head(first_model, self.width, adapter)
        # the widest type of all architectures does not depend on the order of the clients
        dtypes = (next(iter(m.initial.values())).dtype for m in task.architectures.values())
        reference = next(iter(first_model.initial.values())).to(functools.reduce(torch.promote_types, dtypes))
        return PFedLoRAAdapter(
            *(t.to(reference) for t in (adapter.a, adapter.a_bias, adapter.b, adapter.b_bias))
        )

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """ω_k starts at its architecture's initial weights."""
        return task.model(client).initial

    def local_update(
        self, state: Params, down: PFedLoRAAdapter, view: ClientView
    ) -> tuple[Params, PFedLoRAAdapter]:
        """SGD on the model, then on the adapter."""
        model, mu, relu = view.model, self.mu, self.relu

        def loss_of_model(omega: Params, batch: Batch, theta: PFedLoRAAdapter) -> Tensor:
            r = model.represent(omega, batch.x)
            adapter_scores, head_scores = theta.apply(r, relu), model.head(omega, r)
            return (1 - mu) * task_loss(adapter_scores, batch) + mu * task_loss(head_scores, batch)

        def loss_of_adapter(theta: PFedLoRAAdapter, batch: Batch, omega: Params) -> Tensor:
            with torch.no_grad():
                r = model.represent(omega, batch.x)
            return task_loss(theta.apply(r, relu), batch)

        omega = view.train(loss_of_model, state, "model", self.optimizer, constants=(down,))
        optimizer = self.adapter_optimizer or self.optimizer
        return omega, view.train(loss_of_adapter, down, "adapter", optimizer, constants=(omega,))

    def server_update(
        self, server: PFedLoRAAdapter, total: PFedLoRAAdapter, view: ServerView
    ) -> PFedLoRAAdapter:
        """Mean of the adapters, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: PFedLoRAAdapter, view: ClientView) -> ClientModel:
        """The client's model ω_k without the adapter, which only carries knowledge."""
        return ClientModel(state)
