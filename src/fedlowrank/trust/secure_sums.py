"""Secure sums in simulation: the server adds up masked contributions and learns only their total.

Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017, with few
neighbors as in Bell et al., *Secure Single-Server Aggregation with (Poly)Logarithmic Overhead*, CCS 2020.

1. Client i has a key pair (s_i, S_i) and the seed b_i of its own mask. It and its neighbors hold Shamir
   shares of s_i and b_i.
2. It quantizes its contribution to a vector x_i and sends, modulo 2^64, with s_ij = DH(s_i, S_j) = s_ji,
   y_i = x_i + PRG(b_i) + Σ_{neighbors j > i} PRG(s_ij) - Σ_{neighbors j < i} PRG(s_ij).
3. The holders reveal their shares of b_i if y_i arrived, and of s_i if it was lost; never both. The server
   rebuilds these secrets and subtracts the masks that remain in Σ y_i.

The arithmetic is the same as over a network, but nothing is sent, shares are not encrypted, and secrets come from a
:class:`~fedlowrank.core.key.Key`, which anyone who knows the seed of the run can compute. The server follows
the protocol and may inspect all that it receives; a server that lies about which clients replied is not covered.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import math
import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core import tree
from ..core.arguments.shares import multiply_share
from ..core.contract import Each, Mean, Sum
from ..core.contract.contribution import (
    Aggregator,
    as_summand,
    contribution_leaves,
    fault_of,
    map_contributions,
)
from ..core.errors import ConfigError, TaskError
from ..core.key import Key
from .trust_settings import SecureSums

logger = logging.getLogger(__name__)

MIN_REPLIES = 2
"""Smallest number of clients in a sum: the sum over one client is what it sent."""

MAX_FINE_STEP = 1e-3
"""Largest step of a value without a warning: a round of training changes many weights by less than a larger one."""

MAX_WEIGHT_ERROR = 1e-3
"""Largest share of a client's largest weight by which rounding may change it."""

_WEIGHT_REMEDY = (
    "Weigh clients by their numbers of examples or equally, or multiply all weights by one number"
)

Vector = NDArray[np.uint64]  # numbers modulo 2^64: numpy's sums wrap by themselves
SECRET_BYTES = 15  # bytes of a secret: with its padding, one block of the sharing scheme


@functools.cache
def _load(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of click, in Flower's own imports
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"secure.on needs Flower: pip install 'fedlowrank[network]' ({error})") from error


def warn_of_coarse_grid(settings: SecureSums) -> None:
    """Log a warning if values are rounded to steps above :data:`MAX_FINE_STEP`."""
    step = grid_step(settings)
    if step > MAX_FINE_STEP:
        logger.warning(
            "secure.bits = %d and secure.bound = %g: every number that clients send is rounded to a multiple of %.2g, and "
            "many changes of a round are smaller. Raise secure.bits (22 by default) or lower secure.bound",
            settings.bits,
            settings.bound,
            step,
        )


def grid_step(settings: SecureSums) -> float:
    """The quantization step of a value, R / (2^(bits - 1) - 1), so that 0 is exact."""
    levels: int = 2 ** (settings.bits - 1) - 1
    return settings.bound / levels


def align(template: Any, contribution: Any) -> list[tuple[Mean[Any] | Sum[Any], list[Tensor]]]:
    """Match the leaves and tensors of a contribution to those of a template, whose order the result has.

    Raises:
        TaskError: if the server must see the value of a single client at a leaf.
        TreeError: if the contribution does not have the form of the template, or holds something that cannot be added.
    """
    if single_paths := [path for path, leaf in contribution_leaves(contribution) if isinstance(leaf, Each)]:
        raise TaskError(
            f"the server must see the Each at {single_paths[0]!r} by itself. Set secure.on = false, or use means and "
            "sums alone: fedavg, fedit, hetlora with prune = 1, fedslr with memory_efficient = true"
        )
    if fault := fault_of(contribution):
        raise tree.TreeError(fault)
    leaf_types, expected_types = (
        map_contributions(lambda _, x: type(x).__name__, c) for c in (contribution, template)
    )
    if leaf_types != expected_types:
        raise tree.TreeError(f"its leaves are {leaf_types}, those of others {expected_types}")
    leaves, aligned_leaves = dict(contribution_leaves(contribution)), list[tuple[Any, list[Tensor]]]()
    for path, leaf in contribution_leaves(template):
        aligned_leaves.append((leaves[path], []))
        tree.map_leaves(lambda _, t, to=aligned_leaves[-1][1]: to.append(t), leaf.value, leaves[path].value)
        for a, b in zip(tree.tensors(leaf.value), aligned_leaves[-1][1], strict=True):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                raise tree.TreeError(f"at {path!r} it has {b.dtype} {[*b.shape]}, not {a.dtype} {[*a.shape]}")
            is_countable = isinstance(leaf, Sum) and not b.is_complex() and b.dtype != torch.bool
            if not b.is_floating_point() and not is_countable:
                raise tree.TreeError(f"at {path!r} it has {b.dtype}; means take floats, sums integers, too")
    return aligned_leaves


