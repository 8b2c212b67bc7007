"""Ranks above the largest rank of a layer: they are lowered wherever a rank is set, with one warning.

An update of a weight, as a matrix ``[d, k]``, has at most rank min(d, k); more components do not extend the
possible updates.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import LoweredRankWarning, warn_user

_MAX_LISTED = 5
"""Maximum number of layers that a warning names."""


def describe_lowered_ranks(ranks: Mapping[str, int], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Describe the lowered ranks in a sentence with the ranks, the layers and the ranks used there; none if none is lowered.

    Args:
        ranks: ranks that were set, by layer name.
        shapes: shape (d, k) of every adapted weight as a matrix, by layer name.
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
