"""``fedlowrank serve``, which refuses to be the second one before it imports what takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..network.deploy.in_use import refuse_second


def serve(*, out: Path | None, host: str, port: int, **options: Any) -> int:
    """See :func:`.network.serve`, which has the same arguments.

    Raises:
        FedlowrankError: if the folder or the port is in use, or for the reasons of ``network.serve``.
    """
    refuse_second(out, host, port)
    from .network import serve as begin

    return begin(out=out, host=host, port=port, **options)
