"""One page a method and a table of all: from the methods, `method_notes.toml` and the tables of `results/`."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docstrings import remove_roles

from fedlowrank.config.reading.field_help import list_fields
from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod
from fedlowrank.methods import METHODS
from fedlowrank.testing.check import small_federation
from fedlowrank.training.tracing import trace_upload
from fedlowrank.trust.abilities import ABILITIES, abilities

DOCS = Path(__file__).parents[1]
KINDS = (
    "Baselines",
    "Global model, corrected",
    "Server optimizers",
    "Personal model beside a global one",
    "Personal part",
    "Different architectures",
    "Low-rank global model",
    "Clusters of clients",
    "LoRA",
)
# Columns of result tables that say how good a method is or what it sends; the others are on the page itself.
WORTH = re.compile(
    r"^(uplink|chosen|test$|minus|accuracy|server|gkr|global|worst client|mnist|bytes a message|MB)", re.I
)
SHOWN = 6
"""Rows of a table that a page shows at most."""

MethodClass = type[AnyMethod]


def read_notes(methods: dict[str, MethodClass] = METHODS) -> dict[str, dict[str, str]]:
    """Read the notes of all methods.

    Args:
        methods: that need a note.

    Raises:
        ValueError: if a method has no note, or a note lacks a field or has an unknown kind.
    """
    notes = tomllib.loads((DOCS / "method_notes.toml").read_text())
    for name in methods:
        note = notes.get(name, {})
        missing = [key for key in ("kind", "short", "use") if not note.get(key)]
        if missing:
            raise ValueError(f"docs/method_notes.toml: [{name}] needs {', '.join(missing)}")
        if note["kind"] not in KINDS:
            raise ValueError(f"docs/method_notes.toml: [{name}] kind must be one of {', '.join(KINDS)}")
    return notes


def make_pages() -> dict[str, str]:
    """All pages of methods by path."""
    notes = read_notes()
    pages = {"methods/index.md": _index(notes)}
    for name, cls in METHODS.items():
        pages[f"methods/{name}.md"] = method_page(name, cls, notes[name])
    return pages


def _index(notes: dict[str, dict[str, str]]) -> str:
    parts = [
        "# All methods\n\n[Which method?](../which-method.md) helps to choose. `fedlowrank list` prints this table, "
        "`fedlowrank list NAME` the algorithm and the fields of one method.\n\n"
        "Clients of one architecture begin with the same initial weights, drawn from the seed of the federation and the "
        "name of the architecture. Methods therefore differ in nothing but the method.\n"
    ]
    for kind in KINDS:
        rows = [
            [
                f"[`{n}`]({n}.md)",
                c.title,
                notes[n]["short"],
                "any" if c.heterogeneous else "equal",
                c.citation,
            ]
            for n, c in METHODS.items()
            if notes[n]["kind"] == kind
        ]
        if rows:
            parts.append(
                f"## {kind}\n\n" + _table(["name", "method", "use", "architectures", "source"], rows)
            )
    rows = [[f"[`{n}`]({n}.md)", *_abilities(c)] for n, c in METHODS.items()]
    parts.append(
        "## Privacy, rules and compression\n\nFound by a trial of each method's contract, as `fedlowrank list --trust` "
        "prints it; the page of a method says why not. The rules `norm_bound`, `krum` and `multi_krum` go with every method.\n\n"
        + _table(
            ["method", *ABILITIES.values()],
            [[row[0], *(cell.split(":")[0] for cell in row[1:])] for row in rows],
        )
    )
    return "\n".join(parts)


def method_page(name: str, cls: MethodClass, note: dict[str, str]) -> str:
    """The page of one method."""
    models = "models of any architecture" if cls.heterogeneous else "equal models"
    doc = remove_roles(inspect.getdoc(sys.modules[cls.__module__]) or "")
    limits = {"epochs": ">= 1", "batch_size": ">= 1", **cls.bounds}
    fields = [
        [f"`{f.name}`", f"`{f.type}`", f"`{f.default}`", limits.get(f.name, ""), remove_roles(f.meaning)]
        for f in list_fields(cls)
    ]
    able = [[title, text] for title, text in zip(ABILITIES.values(), _abilities(cls), strict=True)]
    # without the table of contents, for algorithm boxes are wide
    return f"""---
hide: [toc]
---

# {cls.title}

`{name}`, {models}. Kind: {note["kind"]}. Source: {cls.citation}.

{note["short"]}

```sh
fedlowrank compare experiments/demo/{_demo(cls)} --methods {name},standalone
```

## When to use it

{note["use"]}

