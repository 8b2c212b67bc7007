"""Updates of the frozen base that a server adds round by round (FLoRA, FedEx-LoRA), and clients that follow them.

A server keeps the update of every round as factors, and up to which each client has it; it sends those that are missing, so a
client that sits out some rounds, or joins late, catches up. A client keeps what it received, either merged, as one dense
update of each adapted weight (as much memory as those weights), or stacked, as factors whose rank grows with the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .low_rank.lora import LoRA
from .low_rank.pair import Factors, Pair
from .method import ClientInfo, Reply
from .tree import Params, tree

Keep = Literal["merged", "stacked"]


@tree
class Ledger:
    """The server's side: the update of every round, of scale 1, and how many each client has."""

    updates: list[Factors]
    at: dict[str, int]

    def missing(self, client: ClientInfo) -> list[Factors]:
        """The updates that a client lacks, in order."""
        return self.updates[self.at.get(str(client.id), 0) :]

    def grown(self, update: Factors, replies: Sequence[Reply[Any]]) -> Ledger:
        """With one more update; those who replied have all before it."""
        return Ledger([*self.updates, update], self.at | {str(r.client.id): len(self.updates) for r in replies})


@tree
class Base:
    """The client's side: the sum of the updates so far, dense by layer, or as one stack of factors; both empty at first."""

    dense: dict[str, Tensor]
    stack: Factors

    def followed(self, updates: Sequence[Factors], keep: Keep) -> Base:
        """With further updates."""
        if not updates:
            return self
        more = stacked(updates)
        if keep == "stacked":
            return Base({}, stacked([self.stack, more]) if self.stack else more)
        return Base({n: p.dense() + self.dense[n] if n in self.dense else p.dense() for n, p in more.items()}, {})

    def moved(self, lora: LoRA) -> Params:
        """The base weights with the dense sum added; empty where there is none."""
        return lora.moved(self.dense)


def stacked(factors: Sequence[Factors]) -> Factors:
    """Factors of the sum of products: the columns of all B, the rows of all A."""
    names = factors[0]
    return {n: Pair(torch.cat([f[n].b for f in factors], 1), torch.cat([f[n].a for f in factors])) for n in names}


def weighted(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Factors of Σ w_i B_i A_i; the weights are on B alone, for on both factors they would count twice."""
    return stacked([{n: Pair(w * p.b, p.a) for n, p in f.items()} for f, w in zip(factors, weights, strict=True)])
