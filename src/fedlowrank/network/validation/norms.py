"""Bounds the norm of updates: a long one is shortened, an outlier is refused for the round.

Each part of an upload (the fields of a dataclass; an upload of another type is one part) is measured twice:
as the upload minus the part of the download with the same form, and as the upload itself. The update is
the one with the smaller median over the replies: the difference for methods that send weights, the upload
for those that send updates. A part that holds factors is also measured by its products: in (5 B, A) most
numbers have their usual size, and the product is five times as long.

The usual norm is max(median of this round, median of past medians). A reply is refused if a part of its update
is longer than

    refuse_ratio · usual · max(1, client's steps / median steps),

where the steps are those for the examples by which the client is weighted. An update that is used is shortened to

    update_ratio · usual · reach

if it is longer. If the counts of examples are promised (network.examples), reach is max(1, client's steps /
median steps). Otherwise a count is only a claim, and reach is min(1, median weight / client's weight): norm times
weight is bounded, so that a client that lies about both gains nothing. A client whose updates were longer than
update_ratio allows in ``strikes`` of its last ten replies has the usual norm as its bound.

The median of an even number of values is the lower middle one, so that one of two clients cannot raise it. A
single reply is compared only with past rounds. In the first round, and if all usual updates are zero, the bound of an
update is the norm of the download, and for a single client refuse_ratio times that norm.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...adapters.mixtures.mixture import Pairs
from ...adapters.wire_format import Quantized, Rounded, unpack_factors
from ...core import tree
from ...linalg.factored import Factored
from ...linalg.pair import Pair
from ...trust.updates import split_products

MAX_PAST_ROUNDS = 10
"""Number of past rounds whose medians are stored."""

PRODUCTS_SUFFIX = " (products)"
"""Suffix of a part's path in the name of the norm of its products."""

CHUNK_NUMBERS = 2**16
"""Number of entries that are converted to float64 together: few enough to stay in a core's cache."""


@dataclass(frozen=True)
class PartNorms:
    """Norms of a part of an upload.

    Attributes:
        norm: norm of the part.
        change: norm of the part minus the part of the download of the same form; None if there is none.
        download: norm of that part of the download; 0 if there is none.
    """

    norm: float
    change: float | None = None
    download: float = 0.0


class ComparedPart(NamedTuple):
    """A part of an upload, and the part of the download with which it is compared.

    Attributes:
        path: path of the part.
        part: numbers of the part, with factors as they are received.
        reference: the part of the download of the same form, or None.
    """

    path: str
    part: Any
    reference: Any


def iterate_parts(upload: Any, down: Any) -> Iterator[ComparedPart]:
    """Yield the parts of an upload that have floating-point numbers, with the parts with which they are compared."""
    references = list(_split_parts(unpack_received(down)))
    for path, part in _split_parts(unpack_received(upload)):
        if any(True for _ in iterate_floats(part)):
            form = _describe_form(part)
            matching_parts = sorted(
                (p for p in references if _describe_form(p[1]) == form), key=lambda p: p[0] != path
            )
            yield ComparedPart(path, part, matching_parts[0][1] if matching_parts else None)


def unpack_received(value: Any) -> Any:
    """Return a tree with factor pairs that lossy compression packed as they are received."""
    if isinstance(value, (Quantized, Rounded)):
        return unpack_factors({"": value})[""]
    children = tree.children(value)
    return value if children is None else tree.rebuild(value, [(k, unpack_received(v)) for k, v in children])


def measure_norms(upload: Any, down: Any) -> dict[str, PartNorms]:
    """Measure the norms of all parts of an upload that have floating-point numbers, by path; see the module."""
    norms = {}
    for path, part, reference in iterate_parts(upload, down):
        norms[path] = _measure_part(part, reference, distance)
        if count := len(list_products(part)):
            product_reference = reference if len(list_products(reference)) == count else None
            norms[path + PRODUCTS_SUFFIX] = _measure_part(part, product_reference, product_distance)
    return norms


