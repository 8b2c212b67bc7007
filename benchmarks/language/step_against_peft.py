"""A step of a language model here, beside the same step by plain PEFT: CPU time and memory.

    python benchmarks/language/step_against_peft.py BASE [--steps 4] [--repeats 5] [--rows 4] [--tokens 128] [--answer 32]
        [--device cpu]

BASE is a transformers folder. One client trains LoRA of rank 8 on q and v by FedIT; the plain loop is ``peft.get_peft_model``,
the model's own loss and ``torch.optim.AdamW`` on the same number of tokens, of which the last ones are supervised. Both take
turns in one process on one thread; shown is the median of the ratios of CPU time, or on a GPU of the time until it is idle.
Memory is the peak of a process of its own for each (``--only``), above what it has once the base is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.process_memory import measure_peak, measure_resident

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
LR = 1e-4


def rows_of(base: str, given: argparse.Namespace) -> list[list[int]]:
    """Token numbers of random texts, as long as asked for."""
    from transformers import AutoConfig

    generator = torch.Generator().manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(base).vocab_size
    found: list[list[int]] = torch.randint(
        10, vocabulary, (given.rows * given.steps, given.tokens), generator=generator
    ).tolist()
    return found


def plain_loop(base: str, given: argparse.Namespace) -> Callable[[], None]:
    """As many steps of plain PEFT."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.use_cache = False
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CONFIG)).to(given.device)
    wrapped.train()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=LR)
    ids = torch.tensor(rows_of(base, given), device=given.device)
    labels = ids.clone()
    labels[:, : -given.answer] = -100

    def work() -> None:
        for a in range(0, len(ids), given.rows):
            some = ids[a : a + given.rows]
            optimizer.zero_grad()
            out = wrapped(
                input_ids=some, attention_mask=torch.ones_like(some), labels=labels[a : a + given.rows]
            )
            out.loss.backward()
            optimizer.step()

    return work


def federated(base: str, given: argparse.Namespace) -> Callable[[], None]:
    """A round of one client with as many steps."""
    from fedlowrank import AdamW, Federation
    from fedlowrank.core.contract import ClientInfo
    from fedlowrank.core.key import Key
    from fedlowrank.data.dataset import ClientData, Examples
    from fedlowrank.engines import ENGINES
    from fedlowrank.language.language_model import LanguageSettings, load_language_model
    from fedlowrank.methods import METHODS
    from fedlowrank.rounds.run import Run
    from fedlowrank.rounds.run_settings import RunSettings

    language = load_language_model(LanguageSettings(base, format="none"), CONFIG, Key((0,)), ())
    ids = torch.tensor(rows_of(base, given))
    labels = ids.clone()
    labels[:, : -given.answer] = -100
    own = Examples({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels)
    few = Examples({n: t[:1] for n, t in own.x.items()}, labels[:1])
    architecture = language.architecture({n: t[:1] for n, t in own.x.items()})
    info = ClientInfo(0, len(own), "language")
    on = Federation([ClientData(own, few, few)], [info], {"language": architecture}, ())
    method = METHODS["fedit"](batch_size=given.rows, optimizer=AdamW(lr=LR))
    settings = RunSettings(rounds=1000, evaluate_every=10**6, device=given.device)
    run = Run(method, on, settings, ENGINES["sequential"]())
    return lambda: (run.step(), None)[1]


ARMS = {"plain PEFT": plain_loop, "fedlowrank": federated}


def measure_memory(arm: str, given: argparse.Namespace) -> None:
    """In a process of its own: print the peak above the loaded base, in MiB."""
    work = ARMS[arm](given.base, given)
    before = measure_resident()
    work()
    work()
    print(json.dumps({"peak": measure_peak() - before, "loaded": before}))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("base")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--rows", type=int, default=4)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--answer", type=int, default=32)
    options.add_argument("--device", default="cpu")
    options.add_argument("--only", choices=ARMS, help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.only:
        measure_memory(given.only, given)
        return
    works = {arm: make(given.base, given) for arm, make in ARMS.items()}
    for work in works.values():
        work()
    clock = time.process_time if given.device == "cpu" else time.perf_counter
    ratios, seconds = [], []
    for _ in range(given.repeats):
        took = {}
        for arm, work in works.items():
            start = clock()
            work()
            if given.device != "cpu":
                torch.cuda.synchronize()
            took[arm] = (clock() - start) / given.steps
        seconds.append(took)
        ratios.append(took["fedlowrank"] / took["plain PEFT"])
    plain = statistics.median(t["plain PEFT"] for t in seconds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"a step of plain PEFT: {1e3 * plain:.0f} ms; fedlowrank / plain: {middle:.2f} ({low:.2f} to {high:.2f})"
    )
    for arm in ARMS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", arm]
        found = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        )
        print(f"{arm}: peak {found['peak']:.0f} MiB above {found['loaded']:.0f} MiB with the base loaded")


if __name__ == "__main__":
    main()