class Encoded(NamedTuple):
    """A contribution on the grid.

    Attributes:
        vector: the numbers ``[size]``; a mean's weight precedes its values.
        clip_count: number of values that were clipped.
        coarse_weights: weights that rounding changes by more than :data:`MAX_WEIGHT_ERROR`, beside a larger one.
    """

    vector: Vector
    clip_count: int
    coarse_weights: list[float]


class FixedPoint:
    """Fixed-point encoding of numbers as integers; sums of products of a weight and a value stay below 2^63.

    Attributes:
        bound: R, at which values are clipped to ±R.
        step: quantization step of a value, R / (2^(bits - 1) - 1), so that 0 is exact.
        largest_weight: largest weight; larger ones are refused.
        unit: quantization step of a weight, the least power of two with which ``largest_weight`` fits in the bits left (at
            most 32). Its multiples are exact, so whole numbers are exact if it is at most 1.
        has_warned: whether a warning of coarse weights was logged.
    """

    def __init__(self, settings: SecureSums, client_count: int, largest_weight: float) -> None:
        if not 0 < largest_weight < math.inf:
            raise ConfigError(f"the largest weight of a secure sum is above 0; this one is {largest_weight}")
        levels = 2 ** min(32, 63 - settings.bits - client_count.bit_length()) - 1
        self.bound: float = settings.bound
        self.has_warned = False
        self.step: float = grid_step(settings)
        self.largest_weight, self.unit = largest_weight, 2.0 ** math.ceil(math.log2(largest_weight / levels))

    @property
    def sum_step(self) -> float:
        """The quantization step of a value that is summed without a weight."""
        return self.step * self.unit

    @property
    def largest_sum(self) -> float:
        """Bound R' to which values that are summed without a weight are clipped, ±R'."""
        return self.bound * self.largest_weight

    def encode(self, aligned_leaves: Collection[tuple[Mean[Any] | Sum[Any], list[Tensor]]]) -> Encoded:
        """Encode leaves on the grid; TaskError if a weight is too large, or the largest too small, for the grid."""
        coarse_weights = self._find_coarse_weights(
            [
                float(leaf.weight)
                for leaf, tensors in aligned_leaves
                if isinstance(leaf, Mean) and any(t.numel() for t in tensors)
            ]
        )
        chunks, clip_count = [torch.empty(0, dtype=torch.int64)], 0
        for leaf, tensors in aligned_leaves:
            # a client has already multiplied the values of a Sum by its weight
            weight, limit, step = 1, self.largest_sum, self.sum_step
            if isinstance(leaf, Mean):
                weight = round(min(leaf.weight, self.largest_weight) / self.unit)
                limit, step = self.bound, self.step
                chunks.append(torch.tensor([weight]))
            for t in tensors:
                x = t.detach().cpu().reshape(-1)
                if x.is_floating_point():
                    clip_count += int((x.double().abs() > limit).sum()) if weight else 0
                    x = (x.double().clip(-limit, limit) / step).round()
                chunks.append(weight * x.to(torch.int64))
        return Encoded(torch.cat(chunks).numpy().view(np.uint64), clip_count, coarse_weights)

    def _find_coarse_weights(self, weights: Collection[float]) -> list[float]:
        """Find the weights that rounding changes by more than :data:`MAX_WEIGHT_ERROR`.

        Raises:
            TaskError: if a weight is above the largest one, or the largest weight of the client is among those found.
        """
        largest = max(weights, default=0.0)
        if largest > self.largest_weight * (1 + MAX_WEIGHT_ERROR):
            raise TaskError(
                f"its weight in a mean is {largest:g}, and secure sums take weights up to {self.largest_weight:g} (in a "
                f"simulation the most training examples of a client, over a network 2^20). {_WEIGHT_REMEDY}"
            )

        def compute_error(weight: float) -> float:
            return abs(round(weight / self.unit) * self.unit - weight) / weight

        coarse_weights = [w for w in weights if w > 0 and compute_error(w) > MAX_WEIGHT_ERROR]
        if largest in coarse_weights:
            raise TaskError(
                f"its largest weight in a mean is {largest:.4g}, and secure sums round weights to multiples of "
                f"{self.unit:.2g}, which changes it by {compute_error(largest):.2g} of itself; at most {MAX_WEIGHT_ERROR:g} "
                f'is allowed. {_WEIGHT_REMEDY}, or lower secure.bits (see "Secure sums" in docs/network.md)'
            )
        return coarse_weights

    def describe_coarse_weights(self, weights: Sequence[float]) -> str:
        """Describe weights that are rounded coarsely beside a larger one, for a warning."""
        return (
            f"secure sums round weights to multiples of {self.unit:.2g}, and clients have smaller ones beside their "
            f"largest, such as {min(weights):.2g}, which change by more than {MAX_WEIGHT_ERROR:g} of themselves. A share of "
            "a cluster close to 0 does no harm. Otherwise multiply all weights by one number"
        )

    def decode(self, vector: Vector, template: Any) -> Any:
        """Decode the total, its tensors like those of ``template``, integers as int64; None for a mean without weight."""
        numbers, totals = torch.from_numpy(vector.view(np.int64)), dict[str, Any]()
        for path, leaf in contribution_leaves(template):
            weight, step, values = 1, self.sum_step, []
            if isinstance(leaf, Mean):
                weight, step, numbers = int(numbers[0]), self.step, numbers[1:]
            for t in tree.tensors(leaf.value):
                x, numbers = numbers[: t.numel()], numbers[t.numel() :]
                x = x.double() / max(weight, 1) * step if t.is_floating_point() else x
                values.append(x.to(as_summand(t).dtype, copy=True).reshape(t.shape).to(t.device))
            totals[path] = tree.map_leaves(lambda _, v=values: v.pop(0), leaf.value) if weight else None
        return map_contributions(lambda path, _: totals[path], template)


