"""Uploads of a round on disk, so that the server's memory does not grow with the number of clients."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.io.atomic_files import as_checkpoint_error
from ..validation.upload_forms import Template, decode_upload


class Spool:
    """Stores the validated uploads of a round in a temporary folder, which is removed with this object."""

    def __init__(self) -> None:
        self._templates: dict[int, Template] = {}

    @cached_property
    def _folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="fedlowrank-uploads-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def put(self, client_id: int, payload: bytes, template: Template) -> None:
        """Store an upload as it was received; raises CheckpointError if the disk is full."""
        with as_checkpoint_error("cannot keep an upload in the temporary folder (TMPDIR)"):
            (self._folder / str(client_id)).write_bytes(payload)
        self._templates[client_id] = template

    def get(self, client_id: int) -> Any:
        """Decode the upload of a client; raises KeyError if there is none."""
        template = self._templates[client_id]
        return decode_upload((self._folder / str(client_id)).read_bytes(), template)

    def clear(self) -> None:
        """Remove all uploads."""
        for client_id in self._templates:
            (self._folder / str(client_id)).unlink(missing_ok=True)
        self._templates.clear()
