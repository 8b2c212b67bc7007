"""FedHL: unequal LoRA ranks, an aggregate without truncation bias, and weights from the truncation errors.

Peng et al., "FedHL: Federated Learning for Heterogeneous Low-Rank Adaptation via Unbiased Aggregation",
arXiv:2505.18494, Algorithm 1.

     4  (B_t^i, A_t^i) ← SVD(W_t, r_i), one SVD for all clients             server_update; download slices it
     5  r̂_i ← ‖W_t - W_t^{r_i}‖²                                           Weighing, from singular values
     9  client i: B ← B_t^i, A ← A_t^i                                      local_update
    10  K local steps; upload                                               local_update
    15  W_{t+1}^i ← B^i A^i                                                 server_update, as factors
    17  W_{t+1} ← Σ_i p_i [W_t + (W_{t+1}^i - W_t^{r_i})],  p_i by eq. 15   server_update, Weighing

Choices: r̂_i is the squared norm, relative to ‖W_t‖² (eq. 15 is not free of scale otherwise), summed over
layers; p_i ∝ 1 / (r̂_i + ε), smoothed by softmax(p / T); W_0 = 0 begins with a random A and B = 0, and components
that W_t does not fill begin so in later rounds too. On a lossy wire, and for modules in half precision, the
truncation is subtracted exactly as it was sent. ``weighing.error = "squared"`` is eq. 15 to the letter, with
the square of eq. 8. Departures, off by default: a cap on the server's rank, and the residual W_t - W_t^{r_i}
as a frozen second adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..adapters.lora.lora_factors import lora_of
from ..adapters.wire_format import unpack_factors
from ..core.contract import ClientInfo, ClientModel, ClientView, Method, ServerView, Task, Update
from ..core.errors import ConfigError
from ..core.tree import Params, tree_dataclass
from ..linalg.delta import Delta, DeltaForm, FactorSplit
from ..linalg.pair import Factors
from .shared.effective_delta import (
    FactorReply,
    Weighing,
    apply_replies,
    build_client_factors,
    build_server_model,
    build_starting_deltas,
    factorize_residual,
    has_half_precision,
    measure_discarded_energies,
    measure_energies,
    measure_ranks,
)
from .shared.factor_training import train_leaves
from .shared.lora_clients import (
    CollectedFactors,
    build_client_model,
    collect_factors,
    describe_ranks,
    initial_rest,
    read_leaves,
    split_trained_leaves,
)
from .shared.lora_family import (
    LoRATraining,
    Message,
    Scaling,
    draw_initial_factors,
)


@tree_dataclass
class ServerState:
    """The update W of every layer, and the other values that the server needs.

    Attributes:
        delta: update W of every layer, by layer name.
        initial_factors: initial factors of the largest rank; they fill the components that W does not have.
        rest: shared parameters that are trained whole.
        scaling: scale s of a client's update as a function of its rank.
        reply_metrics: weight p_i and truncation error r̂_i of each of the last replies, for the record.
    """

    delta: dict[str, Delta]
    initial_factors: Factors
    rest: Params
    scaling: Scaling
    reply_metrics: dict[str, dict[str, float]]


@tree_dataclass
class Download:
    """The client's components, and, if requested, the residual as a frozen adapter of scale 1."""

    message: Message
    residual: Factors


