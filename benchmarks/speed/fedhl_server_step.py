"""CPU time and memory of the server step of federated LoRA on factors, against a full decomposition of the dense update.

    python benchmarks/speed/fedhl_server_step.py [--layers 64] [--size 4096] [--table FILE]
    python benchmarks/speed/fedhl_server_step.py --rounds 15 [--uploads flat | falling | noise]
        [--size 4096] [--columns 4096] [--table FILE]

Ten clients with ranks 32, 24, 20, 16, 16, 12, 12, 12, 8 and 8 (160 together) upload pairs for 64 weights of 4096×4096, in
float32, with equal weights. The first step begins at zero: W = Σ p_i B_i A_i and its decomposition, in float64. In the second,
every client was sent its truncation of that and uploads it with a tenth of noise; FedHL's recursion gives the next state. The
other arm builds the first sum as a matrix and calls ``torch.linalg.svd``, for one weight, in float32 and float64.

With ``--rounds`` the default form, ``DeltaForm("auto")``, is followed over rounds for one weight, beyond its change to dense:
flat, the clients add noise as above; falling, the columns of the noise decrease by 0.7 each; noise, they are sent nothing, so
that W is a sum of random updates and has a spectrum without any gap, the hardest there is.

CPU seconds are those of ``time.process_time`` on one thread. Memory is the greatest resident size of the process during the step
less that at its begin (VmHWM and VmRSS, the former reset before each arm; Linux with glibc): the new state and all buffers, but
not the uploads and the former state, which were there. All layers are held at once.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedlowrank.core.key import Key
from fedlowrank.linalg.delta import Delta, DeltaForm, initial_deltas, split_svd, truncate_delta, update_deltas
from fedlowrank.linalg.pair import Pair

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.process_memory import read_memory, reset_peak

RANKS = (32, 24, 20, 16, 16, 12, 12, 12, 8, 8)
SHARE = 1 / len(RANKS)

T = TypeVar("T")


def uploads(
    layer: str, shape: tuple[int, int], at: Delta, key: Key, kind: str = "flat"
) -> list[tuple[float, Pair]]:
    generator = (key / layer).generator()
    (d, k), out = shape, []
    for rank in RANKS:
        b, a = (torch.randn(s, generator=generator) / n**0.5 for s, n in (((d, rank), d), ((rank, k), k)))
        fall = 0.7 ** torch.arange(rank) if kind == "falling" else torch.ones(rank)
        sent = split_svd(truncate_delta(at, 0 if kind == "noise" else rank), rank)
        scale = 0.1 if at.rank and kind != "noise" else 1.0
        out.append(
            (SHARE, Pair(sent.b.float() + scale * fall * b, sent.a.float() + scale * fall[:, None] * a))
        )
    return out


def measured(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result, CPU seconds, and GiB by which the resident size grew at most."""
    # memory that was freed but kept for reuse would hide what the work needs
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    before = read_memory("VmRSS")
    began = time.process_time()
    result = work()
    seconds = time.process_time() - began
    return result, seconds, (read_memory("VmHWM") - before) / 1024


def dense_sum(blocks: list[tuple[float, Pair]], dtype: torch.dtype) -> Tensor:
    w = torch.zeros(blocks[0][1].b.shape[0], blocks[0][1].a.shape[1], dtype=dtype)
    for share, pair in blocks:
        w.addmm_(pair.b.to(dtype), pair.a.to(dtype), alpha=share)
    return w


def difference(delta: Delta, truth: Tensor) -> float:
    return float(torch.linalg.matrix_norm(delta.dense() - truth) / torch.linalg.matrix_norm(truth))


def row(what: str, layers: int, seconds: float, memory: float, note: str) -> str:
    line = f"| {what} | {layers} | {seconds:.2f} | {memory:.2f} | {note} |"
    print(line, flush=True)
    return line


