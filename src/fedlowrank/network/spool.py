"""Uploads of a round on disk, so that the server's memory does not grow with the number of clients."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from ..core import tree
from ..core.files import as_checkpoint_error


class Spool:
    """Stores the inspected uploads of a round in a temporary folder, which is removed with this object."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def put(self, client: int, upload: Any) -> None:
        """Store an upload; raises CheckpointError if the disk is full."""
        with as_checkpoint_error("cannot keep an upload in the temporary folder (TMPDIR)"):
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="fedlowrank-uploads-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            (self._folder / str(client)).write_bytes(tree.encode(upload))

    def get(self, client: int) -> Any:
        """Read the upload of a client; raises KeyError if there is none."""
        path = None if self._folder is None else self._folder / str(client)
        if path is None or not path.exists():
            raise KeyError(client)
        return tree.decode(path.read_bytes())

    def clear(self) -> None:
        """Remove all uploads."""
        for path in self._folder.iterdir() if self._folder is not None else ():
            path.unlink()
