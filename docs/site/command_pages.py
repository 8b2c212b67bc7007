"""Pages of the command line: every command with its options, and every field of an experiment file."""

from __future__ import annotations

import argparse
import os

from docstrings import remove_roles

from fedlowrank.cli.main import parser
from fedlowrank.config.reading.field_help import format_field_help


def make_pages() -> dict[str, str]:
    """The pages by path."""
    return {"reference/commands.md": commands_page(), "reference/fields.md": fields_page()}


def commands_page() -> str:
    """What `fedlowrank COMMAND --help` prints."""
    # argparse breaks lines by it
    os.environ["COLUMNS"] = "100"
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    parts = [
        "# Commands\n\nAny field of an experiment file may be given after the file: `run.rounds=50 "
        "methods.pfedlora.mu=0.7`. [Fields of an experiment file](fields.md) lists them.\n"
    ]
    for choice in commands._choices_actions:
        command = commands.choices[choice.dest]
        parts.append(
            f"## {choice.dest}\n\n{choice.help}.\n\n```text\n{command.format_help().rstrip()}\n```\n"
        )
    return "\n".join(parts)


def fields_page() -> str:
    """The fields that `fedlowrank fields` explains, a table for each section."""
    parts = [
        "# Fields of an experiment file\n\nA section `[run]` of the file holds the fields of the table `run`. Each can be set on "
        "the command line as `run.FIELD=VALUE`. `fedlowrank fields run` prints those of one section.\n"
    ]
    _, *lines = format_field_help().splitlines()
    for line, meaning in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("      ") or not line:
            continue
        if line.startswith("  "):
            name, _, default = line.strip().partition(" = ")
            text = remove_roles(meaning.strip()).replace("|", "\\|").replace("<", "&lt;")
            parts[-1] += f"\n| `{name}` | `{default.replace('|', chr(92) + '|')}` | {text} |"
        else:
            parts.append(f"\n## {line.strip('[]')}\n\n| field | default | meaning |\n| --- | --- | --- |")
    return "\n".join(parts) + "\n"