## Algorithm

The word at the right end of a line is the function that implements it:
[`fedlowrank.methods.{cls.__name__}`][{cls.__module__}.{cls.__qualname__}].

```text
{doc}
```

## Fields

Set them in the table `[methods.{name}]` of an experiment, on the command line (`methods.{name}.FIELD=VALUE`), or in
Python (`{cls.__name__}(FIELD=VALUE)`).

{_table(["field", "type", "default", "bounds", "meaning"], fields)}
## What is sent

{_payload(cls)}
## Privacy, rules and compression

{_table(["", "possible?"], able)}
## Measured

{_measured(cls)}"""


def _demo(cls: MethodClass) -> str:
    return "heterogeneous.toml" if cls.heterogeneous else "homogeneous.toml"


def _abilities(cls: MethodClass) -> list[str]:
    found = abilities(cls(), small_federation(cls.heterogeneous).task(1))
    return ["yes" if reason is None else f"no: {reason}" for reason in found.values()]


def _payload(cls: MethodClass) -> str:
    """What a client is sent and sends in the first round of a trial."""
    method, task = cls(), small_federation(cls.heterogeneous).task(1)
    client, server = task.clients[0], method.server_init(task)
    down = method.download(server, client)
    upload, _ = trace_upload(method, task, client, down)
    rows = [
        [
            direction,
            f"`{path.strip('/')}`",
            " × ".join(map(str, leaf.shape)) or "one number",
            str(leaf.numel()),
        ]
        for direction, value in (("to the client", down), ("from the client", upload))
        for path, leaf in tree.leaves(value)
    ]
    where = (
        "In the first round of a trial, to and from client 0 of a federation with 3 classes. Its model has a body of two "
        "linear layers, 6 to 4 and 4 to 5, and a head, 5 to 3; the LoRA rank is 2. Shapes are traced from the method's "
        "code without training. What depends on earlier uploads comes with later rounds, and a part whose size depends on a "
        "client's data, such as its classes, may be larger.\n\n"
    )
    if not rows:
        return f"{where}Nothing is sent.\n"
    return where + _table(["direction", "part", "shape", "numbers"], rows)


@dataclass(frozen=True)
class ResultTable:
    """A table of a results page, with the page's title and the heading above it."""

    page: str
    title: str
    heading: str
    columns: list[str]
    rows: list[list[str]]


def result_tables(page: Path) -> Iterator[ResultTable]:
    """The tables of a results page, in order."""
    title, heading, block = "", "", list[str]()
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 2:
            columns, _, *rows = (
                [c.strip() for c in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in block
            )
            yield ResultTable(page.name, title, heading, columns, rows)
        block = []
        if found := re.match(r"(#+) (.*)", line):
            title, heading = (found[2], "") if found[1] == "#" else (title, found[2])


def _measured(cls: MethodClass) -> str:
    """Rows of result tables whose first cell is this method, the first such table under each heading."""
    parts, mentioned = [], []
    for page in sorted((DOCS / "results").glob("*.md")):
        seen: set[str] = set()
        found = []
        for table in result_tables(page):
            rows = [row for row in table.rows if re.match(rf"{re.escape(cls.title)}(?![\w-])", row[0])]
            kept = [i for i, column in enumerate(table.columns) if i == 0 or WORTH.match(column)]
            results = [i for i in kept if table.columns[i] not in ("method", "uplink")]
            if rows and results and table.heading not in seen:
                seen.add(table.heading)
                shown = [[row[i] for i in kept] for row in rows[:SHOWN]]
                heading = f"{table.heading}:\n\n" if table.heading else ""
                found.append(heading + _table([table.columns[i] for i in kept], shown))
        title = re.search(r"^# (.*)", page.read_text(), re.MULTILINE)
        link = f"[{title[1] if title else page.stem}](../results/{page.name})"
        if found:
            parts.append(f"### {link}\n\n" + "\n".join(found))
        elif re.search(rf"(?<![\w-]){re.escape(cls.title)}(?![\w-])", page.read_text()):
            mentioned.append(link)
    if mentioned:
        parts.append(f"{'Also' if parts else 'See'}: {', '.join(mentioned)}.\n")
    intro = "Copied from the results pages, which say what ± is and what may be concluded.\n\n"
    return intro + "\n".join(parts) if parts else "No results page has it yet.\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    cells = [[_cell(text) for text in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """A text as a cell: bars escaped, and what would begin a tag outside of code."""
    text = re.sub(r"(?<!\\)\|", r"\\|", text)
    return text if "`" in text else text.replace("<", "&lt;")
