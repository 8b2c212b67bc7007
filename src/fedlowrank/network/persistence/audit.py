"""The server's audit log: one line of JSON for every registration, rejection and reply.

RUN.audit.jsonl, beside the run folder, is only appended to, also by ``serve --resume``. Every line has
``time`` (UTC) and ``event``:

- ``registered``: client, examples
- ``rejected``: client (of the key, or as it had registered; null if neither is known), why
- ``reply``: client, round (from 1), bytes, digest (BLAKE2b of the upload, 16 bytes), accepted, why
- ``denied``: client, call, why; a call of a registered client that the server's process refused, such as a
  message in the name of another client; equal ones are logged at most once a minute
- ``shortened``: client, round, length (in usual norms), kept (the share of its length that is used)
- ``paused``: round, why
- ``refused``: client, round, why; includes replies that were accepted at first, but whose norm is an outlier
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.io.atomic_files import append_event
from ..messages import to_one_line
from ..transport import Response


@dataclass(frozen=True)
class Audit:
    """Appends events to a file.

    Attributes:
        path: path of the file, or None to keep no log.
    """

    path: Path | None = None

    def log_registration(self, client_id: int, example_count: int) -> None:
        """Log the registration of a client."""
        append_event(self.path, "registered", client=client_id, examples=example_count)

    def log_rejection(self, client_id: int | None, reason: str) -> None:
        """Log the rejection of a node, with its client if that is known."""
        append_event(self.path, "rejected", client=client_id, why=to_one_line(reason, 1000))

    def log_reply(self, response: Response, client_id: int, round: int, reason: str | None) -> None:
        """Log a reply, with the reason if it was not used; ``round`` counts completed rounds."""
        size = len(response.header) + len(response.payload)
        digest = hashlib.blake2b(response.payload, digest_size=16).hexdigest() if response.payload else ""
        fields: dict[str, Any] = {"client": client_id, "round": round + 1, "bytes": size, "digest": digest}
        append_event(
            self.path, "reply", **fields, accepted=reason is None, why=to_one_line(reason or "", 1000)
        )

    def log_refusal(self, client_id: int, round: int, reason: str) -> None:
        """Log that a reply is not used; ``round`` counts completed rounds."""
        append_event(self.path, "refused", client=client_id, round=round + 1, why=to_one_line(reason, 1000))

    def log_shortening(self, client_id: int, round: int, length: float, kept_share: float) -> None:
        """Log that an update is shortened; ``round`` counts completed rounds."""
        append_event(
            self.path,
            "shortened",
            client=client_id,
            round=round + 1,
            length=round_digits(length),
            kept=round_digits(kept_share),
        )

    def log_pause(self, round: int, reason: str) -> None:
        """Log that the run pauses after ``round`` completed rounds."""
        append_event(self.path, "paused", round=round, why=to_one_line(reason, 2000))


def round_digits(number: float) -> float:
    """Round a number to four significant digits."""
    return float(f"{number:.4g}")
