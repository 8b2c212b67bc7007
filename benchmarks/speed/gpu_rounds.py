"""What a GPU gains: every method on it, sequential against vectorized, images as bytes, defaults, the server steps.

    python benchmarks/speed/gpu_rounds.py [--device cuda] [--jobs 6] [-o docs/results/gpu.md]

One page in a few minutes. *Methods*: the battery of every method (:mod:`fedlowrank.testing.check`) with all its runs on the
device; and two rounds on the device and on the CPU from the same seed: the largest difference of a number of the server's
state, as a share of its largest. *Rounds*: CNN conv16-conv32-FC500 and MLP 784-200-200-10, 10 and 100 of 100 clients of 50
examples, and 1,000 of 1,000 clients of 20, batches of 32; wall-clock seconds between two synchronizations, medians; operations
are those that torch dispatches in a round, views left out; waits are those of them that read a number from the device.
*Bytes*: images stored as float32 and as bytes: a round, and what 100 clients' data take on the device. *Defaults*: a run with
a run folder, evaluation and checkpoints against the same rounds without. *Server*: FedSLR's prox of ResNet18's weights, and
FedHL's step on eight 4096×4096 weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from fedhl_server_step import RANKS, uploads
from fedslr_prox import THRESHOLD, early, late
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core import tree
from fedlowrank.core.key import Key
from fedlowrank.data.pixels import Pixels
from fedlowrank.engines import ENGINES
from fedlowrank.linalg.delta import DeltaForm, initial_deltas, update_deltas
from fedlowrank.linalg.pair import Pair
from fedlowrank.linalg.svt import threshold_all
from fedlowrank.methods import METHODS
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import check_method

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.round_timing import SUBJECTS, bench_federation


class Operations(TorchDispatchMode):
    """Counts operations that are no views, and those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        self.waits += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    found = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def check_methods(device: str, jobs: int) -> list[str]:
    """Rows of the battery on the device, and of the differences between the device and the CPU."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = []
        for row in pool.map(check_one, METHODS, [device] * len(METHODS)):
            rows.append(row)
            print(row, flush=True)
    return rows


def check_one(name: str, device: str) -> str:
    """The row of one method."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    data = [
        {
            n: (torch.randn(12, 16, generator=g), torch.randint(3, (12,), generator=g))
            for n in ("train", "val", "test")
        }
        for _ in range(4)
    ]
    states = []
    for place in (device, "cpu"):
        made = Federation.from_arrays(data, lambda: MLP(16, (12, 10), 3), classes=3)
        run = Run(METHODS[name](), made, RunSettings(rounds=2, device=place), ENGINES["vectorized"]())
        run.record_initial_models()
        run.step()
        run.step()
        states.append([t.cpu().double() for t in tree.tensors(run.state.server) if t.is_floating_point()])
    apart = max((float((a - b).abs().max()) for a, b in zip(*states, strict=True) if a.numel()), default=0.0)
    most = max((float(b.abs().max()) for b in states[1] if b.numel()), default=1.0)
    findings = check_method(METHODS[name](), device)
    failed = "; ".join(f"{f.name}: {f.detail}" for f in findings if not f.ok)
    passed = sum(f.ok for f in findings)
    return f"| {name} | {passed} of {len(findings)} | {failed} | {apart / max(most, 1e-12):.1e} |"


def started(subject: str, engine: str, sample: int, device: str, **more: Any) -> Run:
    """A run of FedAvg after its first two rounds: of ``sample`` clients a round, and of 100 or as many clients."""
    clients, examples = (100, 50) if sample <= 100 else (sample, 20)
    made = bench_federation(SUBJECTS[subject], clients, examples)
    settings = RunSettings(
        rounds=100, participation=sample / clients, evaluate_every=10**6, device=device, **more
    )
    method = METHODS["fedavg"](batch_size=32, optimizer=SGD(lr=0.01))
    run = Run(method, made, settings, ENGINES[engine]())
    run.step()
    run.step()
    return run


def time_rounds(device: str, rounds: int) -> list[str]:
    """Rows of seconds and operations a round."""
    rows = []
    for name in ("cnn", "mlp200k"):
        for sample in (10, 100, 1000):
            found = {}
            for engine in ("sequential", "vectorized"):
                run = started(name, engine, sample, device, pixels="float32")
                with Operations() as operations:
                    run.step()
                took = seconds(lambda run=run: run.step(), device, rounds if sample <= 100 else 3)
                found[engine] = took, operations.count, operations.waits
            (s, s_ops, _), (v, v_ops, v_waits) = found["sequential"], found["vectorized"]
            rows.append(
                f"| {SUBJECTS[name].title} | {sample} | {1e3 * s:.1f} | {1e3 * v:.1f} | {s / v:.1f} "
                f"| {s_ops:,} | {v_ops:,} | {v_waits} |"
            )
            print(rows[-1], flush=True)
    return rows


