"""APFL: adaptive personalized federated learning.

Y. Deng, M. M. Kamani, M. Mahdavi. 2020. arXiv:2003.13461, Algorithm 1, with adaptive α.

    server, each round t:   send w^t to each client k of the sample S_t                 download
    client k:               from w ← w^t and its own v, a: E epochs of simultaneous steps,
                            with v̄ = a v + (1 - a) w,
                              w ← w - η ∇F_k(w)
                              v ← v - η a ∇F_k(v̄)
                              a ← clip(a - η ⟨v - w, ∇F_k(v̄)⟩, 0, 1)
                            keep v and a; send w                                        local_update
    server:                 w^{t+1} = Σ_{k∈S_t} n_k w_k / Σ_{k∈S_t} n_k                 server_update
    inference:              v̄ = a v + (1 - a) w^{t+1}                                   client_model

All three gradients of a step are taken on the same batch at the same old w, v and a. They are those of the one loss
F_k(w) + F_k(v̄) with w held constant inside v̄, so w is FedAvg's model whatever v and a. a is learnt against the
client's concurrent local w and used with the global w received, never with the w_k that it sent. v is never
replaced by the mixture.

Choices: a adapts at every step, with the learning rate of the models unless ``optimizer.groups`` gives ``a`` its own;
``adaptive = false`` holds it at ``alpha``. AdamW is refused where a adapts: v and w begin equal, so that the gradient of
a is 0 up to rounding, and AdamW would divide it by its own size and move a by whole learning rates. Weight decay acts
on w and v but not on a; clipping bounds the gradient of all three together.

Differences from the paper: w is averaged with weights n_k, as FedAvg, where the paper takes the plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.errors import ConfigError
from ..core.learning.batch_losses import task_loss
from ..core.learning.optimizer import AdamW, Group
from ..core.tree import Params, map_leaves, tree_dataclass, widen


@tree_dataclass
class ClientState:
    """The state of a client: its model v, and the share ``a [1]`` of v in the mixture, float32 for half precision."""

    v: Params
    a: Tensor


@tree_dataclass
class Joint:
    """The parameters that are trained together: the local copy w of the global model, v, and a."""

    w: Params
    v: Params
    a: Tensor


def mixture(a: Tensor, v: Params, w: Params) -> Params:
    """The mixture a v + (1 - a) w, exact at both ends."""
    # reshape: a has one dimension, and a parameter may have none
    return map_leaves(lambda p, q: (a * p + (1 - a) * q).to(p.dtype).reshape(p.shape), v, w)


@dataclass(frozen=True)
class APFL(Method[Params, ClientState, Params, Params]):
    """A mixture of a local and the global model, in proportions that every client learns.

    Attributes:
        alpha: initial a in [0, 1], the share of the local model in the mixture.
        adaptive: whether a is learnt, by SGD alone; otherwise it stays at ``alpha``.
    """

    alpha: float = 0.5
    adaptive: bool = True

    title = "APFL"
    citation = "Deng et al. 2020, arXiv:2003.13461"
    bounds = {"alpha": ">= 0 and <= 1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive and isinstance(self.optimizer, AdamW):
            raise ConfigError(
                f"{self.title} with adaptive = true learns the share a of the local model by gradients that are as small as "
                "v and w are close, and optimizer.kind = 'adamw' makes a whole step of each, rounding errors included. Use "
                "optimizer.kind = 'sgd', with or without momentum, or set adaptive = false"
            )
        group = self.optimizer.groups.get("a", Group())
        if group.weight_decay or (group.lr is not None and not self.adaptive):
            raise ConfigError(
                f"{self.title}: the share a of the local model has no weight decay, and with adaptive = false no learning rate: "
                "leave them out of optimizer.groups.a"
            )

    def server_init(self, task: Task) -> Params:
        """w^0, the common initial weights."""
        return task.common_model(self.title).initial

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """The local model v starts at the common initial weights."""
        initial = task.model(client).initial
        # one element and not a scalar: the vectorized engine flattens the dimensions after the client axis
        return ClientState(initial, widen(next(iter(initial.values()))).new_full((1,), self.alpha))

    def local_update(self, state: ClientState, down: Params, view: ClientView) -> tuple[ClientState, Params]:
        """Simultaneous SGD on w, v and a."""
        model, adaptive, groups = view.model, self.adaptive, self.optimizer.groups

        def loss(models: Joint, batch: Batch) -> Tensor:
            w = map_leaves(Tensor.detach, models.w)
            mixed_model = mixture(models.a if adaptive else models.a.detach(), models.v, w)
            mixed_scores, global_scores = model.apply(mixed_model, batch.x), model.apply(models.w, batch.x)
            return task_loss(mixed_scores, batch) + task_loss(global_scores, batch)

        def clip_share(models: Joint, _: float) -> Joint:
            return replace(models, a=models.a.clamp(0, 1))

        a_group = {"a": replace(groups.get("a", Group()), weight_decay=0.0)}
        optimizer = replace(self.optimizer, groups={**groups, **a_group})
        joint = view.train(loss, Joint(down, state.v, state.a), "local", optimizer, prox=clip_share)
        return ClientState(joint.v, joint.a), joint.w

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies, weighted by n_k."""
        return total

    def client_model(self, state: ClientState, down: Params, view: ClientView) -> ClientModel:
        """The mixture v̄ of v and the global w received."""
        return ClientModel(mixture(state.a, state.v, down))
