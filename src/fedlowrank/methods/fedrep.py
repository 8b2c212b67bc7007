"""FedRep: exploiting shared representations for personalized federated learning.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. ICML 2021. arXiv:2102.07078, Algorithm 1.

    server, each round t:   send the representation φ^t to each client k of S_t         download
    client k:               h_k ← SGD on F_k(φ^t, ·) from h_k, φ^t frozen
                            φ_k ← SGD on F_k(·, h_k) from φ^t, h_k frozen;
                            keep h_k; send φ_k                                          local_update
    server:                 φ^{t+1} = Σ_{k∈S_t} n_k φ_k / Σ_{k∈S_t} n_k                 server_update

The two phases alternate: neither sees gradients of the other's parameters (joint training is FedPer). A client infers
with the representation as aggregated after the round and its own head h_k. As in the paper's experiments, ten epochs
train the head and one the representation.

Differences from the paper: the paper's mean is uniform, over clients of equal size; here it is weighted by n_k.

Choices: all heads begin with the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientView, Method, Pass, ServerView
from ..core.tree import Params
from .shared.personal_head import body_with_head, initial_body, initial_head, train_part


@dataclass(frozen=True)
class FedRep(Method[Params, Params, Params, Params]):
    """Shared representation, private heads, trained in turn.

    Attributes:
        epochs: number of epochs in which the representation trains, with the head frozen.
        head_epochs: number of epochs in which the head trains before that, with the representation frozen.
    """

    head_epochs: int = 10

    title = "FedRep"
    citation = "Collins et al., ICML 2021, arXiv:2102.07078"
    bounds = {"head_epochs": ">= 1"}

    def passes(self) -> dict[str, Pass]:
        """The passes of the two phases: head, then representation."""
        return {"head": Pass(self.head_epochs, self.batch_size), "base": self.main_pass}

    server_init = initial_body
    client_init = initial_head
    client_model = body_with_head

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        """SGD on the head with the representation frozen, then on the representation with the head frozen."""
        head = train_part(state, down, "head", self.optimizer, view)
        return head, train_part(down, head, "base", self.optimizer, view)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the representations, weighted by n_k."""
        return total
