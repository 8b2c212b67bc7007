"""Pretrain a tiny language model and write instructions for it, for `make demo-language`.

The model is a Llama of two layers. Pretraining takes about a minute on one core: the model learns to continue small talk about
colors and numbers. The instructions are four kinds of new tasks; clients differ in the kinds that they have.

    python examples/tiny_language.py FOLDER

writes FOLDER/base (an ordinary transformers folder) and FOLDER/train.jsonl, FOLDER/test.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch.nn import functional

from fedlowrank.core.key import Key
from fedlowrank.language.tiny_models import build_tiny_model

COLORS = ["red", "blue", "green", "black", "white"]
QUALITIES = [*COLORS, "small", "large", "old", "new", "cold", "warm"]
THINGS = ["bird", "cat", "dog", "fish", "tree", "river", "stone", "cloud", "lamp"]
WORDS = [*QUALITIES, *THINGS]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_small_talk(rng: random.Random) -> str:
    """Write one text of the pretraining data."""
    a, b = rng.sample(QUALITIES, 2)
    thing, other = rng.sample(THINGS, 2)
    count = rng.randrange(len(NUMBERS))
    return rng.choice(
        [
            f"The {a} {thing} sees the {b} {other}. The {b} {other} sees the {a} {thing}.",
            f"After {NUMBERS[count - 1]} comes {NUMBERS[count]}." if count else "First comes one.",
            f"{thing} {other} {thing} {other} {thing} {other}.",
        ]
    )


def write_instruction(rng: random.Random) -> dict[str, str]:
    """Write one instruction with its response."""
    kind = rng.choice(["repeat", "next", "swap", "color"])
    if kind == "repeat":
        word = rng.choice(WORDS)
        return {"category": kind, "instruction": f"Repeat {word} twice.", "response": f"{word} {word}"}
    if kind == "next":
        i = rng.randrange(len(NUMBERS) - 1)
        return {
            "category": kind,
            "instruction": f"What comes after {NUMBERS[i]}?",
            "response": NUMBERS[i + 1],
        }
    a, b = rng.sample(WORDS, 2)
    if kind == "swap":
        return {"category": kind, "instruction": f"Swap {a} and {b}.", "response": f"{b} and {a}"}
    return {"category": kind, "instruction": f"Is {a} a color?", "response": "yes" if a in COLORS else "no"}


def main(folder: Path) -> None:
    """Write the instructions, and pretrain and write the base."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 1600), ("test", 400)):
        rows = [json.dumps(write_instruction(rng)) for _ in range(count)]
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n")
    talk = [write_small_talk(rng) for _ in range(2000)]
    base = build_tiny_model(folder / "base", "causal", Key((0,)), talk, width=64)
    pretrain(base, talk)
    print(f"base model and data: {folder}")


def pretrain(base: Path, texts: list[str], steps: int = 600, batch: int = 32) -> None:
    """Train all weights of the base on plain text, by an ordinary training loop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        some = [
            texts[i] + tokenizer.eos_token
            for i in torch.randint(len(texts), (batch,), generator=generator).tolist()
        ]
        rows = tokenizer(some, return_tensors="pt", padding=True)
        scores = model(**rows, use_cache=False).logits[:, :-1]
        targets = rows["input_ids"][:, 1:].masked_fill(rows["attention_mask"][:, 1:] == 0, -100)
        loss = functional.cross_entropy(scores.transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"pretraining step {step}: loss {loss.item():.2f}")
    model.save_pretrained(base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny language model and instructions for it.")
    parser.add_argument("folder", type=Path, help="is made: base, train.jsonl and test.jsonl")
    main(parser.parse_args().folder)
