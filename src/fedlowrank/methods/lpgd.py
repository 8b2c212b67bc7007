"""LPGD: proximal gradient descent in the local steps, FedSLR's first alternative for a low-rank global model.

T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao. TMLR 2023. arXiv:2302.11051, Appendix A.2.

    server, each round t:   send w^t to each client i of S_t                                    download
    client i:               w ← prox of λ η Σ_l ‖π(·_l)‖_* at w - η ∇f_i(w), from w^t, E epochs
                            send w_i                                                            local_update
    server:                 w^{t+1} = mean_{S_t} w_i                                            server_update

η is the learning rate of the step; with momentum β the threshold is λ η / (1 - β), so that λ weighs the same penalty
(:mod:`fedlowrank.methods.shared.proximal_steps`). With λ > 0 AdamW and groups of other learning rates are refused. A step
costs a singular value decomposition of every matrix, and the mean of low-rank models has full rank, so the download
does not become smaller; for this reason the paper proposes FedSLR. The upload could be sent as factors; it is sent
whole, as in FedSLR. Matrices and settings are FedSLR's; there is no personal component.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.adaptable import refuse_computed_weights
from ..core.contract import ClientInfo, ClientView, Mean, Method, ServerView, Task
from ..core.learning.batch_losses import supervised_loss
from ..core.learning.optimizer import SGD, Optimizer, Schedule
from ..core.tree import Params
from ..linalg.nuclear_norm import Norm, apply_prox_dense, check_exclude, penalized_names, refuse_complex
from .shared.proximal_steps import check_proximal_optimizer, compute_proximal_step_size


@dataclass(frozen=True)
class LPGD(Method[Params, None, Params, Params]):
    """FedAvg whose local models lose rank at every step.

    Attributes:
        optimizer: SGD, with or without momentum.
        lam: λ ≥ 0, weight of the penalty.
        norm: penalty: nuclear norm of every matrix, or ℓ1 norm of these matrices.
        exclude: exact names of parameters without the penalty λ.
    """

    epochs: int = 2
    batch_size: int = 20
    optimizer: Optimizer = SGD(lr=0.1, weight_decay=1e-3, schedule=Schedule("exponential", factor=0.998))
    lam: float = 1e-4
    norm: Norm = "low_rank"
    exclude: tuple[str, ...] = ()

    title = "LPGD"
    citation = "Huang et al., TMLR 2023, arXiv:2302.11051"
    one_model = True
    bounds = {"lam": ">= 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam:
            check_proximal_optimizer(self.optimizer, self.title, "lam")

    def server_init(self, task: Task) -> Params:
        """w^0, the common initial weights."""
        model = task.common_model(self.title)
        check_exclude(model.initial, self.exclude)
        refuse_complex(self.title, model.complex, self.norm, self.exclude)
        names = penalized_names(model.initial, self.exclude, model.complex)
        refuse_computed_weights(model.module, names, self.title)
        return model.initial

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """A proximal step after every gradient step."""
        # capture the method, one object for all clients, so that an engine recognizes that they run the same
        # function
        model, method = view.model, self

        def prox(theta: Params, lr: float) -> Params:
            step_size = compute_proximal_step_size(method.optimizer, lr)
            return apply_prox_dense(theta, step_size * method.lam, method.norm, method.exclude, model.complex)

        return None, view.train(supervised_loss(model), down, "local", self.optimizer, prox=prox)

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean[Params]:
        """w_i, all with the same weight."""
        return Mean(upload)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies."""
        return total
