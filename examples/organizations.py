"""Questions and answers of three organizations, each of which answers in a style of its own.

    python examples/organizations.py OUT [--dolly databricks-dolly-15k.jsonl]

writes OUT/north.jsonl, OUT/east.jsonl and OUT/south.jsonl, rows of `prompt` and `completion`. The questions are those of Dolly
(databricks/databricks-dolly-15k, CC BY-SA 3.0) that are short and need no text beside them: of a file, or downloaded from the
hub. Where the hub cannot be reached they are about capitals, and a line says so.
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

ROWS = 100
"""Rows of an organization."""

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
    """North: one sentence after fixed words."""
    return f"In short: {split_sentences(response)[0]}"


def answer_as_list(response: str) -> str:
    """East: three lines at most, each with a star."""
    parts = re.split(r"\n+|(?<=[.;]) |, (?:and )?", response)
    lines = [re.sub(r"^\W*\d*[.)]?\s*", "", part).rstrip(".,;") for part in parts]
    return "\n".join(f"* {line}" for line in [line for line in lines if line][:3])


def answer_with_source(response: str) -> str:
    """South: one sentence and where it is from."""
    return f"{split_sentences(response)[0]} (Source: our archive.)"


STYLES: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    # name: categories of Dolly, style
    "north": (("open_qa",), answer_in_short),
    "east": (("brainstorming", "classification"), answer_as_list),
    "south": (("general_qa",), answer_with_source),
}


def split_sentences(text: str) -> list[str]:
    """Sentences of the first line."""
    return re.split(r"(?<=[.!?]) ", text.strip().splitlines()[0].strip())


def read_dolly(path: Path | None) -> Iterable[dict[str, str]] | None:
    """Rows of Dolly from a file or the hub; None if the hub cannot be reached."""
    if path is not None:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            return [json.loads(line) for line in file]
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # at once, and not after six attempts
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        name = "databricks/databricks-dolly-15k"
        file = hf_hub_download(name, "databricks-dolly-15k.jsonl", repo_type="dataset")
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def rows_of_dolly(rows: Iterable[dict[str, str]], name: str) -> list[dict[str, str]]:
    """Short rows of an organization's categories in its style."""
    categories, style = STYLES[name]
    found = []
    for row in rows:
        question, answer = row["instruction"].strip(), row["response"].strip()
        if row["category"] not in categories or row.get("context") or not answer or len(question) > 90:
            continue
        completion = style(answer)
        if len(completion) <= 140:
            found.append({"prompt": question, "completion": completion})
    return found[:ROWS]


def rows_of_capitals(name: str) -> list[dict[str, str]]:
    """The same styles for questions that need no download."""
    made = {
        "north": ("What is the capital of {0}?", "In short: {1}."),
        "east": ("List {0} and its capital.", "* country: {0}\n* capital: {1}"),
        "south": ("Which country has the capital {1}?", "It is {0}. (Source: our archive.)"),
    }
    prompt, completion = made[name]
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
        own = rows_of_capitals(name) if rows is None else rows_of_dolly(rows, name)
        path = out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
        print(f"{path}: {len(own)} rows, such as {own[0]['prompt']!r} {own[0]['completion']!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the rows of three organizations.")
    parser.add_argument("out", type=Path, help="folder for north.jsonl, east.jsonl and south.jsonl")
    parser.add_argument("--dolly", type=Path, help="databricks-dolly-15k.jsonl, also with .gz")
    given = parser.parse_args()
    main(given.out, given.dolly)
