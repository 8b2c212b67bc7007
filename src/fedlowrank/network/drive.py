"""Runs a method on a server that reaches its clients by messages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.experiment import ExperimentConfig
from ..core.contract import AnyMethod
from ..core.errors import ConfigError, ResumeRefusedError
from ..core.io.atomic_files import as_checkpoint_error, write_atomically
from ..results.records import RoundRecord
from ..rounds.callbacks import settings_callbacks
from ..rounds.config_changes import check_changes
from ..rounds.logs.loggers import check_loggers
from ..rounds.logs.progress import describe_record
from ..rounds.outcome.result import Result
from ..rounds.plan import Plan, rounds_of
from ..rounds.restore import restore_run
from ..rounds.round_loop import run_rounds
from ..rounds.run_settings import RunSettings
from ..rounds.setup.schedules import check_schedules
from ..rounds.simulate import run_description, threads
from ..storage.checkpoint import rounds_kept
from ..storage.digest import digest_of
from ..storage.lock import exclusive
from ..storage.run_files import read_clients, read_config
from ..storage.run_folder import RunFolder
from ..trust.privacy.site_ledger import SiteLedger, SiteRun
from .messages import digest_sections
from .network_run import NetworkRun
from .operation.common_model import find_common_model
from .operation.start_checks import check_network_experiment, check_secure_method, check_secure_start
from .operation.validation_decline import (
    PausedError,
    describe_fall,
    find_fall,
    find_suspects,
    find_worst_shapes,
)
from .persistence.account import Account
from .persistence.audit import Audit
from .persistence.registry import ClientRegistry
from .secure.signing import MemberKeys
from .server import NetworkEngine, NetworkError, RunIsOverError
from .site.signatures import OrderSigner
from .transport import Transport

logger = logging.getLogger(__name__)

_NO_MODEL_FILE = "README.md"
"""Stands in the folder of models where a method has no model of the server, and says so."""


def drive(
    transport: Transport,
    experiment: ExperimentConfig,
    run_path: Path,
    *,
    resume: bool = False,
    keys: Mapping[int, int] | None = None,
    progress: bool = False,
    config: Mapping[str, Any] | None = None,
    promised: Sequence[int] = (),
    audit: Path | None = None,
    signer: OrderSigner | None = None,
    member_keys: MemberKeys | None = None,
    federation: str = "",
    at_site: bool = True,
) -> Result:
    """Run an experiment's method on remote clients.

    Args:
        transport: transport that carries the messages.
        experiment: experiment to run.
        run_path: path of the run folder.
        resume: whether to resume from the folder's last checkpoint.
        keys: client of each node's key, by node; None if keys are not checked.
        progress: whether to show a progress bar.
        config: additional content of ``run.json``; by default the experiment's description of its method.
        promised: number of training examples of each client, if known; otherwise ``network.examples``.
        audit: path of the audit log, or None for none.
        signer: signer of the messages to clients; None if keys are not checked.
        member_keys: public keys of all clients, for secure sums; None without a roster.
        federation: identity of the participating sites, whose privacy is spent under central noise; "" uses the
            experiment's description of the data instead.
        at_site: whether the site's ledger counts the run's central noise; False in a simulation.

    Raises:
        NetworkError: if too few clients register or reply.
        RunIsOverError: if the run to resume has no round left, and no client came that had not heard of its end.
        PausedError: if the clients' validation fell by more than ``network.max_fall``.
        FedlowrankError: if the experiment, the folder and the clients do not match.
    """
    client_count = check_network_experiment(experiment)
    name, settings, limits = experiment.default_method, experiment.network, experiment.network.limits
    method = experiment.build_method(name)
    # run.json keeps the experiment's engine, with which `fedlowrank resume` compares
    protocol = dataclasses.replace(experiment.run_here, checkpoint_every=1, representations=0)
    callbacks = settings_callbacks(protocol)
    check_loggers(protocol.log, run_path)
    promised = promised or settings.examples
    if promised and len(promised) != client_count:
        raise ConfigError(
            f"network.examples promises the examples of {len(promised)} clients, but there are {client_count}"
        )
    account = Account.read(run_path) if resume else Account()
    plan = Plan.read(run_path) if resume else None
    stored_rounds = rounds_of(run_path) if resume else None
    last_round = rounds_kept(run_path / "checkpoint")[-1] if resume else 0
    status = RunFolder(run_path, {}, []).read_status() if resume else {}
    # a status of a later round is that of checkpoints that were removed by hand
    was_finished = (status.get("state"), status.get("rounds")) == ("finished", last_round)
    if stored_rounds not in (None, protocol.rounds):
        raise ResumeRefusedError(
            f"{run_path}: run.rounds was {stored_rounds} and is {protocol.rounds}, but over a network server and clients "
            "agree on the rounds before the first. Set it back, or start a new run in other folders."
        )
    if resume:
        _check_changes(run_path, experiment, method, protocol, config)
        if (stored_count := len(read_clients(run_path))) != client_count:
            raise ResumeRefusedError(
                f"{run_path} cannot be resumed with another configuration: the number of clients was {stored_count} and is "
                f"{client_count} (network.clients, or partition.clients). Set it back, or start a new run in another folder."
            )
    else:
        check_schedules(method, protocol.rounds)
    # a server that was killed while it told its clients of the end has no round left, either
    is_over = was_finished or 0 < account.ended == last_round
    min_registered = settings.min_registered(client_count - len(account.excluded))
    check_secure_start(protocol, client_count, min_registered, member_keys)
    if protocol.secure.on:
        check_secure_method(method, protocol, client_count)
    registry = ClientRegistry(
        experiment,
        client_count,
        limits.max_examples,
        keys,
        limits.examples_ratio,
        promised,
        account.excluded,
        [*account.clients] if is_over else None,
    )
    registry.restore(account.clients)
    account.paused = ""
    engine = NetworkEngine(
        transport=transport,
        registry=registry,
        settings=settings,
        account=account,
        audit=Audit(audit),
        signer=signer,
        member_keys=member_keys,
    )
    if is_over:
        late_count = len(account.clients.keys() - account.excluded.keys())
        _wait_for_late_clients(engine, late_count, run_path, experiment)
    else:
        _wait_for_start(engine, min_registered)
    with threads(experiment.run.threads), contextlib.ExitStack() as stack:
        run = NetworkRun(method, registry.build_federation(), protocol, engine, plan)
        if run.budget is not None and not run.budget.is_local and at_site:
            message = run.budget.count_site(
                _make_site_ledger(experiment, account.run, client_count, run_path, federation)
            )
            if message:
                logger.info(message)
        description = run_description(run, experiment.describe_run(name) if config is None else config)
        folder = stack.enter_context(RunFolder(run_path, description, run.clients()))
        records: list[RoundRecord] = []
        if resume:
            records = restore_run(run, folder)
            _refuse_empty_run(engine, records, protocol.rounds)
        else:
            folder.create(force=False)

        def write_account() -> None:
            account.clients = registry.count_examples()
            # not in run.json, because other network settings do not make another run
            account.settings = dataclasses.asdict(settings)
            account.write(run_path)

        def after_round(record: RoundRecord) -> None:
            write_account()
            _refuse_empty_run(engine, records, protocol.rounds)
            for client_id, reason in record.lost.items():
                logger.info("round %d: client %s was left out: %s", record.round, client_id, reason)
            if not progress and record.round:
                replies, seconds = len(record.participants) - len(record.lost), record.seconds["train"]
                logger.info(
                    "round %d of %d: %d replies, %.1f s", record.round, protocol.rounds, replies, seconds
                )
                _log_evaluation(records[-2])
            if fall_report := _find_fall(engine, records, run_path):
                # a person who resumes the run unchanged accepts the fall
                account.paused, account.watched_from = fall_report.removeprefix("paused: "), record.round - 1
                write_account()
                engine.audit.log_pause(record.round, fall_report)
                raise PausedError(fall_report)

        def on_end() -> None:
            account.ended = run.round
            write_account()

        run.on_end = on_end
        write_account()
        result = Result(run, run_rounds(run, folder, records, progress, callbacks, after_round))
        # with the messages after the last round
        write_account()
        if not progress:
            _log_evaluation(records[-1])
        if fall_report := _find_fall(engine, records, run_path):
            logger.warning("the run is over, and %s", fall_report.removeprefix("paused: "))
        _write_model(run, run_path)
    return result


def _log_evaluation(record: RoundRecord) -> None:
    """Log the mean result of the models after a round, which clients send with their next reply."""
    if text := describe_record(record):
        logger.info("evaluation after round %d: %s", record.round, text)


def _check_changes(
    run_path: Path,
    experiment: ExperimentConfig,
    method: AnyMethod,
    protocol: RunSettings,
    config: Mapping[str, Any] | None,
) -> None:
    """Refuse to resume with another configuration before any client is asked, because clients that are rejected end.

    What only the clients' data and the models show is compared when the run continues.
    """
    stored_config = read_config(run_path)
    entries: dict[str, Any] = {"name": experiment.name, "run": dataclasses.asdict(protocol)}
    entries |= experiment.describe_run() if config is None else config
    method_entries = {"fields": dataclasses.asdict(method), **entries.pop("variant", {})}
    entries["method"] = {**(stored_config.get("method") or {}), **method_entries}
    new_config = {**stored_config, **json.loads(json.dumps(entries))}
    check_changes(run_path, stored_config, new_config, method)
    if config is not None or "experiment" not in stored_config:
        return
    stored_digests, digests = (digest_sections(c["experiment"]) for c in (stored_config, new_config))
    sections = sorted(s for s in {*stored_digests, *digests} if stored_digests.get(s) != digests.get(s))
    if sections:
        raise ResumeRefusedError(
            f"{run_path} cannot be resumed with another configuration: section(s) {', '.join(sections)} differ from "
            "those with which its clients joined. Set these back, or start a new run in another folder."
        )


def _make_site_ledger(
    experiment: ExperimentConfig, run: str, client_count: int, run_path: Path, federation: str
) -> SiteLedger:
    """Make the ledger in which all runs of this server with the same clients are counted."""
    if not federation:
        tables = experiment.to_dict()
        federation = json.dumps([tables.get(name) for name in ("data", "partition", "split", "concept")])
    digests = tuple(digest_of(federation.encode(), str(i).encode()) for i in range(client_count))
    privacy, folder = experiment.run.privacy, str(run_path.absolute())
    site_run = SiteRun(
        "server", digests, float(privacy.delta or 0), privacy.accountant, experiment.default_method, folder
    )
    return SiteLedger(f"{run}-server", site_run)


def _refuse_empty_run(engine: NetworkEngine, records: Sequence[RoundRecord], rounds: int) -> None:
    """Raise NetworkError if a run of secure sums is over, and no round has a result; a person would take it for trained."""
    if engine.secure is None or not engine.settings.min_replies or records[-1].round < rounds:
        return
    if all(len(record.lost) == len(record.participants) for record in records[1:]):
        reasons = "; ".join(sorted({*records[-1].lost.values()}))
        raise NetworkError(
            f"no round of the run has a result: {reasons}. Fix the cause, and start a new run in other folders."
        )


def _find_fall(engine: NetworkEngine, records: Sequence[RoundRecord], run_path: Path) -> str:
    """Describe a fall of the clients' validation beyond the limit; return "" if there is none."""
    account, settings = engine.account, engine.settings
    if not engine.describes:
        return ""
    fall = find_fall(records, account.watched_from, settings.max_fall)
    if fall is None:
        return ""
    rounds = range(fall.best + 1, fall.round + 1)
    suspects = find_suspects(account.shapes, rounds, settings.limits.update_ratio)
    worst_shapes = find_worst_shapes(account.shapes, rounds)
    return describe_fall(fall, suspects, worst_shapes, run_path, rounds_kept(run_path / "checkpoint"))


