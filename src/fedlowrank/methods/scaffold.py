"""SCAFFOLD: stochastic controlled averaging for federated learning.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. ICML 2020. arXiv:1910.06378,
Algorithm 1.

    server, each round t:   send x and c to each client k of the sample S               download
    client k:               from y ← x, τ steps of y ← y - η (g(y) - c_k + c)
                            c_k⁺ = c_k - c + (x - y) / (τ η)               (option II)
                            send y - x and c_k⁺ - c_k; keep c_k⁺                        local_update
    server:                 x ← x + η_g mean_S (y - x)
                            c ← c + |S|/K mean_S (c_k⁺ - c_k)                           server_update

K is the number of all clients that can train (those of ``run.unseen`` never do). All control variates start at zero, so
that c is the mean of all K clients' c_k in every round, also of those that were not sampled. τ is the number of
steps of the client and η the learning rate of the round; with a schedule within the round, τη is the sum of the
learning rates of the steps, and the mean is weighted by them. (x - y)/(τη) is the mean of the directions taken, so
c_k⁺ is the mean gradient of the round only if a step is η times a gradient: momentum, AdamW, groups of other rates
and clipping are refused. Weight decay is part of the gradient: the objective is F_k + wd/2 ‖y‖², and c_k holds the
mean of ∇F_k(y) + wd y. Means are plain, as in the paper.

Choices: a round with learning rate 0 carries no information about the gradients and leaves every c_k as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Mean,
    Method,
    ProximalTerm,
    ServerView,
    Task,
    Update,
)
from ..core.errors import ConfigError
from ..core.learning.batch_losses import supervised_loss
from ..core.learning.optimizer import AdamW
from ..core.tree import Params, add, cast_like, map_leaves, sub, tree_dataclass, widen, zeros_like


@tree_dataclass
class ControlledModel:
    """A model and its control variate: x and c on the way down, y - x and c_k⁺ - c_k on the way up.

    Control variates are in float32 for parameters in half precision: a rounding error of one round would remain in
    all following rounds.
    """

    model: Params
    control: Params


@dataclass(frozen=True)
class SCAFFOLD(Method[ControlledModel, Params, ControlledModel, ControlledModel]):
    """Averaging with a correction of every local step by the difference of global and local mean gradient.

    Attributes:
        server_lr: η_g > 0, step of the server along the mean of the replies.
    """

    server_lr: float = 1.0

    title = "SCAFFOLD"
    citation = "Karimireddy et al., ICML 2020, arXiv:1910.06378"
    one_model = True
    bounds = {"server_lr": "> 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        conflicts = [n for n in ("momentum", "groups", "clip") if getattr(self.optimizer, n, None)]
        conflicts += ["kind = 'adamw'"] * isinstance(self.optimizer, AdamW)
        if conflicts:
            raise ConfigError(
                f"{self.title} reads a client's mean gradient off the way it went, (x - y) / (sum of lr), which "
                f"is right only if every step is lr times a gradient; but optimizer has {', '.join(conflicts)}. "
                "Use plain SGD; weight decay and schedules are fine"
            )

    def server_init(self, task: Task) -> ControlledModel:
        """The common initial weights, and c = 0."""
        x = task.common_model(self.title).initial
        return ControlledModel(x, zeros_like(widen(x)))

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """The control variate c_k is 0."""
        return zeros_like(widen(task.model(client).initial))

    def local_update(
        self, state: Params, down: ControlledModel, view: ClientView
    ) -> tuple[Params, ControlledModel]:
        """Corrected SGD, then option II."""
        correction = ProximalTerm(linear=sub(state, down.control))
        y = view.train(
            supervised_loss(view.model), down.model, "local", self.optimizer, proximal_term=correction
        )
        total_rate = self.optimizer.total_rate(view.round, view.steps("local"))
        if total_rate == 0:
            return state, ControlledModel(sub(y, down.model), zeros_like(state))
        # the client adds the change that it sends, so that both sides have the same sum
        change = map_leaves(lambda x, end, c: (x - end) / total_rate - c, widen(down.model), y, down.control)
        upload = ControlledModel(sub(y, down.model), change)
        return self.follow_upload(state, state, down, upload, view), upload

    def follow_upload(
        self, before: Params, after: Params, down: ControlledModel, upload: ControlledModel, view: ClientView
    ) -> Params:
        """Compute c_k⁺ = c_k + the change as it was sent, so that c stays the mean of all c_k."""
        return add(before, upload.control)

    def contribution(
        self, server: ControlledModel, upload: ControlledModel, client: ClientInfo
    ) -> Mean[ControlledModel]:
        """Both differences, all clients with the same weight."""
        return Mean(widen(upload))

    def server_update(
        self, server: ControlledModel, total: ControlledModel, view: ServerView
    ) -> ControlledModel:
        """A step along the mean; c moves in proportion to the share of clients that replied."""
        model = cast_like(add(server.model, total.model, self.server_lr), server.model)
        return ControlledModel(model, add(server.control, total.control, view.share))

    def describe_update(self, down: ControlledModel, client: ClientInfo, task: Task) -> Update:
        """Both differences themselves, each relative to zeros."""
        return Update(zeros_like(down))

    def client_model(self, state: Params, down: ControlledModel, view: ClientView) -> ClientModel:
        """The global model x."""
        return ClientModel(down.model)
