"""The audit log of a site: one line of JSON for everything that leaves it, and for everything that it refuses.

FOLDER/audit.jsonl is only appended to. Every line has ``time`` (UTC) and ``event``:

- ``left``: kind (registration, order or error), bytes (header and payload), digest (BLAKE2b of the payload, 16
  bytes, as in the server's audit log), header (everything that was sent beside the payload). The line is on disk
  before the reply is sent.
- ``refused``: kind, why; the kind is ``evaluation`` if only the evaluation of an order is refused
- ``policy``: digest and text of the policy that the experiment satisfies, at each ``join``
- ``incident``: number, error (class), text. Only the class and the number leave the site, unless
  ``join --send-errors`` was given.
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
"""Size of the file in bytes beyond which nothing leaves the site, so that a server cannot fill its disk."""


@dataclass(frozen=True)
class SiteAudit:
    """Appends events to the audit log of a site.

    Attributes:
        path: path of the file.
    """

    path: Path

    def log_reply(self, kind: str, header: str, payload: bytes) -> None:
        """Log a reply that is about to be sent.

        Args:
            kind: kind of the message that it answers, or ``error``.
            header: header of the reply.
            payload: payload of the reply.

        Raises:
            CheckpointError: if the line cannot be written; the reply must not be sent then.
        """
        size, digest = len(header.encode()) + len(payload), digest_of(payload) if payload else ""
        self._append("left", kind=kind, bytes=size, digest=digest, header=header)

    def log_policy(self, digest: str, text: str) -> None:
        """Log the policy with which the experiment was compared; raises CheckpointError if it cannot be written."""
        self._append("policy", digest=digest, text=text)

    def log_refusal(self, kind: str, reason: str) -> None:
        """Log a message that is not answered; a full disk is ignored, because nothing leaves the site."""
        with contextlib.suppress(CheckpointError):
            self._append("refused", kind=kind, why=to_one_line(reason, 1000))

    def log_incident(self, error: BaseException) -> str:
        """Log an error under a number, the same for repetitions of the error; returns the number.

        A full disk is ignored: the error is often about it, and the node's log also has the text.
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
    """Draw the number of an incident. It is random, because the server could guess the text from a digest."""
    del path, name, text
    return secrets.token_hex(4)


def explain_error(error: BaseException, audit: SiteAudit, site: SiteSettings) -> str:
    """Describe an error for the server: its class and the number of its incident, or its text.

    Args:
        error: error of a client.
        audit: audit log that stores the text.
        site: settings of the site, which say whether error texts may leave.
    """
    number, name = audit.log_incident(error), type(error).__name__
    text = f"{name}: {error}" if site.send_errors else f"{name}, incident {number} in the site's audit log"
    return to_one_line(text)
