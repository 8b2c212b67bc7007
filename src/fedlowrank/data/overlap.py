"""Recognizes data that was seen before by digests of its parts, whatever their order and whatever was added.

A sketch holds the smallest digests of the distinct parts of a data set (a bottom-k sketch: Cohen & Kaplan 2007,
"Summarizing data using bottom-k sketches"). Two sketches tell which share of the smaller data set is in the
other one: exactly up to :data:`SKETCH` parts, beyond that with a standard deviation of at most 0.016.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..core.io.atomic_files import as_checkpoint_error
from .dataset import Examples

SKETCH = 1024
"""Digests that a sketch holds at most."""


def sketch_files(paths: Iterable[Path]) -> list[str]:
    """Sketch the lines of files, and of all files in folders, so that no setting of the preparation matters.

    A line is what lies between two line feeds, without white space around it; that also divides most files that
    are not text. Files that are compressed as a whole are recognized only if they are equal.
    """
    return _sketch(part.strip() for path in paths for part in _lines(path))


def sketch_examples(examples: Examples) -> list[str]:
    """Sketch the inputs of examples as they are prepared, without their targets."""
    inputs = examples.inputs
    named = inputs if isinstance(inputs, dict) else {"": inputs}
    rows = [_as_bytes(named[name]) for name in sorted(named)]
    return _sketch(b"".join(parts) for parts in zip(*rows, strict=True))


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Share of the smaller data set that is in the other one, by their sketches; 0 if either is empty."""
    # below the bound, either sketch holds all digests of its data
    bounds = [sketch[-1] for sketch in (one, other) if len(sketch) == SKETCH]
    bound = min(bounds, default="g")
    mine, theirs = ({digest for digest in sketch if digest <= bound} for sketch in (one, other))
    smaller = min(len(mine), len(theirs))
    return len(mine & theirs) / smaller if smaller else 0.0


def _lines(path: Path) -> Iterator[bytes]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        with as_checkpoint_error(f"cannot read {file}"), file.open("rb") as opened:
            yield from opened


def _as_bytes(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
    return (row.tobytes() for row in flat.view(torch.uint8).numpy())


def _sketch(parts: Iterable[bytes]) -> list[str]:
    # the largest on top, as a negative number
    heap: list[int] = []
    known: set[int] = set()
    for part in parts:
        if not part:
            continue
        number = int.from_bytes(hashlib.blake2b(part, digest_size=8).digest())
        if number in known or (len(heap) == SKETCH and number > -heap[0]):
            continue
        known.add(number)
        heapq.heappush(heap, -number)
        if len(heap) > SKETCH:
            known.remove(-heapq.heappop(heap))
    return [f"{number:016x}" for number in sorted(known)]
