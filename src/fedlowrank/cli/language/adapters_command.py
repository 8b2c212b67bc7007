"""The command ``adapters``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ...core.errors import CheckpointError, ConfigError, TaskError
from ...core.io.atomic_files import as_checkpoint_error
from ...language.export.client_models import find_client_model
from ...language.export.export_settings import ExportSettings, is_hub_name
from ...language.export.hub_upload import check_upload, upload_model
from ...language.lora.stored_adapter import METADATA_FILE
from ...results.records import RunRecord
from ...storage.run_folder import RunFolder
from ..language_commands import language_of_run, open_language_run
from ..terminal import OUT

SHOWN = 8
"""Number of layers with the largest truncation errors that are printed for a model."""


def adapters(
    folder: Path,
    out: Path,
    force: bool,
    merged: bool,
    exact: bool,
    rank: int | None,
    no_card: bool,
    base_model: str | None,
    push: str | Literal[True] | None,
    best: bool,
    allow_code: bool,
) -> int:
    """Write adapter folders of a run's last or best checkpoint, and optionally upload the server's."""
    if exact and rank is not None:
        raise ConfigError("--exact truncates nothing, and --rank truncates; leave one of the two out")
    if rank is not None and rank < 1:
        raise ConfigError(f"--rank must be at least 1; it is {rank}")
    is_taken = out.is_dir() and any(out.iterdir())
    if is_taken and not force:
        raise CheckpointError(
            f"{out} exists already and is not empty. Choose another folder with -o, or pass --force to move it aside."
        )
    run = open_language_run(folder, best, allow_code, in_memory=merged or exact)
    language = language_of_run(run)
    option_values = _given_settings(merged, exact, rank, no_card, base_model)
    settings = dataclasses.replace(language.export, **option_values)
    repository = _repository(push, settings, language.loaded.name)
    # a method whose clients infer by mixtures is refused before a folder is moved aside
    find_client_model(run, run.federation.infos[0])
    if is_taken:
        RunFolder.move_aside(out)
    with as_checkpoint_error(f"cannot write {out}"):
        records = RunRecord.load(folder).rounds if settings.card else []
        paths = language.write(run, out, settings, records)
    for path in paths:
        OUT.print(str(path), soft_wrap=True)
        _print_truncation(path)
    OUT.print("Load one by PeftModel.from_pretrained(base, folder); whole models by from_pretrained(folder).")
    if repository is not None:
        name = "server_merged" if settings.merged else "server"
        if out / name not in paths:
            raise TaskError(f"{run.method.title} has no model of the server to upload; {out} is complete")
        message = f"{run.method.title} after {run.round} rounds"
        OUT.print(f"uploaded {out / name} to {upload_model(out / name, repository, message)}", soft_wrap=True)
    return 0


def _given_settings(
    merged: bool, exact: bool, rank: int | None, no_card: bool, base_model: str | None
) -> dict[str, Any]:
    """Settings that options of the command line replace."""
    settings: dict[str, Any] = {}
    if exact:
        settings |= {"form": "exact", "rank": None}
    if rank is not None:
        settings |= {"form": "adapters", "rank": rank}
    settings |= {"merged": True} if merged else {}
    settings |= {"card": False} if no_card else {}
    return settings | ({} if base_model is None else {"base_model": base_model})


def _repository(push: str | Literal[True] | None, settings: ExportSettings, base: str) -> str | None:
    """Repository for the upload of the server's model, checked before anything is written; None for no upload."""
    if push is None:
        return None
    repository = settings.push if push is True else push
    if repository is None:
        raise ConfigError("--push: type a repository, --push OWNER/NAME, or set push in [export]")
    if settings.base_model is None and (Path(base).expanduser().exists() or not is_hub_name(base)):
        raise ConfigError(
            f"--push: the base model is the folder {base!r}, which the readers of {repository} do not have. Name the "
            "model on the Hugging Face Hub that it holds: --base-model OWNER/NAME"
        )
    check_upload(repository)
    return repository


def _print_truncation(path: Path) -> None:
    """Print what an adapter lost by its rank, by layer where it lost something."""
    metadata_path = path / METADATA_FILE
    truncation = (
        json.loads(metadata_path.read_text(encoding="utf-8")).get("truncation")
        if metadata_path.is_file()
        else None
    )
    if truncation is None:
        return
    OUT.print(f"  rank {truncation['rank']}: relative error {truncation['error']:.3g} (Frobenius norm)")
    # smaller errors are float32 rounding
    if truncation["error"] > 1e-6:
        table = Table("layer", "relative error")
        sorted_layers = sorted(truncation["layers"].items(), key=lambda item: -item[1])
        for name, error in sorted_layers[:SHOWN]:
            table.add_row(name, f"{error:.3g}")
        OUT.print(table)
        if len(sorted_layers) > SHOWN:
            OUT.print(f"  and {len(sorted_layers) - SHOWN} more layers in {metadata_path}", soft_wrap=True)