def _measure_part(part: Any, reference: Any, measure_norm: Callable[..., float]) -> PartNorms:
    if reference is None:
        return PartNorms(measure_norm(part))
    return PartNorms(measure_norm(part), measure_norm(part, reference), measure_norm(reference))


def distance(part: Any, reference: Any = None) -> float:
    """Norm of all floating-point numbers of a part, minus those of a reference of the same form."""
    numbers = [number for _, number in iterate_floats(part)]
    reference_numbers = (
        [None] * len(numbers) if reference is None else [number for _, number in iterate_floats(reference)]
    )
    return math.hypot(
        *(
            difference_norm(n, reference_number)
            for n, reference_number in zip(numbers, reference_numbers, strict=True)
        )
    )


def list_products(value: Any) -> list[tuple[Tensor, Tensor]]:
    """List the left and right factors, in float64, of the products in a tree."""
    if isinstance(value, Factored):
        return [((value.u * value.s).double(), value.v.mT.double())]
    if isinstance(value, (Pair, Pairs)):
        return [(pair.b.detach().double(), pair.a.detach().double()) for pair in split_products(value)]
    return [pair for _, child in tree.children(value) or () for pair in list_products(child)]


def product_distance(part: Any, reference: Any = None) -> float:
    """Norm of all products of a part, minus those of a reference of the same form; infinite if it overflows."""
    total, reference_products = 0.0, None if reference is None else list_products(reference)
    for k, (left, right) in enumerate(list_products(part)):
        if reference_products is not None:
            # B A - B0 A0 = (B - B0) A + B0 (A - A0), in which no large terms cancel
            left0, right0 = reference_products[k]
            left, right = torch.cat([left - left0, left0], 1), torch.cat([right, right - right0])
        squared_norm = float(((left.mT @ left) * (right @ right.mT)).sum())
        if not math.isfinite(squared_norm):
            return math.inf
        total += max(0.0, squared_norm)
    return math.sqrt(total)


def _split_parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of dataclasses in a tree with their paths; a tree of another type is one part."""
    is_factored = isinstance(value, (Factored, Pair, Pairs))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_factored:
        for f in dataclasses.fields(value):
            yield from _split_parts(getattr(value, f.name), tree.join_path(path, f.name))
    else:
        yield path, value


def _describe_form(value: Any) -> list[tuple[str, torch.dtype | None, tuple[int, ...]]]:
    return [
        (p, x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else (p, None, ())
        for p, x in iterate_floats(value)
    ]


def iterate_floats(value: Any, path: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """Yield the floating-point tensors and numbers of a tree with their paths."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
        return
    if type(value) is float:
        yield path, value
    for key, child in tree.children(value, path) or ():
        yield from iterate_floats(child, tree.join_path(path, key))


def difference_norm(number: Tensor | float, reference: Tensor | float | None = None) -> float:
    """Euclidean norm of ``number - reference`` in float64; not finite if a number is not, or if it overflows."""
    if not isinstance(number, Tensor):
        return abs(number - (0.0 if reference is None else float(reference)))
    total = 0.0
    # in chunks, because a copy of the whole tensor in float64 would take twice the memory of one in float32
    chunks = torch.split(number.detach().reshape(-1), CHUNK_NUMBERS)
    reference_chunks: Iterable[Tensor | None] = itertools.repeat(None)
    if isinstance(reference, Tensor):
        reference_chunks = torch.split(reference.detach().reshape(-1).to(number.device), CHUNK_NUMBERS)
    for chunk, reference_chunk in zip(chunks, reference_chunks, strict=False):
        difference = chunk.double() if reference_chunk is None else chunk.double() - reference_chunk.double()
        chunk_norm = float(torch.linalg.vector_norm(difference))
        if not math.isfinite(chunk_norm):
            # squares of large numbers overflow in float64 even if the numbers do not
            max_value = float(difference.abs().amax())
            chunk_norm = (
                max_value * float(torch.linalg.vector_norm(difference / max_value))
                if math.isfinite(max_value)
                else math.nan
            )
        total = math.hypot(total, chunk_norm)
    return total


