"""Bytes and latency of deployed low-rank models on the CPU, beside the dense model (as Table 9 of FedSLR does on a GPU).

    python benchmarks/speed/deployed_model_latency.py [--models resnet18 cnn] [--batch 20] [--density 0.05] [--repeats 15]

ResNet18 (CIFAR stem, 10 classes) and the CNN, 3×32×32, float32, on one thread. Nothing is trained: every matrix has random
orthogonal singular vectors and singular values that decay from 5 to 0.05, and keeps the same share of the leading ones; the share
is the one that gives the number of parameters of the paper's table (7.33, 6.56, 5.54, 3.09, 1.27 million of 11.17; for the
CNN, as many per cent). Latency does not depend on the values. In a trained model shares differ by layer. *w* is the low-rank
model alone, *w + p* has a random sparse part of the given density in every weight. All arms run in turn; the latency is CPU
time, median [quartiles]. The last column is the largest difference of a score from the dense model with the same weights,
relative to the largest score.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlowrank.adapters.deployment import Layout, compare_latency, deploy, measure_size
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params, add
from fedlowrank.linalg.matricize import LowRank, Weights, matricize, pack_low_rank, unpack_weights
from fedlowrank.models.architecture import build_module
from fedlowrank.models.zoo import ModelSettings

MILLIONS, WHOLE = (7.33, 6.56, 5.54, 3.09, 1.27), 11.17
LAYOUTS: tuple[Layout, ...] = ("small", "fast")


def spectra(params: Params, generator: torch.Generator) -> dict[str, LowRank]:
    """All singular triplets of every matrix."""
    out = {}
    for name, p in params.items():
        if p.ndim >= 2:
            m, n = matricize(p).shape
            k = min(m, n)
            u, v = (torch.linalg.qr(torch.randn(d, k, generator=generator))[0] for d in (m, n))
            root = (5.0 * 0.01 ** (torch.arange(k) / k)).sqrt()
            out[name] = LowRank(u * root, (v * root).mT)
    return out


def keep(share: float, full: dict[str, LowRank], params: Params) -> Weights:
    out: Weights = dict(params)
    for name, f in full.items():
        r = round(share * f.rank)
        out[name] = pack_low_rank(
            LowRank(f.left[:, :r].contiguous(), f.right[:r].contiguous()), params[name].shape
        )
    return out


def numbers(share: float, full: dict[str, LowRank], params: Params) -> int:
    def of(name: str, p: Tensor) -> int:
        return (
            min(p.numel(), round(share * full[name].rank) * sum(matricize(p).shape))
            if name in full
            else p.numel()
        )

    return sum(of(n, p) for n, p in params.items())


def share_of(wanted: float, full: dict[str, LowRank], params: Params) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if numbers(middle, full, params) < wanted else (low, middle)
    return high


def arms(
    module: nn.Module, density: float, generator: torch.Generator
) -> Iterator[tuple[str, nn.Module, Params]]:
    """Name, deployed module and the dense parameters that it stands for."""
    params = {n: p.detach() for n, p in module.named_parameters()}
    full, total = spectra(params, generator), sum(p.numel() for p in params.values())
    sparse = {
        n: torch.where(torch.rand(p.shape, generator=generator) < density, 0.1 * p, 0.0)
        if p.ndim > 1
        else 0 * p
        for n, p in params.items()
    }
    for millions in MILLIONS:
        part = millions / WHOLE
        weights = keep(share_of(part * total, full, params), full, params)
        for what, p in (("w    ", None), ("w + p", sparse)):
            dense = unpack_weights(weights, params)
            for layout in LAYOUTS:
                yield (
                    f"{part:4.0%} {what} {layout}",
                    deploy(module, weights, p, layout),
                    dense if p is None else add(dense, p),
                )


def table(name: str, options: argparse.Namespace) -> None:
    factory = ModelSettings((name,)).factories((3, 32, 32), 10)[name]
    module, generator = build_module(factory, Key((0,))).eval(), torch.Generator().manual_seed(0)
    x = torch.randn(options.batch, 3, 32, 32, generator=generator)
    models, errors = {"dense": module}, {"dense": 0.0}
    for arm, deployed, dense in arms(module, options.density, generator):
        models[arm] = deployed
        with torch.inference_mode():
            wanted = functional_call(module, dense, (x,))
            errors[arm] = float((deployed(x) - wanted).abs().max() / wanted.abs().max())
    times = compare_latency(models, x, options.repeats)
    print(f"\n{name}, batch {options.batch}, p of density {options.density:.0%}, {options.repeats} repeats")
    print(
        f"{'':20} {'numbers':>11} {'bytes':>11} {'of dense':>8}   {'ms':>7} {'quartiles':>16} {'of dense':>8} {'error':>8}"
    )
    whole = measure_size(module)
    for arm, t in times.items():
        size = measure_size(models[arm])
        between = f"[{t.lower:.2f}, {t.upper:.2f}]"
        print(
            f"{arm:20} {size.parameters:11,} {size.nbytes:11,} {size.nbytes / whole.nbytes:8.2f}   {t.median:7.2f} "
            f"{between:>16} {t.median / times['dense'].median:8.2f} {errors[arm]:8.0e}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--models", nargs="+", default=["resnet18", "cnn"])
    options.add_argument("--batch", type=int, default=20)
    options.add_argument("--density", type=float, default=0.05)
    options.add_argument("--repeats", type=int, default=15)
    parsed = options.parse_args()
    torch.set_num_threads(1)
    for name in parsed.models:
        table(name, parsed)


if __name__ == "__main__":
    main()
