"""Secure sums: the server adds up masked contributions and learns their total alone, in simulation.

Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017, with few
neighbors as in Bell et al., *Secure Single-Server Aggregation with (Poly)Logarithmic Overhead*, CCS 2020.

1. Client i has a key pair (s_i, S_i) and the seed b_i of its own mask. Its neighbors and itself hold Shamir
   shares of s_i and b_i.
2. It quantizes its contribution to a vector x_i and sends, modulo 2^64, with seeds s_ij = DH(s_i, S_j) = s_ji,
   y_i = x_i + PRG(b_i) + Σ_{neighbors j > i} PRG(s_ij) - Σ_{neighbors j < i} PRG(s_ij).
3. For a client whose y_i arrived, the holders reveal their shares of b_i; for one that was lost, those of s_i;
   never both. The server rebuilds these secrets and subtracts the masks that are left in Σ y_i.

The arithmetic is that of a network, but nothing is sent: shares are not encrypted, and secrets come from a
:class:`~fedlowrank.core.key.Key`, which whoever knows the run's seed can repeat. The server follows the
protocol and may look at all it gets; one that lies about who replied is not covered.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core import tree
from ..core.contribution import Aggregator, Each, Mean, Sum, fault_of, leaves, map_leaves
from ..core.errors import ConfigError, TaskError
from ..core.key import Key
from .settings import SecureSums

Vector = NDArray[np.uint64]
"""Numbers modulo 2^64: numpy's sums wrap by themselves."""
SECRET = 15
"""Bytes of a secret: with its padding, one block of the sharing scheme."""


@functools.cache
def _load(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            # Flower's own imports use what click deprecates
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"secure.on needs Flower: pip install 'fedlowrank[network]' ({error})") from error


def _aligned(like: Any, contribution: Any) -> list[tuple[Mean | Sum, list[Tensor]]]:
    """The leaves of a contribution and their tensors, in the order of another, whose form it must have."""
    known, found, aligned = dict(leaves(like)), dict(leaves(contribution)), []
    if each := [path for path, leaf in found.items() if isinstance(leaf, Each)]:
        raise TaskError(
            f"it holds an Each at {each[0]!r}, which the server must see by itself. Set secure.on = false, or use what "
            "has only means and sums, such as fedavg, fedit, hetlora with prune = 1, fedslr with memory_efficient = true"
        )
    if fault := fault_of(contribution):
        raise tree.TreeError(fault)
    if {path: type(leaf) for path, leaf in found.items()} != {
        path: type(leaf) for path, leaf in known.items()
    }:
        raise tree.TreeError(f"it has the leaves {sorted(found)}, and others have {sorted(known)}")
    for path, leaf in known.items():
        pairs: list[tuple[Tensor, Tensor]] = []
        tree.map(lambda a, b, to=pairs: to.append((a, b)), leaf.value, found[path].value)
        for a, b in pairs:
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                raise tree.TreeError(
                    f"at {path!r} it has {b.dtype} {[*b.shape]}, and others {a.dtype} {[*a.shape]}"
                )
            if b.dtype == torch.bool or not (b.is_floating_point() or isinstance(leaf, Sum)):
                raise tree.TreeError(
                    f"at {path!r} it has {b.dtype}; means take floats, sums floats and integers"
                )
        aligned.append((found[path], [b for _, b in pairs]))
    return aligned


