"""FedBABU: towards enhanced representation for federated image classification.

J. Oh, S. Kim, S.-Y. Yun. ICLR 2022. arXiv:2106.06042, Algorithm 1 (federated averaging with body aggregation
and body update).

    server, each round t:   send the body φ^t to each client k of the sample S_t        download
    client k:               φ_k ← SGD on F_k(·, h) from φ^t, E epochs, the head h frozen;
                            send φ_k                                                    local_update
    server:                 φ^{t+1} = Σ_{k∈S_t} n_k φ_k / Σ_{k∈S_t} n_k                 server_update
    inference:              SGD on F_k from (φ, h), both, on the *training* data        client_model
                            (φ, h) as it is                                             client_model

h is the head of the common initial weights: random, never trained before the fine-tuning, and never sent. The
fine-tuned model is not kept: the fine-tuning starts from the common model at each evaluation. The default is that
of the paper's comparisons, five epochs of the whole model.

Choices: the fine-tuning uses the optimizer of the training unless ``fine_tuning_optimizer`` is given;
``fine_tuned_part = "head"`` or ``"body"`` trains that part alone, as in the paper's ablation. An evaluation costs
``fine_tuning_epochs`` of training for each client; evaluate rarely where that is expensive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.contract import ClientModel, ClientView, Method, Pass, ServerView
from ..core.learning.optimizer import Optimizer, refuse_keep
from ..core.tree import Params
from .shared.personal_head import initial_body, train_part


@dataclass(frozen=True)
class FedBABU(Method[Params, None, Params, Params]):
    """A common body, trained below a random head; each client fine-tunes the model before it infers.

    Use it where clients hold different classes and a personal model should take only a few epochs, also for a
    client that never took part.

    Attributes:
        epochs: number of epochs in which the body trains, with the head frozen.
        fine_tuning_epochs: number of epochs that a client trains on its own training data before it infers.
        fine_tuned_part: part of the model that the fine-tuning trains: the whole model, the head or the body.
        fine_tuning_optimizer: optimizer of the fine-tuning; None for the optimizer of the training.
    """

    fine_tuning_epochs: int = 5
    fine_tuned_part: Literal["whole", "head", "body"] = "whole"
    fine_tuning_optimizer: Optimizer | None = None

    title = "FedBABU"
    citation = "Oh et al., ICLR 2022, arXiv:2106.06042"
    bounds = {"fine_tuning_epochs": ">= 1"}

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "every fine-tuning begins afresh, so that an evaluation changes no later one"
        refuse_keep("fine_tuning_optimizer", self.fine_tuning_optimizer, self.title, reason)

    def passes(self) -> dict[str, Pass]:
        """Local training, and the fine-tuning before inference."""
        return {
            "body": self.main_pass,
            "fine_tuning": Pass(self.fine_tuning_epochs, self.batch_size),
        }

    server_init = initial_body

    def local_update(self, state: None, down: Params, view: ClientView) -> tuple[None, Params]:
        """SGD on the body below the frozen head."""
        model = view.model
        return None, train_part(down, model.head_of(model.initial), "body", self.optimizer, view)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the bodies, weighted by n_k."""
        return total

    def client_model(self, state: None, down: Params, view: ClientView) -> ClientModel:
        """The common model fine-tuned on the client's training data, and the common model."""
        model = view.model
        global_params = down | model.head_of(model.initial)
        trained_params = {"whole": global_params, "head": model.head_of(global_params), "body": down}[
            self.fine_tuned_part
        ]
        frozen_params = {n: p for n, p in global_params.items() if n not in trained_params}
        optimizer = self.fine_tuning_optimizer or self.optimizer
        tuned_params = frozen_params | train_part(
            trained_params, frozen_params, "fine_tuning", optimizer, view
        )
        return ClientModel(tuned_params, {"fine_tuned": tuned_params, "global": global_params})
