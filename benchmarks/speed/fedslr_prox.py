"""CPU time of FedSLR's whole server prox for ResNet18 against a full singular value decomposition of every layer.

    python benchmarks/speed/fedslr_prox.py [--repeats 3]

All weights of two or more dimensions of ResNet18 (CIFAR stem, 10 classes; 11,164,352 numbers) as scheme-2 matrices, float32, on
one thread, threshold λ η_g = 1e-3. *Early*: random dense weights; nearly every singular value survives. *Late*: singular
values that decay from 5 to below the threshold, of which a tenth survives, as after some hundred rounds. The other arm is
``torch.linalg.svd`` of the same matrices, in float32 and in float64. The figure is the least CPU time of the repeats; arms run
in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedlowrank.linalg.matricize import matricize
from fedlowrank.linalg.svt import threshold_all

THRESHOLD = 1e-3


def shapes() -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [(64, 3, 3, 3)]
    wide = 64
    for stage in (64, 128, 256, 512):
        for block in range(2):
            out += [(stage, wide, 3, 3), (stage, stage, 3, 3)]
            if block == 0 and wide != stage:
                out.append((stage, wide, 1, 1))
            wide = stage
    return [*out, (10, 512)]


def early(generator: torch.Generator) -> list[Tensor]:
    drawn = [torch.randn(s, generator=generator) for s in shapes()]
    # the standard deviation of He et al.: sqrt(2 / fan-in)
    return [matricize(w * (2 * len(w) / w.numel()) ** 0.5) for w in drawn]


def late(generator: torch.Generator, share: float = 0.1) -> list[Tensor]:
    out = []
    for w in early(generator):
        m, n = w.shape
        k = min(m, n)
        u, v = (torch.linalg.qr(torch.randn(d, k, generator=generator))[0] for d in (m, n))
        s = 5.0 * (THRESHOLD / 5.0) ** (torch.arange(k) / (share * k))
        out.append((u * s) @ v.mT)
    return out


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--repeats", type=int, default=3)
    repeats = options.parse_args().repeats
    torch.set_num_threads(1)
    for name, make in (("early", early), ("late", late)):
        weights = make(torch.Generator().manual_seed(0))
        factors = threshold_all(weights, THRESHOLD)
        arms: dict[str, Callable[[], object]] = {
            "prox": lambda ws=weights: threshold_all(ws, THRESHOLD),
            "svd float32": lambda ws=weights: [torch.linalg.svd(w, full_matrices=False) for w in ws],
            "svd float64": lambda ws=weights: [torch.linalg.svd(w.double(), full_matrices=False) for w in ws],
        }
        times = {arm: min(runs) for arm, runs in zip(arms, _in_turn(arms, repeats), strict=True)}
        kept = sum(f.rank for f in factors) / sum(min(w.shape) for w in weights)
        print(
            f"{name}: {sum(w.numel() for w in weights):,} numbers, {kept:.0%} of the singular values survive"
        )
        for arm, seconds in times.items():
            print(f"  {arm:12} {seconds:6.2f} s CPU   {seconds / times['prox']:5.2f} × prox")


def _in_turn(arms: dict[str, Callable[[], object]], repeats: int) -> list[list[float]]:
    rows = [[cpu_seconds(work) for work in arms.values()] for _ in range(repeats)]
    return [list(column) for column in zip(*rows, strict=True)]


if __name__ == "__main__":
    main()
