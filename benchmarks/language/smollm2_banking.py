"""FedHL against its baselines on a real language model: which intent has a customer's message, answered in words.

    python benchmarks/language/smollm2_banking.py data BANKING77 FOLDER               # train.jsonl, val.jsonl, test.jsonl
    python benchmarks/language/smollm2_banking.py all SMOLLM2 FOLDER OUT [--device cuda] [--jobs 12] [--seeds 5] [--seconds 400]
    python benchmarks/language/smollm2_banking.py table OUT

Settings: ``smollm2_banking.toml``. SMOLLM2 is a transformers folder of SmolLM2-135M-Instruct, BANKING77 a folder with
``train.jsonl.gz`` and ``test.jsonl.gz``. ``all`` chooses a learning rate for each arm by the server model's loss on 300 other
texts after five rounds (seed 100), and then runs seeds 0, 1, ... arm by arm until its time is up; only seeds that all arms
completed count. OUT has one line for each run; what stands there is not run again, so that ``all`` goes on where it ended.

After rounds 1, 2, 5 and 10 the server's model has a loss per token of the answers of 500 test texts, and after rounds 1 and 10
the clients' truncated models have one of the first 250. The share of exact matches is that of texts whose greedy answer is the
intent, with its end: each of its tokens is the most likely one after the tokens before. The *bias* of rounds 1, 5 and 10 is
‖Σ p_i W^{r_i} - W‖ / ‖W‖ over all layers: how far the mean of what clients begin the next round with, weighted by examples, is
from the server's update W.

Blocks 0 to 19 have no adapter, so that their hidden states are computed once for each text and used in all runs of a process;
in scoring, all blocks compute the beginning that all texts have in common once (``helpers/frozen_blocks.py``). Steps compute
logits only where an answer stands (``helpers/counted_logits.py``).

Two runs ended before any test: the first was interrupted, and in the second, with rates from 1e-3 to 4e-3, all seven arms
were best with 4e-3. So the grid goes from 2e-3 to 1.6e-2. A third run was given only the first 25
texts to choose by and to test on, by mistake; the benchmark refuses such files since then. In these three a response ended with
a line break and the end of the text, as no answer of the template does, so that none of their runs is used again.

Written before the first run. Prediction: with unequal ranks, FedHL by examples has a lower test loss than FlexLoRA, because line
17 takes the truncation out of the mean and all else is equal; HetLoRA is the worst of those that mix ranks, because zeros dilute
the components that few clients hold; FedIT with rank 32 for all is the best. FedHL's own weights do worse than weights by
examples, because they ignore that clients differ in size. Control: with rank 32 for all, nothing is truncated in the first
round, so FedHL by examples equals FlexLoRA there. If the arms differ in the control by as much as with unequal ranks, the
difference is not about truncation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import itertools
import json
import math
import queue as queues
import re
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import NonFiniteError
from fedlowrank.engines import ENGINES
from fedlowrank.language.export.adapter_folders import AdapterFolders
from fedlowrank.linalg.pair import Pair
from fedlowrank.testing.check import RunWithoutEvaluation
from fedlowrank.training.flops import FlopLedger

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.counted_logits import CountedLogits
from helpers.frozen_blocks import FrozenBlocks
from helpers.seed_statistics import mean_and_half_width

Job = tuple[str, float, int, str]  # arm, learning rate, seed, texts

HERE = Path(__file__).parent
ASK = "What is the intent of this message of a bank's customer? Answer with the name of the intent.\n\n"
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
TUNING_SEED = 100
TEXTS = {"val": 300, "test": 500}
SERVER_ROUNDS, CLIENT_ROUNDS, BIAS_ROUNDS = (0, 1, 2, 5, 10), (1, 10), (1, 5, 10)
ARMS: dict[str, tuple[str, str, list[str]]] = {
    # name: title, method, changes
    "fedhl": ("FedHL", "fedhl", []),
    "fedhl_examples": ("FedHL by examples", "fedhl_examples", []),
    "flexlora": ("FlexLoRA", "flexlora", []),
    "hetlora": ("HetLoRA", "hetlora", []),
    "flora": ("FLoRA", "flora", []),
    "fedit_32": ("FedIT, rank 32 for all", "fedit", ["lora.ranks=[32]"]),
    "fedit_2": ("FedIT, rank 2 for all", "fedit", ["lora.ranks=[2]"]),
    "control_fedhl": ("Control, rank 32 for all: FedHL by examples", "fedhl_examples", ["lora.ranks=[32]"]),
    "control_flexlora": ("Control, rank 32 for all: FlexLoRA", "flexlora", ["lora.ranks=[32]"]),
}
PAIRS = [
    ("fedhl_examples", "flexlora"),
    ("fedhl", "fedhl_examples"),
    ("fedhl", "flexlora"),
    ("fedhl_examples", "hetlora"),
    ("fedhl_examples", "flora"),
    ("fedhl_examples", "fedit_2"),
    ("fedit_32", "fedhl_examples"),
    ("control_fedhl", "control_flexlora"),
]


def make_data(source: Path, folder: Path) -> None:
    """Questions and answers as files of lines; 2,400 texts to train on, 300 to choose by, 500 to test on."""
    folder.mkdir(parents=True, exist_ok=True)

    def rows(name: str) -> list[dict[str, str]]:
        with gzip.open(source / f"{name}.jsonl.gz", "rt") as file:
            found = [json.loads(line) for line in file]
        order = np.random.default_rng(0).permutation(len(found))
        names = [found[i]["label"].replace("_", " ").rstrip("?").lower() for i in order]
        return [{"prompt": ASK + found[i]["text"], "intent": n} for i, n in zip(order, names, strict=True)]

    train, test = rows("train"), rows("test")
    for name, part in (("train", train[:2400]), ("val", train[2400:2700]), ("test", test[:500])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


class Uncounted(FlopLedger):
    """Counts no operations, which this comparison does not report and which take time on a GPU."""

    def has_tried(self, *_: Any) -> bool:
        """Nothing is to be learnt."""
        return True

    def is_fitted(self, *_: Any) -> bool:
        """Nothing is to be counted."""
        return True

    def total(self, *_: Any) -> int:
        """None are counted."""
        return 0


class Questions:
    """Texts with their answers, as tokens.

    Args:
        language: model and tokenizer.
        path: of the lines.
        device: of the tokens.
    """

    def __init__(self, language: Any, path: Path, device: str) -> None:
        self._tokenizer, self._device = language.loaded.tokenizer, device
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        if len(self.rows) != TEXTS[path.stem]:
            sys.exit(
                f"{path} has {len(self.rows)} texts and not {TEXTS[path.stem]}: make the folder anew with data"
            )

    @torch.inference_mode()
    def score(
        self, model: Any, blocks: FrozenBlocks, texts: int = 500, size: int = 25
    ) -> tuple[float, float]:
        """Loss per token of the answers to the first texts, their end included, and the share that is written word by word.

        A greedy answer is the intent where each of its tokens, and its end, is the most likely one after the tokens before.

        Args:
            model: a causal model of transformers.
            blocks: its blocks, which remember the hidden states of texts.
            texts: how many.
            size: texts in one batch.
        """
        total, count, right = 0.0, 0, 0
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        rows = sorted(self.rows[:texts], key=lambda row: len(row["prompt"]))  # less padding in a batch
        for a in range(0, len(rows), size):
            some = rows[a : a + size]
            turns = [[{"role": "user", "content": row["prompt"]}] for row in some]
            asked = [
                self._tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False)
                for t in turns
            ]
            questions = self._tokenizer(asked, add_special_tokens=False)["input_ids"]
            answers = [self._tokenizer(r["intent"], add_special_tokens=False)["input_ids"] for r in some]
            whole = [torch.tensor([*q, *w, end]) for q, w in zip(questions, answers, strict=True)]
            # the beginning of the template and of the request, up to the first customer's message
            ids = pad_sequence(whole, batch_first=True, padding_value=pad)
            shared = int((ids == ids[0]).all(0).int().cumprod(0).sum())
            ids = ids[:, shared:].to(self._device)
            answered = torch.zeros_like(ids, dtype=torch.bool)
            for k, (tokens, question) in enumerate(zip(whole, questions, strict=True)):
                answered[k, len(question) - shared : len(tokens) - shared] = True
            hidden = blocks.compute_states([text.to(self._device) for text in whole], shared)[:, :-1]
            answered = answered[:, 1:]
            scores, labels = model.lm_head(hidden[answered]).float(), ids[:, 1:][answered]
            total += float(functional.cross_entropy(scores, labels, reduction="sum"))
            count += len(labels)
            wrong = answered.clone()
            wrong[answered] = scores.argmax(-1) != labels
            right += int((~wrong.any(1)).sum())
        return total / count, right / len(rows)


def run_arm(
    arm: str,
    rate: float,
    seed: int,
    base: str,
    folder: Path,
    device: str,
    part: str,
    rounds: int | None = None,
    hidden: dict[bytes, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """One run; ``part`` names the texts that are scored, and ``hidden`` has their hidden states of runs before."""
    start = time.perf_counter()
    _, method, changes = ARMS[arm]
    more = [f"language.path={base}", f"data.path={folder / 'train.jsonl'}", f"run.device={device}"]
    more += [f"run.seed={seed}", f"defaults.optimizer.lr={rate}"]
    experiment = ExperimentConfig.read(HERE / "smollm2_banking.toml", [*changes, *more])
    on = experiment.federation()
    engine = ENGINES["sequential"](Uncounted())
    # the scores of this comparison take the place of the package's
    run = RunWithoutEvaluation(experiment.build_method(method), on, experiment.run, engine)
    language: Any = run.federation.companion
    if language.loaded.notes:
        sys.exit(f"{' '.join(language.loaded.notes)} Make the folder anew with fedlowrank base smollm2")
    model = language.model.to(device)
    adapted = re.compile(experiment.lora.target_modules)
    plain = model.get_base_model()
    layers = [n for n, _ in plain.named_modules() if adapted.fullmatch(n)]
    first = min(int(n.split(".")[2]) for n in layers)
    blocks = FrozenBlocks(plain, first, {} if hidden is None else hidden)
    trained = [client.train for client in run.federation.clients]
    logits = CountedLogits(
        plain, ((t, y) for data in trained for t, y in zip(data.x["input_ids"], data.y, strict=True))
    )
    folders = AdapterFolders(model, language.loaded)
    scale = folders._lora.scale
    questions = Questions(language, folder / f"{part}.jsonl", device)
    infos = run.federation.infos
    p = torch.tensor([float(i.example_count) for i in infos], dtype=torch.float64)
    p /= p.sum()
    record: dict[str, Any] = {
        "texts": len(questions.rows),
        "arm": arm,
        "lr": rate,
        "seed": seed,
        "part": part,
        "device": device,
        "rounds": [],
    }

    def update_of(params: Any) -> dict[str, Any]:
        made = folders.split_model(params, run.round, None)
        found = {}
        for name in made.factors:
            update = made.compute_update(name, scale)
            found[name] = update.dense().float() if isinstance(update, Pair) else update.float()
        return found

    def measure() -> None:
        made = run.local_model(infos[0])
        server = made.personal() if made.server is None else made.server
        with language.use_parameters(server):
            loss, exact = questions.score(plain, blocks)
            row: dict[str, Any] = {"round": run.round, "loss": loss, "exact": exact}
        if part == "test" and run.round in BIAS_ROUNDS:
            whole = update_of(server)
            mean = {n: torch.zeros_like(t) for n, t in whole.items()}
            losses: dict[int, float] = {}
            for info, weight in zip(infos, p.tolist(), strict=True):
                own = run.local_model(info).personal()
                for n, t in update_of(own).items():
                    mean[n] += weight * t
                rank = info.rank or 0
                if rank not in losses and run.round in CLIENT_ROUNDS:
                    # clients of one rank have one model
                    with language.use_parameters(own):
                        losses[rank] = questions.score(plain, blocks, 250)[0]
            norm = math.sqrt(sum(float(t.square().sum()) for t in whole.values()))
            gap = math.sqrt(sum(float((mean[n] - t).square().sum()) for n, t in whole.items()))
            row |= {"bias": gap / norm if norm else 0.0, "norm": norm}
            if losses:
                row["clients"] = {str(r): v for r, v in losses.items()}
                row["clients_loss"] = sum(
                    w * losses[i.rank or 0] for i, w in zip(infos, p.tolist(), strict=True)
                )
        record["rounds"].append(row)

    run.record_initial_models()
    total = rounds or experiment.run.rounds
    if part == "test":
        measure()
    for t in range(total):
        with blocks.remembered(), logits.used():
            run.step()
        if t == total - 1 or (part == "test" and run.round in SERVER_ROUNDS):
            measure()
    record["seconds"] = time.perf_counter() - start
    return record


def _work(queue: Any, results: Any, base: str, folder: Path, device: str, jobs: int) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.95 / jobs)
    hidden: dict[bytes, torch.Tensor] = {}
    while (job := queue.get()) is not None:
        for attempt in range(3):
            try:
                arm, rate, seed, *more = job
                results.put(run_arm(arm, rate, seed, base, folder, device, *more, hidden=hidden))
                break
            except NonFiniteError as error:
                results.put(
                    {
                        "arm": job[0],
                        "lr": job[1],
                        "seed": job[2],
                        "part": job[3],
                        "texts": TEXTS[job[3]],
                        "error": str(error),
                    }
                )
                break
            except torch.OutOfMemoryError:
                # the card's memory is shared by all workers
                if attempt == 2:
                    raise
            gc.collect()
            torch.cuda.empty_cache()
    results.put(None)


def run_all(base: str, folder: Path, out: Path, device: str, jobs: int, seeds: int, limit: float) -> None:
    """Choose learning rates, then run seeds until the time is up; a line for each run, and none that is there twice."""
    start, context = time.perf_counter(), get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_work, args=(queue, results, base, folder, device, jobs)) for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    out.parent.mkdir(parents=True, exist_ok=True)
    done = read_rows(out) if out.exists() else {}
    if any(row["texts"] != TEXTS[row["part"]] for row in done.values()):
        sys.exit(f"{out} has runs that were scored by another number of texts: name another file")
    with out.open("a") as file, contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.terminate)

        pending: set[Job] = set()
        while time.perf_counter() - start < limit:
            for job in itertools.islice((j for j in wanted(done, seeds) if j not in done), jobs):
                if job not in pending:
                    pending.add(job)
                    queue.put((*job, 5 if job[3] == "val" else 10))
            if not pending:
                return
            try:
                row = results.get(timeout=5)
            except queues.Empty:
                if dead := [w.exitcode for w in workers if w.exitcode]:
                    sys.exit(f"{len(dead)} of {jobs} workers failed; their errors stand above")
                continue
            done[job_of(row)] = row
            pending.remove(job_of(row))
            print(json.dumps(row), file=file, flush=True)


def wanted(done: dict[Job, dict[str, Any]], seeds: int) -> Iterator[Job]:
    """Runs in their order: those that choose learning rates, then seed by seed the arms whose rate is chosen."""
    tuned = [arm for arm in ARMS if not arm.startswith("control")]
    trials = {arm: [(arm, rate, TUNING_SEED, "val") for rate in RATES] for arm in tuned}
    for rate in zip(*trials.values(), strict=True):
        yield from rate
    known = [job for jobs in trials.values() if all(j in done for j in jobs) for job in jobs]
    rates = chosen([done[job] for job in known])
    for seed in range(seeds):
        yield from ((arm, rates[arm], seed, "test") for arm in ARMS if arm in rates)


def job_of(row: dict[str, Any]) -> Job:
    """What a row is the result of."""
    return row["arm"], row["lr"], row["seed"], row["part"]


def read_rows(out: Path) -> dict[Job, dict[str, Any]]:
    """Rows of a file by job."""
    return {job_of(row): row for row in map(json.loads, out.read_text().splitlines())}


def chosen(tried: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate of each arm, by its loss in tuning; a run that diverged is not chosen."""
    losses: dict[str, dict[float, float]] = {}
    for row in tried:
        if "error" not in row:
            losses.setdefault(row["arm"], {})[row["lr"]] = row["rounds"][-1]["loss"]
    rates = {arm: min(found, key=found.__getitem__) for arm, found in losses.items()}
    if (rate := rates.get("fedhl_examples")) is not None:
        rates |= {"control_fedhl": rate, "control_flexlora": rate}
    return rates