@dataclass(frozen=True)
class FixedPoint:
    """How numbers become integers; sums of products of a weight and a value stay below 2^63.

    Attributes:
        bound: R; values are clipped to ±R.
        step: of a value, R / (2^(bits - 1) - 1), so that 0 is exact.
        largest_weight: weights are clipped to it.
        unit: of a weight, the smallest power of two for which ``largest_weight`` fits in the bits that are left,
            at most 32. Multiples of it are exact, so whole numbers are where it is at most 1.
    """

    bound: float
    step: float
    largest_weight: float
    unit: float

    @classmethod
    def choose(cls, settings: SecureSums, clients: int, largest_weight: float) -> FixedPoint:
        """The grid for the sums of that many clients."""
        if not 0 < largest_weight < math.inf:
            raise ConfigError(f"the largest weight of a secure sum is above 0; this one is {largest_weight}")
        weight_bits = min(32, 63 - settings.bits - clients.bit_length())
        unit = 2.0 ** math.ceil(math.log2(largest_weight / (2**weight_bits - 1)))
        return cls(settings.bound, settings.bound / (2 ** (settings.bits - 1) - 1), largest_weight, unit)

    def encode(self, aligned: Iterable[tuple[Mean | Sum, list[Tensor]]]) -> tuple[Vector, int]:
        """The vector of a contribution, and how many of its numbers were clipped. A mean's weight comes first."""
        parts, clipped = [np.empty(0, np.int64)], 0
        for leaf, tensors in aligned:
            # a float of a Sum is a value that the client itself has multiplied by its weight
            weight, limit, step = 1, self.bound * self.largest_weight, self.step * self.unit
            if isinstance(leaf, Mean):
                weight, limit, step = (
                    round(min(leaf.weight, self.largest_weight) / self.unit),
                    self.bound,
                    self.step,
                )
                clipped += leaf.weight > self.largest_weight
                parts.append(np.array([weight]))
            for t in tensors:
                x = (
                    t.detach()
                    .cpu()
                    .reshape(-1)
                    .to(torch.float64 if t.is_floating_point() else torch.int64)
                    .numpy()
                )
                if t.is_floating_point():
                    clipped += int(np.count_nonzero(abs(x) > limit)) if weight else 0
                    x = weight * np.rint(x.clip(-limit, limit) / step).astype(np.int64)
                parts.append(x)
        return np.concatenate(parts).view(np.uint64), clipped

    def decode(self, vector: Vector, like: Any) -> Any:
        """The total, with the types, shapes and devices of the tensors of a contribution; None without weight."""
        numbers, start = vector.view(np.int64), 0

        def take(size: int) -> NDArray[np.int64]:
            nonlocal start
            start += size
            return numbers[start - size : start]

        def total(_: str, leaf: Mean | Sum) -> Any:
            weight = float(take(1)[0]) if isinstance(leaf, Mean) else 1 / self.unit

            def restore(t: Tensor) -> Tensor:
                part = take(t.numel())
                found = torch.tensor(part / (weight or 1) * self.step if t.is_floating_point() else part)
                return found.to(t.dtype).reshape(t.shape).to(t.device)

            value = tree.map(restore, leaf.value)
            return value if weight else None

        return map_leaves(total, like)


@dataclass(frozen=True)
class Plan:
    """Who shares masks with whom, and how many must reply.

    Attributes:
        holders: of shares of each client's secrets: itself and its neighbors, which are, of the m clients in a
            random order on a circle, those up to 2 ⌈log2 m⌉ places away: all for m ≤ 20, 28 for m = 100.
        least: replies without which the round gives nothing.
        needed: shares that rebuild a secret, so many holders must collude with the server to unmask a client:
            ``least`` where all are neighbors; else half of the holders that reply if ``least`` clients do, for
            who is lost is no even draw of every neighborhood.
    """

    holders: Mapping[int, Sequence[int]]
    least: int
    needed: int

    @classmethod
    def choose(cls, clients: int, present: Sequence[int], threshold: float, key: Key) -> Plan:
        """The plan for a round of that many clients, of whom those present share their secrets."""
        least, m = max(2, math.ceil(threshold * clients - 1e-9)), len(present)
        order, reach = [present[i] for i in key.numpy().permutation(m)], 2 * max(0, m - 1).bit_length()
        holders = {
            c: sorted({order[(i + d) % m] for d in range(-reach, reach + 1)}) for i, c in enumerate(order)
        }
        count = min(2 * reach + 1, m)
        return cls(holders, least, min(count, least if count == m else math.ceil(threshold * count / 2)))


def expand(seed: bytes, size: int) -> Vector:
    """The mask PRG(seed) ``[size]``, uniform modulo 2^64: the key stream of AES-256 in counter mode."""
    # Flower's pseudo_rand_gen folds a seed to 32 bits and never draws the largest number
    ciphers = _load("cryptography.hazmat.primitives.ciphers")
    key = ciphers.algorithms.AES(hashlib.sha256(seed).digest())
    stream = ciphers.Cipher(key, ciphers.modes.CTR(bytes(16))).encryptor().update(bytes(8 * size))
    return np.frombuffer(stream, "<u8").astype(np.uint64, copy=False)


