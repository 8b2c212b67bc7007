"""Clients of secure sums, whose processes live on between messages, and their runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedlowrank.core import tree
from fedlowrank.engines.sequential import Sequential
from fedlowrank.network.client import ClientRuntime
from fedlowrank.network.deploy.keys import ClientKeys, make_keys
from fedlowrank.network.enrollment.key_request import load_client_key
from fedlowrank.network.enrollment.roster import ROSTER_FILE, KeyRoster
from fedlowrank.network.secure.signing import MemberKeys, MemberSigner
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage, Response
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.rounds.run import Run
from tests.support.local_network import (
    Fault,
    Killed,
    LocalTransport,
    intact,
    local,
    serve_run,
    small,
)

SECURE_SECTION = {"on": True, "bits": 30, "bound": 8.0}


@dataclass
class SecureSites(LocalTransport):
    """Clients whose processes live on between messages, as nodes do; a process that dies loses its secrets.

    Attributes:
        keys: folder of the federation's keys.
    """

    keys: Path = field(default_factory=Path)
    alive: dict[int, ClientRuntime] = field(default_factory=dict)

    def answered(self, message: NodeMessage) -> Response:
        """See the base class."""
        node = message.node
        if node not in self.alive:
            own = ClientKeys.read(self.keys / f"client-{node - 100}")
            self.alive[node] = runtime = ClientRuntime(self.folders[node])
            runtime.signer = MemberSigner(load_client_key(own.key))
        before, self.running = self.running, node
        try:
            header, payload = self.alive[node].reply(message.kind, message.header, message.payload)
            return Response(node, message.kind, header, payload)
        except Killed as error:
            del self.alive[node]
            return Response(node, message.kind, problem=f"the client's process died: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a client raises, its node says so
            return Response(node, message.kind, problem=f"{type(error).__name__}: {error}")
        finally:
            self.running = before


def make_secure_sites(made: Any, base: Path, fault: Fault = intact) -> tuple[SecureSites, MemberKeys]:
    """Clients with keys, and the public keys of all."""
    clients, keys = made.partition.clients, base / "keys"
    make_keys(keys, clients, [])
    roster = KeyRoster.read(keys / "server" / ROSTER_FILE, keys / "server" / "ca.crt")
    site = dataclasses.replace(
        SiteSettings.simulated(), roster={str(c): entry.key for c, entry in roster.clients.items()}
    )
    carrier = local(made, base, fault, site)
    return SecureSites(carrier.folders, fault, keys=keys), MemberKeys.of(roster)


def run_secure(made: Any, base: Path, fault: Fault = intact, **more: Any) -> tuple[SecureSites, Result]:
    carrier, keys = make_secure_sites(made, base, fault)
    return carrier, serve_run(carrier, made, base / "run", member_keys=keys, **more)


def run_in_clear(made: Any, losses: list[dict[str, str]]) -> Run:
    """The run within one process, without secure sums, in which these replies are lost."""
    open_ = made.overlay({"run": {"secure": {"on": False, "bits": 22, "bound": 8.0}}})
    run = Run(made.build_method(made.default_method), open_.federation(), open_.run, Sequential())
    for lost in losses:
        run.step(lost_replies=lost)
    return run


def is_close(found: Any, wanted: Any, tolerance: float) -> bool:
    pairs = zip(tree.tensors(found), tree.tensors(wanted), strict=True)
    return all(bool(((a - b).abs() <= tolerance * (1 + b.abs())).all()) for a, b in pairs)


def make_secure_experiment(method: str, clients: int = 3, rounds: int = 2, **sections: Any) -> Any:
    run = {"secure": SECURE_SECTION, **sections.pop("run", {})}
    if method == "fedit":
        sections["defaults"] = {"training": {"rank": 2}}
    return small(method, clients, rounds, run=run, **sections)


def read_sent_orders(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [e["header"] for e in lines if e["event"] == "left" and e["kind"] == "order"]


MAX_NORM = 0.1


def make_private_experiment(method: str, noise: float, clients: int = 4, rounds: int = 2, **run: Any) -> Any:
    privacy = {"kind": "central", "noise": noise, "delta": 1e-3, **run.pop("privacy", {})}
    return make_secure_experiment(
        method, clients, rounds, run={"privacy": privacy, "clipping": {"norm": MAX_NORM}, **run}
    )


def flatten_values(state: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(state.inner)])
