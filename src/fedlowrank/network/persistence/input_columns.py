"""Names of the inputs of tables, which must be the same, in the same order, at all clients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest

MAX_CHARACTERS = 1 << 16
"""Number of characters of all names above which a registration contains their digest instead."""

_MAX_NAMES = 5
_DIGEST_PREFIX = "digest "


def digest_columns(columns: Sequence[str]) -> str:
    """Digest of all names, in their order."""
    text = json.dumps([*columns])
    return _DIGEST_PREFIX + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def shorten_columns(columns: Sequence[str]) -> Sequence[str]:
    """Return the names themselves, or their digest if they are too long for a registration."""
    return columns if sum(map(len, columns)) <= MAX_CHARACTERS else [digest_columns(columns)]


def describe_other_columns(
    columns: Sequence[str], expected_columns: Sequence[str], *, names_expected: bool
) -> str:
    """Describe the differences between a client's input names and those of the others, and what to do; "" if there are none.

    Args:
        columns: names of the client's inputs, or only their digest.
        expected_columns: names of the other clients' inputs, or only their digest.
        names_expected: whether to name the others' inputs, which the client must not know.
    """
    if tuple(columns) == tuple(expected_columns):
        return ""
    are_names = not any(c.startswith(_DIGEST_PREFIX) for c in (*columns[:1], *expected_columns[:1]))
    difference_text = ""
    if are_names:
        differences = [
            (i, a, b) for i, (a, b) in enumerate(zip_longest(columns, expected_columns), 1) if a != b
        ]
        descriptions = [
            f"input {i} is {_quote_name(a)}" + (f" and theirs {_quote_name(b)}" if names_expected else "")
            for i, a, b in differences[:_MAX_NAMES]
        ]
        hidden_count = len(differences) - _MAX_NAMES
        difference_text = (
            f" ({', '.join(descriptions)}{f' and {hidden_count} more' if hidden_count > 0 else ''})"
        )
    return (
        f"has other columns than the other clients, or the same in another order{difference_text}. List the columns in "
        "data.features of the experiment, so that their order is the same everywhere. A column of text becomes an "
        "input for each value that occurs in the file (column=value), so it must have the same values at every "
        "site: encode such a column as numbers beforehand"
    )


def _quote_name(name: str | None) -> str:
    return "missing" if name is None else json.dumps(name[:60])
