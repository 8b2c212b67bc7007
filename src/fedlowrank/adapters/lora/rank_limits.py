"""Ranks above what a layer can have: lowered in every place where a rank is set, with one warning.

An update of a weight, as a matrix ``[d, k]``, has at most rank min(d, k); more components add nothing to what
it can be.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import LoweredRankWarning, warn_user

_MAX_LISTED = 5
"""Layers that a warning names."""


def describe_lowered_ranks(ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """A sentence that names the ranks, the layers and the ranks used there; none if nothing is lowered.

    Args:
        ranks: that were set, by layer name.
        shapes: (d, k) of every adapted weight as a matrix, by layer name.
    """
    lowered_ranks = {name: min(shapes[name]) for name, rank in ranks.items() if rank > min(shapes[name])}
    if not lowered_ranks:
        return []
    sentences = []
    for rank in sorted({ranks[name] for name in lowered_ranks}):
        names = [name for name in lowered_ranks if ranks[name] == rank]
        layer_list = ", ".join(
            f"{lowered_ranks[n]} in {n} ({' × '.join(map(str, shapes[n]))})" for n in names[:_MAX_LISTED]
        )
        remainder = f" and less in {len(names) - _MAX_LISTED} more layers" if len(names) > _MAX_LISTED else ""
        sentences.append(f"rank {rank} is above what layers can have; used is {layer_list}{remainder}")
    return sentences


def warn_lowered_ranks(owner: str, ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Warn of ranks that are lowered; see :func:`describe_lowered_ranks`."""
    for text in describe_lowered_ranks(ranks, shapes):
        warn_user(f"{owner}: {text}", LoweredRankWarning)
