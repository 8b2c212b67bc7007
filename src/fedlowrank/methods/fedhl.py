"""FedHL: unequal LoRA ranks with an aggregate that truncation does not bias, weighted by truncation errors.

Peng et al., "FedHL: Federated Learning for Heterogeneous Low-Rank Adaptation via Unbiased Aggregation",
arXiv:2505.18494, Algorithm 1.

     4  (B_t^i, A_t^i) ← SVD(W_t, r_i), one SVD for all clients             server_update; download slices it
     5  r̂_i ← ‖W_t - W_t^{r_i}‖²                                           Weighing, from singular values
     9  client i: B ← B_t^i, A ← A_t^i                                      local_update
    10  K local steps; upload                                               local_update
    15  W_{t+1}^i ← B^i A^i                                                 server_update, as factors
    17  W_{t+1} ← Σ_i p_i [W_t + (W_{t+1}^i - W_t^{r_i})],  p_i by eq. 15   server_update, Weighing

Choices: r̂_i is the squared norm, relative to ‖W_t‖² (eq. 15 is not free of scale otherwise), summed over
layers; p_i ∝ 1 / (r̂_i + ε), smoothed by softmax(p / T); W_0 = 0 begins with a random A and B = 0, and
components that W_t does not fill begin so in later rounds too. On a lossy wire, and for modules in half
precision, exactly what was sent is subtracted. ``weighing.error = "squared"`` is eq. 15 to the letter, with
the square of eq. 8. Departures, off by default: a cap on the server's rank, and the residual W_t - W_t^{r_i}
as a frozen second adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..adapters.lora.lora_factors import lora_of
from ..adapters.wire_format import unpack_factors
from ..core.contract.client_model import ClientModel
from ..core.contract.method import ClientInfo, ClientView, Method, ServerView, Task
from ..core.contract.update import Update
from ..core.errors import ConfigError
from ..core.tree import Params, tree_dataclass
from ..linalg.delta import Delta, DeltaForm, FactorSplit
from ..linalg.pair import Factors
from .families.effective_delta import (
    FactorReply,
    Weighing,
    first_components,
    has_half_precision,
    measure_energies,
    measure_ranks,
    model_with_update,
    starting_deltas,
    truncation_energy,
    untruncated_tail,
    weighted_sum,
)
from .families.lora_clients import (
    adapted_model,
    collect_factors,
    describe_ranks,
    initial_rest,
    leaves_of_message,
    reply,
)
from .families.lora_family import (
    Message,
    Scaling,
    Tuning,
    initial_factors,
    train_leaves,
)


@tree_dataclass
class ServerState:
    """W of every layer, further initial components, the shared rest, and for the record p_i and r̂_i of the last replies."""

    delta: dict[str, Delta]
    drawn: Factors
    rest: Params
    scaling: Scaling
    reply_metrics: dict[str, dict[str, float]]


@tree_dataclass
class Download:
    """The client's components, and where it is asked for the others as a frozen adapter of scale 1."""

    message: Message
    residual: Factors


