"""Digests of the files of a base model, with which two machines check that they have the same one.

The digests do not depend on where the files lie, nor on the dtype or quantization of the weights in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import DataError
from ..core.io.text import list_first
from .digest import digest_of

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights in the order in which transformers looks for them; an index names further files."""

_VOCABULARY = (
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Files that define a tokenizer if there is no tokenizer.json."""

_TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files that change the tokens in addition to the vocabulary."""

_SHOWN = 5
"""Largest number of files that a message names."""


def find_base_files(folder: Path) -> list[str]:
    """Names of the files of a model folder that its weights, layers and tokens depend on, sorted.

    If the weights lie there in several formats, only the files that transformers loads are named. Files such as
    ``README.md`` and ``generation_config.json`` are left out.

    Args:
        folder: folder of the model, as ``save_pretrained`` writes it.

    Raises:
        DataError: if the index of weights in several files cannot be read.
    """
    names = {name for name in ("config.json", *_TOKENIZER) if (folder / name).is_file()}
    if (folder / "tokenizer.json").is_file():
        names.add("tokenizer.json")
    else:
        names |= {name for name in _VOCABULARY if (folder / name).is_file()}
    weights = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is not None:
        names.add(weights)
        if weights.endswith(".index.json"):
            names |= _shards(folder / weights)
    return sorted(names)


def digest_base_files(folder: Path) -> dict[str, str]:
    """Digest of each file of :func:`find_base_files`, BLAKE2b of 16 bytes, read in pieces.

    Args:
        folder: folder of the model, as ``save_pretrained`` writes it.

    Raises:
        DataError: if a file cannot be read.
    """
    digests = {}
    for name in find_base_files(folder):
        try:
            with (folder / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise DataError(f"the file {name} of the base model cannot be read: {error}") from error
    return digests


def combine_file_digests(files: Mapping[str, str]) -> str:
    """Combine the digests of all files of a base into one; ``""`` if there are none.

    Args:
        files: digest of each file by name, from :func:`digest_base_files`.
    """
    return digest_of(json.dumps(files, sort_keys=True).encode()) if files else ""


def compare_base_files(digests: Mapping[str, str], expected_digests: Mapping[str, str]) -> str:
    """List the files in which two bases differ, for a message; ``""`` if they are the same.

    Args:
        digests: digests from :func:`digest_base_files`; may come from another machine.
        expected_digests: digests with which they are compared.
    """
    differences = []
    for name in sorted({*digests, *expected_digests}):
        if digests.get(name) == expected_digests.get(name):
            continue
        printable_name = name if len(name) < 100 and name.isprintable() else "a file with an invalid name"
        difference = (
            "is missing"
            if name not in digests
            else "is not expected"
            if name not in expected_digests
            else "differs"
        )
        differences.append(f"{printable_name} {difference}")
    return list_first(differences, _SHOWN, "files")


def _shards(index: Path) -> set[str]:
    """The files that an index of weights names."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is no index of weights: {error!r}") from error
