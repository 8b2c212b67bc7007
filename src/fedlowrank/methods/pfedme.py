"""pFedMe: personalized federated learning with Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen. NeurIPS 2020. arXiv:2006.08848, Algorithm 1.

    server, each round t:   send w^t to each client k of the sample S_t                         download
    client k:               from w ← w^t, in each of R local rounds, with a mini-batch D of its own,
                              from θ ← w, K steps of θ ← θ - α (∇f_k(θ; D) + λ (θ - w))
                              w ← w - η λ (w - θ)
                            keep θ; send w_k                                                    local_update
    server:                 w^{t+1} = (1 - β) w^t + β 1/|S_t| Σ_{k∈S_t} w_k                     server_update
    inference:              θ of the client's last round                                        client_model

λ (w - θ) is the gradient of the Moreau envelope F_k(w) = min_θ f_k(θ) + λ/2 ‖θ - w‖². A local round is therefore
one step of SGD on F_k with the learning rate η of ``optimizer``, where K inner steps on the same mini-batch
approximate the minimizer. A round takes the mini-batches of E epochs, or R mini-batches with ``local_rounds``. The
inner steps are stable where α (λ + L) < 2, with L the smoothness of f_k.

Choices: the inner steps begin at w, because the paper leaves their start open (the authors' code continues from the
θ of the last mini-batch). The personal model is θ(w_k), computed on one more mini-batch at the w_k that is sent; a
step of size 1/λ on the envelope leads there. All replies have the same weight, as in the paper; ``weighting =
"examples"`` weights them by n_k, as in the authors' code. That code adds a weight decay of 0.001 to the
inner steps; here there is none, and weight decay of ``optimizer`` acts on w. A client that never took part
infers with its initial model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.arguments.switch import refuse_unread_field
from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, Pass, ServerView, Task
from ..core.learning.batch_losses import gradient, supervised_loss
from ..core.learning.optimizer import SGD
from ..core.tree import Params, add, cast_like, map_leaves, square_distance, sub, widen
from .shared.averaging import Weighting, average_models


@dataclass(frozen=True)
class PFedMe(Method[Params, Params, Params, Params]):
    """A personal model near the global one, which takes steps on the Moreau envelope of the clients' losses.

    When to use: personal models from few examples each, where a step may cost K gradients; Ditto is the
    cheaper relative with the same penalty.

    Attributes:
        optimizer: optimizer of w; its learning rate is η.
        lam: λ > 0, strength of the penalty between θ and w.
        inner_steps: K, number of inner steps on each mini-batch.
        inner_lr: α ≥ 0, learning rate of the inner steps.
        local_rounds: R, number of mini-batches in a round; None for the mini-batches of ``epochs``.
        beta: β > 0, length of the server's step to the mean of the replies.
        weighting: weight of a reply in the mean: uniform, or the client's number of training examples n_k.
    """

    lam: float = 15.0
    inner_steps: int = 5
    inner_lr: float = 0.05
    local_rounds: int | None = None
    beta: float = 1.0
    weighting: Weighting = "uniform"

    title = "pFedMe"
    citation = "Dinh et al., NeurIPS 2020, arXiv:2006.08848"
    couples_examples = True
    bounds = {"lam": "> 0", "inner_steps": ">= 1", "inner_lr": ">= 0", "local_rounds": ">= 1", "beta": "> 0"}
    zero_step_settings = {"inner_lr": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_rounds is not None:
            condition = f"with {self.title}.local_rounds = {self.local_rounds}"
            refuse_unread_field(self, "epochs", self.title, condition, "leave local_rounds out")

    contribution = average_models  # w_k, all with the same weight, or weighted by n_k

    def passes(self) -> dict[str, Pass]:
        """Local rounds, and the mini-batch of the personal model."""
        local_pass = self.main_pass
        if self.local_rounds is not None:
            # an epoch has at least one mini-batch, so R epochs give R mini-batches at a client of any size
            local_pass = Pass(self.local_rounds, self.batch_size, steps=self.local_rounds)
        return {"local": local_pass, "personal": Pass(1, self.batch_size, steps=1)}

    def server_init(self, task: Task) -> Params:
        """w^0, the common initial weights."""
        return task.common_model(self.title).initial

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """θ starts at the common initial weights."""
        return task.model(client).initial

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """SGD on the envelope, then θ at the last w."""
        risk, lam, lr, steps = supervised_loss(view.model), self.lam, self.inner_lr, self.inner_steps

        def envelope(w: Params, batch: Batch) -> Tensor:
            center = theta = map_leaves(torch.detach, w)
            for _ in range(steps):
                slope = add(gradient(risk, theta, batch), sub(theta, center), lam)
                theta = add(theta, slope, -lr)
            return risk(theta, batch) + lam / 2 * square_distance(w, theta)

        w = view.train(envelope, down, "local", self.optimizer)
        return view.train(envelope, w, "personal", SGD(lr=1 / lam)), w

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """A step of size β to the mean of the replies."""
        new_model = map_leaves(lambda w, mean: (1 - self.beta) * w + self.beta * mean, widen(server), total)
        return cast_like(new_model, server)

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The personal model θ, and w as a second series."""
        return ClientModel(state, {"personal": state, "global": down})
