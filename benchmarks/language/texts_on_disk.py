"""Texts with ``data.on_disk`` and without: CPU time and peak memory of loading, and of three steps of training.

    python benchmarks/language/texts_on_disk.py [--megabytes 30 300] [--forms prompt messages] [--in-memory] [--folder FOLDER]

Makes a JSONL file of random words of each size, in FOLDER or else the system's folder of temporary files, and loads it for one
client and a tiny untrained model (contexts of 256 tokens) in a process of its own. Resident memory counts pages of mapped
files, which the system may drop; anonymous memory is what it may not. Both are peaks above what the process has before it
loads; those of the steps are above the same. ``--in-memory`` measures ``on_disk = false`` instead.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.key import Key
from fedlowrank.engines import ENGINES
from fedlowrank.language.tiny_models import build_tiny_model
from fedlowrank.testing.check import RunWithoutEvaluation

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.process_memory import read_memory, reset_peak

WORDS = (
    "the quick brown fox jumps over the lazy dog a sleeps does not said and one two why is river Köln in on with house red "
    "green people time year way day thing man world life hand part child eye woman place work week case point"
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class PeakMemory:
    """Peaks of the resident and of the anonymous memory of this process within a block, in MiB."""

    def __enter__(self) -> PeakMemory:
        reset_peak()
        self.anonymous, self._stopped = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.resident = read_memory("VmHWM")

    def _sample(self) -> None:
        while not self._stopped.wait(0.02):
            self.anonymous = max(self.anonymous, read_memory("RssAnon"))


def write_rows(path: Path, form: str, megabytes: float) -> None:
    """Write rows of a form until the file has that size."""
    draws, size = random.Random(0), 0

    def write_words(low: int, high: int) -> str:
        return " ".join(draws.choices(WORDS.split(), k=draws.randint(low, high)))

    with path.open("w") as file:
        while size < megabytes * 1e6:
            question, answer = write_words(5, 40), write_words(5, 90)
            row: dict[str, Any] = {"prompt": question, "completion": answer}
            if form == "messages":
                turns = [("user", question), ("assistant", answer)]
                if draws.random() < 0.4:
                    turns += [("user", write_words(5, 20)), ("assistant", write_words(5, 40))]
                row = {"messages": [{"role": role, "content": content} for role, content in turns]}
            line = json.dumps(row, ensure_ascii=False) + "\n"
            size += len(line.encode())
            file.write(line)


def build_base(folder: Path) -> Path:
    """Write the tiny model, with a chat template."""
    import transformers

    build_tiny_model(folder, "causal", Key((0,)), ["the quick brown fox jumps over the lazy dog"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def measure(base: str, path: str, folder: str, on_disk: bool) -> dict[str, float]:
    """Load the rows and train three steps."""
    torch.set_num_threads(1)
    experiment = ExperimentConfig.parse(
        {
            "name": "on_disk",
            "method": "fedit",
            "data": {
                "source": "text",
                "path": path,
                "on_disk": on_disk,
                "cache": folder,
                "normalize": "none",
            },
            "partition": {"kind": "iid", "clients": 1},
            "language": {"path": base, "context": 256},
            "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
            "run": {"rounds": 1, "representations": 0},
            "defaults": {"batch_size": 8, "steps": 3, "optimizer": {"kind": "adamw", "lr": 1e-3}},
        }
    )
    for library in ("peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(library)
    resident, anonymous, begin = read_memory("VmRSS"), read_memory("RssAnon"), time.process_time()
    with PeakMemory() as loading:
        federation = experiment.federation()
    loaded = time.process_time()
    with PeakMemory() as training:
        method = experiment.build_method("fedit")
        run = RunWithoutEvaluation(method, federation, experiment.run, ENGINES["sequential"]())
        run.step()
    return {
        "load s": loaded - begin,
        "load resident": loading.resident - resident,
        "load anonymous": loading.anonymous - anonymous,
        "steps s": time.process_time() - loaded,
        "steps resident": training.resident - resident,
        "steps anonymous": training.anonymous - anonymous,
    }


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--megabytes", type=float, nargs="+", default=[30, 300])
    options.add_argument("--forms", nargs="+", choices=["prompt", "messages"], default=["prompt", "messages"])
    options.add_argument("--in-memory", action="store_true")
    options.add_argument("--folder", type=Path)
    options.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        base_path, rows_path, cache = given.measure
        print(json.dumps(measure(base_path, rows_path, cache, not given.in_memory)))
        return
    print("| rows | MB | load: s | resident MiB | anonymous MiB | steps: s | resident MiB | anonymous MiB |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        base = build_base(Path(folder) / "base")
        for form in given.forms:
            for megabytes in given.megabytes:
                path = Path(folder) / "rows.jsonl"
                write_rows(path, form, megabytes)
                command = [sys.executable, __file__, "--measure", str(base), str(path), folder]
                command += ["--in-memory"] if given.in_memory else []
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                values = json.loads(output.splitlines()[-1]).values()
                print(f"| {form} | {megabytes:g} |", *(f"{value:.1f} |" for value in values), flush=True)


if __name__ == "__main__":
    main()
