"""The command ``fedlowrank serve``, which refuses a second server before it imports modules that take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...network.deploy.address_checks import refuse_second


def serve(
    file: Path,
    overrides: Sequence[str],
    method: str | None,
    out: Path | None,
    resume: bool,
    keys: Path | None,
    insecure: bool,
    host: str,
    port: int,
) -> int:
    """See :func:`.network_commands.serve`.

    Raises:
        FedlowrankError: if the folder or the port is in use, or for the reasons of ``network.serve``.
    """
    refuse_second(out, host, port)
    from .network_commands import serve as begin

    return begin(file, overrides, method, out, resume, keys, insecure, host, port)
