"""MOON: model-contrastive federated learning.

Q. Li, B. He, D. Song. CVPR 2021. arXiv:2103.16257, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                 download
    client k:               from θ ← θ^t, E epochs of SGD on F_k(θ) + μ mean_x ℓ(x), with
                              ℓ = -log [e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})]
                            z, z_glob, z_prev: representations of x by θ, θ^t and the client's last θ_k
                            keep θ_k; send θ_k                                          local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

z_glob and z_prev are targets: no gradient flows through them, and both are taken in inference mode, without dropout, as
in the authors' code. Before a client's first round its last model is θ^0; so in round 0 z_glob = z_prev, ℓ = log 2, and
the round is FedAvg's up to rounding. μ = 0 is FedAvg in every round. μ is 5 for CIFAR-10 and 1 for CIFAR-100 and
Tiny-ImageNet in the paper; τ = 0.5.

Choices: the representation is the input of the model's head. The paper puts a projection of two layers
between encoder and classifier and compares its outputs; to do the same, add these layers to the model before its
head. The representation of a text is one vector a token; the vectors of all tokens of an example, without padding,
are compared as one vector. A client that missed rounds compares with the model of its own last round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..core.contract import Batch, ClientInfo, ClientView, Method, ServerView, Task
from ..core.learning.batch_losses import task_loss
from ..core.tree import Params
from .shared.fixed_models import in_eval_mode


def without_padding(representations: Tensor, batch: Batch) -> Tensor:
    """Set the representations ``[b, T, d]`` of texts to zero at padding; all others stay as they are.

    Padding are the tokens that ``attention_mask`` leaves out, or, without an ``attention_mask``, those without a
    label.
    """
    mask = batch.x.get("attention_mask") if isinstance(batch.x, dict) else None
    if mask is None and batch.loss.predicts_tokens(batch.y):
        mask = batch.y >= 0
    if mask is None or representations.ndim != 3 or mask.shape != representations.shape[:2]:
        return representations
    # torch.where and not a product: padding may hold infinities, and 0 * inf is NaN
    return torch.where(mask.bool()[..., None], representations, 0.0)


@dataclass(frozen=True)
class MOON(Method[Params, Params, Params, Params]):
    """FedAvg with a contrastive loss that keeps local representations near those of the global model.

    When to use: one global model for clients whose labels or inputs differ, with a deep model whose
    representation drifts in local training; a step costs two more forward passes.

    Attributes:
        mu: μ ≥ 0, weight of the contrastive loss; the paper tunes it over 0.1, 1, 5 and 10.
        temperature: τ > 0, temperature of the contrastive loss.
    """

    mu: float = 1.0
    temperature: float = 0.5

    title = "MOON"
    citation = "Li et al., CVPR 2021, arXiv:2103.16257"
    bounds = {"mu": ">= 0", "temperature": "> 0"}

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights; a model without a head is refused."""
        model = task.common_model(self.title)
        # raises if a model has no representation
        task.common_width(self.title)
        return model.initial

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """The last model of a client is θ^0 before its first round."""
        return task.model(client).initial

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """SGD on F_k with the contrastive loss."""
        model, mu, tau = view.model, self.mu, self.temperature

        def loss(theta: Params, batch: Batch, global_params: Params, previous_params: Params) -> Tensor:
            z = model.represent(theta, batch.x)
            with in_eval_mode(model):
                targets = model.represent(global_params, batch.x), model.represent(previous_params, batch.x)
            z_local, z_glob, z_prev = (without_padding(r, batch).flatten(1) for r in (z, *targets))
            global_similarity = functional.cosine_similarity(z_local, z_glob)
            previous_similarity = functional.cosine_similarity(z_local, z_prev)
            # -log(e^a / (e^a + e^b)) = softplus(b - a)
            contrast = functional.softplus((previous_similarity - global_similarity) / tau)
            return task_loss(model.head(theta, z), batch) + mu * batch.mean(contrast)

        theta = view.train(loss, down, "local", self.optimizer, constants=(down, state))
        return theta, theta

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total
