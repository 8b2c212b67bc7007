"""The audit log of a site: one line of JSON for everything that leaves it, and for what it refuses.

FOLDER/audit.jsonl is only appended to. Every line has ``time`` (UTC) and ``event``:

- ``left``: kind (registration, order or error), bytes (header and payload), digest (BLAKE2b of the payload, 16
  bytes, as in the server's audit log), header (all that was sent beside the payload). The line is on the disk
  before the reply is sent.
- ``refused``: kind, why. Of an order whose evaluation alone is refused, kind is ``evaluation``
- ``policy``: digest and text of the policy to which the experiment keeps, at each ``join``
- ``incident``: number, error (class), text. Only the class and the number leave the site, unless
  ``join --send-errors`` was typed.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError
from ...core.io.atomic_files import append_event
from ...storage.digest import digest_of
from ..messages import to_one_line
from .site_settings import SiteSettings

AUDIT_FILE = "audit.jsonl"
"""Name of the file in a client's folder."""

MAX_LOG_BYTES = 64 << 20
"""Size of the file beyond which nothing leaves any more: a server cannot fill the site's disk by it."""


@dataclass(frozen=True)
class SiteAudit:
    """Appends events to the audit log of a site.

    Attributes:
        path: of the file.
    """

    path: Path

    def log_reply(self, kind: str, header: str, payload: bytes) -> None:
        """Log a reply that is about to be sent.

        Args:
            kind: of the message that it answers, or ``error``.
            header: of the reply.
            payload: of the reply.

        Raises:
            CheckpointError: if the line cannot be written; the reply must not be sent then.
        """
        size, digest = len(header.encode()) + len(payload), digest_of(payload) if payload else ""
        self._append("left", kind=kind, bytes=size, digest=digest, header=header)

    def log_policy(self, digest: str, text: str) -> None:
        """Log the policy that the experiment was compared with; raises CheckpointError if it cannot be written."""
        self._append("policy", digest=digest, text=text)

    def log_refusal(self, kind: str, reason: str) -> None:
        """Log a message that is not answered; a disk that is full is ignored, for nothing leaves."""
        with contextlib.suppress(CheckpointError):
            self._append("refused", kind=kind, why=to_one_line(reason, 1000))

    def log_incident(self, error: BaseException) -> str:
        """Log an error under a number, which repetitions of the error have, too; returns the number.

        A disk that is full is ignored: the error is often about it, and the log of the node has the text, too.
        """
        name, text = type(error).__name__, to_one_line(str(error), 2000)
        number = _draw_number(self.path, name, text)
        with contextlib.suppress(CheckpointError):
            self._append("incident", number=number, error=name, text=text)
        return number

    def _append(self, event: str, **fields: Any) -> None:
        if self.path.exists() and self.path.stat().st_size > MAX_LOG_BYTES:
            raise CheckpointError(
                f"{self.path} has more than {MAX_LOG_BYTES >> 20} MiB, and nothing leaves without a line in it. "
                "Move the file to a place of yours; a new one begins."
            )
        append_event(self.path, event, **fields)


@functools.lru_cache(maxsize=1000)
def _draw_number(path: Path, name: str, text: str) -> str:
    """The number of an incident. It is drawn, for a digest would let the server guess the text."""
    del path, name, text
    return secrets.token_hex(4)


def explain_error(error: BaseException, audit: SiteAudit, site: SiteSettings) -> str:
    """What the server learns of an error: its class and the number of its incident, or its text.

    Args:
        error: of a client.
        audit: gets its text.
        site: says whether texts of errors may leave.
    """
    number, name = audit.log_incident(error), type(error).__name__
    text = f"{name}: {error}" if site.send_errors else f"{name}, incident {number} in the site's audit log"
    return to_one_line(text)
