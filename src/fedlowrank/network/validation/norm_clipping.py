"""Shortens updates to their largest allowed norm (:mod:`.norms`), and counts long updates by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...core import tree
from ...trust.updates import replace_parts
from .norms import PRODUCTS_SUFFIX, distance, iterate_floats, iterate_parts, product_distance, unpack_received

STRIKE_WINDOW = 10
"""Number of a client's last replies among which long updates are counted."""

_HALVING_STEPS = 40
"""Number of bisection steps in the search for a factor."""


def shorten_upload(upload: Any, down: Any, bounds: Mapping[str, tuple[float, bool]]) -> Any:
    """Move parts of an upload towards their references, until their norms are within bounds.

    Args:
        upload: upload of the client.
        down: download with which :func:`.norms.measure_norms` compared it.
        bounds: bounds of the parts by name, as in :class:`.norms.Shortening`.

    Returns:
        The shortened upload; factors that lossy compression packed are in the form in which the server receives them.
    """
    shortened_parts = {}
    for path, part, reference in iterate_parts(upload, down):
        for name, measure_norm in ((path, distance), (path + PRODUCTS_SUFFIX, product_distance)):
            if name in bounds:
                bound, by_change = bounds[name]
                part = _shorten_part(part, reference if by_change else None, bound, measure_norm)
        shortened_parts[path] = part
    return replace_parts(unpack_received(upload), shortened_parts)


def _shorten_part(part: Any, reference: Any, bound: float, measure_norm: Callable[..., float]) -> Any:
    norm = measure_norm(part, reference)
    if norm <= bound:
        return part
    t = bound / norm
    if measure_norm is product_distance:
        # bisection, because the norm of products is not linear in t: it grows at most with the fourth power
        low, high = 0.0, 1.0
        for _ in range(_HALVING_STEPS):
            t = (low + high) / 2
            low, high = (
                (t, high)
                if measure_norm(interpolate_part(part, reference, t), reference) <= bound
                else (low, t)
            )
        t = low
    return interpolate_part(part, reference, t)


def interpolate_part(part: Any, reference: Any, t: float) -> Any:
    """Interpolate a part to r + t(x - r) for every floating-point number x and its reference r, 0 if there is none."""
    references = {} if reference is None else dict(iterate_floats(reference))

    def move(path: str, x: Tensor | float) -> Tensor | float:
        r = references.get(path, 0.0)
        if not isinstance(x, Tensor):
            return float(r) + t * (x - float(r))
        wide_reference = r.double() if isinstance(r, Tensor) else r
        return (wide_reference + t * (x.double() - wide_reference)).to(x.dtype)

    return _map_floats(part, move)


def _map_floats(value: Any, function: Callable[[str, Tensor | float], Any], path: str = "") -> Any:
    if isinstance(value, Tensor):
        return function(path, value) if value.is_floating_point() else value
    if type(value) is float:
        return function(path, value)
    children = tree.children(value, path)
    if children is None:
        return value
    return tree.rebuild(value, [(k, _map_floats(v, function, tree.join_path(path, k))) for k, v in children])


@dataclass
class Strikes:
    """Counts the updates of each client that were too long, among its last replies.

    Attributes:
        after: number of long updates among the last ten after which a client's bound is the usual norm; 0 for never.
        last: whether each of a client's last replies was too long, 1 or 0, by client.
    """

    after: int
    last: dict[int, list[int]] = field(default_factory=dict)

    def add(self, client_id: int, is_strike: bool) -> bool:
        """Count a reply; return whether the usual norm becomes the bound of its client, and was not before."""
        was_reached = self.is_reached(client_id)
        self.last[client_id] = [*self.last.get(client_id, ()), int(is_strike)][-STRIKE_WINDOW:]
        return self.is_reached(client_id) and not was_reached

    def is_reached(self, client_id: int) -> bool:
        """Whether the usual norm is the bound of a client."""
        return 0 < self.after <= sum(self.last.get(client_id, ()))
