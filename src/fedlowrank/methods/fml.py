"""FML: federated mutual learning.

T. Shen, J. Zhang, X. Jia, F. Zhang, G. Huang, P. Zhou, K. Kuang, F. Wu, C. Wu. 2020. arXiv:2006.16765,
Algorithm 1.

    server, each round t:   send the meme model m^t to each client k of S_t             download
    client k:               from its private model p_k and m ← m^t, E epochs of simultaneous SGD on
                              p:  α CE(p) + (1 - α) KL(m ‖ p)
                              m:  β CE(m) + (1 - β) KL(p ‖ m)
                            keep p_k; send m_k                                          local_update
    server:                 m^{t+1} = Σ_{k∈S_t} n_k m_k / Σ_{k∈S_t} n_k                 server_update

Both losses are taken at the same old parameters and the teacher of each is detached: it is a target, not a
variable. The divergence is the mean over examples of Σ_j p_j log(p_j / q_j), not divided by the number of
classes again. In a heterogeneous federation the meme is the smallest architecture (CNN-5 in pFedLoRA's Table
2), or the one named.

Choices: memes are averaged with the weights n_k, as in FedAvg, over the sampled clients; private models of
clients of one architecture begin with the same initial weights. Clipping bounds the gradient of both models together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.learning.batch_losses import kl_divergence, task_loss
from ..core.tree import Params, tree_dataclass
from .shared.class_statistics import check_class_scores, count_outputs


@tree_dataclass
class MutualModels:
    """A private model and the shared one trained beside it."""

    private: Params
    meme: Params


@dataclass(frozen=True)
class FML(Method[Params, Params, Params, Params]):
    """Mutual distillation between a private model and a small shared one.

    Attributes:
        alpha: α in [0, 1], share of the labels in the private model's loss.
        beta: β in [0, 1], share of the labels in the meme's loss.
        meme: name of the shared architecture; None for the smallest one.
    """

    alpha: float = 0.5
    beta: float = 0.5
    meme: str | None = None

    title = "FML"
    citation = "Shen et al. 2020, arXiv:2006.16765"
    bounds = {"alpha": ">= 0 and <= 1", "beta": ">= 0 and <= 1"}
    needs_classes = True
    heterogeneous = True

    def server_init(self, task: Task) -> Params:
        """The meme model m^0; raises TaskError if models have fewer outputs than classes, or unequally many."""
        check_class_scores(self.title, task)
        count_outputs(self.title, task)
        return task.smallest_model(self.meme).initial

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """p_k starts at its architecture's initial weights."""
        return task.model(client).initial

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """Simultaneous SGD on both models; detached teachers leave each loss its own gradient."""
        alpha, beta, private, meme = self.alpha, self.beta, view.model, view.task.smallest_model(self.meme)

        def loss(models: MutualModels, batch: Batch) -> Tensor:
            p, m = private.apply(models.private, batch.x), meme.apply(models.meme, batch.x)
            private_loss = alpha * task_loss(p, batch) + (1 - alpha) * kl_divergence(m.detach(), p, batch)
            meme_loss = beta * task_loss(m, batch) + (1 - beta) * kl_divergence(p.detach(), m, batch)
            return private_loss + meme_loss

        trained_models = view.train(loss, MutualModels(state, down), "local", self.optimizer)
        return trained_models.private, trained_models.meme

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the memes, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The private model p_k."""
        return ClientModel(state)
