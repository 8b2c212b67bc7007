"""Uploads exported models to the Hugging Face Hub, through the package ``huggingface_hub``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DataError
from ..optional_packages import import_library
from .export_settings import is_repository

LOG_IN = "Log in by `hf auth login`, or set the environment variable HF_TOKEN to a token that may write."


def check_upload(repository: str) -> None:
    """Check that an upload is possible, before anything is written.

    Args:
        repository: name of the repository, OWNER/NAME.

    Raises:
        ConfigError: if this cannot be the name of a repository.
        DataError: if ``huggingface_hub`` is missing, is set to stay offline, or nobody is logged in.
    """
    if not is_repository(repository):
        raise ConfigError(
            f"{repository!r} is no repository on the Hugging Face Hub; type OWNER/NAME, such as me/my-adapter"
        )
    hub: Any = import_library("huggingface_hub", "an upload to the Hugging Face Hub")
    if hub.constants.HF_HUB_OFFLINE:
        raise DataError(
            f"cannot upload to {repository}: HF_HUB_OFFLINE is set, so huggingface_hub stays offline. Unset it."
        )
    if hub.get_token() is None:
        raise DataError(
            f"cannot upload to {repository}: nobody is logged in to the Hugging Face Hub. {LOG_IN}"
        )


def upload_model(folder: Path, repository: str, message: str) -> str:
    """Upload a folder to a private model repository; a missing repository is created.

    Args:
        folder: folder of an adapter or a whole model; its files go to the root of the repository.
        repository: name of the repository, OWNER/NAME.
        message: commit message.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: if ``repository`` cannot be the name of a repository, see :func:`check_upload`, or is public.
        DataError: if an upload is not possible, see :func:`check_upload`, or if the Hub cannot be reached or
            refuses the upload.
    """
    check_upload(repository)
    hub: Any = import_library("huggingface_hub", "an upload to the Hugging Face Hub")
    api = hub.HfApi()
    # huggingface_hub raises OSError and errors of its HTTP client, ValueError for invalid metadata, and RuntimeError for
    # a file that cannot be uploaded
    error_types = (OSError, ValueError, RuntimeError, getattr(hub.errors, "HTTPError", OSError))
    try:
        # a repository that exists keeps its visibility
        address = api.create_repo(repository, private=True, exist_ok=True)
        repository_id = str(getattr(address, "repo_id", repository))
        if not api.repo_info(repository_id).private:
            raise ConfigError(
                f"{repository_id} is a public repository, so the upload would publish the model. Name a private one or one that "
                f"does not exist. To publish it, type `hf upload {repository_id} {shlex.quote(str(folder))}`."
            )
        api.upload_folder(repo_id=repository_id, folder_path=folder, commit_message=message)
    except error_types as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = "Check the connection, and HF_ENDPOINT if it is set, and try again."
        if status in (401, 403):
            advice = f"The token may not write there. {LOG_IN}"
        elif status is not None or isinstance(error, ValueError):
            advice = f"The Hub refused it. The folder {folder} is complete and can be uploaded later."
        reason = f"{error}" if error.__cause__ is None else f"{error} ({error.__cause__})"
        raise DataError(
            f"cannot upload to {repository} at {api.endpoint}: {reason.rstrip('.')}. {advice}"
        ) from error
    return str(address)
