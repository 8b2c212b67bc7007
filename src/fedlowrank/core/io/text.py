"""Text for and from people: the encoding of files, names on one line, and lists and counts in sentences."""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks of other encodings; those of UTF-32 come first, because one of them begins with a mark of UTF-16."""


def decode_text(data: bytes) -> str:
    """Decode the content of a text file in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: if the content is in another encoding or no text; the message names the line and says what to do.
    """
    for mark, name in _OTHER_MARKS.items():
        if data.startswith(mark):
            raise ValueError(f"it is encoded in {name}. Save it in UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
        raise ValueError(
            f"line {line} holds the byte 0x{byte:02x}, which is not UTF-8 ({chr(byte)!r} in Latin-1). Save "
            "the file in UTF-8"
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"line {line} holds a zero byte, so it is no text in UTF-8. Save the file in UTF-8")
    return text


def explain_encoding(path: Path) -> str:
    """Say why a file, which may be compressed by gzip, is no text in UTF-8; empty if it is."""
    data = path.read_bytes()
    try:
        decode_text(gzip.decompress(data) if path.suffix == ".gz" else data)
    except ValueError as error:
        return str(error)
    return ""


def on_one_line(text: object, limit: int = 0) -> str:
    """Format a name as one line without control characters, cut to ``limit`` characters if that is not 0."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line[: limit - 1].rstrip() + "…" if limit and len(line) > limit else line


def join_words(words: Sequence[str], conjunction: str = "and") -> str:
    """Join words as a list in a sentence, such as ``a, b and c``."""
    return f" {conjunction} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def list_first(names: Collection[object], limit: int, noun: str = "") -> str:
    """List the first names and count the others, such as ``a, b and 3 more``, with a plural noun ``and 3 more files``."""
    hidden_count = len(names) - limit
    ending = f" and {hidden_count} more{noun and f' {noun}'}" if hidden_count > 0 else ""
    return ", ".join(map(str, islice(names, limit))) + ending


def format_count(n: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun, such as ``1 client`` and ``3 classes``."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"