class KeyPair:
    """A client's secret s and the public key S that belongs to it."""

    def __init__(self, client: int, secret: bytes) -> None:
        self._client, self._curve = client, _load("cryptography.hazmat.primitives.asymmetric.x25519")
        self._private = self._curve.X25519PrivateKey.from_private_bytes(hashlib.sha256(secret).digest())
        self.public_key: bytes = self._private.public_key().public_bytes_raw()

    def mask(self, other: int, public_key: bytes, size: int) -> Vector:
        """What the client adds for a neighbor with that public key; the masks of the two add up to 0."""
        seed = self._private.exchange(self._curve.X25519PublicKey.from_public_bytes(public_key))
        return expand(seed, size) if self._client < other else np.negative(expand(seed, size))


class MaskingClient:
    """A client's side. ``held`` are shares of b and s by owner; it reveals none if fewer than ``least`` replied."""

    def __init__(self, client: int, key: Key, least: int) -> None:
        self._seed, self._secret = (
            (key / "own mask").numpy().bytes(SECRET),
            (key / "pair").numpy().bytes(SECRET),
        )
        self.keys, self._least = KeyPair(client, self._secret), least
        self.held: dict[int, tuple[bytes, bytes]] = {}

    def share(self, count: int, needed: int) -> list[tuple[bytes, bytes]]:
        """So many shares of b and s, any ``needed`` of which rebuild them."""
        split = _load("flwr.common.secure_aggregation.crypto.shamir").create_shares
        return list(zip(split(self._seed, needed, count), split(self._secret, needed, count), strict=True))

    def mask(self, vector: Vector, neighbors: Mapping[int, bytes]) -> Vector:
        """The masked vector y ``[size]``, given the public keys of the neighbors."""
        masked = vector + expand(self._seed, vector.size)
        for other, public_key in neighbors.items():
            masked += self.keys.mask(other, public_key, vector.size)
        return masked

    def reveal(self, replied: Set[int]) -> dict[int, bytes]:
        """By owner, its share of b if it replied, and of s if not."""
        enough = len(replied) >= self._least
        return {owner: b if owner in replied else s for owner, (b, s) in self.held.items() if enough}


class TooFewRepliesError(Exception):
    """The masks of a round cannot be removed."""


class MaskedSum:
    """The server's side: it has the plan and public keys, and gets masked vectors and, at last, revealed shares."""

    def __init__(self, plan: Plan, public_keys: Mapping[int, bytes]) -> None:
        self._plan, self._public_keys = plan, public_keys
        self._sum: Any = 0
        self.replied: set[int] = set()

    def add(self, client: int, masked: Vector) -> None:
        """Add a masked vector."""
        self._sum = self._sum + masked
        self.replied.add(client)

    def unmask(self, revealed: Sequence[Mapping[int, bytes]]) -> Vector:
        """The sum of the vectors, given what each holder reveals by owner; TooFewRepliesError if that is not enough."""
        if len(self.replied) < self._plan.least:
            raise TooFewRepliesError(f"{len(self.replied)} clients replied, and {self._plan.least} must")
        total: Vector = self._sum.copy()
        for client, holders in self._plan.holders.items():
            shares = [found[client] for found in revealed if client in found][: self._plan.needed]
            if len(shares) < self._plan.needed:
                raise TooFewRepliesError(
                    f"{len(shares)} holders of the shares of client {client} replied, and {self._plan.needed} must"
                )
            secret = _load("flwr.common.secure_aggregation.crypto.shamir").combine_shares(shares)
            if client in self.replied:
                total -= expand(secret, total.size)
                continue
            for other in self.replied.intersection(holders):
                total += KeyPair(client, secret).mask(other, self._public_keys[other], total.size)
        return total