def table(out: Path) -> str:
    """Tables of the seeds that all arms completed."""
    rows = read_rows(out).values()
    rates = chosen([r for r in rows if r["part"] == "val"])
    tests = {(r["arm"], r["seed"]): r for r in rows if r["part"] == "test" and r["lr"] == rates[r["arm"]]}
    seeds = [s for s in sorted({s for _, s in tests}) if all((arm, s) in tests for arm in ARMS)]
    failed = [f"{arm} with seed {seed}" for (arm, seed), r in tests.items() if "error" in r]
    seeds = [s for s in seeds if all("error" not in tests[arm, s] for arm in ARMS)]

    if len(seeds) < 2:
        return f"{len(seeds)} seeds are complete in {out.name}, and an interval needs two."

    def at(arm: str, seed: int, number: int) -> dict[str, Any]:
        (row,) = (r for r in tests[arm, seed]["rounds"] if r["round"] == number)
        return dict(row)

    def last(arm: str, key: str) -> list[float]:
        return [at(arm, s, 10)[key] for s in seeds]

    def interval(values: list[float], digits: int) -> str:
        mean, half = mean_and_half_width(values)
        return f"{mean:.{digits}f} [{mean - half:.{digits}f}, {mean + half:.{digits}f}]"

    lines = [
        f"Seeds {', '.join(map(str, seeds))}; means with 95 % intervals over seeds; after round 10.",
        "",
        "| arm | learning rate | test loss, server | test loss, clients | exact match, % | bias, round 1 | bias, round 10 |",
        "| :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm, (title, _, _) in ARMS.items():
        first = [at(arm, s, 1)["bias"] for s in seeds]
        lines.append(
            f"| {title} | {rates[arm]:g} | {interval(last(arm, 'loss'), 3)} | {interval(last(arm, 'clients_loss'), 3)} "
            f"| {interval([100 * v for v in last(arm, 'exact')], 1)} | {statistics.mean(first):.3f} "
            f"| {statistics.mean(last(arm, 'bias')):.3f} |"
        )
    lines += ["", "| A - B, paired by seed | test loss, server | test loss, clients | exact match, points |"]
    lines += ["| :--- | ---: | ---: | ---: |"]
    for a, b in PAIRS:
        gaps = [
            [x - y for x, y in zip(last(a, key), last(b, key), strict=True)]
            for key in ("loss", "clients_loss", "exact")
        ]
        cells = [interval(gaps[0], 3), interval(gaps[1], 3), interval([100 * v for v in gaps[2]], 1)]
        lines.append(f"| {ARMS[a][0]} - {ARMS[b][0]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Mean test loss of the server by round:",
        "",
        "| arm | " + " | ".join(map(str, SERVER_ROUNDS)) + " |",
    ]
    lines += ["| :--- |" + " ---: |" * len(SERVER_ROUNDS)]
    for arm, (title, _, _) in ARMS.items():
        by_round = [statistics.mean(at(arm, s, t)["loss"] for s in seeds) for t in SERVER_ROUNDS]
        lines.append(f"| {title} | " + " | ".join(f"{v:.3f}" for v in by_round) + " |")
    first = [abs(at("control_fedhl", s, 1)["loss"] - at("control_flexlora", s, 1)["loss"]) for s in seeds]
    lines += ["", f"Control after round 1: the losses of the two arms differ by at most {max(first):.1e}."]
    if failed:
        lines += ["", f"Diverged: {', '.join(failed)}."]
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = options.add_subparsers(dest="what", required=True)
    data = what.add_parser("data")
    data.add_argument("source", type=Path)
    data.add_argument("folder", type=Path)
    every = what.add_parser("all")
    one = what.add_parser("one")
    for parser in (every, one):
        parser.add_argument("base")
        parser.add_argument("folder", type=Path)
        parser.add_argument("--device", default="cpu")
    every.add_argument("out", type=Path)
    every.add_argument("--jobs", type=int, default=1)
    every.add_argument("--seeds", type=int, default=5)
    every.add_argument("--seconds", type=float, default=math.inf)
    one.add_argument("arm", choices=ARMS)
    one.add_argument("--lr", type=float, default=1e-3)
    one.add_argument("--seed", type=int, default=TUNING_SEED)
    one.add_argument("--part", default="val")
    one.add_argument("--rounds", type=int)
    shown = what.add_parser("table")
    shown.add_argument("out", type=Path)
    given = options.parse_args()
    if given.what == "data":
        make_data(given.source, given.folder)
    elif given.what == "one":
        torch.set_num_threads(1)
        found = run_arm(
            given.arm, given.lr, given.seed, given.base, given.folder, given.device, given.part, given.rounds
        )
        print(json.dumps(found, indent=1))
    elif given.what == "all":
        run_all(given.base, given.folder, given.out, given.device, given.jobs, given.seeds, given.seconds)
    else:
        print(table(given.out))


if __name__ == "__main__":
    main()
