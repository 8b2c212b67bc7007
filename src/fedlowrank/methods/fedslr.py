"""FedSLR: fusion of global and local knowledge for personalized federated learning.

T. Huang, L. Shen, Y. Sun, W. Lin, D. Tao. TMLR 2023. arXiv:2302.11051, Algorithms 2 and 3 (partial participation).

    server, each round t:   send w^t to each client i of S_t, as factors where they are fewer numbers          download
    client i, phase I:      w_i ≈ argmin f_i(w) - ⟨γ_i, w⟩ + ‖w - w^t‖² / (2 η_g) by SGD from w^t
                            γ_i ← γ_i + (w^t - w_i) / η_g
    client i, phase II:     p_i ← soft(p_i - η ∇_p f_i(w^t + p_i), η μ) at every step; soft: entries towards 0
                            keep γ_i and p_i; send w_i                                                         local_update
    server:                 γ̄ ← γ̄ + 1/M Σ_{i∈S_t} (w^t - w_i) / η_g
                            w^{t+1} = prox of λ η_g Σ_l ‖π(·_l)‖_* at mean_{S_t} w_i - η_g γ̄                   server_update

M is the number of all clients; means are plain. π is scheme 2 (:mod:`fedlowrank.linalg.matricize`); every weight of two or
more dimensions is proxed, vectors (biases, scales) are only averaged and corrected. The model is w + p_i; the series ``gkr``
is w alone. The pull towards w^t and γ_i enter the gradient explicitly; the optimizer's weight decay is part of f_i in both
phases. Departures: p_i starts at zero, where the authors' code starts it at w^0 (``personal_start``; and there, too, p_i of a
normalization layer starts at zero here, for w + p_i would begin with twice its scale). γ̄ needs no γ_i on the
server (Algorithm 3); with ``memory_efficient`` off it keeps them all (Algorithm 2), to the same end. Appendix A.3's other
designs: ``shared`` is the norm that λ weighs, ``private`` the one that μ weighs (the nuclear one leaves vectors of p_i as
they are); of a sparse w its entries travel, and a bit for each place. Those of A.2 are LPGD and GPGD, files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core.errors import ConfigError
from ..core.loss import task_loss
from ..core.means import Mean, mean
from ..core.method import Batch, ClientInfo, ClientView, Method, Pass, Predictor, Pull, Reply, ServerView, Task
from ..core.optimizer import SGD, Optimizer, Schedule
from ..core.tree import Params, add, map, sub, tree, zeros_like  # noqa: A004
from ..linalg.matricize import Weights, unpack
from ..linalg.nuclear_norm import Norm, Shrunk, begin, part_of, prox, prox_in_step, warn_if_dead
from ..linalg.svt import soft
from ..models.normalization import zero_normalizations


@tree
class Server:
    """w^t; γ̄; and γ_i by client unless memory-efficient."""

    w: Shrunk
    gamma: Params
    each: dict[str, Params]


@tree
class Client:
    """γ_i and p_i."""

    gamma: Params
    p: Params


@dataclass(frozen=True)
class FedSLR(Method[Server, Client, Weights, Params]):
    """A low-rank global model, made by a dual method, and a sparse personal component added to it.

    Attributes:
        epochs: of phase I.
        fusion_epochs: of phase II.
        lam: λ ≥ 0, weight of the penalty on w.
        mu: μ ≥ 0, weight of the penalty on p_i.
        eta_g: η_g > 0, proximal step; its inverse is the strength of the pull towards w^t.
        shared: penalty on w: nuclear norm of every matrix, or ℓ1 norm of the same.
        private: penalty on p_i: ℓ1 norm of all of it, or nuclear norm of every matrix (slow: a decomposition a step).
        memory_efficient: the server keeps γ̄ alone, not γ_i of every client.
        personal_start: p_i begins at zero, or at w^0 (but for normalization layers, where it begins at zero).
        exclude: exact names of parameters that λ leaves alone.
    """

    epochs: int = 2
    batch_size: int = 20
    optimizer: Optimizer = SGD(lr=0.1, weight_decay=1e-3, schedule=Schedule("exponential", factor=0.998))
    fusion_epochs: int = 1
    lam: float = 1e-4
    mu: float = 1e-3
    eta_g: float = 10.0
    shared: Norm = "low_rank"
    private: Norm = "sparse"
    memory_efficient: bool = True
    personal_start: Literal["zero", "initial"] = "zero"
    exclude: tuple[str, ...] = ()

    title = "FedSLR"
    citation = "Huang et al., TMLR 2023, arXiv:2302.11051"
    streams = True
    at_rest: ClassVar[dict[str, float]] = {"lam": 0.0}  # else w goes on shrinking when nobody learns

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.lam < math.inf and 0 <= self.mu < math.inf and 0 < self.eta_g < math.inf):
            raise ConfigError(f"FedSLR: need lam, mu >= 0 and eta_g > 0; got {self.lam}, {self.mu}, {self.eta_g}")
        if self.fusion_epochs < 1:
            raise ConfigError(f"FedSLR: fusion_epochs must be >= 1; it is {self.fusion_epochs}")

    def passes(self) -> dict[str, Pass]:
        """Phases I and II."""
        return {"phase1": Pass(self.epochs, self.batch_size), "phase2": Pass(self.fusion_epochs, self.batch_size)}

    def server_init(self, task: Task) -> Server:
        """w^0, the common initial weights, and γ̄ = 0."""
        w = task.common_model(self.title).initial
        return Server(begin(w, self.exclude), zeros_like(w), {})

    def client_init(self, task: Task, client: ClientInfo) -> Client:
        """γ_i = 0, and p_i = 0 or w^0."""
        model, zero = task.model(client), zeros_like(task.model(client).initial)
        # of normalizations w + p would have twice the scale that they begin with
        return Client(zero, zero if self.personal_start == "zero" else zero_normalizations(model.initial, model.module))

    def download(self, server: Server, client: ClientInfo) -> Weights:
        """w^t."""
        del client
        return server.w.weights

    def local_update(self, state: Client, down: Weights, view: ClientView) -> tuple[Client, Params]:
        """Both phases, from the same w^t."""
        model, eta_g, mu, norm, w = view.model, self.eta_g, self.mu, self.private, unpack(down, view.model.initial)

        def loss(theta: Params, batch: Batch) -> Tensor:
            return task_loss(model.apply(theta, batch.x), batch)

        def fused(p: Params, batch: Batch, fixed: Params) -> Tensor:
            return task_loss(model.apply(add(fixed, p), batch.x), batch)

        def threshold(p: Params, lr: float, _: Params) -> Params:
            return map(lambda t: soft(t, lr * mu), p) if norm == "sparse" else prox_in_step(p, lr * mu, norm, ())

        end = view.train(loss, w, "phase1", self.optimizer, pull=Pull(1 / eta_g, towards=w, along=state.gamma))
        p = view.train(fused, state.p, "phase2", self.optimizer, given=(w,), prox=threshold)
        return Client(add(state.gamma, sub(w, end), 1 / eta_g), p), end

    def server_update(self, server: Server, replies: Iterable[Reply[Params]], view: ServerView) -> Server:
        """γ̄ moves by a share 1/M a reply; w leaves the mean of the replies by η_g γ̄ and loses rank."""
        w = server.w.dense(view.task.common_model(self.title).initial)
        average, clients = Mean[Params](), [str(c.id) for c in view.task.clients]
        each = {i: server.each.get(i, zeros_like(w)) for i in clients if not self.memory_efficient}
        for reply in replies:
            average.add(reply.upload)
            if (i := str(reply.client.id)) in each:
                each[i] = add(each[i], sub(w, reply.upload), 1 / self.eta_g)
        gamma = add(server.gamma, sub(w, average.value), average.count / len(clients) / self.eta_g)
        if not self.memory_efficient:
            gamma = mean(each.values(), [1.0] * len(clients))
        new = prox(add(average.value, gamma, -self.eta_g), self.lam * self.eta_g, self.shared, self.exclude)
        warn_if_dead(self.title, server.w, new, view.round)
        return Server(new, gamma, each)

    def personal(self, state: Client, down: Weights, view: ClientView) -> Params:
        """The mixed model w + p_i."""
        return add(unpack(down, view.model.initial), state.p)

    def predictor(self, state: Client, down: Weights, view: ClientView) -> dict[str, Predictor]:
        """The mixed model, and w alone."""
        model, w = view.model, unpack(down, view.model.initial)
        mixed = add(w, state.p)
        return {"mixed": lambda x: model.apply(mixed, x), "gkr": lambda x: model.apply(w, x)}

    def parts(self, state: Client, down: Weights, view: ClientView) -> dict[str, tuple[Weights, ...]]:
        """Of the mixed model w and p_i; of the other w alone."""
        del view
        return {"mixed": (down, part_of(state.p, self.private)), "gkr": (down,)}

    def ranks(self, server: Server) -> dict[str, int]:
        """Of w."""
        return server.w.ranks