class MaskingPlan:
    """Which of m clients share masks, and how many must reply.

    Attributes:
        holders: holders of the shares of each client's secrets: itself and its neighbors, which are up to 2 ⌈log2 m⌉ places
            away in a random order on a circle: all for m ≤ 20, 28 for m = 100.
        min_replies: smallest number of replies with which the round has a result.
        threshold: number of shares that rebuild a secret; this many holders could unmask a client. ``min_replies`` if
            all are neighbors, else half of the holders that reply on average if ``min_replies`` clients do: 10 of 29 for
            m = 100.
    """

    def __init__(self, client_ids: Sequence[int], threshold: float, key: Key) -> None:
        m, reach = len(client_ids), 2 * max(0, len(client_ids) - 1).bit_length()
        order, offsets, holder_count = (
            key.numpy().permutation(m),
            range(-reach, reach + 1),
            min(2 * reach + 1, m),
        )
        holder_indices = {
            client_ids[p]: sorted({int(order[(i + d) % m]) for d in offsets}) for i, p in enumerate(order)
        }
        self.holders = {
            client_id: [client_ids[p] for p in holders] for client_id, holders in holder_indices.items()
        }
        self.min_replies = max(MIN_REPLIES, math.ceil(multiply_share(threshold, m)))
        self.threshold = min(
            holder_count,
            self.min_replies if holder_count == m else math.ceil(multiply_share(threshold, holder_count) / 2),
        )


def expand(seed: bytes, size: int) -> Vector:
    """Expand a seed to the mask PRG(seed) ``[size]``, uniform modulo 2^64: the key stream of AES-256 in counter mode."""
    # Flower's pseudo_rand_gen folds a seed to 32 bits and never draws the largest number
    ciphers = _load("cryptography.hazmat.primitives.ciphers")
    key = ciphers.algorithms.AES(hashlib.sha256(seed).digest())
    stream = ciphers.Cipher(key, ciphers.modes.CTR(bytes(16))).encryptor().update(bytes(8 * size))
    return np.frombuffer(stream, "<u8").astype(np.uint64, copy=False)


def combine(shares: Sequence[bytes]) -> bytes:
    """Rebuild the secret from its shares, if they are enough and correct."""
    secret: bytes = _load("flwr.common.secure_aggregation.crypto.shamir").combine_shares(list(shares))
    return secret


