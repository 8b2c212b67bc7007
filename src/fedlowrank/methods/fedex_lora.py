"""FedEx-LoRA: the means of B and A, and what they miss of the mean update added to the base.

Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models",
ACL 2025. arXiv:2410.09432.

    server, each round t:   send B, A and the residuals that client i lacks                download
    client i:               W_0 ← W_0 + each residual; train B_i, A_i by E epochs          local_update
    server:                 B = Σ p_i B_i,  A = Σ p_i A_i,  p_i = n_i / Σ n                 server_update
                            residual = s Σ p_i B_i A_i - s B A = s Σ p_i B_i (A_i - A)     server_update

The second form of the residual has rank Σ r_i, not Σ r_i + r. It travels as factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.lora import LoRA, lora_of
from ..adapters.wire_format import Packed
from ..core.means import mean
from ..core.method import ClientInfo, ClientView, Method, Reply, ServerView, Task, by_examples
from ..core.tree import Params, tree
from ..linalg.pair import Factors, Pair
from .families.base_updates import Base, Keep, Ledger, weighted
from .families.lora import (
    Leaves,
    Message,
    Scaling,
    Tuning,
    factors_of,
    initial_factors,
    leaves_of,
    placed,
    received,
    tune,
)


@tree
class Server:
    """The mean factors, the residual of every round, and what is shared beside them."""

    factors: Factors
    ledger: Ledger
    rest: Params
    scaling: Scaling


@tree
class Download:
    """The mean factors and what is shared, and the residuals that a client lacks."""

    message: Message
    residuals: list[Packed]


@tree
class Own:
    """What a client keeps: the residuals so far, and its head where that is personal."""

    base: Base
    rest: Params


@dataclass(frozen=True)
class FedExLoRA(Method[Server, Own, Download, Message]):
    """Means of factors, with an exact residual.

    Attributes:
        keep: merged: a client adds residuals to its base weights; stacked: it keeps them as a frozen adapter beside.
        tuning: rank, scale, head and form on the wire.
    """

    keep: Keep = "merged"
    tuning: Tuning = Tuning()

    title = "FedEx-LoRA"
    citation = "Singhal et al., ACL 2025, arXiv:2410.09432"

    def server_init(self, task: Task) -> Server:
        """A random A, B = 0, no residual."""
        rank, model = self.tuning.equal_rank(task, self.title), task.common_model(self.title)
        factors, lora = initial_factors(task, rank), lora_of(model)
        return Server(factors, Ledger([], {}), self.tuning.shared_rest(model), self.tuning.scaling_of(lora))

    def client_init(self, task: Task, client: ClientInfo) -> Own:
        """The base as it is."""
        return Own(Base({}, []), self.tuning.own_rest(task.model(client)))

    def download(self, server: Server, client: ClientInfo) -> Download:
        """Factors, and the residuals that are missing."""
        return Download(self.tuning.message(server.factors, server.rest), server.ledger.missing(client))

    def local_update(self, state: Own, down: Download, view: ClientView) -> tuple[Own, Message]:
        """Add the residuals, then train both factors."""
        base, start = self._now(state, down, lora_of(view.model))
        frozen, moved = base.beside(self.keep, lora_of(view.model))
        end = tune(view, start, self.tuning.scale(view), self.optimizer, frozen=frozen, moved=moved)
        kept = self.tuning.kept(end)
        return Own(base, kept), self.tuning.message(factors_of(end), end["rest"])

    def server_update(self, server: Server, replies: Sequence[Reply[Message]], view: ServerView) -> Server:
        """Means, and what they miss."""
        del view
        # the place of a client in the stack must not depend on when its reply came
        replies = sorted(replies, key=lambda r: r.client.id)
        weights = by_examples(replies)
        held = [received(r.upload) for r in replies]
        means: Factors = mean(held, weights)
        apart = [{n: Pair(p.b, p.a - means[n].a) for n, p in f.items()} for f in held]
        scale = server.scaling.at(next(iter(means.values())).rank)
        residual = weighted(apart, [scale * w / sum(weights) for w in weights])
        rest = mean([r.upload.rest for r in replies], weights)
        return Server(means, server.ledger.grown(residual, replies, self.tuning.wire), rest, server.scaling)

    def personal(self, state: Own, down: Download, view: ClientView) -> Params:
        """The base with all residuals, and the mean factors."""
        base, leaves = self._now(state, down, lora_of(view.model))
        frozen, moved = base.beside(self.keep, lora_of(view.model))
        return view.model.initial | placed(view.model, leaves, self.tuning.scale(view), frozen, moved)

    def server_model(self, server: Server, state: Own, view: ClientView) -> Params:
        """The same as at every client that has all residuals."""
        leaves = leaves_of(server.factors, state.rest | server.rest)
        frozen, _ = Base({}, server.ledger.updates).beside("stacked", lora_of(view.model))
        return placed(view.model, leaves, self.tuning.scale(view), frozen, {})

    def _now(self, state: Own, down: Download, lora: LoRA) -> tuple[Base, Leaves]:
        base = state.base.followed(down.residuals, self.keep, lora)
        return base, leaves_of(received(down.message), state.rest | down.message.rest)
