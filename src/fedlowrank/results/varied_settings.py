"""Names of the settings that differ between the runs of a comparison, for labels and headings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def name_varied(keys: Sequence[str], method: str = "") -> tuple[str, ...]:
    """Name varied settings: a setting of another method with that method, such as ``standalone.epochs``.

    Args:
        keys: names of the settings, such as ``methods.standalone.epochs``.
        method: name of the method whose runs are described; empty for those of several methods.
    """
    own_keys = [key for key in keys if (owner := owner_of(key)) is None or owner == method]
    names = dict(zip(own_keys, shorten_names(own_keys), strict=True))
    return tuple(names.get(key, key.removeprefix("methods.")) for key in keys)


def owner_of(key: str) -> str | None:
    """Get the method of which a varied field is a setting; None for a field of all methods."""
    match = re.match(r"methods\.(?:\"(.*?)\"|'(.*?)'|([^.]*))\.", key)
    return None if match is None else next(name for name in match.groups() if name is not None)


def shorten_names(keys: Sequence[str]) -> tuple[str, ...]:
    """Shorten settings' names to their last parts, with as many parts before them as are needed to distinguish them."""
    split_keys = [key.split(".") for key in keys]
    shortest = [last_part(key).count(".") + 1 for key in keys]
    for length in range(1, max(map(len, split_keys), default=1) + 1):
        short_names = [
            ".".join(parts[-max(length, count) :]) for parts, count in zip(split_keys, shortest, strict=True)
        ]
        if max(Counter(short_names).values(), default=1) == 1:
            return tuple(short_names)
    return tuple(keys)


def last_part(key: str) -> str:
    """Get the name of a setting without its section, unless every section may have one of that name."""
    section, _, name = key.rpartition(".")
    return f"{section.rpartition('.')[2]}.{name}" if name in ("kind", "seed", "target") else name
