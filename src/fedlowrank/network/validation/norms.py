"""Bounds the norm of updates: a reply whose update is an outlier is refused for the round.

Each part of an upload (the fields of a dataclass; an upload of another type is one part) is measured twice:
as the upload minus the part of the download with the same form, and as the upload itself. The update is
whichever has the smaller median over the replies: the difference for methods that send weights, the upload
for those that send updates.

A reply is refused if a part of its update is longer than

    update_ratio · max(median of this round, median of past medians) · max(1, client's steps / median steps).

The steps are those that the registered number of examples implies. The median of an even number of values is
the lower middle one, so that one of two clients cannot raise it. A single reply is compared with past rounds
only. In the first round, and if all usual updates are zero, an update may be as long as the download, that of
a single client update_ratio times as long.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from ...core import tree

WINDOW = 10
"""Past rounds whose medians are remembered."""

CHUNK = 2**16
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


def measure(upload: Any, down: Any) -> dict[str, PartNorms]:
    """The norms of all parts of an upload that have floating-point numbers, by path; see the module."""
    references = list(_parts(down))
    norms = {}
    for path, part in _parts(upload):
        numbers = list(floats(part))
        if not numbers:
            continue
        itself = math.hypot(*(norm(number) for _, number in numbers))
        form = _form(part)
        same = sorted((p for p in references if _form(p[1]) == form), key=lambda p: p[0] != path)
        if not same:
            norms[path] = PartNorms(itself)
            continue
        others = [number for _, number in floats(same[0][1])]
        change = math.hypot(*(norm(n, other) for (_, n), other in zip(numbers, others, strict=True)))
        norms[path] = PartNorms(itself, change, math.hypot(*map(norm, others)))
    return norms


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of dataclasses in a tree with their paths; a tree of another type is one part."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _parts(getattr(value, f.name), tree.join(path, f.name))
    else:
        yield path, value


def _form(value: Any) -> list[tuple[str, torch.dtype | None, tuple[int, ...]]]:
    return [
        (p, x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else (p, None, ()) for p, x in floats(value)
    ]


def floats(value: Any, path: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """The floating-point tensors and numbers of a tree with their paths."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
        return
    if type(value) is float:
        yield path, value
    for key, child in tree.children(value, path) or ():
        yield from floats(child, tree.join(path, key))


def norm(number: Tensor | float, minus: Tensor | float | None = None) -> float:
    """Euclidean norm of ``number - minus`` in float64; not finite if a number is not, or it overflows."""
    if not isinstance(number, Tensor):
        return abs(number - (0.0 if minus is None else float(minus)))
    total = 0.0
    # not in one go: a tensor in float64 would take twice as much as the tensor itself
    parts = torch.split(number.detach().reshape(-1), CHUNK)
    others: Iterable[Tensor | None] = itertools.repeat(None)
    if isinstance(minus, Tensor):
        others = torch.split(minus.detach().reshape(-1).to(number.device), CHUNK)
    for part, other in zip(parts, others, strict=False):
        wide = part.double() if other is None else part.double() - other.double()
        here = float(torch.linalg.vector_norm(wide))
        if not math.isfinite(here):
            # squares of large numbers in float64 overflow where the numbers do not
            top = float(wide.abs().amax())
            here = top * float(torch.linalg.vector_norm(wide / top)) if math.isfinite(top) else math.nan
        total = math.hypot(total, here)
    return total


@dataclass
class NormBound:
    """Compares updates with those of the round and of past rounds.

    Attributes:
        ratio: ``update_ratio``; 0 for no bound.
        past: median of the changes (None if there were none) and of the parts, by completed rounds and part.
    """

    ratio: float
    past: dict[int, dict[str, tuple[float | None, float]]] = field(default_factory=dict)

    def outliers(
        self, replies: Mapping[int, Mapping[str, PartNorms]], steps: Mapping[int, int], round: int
    ) -> dict[int, str]:
        """The clients whose updates are too long, with the reason.

        Args:
            replies: result of :func:`measure` for each valid reply.
            steps: optimizer steps that each client's registered examples imply.
            round: rounds completed; later ones of :attr:`past` are ignored.
        """
        reasons: dict[int, str] = {}
        if not self.ratio or not replies:
            return reasons
        usual_steps = max(1, median_low(steps[c] for c in replies))
        for part in sorted({p for measured in replies.values() for p in measured}):
            norms = {c: measured[part] for c, measured in replies.items() if part in measured}
            for client, (size, bound, usual) in self._bounds_of(part, norms, round).items():
                scale = max(1.0, steps[client] / usual_steps)
                if size > bound * scale:
                    reasons.setdefault(client, (
                        f"its update has the norm {size:.4g}{f' at {part}' if part else ''}, above "
                        f"{bound * scale:.4g}; {usual:.4g} is usual "
                        f"(network.limits.update_ratio = {self.ratio:g})"
                    ))  # fmt: skip
        return reasons

    def _bounds_of(
        self, part: str, norms: Mapping[int, PartNorms], round: int
    ) -> dict[int, tuple[float, float, float]]:
        """Size of the update, bound before scaling by steps, and usual size, for each client."""
        changes, parts = medians(norms.values())
        past = [self.past[t][part] for t in sorted(self.past) if t < round and part in self.past[t]]
        # past rounds tell weights from differences; a liar has no say in that
        both = [(change, whole) for change, whole in past if change is not None]
        both = both or [(m.change, m.itself) for m in norms.values() if m.change is not None]
        by_change = bool(both) and median_low(c for c, _ in both) <= median_low(w for _, w in both)
        bounds = {}
        for client, m in norms.items():
            if by_change and m.change is not None:
                size, now, before = m.change, changes, [change for change, _ in past if change is not None]
            else:
                size, now, before = m.itself, parts, [whole for _, whole in past]
            known = [median_low(before)] if before else []
            if now is not None and len(norms) > 1:
                known.append(now)
            usual = max(known, default=0.0)
            bound = self.ratio * usual
            if not before or usual == 0:
                bound = max(bound, self._first_bound(m, by_change, alone=not known, moved=usual > 0))
            bounds[client] = size, bound, usual
        return bounds

    def _first_bound(self, m: PartNorms, by_change: bool, alone: bool, moved: bool) -> float:
        """The bound of an update without past rounds to compare with."""
        if m.change is not None and m.download > 0 and (by_change or alone):
            return m.download * (self.ratio if alone else 1.0)
        # differences without any to compare them with
        return math.inf if alone else 0.0 if moved else self.ratio

    def learn(self, replies: Mapping[int, Mapping[str, PartNorms]], round: int) -> None:
        """Store the medians of a round over all replies that were compared, refused ones included."""
        # a round that is done again is learned again
        for late in [t for t in self.past if t >= round]:
            del self.past[late]
        if parts := sorted({p for measured in replies.values() for p in measured}):
            self.past[round] = {p: medians(m[p] for m in replies.values() if p in m) for p in parts}
        for old in sorted(self.past)[:-WINDOW]:
            del self.past[old]


def medians(norms: Iterable[PartNorms]) -> tuple[float | None, float]:
    """Medians of the changes (None if there are none) and of the parts."""
    parts = list(norms)
    changes = [m.change for m in parts if m.change is not None]
    return median_low(changes) if changes else None, median_low(m.itself for m in parts)
