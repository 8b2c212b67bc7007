"""Write questions and answers of three organizations, each with its own style of answers.

    python examples/organizations.py OUT [--dolly databricks-dolly-15k.jsonl]

writes OUT/north.jsonl, OUT/east.jsonl and OUT/south.jsonl, rows of `prompt` and `completion`. The questions are the short ones
of Dolly (databricks/databricks-dolly-15k, CC BY-SA 3.0) without a context, from a file or downloaded from the hub. If the hub
cannot be reached, a line says so and the questions are about capitals.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

MAX_ROWS = 100
"""Maximum number of rows of an organization from Dolly."""

CAPITALS = {
    "Albania": "Tirana", "Algeria": "Algiers", "Angola": "Luanda", "Argentina": "Buenos Aires", "Armenia": "Yerevan",
    "Austria": "Vienna", "Bangladesh": "Dhaka", "Belgium": "Brussels", "Bulgaria": "Sofia", "Cambodia": "Phnom Penh",
    "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana",
    "Denmark": "Copenhagen", "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn", "Finland": "Helsinki",
    "France": "Paris", "Georgia": "Tbilisi", "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome",
    "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga", "Lebanon": "Beirut", "Mali": "Bamako",
    "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu", "Norway": "Oslo",
    "Pakistan": "Islamabad", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Rwanda": "Kigali", "Senegal": "Dakar", "Serbia": "Belgrade", "Slovakia": "Bratislava", "Slovenia": "Ljubljana",
    "Spain": "Madrid", "Sudan": "Khartoum", "Sweden": "Stockholm", "Syria": "Damascus", "Thailand": "Bangkok",
    "Tunisia": "Tunis", "Turkey": "Ankara", "Uganda": "Kampala", "Ukraine": "Kyiv", "Uruguay": "Montevideo",
    "Venezuela": "Caracas", "Vietnam": "Hanoi", "Zambia": "Lusaka", "Zimbabwe": "Harare",
}  # fmt: skip


def answer_in_short(response: str) -> str:
    """Write an answer in the style of north: "In short" and one sentence."""
    return f"In short: {split_sentences(response)[0]}"


def answer_as_list(response: str) -> str:
    """Write an answer in the style of east: a list of at most three lines, each with a star."""
    parts = re.split(r"\n+|(?<=[.;]) |, (?:and )?", response)
    lines = [re.sub(r"^\W*\d*[.)]?\s*", "", part).rstrip(".,;") for part in parts]
    return "\n".join(f"* {line}" for line in [line for line in lines if line][:3])


def answer_with_source(response: str) -> str:
    """Write an answer in the style of south: one sentence and its source."""
    return f"{split_sentences(response)[0]} (Source: our archive.)"


STYLES: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    # name: categories of Dolly, style
    "north": (("open_qa",), answer_in_short),
    "east": (("brainstorming", "classification"), answer_as_list),
    "south": (("general_qa",), answer_with_source),
}


def split_sentences(text: str) -> list[str]:
    """Split the first line of a text into sentences."""
    return re.split(r"(?<=[.!?]) ", text.strip().splitlines()[0].strip())


def read_dolly(path: Path | None) -> Iterable[dict[str, str]] | None:
    """Read the rows of Dolly from a file or the hub; None if the hub cannot be reached."""
    if path is not None:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            return [json.loads(line) for line in file]
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # fails at once without a network, where hf_hub_download makes six attempts
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        name = "databricks/databricks-dolly-15k"
        file = hf_hub_download(name, "databricks-dolly-15k.jsonl", repo_type="dataset")
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def select_dolly_rows(rows: Iterable[dict[str, str]], name: str) -> list[dict[str, str]]:
    """Select short rows of an organization's categories, with answers in its style."""
    categories, style = STYLES[name]
    selected = []
    for row in rows:
        question, answer = row["instruction"].strip(), row["response"].strip()
        if row["category"] not in categories or row.get("context") or not answer or len(question) > 90:
            continue
        completion = style(answer)
        if len(completion) <= 140:
            selected.append({"prompt": question, "completion": completion})
    return selected[:MAX_ROWS]


def make_capital_rows(name: str) -> list[dict[str, str]]:
    """Make rows about capitals in an organization's style, without a download."""
    templates = {
        "north": ("What is the capital of {0}?", "In short: {1}."),
        "east": ("List {0} and its capital.", "* country: {0}\n* capital: {1}"),
        "south": ("Which country has the capital {1}?", "It is {0}. (Source: our archive.)"),
    }
    prompt, completion = templates[name]
    return [{"prompt": prompt.format(*p), "completion": completion.format(*p)} for p in CAPITALS.items()]


def main(out: Path, dolly: Path | None) -> None:
    """Write the rows of each organization."""
    rows = read_dolly(dolly)
    if rows is None:
        print(
            "Dolly cannot be downloaded here: the questions are about capitals. --dolly FILE takes a copy of yours."
        )
    out.mkdir(parents=True, exist_ok=True)
    for name in STYLES:
        organization_rows = make_capital_rows(name) if rows is None else select_dolly_rows(rows, name)
        path = out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in organization_rows))
        example = organization_rows[0]
        print(
            f"{path}: {len(organization_rows)} rows, such as {example['prompt']!r} {example['completion']!r}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the rows of three organizations.")
    parser.add_argument("out", type=Path, help="folder for north.jsonl, east.jsonl and south.jsonl")
    parser.add_argument("--dolly", type=Path, help="databricks-dolly-15k.jsonl, also with .gz")
    arguments = parser.parse_args()
    main(arguments.out, arguments.dolly)
