"""GPGD: proximal gradient descent in the global step, FedSLR's second low-rank alternative.

T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao. TMLR 2023. arXiv:2302.11051, Appendix A.2.

    server, each round t:   send w^t to each client i of S_t, as factors if they are smaller    download
    client i:               w_i ← SGD on f_i from w^t, E epochs; send w_i                       local_update
    server:                 w^{t+1} = prox of λ η_g Σ_l ‖π(·_l)‖_* at mean_{S_t} w_i            server_update

This is FedAvg with plain means and a prox after them. It lacks FedSLR's γ, so it does not descend on the
penalized objective; it serves as a comparison, with FedSLR's matrices and settings and without a personal
component. The threshold λ η_g, as in FedSLR, is a choice: the paper does not give the step size of its global step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..adapters.adaptable import refuse_computed_weights
from ..core.contract import ClientInfo, ClientModel, ClientView, Mean, Method, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.learning.optimizer import SGD, Optimizer, Schedule
from ..core.tree import Params, widen
from ..linalg.matricize import Weights, unpack_weights
from ..linalg.nuclear_norm import (
    Norm,
    PenalizedModel,
    apply_prox,
    refuse_complex,
    unpenalized_model,
    warn_if_all_zero,
)


@dataclass(frozen=True)
class GPGD(Method[PenalizedModel, None, Weights, Params]):
    """FedAvg whose global model loses rank after every round.

    Attributes:
        lam: λ ≥ 0, weight of the penalty.
        prox_step: η_g > 0; the threshold is λ η_g.
        norm: penalty: nuclear norm of every matrix, or ℓ1 norm of these matrices.
        exclude: exact names of parameters without the penalty λ.
    """

    epochs: int = 2
    batch_size: int = 20
    optimizer: Optimizer = SGD(lr=0.1, weight_decay=1e-3, schedule=Schedule("exponential", factor=0.998))
    lam: float = 1e-4
    prox_step: float = 10.0
    norm: Norm = "low_rank"
    exclude: tuple[str, ...] = ()

    title = "GPGD"
    citation = "Huang et al., TMLR 2023, arXiv:2302.11051"
    bounds = {"lam": ">= 0", "prox_step": "> 0"}
    zero_step_settings: ClassVar[dict[str, float]] = {
        "lam": 0.0
    }  # otherwise w would shrink even at a learning rate of 0

    def server_init(self, task: Task) -> PenalizedModel:
        """w^0, the common initial weights."""
        model = task.common_model(self.title)
        refuse_complex(self.title, model.complex, self.norm, self.exclude)
        initial_model = unpenalized_model(model.initial, self.exclude, model.complex)
        refuse_computed_weights(model.module, initial_model.ranks, self.title)
        return initial_model

    def download(self, server: PenalizedModel, client: ClientInfo) -> Weights:
        """The model w^t, as factors if they are smaller."""
        return server.weights

    def local_update(self, state: None, down: Weights, view: ClientView) -> tuple[None, Params]:
        """SGD on f_i from w^t."""
        model = view.model
        return None, view.train(
            supervised_loss(model), unpack_weights(down, model.initial), "local", self.optimizer
        )

    def contribution(self, server: PenalizedModel, upload: Params, client: ClientInfo) -> Mean[Params]:
        """w_i, all with the same weight."""
        return Mean(widen(upload))

    def server_update(self, server: PenalizedModel, total: Params, view: ServerView) -> PenalizedModel:
        """Prox at the mean of the replies."""
        model = view.task.common_model(self.title)
        c = self.lam * self.prox_step
        new_model = apply_prox(total, c, self.norm, self.exclude, model.initial, model.complex)
        warn_if_all_zero(self.title, server, new_model, view.round)
        return new_model

    def client_model(self, state: None, down: Weights, view: ClientView) -> ClientModel:
        """The global model, as factors."""
        return ClientModel(unpack_weights(down, view.model.initial), parts={"personal": (down,)})

    def server_metrics(self, server: PenalizedModel) -> dict[str, dict[str, float]]:
        """The rank of w."""
        return {"ranks": dict(server.ranks)}