class KeyPair:
    """A client's secret s and its public key S."""

    def __init__(self, client_id: int, secret: bytes) -> None:
        self._client, self._curve = client_id, _load("cryptography.hazmat.primitives.asymmetric.x25519")
        self._private = self._curve.X25519PrivateKey.from_private_bytes(hashlib.sha256(secret).digest())
        self.public_key: bytes = self._private.public_key().public_bytes_raw()

    def mask(self, neighbor_id: int, public_key: bytes, size: int, context: bytes = b"") -> Vector:
        """Compute the mask that the client adds for a neighbor; the masks of the two add up to 0.

        Args:
            neighbor_id: identifier of the neighbor.
            public_key: public key of the neighbor.
            size: length of the vector.
            context: bytes that both clients must have in common, or their masks do not cancel.
        """
        seed = self._private.exchange(self._curve.X25519PublicKey.from_public_bytes(public_key)) + context
        return expand(seed, size) if self._client < neighbor_id else np.negative(expand(seed, size))


class MaskingClient:
    """The client's side. ``shares`` are shares of b and s by owner; they are revealed only with enough replies.

    Args:
        client_id: identifier of the client.
        seed: b, the seed of its own mask, 15 random bytes.
        secret: s, the secret of its key pair, 15 random bytes.
        min_replies: smallest number of replies with which shares are revealed.
    """

    def __init__(self, client_id: int, seed: bytes, secret: bytes, min_replies: int) -> None:
        self._seed, self._secret, self._least = seed, secret, min_replies
        self.keys = KeyPair(client_id, secret)
        self.shares: dict[int, tuple[bytes, bytes]] = {}

    def share(self, share_count: int, threshold: int) -> list[tuple[bytes, bytes]]:
        """Split b and s into ``share_count`` shares, any ``threshold`` of which rebuild them."""
        split = _load("flwr.common.secure_aggregation.crypto.shamir").create_shares
        return list(
            zip(
                split(self._seed, threshold, share_count),
                split(self._secret, threshold, share_count),
                strict=True,
            )
        )

    def mask(self, vector: Vector, neighbors: Mapping[int, bytes], context: bytes = b"") -> Vector:
        """The masked vector y ``[size]``, given the public keys of the neighbors; see :meth:`KeyPair.mask`."""
        masked_vector = vector + expand(self._seed, vector.size)
        for neighbor_id, public_key in neighbors.items():
            masked_vector += self.keys.mask(neighbor_id, public_key, vector.size, context)
        return masked_vector

    def reveal(self, replied_ids: Set[int]) -> dict[int, bytes]:
        """Shares to reveal by owner: of b if the owner replied, of s if not; none with fewer than ``min_replies``."""
        shares = self.shares if len(replied_ids) >= self._least else {}
        return {owner: b if owner in replied_ids else s for owner, (b, s) in shares.items()}


class MaskedSum:
    """The server's side: it has the plan, public keys, masked vectors and, at the end, revealed shares."""

    def __init__(self, plan: MaskingPlan, public_keys: Mapping[int, bytes]) -> None:
        self._plan, self._public_keys, self.replied = plan, public_keys, set[int]()
        self._sum: Any = 0

    def add(self, client_id: int, masked_vector: Vector) -> None:
        """Add a client's masked vector to the sum."""
        self._sum = self._sum + masked_vector
        self.replied.add(client_id)

    def unmask(self, revealed_shares: Sequence[Mapping[int, bytes]]) -> Vector | str:
        """Compute the sum of the vectors from what each holder reveals by owner; or return why there is none."""
        if len(self.replied) < self._plan.min_replies:
            return f"{len(self.replied)} clients replied, and {self._plan.min_replies} must"
        total, threshold = np.copy(self._sum), self._plan.threshold
        for client_id, holders in self._plan.holders.items():
            shares = [
                shares_by_owner[client_id]
                for shares_by_owner in revealed_shares
                if client_id in shares_by_owner
            ][:threshold]
            if len(shares) < threshold:
                return f"{len(shares)} holders of shares of client {client_id} replied, and {threshold} must"
            secret = combine(shares)
            if client_id in self.replied:
                total -= expand(secret, total.size)
                continue
            for neighbor_id in self.replied.intersection(holders):
                total += KeyPair(client_id, secret).mask(
                    neighbor_id, self._public_keys[neighbor_id], total.size
                )
        return total


