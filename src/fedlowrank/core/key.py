"""Named randomness: a generator for every purpose, found by its name and not by the order of draws."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Key:
    """A name from which random numbers are derived. Equal names give equal draws, in any engine and order.

    Example:
        >>> root = Key((0,))
        >>> (root / "order" / 3).seed() == (root / "order" / 3).seed()
        True

    Attributes:
        path: names from the root on; the first one is usually the seed of the run.
    """

    path: tuple[str | int, ...]

    def __truediv__(self, name: str | int) -> Key:
        """Key of that name below this one."""
        return Key((*self.path, name))

    def seed(self) -> int:
        """Derive a 63-bit number from every name of the path and its type (``1`` is not ``"1"``)."""
        digest = hashlib.blake2b(json.dumps(self.path).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def generator(self) -> torch.Generator:
        """A new CPU generator of torch; draw on the CPU and move the result, so that all devices see the same numbers."""
        return torch.Generator().manual_seed(self.seed())

    def draw(self, f: Callable[[torch.Generator, int], Tensor], count: int) -> Tensor:
        """Return ``f(generator, count)`` with a new CPU generator; an engine can draw this for many clients at once.

        Args:
            f: function that draws a tensor with ``count`` rows.
            count: number of rows.
        """
        return f(self.generator(), count)

    def numpy(self) -> np.random.Generator:
        """A new generator of numpy."""
        return np.random.default_rng(self.seed())

    @contextlib.contextmanager
    def global_generators(self, device: torch.device | None = None) -> Iterator[None]:
        """Seed the global generators of torch, numpy and Python for user code, and restore them after it.

        Modules draw from them: ``nn.Dropout`` and ``torch.randn`` from torch's, stochastic depth often from
        ``random``, mixup from ``numpy.random``. The package itself draws only from :meth:`generator` and
        :meth:`numpy`.

        Args:
            device: accelerator whose generator is seeded, too.
        """
        seed = self.seed()
        gpus = [device] if device is not None and device.type == "cuda" else []
        python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 - user code draws from it
        with torch.random.fork_rng(devices=gpus):
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from it
            try:
                yield
            finally:
                random.setstate(python_state)
                np.random.set_state(numpy_state)  # noqa: NPY002 - user code draws from it


def generator_states(device: torch.device | None = None) -> tuple[Any, ...]:
    """States of the global generators of torch, Python and numpy, from which user code may draw.

    Args:
        device: accelerator whose generator is included, too.
    """
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - user code draws from it
    bit_generator_state = numpy_state.pop("state").values()
    numpy_values = tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in bit_generator_state)
    torch_states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        torch_states.append(torch.cuda.get_rng_state(device))
    torch_bytes = tuple(state.numpy().tobytes() for state in torch_states)
    return torch_bytes, random.getstate(), numpy_values, *numpy_state.values()
