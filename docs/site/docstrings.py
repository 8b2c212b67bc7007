"""Docstrings as text for Markdown."""

from __future__ import annotations

import re


def remove_roles(text: str) -> str:
    """A text with the names of roles taken away; a name written ``~a.b.c`` or ``.a`` is shown as ``c`` or ``a``."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return f"`{name.rpartition('.')[2] if name.startswith('~') else name.lstrip('.')}`"

    return re.sub(r":[a-z]+:`([^`]+)`", replace, text)
