"""FedRoD: on bridging generic and personalized federated learning for image classification.

H.-Y. Chen, W.-L. Chao. ICLR 2022. arXiv:2107.00778, Algorithm 1, linear personalized head.

    server, each round t:   send the model θ^t = (φ^t, g^t), body and generic head,
                            to each client k of the sample S_t                                  download
    client k:               from θ ← θ^t and its own head h_k, E epochs of simultaneous SGD on
                              θ:    CE(g(φ(x)) + γ log n_{k,c}, y), the balanced softmax loss
                              h_k:  CE(g(φ(x)) + h_k(φ(x)), y), φ and g held constant
                            keep h_k; send θ_k                                                  local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                         server_update
    inference:              g^{t+1}(φ^{t+1}(x)) + h_k(φ^{t+1}(x))                               client_model

n_{k,c} is the number of the client's training examples of class c. The score of a class that it does not have, such as
an output beyond the classes, becomes -∞, so that its loss moves no weight of that class. γ = 1 is balanced softmax; γ =
0 is cross-entropy, and θ is then FedAvg's model, unless ``clip`` bounds the gradient, which is that of θ and h_k
together. Only training adds γ log n_{k,c}. The gradient of the second loss reaches h_k alone.

Choices: h_k begins at zero, so that a client that never took part infers by the generic model. The generic
head must be one linear layer: scores are then linear in its parameters, and the personal model is θ with g + h_k in
the place of g. The paper's other variant, in which a hypernetwork computes h_k from class frequencies, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from ..core.contract import Batch, ClientInfo, ClientModel, ClientView, Method, ServerView, Task
from ..core.errors import TaskError
from ..core.learning.batch_losses import task_loss
from ..core.tree import Params, add, map_leaves, numel, tree_dataclass, wide_type, zeros_like
from .shared.class_statistics import check_class_scores


@tree_dataclass
class Joint:
    """The parameters that are trained together: the generic model θ and the personal head h_k."""

    model: Params
    personal_head: Params


@dataclass(frozen=True)
class FedRoD(Method[Params, Params, Params, Params]):
    """A generic model trained by a balanced loss, and a personal head added to its own.

    When to use: clients have different shares of the classes, and both a good global model and good personal
    models are wanted.

    Attributes:
        gamma: γ ≥ 0, exponent of the class counts in the balanced softmax.
    """

    gamma: float = 1.0

    title = "FedRoD"
    citation = "Chen & Chao, ICLR 2022, arXiv:2107.00778"
    bounds = {"gamma": ">= 0"}
    needs_classes = True

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights."""
        if task.loss.label_smoothing:
            raise TaskError(
                f"{self.title} gives a class that a client lacks the score -∞, and label smoothing asks for a part of "
                "every class. Leave loss.label_smoothing out, or choose another method"
            )
        check_class_scores(self.title, task)
        model = task.common_model(self.title)
        layers = model.head_layers()
        head = list(model.module.get_submodule(str(model.head_name)).parameters())
        if len(layers) != 1 or numel(head) != numel(list(layers[0].parameters())):
            raise TaskError(
                f"{self.title} adds a personal head to the generic one, so the head must be one linear layer; "
                f"the head {model.head_name!r} of model {model.name} is not. Let it begin "
                "at the last linear layer (model.split, or head=... with a model of your own)."
            )
        return model.initial

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        """The personal head h_k is 0."""
        model = task.model(client)
        return zeros_like(model.head_of(model.initial))

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """Simultaneous SGD on both losses; neither has a gradient for the other's parameters."""
        model = view.model
        # a model may have more outputs than there are classes
        outputs = model.head_layers()[0].out_features

        def count_classes(_: Params, batch: Batch) -> Tensor:
            return batch.sum(functional.one_hot(batch.y, outputs).float())

        def loss(heads: Joint, batch: Batch, offset: Tensor) -> Tensor:
            z = model.represent(heads.model, batch.x)
            frozen_head = map_leaves(Tensor.detach, model.head_of(heads.model))
            generic_loss = task_loss(model.head(heads.model, z) + offset, batch)
            return generic_loss + task_loss(
                model.head(add(frozen_head, heads.personal_head), z.detach()), batch
            )

        counts, parameter = view.sum_over_data(count_classes, down), next(iter(down.values()))
        # take the power before the logarithm: 0^0 = 1, whereas 0 log 0 is NaN
        offset = counts.to(wide_type(parameter.dtype)).pow(self.gamma).log().to(parameter)
        joint = view.train(loss, Joint(down, state), "local", self.optimizer, constants=(offset,))
        return joint.personal_head, joint.model

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the generic models, weighted by n_k."""
        return total

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        """The generic model with h_k added to its head, and by itself as a second series."""
        personal = down | add(view.model.head_of(down), state)
        return ClientModel(personal, {"personal": personal, "global": down})