def _wait_for_start(engine: NetworkEngine, min_clients: int) -> None:
    """Wait for enough clients that agree on the form of examples; raises NetworkError if too few register."""
    registry, excluded_ids = engine.registry, engine.account.excluded
    logger.info("waiting for %d of %d clients", min_clients, registry.clients)
    client_ids = _wait_for_same_form(engine, min_clients)
    if len(client_ids) < min_clients:
        missing_ids = ", ".join(
            str(i) for i in range(registry.clients) if i not in {*client_ids, *excluded_ids}
        )
        rejection_text = "".join(f"\nrejected: {reason}" for reason in registry.rejections.values())
        raise NetworkError(
            f"only {len(client_ids)} of {min_clients} clients came within {engine.settings.wait:g} s; missing: "
            f"{missing_ids}. Start them, or lower network.min_clients.{rejection_text}"
        )


def _wait_for_late_clients(
    engine: NetworkEngine, min_clients: int, run_path: Path, experiment: ExperimentConfig
) -> None:
    """Wait for clients of a run without further rounds that did not hear of its end.

    Raises:
        RunIsOverError: if none comes; the run's status is then "finished".
        NetworkError: if none comes, and the server's language model is not written, for which it needs one.
    """
    seconds = engine.settings.wait
    logger.info(
        "the run in %s is finished: clients that come within %g s (network.wait) are told so, and write their models",
        run_path,
        seconds,
    )
    if not _wait_for_same_form(engine, min_clients):
        folder = RunFolder(run_path, {}, [])
        if experiment.language is not None and not _is_model_written(run_path):
            raise NetworkError(
                f"the run in {run_path} is over, but the server's model is not written, for which the server needs the form of "
                f"a client's texts, and no client came within {seconds:g} s. Start one again by `fedlowrank join`"
            )
        if not folder.is_finished():
            with exclusive(run_path):
                folder.status("finished", rounds_kept(run_path / "checkpoint")[-1])
        raise RunIsOverError(f"the run in {run_path} is finished, and no client came within {seconds:g} s")


