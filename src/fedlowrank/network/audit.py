"""The server's audit log: one line of JSON for every registration, rejection and reply.

RUN.audit.jsonl, beside the run folder, is only appended to, also by ``serve --resume``. Every line has
``time`` (UTC) and ``event``:

- ``registered``: client, node, examples
- ``rejected``: node, why
- ``reply``: client, round (from 1), bytes, digest (BLAKE2b of the upload, 16 bytes), accepted, why
- ``refused``: client, round, why; also of a reply that was accepted at first, but whose norm is an outlier
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.files import as_checkpoint_error
from .messages import plain
from .transport import Response


@dataclass(frozen=True)
class Audit:
    """Appends events to a file.

    Attributes:
        path: of the file, or None to keep no log.
    """

    path: Path | None = None

    def registered(self, client: int, node: int, examples: int) -> None:
        """Log the registration of a client."""
        self._append("registered", client=client, node=node, examples=examples)

    def rejected(self, node: int, why: str) -> None:
        """Log the rejection of a node."""
        self._append("rejected", node=node, why=plain(why, 1000))

    def reply(self, response: Response, client: int, round: int, why: str | None) -> None:
        """Log a reply, with the reason if it was not used; ``round`` counts completed rounds."""
        size = len(response.header) + len(response.payload)
        digest = hashlib.blake2b(response.payload, digest_size=16).hexdigest() if response.payload else ""
        found: dict[str, Any] = {"client": client, "round": round + 1, "bytes": size, "digest": digest}
        self._append("reply", **found, accepted=why is None, why=plain(why or "", 1000))

    def refused(self, client: int, round: int, why: str) -> None:
        """Log that a reply is not used; ``round`` counts completed rounds."""
        self._append("refused", client=client, round=round + 1, why=plain(why, 1000))

    def _append(self, event: str, **fields: Any) -> None:
        if self.path is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **fields})
        with as_checkpoint_error(f"cannot write {self.path}"), self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
