"""FedAdagrad, FedAdam and FedYogi: adaptive federated optimization.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan. ICLR 2021.
arXiv:2003.00295, Algorithm 2.

    server, each round t:   send x_t to each client k of the sample S_t                 download
    client k:               x_k ← SGD on F_k from x_t, E epochs; send x_k               local_update
    server:                 Δ = Σ_{k∈S_t} n_k (x_k - x_t) / Σ_{k∈S_t} n_k
                            m ← β₁ m + (1 - β₁) Δ
                            v ← v + Δ²                              (FedAdagrad)
                            v ← β₂ v + (1 - β₂) Δ²                  (FedAdam)
                            v ← v - (1 - β₂) Δ² sign(v - Δ²)        (FedYogi)
                            x_{t+1} = x_t + η m / (√v + τ)                              server_update

All operations are elementwise. m begins at zero and v at τ², the smallest value that the paper allows; there is no
bias correction. τ is added outside the root. Δ points from the old model to the clients' mean, hence the
plus in the last line.

Choices: the mean is weighted by n_k, as in the paper's experiments, where Algorithm 2 writes a plain one (``weighting
= "uniform"``). β₁ = 0.9 and β₂ = 0.99 for FedAdam and FedYogi, and β₁ = 0 for FedAdagrad, as in the paper; it tunes η
and τ for each data set. BatchNorm is treated as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.contract import ClientInfo, Method, ServerView, Task
from ..core.tree import Params, add, cast_like, map_leaves, sub, tree_dataclass, widen, zeros_like
from .shared.averaging import Weighting, average_models, train_model

CITATION = "Reddi et al., ICLR 2021, arXiv:2003.00295"


@tree_dataclass
class ServerState:
    """The model x, the running mean m of its updates Δ, and v of their squares.

    Both means are in float32 for parameters of half precision.
    """

    model: Params
    m: Params
    v: Params


def initial_server(method: FedAdagrad | FedAdam | FedYogi, task: Task) -> ServerState:
    """The common initial weights, m = 0 and v = τ²."""
    model = task.common_model(method.title).initial
    wide_params = widen(model)
    return ServerState(
        model, zeros_like(wide_params), map_leaves(lambda p: torch.full_like(p, method.tau**2), wide_params)
    )


def send_model(method: FedAdagrad | FedAdam | FedYogi, server: ServerState, client: ClientInfo) -> Params:
    """The model x_t."""
    return server.model


def adaptive_step(
    method: FedAdagrad | FedAdam | FedYogi, server: ServerState, delta: Params, v: Params
) -> ServerState:
    """Compute the server's next state: x + η m / (√v + τ) with the next m.

    Args:
        method: method that sets β₁, η and τ.
        server: state of the server before the round.
        delta: Δ, the clients' mean minus x.
        v: next v, after the method's own update.
    """
    beta1, tau = method.beta1, method.tau
    m = map_leaves(lambda m, d: beta1 * m + (1 - beta1) * d, server.m, delta)
    direction = map_leaves(lambda m, v: m / (v.sqrt() + tau), m, v)
    return ServerState(cast_like(add(server.model, direction, method.server_lr), server.model), m, v)


@dataclass(frozen=True)
class FedAdagrad(Method[ServerState, None, Params, Params]):
    """FedAvg whose server steps by Adagrad: a parameter steps less, the larger its squared updates sum up.

    Use it where some parameters are rarely trained, such as rows of an embedding, or updates are sparse.

    Attributes:
        server_lr: η > 0, learning rate of the server.
        beta1: β₁ in [0, 1), decay of the running mean of updates; 0 is Adagrad without momentum.
        tau: τ > 0, constant added to √v; the smaller it is, the more adaptive the step.
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    server_lr: float = 0.1
    beta1: float = 0.0
    tau: float = 0.001
    weighting: Weighting = "examples"

    title = "FedAdagrad"
    citation = CITATION
    one_model = True
    bounds = {"server_lr": "> 0", "beta1": ">= 0 and < 1", "tau": "> 0"}

    server_init = initial_server
    download = send_model
    local_update = train_model
    contribution = average_models

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """A step of Adagrad: v <- v + Δ²."""
        delta = sub(total, server.model)
        v = map_leaves(lambda v, d: v + d.square(), server.v, delta)
        return adaptive_step(self, server, delta, v)


@dataclass(frozen=True)
class FedAdam(Method[ServerState, None, Params, Params]):
    """FedAvg whose server steps by Adam: parameters step less, the larger the mean of their squared updates.

    Use it where FedAvg is slow because parameters move on different scales, as in language models.

    Attributes:
        server_lr: η > 0, learning rate of the server.
        beta1: β₁ in [0, 1), decay of the running mean of updates.
        beta2: β₂ in [0, 1), decay of the running mean of squared updates.
        tau: τ > 0, constant added to √v; the smaller it is, the more adaptive the step.
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001
    weighting: Weighting = "examples"

    title = "FedAdam"
    citation = CITATION
    one_model = True
    bounds = {"server_lr": "> 0", "beta1": ">= 0 and < 1", "beta2": ">= 0 and < 1", "tau": "> 0"}

    server_init = initial_server
    download = send_model
    local_update = train_model
    contribution = average_models

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """A step of Adam: v <- β₂ v + (1 - β₂) Δ²."""
        delta, beta2 = sub(total, server.model), self.beta2
        v = map_leaves(lambda v, d: beta2 * v + (1 - beta2) * d.square(), server.v, delta)
        return adaptive_step(self, server, delta, v)


@dataclass(frozen=True)
class FedYogi(Method[ServerState, None, Params, Params]):
    """FedAvg whose server steps by Yogi: as FedAdam, but v moves by at most (1 - β₂) Δ² in a round.

    Use it instead of FedAdam where single rounds with small updates let FedAdam's step grow too fast.

    Attributes:
        server_lr: η > 0, learning rate of the server.
        beta1: β₁ in [0, 1), decay of the running mean of updates.
        beta2: β₂ in [0, 1); 1 - β₂ is the share of Δ² by which v moves towards it.
        tau: τ > 0, constant added to √v; the smaller it is, the more adaptive the step.
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001
    weighting: Weighting = "examples"

    title = "FedYogi"
    citation = CITATION
    one_model = True
    bounds = {"server_lr": "> 0", "beta1": ">= 0 and < 1", "beta2": ">= 0 and < 1", "tau": "> 0"}

    server_init = initial_server
    download = send_model
    local_update = train_model
    contribution = average_models

    def server_update(self, server: ServerState, total: Params, view: ServerView) -> ServerState:
        """A step of Yogi: v <- v - (1 - β₂) Δ² sign(v - Δ²)."""
        delta, beta2 = sub(total, server.model), self.beta2
        squares = map_leaves(torch.square, delta)
        v = map_leaves(lambda v, s: v - (1 - beta2) * s * torch.sign(v - s), server.v, squares)
        return adaptive_step(self, server, delta, v)
