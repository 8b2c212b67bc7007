"""Load the adapters of a run by PEFT without fedlowrank, and print their answers to a question.

python examples/load_adapters.py BASE ADAPTERS "Swap red and bird."
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar


def main(base: Path, adapters: Path, question: str) -> None:
    """Print the answers of the base and of every adapter."""
    torch.set_num_threads(1)
    disable_progress_bar()
    # PEFT uses a name that transformers deprecated
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    tokenizer = AutoTokenizer.from_pretrained(base)
    folders = sorted(f for f in adapters.iterdir() if (f / "adapter_config.json").exists())
    if not folders:
        raise SystemExit(
            f"{adapters} holds no adapter folders; `fedlowrank adapters RUN -o {adapters}` writes them"
        )
    # all adapters of a run were trained in one format
    prompt = encode_prompt(folders[0], tokenizer, question)
    print(f"base: {answer(AutoModelForCausalLM.from_pretrained(base), tokenizer, prompt)!r}")
    for folder in folders:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(find_base(folder, base)), folder
        )
        rank = model.peft_config["default"].r
        print(f"{folder.name}, rank {rank}: {answer(model, tokenizer, prompt)!r}")
    print(f"{len(folders)} adapter folders loaded by peft.PeftModel.from_pretrained")


def find_base(folder: Path, base: Path) -> Path:
    """Find the base of an adapter: the given one, or the changed base that its method wrote beside the adapter."""
    named = PeftConfig.from_pretrained(folder).base_model_name_or_path
    beside = (folder.parent / "base").resolve()
    return beside if named == str(beside) else base


def encode_prompt(folder: Path, tokenizer: object, question: str) -> dict[str, torch.Tensor]:
    """Encode a question in the training format of the run."""
    stored = json.loads((folder / "fedlowrank.json").read_text())
    if "prompt" not in stored:
        raise SystemExit(f"{folder} does not say how it was trained; write it again by `fedlowrank adapters`")
    template = stored["prompt"]
    if template is None:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # a chat template writes its begin token, if it has any
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return tokenizer(template.replace("{instruction}", question), return_tensors="pt")


def answer(model: torch.nn.Module, tokenizer: object, prompt: dict[str, torch.Tensor]) -> str:
    """Generate the greedy continuation of a prompt, of at most 12 tokens."""
    generated = model.generate(
        **prompt, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Let a base model and its adapters answer a question.")
    parser.add_argument("base", type=Path, help="folder of the base model")
    parser.add_argument("adapters", type=Path, help="folder of adapters, as `fedlowrank adapters` writes it")
    parser.add_argument("question")
    arguments = parser.parse_args()
    main(arguments.base, arguments.adapters, arguments.question)
