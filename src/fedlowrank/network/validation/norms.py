"""Bounds the norm of updates: a long one is shortened, an outlier is refused for the round.

Each part of an upload (the fields of a dataclass; an upload of another type is one part) is measured twice:
as the upload minus the part of the download with the same form, and as the upload itself. The update is
whichever has the smaller median over the replies: the difference for methods that send weights, the upload
for those that send updates. A part that holds factors is measured once more by its products: of (5 B, A) most
numbers are usual, and the product is five times as long.

The usual norm is max(median of this round, median of past medians). A reply is refused if a part of its update
is longer than

    refuse_ratio · usual · max(1, client's steps / median steps),

with the steps that the examples imply by which the client is weighted. An update that is used is shortened to

    update_ratio · usual · reach

where it is longer. If the counts of examples are promised (network.examples), reach is max(1, client's steps /
median steps). Else a count is only a claim, and reach is min(1, median weight / client's weight): norm times
weight is bounded, so that a client that lies about both gains nothing. A client whose updates were longer than
update_ratio allows in ``strikes`` of its last ten replies is held to the usual norm.

The median of an even number of values is the lower middle one, so that one of two clients cannot raise it. A
single reply is compared with past rounds only. In the first round, and if all usual updates are zero, an update
may be as long as the download before it is refused, that of a single client refuse_ratio times as long.
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
"""Suffix of the path of a part in the name of the norm of its products."""

CHUNK_NUMBERS = 2**16
"""Numbers that are converted to float64 together: few enough to stay in a core's cache."""


@dataclass(frozen=True)
class PartNorms:
    """Norms of a part of an upload.

    Attributes:
        itself: norm of the part.
        change: norm of the part minus the part of the download of the same form; None if there is none.
        download: norm of that part of the download; 0 if there is none.
    """

    itself: float
    change: float | None = None
    download: float = 0.0


class ComparedPart(NamedTuple):
    """A part of an upload beside the part of the download that it is compared with.

    Attributes:
        path: of the part.
        part: its numbers, with factors as they are received.
        reference: the part of the download of the same form, or None.
    """

    path: str
    part: Any
    reference: Any


def iterate_parts(upload: Any, down: Any) -> Iterator[ComparedPart]:
    """The parts of an upload that have floating-point numbers, with what they are compared with."""
    references = list(_split_parts(unpack_received(down)))
    for path, part in _split_parts(unpack_received(upload)):
        if any(True for _ in iterate_floats(part)):
            form = _describe_form(part)
            same = sorted((p for p in references if _describe_form(p[1]) == form), key=lambda p: p[0] != path)
            yield ComparedPart(path, part, same[0][1] if same else None)


def unpack_received(value: Any) -> Any:
    """A tree with the factor pairs that a lossy wire packed as they are received."""
    if isinstance(value, (Quantized, Rounded)):
        return unpack_factors({"": value})[""]
    children = tree.children(value)
    return value if children is None else tree.rebuild(value, [(k, unpack_received(v)) for k, v in children])


def measure_norms(upload: Any, down: Any) -> dict[str, PartNorms]:
    """The norms of all parts of an upload that have floating-point numbers, by path; see the module."""
    norms = {}
    for path, part, reference in iterate_parts(upload, down):
        norms[path] = _measure_part(part, reference, distance)
        if count := len(list_products(part)):
            same = reference if len(list_products(reference)) == count else None
            norms[path + PRODUCTS_SUFFIX] = _measure_part(part, same, product_distance)
    return norms


def _measure_part(part: Any, reference: Any, by: Callable[..., float]) -> PartNorms:
    if reference is None:
        return PartNorms(by(part))
    return PartNorms(by(part), by(part, reference), by(reference))


def distance(part: Any, minus: Any = None) -> float:
    """Norm of all floating-point numbers of a part, minus those of another of the same form."""
    numbers = [number for _, number in iterate_floats(part)]
    subtracted = [None] * len(numbers) if minus is None else [number for _, number in iterate_floats(minus)]
    return math.hypot(*(difference_norm(n, other) for n, other in zip(numbers, subtracted, strict=True)))


