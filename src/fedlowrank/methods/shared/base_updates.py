"""Updates of the frozen base, added round by round (FLoRA, FedEx-LoRA), and clients that catch up with them.

A server stores the update of every round as packed factors, and the number of updates that each client has. It
sends the updates that a client lacks, so a client that misses some rounds, or joins late, catches up. A client
keeps the updates received. Clients that are simulated in one process share the large tensors with the server, so
their memory does not grow with the number of clients.

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
        updates: packed factors of each update, in the order of the rounds.
        update_counts: number of updates that each client has, by client.
    """

    updates: list[PackedFactors]
    update_counts: dict[str, int]

    def missing_updates(self, client: ClientInfo) -> list[PackedFactors]:
        """List the updates that a client lacks, in order."""
        return self.updates[self.update_counts.get(str(client.id), 0) :]

    def with_update(self, update: Factors, clients: Sequence[ClientInfo], wire: WireType) -> UpdateHistory:
        """Return the history with one more update; the given clients have all updates before it."""
        update_counts = self.update_counts | {str(client.id): len(self.updates) for client in clients}
        return UpdateHistory([*self.updates, pack_factors(update, wire)], update_counts)


@tree_dataclass
class Base:
    """The client's side: the updates received so far.

    Attributes:
        dense: sum ``[d, k]`` of the first updates by layer, once it is smaller than their factors; otherwise empty.
        stacks: factors of the later updates, one entry an update.
    """

    dense: dict[str, Tensor]
    stacks: list[PackedFactors]

    @classmethod
    def without_updates(cls, keep: UpdateForm, lora: LoRA) -> Base:
        """Begin without updates.

        Raises:
            TaskError: if updates are to be merged into a weight that is quantized or not in memory, or stacked beside
                factors with dropout.
        """
        if keep == "merged":
            lora.check_changeable(lora.layers)
        else:
            lora.refuse_dropout("base_updates = 'stacked'")
        return cls({}, [])

    def with_updates(self, updates: Sequence[PackedFactors], keep: UpdateForm, lora: LoRA) -> Base:
        """Return the base with further updates appended.

        They are appended one after another, so that clients have the same sums no matter when they caught up.
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
                # float32: in half precision small updates would be lost
                update = tree.widen(pair.b) @ tree.widen(pair.a)
                sums[name] = sums[name] + update if name in sums else update
        return sums


@dataclass(eq=False)
class Memo:
    """A cache of the last value of each kind, with the tensors that it was computed from."""

    values: dict[str, tuple[list[Any], list[Tensor], Any]] = field(default_factory=dict)

    def get(self, kind: str, base: Base, make: Callable[[], T]) -> T:
        """Return the value of a kind that belongs to a base; it must not be changed."""
        tensors = [t for _, t in tree.leaves(base)]
        if any(type(t) is not Tensor or t.is_inference() for t in tensors):
            # A subclass stands for the tensors of many clients, and the engine creates it anew each time. An
            # inference tensor has no version.
            return make()
        identity = [_identity(t) for t in tensors]
        entry = self.values.get(kind)
        if entry is not None and entry[0] == identity:
            value: T = entry[2]
            return value
        # free the last value before the next one is computed
        entry = None
        self.values.pop(kind, None)
        # a value created in inference mode could not be used in training
        with torch.inference_mode(False), torch.no_grad():
            new_value = make()
        # the tensors are stored with the value, so that their memory is not reused for others
        self.values[kind] = (identity, tensors, new_value)
        return new_value


def _identity(t: Tensor) -> Any:
    """Identify a tensor by its memory and its content: a change in place increases the version."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t._version


def _memo(lora: LoRA) -> Memo:
    memo: Memo = lora.cache.setdefault("base_updates", Memo())
    return memo


def stack_factors(factors: Sequence[Factors]) -> Factors:
    """Stack the columns of all B and the rows of all A: the product of the result is the sum of the products."""
    names = factors[0]
    return {
        n: Pair(torch.cat([f[n].b for f in factors], 1), torch.cat([f[n].a for f in factors])) for n in names
    }


def weigh_factors(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Stack factors so that their product is Σ w_i B_i A_i; only B is weighted, so that the weights count once."""
    return stack_factors(
        [{n: Pair(w * p.b, p.a) for n, p in f.items()} for f, w in zip(factors, weights, strict=True)]
    )