def rounds(count: int, shape: tuple[int, int], kind: str) -> list[str]:
    """The default form over rounds, as lines of a table."""
    key, state = Key(("server rounds",)), initial_deltas({"w": shape}, DeltaForm(), max(RANKS))
    lines = ["| round | width | state | CPU s | memory, GiB |", "| ---: | ---: | --- | ---: | ---: |"]
    print("\n".join(lines))
    held = {} if kind == "noise" else {"w": [(SHARE, rank) for rank in RANKS]}
    for i in range(count):
        blocks = {"w": uploads("w", shape, state["w"], key / i, kind)}
        # what all clients hold vanishes, so the least of their ranks does not count
        width = state["w"].rank - (min(RANKS) if held and i else 0) + sum(RANKS)
        wide = "" if state["w"].state == "dense" else str(width)
        work = partial(update_deltas, state, blocks, sent_ranks=held)
        state, seconds, memory = measured(work)
        lines.append(f"| {i + 1} | {wide} | {state['w'].state} | {seconds:.2f} | {memory:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--layers", type=int, default=64)
    options.add_argument("--size", type=int, default=4096)
    options.add_argument(
        "--rounds", type=int, default=0, help="follow the default form over this many rounds instead"
    )
    options.add_argument(
        "--uploads", choices=("flat", "falling", "noise"), default="flat", help="of the rounds"
    )
    options.add_argument(
        "--columns", type=int, help="k of the weight of the rounds; d is the size, and k too if not given"
    )
    options.add_argument("--table", type=Path, help="file to write the table to")
    given = options.parse_args()
    torch.set_num_threads(1)
    key, size = Key(("server step",)), given.size
    # the libraries' own buffers are not the step's
    small = {"w": (512, 512)}
    update_deltas(
        initial_deltas(small, DeltaForm("exact"), 32),
        {"w": uploads("w", (512, 512), initial_deltas(small, DeltaForm("exact"), 32)["w"], key)},
    )
    if given.rounds:
        lines = rounds(given.rounds, (size, given.columns or size), given.uploads)
        if given.table:
            given.table.write_text("\n".join(lines) + "\n")
        return
    names = [f"layer {i}" for i in range(given.layers)]
    lines = [
        f"{given.layers} weights {size}×{size}, ranks {', '.join(map(str, RANKS))}; torch {torch.__version__}, one thread.",
        "",
        "| step | layers | CPU s | memory, GiB | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    print("\n".join(lines))

    zero = initial_deltas(dict.fromkeys(names, (size, size)), DeltaForm("exact"), max(RANKS))
    first = {name: uploads(name, (size, size), zero[name], key / 0) for name in names}
    state, seconds, memory = measured(lambda first=first: update_deltas(zero, first))
    truth = dense_sum(first[names[0]], torch.float64)
    note = f"rank {state[names[0]].rank}; relative difference to the matrix {difference(state[names[0]], truth):.1e}"
    lines.append(row("first, factored, float64", given.layers, seconds, memory, note))

    sent = state[names[0]].dense()
    for share, rank in ((SHARE, r) for r in RANKS):
        sent -= share * truncate_delta(state[names[0]], rank).dense()
    second = {name: uploads(name, (size, size), state[name], key / 1) for name in names}
    del first
    held = {name: [(SHARE, rank) for rank in RANKS] for name in names}
    after, seconds, memory = measured(
        lambda state=state, second=second: update_deltas(state, second, sent_ranks=held)
    )
    sent += dense_sum(second[names[0]], torch.float64)
    note = f"rank {after[names[0]].rank}; relative difference to the matrix {difference(after[names[0]], sent):.1e}"
    lines.append(row("second, factored, float64", given.layers, seconds, memory, note))
    blocks = uploads(names[0], (size, size), zero[names[0]], key / 0)
    del state, after, second, truth, sent

    for dtype in (torch.float32, torch.float64):
        _, seconds, memory = measured(
            lambda dtype=dtype: torch.linalg.svd(dense_sum(blocks, dtype), full_matrices=False)
        )
        kind = str(dtype).removeprefix("torch.")
        lines.append(row(f"first, full SVD of the matrix, {kind}", 1, seconds, memory, ""))
        lines.append(
            row(
                f"the same, times {given.layers}",
                given.layers,
                seconds * given.layers,
                memory,
                "one at a time",
            )
        )
    if given.table:
        given.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