class SecureAggregator(Aggregator):
    """Totals as of an :class:`Aggregator`, bit-equal in any order of arrival, up to quantization.

    With values clipped to ±R, weights w_k rounded to q_k (|q_k - w_k| ≤ unit/2), W' = Σ q_k and the exact mean m,
    the mean differs by Σ q_k (x'_k - x_k) / W' + Σ (q_k - w_k)(x_k - m) / W', as Σ w_k (x_k - m) = 0; hence by at
    most step/2 + n (unit / 2W') max |x_k - m| ≤ step/2 + n R unit / W'. The second term is 0 where weights are
    multiples of the unit. Floats of a Sum are clipped to ±R · ``largest_weight``, and their total differs by at
    most n · step · unit / 2; integers are exact. All this is before the total is rounded to the tensors' types.

    Args:
        clients: identifiers of the round's clients.
        settings: bits, bound and threshold.
        key: of this round: with the same key twice, masks would repeat.
        largest_weight: of a client in a Mean, known to all before the round, such as the cap on examples.
        absent: clients that left before they shared their secrets.

    Attributes:
        contributed: identifiers of the clients in the total, in the order of ``clients``.
        clipped: how many numbers and weights were clipped. A network would not tell.
        reason: why :meth:`finish` returned None.

    Raises:
        ConfigError: if Flower is not installed, or the largest weight is not above 0.
    """

    def __init__(
        self,
        clients: Sequence[int],
        settings: SecureSums,
        key: Key,
        largest_weight: float,
        absent: Collection[int] = (),
    ) -> None:
        super().__init__(clients)
        present = [c for c in clients if c not in absent]
        self.clipped, self.reason, self._order, self._missing, self._like = 0, "", clients, set(present), None
        self._grid = FixedPoint.choose(settings, len(clients), largest_weight)
        self._plan = Plan.choose(len(clients), present, settings.threshold, key / "neighbors")
        self._clients = {c: MaskingClient(c, key / "client" / c, self._plan.least) for c in present}
        for owner, holders in self._plan.holders.items():
            shares = self._clients[owner].share(len(holders), self._plan.needed)
            for holder, pair in zip(holders, shares, strict=True):
                self._clients[holder].held[owner] = pair
        self._public_keys = {c: client.keys.public_key for c, client in self._clients.items()}
        self._server = MaskedSum(self._plan, self._public_keys)

    def add(self, client: int, contribution: Any) -> None:
        """Mask a contribution and add it.

        Raises:
            TaskError: if a part of it must be seen by itself.
            TreeError: if it holds what cannot be added, or does not have the form of those before.
            ValueError: if the client takes no part in the round, has replied or was skipped.
        """
        if client not in self._missing:
            raise ValueError(f"client {client} takes no part in the round, has replied or was skipped")
        try:
            aligned = _aligned(contribution if self._like is None else self._like, contribution)
        except (TaskError, tree.TreeError) as error:
            raise type(error)(
                f"secure sums cannot add the contribution of client {client}: {error}"
            ) from error
        if self._like is None:
            # the form alone
            self._like = map_leaves(
                lambda _, leaf: type(leaf)(tree.map(lambda t: t.new_zeros(()).expand(t.shape), leaf.value)),
                contribution,
            )
        vector, clipped = self._grid.encode(aligned)
        neighbors = {c: self._public_keys[c] for c in self._plan.holders[client] if c != client}
        self._server.add(client, self._clients[client].mask(vector, neighbors))
        self.clipped += clipped
        self._missing.remove(client)
        self.contributed = [c for c in self._order if c in self._server.replied]

    def skip(self, client: int) -> None:
        """Leave out a client whose masked vector does not come."""
        self._missing.discard(client)

    def finish(self) -> Any:
        """The total, or None and a ``reason`` if the masks cannot be removed; ValueError if a client is missing."""
        if self._missing:
            raise ValueError(
                f"the round is not over: {sorted(self._missing)} neither replied nor were skipped"
            )
        try:
            revealed = [self._clients[c].reveal(self._server.replied) for c in self.contributed]
            return self._grid.decode(self._server.unmask(revealed), self._like)
        except TooFewRepliesError as error:
            self.contributed, self.reason = (
                [],
                f"secure sums give nothing in this round: {error} (secure.threshold)",
            )
            return None
