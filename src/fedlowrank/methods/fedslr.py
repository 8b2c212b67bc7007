"""FedSLR: fusion of global and local knowledge for personalized federated learning.

T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao. TMLR 2023. arXiv:2302.11051, Algorithms 2 and 3 (partial
participation).

    server, each round t:   send w^t to each client i of S_t, as factors if they are smaller    download
    client i, phase I:      w_i ≈ argmin f_i(w) - ⟨γ_i, w⟩ + ‖w - w^t‖² / (2 η_g) by SGD from w^t
                            γ_i ← γ_i + (w^t - w_i) / η_g
    client i, phase II:     p_i ← soft(p_i - η ∇_p f_i(w^t + p_i), η μ) at every step; soft: entries towards 0
                            keep γ_i and p_i; send w_i                                          local_update
    server:                 γ̄ ← γ̄ + 1/M Σ_{i∈S_t} (w^t - w_i) / η_g
                            w^{t+1} = prox of λ η_g Σ_l ‖π(·_l)‖_* at mean_{S_t} w_i - η_g γ̄    server_update

M is the number of all clients that can train (those of ``run.unseen`` never do); means are plain. π is scheme 2
(:mod:`fedlowrank.linalg.matricize`); every weight of two or more dimensions is proxed, vectors (biases, scales) are only
averaged and corrected. The model is w + p_i; the series ``gkr`` is w alone. The proximal term towards w^t and γ_i enter
the gradient explicitly; the optimizer's weight decay is part of f_i in both phases. With momentum β the threshold of
phase II is η μ / (1 - β), so that μ weighs the same penalty (:mod:`fedlowrank.methods.shared.proximal_steps`); with
μ > 0 AdamW and groups of other learning rates are refused.

Differences from the paper: p_i starts at zero, where the authors' code starts it at w^0 (``personal_start``; even
then p_i of a normalization layer starts at zero here, because w + p_i would begin with twice its scale). γ̄ needs
no γ_i on the server (Algorithm 3); with ``memory_efficient`` off it keeps them all (Algorithm 2), with the same
result. Appendix A.3's other designs: ``global_norm`` is the norm that λ weighs, ``personal_norm`` the one that μ
weighs (the nuclear one leaves vectors of p_i as they are); a sparse w is sent as its nonzero values and a bitmask.
The designs of A.2 are LPGD and GPGD, which have files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from torch import Tensor

from ..adapters.adaptable import refuse_computed_weights
from ..core.contract import (
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    Each,
    Mean,
    Method,
    Pass,
    ProximalTerm,
    ServerView,
    Task,
)
from ..core.contract.contribution import mean
from ..core.learning.batch_losses import supervised_loss, task_loss
from ..core.learning.optimizer import SGD, Optimizer, Schedule
from ..core.tree import Params, add, map_leaves, sub, tree_dataclass, widen, zeros_like
from ..linalg.matricize import Weights, unpack_weights
from ..linalg.nuclear_norm import (
    Norm,
    PenalizedModel,
    apply_prox,
    apply_prox_dense,
    as_model_part,
    refuse_complex,
    unpenalized_model,
    warn_if_all_zero,
)
from ..linalg.svt import soft_threshold
from ..models.statistics.normalization import zero_normalizations
from .shared.proximal_steps import check_proximal_optimizer, compute_proximal_step_size


@tree_dataclass
class ServerState:
    """w^t, γ̄, and γ_i by client unless memory-efficient. γ is in float32 for parameters in half precision."""

    w: PenalizedModel
    gamma: Params
    gamma_by_client: dict[str, Params]


@tree_dataclass
class ClientState:
    """The dual variable γ_i and the personal component p_i of a client."""

    gamma: Params
    p: Params


class Total(TypedDict):
    """The reduced contributions of a round."""

    w: Params
    replies: NotRequired[dict[int, Params]]


@dataclass(frozen=True)
class FedSLR(Method[ServerState, ClientState, Weights, Params]):
    """A low-rank global model, made by a dual method, and a sparse personal component added to it.

    Attributes:
        epochs: number of epochs of phase I.
        optimizer: optimizer of both phases: SGD, with or without momentum.
        fusion_epochs: number of epochs of phase II.
        lam: λ ≥ 0, weight of the penalty on w.
        mu: μ ≥ 0, weight of the penalty on p_i.
        prox_step: η_g > 0, proximal step; its inverse is the weight of the proximal term towards w^t.
        global_norm: penalty on w: nuclear norm of every matrix, or ℓ1 norm of these matrices.
        personal_norm: penalty on p_i: ℓ1 norm of all entries, or nuclear norm of every matrix (slow: a
            decomposition in every step).
        memory_efficient: whether the server keeps only γ̄, and not γ_i of every client.
        personal_start: initial p_i: zero, or w^0 (but for normalization layers, where it is zero).
        exclude: exact names of parameters without the penalty λ.
    """

    epochs: int = 2
    batch_size: int = 20
    optimizer: Optimizer = SGD(lr=0.1, weight_decay=1e-3, schedule=Schedule("exponential", factor=0.998))
    fusion_epochs: int = 1
    lam: float = 1e-4
    mu: float = 1e-3
    prox_step: float = 10.0
    global_norm: Norm = "low_rank"
    personal_norm: Norm = "sparse"
    memory_efficient: bool = True
    personal_start: Literal["zero", "initial"] = "zero"
    exclude: tuple[str, ...] = ()

    title = "FedSLR"
    citation = "Huang et al., TMLR 2023, arXiv:2302.11051"
    bounds = {"lam": ">= 0", "mu": ">= 0", "prox_step": "> 0", "fusion_epochs": ">= 1"}
    zero_step_settings: ClassVar[dict[str, float]] = {
        "lam": 0.0
    }  # otherwise w would shrink even at a learning rate of 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu:
            check_proximal_optimizer(self.optimizer, self.title, "mu")

    def passes(self) -> dict[str, Pass]:
        """The passes of phases I and II."""
        return {
            "phase1": self.main_pass,
            "phase2": Pass(self.fusion_epochs, self.batch_size),
        }

    def server_init(self, task: Task) -> ServerState:
        """w^0, the common initial weights, and γ̄ = 0."""
        model = task.common_model(self.title)
        initial = model.initial
        refuse_complex(self.title, model.complex, self.global_norm, self.exclude)
        refuse_complex(f"{self.title}, personal_norm = 'low_rank'", model.complex, self.personal_norm)
        w = unpenalized_model(initial, self.exclude, model.complex)
        refuse_computed_weights(model.module, w.ranks, self.title)
        return ServerState(w, zeros_like(widen(initial)), {})

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """The dual γ_i is 0, and p_i is 0 or w^0."""
        model = task.model(client)
        p = zeros_like(model.initial)
        if self.personal_start == "initial":
            # zero for normalizations: w + p would begin with twice their scale
            p = zero_normalizations(model.initial, model.module)
        return ClientState(zeros_like(widen(model.initial)), p)

    def download(self, server: ServerState, client: ClientInfo) -> Weights:
        """The model w^t, as factors if they are smaller."""
        return server.w.weights

    def local_update(self, state: ClientState, down: Weights, view: ClientView) -> tuple[ClientState, Params]:
        """Both phases, from the same w^t."""
        model, w = view.model, unpack_weights(down, view.model.initial)

        def loss_of_mixed_model(p: Params, batch: Batch, w: Params) -> Tensor:
            return task_loss(model.apply(add(w, p), batch.x), batch)

        def shrink(p: Params, lr: float, _: Params) -> Params:
            threshold = compute_proximal_step_size(self.optimizer, lr) * self.mu
            if self.personal_norm == "sparse":
                return map_leaves(lambda t: soft_threshold(t, threshold), p)
            return apply_prox_dense(p, threshold, self.personal_norm, ())

        proximal_term = ProximalTerm(1 / self.prox_step, center=w, linear=state.gamma)
        w_i = view.train(supervised_loss(model), w, "phase1", self.optimizer, proximal_term=proximal_term)
        p = view.train(loss_of_mixed_model, state.p, "phase2", self.optimizer, constants=(w,), prox=shrink)
        return self.follow_upload(state, ClientState(state.gamma, p), down, w_i, view), w_i

    def follow_upload(
        self, before: ClientState, after: ClientState, down: Weights, upload: Params, view: ClientView
    ) -> ClientState:
        """Compute γ_i + (w^t - w_i) / η_g with w_i as it was sent, so that γ̄ stays the mean of all γ_i."""
        w = unpack_weights(down, view.model.initial)
        return ClientState(add(before.gamma, sub(widen(w), upload), 1 / self.prox_step), after.p)

    def contribution(self, server: ServerState, upload: Params, client: ClientInfo) -> Contribution:
        """w_i, all with the same weight; Algorithm 2 needs each of them for γ_i."""
        contributions: dict[str, Any] = {"w": Mean(widen(upload))}
        return contributions if self.memory_efficient else {**contributions, "replies": Each(upload)}

    def server_update(self, server: ServerState, total: Total, view: ServerView) -> ServerState:
        """γ̄ moves by 1/M for each reply; w is the prox of the mean of the replies minus η_g γ̄."""
        model = view.task.common_model(self.title)
        initial = model.initial
        w, mean_w = widen(server.w.dense(initial)), total["w"]
        gamma_by_client, gamma = {}, add(server.gamma, sub(w, mean_w), view.share / self.prox_step)
        if not self.memory_efficient:
            gamma_by_client = {
                str(c.id): server.gamma_by_client.get(str(c.id), zeros_like(w)) for c in view.trainable
            }
            for i, w_i in total["replies"].items():
                gamma_by_client[str(i)] = add(gamma_by_client[str(i)], sub(w, w_i), 1 / self.prox_step)
            gamma = mean(gamma_by_client.values(), [1.0] * len(gamma_by_client))
        new_w = apply_prox(
            add(mean_w, gamma, -self.prox_step),
            self.lam * self.prox_step,
            self.global_norm,
            self.exclude,
            initial,
            model.complex,
        )
        warn_if_all_zero(self.title, server.w, new_w, view.round)
        return ServerState(new_w, gamma, gamma_by_client)

    def client_model(self, state: ClientState, down: Weights, view: ClientView) -> ClientModel:
        """The mixed model w + p_i, and w alone."""
        w = unpack_weights(down, view.model.initial)
        mixed_params, parts = add(w, state.p), (down, as_model_part(state.p, self.personal_norm))
        return ClientModel(mixed_params, {"mixed": mixed_params, "gkr": w}, {"mixed": parts, "gkr": (down,)})

    def server_metrics(self, server: ServerState) -> dict[str, dict[str, float]]:
        """The rank of w."""
        return {"ranks": dict(server.w.ranks)}