@dataclass(frozen=True)
class FedHL(Method[ServerState, Params, Download, Message]):
    """Unbiased aggregation of unequal ranks.

    Attributes:
        weighing: how truncation errors become p_i.
        split: which factor takes the singular values: sqrt for both, B or A.
        residual: send clients W - W^{r_i} too, which they do not train; local training then begins at W.
        form: how the server holds W; ``{kind = "capped", cap = 64}`` bounds its rank.
        tuning: rank, scale, head and form on the wire.
    """

    weighing: Weighing = Weighing()
    split: FactorSplit = "sqrt"
    residual: bool = False
    form: DeltaForm = DeltaForm()
    tuning: Tuning = Tuning()

    title = "FedHL"
    citation = "Peng et al. 2025, arXiv:2505.18494"
    keep_refusal = (
        "the server factorizes anew in every round, and gradients of other factors say nothing of these"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.form.kind not in ("exact", "capped"):
            raise ConfigError(
                "FedHL: the residual travels as factors, so it needs a server that holds factors; set "
                f"form.kind to 'exact' or 'capped', not {self.form.kind!r}"
            )

    client_init = initial_rest
    contribution = collect_factors  # line 15: the factors of W_{t+1}^i

    def remarks(self, task: Task) -> list[str]:
        """Ranks that are lowered, and whom the weights favor."""
        found, sizes = describe_ranks(self, task), [c.examples for c in task.clients]
        if self.weighing.by == "truncation" and not self.weighing.by_examples and max(sizes) > 2 * min(sizes):
            n = f"{min(sizes):,} to {max(sizes):,}"
            found.append(
                f"replies weigh by the truncation error of the client's rank (eq. 15), not by its {n} examples. "
                "weighing.by = 'examples' weighs by n_i, weighing.by_examples = true by both"
            )
        return found

    def server_init(self, task: Task) -> ServerState:
        """W_0 = 0, or the update of the model's trained factors."""
        ranks, model = self.tuning.ranks(task, self.title), task.common_model(self.title)
        delta = starting_deltas(model, self.form, max(ranks))
        drawn, scaling = initial_factors(task, max(ranks)), self.tuning.scaling_of(lora_of(model))
        return ServerState(delta, drawn, self.tuning.shared_rest(model), scaling, {})

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """Line 4: the first r_i components."""
        rank = self.tuning.rank_within(client, server.drawn)
        factors = first_components(server.delta, server.drawn, rank, self.split, server.scaling.at(rank))
        left = untruncated_tail(server.delta, rank, server.drawn) if self.residual else {}
        return Download(self.tuning.message(factors, server.rest), left)

    def local_update(self, state: Params, down: Download, view: ClientView) -> tuple[Params, Message]:
        """Lines 9 and 10."""
        start = leaves_of_message(down.message, state)
        end = train_leaves(view, start, self.tuning.scale(view), self.optimizer, frozen=down.residual)
        return reply(self, end)

    def server_update(self, server: ServerState, total: dict[str, Any], view: ServerView) -> ServerState:
        """Line 17."""
        ranks = [self.tuning.rank_within(c, server.drawn) for c in view.replied]
        limits = {name: pair.rank for name, pair in server.drawn.items()}
        p = self.weighing.weigh(server.delta, ranks, [float(c.examples) for c in view.replied], limits)
        replies = [
            FactorReply(r, server.scaling.at(r), total["factors"][client.id])
            for r, client in zip(ranks, view.replied, strict=True)
        ]
        if self.tuning.wire != "float32" or has_half_precision(server.drawn):
            # rounded on its way: subtract W_t^{r_i} as it was sent
            sent = [unpack_factors(self.download(server, c).message.factors) for c in view.replied]
            replies = [one._replace(received=factors) for one, factors in zip(replies, sent, strict=True)]
        # line 17: W ← Σ_i p_i [W + (s_i B_i A_i - truncate(W, r_i))]
        delta = weighted_sum(server.delta, p.weights, replies, limits)
        metrics = p.reply_metrics([c.id for c in view.replied])
        return replace(server, delta=delta, rest=total["rest"], reply_metrics=metrics)

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """Relative to W^{r_i} as it was sent, in the client's scale."""
        return Update(down.message, self.tuning.scale_of(task, client))

    def client_model(self, state: Params, down: Download, view: ClientView) -> ClientModel:
        """The model with the first r_i components."""
        leaves = leaves_of_message(down.message, state)
        return adapted_model(view, leaves, self.tuning.scale(view), frozen=down.residual)

    def metrics(self, server: ServerState) -> dict[str, dict[str, float]]:
        """Rank of W; p_i and relative truncation errors of the last round; energy of W and its cut tail."""
        delta = server.delta
        return {
            **server.reply_metrics,
            "ranks": dict(measure_ranks(delta)),
            "energy": measure_energies(delta),
            "discarded": truncation_energy(delta),
        }

    def server_model(self, server: ServerState, state: Params, view: ClientView) -> Params:
        """The model with all of W."""
        return model_with_update(view.model, server.delta, state | server.rest)
