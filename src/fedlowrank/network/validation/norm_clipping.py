"""Shortens updates to the norm that they may have (:mod:`.norms`), and remembers whose were too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...core import tree
from .norms import PRODUCTS, distance, floats, numbers_of, product_distance, unpack_received

WINDOW = 10
"""Last replies of a client among which long updates are counted."""

_HALVINGS = 40
"""Of the interval in which a factor is found."""


def shorten_upload(upload: Any, down: Any, bounds: Mapping[str, tuple[float, bool]]) -> Any:
    """The upload with parts moved towards what they are compared with, until their norms are within bounds.

    Args:
        upload: of the client.
        down: what :func:`.norms.measure_norms` compared it with.
        bounds: as in :class:`.norms.Shortening`.

    Returns:
        It, with the factors that a lossy wire packed as they are received.
    """
    changed = {}
    for path, part, reference in numbers_of(upload, down):
        for name, measured in ((path, distance), (path + PRODUCTS, product_distance)):
            if name in bounds:
                bound, by_change = bounds[name]
                part = _shortened(part, reference if by_change else None, bound, measured)
        changed[path] = part
    return _with_parts(unpack_received(upload), changed)


def _with_parts(value: Any, parts: Mapping[str, Any], path: str = "") -> Any:
    """A tree with the parts at some paths replaced."""
    if path in parts:
        return parts[path]
    children = tree.children(value, path)
    if children is None:
        return value
    return tree.rebuild(value, [(k, _with_parts(v, parts, tree.join_path(path, k))) for k, v in children])


def _shortened(part: Any, reference: Any, bound: float, measured: Callable[..., float]) -> Any:
    size = measured(part, reference)
    if size <= bound:
        return part
    t = bound / size
    if measured is product_distance:
        # the norm of products grows with the fourth power at most
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            t = (low + high) / 2
            low, high = (
                (t, high) if measured(part_along(part, reference, t), reference) <= bound else (low, t)
            )
        t = low
    return part_along(part, reference, t)


def part_along(part: Any, reference: Any, t: float) -> Any:
    """The part at r + t(x - r) of every floating-point number x and its reference r, 0 if there is none."""
    others = {} if reference is None else dict(floats(reference))

    def move(path: str, x: Tensor | float) -> Tensor | float:
        r = others.get(path, 0.0)
        if not isinstance(x, Tensor):
            return float(r) + t * (x - float(r))
        wide = r.double() if isinstance(r, Tensor) else r
        return (wide + t * (x.double() - wide)).to(x.dtype)

    return _map_floats(part, move)


def _map_floats(value: Any, change: Callable[[str, Tensor | float], Any], path: str = "") -> Any:
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    if type(value) is float:
        return change(path, value)
    children = tree.children(value, path)
    if children is None:
        return value
    return tree.rebuild(value, [(k, _map_floats(v, change, tree.join_path(path, k))) for k, v in children])


@dataclass
class Strikes:
    """Counts the updates of each client that were too long, among its last replies.

    Attributes:
        after: long updates among the last ten after which a client is held to the usual norm; 0 for never.
        last: whether each of a client's last replies was too long, 1 or 0, by client.
    """

    after: int
    last: dict[int, list[int]] = field(default_factory=dict)

    def add(self, client: int, is_strike: bool) -> bool:
        """Count a reply; whether its client is held to the usual norm from now on, and was not before."""
        before = self.is_reached(client)
        self.last[client] = [*self.last.get(client, ()), int(is_strike)][-WINDOW:]
        return self.is_reached(client) and not before

    def is_reached(self, client: int) -> bool:
        """Whether a client is held to the usual norm."""
        return 0 < self.after <= sum(self.last.get(client, ()))
