"""Updates of the frozen base, added round by round (FLoRA, FedEx-LoRA), and clients that follow them.

A server keeps the update of every round as factors, as they travel, and up to which each client has it; it
sends those that are missing, so a client that sits out some rounds, or joins late, catches up. A client keeps
what it received. Clients that are simulated in one process hold the very tensors that the server holds, small
ones apart, so that their number costs no memory.

A client uses the updates either merged, added to the weights of its base, or stacked, as factors beside them
whose rank grows with the rounds. Merged updates are added up where the factors take more memory than the
weights; the sum, and the weights of a base with its updates, are made once for all clients that hold the same
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ...adapters.lora.lora_factors import LoRA
from ...adapters.wire_format import PackedFactors, WireType, pack_factors, unpack_factors
from ...core import tree as trees
from ...core.contract.method import ClientInfo
from ...core.tree import Params, tree_dataclass
from ...linalg.pair import Factors, Pair

Keep = Literal["merged", "stacked"]
T = TypeVar("T")


@tree_dataclass
class UpdateHistory:
    """The server's side: the update of every round, of scale 1, and how many each client has."""

    updates: list[PackedFactors]
    at: dict[str, int]

    def missing(self, client: ClientInfo) -> list[PackedFactors]:
        """The updates that a client lacks, in order."""
        return self.updates[self.at.get(str(client.id), 0) :]

    def with_update(self, update: Factors, clients: Sequence[ClientInfo], wire: WireType) -> UpdateHistory:
        """With one more update; the given clients have all before it."""
        at = self.at | {str(client.id): len(self.updates) for client in clients}
        return UpdateHistory([*self.updates, pack_factors(update, wire)], at)


@tree_dataclass
class Base:
    """The client's side: the updates so far.

    Attributes:
        dense: the sum of the first of them ``[d, k]`` by layer, once it is smaller than their factors; else
            empty.
        stacks: those that came after.
    """

    dense: dict[str, Tensor]
    stacks: list[PackedFactors]

    def with_updates(self, updates: Sequence[PackedFactors], keep: Keep, lora: LoRA) -> Base:
        """With further updates.

        One after another, so that clients hold the same sums whenever they caught up.
        """
        now = self
        for update in updates:
            now = Base(now.dense, [*now.stacks, update])
            if keep == "merged" and trees.numel(now.stacks) > sum(d * k for d, k in lora.shapes.values()):
                now = Base(_memo(lora).get("sum", now, now._sum), [])
        return now

    def frozen_factors_or_weights(self, keep: Keep, lora: LoRA) -> tuple[Factors, Params]:
        """What a client's own factors stand beside.

        Returns:
            The updates as one frozen adapter of scale 1, and weights with the updates added by the name of
            their parameter. One of both is empty.
        """
        if not self.dense and not self.stacks:
            return {}, {}
        memo = _memo(lora)
        if keep == "merged":
            return {}, memo.get("moved", self, lambda: lora.add_to_weights(self._sum()))
        return memo.get("stack", self, lambda: stack_factors([unpack_factors(s) for s in self.stacks])), {}

    def _sum(self) -> dict[str, Tensor]:
        found = dict(self.dense)
        for factors in map(unpack_factors, self.stacks):
            for name, pair in factors.items():
                # in half precision small updates would be lost
                update = trees.widen(pair.b) @ trees.widen(pair.a)
                found[name] = found[name] + update if name in found else update
        return found


@dataclass(eq=False)
class Memo:
    """The last value of each kind, by the tensors that it was made of."""

    values: dict[str, tuple[list[Any], list[Tensor], Any]] = field(default_factory=dict)

    def get(self, kind: str, of: Base, make: Callable[[], T]) -> T:
        """The value that belongs to a base; it is not to be changed."""
        tensors = [t for _, t in trees.leaves(of)]
        if any(type(t) is not Tensor or t.is_inference() for t in tensors):
            # one that stands for those of many clients, made anew by the engine each time; or one without a version
            return make()
        identity = [_identity(t) for t in tensors]
        known = self.values.get(kind)
        if known is not None and known[0] == identity:
            value: T = known[2]
            return value
        # the last value goes before the next one is made
        known = None
        self.values.pop(kind, None)
        # a value that was made for inference could not be trained with
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        # the tensors are held, so that no other one takes their place in memory
        self.values[kind] = (identity, tensors, made)
        return made


def _identity(t: Tensor) -> Any:
    """What two tensors of one place in memory and of one content share; a change in place counts up the version."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t._version


def _memo(lora: LoRA) -> Memo:
    memo: Memo = lora.cache.setdefault("base_updates", Memo())
    return memo


def stack_factors(factors: Sequence[Factors]) -> Factors:
    """Factors of the sum of products: the columns of all B, the rows of all A."""
    names = factors[0]
    return {
        n: Pair(torch.cat([f[n].b for f in factors], 1), torch.cat([f[n].a for f in factors])) for n in names
    }


def weigh_factors(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Factors of Σ w_i B_i A_i; the weights are on B alone, for on both factors they would count twice."""
    return stack_factors(
        [{n: Pair(w * p.b, p.a) for n, p in f.items()} for f, w in zip(factors, weights, strict=True)]
    )