def list_products(value: Any) -> list[tuple[Tensor, Tensor]]:
    """The left and right factors, in float64, of the products in a tree."""
    if isinstance(value, Factored):
        return [((value.u * value.s).double(), value.v.mT.double())]
    if isinstance(value, (Pair, Pairs)):
        return [(pair.b.detach().double(), pair.a.detach().double()) for pair in split_products(value)]
    return [pair for _, child in tree.children(value) or () for pair in list_products(child)]


def product_distance(part: Any, minus: Any = None) -> float:
    """Norm of all products of a part, minus those of another of the same form; infinite if it overflows."""
    total, bases = 0.0, None if minus is None else list_products(minus)
    for k, (left, right) in enumerate(list_products(part)):
        if bases is not None:
            # B A - B0 A0 = (B - B0) A + B0 (A - A0), of which no large terms cancel
            left0, right0 = bases[k]
            left, right = torch.cat([left - left0, left0], 1), torch.cat([right, right - right0])
        square = float(((left.mT @ left) * (right @ right.mT)).sum())
        if not math.isfinite(square):
            return math.inf
        total += max(0.0, square)
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
    """The floating-point tensors and numbers of a tree with their paths."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
        return
    if type(value) is float:
        yield path, value
    for key, child in tree.children(value, path) or ():
        yield from iterate_floats(child, tree.join_path(path, key))


def difference_norm(number: Tensor | float, minus: Tensor | float | None = None) -> float:
    """Euclidean norm of ``number - minus`` in float64; not finite if a number is not, or it overflows."""
    if not isinstance(number, Tensor):
        return abs(number - (0.0 if minus is None else float(minus)))
    total = 0.0
    # not in one go: a tensor in float64 would take twice as much as the tensor itself
    parts = torch.split(number.detach().reshape(-1), CHUNK_NUMBERS)
    subtracted: Iterable[Tensor | None] = itertools.repeat(None)
    if isinstance(minus, Tensor):
        subtracted = torch.split(minus.detach().reshape(-1).to(number.device), CHUNK_NUMBERS)
    for part, subtrahend in zip(parts, subtracted, strict=False):
        wide = part.double() if subtrahend is None else part.double() - subtrahend.double()
        here = float(torch.linalg.vector_norm(wide))
        if not math.isfinite(here):
            # squares of large numbers in float64 overflow where the numbers do not
            top = float(wide.abs().amax())
            here = top * float(torch.linalg.vector_norm(wide / top)) if math.isfinite(top) else math.nan
        total = math.hypot(total, here)
    return total


class Length(NamedTuple):
    """How long a part of a client's update is.

    Attributes:
        size: its norm.
        usual: the usual norm; 0 if there is none.
        by_change: whether the update is the difference from the download.
        has_past: whether past rounds tell what is usual.
        alone: whether nothing tells what is usual.
    """

    size: float
    usual: float
    by_change: bool
    has_past: bool
    alone: bool


@dataclass(frozen=True)
class Shortening:
    """How an update is shortened.

    Attributes:
        bounds: the norm that each part may have and whether the part is a difference from the download, by name.
        length: how many times the usual norm its longest part has.
        kept: the smallest ratio of a part's bound to its norm.
        is_strike: whether it was longer than ``update_ratio`` alone allows.
    """

    bounds: dict[str, tuple[float, bool]]
    length: float
    kept: float
    is_strike: bool


@dataclass
class NormBound:
    """Compares updates with those of the round and of past rounds.

    Attributes:
        ratio: ``refuse_ratio``; 0 for no bound.
        past: median of the changes (None if there were none) and of the parts, by completed rounds and part.
    """

    ratio: float
    past: dict[int, dict[str, tuple[float | None, float]]] = field(default_factory=dict)

    def find_outliers(
        self, replies: Mapping[int, Mapping[str, PartNorms]], steps: Mapping[int, int], round: int
    ) -> dict[int, str]:
        """The clients whose updates are far too long, with the reason.

        Args:
            replies: result of :func:`measure_norms` for each valid reply.
            steps: optimizer steps that each client's examples imply.
            round: rounds completed; later ones of :attr:`past` are ignored.
        """
        reasons: dict[int, str] = {}
        if not self.ratio or not replies:
            return reasons
        scales = relative_steps(steps, replies)
        for part, norms in _group_by_part(replies).items():
            for client, length in self.measure_lengths(part, norms, round).items():
                bound = self.ratio * length.usual
                if not length.has_past or length.usual == 0:
                    bound = max(bound, self._first_bound(norms[client], length))
                if length.size > bound * scales[client]:
                    reasons.setdefault(client, (
                        f"its update has the norm {length.size:.4g}{f' at {part}' if part else ''}, above "
                        f"{bound * scales[client]:.4g}; {length.usual:.4g} is usual "
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
            ratios: how many usual norms each client's update may have, before ``reach``.
            reach: by which the ratio of each client is multiplied; see the module.
            ratio: ``update_ratio``, beyond which an update is a strike.
            round: rounds completed.
        """
        bounds: dict[int, dict[str, tuple[float, bool]]] = {}
        shortenings: dict[int, Shortening] = {}
        for part, norms in _group_by_part(replies).items():
            for client, length in self.measure_lengths(part, norms, round).items():
                if length.usual == 0 or length.size <= (
                    bound := length.usual * ratios[client] * reach[client]
                ):
                    continue
                bounds.setdefault(client, {})[part] = bound, length.by_change
                times, remaining, before = (
                    length.size / length.usual,
                    bound / length.size,
                    shortenings.get(client),
                )
                shortenings[client] = Shortening(
                    bounds[client],
                    max(times, before.length) if before else times,
                    min(remaining, before.kept) if before else remaining,
                    times > ratio * max(1.0, reach[client]) or bool(before and before.is_strike),
                )
        return shortenings

    def measure_lengths(self, part: str, norms: Mapping[int, PartNorms], round: int) -> dict[int, Length]:
        """Measure the length of one part of each client's update, beside the usual length."""
        changes, parts = medians(norms.values())
        past = [self.past[t][part] for t in sorted(self.past) if t < round and part in self.past[t]]
        # past rounds tell weights from differences; a liar has no say in that
        both = [(change, whole) for change, whole in past if change is not None]
        both = both or [(m.change, m.itself) for m in norms.values() if m.change is not None]
        by_change = bool(both) and median_low(c for c, _ in both) <= median_low(w for _, w in both)
        lengths = {}
        for client, m in norms.items():
            if by_change and m.change is not None:
                size, now, before = m.change, changes, [change for change, _ in past if change is not None]
            else:
                size, now, before = m.itself, parts, [whole for _, whole in past]
            known = [median_low(before)] if before else []
            if now is not None and len(norms) > 1:
                known.append(now)
            is_change = by_change and m.change is not None
            lengths[client] = Length(size, max(known, default=0.0), is_change, bool(before), not known)
        return lengths

    def _first_bound(self, m: PartNorms, length: Length) -> float:
        """The norm from which an update is refused without past rounds to compare with."""
        if m.change is not None and m.download > 0 and (length.by_change or length.alone):
            return m.download * (self.ratio if length.alone else 1.0)
        # differences without any to compare them with
        return math.inf if length.alone else 0.0 if length.usual > 0 else self.ratio

    def learn(self, replies: Mapping[int, Mapping[str, PartNorms]], round: int) -> None:
        """Store the medians of a round over all replies that were compared, refused ones included."""
        # a round that is done again is learned again
        for late in [t for t in self.past if t >= round]:
            del self.past[late]
        if parts := sorted({p for measured in replies.values() for p in measured}):
            self.past[round] = {p: medians(m[p] for m in replies.values() if p in m) for p in parts}
        for old in sorted(self.past)[:-MAX_PAST_ROUNDS]:
            del self.past[old]


def medians(norms: Iterable[PartNorms]) -> tuple[float | None, float]:
    """Medians of the changes (None if there are none) and of the parts."""
    parts = list(norms)
    changes = [m.change for m in parts if m.change is not None]
    return median_low(changes) if changes else None, median_low(m.itself for m in parts)


def relative_steps(steps: Mapping[int, int], clients: Iterable[int]) -> dict[int, float]:
    """Return each client's steps relative to the median, at least 1: the factor on the length of its update."""
    chosen = list(clients)
    usual = max(1, median_low(steps[c] for c in chosen)) if chosen else 1
    return {c: max(1.0, steps[c] / usual) for c in chosen}


def _group_by_part(replies: Mapping[int, Mapping[str, PartNorms]]) -> dict[str, dict[int, PartNorms]]:
    names = sorted({part for measured in replies.values() for part in measured})
    return {
        part: {c: measured[part] for c, measured in replies.items() if part in measured} for part in names
    }
