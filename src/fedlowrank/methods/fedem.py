"""FedEM: federated multi-task learning under a mixture of distributions.

O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal. NeurIPS 2021. arXiv:2108.10252, Algorithm 1 (its long
form, 2).

    server, each round t:   send θ_1, ..., θ_C to each client k of the sample S_t           download
    client k, E-step:       q_k(z_i = c) ∝ π_kc exp(-l(h_{θ_c}(x_i), y_i)) for every i      shares_of_examples
              M-step:       π_kc ← Σ_i q_k(z_i = c) / n_k                                   update_mixture
                            θ_kc ← SGD on Σ_i q_k(z_i = c) l(h_{θ_kc}(x_i), y_i) / n_k
                            in E epochs; keep π_k; send every θ_kc                          local_update
    server:                 θ_c ← Σ_k n_k θ_kc / Σ_k n_k                                    server_update
    inference:              Σ_c π_kc softmax(h_{θ_c}(x)); of a regression Σ_c π_kc h_{θ_c}(x) predictor

The E-step takes the models received and π_k of the round before. Its q stays fixed during local training: every
batch recomputes the q of its examples from those models in inference mode, which costs C more forward passes.
Scores are the logarithm of the mixture. With a loss of the user's own, whose scores may be no classes, outputs are
mixed as in a regression. A client without π_k begins at even shares; a client that never took part takes
``unseen_steps`` EM steps on π_k alone, on its training data, before it infers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..core.contract import Batch, ClientModel, ClientView, Method, Model, ServerView, Task
from ..core.errors import TaskError
from ..core.learning.batch_losses import mean_loss
from ..core.learning.losses import class_axis
from ..core.tree import Params
from .shared.clusters import compute_model_losses, describe_draws, draw_models, zero_router_logits
from .shared.fixed_models import in_eval_mode


def shares_of_examples(model: Model, models: Params, pi: Tensor, batch: Batch) -> Tensor:
    """The q ``[b, C]``: probability that each component generated each example."""
    return (pi.log() - compute_model_losses(model, models, batch)).softmax(-1)


def update_mixture(models: Params, pi: Tensor, view: ClientView) -> Tensor:
    """π ``[C]`` after one EM step with fixed models."""
    model = view.model

    def sum_shares(models: Params, batch: Batch, pi: Tensor) -> Tensor:
        return batch.sum(shares_of_examples(model, models, pi, batch))

    return view.sum_over_data(sum_shares, models, constants=(pi,)) / view.info.example_count


def _is_regression(task: Task, outputs: Tensor) -> bool:
    """Whether the outputs ``[C, b, ...]`` are those of a regression; texts have scores ``[C, b, T, V]`` and no classes."""
    if task.target is not None:
        return task.target.is_floating_point()
    return task.classes == 0 and outputs.ndim == 3


def _even_shares(models: Params) -> Tensor:
    """The initial π ``[C]``; shares are statistics, so they are in float32 even for models in half precision."""
    return zero_router_logits(models).softmax(0)


@dataclass(frozen=True)
class FedEM(Method[Params, Tensor | None, Params, Params]):
    """C common component models; every client has its own shares of them.

    Attributes:
        clusters: C, number of components.
        unseen_steps: number of EM steps on the shares of a client that never took part, before it infers; 0 leaves
            them even.
    """

    clusters: int = 4
    unseen_steps: int = 10

    title = "FedEM"
    citation = "Marfoq et al., NeurIPS 2021, arXiv:2108.10252"
    bounds = {"clusters": ">= 1", "unseen_steps": ">= 0"}
    zero_step_settings: ClassVar[dict[str, int]] = {
        "unseen_steps": 1
    }  # the EM step of a round moves the shares at any learning rate

    def remarks(self, task: Task) -> list[str]:
        """Warn of models that do not begin at the weights of the user's module."""
        return describe_draws(self.title, task, self.clusters)

    def server_init(self, task: Task) -> Params:
        """C draws of the initial weights ``[C, ...]``; raises TaskError for a loss that couples examples."""
        if task.loss.couples:
            raise TaskError(
                f"{self.title} weighs each example by itself, and loss {task.loss.kind!r} compares those of a batch; choose "
                "another method"
            )
        return draw_models(self.title, task, self.clusters)

    def local_update(
        self, state: Tensor | None, down: Params, view: ClientView
    ) -> tuple[Tensor | None, Params]:
        """The E-step, then the M-step of π and of the components."""
        pi, model = _even_shares(down) if state is None else state, view.model

        def loss(models: Params, batch: Batch, received_models: Params, pi: Tensor) -> Tensor:
            with in_eval_mode(model):
                q = shares_of_examples(model, received_models, pi, batch)
            return mean_loss((q * compute_model_losses(model, models, batch)).sum(-1), batch)

        return update_mixture(down, pi, view), view.train(
            loss, down, "local", self.optimizer, constants=(down, pi)
        )

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of each component over the replies, weighted by n_k and not by the shares."""
        return total

    def client_model(self, state: Tensor | None, down: Params, view: ClientView) -> ClientModel:
        """The mixture; for export the component with the largest share, which is not the mixture."""
        pi = self._shares(state, down, view)
        model, task = view.model, view.task
        components = [{n: t[c] for n, t in down.items()} for c in range(len(pi))]

        def predict(x: Any) -> Tensor:
            # [b, C, ...]
            outputs = torch.stack([model.apply(component, x) for component in components], 1)
            shares = pi.to(outputs).reshape(-1, *[1] * (outputs.ndim - 2))
            if task.target is not None and task.loss.is_binary(task.target):
                # log-odds of the mixture of probabilities
                yes, no = (
                    (functional.logsigmoid(z) + shares.log()).logsumexp(1) for z in (outputs, -outputs)
                )
                return yes - no
            if task.loss.is_preference:
                return task.loss.mix_preferences(outputs, pi.to(outputs).log())
            # only a function of the user's own knows what its scores mean
            if _is_regression(task, outputs) or task.loss.is_custom:
                return (outputs * shares).sum(1)
            axis = class_axis(outputs[:, 0]) + 1
            return (outputs.log_softmax(axis) + shares.log()).logsumexp(1)

        return ClientModel(lambda: components[int(pi.argmax())], {"personal": predict}, routes=pi)

    def _shares(self, state: Tensor | None, down: Params, view: ClientView) -> Tensor:
        """The shares π_k; a client that never took part computes them by EM steps."""
        if state is not None:
            return state
        pi = _even_shares(down)
        for _ in range(self.unseen_steps):
            pi = update_mixture(down, pi, view)
        return pi
