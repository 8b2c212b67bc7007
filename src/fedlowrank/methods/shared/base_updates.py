"""Updates of the frozen base, added round by round (FLoRA, FedEx-LoRA), and clients that catch up with them.

A server stores the update of every round as packed factors, and how many of them each client has. It sends those
that a client lacks, so a client that sits out some rounds, or joins late, catches up. A client keeps what it
received. Clients that are simulated in one process share the large tensors with the server, so that their number
costs no memory.

A client uses the updates merged (added to the weights of its base) or stacked (as factors beside the weights, whose
rank grows with the rounds). Merged updates are summed once their factors take more memory than the weights. The sum,
and the weights of a base with its updates, are computed once for all clients that have the same updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ...adapters.lora.lora_factors import LoRA
from ...adapters.wire_format import PackedFactors, WireType, pack_factors, unpack_factors
from ...core import tree
from ...core.contract import ClientInfo
from ...core.tree import Params, tree_dataclass
from ...linalg.pair import Factors, Pair

UpdateForm = Literal["merged", "stacked"]
T = TypeVar("T")


@tree_dataclass
class UpdateHistory:
    """The server's side: the update of every round, of scale 1, and the number of updates that each client has.

    Attributes:
        updates: in the order of the rounds.
        update_counts: number of updates by client.
    """

    updates: list[PackedFactors]
    update_counts: dict[str, int]

    def missing_updates(self, client: ClientInfo) -> list[PackedFactors]:
        """List the updates that a client lacks, in order."""
        return self.updates[self.update_counts.get(str(client.id), 0) :]

    def with_update(self, update: Factors, clients: Sequence[ClientInfo], wire: WireType) -> UpdateHistory:
        """Append an update; the given clients have all updates before it."""
        update_counts = self.update_counts | {str(client.id): len(self.updates) for client in clients}
        return UpdateHistory([*self.updates, pack_factors(update, wire)], update_counts)


@tree_dataclass
class Base:
    """The client's side: the updates so far.

    Attributes:
        dense: the sum ``[d, k]`` of the first updates by layer, once it is smaller than their factors; else empty.
        stacks: the factors of the later updates.
    """

    dense: dict[str, Tensor]
    stacks: list[PackedFactors]

    def with_updates(self, updates: Sequence[PackedFactors], keep: UpdateForm, lora: LoRA) -> Base:
        """Append further updates.

        They are appended one after another, so that clients have the same sums whenever they caught up.
        """
        base = self
        for update in updates:
            base = Base(base.dense, [*base.stacks, update])
            if keep == "merged" and tree.numel(base.stacks) > sum(d * k for d, k in lora.shapes.values()):
                base = Base(_memo(lora).get("sum", base, base._sum_updates), [])
        return base

    def split_updates(self, keep: UpdateForm, lora: LoRA) -> tuple[Factors, Params]:
        """Split the updates by the way in which a client uses them: as frozen factors or in the weights.

        Returns:
            The updates as one frozen adapter of scale 1, and the weights with the updates added, by the name of
            their parameter. One of the two is empty.
        """
        if not self.dense and not self.stacks:
            return {}, {}
        memo = _memo(lora)
        if keep == "merged":
            return {}, memo.get("moved", self, lambda: lora.add_to_weights(self._sum_updates()))
        return memo.get("stack", self, lambda: stack_factors([unpack_factors(s) for s in self.stacks])), {}

    def _sum_updates(self) -> dict[str, Tensor]:
        sums = dict(self.dense)
        for factors in map(unpack_factors, self.stacks):
            for name, pair in factors.items():
                # in half precision small updates would be lost
                update = tree.widen(pair.b) @ tree.widen(pair.a)
                sums[name] = sums[name] + update if name in sums else update
        return sums


@dataclass(eq=False)
class Memo:
    """The last value of each kind, with the tensors that it was computed from."""

    values: dict[str, tuple[list[Any], list[Tensor], Any]] = field(default_factory=dict)

    def get(self, kind: str, base: Base, make: Callable[[], T]) -> T:
        """Return the value of a kind that belongs to a base; it must not be changed."""
        tensors = [t for _, t in tree.leaves(base)]
        if any(type(t) is not Tensor or t.is_inference() for t in tensors):
            # A subclass stands for the tensors of many clients, and the engine makes it anew each time. An inference
            # tensor has no version.
            return make()
        identity = [_identity(t) for t in tensors]
        entry = self.values.get(kind)
        if entry is not None and entry[0] == identity:
            value: T = entry[2]
            return value
        # the last value goes before the next one is made
        entry = None
        self.values.pop(kind, None)
        # a value that was made for inference could not be trained with
        with torch.inference_mode(False), torch.no_grad():
            new_value = make()
        # the tensors are stored with it, so that no other one takes their place in memory
        self.values[kind] = (identity, tensors, new_value)
        return new_value


def _identity(t: Tensor) -> Any:
    """Identify a tensor by its memory and its content: a change in place increases the version."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t._version


def _memo(lora: LoRA) -> Memo:
    memo: Memo = lora.cache.setdefault("base_updates", Memo())
    return memo


def stack_factors(factors: Sequence[Factors]) -> Factors:
    """Stack factors to those of the sum of their products: the columns of all B, the rows of all A."""
    names = factors[0]
    return {
        n: Pair(torch.cat([f[n].b for f in factors], 1), torch.cat([f[n].a for f in factors])) for n in names
    }


def weigh_factors(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Stack factors to those of Σ w_i B_i A_i; the weights are on B alone, for on both factors they would count twice."""
    return stack_factors(
        [{n: Pair(w * p.b, p.a) for n, p in f.items()} for f, w in zip(factors, weights, strict=True)]
    )