@dataclass(frozen=True)
class FedHL(Method[ServerState, Params, Download, Message]):
    """Unbiased aggregation of unequal ranks.

    Attributes:
        weighing: rule by which truncation errors become the weights p_i.
        split: factor that takes the singular values: B, A, or sqrt for both.
        residual: whether clients are also sent W - W^{r_i}, which they do not train; local training then begins at
            W.
        delta_form: form in which the server stores W; ``{kind = "capped", cap = 64}`` bounds its rank.
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    weighing: Weighing = Weighing()
    split: FactorSplit = "sqrt"
    residual: bool = False
    delta_form: DeltaForm = DeltaForm()
    training: LoRATraining = LoRATraining()

    title = "FedHL"
    citation = "Peng et al. 2025, arXiv:2505.18494"
    keep_refusal = (
        "the server factorizes anew in every round, and gradients of other factors say nothing of these"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.delta_form.kind not in ("exact", "capped"):
            raise ConfigError(
                f"{self.title}: the residual travels as factors, so it needs a server that holds factors; set "
                f"delta_form.kind to 'exact' or 'capped', not {self.delta_form.kind!r}"
            )

    client_init = initial_rest
    contribution = collect_factors  # line 15: the factors of W_{t+1}^i

    def remarks(self, task: Task) -> list[str]:
        """Warn of ranks that are lowered, and of weights that ignore unequal example counts."""
        remarks = describe_ranks(self, task)
        # over a network, a client that has not registered yet has no known number
        sizes = [c.example_count for c in task.clients if c.example_count] or [1]
        if self.weighing.by == "truncation" and not self.weighing.by_examples and max(sizes) > 2 * min(sizes):
            size_range = f"{min(sizes):,} to {max(sizes):,}"
            remarks.append(
                f"replies weigh by the truncation error of the client's rank (eq. 15), not by its {size_range} examples. "
                "weighing.by = 'examples' weighs by n_i, weighing.by_examples = true by both"
            )
        return remarks

    def server_init(self, task: Task) -> ServerState:
        """W_0 = 0, or the update of the model's trained factors."""
        ranks, model = self.training.resolve_ranks(task, self.title), task.common_model(self.title)
        if self.residual:
            lora_of(model).refuse_dropout(f"{self.title}.residual = true")
        delta = build_starting_deltas(model, self.delta_form, max(ranks))
        initial_factors = draw_initial_factors(task, max(ranks))
        scaling = self.training.build_scaling(lora_of(model))
        return ServerState(delta, initial_factors, self.training.read_initial_shared_rest(model), scaling, {})

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """Line 4: the first r_i components of W."""
        rank = self.training.find_rank_within(client, server.initial_factors)
        factors = build_client_factors(
            server.delta, server.initial_factors, rank, self.split, server.scaling.scale_at(rank)
        )
        residual = factorize_residual(server.delta, rank, server.initial_factors) if self.residual else {}
        return Download(self.training.pack_message(factors, server.rest), residual)

    def local_update(self, state: Params, down: Download, view: ClientView) -> tuple[Params, Message]:
        """Lines 9 and 10: train the factors received."""
        start = read_leaves(down.message, state)
        leaves = train_leaves(
            view, start, self.training.compute_scale(view), self.optimizer, frozen_factors=down.residual
        )
        return split_trained_leaves(self, leaves)

    def server_update(self, server: ServerState, total: CollectedFactors, view: ServerView) -> ServerState:
        """Line 17: apply the replies to W."""
        ranks = [self.training.find_rank_within(c, server.initial_factors) for c in view.replied]
        max_ranks = {name: pair.rank for name, pair in server.initial_factors.items()}
        example_counts = [float(c.example_count) for c in view.replied]
        client_weights = self.weighing.weigh(server.delta, ranks, example_counts, max_ranks)
        replies = [
            FactorReply(r, server.scaling.scale_at(r), total["factors"][client.id])
            for r, client in zip(ranks, view.replied, strict=True)
        ]
        if self.training.wire != "float32" or has_half_precision(server.initial_factors):
            # the wire rounds: subtract W_t^{r_i} as it was sent
            sent_factors = [unpack_factors(self.download(server, c).message.factors) for c in view.replied]
            replies = [
                reply._replace(received_factors=factors)
                for reply, factors in zip(replies, sent_factors, strict=True)
            ]
        # line 17: W ← Σ_i p_i [W + (s_i B_i A_i - W^{r_i})]. The j-th singular value of W is multiplied by the
        # share 1 - Σ_{i: r_i > j} p_i, see fedlowrank.linalg.delta.
        delta = apply_replies(server.delta, client_weights.weights, replies, max_ranks)
        metrics = client_weights.reply_metrics([c.id for c in view.replied])
        return replace(server, delta=delta, rest=total["rest"], reply_metrics=metrics)

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """The factors, relative to W^{r_i} as it was sent, in the client's scale."""
        return Update(down.message, self.training.compute_client_scale(task, client))

    def client_model(self, state: Params, down: Download, view: ClientView) -> ClientModel:
        """The model with the first r_i components."""
        leaves = read_leaves(down.message, state)
        return build_client_model(
            view, leaves, self.training.compute_scale(view), frozen_factors=down.residual
        )

    def server_metrics(self, server: ServerState) -> dict[str, dict[str, float]]:
        """Rank of W; weights p_i and relative truncation errors of the last round; energy of W and of its truncated part."""
        delta = server.delta
        return {
            **server.reply_metrics,
            "ranks": dict(measure_ranks(delta)),
            "energy": measure_energies(delta),
            "discarded": measure_discarded_energies(delta),
        }

    def server_model(self, server: ServerState, state: Params, view: ClientView) -> Params:
        """The model with all of W."""
        return build_server_model(view.model, server.delta, state | server.rest)
