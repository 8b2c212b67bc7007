"""FLoRA: stacks factors of unequal rank, adds them to the base, and begins each round with new factors.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
NeurIPS 2024. arXiv:2409.05976.

    server, each round t:   send the stacks that client i lacks                                 download
    client i:               W_0 ← W_0 + B A of each stack                                       Base.with_updates
                            A_i random, B_i = 0; train both by E epochs                         local_update
    server:                 B = [p_1 s_1 B_1 | p_2 s_2 B_2 | …],  A = [A_1; A_2; …],
                            p_i = n_i / Σ n                                                     server_update

The sum B A = Σ p_i s_i B_i A_i is exact. p_i stands on one side only (on both it would be squared).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.lora.lora_factors import LoRA, lora_of
from ..adapters.wire_format import PackedFactors
from ..core.contract import (
    ZERO_REFERENCE,
    ClientInfo,
    ClientModel,
    ClientView,
    Method,
    ServerView,
    Task,
    Update,
)
from ..core.tree import Params, tree_dataclass
from ..linalg.pair import Factors
from .shared.base_updates import Base, UpdateForm, UpdateHistory, weigh_factors
from .shared.factor_training import train_leaves
from .shared.lora_clients import CollectedFactors, collect_factors, describe_ranks, split_trained_leaves
from .shared.lora_family import (
    Leaves,
    LoRATraining,
    Message,
    insert_leaves,
    join_leaves,
    refuse_principal_start,
    scale_product,
)


@tree_dataclass
class ServerState:
    """The stack of every round, and the shared parameters beside them."""

    history: UpdateHistory
    rest: Params


@tree_dataclass
class Download:
    """The stacks that a client lacks, and the shared parameters beside them."""

    stacks: list[PackedFactors]
    rest: Params


@tree_dataclass
class ClientState:
    """The state of a client: the stacks so far, and its head where that is personal."""

    base: Base
    rest: Params


@dataclass(frozen=True)
class FLoRA(Method[ServerState, ClientState, Download, Message]):
    """Stacked factors.

    Attributes:
        base_updates: form in which a client stores the stacks: merged into its base weights, or stacked as a frozen
            adapter beside them, for bases that cannot be changed, such as quantized ones.
        training: settings of the LoRA factors: rank, scale, head and wire type.
    """

    base_updates: UpdateForm = "merged"
    training: LoRATraining = LoRATraining()

    title = "FLoRA"
    citation = "Wang et al., NeurIPS 2024, arXiv:2409.05976"
    keep_refusal = "a client trains new factors in every round"

    remarks = describe_ranks
    contribution = collect_factors

    def server_init(self, task: Task) -> ServerState:
        """No stack yet, or the model's trained factors as the first."""
        self.training.resolve_ranks(task, self.title)
        refuse_principal_start(task, self.title, "begins every round with new factors")
        model = task.common_model(self.title)
        lora, history = lora_of(model), UpdateHistory([], {})
        if lora.trained:
            history = history.with_update(scale_product(lora.trained, lora.scale), [], self.training.wire)
        return ServerState(history, self.training.read_initial_shared_rest(model))

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """The base without stacks, and the client's head where that is personal."""
        model = task.model(client)
        base = Base.without_updates(self.base_updates, lora_of(model))
        return ClientState(base, self.training.read_initial_personal_rest(model))

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """The stacks that the client lacks."""
        return Download(server.history.missing_updates(client), server.rest)

    def local_update(
        self, state: ClientState, down: Download, view: ClientView
    ) -> tuple[ClientState, Message]:
        """Add the stacks, then train fresh factors."""
        lora = lora_of(view.model)
        rank = self.training.find_rank(view.info, lora)
        base = self._update_base(state, down, lora)
        start = join_leaves(lora.draw_factors(rank, view.key / "lora"), state.rest | down.rest)
        scale = self.training.build_scaling(lora).scale_at(rank)
        frozen_factors, moved_weights = base.split_updates(self.base_updates, lora)
        leaves = train_leaves(
            view, start, scale, self.optimizer, frozen_factors=frozen_factors, moved_weights=moved_weights
        )
        personal_rest, upload = split_trained_leaves(self, leaves)
        return ClientState(base, personal_rest), upload

    def server_update(self, server: ServerState, total: CollectedFactors, view: ServerView) -> ServerState:
        """Append the stack of the round."""
        factors = [total["factors"][c.id] for c in view.replied]
        weights = [float(c.example_count) for c in view.replied]
        scales = [self.training.compute_client_scale(view.task, c) for c in view.replied]
        stack = weigh_factors(factors, [w * s / sum(weights) for w, s in zip(weights, scales, strict=True)])
        return ServerState(server.history.with_update(stack, view.replied, self.training.wire), total["rest"])

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """The fresh factors themselves, and the shared parameters relative to those that were sent."""
        return Update(
            {"factors": ZERO_REFERENCE, "rest": down.rest}, self.training.compute_client_scale(task, client)
        )

    def client_model(self, state: ClientState, down: Download, view: ClientView) -> ClientModel:
        """The base with all stacks; the product of the fresh factors is zero."""
        frozen_factors, moved_weights = self._update_base(state, down, lora_of(view.model)).split_updates(
            self.base_updates, lora_of(view.model)
        )
        return ClientModel(
            view.model.initial | _build_params(view, frozen_factors, moved_weights, state.rest | down.rest)
        )

    def server_model(self, server: ServerState, state: ClientState, view: ClientView) -> Params:
        """The base with all stacks, the model of every client that has them."""
        frozen_factors, _ = Base({}, server.history.updates).split_updates("stacked", lora_of(view.model))
        return _build_params(view, frozen_factors, {}, state.rest | server.rest)

    def _update_base(self, state: ClientState, down: Download, lora: LoRA) -> Base:
        return state.base.with_updates(down.stacks, self.base_updates, lora)


def _build_params(view: ClientView, stack: Factors, moved_weights: Params, rest: Params) -> Params:
    leaves: Leaves = join_leaves(stack or _draw_zero_product(view), rest)
    return insert_leaves(view.model, leaves, 1.0, {}, moved_weights)


def _draw_zero_product(view: ClientView) -> Factors:
    return lora_of(view.model).draw_factors(1, view.key / "none")
