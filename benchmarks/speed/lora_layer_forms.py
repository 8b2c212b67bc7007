"""CPU time of a linear layer with LoRA that forms its weight W + s·B A, as a multiple of W x + s·B (A x).

Both layers are in one process and take turns on one thread; medians of 40 calls.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.adapters.lora.lora_layers import add_lora

WIDTH, RANK, CALLS = 2048, 8, 42


class Reader(nn.Linear):
    """A layer whose forward pass reads its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """As of ``nn.Linear``."""
        return functional.linear(x, self.weight, self.bias)


def measure(layer: nn.Module, x: Tensor, training: bool) -> float:
    """Seconds of CPU time of a call, with the backward pass in training."""
    start = time.process_time()
    with torch.set_grad_enabled(training):
        out = layer(x)
    if training:
        out.sum().backward()
    return time.process_time() - start


def main() -> None:
    """Print a row for each number of inputs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [add_lora(kind(WIDTH, WIDTH), RANK) for kind in (nn.Linear, Reader)]
    print("rows  training  inference")
    for rows in (1, 16, 256):
        x = torch.randn(rows, WIDTH)
        ratios = []
        for training in (True, False):
            times = [[measure(layer, x, training) for layer in layers] for _ in range(CALLS)][2:]
            product, formed = (statistics.median(t) for t in zip(*times, strict=True))
            ratios.append(formed / product)
        print(f"{rows:4}  {ratios[0]:8.1f}  {ratios[1]:9.1f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