class Length(NamedTuple):
    """Length of a part of a client's update.

    Attributes:
        size: norm of the part.
        usual_norm: usual norm of the part; 0 if there is none.
        by_change: whether the update is the difference from the download.
        has_past: whether there are past rounds that determine the usual norm.
        is_alone: whether neither past rounds nor other clients determine the usual norm.
    """

    size: float
    usual_norm: float
    by_change: bool
    has_past: bool
    is_alone: bool


@dataclass(frozen=True)
class Shortening:
    """Plan of how an update is shortened.

    Attributes:
        bounds: bound of each part's norm and whether the part is a difference from the download, by name.
        length: norm of its longest part divided by the usual norm.
        kept_share: the smallest ratio of a part's bound to its norm.
        is_strike: whether the update was longer than ``update_ratio`` alone allows.
    """

    bounds: dict[str, tuple[float, bool]]
    length: float
    kept_share: float
    is_strike: bool


@dataclass
class NormBound:
    """Compares updates with those of the same round and of past rounds.

    Attributes:
        ratio: ratio ``refuse_ratio`` beyond which an update is refused; 0 for no bound.
        past: medians of the changes (None if there were none) and of the parts, by completed rounds and part.
    """

    ratio: float
    past: dict[int, dict[str, tuple[float | None, float]]] = field(default_factory=dict)

    def find_outliers(
        self, replies: Mapping[int, Mapping[str, PartNorms]], steps: Mapping[int, int], round: int
    ) -> dict[int, str]:
        """Find the clients whose updates are far too long, with the reason.

        Args:
            replies: result of :func:`measure_norms` for each valid reply.
            steps: optimizer steps that each client's examples imply.
            round: number of completed rounds; later ones in :attr:`past` are ignored.
        """
        reasons: dict[int, str] = {}
        if not self.ratio or not replies:
            return reasons
        scales = relative_steps(steps, replies)
        for part, norms in _group_by_part(replies).items():
            for client_id, length in self.measure_lengths(part, norms, round).items():
                bound = self.ratio * length.usual_norm
                if not length.has_past or length.usual_norm == 0:
                    bound = max(bound, self._first_bound(norms[client_id], length))
                if length.size > bound * scales[client_id]:
                    reasons.setdefault(client_id, (
                        f"its update has the norm {length.size:.4g}{f' at {part}' if part else ''}, above "
                        f"{bound * scales[client_id]:.4g}; {length.usual_norm:.4g} is usual "
                        f"(network.limits.refuse_ratio = {self.ratio:g})"
                    ))  # fmt: skip
        return reasons

    def plan_shortenings(
        self,
        replies: Mapping[int, Mapping[str, PartNorms]],
        ratios: Mapping[int, float],
        reach: Mapping[int, float],
        ratio: float,
        round: int,
    ) -> dict[int, Shortening]:
        """Plan how to shorten the updates that are too long.

        Args:
            replies: result of :func:`measure_norms` for each reply that is used.
            ratios: largest norm of each client's update in usual norms, before ``reach``.
            reach: factor by which the ratio of each client is multiplied; see the module.
            ratio: ratio ``update_ratio``, beyond which an update is a strike.
            round: number of completed rounds.
        """
        bounds: dict[int, dict[str, tuple[float, bool]]] = {}
        shortenings: dict[int, Shortening] = {}
        for part, norms in _group_by_part(replies).items():
            for client_id, length in self.measure_lengths(part, norms, round).items():
                if length.usual_norm == 0 or length.size <= (
                    bound := length.usual_norm * ratios[client_id] * reach[client_id]
                ):
                    continue
                bounds.setdefault(client_id, {})[part] = bound, length.by_change
                relative_length, kept_share, shortening = (
                    length.size / length.usual_norm,
                    bound / length.size,
                    shortenings.get(client_id),
                )
                shortenings[client_id] = Shortening(
                    bounds[client_id],
                    max(relative_length, shortening.length) if shortening else relative_length,
                    min(kept_share, shortening.kept_share) if shortening else kept_share,
                    relative_length > ratio * max(1.0, reach[client_id])
                    or bool(shortening and shortening.is_strike),
                )
        return shortenings

    def measure_lengths(self, part: str, norms: Mapping[int, PartNorms], round: int) -> dict[int, Length]:
        """Measure the length of one part of each client's update, and the usual length."""
        median_change, median_part = medians(norms.values())
        past = [self.past[t][part] for t in sorted(self.past) if t < round and part in self.past[t]]
        # past rounds determine whether uploads are weights or differences, without the influence of a liar in this round
        norm_pairs = [(change, part_norm) for change, part_norm in past if change is not None]
        norm_pairs = norm_pairs or [(m.change, m.norm) for m in norms.values() if m.change is not None]
        by_change = bool(norm_pairs) and median_low(c for c, _ in norm_pairs) <= median_low(
            w for _, w in norm_pairs
        )
        lengths = {}
        for client_id, m in norms.items():
            if by_change and m.change is not None:
                norm, current_median, past_norms = (
                    m.change,
                    median_change,
                    [change for change, _ in past if change is not None],
                )
            else:
                norm, current_median, past_norms = m.norm, median_part, [part_norm for _, part_norm in past]
            usual_norms = [median_low(past_norms)] if past_norms else []
            if current_median is not None and len(norms) > 1:
                usual_norms.append(current_median)
            is_change = by_change and m.change is not None
            lengths[client_id] = Length(
                norm, max(usual_norms, default=0.0), is_change, bool(past_norms), not usual_norms
            )
        return lengths

    def _first_bound(self, m: PartNorms, length: Length) -> float:
        """The norm from which an update is refused if there are no past rounds to compare with."""
        if m.change is not None and m.download > 0 and (length.by_change or length.is_alone):
            return m.download * (self.ratio if length.is_alone else 1.0)
        # updates that are sent as differences, which have no download to compare them with
        return math.inf if length.is_alone else 0.0 if length.usual_norm > 0 else self.ratio

    def learn(self, replies: Mapping[int, Mapping[str, PartNorms]], round: int) -> None:
        """Store the medians of a round over all replies that were compared, including refused ones."""
        # a repeated round replaces its earlier medians
        for late_round in [t for t in self.past if t >= round]:
            del self.past[late_round]
        if part_names := sorted({p for client_norms in replies.values() for p in client_norms}):
            self.past[round] = {p: medians(m[p] for m in replies.values() if p in m) for p in part_names}
        for old_round in sorted(self.past)[:-MAX_PAST_ROUNDS]:
            del self.past[old_round]


def medians(norms: Iterable[PartNorms]) -> tuple[float | None, float]:
    """Compute the medians of the changes (None if there are none) and of the parts."""
    norm_list = list(norms)
    change_norms = [m.change for m in norm_list if m.change is not None]
    return median_low(change_norms) if change_norms else None, median_low(m.norm for m in norm_list)


def relative_steps(steps: Mapping[int, int], replied_ids: Iterable[int]) -> dict[int, float]:
    """Return each client's steps relative to the median, at least 1: the factor on the length of its update."""
    client_ids = list(replied_ids)
    median_steps = max(1, median_low(steps[c] for c in client_ids)) if client_ids else 1
    return {c: max(1.0, steps[c] / median_steps) for c in client_ids}


def _group_by_part(replies: Mapping[int, Mapping[str, PartNorms]]) -> dict[str, dict[int, PartNorms]]:
    names = sorted({part for client_norms in replies.values() for part in client_norms})
    return {
        part: {c: client_norms[part] for c, client_norms in replies.items() if part in client_norms}
        for part in names
    }