def time_bytes(device: str, rounds: int) -> list[str]:
    """Rows of images as float32 and as bytes."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (100, 500, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (100, 500), generator=generator)
    data = [(a.numpy(), b.numpy()) for a, b in zip(x, y, strict=True)]
    made = Federation.from_arrays(data, SUBJECTS["cnn"].make, classes=10)
    for pixels in ("float32", "bytes"):
        settings = RunSettings(
            rounds=100, participation=0.1, evaluate_every=10**6, device=device, pixels=pixels
        )
        method = METHODS["fedavg"](batch_size=32, optimizer=SGD(lr=0.01))
        run = Run(method, made, settings, ENGINES["vectorized"]())
        run.step()
        took = seconds(lambda run=run: run.step(), device, rounds)
        held = sum(
            _bytes_of(part.x, device) for c in run.federation.clients for part in (c.train, c.val, c.test)
        )
        rows.append(f"| {pixels} | {1e3 * took:.1f} | {held / 2**20:.0f} |")
        print(rows[-1], flush=True)
    return rows


def _bytes_of(inputs: Any, device: str) -> int:
    stored = inputs.codes if isinstance(inputs, Pixels) else inputs
    if stored.device.type != device:
        raise SystemExit(f"a client's images lie on {stored.device} and not on {device}")
    return int(stored.numel() * stored.element_size())


def time_defaults(device: str, rounds: int) -> list[str]:
    """Rows of what default settings add."""
    method = METHODS["fedavg"](batch_size=32, optimizer=SGD(lr=0.01))

    def whole(made: Federation, **more: Any) -> float:
        def work() -> None:
            with tempfile.TemporaryDirectory() as place:
                folder = None if "evaluate_every" in more else Path(place) / "run"
                settings = {"rounds": rounds, "participation": 0.1, "engine": "vectorized", "device": device}
                simulate(method, made, folder=folder, **settings, **more)

        return seconds(work, device)

    rows = []
    for name in ("cnn", "mlp99k"):
        made = bench_federation(SUBJECTS[name], held_out=6)
        ratio = whole(made) / whole(made, evaluate_every=10**6)
        rows.append(f"| {SUBJECTS[name].title} | {ratio:.2f} |")
        print(rows[-1], flush=True)
    return rows


def time_server(device: str) -> list[str]:
    """Rows of FedSLR's prox and FedHL's step on the device and on the CPU."""
    rows = []
    for name, make in (("early", early), ("late", late)):
        weights = make(torch.Generator().manual_seed(0))
        there = [w.to(device) for w in weights]
        took = [seconds(lambda ws=ws: threshold_all(ws, THRESHOLD), device, 2) for ws in (weights, there)]
        rows.append(
            f"| FedSLR's prox of ResNet18, {name} | {took[0]:.2f} | {took[1]:.2f} | {took[0] / took[1]:.1f} |"
        )
        print(rows[-1], flush=True)
    names, size = [f"layer {i}" for i in range(8)], 4096
    took = []
    for place in ("cpu", device):
        state = initial_deltas(dict.fromkeys(names, (size, size)), DeltaForm("exact"), max(RANKS))
        blocks = {
            n: [
                (p, Pair(pair.b.to(place), pair.a.to(place)))
                for p, pair in uploads(n, (size, size), state[n], Key((0,)))
            ]
            for n in names
        }
        took.append(seconds(lambda state=state, blocks=blocks: update_deltas(state, blocks), place, 2))
    rows.append(
        f"| FedHL's first step, 8 × {size}×{size} | {took[0]:.2f} | {took[1]:.2f} | {took[0] / took[1]:.1f} |"
    )
    print(rows[-1], flush=True)
    return rows


PARTS: dict[str, tuple[str, str, str, Callable[[argparse.Namespace], list[str]]]] = {
    "methods": (
        "Methods",
        "| method | battery passed | failed | largest relative difference from the CPU |",
        "| --- | ---: | :--- | ---: |",
        lambda given: check_methods(given.device, given.jobs),
    ),
    "rounds": (
        "Rounds",
        "| model | clients a round | sequential, ms | vectorized, ms | ratio "
        "| operations, sequential | operations, vectorized | waits |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        lambda given: time_rounds(given.device, given.rounds),
    ),
    "bytes": (
        "Images as bytes",
        "| images | a round, ms | data on the device, MiB |",
        "| --- | ---: | ---: |",
        lambda given: time_bytes(given.device, given.rounds),
    ),
    "defaults": (
        "Default settings",
        "| model | with / without |",
        "| --- | ---: |",
        lambda given: time_defaults(given.device, 10 * given.rounds),
    ),
    "server": (
        "Server steps",
        "| step | CPU, s | device, s | ratio |",
        "| --- | ---: | ---: | ---: |",
        lambda given: time_server(given.device),
    ),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--device", default="cuda")
    options.add_argument("--rounds", type=int, default=10, help="timed rounds of each arm")
    options.add_argument("--jobs", type=int, default=1, help="processes that check methods")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("-o", "--out", type=Path, help="write the page to this file")
    given = options.parse_args()
    torch.set_num_threads(1)
    name = "CPU" if given.device == "cpu" else torch.cuda.get_device_name()
    if not isinstance(nn.Linear(1, 1).to(given.device), nn.Module):
        raise SystemExit(f"no device {given.device}")
    lines = [
        f"# On one {name}",
        "",
        f"    python benchmarks/speed/gpu_rounds.py --device {given.device} --rounds {given.rounds}",
    ]
    lines += ["", f"torch {torch.__version__}.", ""]
    for part in given.parts:
        title, head, align, rows = PARTS[part]
        lines += [f"## {title}", "", head, align, *rows(given), ""]
    if given.out is not None:
        given.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