def _wait_for_same_form(engine: NetworkEngine, min_clients: int) -> list[int]:
    """Wait for enough clients, reject those whose examples differ in form from the majority's, and list the others."""
    registry, nodes = engine.registry, engine.transport.nodes
    engine.wait_for_clients(engine.settings.wait, lambda: len(registry.find_majority(nodes())) >= min_clients)
    client_ids = registry.find_majority(node_ids := nodes())
    for client_id, reason in registry.fix_form(node_ids).items():
        engine.audit.log_rejection(client_id, reason)
        logger.info("client %d was rejected: %s", client_id, reason)
    engine.send_notices()
    return client_ids


def _is_model_written(run_path: Path) -> bool:
    """Whether :func:`_write_model` has ended."""
    return any(any((run_path / "adapters").glob(f"*/{name}")) for name in ("server", _NO_MODEL_FILE))


def _write_model(run: NetworkRun, run_path: Path) -> None:
    """Write the server's language model to an adapter folder, or a note if the method has none; nothing for other models."""
    companion = run.federation.companion
    if companion is None:
        return
    folder = run_path / "adapters" / f"round-{run.round:04d}"
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    params = find_common_model(run)
    if params is not None:
        companion.write_one(folder / "server", params, run.round, None)
        return
    reason = (
        f"{run.method.title} has no model of the server: each client has one of its own, which it keeps in the folder model of "
        "its client folder"
    )
    logger.info("%s", reason)
    write_atomically(folder / _NO_MODEL_FILE, f"{reason}.\n".encode())
