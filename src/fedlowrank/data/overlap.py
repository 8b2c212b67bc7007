"""Recognizes data seen before by digests of their parts, in any order and with additions.

A sketch holds the smallest digests of the distinct parts of a data set (a bottom-k sketch: Cohen & Kaplan 2007,
"Summarizing data using bottom-k sketches"). Two sketches give the share of the smaller data set that is in the other
one: exactly up to :data:`MAX_SKETCH_DIGESTS` parts, beyond that with a standard deviation of at most 0.016.
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

MAX_SKETCH_DIGESTS = 1024
"""Largest number of digests in a sketch."""


def sketch_files(paths: Iterable[Path]) -> list[str]:
    """Sketch the lines of files, and of all files in folders, so that settings of the preparation do not matter.

    A line is the text between two line feeds, without white space around it; this also divides most files that are
    not text. Files that are compressed as a whole are recognized only if they are equal.
    """
    return _make_sketch(line.strip() for path in paths for line in _read_lines(path))


def sketch_examples(examples: Examples) -> list[str]:
    """Sketch the prepared inputs of examples, without their targets."""
    inputs = examples.inputs
    named_inputs = inputs if isinstance(inputs, dict) else {"": inputs}
    rows = [_iterate_rows(named_inputs[name]) for name in sorted(named_inputs)]
    return _make_sketch(b"".join(row_bytes) for row_bytes in zip(*rows, strict=True))


def measure_overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of the smaller data set that is in the other one, from their sketches; 0 if either is empty."""
    # below the bound, each sketch holds all digests of its data
    bounds = [sketch[-1] for sketch in (first, second) if len(sketch) == MAX_SKETCH_DIGESTS]
    bound = min(bounds, default="g")
    first_digests, second_digests = (
        {digest for digest in sketch if digest <= bound} for sketch in (first, second)
    )
    min_count = min(len(first_digests), len(second_digests))
    return len(first_digests & second_digests) / min_count if min_count else 0.0


def _read_lines(path: Path) -> Iterator[bytes]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        with as_checkpoint_error(f"cannot read {file}"), file.open("rb") as stream:
            yield from stream


def _iterate_rows(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
    return (row.tobytes() for row in flat.view(torch.uint8).numpy())


def _make_sketch(parts: Iterable[bytes]) -> list[str]:
    # the largest digest is on top, as a negative number
    heap: list[int] = []
    numbers: set[int] = set()
    for part in parts:
        if not part:
            continue
        number = int.from_bytes(hashlib.blake2b(part, digest_size=8).digest())
        if number in numbers or (len(heap) == MAX_SKETCH_DIGESTS and number > -heap[0]):
            continue
        numbers.add(number)
        heapq.heappush(heap, -number)
        if len(heap) > MAX_SKETCH_DIGESTS:
            numbers.remove(-heapq.heappop(heap))
    return [f"{number:016x}" for number in sorted(numbers)]
