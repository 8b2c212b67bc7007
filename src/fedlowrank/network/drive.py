"""A whole run on a server whose clients are reached by messages, from the first introduction to the last acknowledgement."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.experiment import ExperimentConfig
from ..core.errors import ConfigError
from ..core.files import as_checkpoint_error
from ..engines.base import client_view
from ..engines.sequential import Sequential
from ..simulation.records import RoundRecord
from ..simulation.run_folder import RunFolder
from ..simulation.simulate import Result, described, rounds, threads
from .account import Account, new_run_id
from .audit import Audit
from .network_run import NetworkRun
from .registry import Roster
from .server import NetworkError, Remote, Say
from .silence import Silence
from .transport import Transport
from .validation.norms import NormBound
from .validation.uploads import Bans


def clients_of(made: ExperimentConfig) -> int:
    """How many clients an experiment has.

    Raises:
        ConfigError: if it does not say so.
    """
    count = made.network.clients or getattr(made.partition, "clients", None)
    if count is None:
        raise ConfigError("how many clients there are depends on the data; set network.clients")
    return int(count)


def drive(
    transport: Transport,
    made: ExperimentConfig,
    out: Path,
    *,
    say: Say,
    resume: bool = False,
    keys: Mapping[int, int] | None = None,
    progress: bool = False,
    config: Mapping[str, Any] | None = None,
    promised: Sequence[int] = (),
    audit: Path | None = None,
) -> Result:
    """Run an experiment's method.

    Args:
        transport: carries the messages.
        made: the experiment; its section ``network`` says how to deal with clients.
        out: run folder.
        say: tells a person what is worth knowing.
        resume: go on from the folder's last checkpoint.
        keys: which client a node belongs to, where nodes are known by their keys.
        progress: show a progress bar.
        config: what ``run.json`` says besides; by default what the experiment says of its method.
        promised: training examples that each client has, where that is known; else ``network.examples``.
        audit: file of the audit log, or None for none.

    Raises:
        NetworkError: if too few clients come or reply.
        FedlowrankError: if something does not fit.
    """
    name, settings = made.default_method, made.network
    method, count = made.build_method(name), clients_of(made)
    # run.json keeps the experiment's engine, with which `fedlowrank resume` compares
    protocol = dataclasses.replace(made.run, checkpoint_every=1, representations=0, adapters=())
    promised = promised or settings.examples
    if promised and len(promised) != count:
        raise ConfigError(
            f"network.examples promises the examples of {len(promised)} clients, but there are {count}"
        )
    account = Account.read(out) if resume else Account(new_run_id())
    limits = settings.limits
    roster = Roster(made, count, limits.max_examples, keys, limits.examples_ratio, promised)
    roster.remember(account.clients)
    bans = Bans.from_json(limits.ban_after, account.refused)
    engine = Remote(
        transport=transport, roster=roster, settings=settings, run_id=account.run, bans=bans, say=say,
        bound=NormBound.from_json(limits.update_ratio, account.updates),
        silence=Silence.from_json(settings.silent_after, account.silent),
        excluded={int(i): f"the run went on without it after round {t}" for i, t in account.excluded.items()},
        branch=account.branch, refusals=account.refusals, audit=Audit(audit),
    )  # fmt: skip
    _gather(engine, settings.enough(count - len(engine.excluded)))
    with threads(made.run.threads), contextlib.ExitStack() as stack:
        run = NetworkRun(method, roster.federation(), protocol, engine)
        description = described(run, made.describe(name) if config is None else config)
        folder = stack.enter_context(RunFolder(out, description, run.clients()))
        records: list[RoundRecord] = []
        if resume:
            records = folder.restore(run)
        else:
            folder.create(force=False)

        def write_account() -> None:
            account.clients = {str(client): row for client, row in roster.rows().items()}
            account.refused, account.silent = bans.to_json(), engine.silence.to_json()
            account.updates, account.refusals = engine.bound.to_json(), engine.refusals
            # not in run.json, for other settings of the network do not make another run
            account.settings = dataclasses.asdict(settings)
            account.write(out)

        def keep(record: RoundRecord) -> None:
            write_account()
            for client, why in record.lost.items():
                say(f"round {record.round}: client {client} was left out: {why}")
            if not progress and record.round:
                replies = len(record.participants) - len(record.lost)
                say(
                    f"round {record.round} of {protocol.rounds}: {replies} replies, {record.seconds['train']:.1f} s"
                )

        write_account()
        result = rounds(run, folder, records, progress, keep)
        _write_model(run, out)
    return result


def _gather(engine: Remote, enough: int) -> None:
    roster, transport = engine.roster, engine.transport
    engine.say(f"waiting for {enough} of {roster.clients} clients")

    def here_of(present: set[int]) -> list[int]:
        return [i for i in roster.usual(present) if i not in engine.excluded]

    engine.meet(engine.settings.wait, lambda: len(here_of(transport.nodes())) >= enough)
    here = here_of(present := transport.nodes())
    roster.settle(present)
    if len(here) < enough:
        missing = ", ".join(str(i) for i in range(roster.clients) if i not in {*here, *engine.excluded})
        turned = "".join(f"\nturned away: {why}" for why in roster.strangers.values())
        raise NetworkError(
            f"only {len(here)} of {enough} clients came within {engine.settings.wait:g} s; missing: {missing}. Start them, or "
            f"lower network.min_clients.{turned}"
        )


def _write_model(run: NetworkRun, out: Path) -> None:
    """The server's own model: parameters, or an adapter folder where it is a language model."""
    companion = run.federation.companion
    if companion is None:
        return
    info = run.federation.infos[0]
    task, t = run.task, max(run.round - 1, 0)
    view = client_view(
        run.federation, task, t, info, Sequential().trainer(run.method, run.federation, t, info)
    )
    state = run.method.client_init(task, info)
    params = run.method.server_model(run.state.server, state, view)
    if params is None:
        params = run.method.client_model(state, run.method.download(run.state.server, info), view).whole()
    folder = out / "adapters" / f"round-{run.round:04d}"
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    companion.write_one(folder / "server", params, run.round, None)