class SecureAggregator(Aggregator):
    """Totals as from an :class:`Aggregator`, up to quantization, bit-equal in any order of arrival.

    With values clipped to ±R, weights w_k rounded to q_k (|q_k - w_k| ≤ unit/2), W' = Σ q_k, exact mean m,
    the mean differs by Σ q_k (x'_k - x_k) / W' + Σ (q_k - w_k)(x_k - m) / W', as Σ w_k (x_k - m) = 0; by at
    most step/2 + n (unit / 2W') max |x_k - m| ≤ step/2 + n R unit / W'. The second term is 0 if weights are
    multiples of the unit. Floats of a Sum are clipped to ±R · ``largest_weight``; their total differs by at
    most n · step · unit / 2; integers are exact. The total is then rounded to the dtypes of the tensors.

    Args:
        client_ids: identifiers of the round's clients.
        settings: bits, bound and threshold. ConfigError if Flower is not installed.
        key: key of this round; masks would repeat with the same key.
        largest_weight: largest weight of a client in a Mean, known to all before the round, such as the cap on examples.

    Attributes:
        clipped: number of values that were clipped. Over a network each client knows only its own number.
        coarse_weights: weights that were rounded coarsely, see :class:`Encoded`.
        grid: fixed-point grid of the numbers.
        reason: the reason why :meth:`finish` returned None.
    """

    accepts_rows = False

    def __init__(
        self,
        client_ids: Sequence[int],
        settings: SecureSums,
        key: Key,
        largest_weight: float,
    ) -> None:
        super().__init__(client_ids)
        self.clipped, self.reason, self._order, self._missing, self._like = (
            0,
            "",
            client_ids,
            set(client_ids),
            None,
        )
        self.coarse_weights: list[float] = []
        self.grid = FixedPoint(settings, len(client_ids), largest_weight)
        self._plan = MaskingPlan(client_ids, settings.threshold, key / "neighbors")

        def make(client: int) -> MaskingClient:
            client_key = key / "client" / client
            seed, secret = (
                (client_key / name).numpy().bytes(SECRET_BYTES) for name in ("own mask", "key pair")
            )
            return MaskingClient(client, seed, secret, self._plan.min_replies)

        self._clients = {c: make(c) for c in client_ids}
        for owner, holders in self._plan.holders.items():
            shares = self._clients[owner].share(len(holders), self._plan.threshold)
            for holder, pair in zip(holders, shares, strict=True):
                self._clients[holder].shares[owner] = pair
        self._public_keys = {c: client.keys.public_key for c, client in self._clients.items()}
        self._server = MaskedSum(self._plan, self._public_keys)

    def add(self, client_id: int, contribution: Any) -> None:
        """Mask a contribution and add it.

        Raises:
            TaskError: if it has an Each, or a weight that is too large or too small for the grid.
            TreeError: if its form differs from earlier ones.
        """
        if client_id not in self._missing:
            raise ValueError(f"client {client_id} takes no part in the round, has replied or was skipped")
        try:
            encoded = self.grid.encode(
                align(contribution if self._like is None else self._like, contribution)
            )
        except (TaskError, tree.TreeError) as error:
            raise type(error)(f"secure sums cannot take the reply of client {client_id}: {error}") from error
        if self._like is None:
            self._like = map_contributions(
                lambda _, leaf: type(leaf)(tree.zeros_like(leaf.value)), contribution
            )
        neighbors = {c: self._public_keys[c] for c in self._plan.holders[client_id] if c != client_id}
        self._server.add(client_id, self._clients[client_id].mask(encoded.vector, neighbors))
        self.clipped += encoded.clip_count
        self.coarse_weights += encoded.coarse_weights
        self._missing.remove(client_id)
        self.contributed = [c for c in self._order if c in self._server.replied]

    def skip(self, client_id: int) -> None:
        """Leave out a client whose masked vector does not arrive."""
        self._missing.discard(client_id)

    def finish(self) -> Any:
        """Return the total, or None and set ``reason`` if too few replied; ValueError if a client is missing."""
        if self._missing:
            raise ValueError(f"clients {sorted(self._missing)} neither replied nor were skipped")
        total = self._server.unmask([self._clients[c].reveal(self._server.replied) for c in self.contributed])
        if isinstance(total, str):
            self.contributed, self.reason = [], f"this round's secure sum is lost: {total} (secure.threshold)"
            return None
        return self.grid.decode(total, self._like)
