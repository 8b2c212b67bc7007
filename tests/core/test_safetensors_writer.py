"""Bytes of a safetensors file, against the library of that name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlowrank.core.io import safetensors_writer as one_buffer

SHAPES = st.lists(st.integers(0, 4), max_size=3)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda n: n != "__metadata__")


@given(
    st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(one_buffer.TYPES, key=str)))),
    st.text(max_size=9),
)
def test_the_bytes_are_those_of_the_library(forms: dict[str, Any], text: str) -> None:
    text = text.encode(errors="ignore").decode()
    made = {
        n: (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
        for n, (shape, dtype) in forms.items()
    }
    ours = one_buffer.safetensors_bytes(made, {"tree": text})
    assert ours == safetensors.torch.save(made, {"tree": text})
    back = safetensors.torch.load(ours)
    assert {n: (t.dtype, t.shape) for n, t in back.items()} == {
        n: (t.dtype, t.shape) for n, t in made.items()
    }


def test_a_type_that_the_format_does_not_know() -> None:
    with pytest.raises(KeyError):
        one_buffer.safetensors_bytes({"x": torch.zeros(2, dtype=torch.complex128)}, {})


@pytest.mark.full
def test_a_large_tree_is_held_twice_and_not_thrice() -> None:
    code = (
        "import resource, torch; from fedlowrank.core import tree;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "value = {str(i): torch.ones(2**20) for i in range(40)}; before = peak(); data = tree.encode(value);"
        "print(before, peak(), len(data))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, size = (int(v) for v in done.stdout.split())
    # kilobytes on Linux, bytes on macOS
    unit = 1024 if sys.platform.startswith("linux") else 1
    assert (after - before) * unit < 1.3 * size
