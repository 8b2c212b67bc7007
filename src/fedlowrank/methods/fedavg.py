"""FedAvg: communication-efficient learning of deep networks from decentralized data.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. AISTATS 2017. arXiv:1602.05629, Algorithm 1.

    server, each round t:   send θ^t to each client k of the sample S_t                 download
    client k:               θ_k ← SGD on F_k from θ^t, E epochs; send θ_k               local_update
    server:                 θ^{t+1} = Σ_{k∈S_t} n_k θ_k / Σ_{k∈S_t} n_k                 server_update

The mean is over the sampled clients, as in the paper's fourth version; ``weighting = "uniform"`` gives every client
the same weight. BatchNorm normalizes by the batch in training and by each client's own statistics at
inference, which are neither averaged nor sent (:mod:`fedlowrank.models.statistics.normalization`); its scales and shifts
are averaged like any parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.contract import ClientInfo, Mean, Method, ServerView, Task
from ..core.tree import Params
from .shared.averaging import Weighting, reply_weight, train_model


@dataclass(frozen=True)
class FedAvg(Method[Params, None, Params, Params]):
    """Federated averaging of whole models.

    Attributes:
        weighting: weight of a reply in the mean: the client's number of training examples n_k, or uniform.
    """

    weighting: Weighting = "examples"

    title = "FedAvg"
    citation = "McMahan et al., AISTATS 2017, arXiv:1602.05629"
    one_model = True

    local_update = train_model  # θ_k ← SGD on F_k from θ^t, E epochs

    def server_init(self, task: Task) -> Params:
        """θ^0, the common initial weights."""
        return task.common_model(self.title).initial

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean[Params]:
        """θ_k, weighted by n_k."""
        return Mean(upload, reply_weight(client, self.weighting))

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        """Mean of the replies."""
        return total
