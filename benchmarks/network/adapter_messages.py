"""CPU time of a round's messages for an adapter of a model with 7 billion parameters.

    python benchmarks/network/adapter_messages.py [--clients 10] [--rank 16]

The adapter is LoRA on q and v of 32 layers of width 4096: 64 pairs of factors, random numbers in float32 or as `wire` sends
them. For each upload the client packs and encodes it; the server decodes and validates it (size, form, all numbers finite, norm)
and adds it to the mean, as FedIT does. `benchmarks/speed/fedhl_server_step.py` measures FedHL's step on such factors. One
thread, `time.process_time`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from fedlowrank.adapters.wire_format import WireType, pack_factors, unpack_factors
from fedlowrank.config.sections.network_section import Limits
from fedlowrank.core import tree
from fedlowrank.core.contract import ClientInfo, Mean
from fedlowrank.core.contract.contribution import Aggregator
from fedlowrank.core.key import Key
from fedlowrank.linalg.pair import Factors, Pair
from fedlowrank.methods.shared.lora_family import Message
from fedlowrank.network.validation.upload_forms import Template
from fedlowrank.network.validation.uploads import inspect_upload

T = TypeVar("T")
WIDTH, LAYERS = 4096, 64


def make_factors(rank: int, key: Key) -> Factors:
    """Random factors of every layer."""
    generator = key.generator()
    pairs = [
        [torch.randn(s, generator=generator) for s in ((WIDTH, rank), (rank, WIDTH))] for _ in range(LAYERS)
    ]
    return {f"layers.{i // 2}.self_attn.{'qv'[i % 2]}_proj": Pair(b, a) for i, (b, a) in enumerate(pairs)}


def measure(work: Callable[[], T]) -> tuple[T, float]:
    """A result and its CPU seconds."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def round_of(wire: WireType, clients: int, rank: int) -> str:
    """A row: mean CPU seconds of a message, and those of all of them."""
    aggregator, seconds = Aggregator(range(clients)), []
    template = Template.of(Message(pack_factors(make_factors(rank, Key((0,))), wire), {}))
    for client in range(clients):
        factors = make_factors(rank, Key((client,)))
        data, encoded = measure(lambda factors=factors: tree.encode(Message(pack_factors(factors, wire), {})))
        info = ClientInfo(client, 100, "language", rank)
        upload, checked = measure(lambda data=data, info=info: inspect_upload(data, template, info, Limits()))
        _, added = measure(lambda u=upload, c=client: aggregator.add(c, Mean(unpack_factors(u.factors), 100)))
        seconds.append((encoded, checked, added))
    means = [statistics.mean(column) for column in zip(*seconds, strict=True)]
    total = sum(map(sum, seconds))
    cells = [wire, f"{len(data) / 1e6:.1f}", *(f"{v:.3f}" for v in means), f"{total:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--rank", type=int, default=16)
    given = options.parse_args()
    torch.set_num_threads(1)
    print(f"rank {given.rank}, {given.clients} clients; torch {torch.__version__}, CPU seconds\n")
    print("| wire | MB a message | encode | decode and validate | add | all clients |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: |")
    for wire in ("float32", "bfloat16", "int8"):
        print(round_of(wire, given.clients, given.rank), flush=True)


if __name__ == "__main__":
    main()
