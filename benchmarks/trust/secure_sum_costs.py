"""Bytes and processor time of secure sums beside plain rounds, for 3, 10 and 20 clients and two models.

    python benchmarks/trust/secure_sum_costs.py [--repetitions 3] [--out docs/results/secure-sums.md]

All clients and the server are in one process and answer each other's messages, headers and payloads as over a network; nothing
is sent, so no time of a network is in the numbers. Processor time is taken around each message of a client, and around the
round without the clients. Both arms train the same model on the same examples; they alternate, the first round of each run is
left out. Keys are of the kind of a deployment. The text of the page above the table stays as it is: read it again beside new
numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.deploy.keys import ClientKeys, make_keys
from fedlowrank.network.drive import drive
from fedlowrank.network.enrollment.key_request import load_client_key
from fedlowrank.network.enrollment.roster import ROSTER_FILE, KeyRoster
from fedlowrank.network.messages import Order
from fedlowrank.network.secure.signing import MemberKeys, MemberSigner
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.network.transport import NodeMessage, Response

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.result_pages import replace_tables

HIDDEN = {"10^4": 1250, "10^6": 125_000}
"""Width of the hidden layer by the name of a model: eight numbers for each unit, and three."""


@dataclass
class Cost:
    """What a round costs.

    Attributes:
        up: bytes that a client sends: headers and payloads, the mean over the clients.
        down: bytes that it is sent.
        client: its seconds of processor time, training included.
        server: seconds of the server's.
    """

    up: float = 0.0
    down: float = 0.0
    client: float = 0.0
    server: float = 0.0


@dataclass
class CountingTransport:
    """Hands messages to clients in this process, and counts by round.

    Attributes:
        clients: by node.
        rounds: cost of each round, summed over the clients; the server's time is that of the process.
    """

    clients: dict[int, ClientRuntime]
    rounds: dict[int, Cost] = field(default_factory=lambda: defaultdict(Cost))
    waiting: list[Response] = field(default_factory=list)

    def nodes(self) -> set[int]:
        """See :class:`fedlowrank.network.transport.Transport`."""
        return set(self.clients)

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        """Let the clients answer at once."""
        del group, seconds
        for m in messages:
            begin = time.process_time()
            header, payload = self.clients[m.node].reply(m.kind, m.header, m.payload, m.signature)
            spent = time.process_time() - begin
            self.waiting.append(Response(m.node, m.kind, header, payload))
            if m.kind == "order":
                cost = self.rounds[Order.from_json(m.header).round]
                cost.client += spent
                cost.up += len(header.encode()) + len(payload)
                cost.down += len(m.header.encode()) + len(m.payload)

    def receive(self) -> list[Response]:
        """The answers since the last call."""
        found, self.waiting = self.waiting, []
        return found

    def cancel_orders(self) -> None:
        """Nothing is under way."""


def experiment(clients: int, hidden: int, secure: bool, rounds: int) -> ExperimentConfig:
    """Iris for so many clients; one pass a round."""
    return ExperimentConfig.parse({
        "name": "secure", "method": "fedavg", "data": {"source": "iris", "normalize": "standard"},
        "partition": {"kind": "iid", "clients": clients}, "model": {"names": ["mlp"], "hidden": [hidden]},
        "defaults": {"epochs": 1, "batch_size": 32},
        "run": {"rounds": rounds, "representations": 0, "evaluate_every": 1000, "threads": 1,
                **({"secure": {"on": True}} if secure else {})},
    })  # fmt: skip


def trial(clients: int, hidden: int, secure: bool, rounds: int) -> list[Cost]:
    """The cost of each round of a run but the first, by client."""
    made = experiment(clients, hidden, secure, rounds)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        make_keys(base / "keys", clients, [])
        roster = KeyRoster.read(base / "keys" / "server" / ROSTER_FILE, base / "keys" / "server" / "ca.crt")
        names = {str(c): entry.key for c, entry in roster.clients.items()}
        site = dataclasses.replace(SiteSettings(), roster=names)
        shares, runtimes = made.shares(), {}
        for client in range(clients):
            prepare(base / str(client), made, client, shares, site, sketch=())
            runtimes[100 + client] = runtime = ClientRuntime(base / str(client))
            own = ClientKeys.read(base / "keys" / f"client-{client}")
            runtime.signer = MemberSigner(load_client_key(own.key))
        transport = CountingTransport(runtimes)
        begun: list[float] = []

        class Timed(dict[int, Cost]):
            """Notes the processor time at the first message of each round."""

            def __missing__(self, t: int) -> Cost:
                begun.append(time.process_time())
                return self.setdefault(t, Cost())

        transport.rounds = Timed()
        result = drive(
            transport,
            made,
            base / "run",
            member_keys=MemberKeys.of(roster) if secure else None,
            at_site=False,
        )
        assert not any(record.lost for record in result.rounds)
    costs = []
    for t in range(1, rounds):
        cost = transport.rounds[t]
        whole = begun[t + 1] - begun[t]
        costs.append(Cost(cost.up / clients, cost.down / clients, cost.client / clients, whole - cost.client))
    return costs


def spread(values: Sequence[float], unit: str) -> str:
    """Median and range."""
    if unit == "bytes":
        return f"{median(values):,.0f}"
    low, high = min(values), max(values)
    return f"{1000 * median(values):,.1f} ({1000 * low:,.1f} to {1000 * high:,.1f})"


def main() -> None:
    """Run all, and print the table or write it on the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="3,10,20")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = []
    for name, hidden in HIDDEN.items():
        for clients in map(int, args.clients.split(",")):
            found: dict[bool, list[Cost]] = {False: [], True: []}
            for repetition in range(args.repetitions):
                for secure in (False, True) if repetition % 2 == 0 else (True, False):
                    found[secure] += trial(clients, hidden, secure, args.rounds)
            for secure, costs in found.items():
                cells = [
                    spread([c.up for c in costs], "bytes"), spread([c.down for c in costs], "bytes"),
                    spread([c.client for c in costs], "ms"), spread([c.server for c in costs], "ms"),
                ]  # fmt: skip
                kind = "secure" if secure else "plain"
                rows.append(f"| {name} | {clients} | {kind} | " + " | ".join(cells) + " |")
                print(rows[-1], flush=True)
    settings = f"Repetitions: {args.repetitions}; counted rounds of each: {args.rounds - 1}; torch {torch.__version__}."
    tables = "\n".join([TABLE, *rows, "", settings, ""])
    if args.out:
        replace_tables(args.out, TITLE, TABLE.splitlines()[0], tables)
    else:
        print(tables)


TITLE = "Secure sums: bytes and processor time"

TABLE = """| numbers | clients | rounds | bytes up, a client | bytes down, a client | ms at a client | ms at the server |
| ---: | ---: | :--- | ---: | ---: | ---: | ---: |"""

if __name__ == "__main__":
    main()
