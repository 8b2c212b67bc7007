"""Permissions that a site gives the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SiteSettings:
    """Permissions that a site gives the server, whatever the server orders; part of a client's folder.

    Attributes:
        order_key: public key whose signature every message of the server must carry, as hexadecimal digits;
            "" accepts messages without signature.
        evaluation: which evaluations are sent: ``rounded`` as by :func:`.evaluations.coarsen`, ``none``, or
            ``exact``.
        send_errors: whether error texts leave the site. If not, the server gets the class of an error and
            an incident number, under which the site's log has the text.
        runs: number of runs in which this folder may take part, each with a bounded number of evaluations and
            trainings, see :mod:`.allowance`; 0 for any number without bounds.
        max_download: largest size of a download in bytes; 0 for a bound that depends on the model.
        roster: public key of every client in OpenSSH's format, for secure sums.
    """

    order_key: str = ""
    evaluation: Literal["rounded", "none", "exact"] = "rounded"
    send_errors: bool = False
    runs: int = 1
    max_download: int = 0
    roster: dict[str, str] = field(default_factory=dict)

    @classmethod
    def simulated(cls) -> SiteSettings:
        """Settings of a simulated client: server and client belong to one person."""
        return cls(evaluation="exact", send_errors=True, runs=0)
