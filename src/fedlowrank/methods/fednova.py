"""FedNova: tackling the objective inconsistency problem in heterogeneous federated optimization.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. NeurIPS 2020. arXiv:2007.07481, section 5.

    server, each round t:   send x^t to each client k of the sample S_t                 download
    client k:               x_k ← τ_k steps of SGD on F_k from x^t
                            send d_k = (x_k - x^t) / ‖a_k‖₁                             local_update
    server:                 p_k = n_k / Σ_{k∈S_t} n_k,  τ_eff = Σ_{k∈S_t} p_k ‖a_k‖₁
                            x^{t+1} = x^t + τ_eff Σ_{k∈S_t} p_k d_k                     server_update

a_k holds the weight that x_k - x^t gives to the gradient of each local step, in units of the learning rate.
For a step with s steps left, itself included, the weight is

    plain SGD               1                          ‖a_k‖₁ = τ_k
    momentum ρ              (1 - ρ^s) / (1 - ρ)
    proximal term μ         (1 - η μ)^(s-1)            with η the learning rate of the round

so d_k is a mean of gradients however many steps a client takes, and a client with more examples does not count twice.
If all clients take the same number of steps, the result is that of FedAvg. With μ > 0 the server takes τ_eff = Σ
p_k τ_k, as the authors' code does. Weight decay is part of the gradient, and so is clipping with μ = 0; it would scale
the proximal term, too. Optimizers for which the paper gives no a_k are refused: AdamW, Nesterov's momentum, schedules
within a round, and a proximal term beside momentum, clipping or groups of other learning rates.

Choices: the server computes τ_k from n_k, E and B, which it knows, so that only d_k is sent. It cannot do so where
n_k is private (differential privacy, secure sums) or replaced by a weight (robust rules): there, set ``steps``, so
that τ_k is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, ClientView, Mean, Method, ProximalTerm, ServerView, Task, Update
from ..core.errors import ConfigError
from ..core.learning.batch_losses import supervised_loss
from ..core.learning.optimizer import SGD, AdamW
from ..core.tree import Params, add, cast_like, map_leaves, sub, widen, zeros_like


def weight_of_gradients(steps: int, momentum: float = 0.0, shrinkage: float = 0.0) -> float:
    """Compute ‖a‖₁, the sum of the weights of all local gradients, in units of the learning rate.

    Args:
        steps: number of local steps, τ ≥ 1.
        momentum: momentum factor, ρ in [0, 1).
        shrinkage: product η μ ≥ 0 of learning rate and proximal weight; 0 if there is momentum.
    """
    remaining_steps = range(1, steps + 1)
    return sum((1 - momentum**s) / (1 - momentum) * abs(1 - shrinkage) ** (s - 1) for s in remaining_steps)


@dataclass(frozen=True)
class FedNova(Method[Params, None, Params, Params]):
    """Averaging of updates that are normalized by the number and kind of the local steps behind them.

    Use it where clients hold very different numbers of examples, so that some take many more local steps, and
    the global model should minimize the mean loss over all examples all the same.

    Attributes:
        optimizer: optimizer of local training: SGD, with or without momentum.
        mu: μ ≥ 0, strength of a proximal term as in FedProx; 0 for none.
    """

    mu: float = 0.0

    title = "FedNova"
    citation = "Wang et al., NeurIPS 2020, arXiv:2007.07481"
    keep_refusal = "its weights of gradients are those of a momentum that begins at 0 in every round"
    one_model = True
    bounds = {"mu": ">= 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        set_options = [
            n for n in ("nesterov", "momentum", "groups", "clip") if getattr(self.optimizer, n, None)
        ]
        conflicts = [n for n in set_options if n == "nesterov" or self.mu]
        conflicts += ["kind = 'adamw'"] * isinstance(self.optimizer, AdamW)
        conflicts += ["local_schedule"] * (not self.optimizer.local_schedule.is_constant)
        if conflicts:
            raise ConfigError(
                f"{self.title} divides an update by the weights of its gradients, which the paper gives for SGD "
                f"with momentum and mu = 0, and for plain SGD with mu > 0; but mu = {self.mu} and optimizer "
                f"has {', '.join(conflicts)}. Use one of the two; "
                "weight decay and a schedule over rounds are fine, and clip with mu = 0"
            )

    @property
    def _momentum(self) -> float:
        """The momentum factor ρ."""
        return self.optimizer.momentum if isinstance(self.optimizer, SGD) else 0.0

    def server_init(self, task: Task) -> Params:
        """x^0, the common initial weights."""
        return task.common_model(self.title).initial

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """SGD on F_k(x) + μ/2 ‖x - x^t‖², and the update divided by ‖a_k‖₁."""
        proximal_term = ProximalTerm(self.mu, center=down)
        params = view.train(
            supervised_loss(view.model), down, "local", self.optimizer, proximal_term=proximal_term
        )
        shrinkage = self.mu * self.optimizer.learning_rate(view.round)
        weight = weight_of_gradients(view.steps("local"), self._momentum, shrinkage)
        return None, cast_like(map_leaves(lambda t: t / weight, sub(widen(params), down)), down)

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean[Params]:
        """d_k, weighted by n_k."""
        return Mean(widen(upload), client.example_count)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """A step of length τ_eff along the mean of d_k."""
        sizes = [client.example_count for client in view.replied] or [1]
        steps = [self.local_passes()["local"].steps_over(n) for n in sizes]
        weights = [weight_of_gradients(s, self._momentum) for s in steps]
        # with equal τ no example counts are needed, and the result keeps the same bits over the network
        effective_steps = weights[0]
        if len(set(weights)) > 1:
            effective_steps = sum(n * w for n, w in zip(sizes, weights, strict=True)) / sum(sizes)
        return cast_like(add(server, total, effective_steps), server)

    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        """The normalized update d_k itself, relative to zeros."""
        return Update(zeros_like(down))
