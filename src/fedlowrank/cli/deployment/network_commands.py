"""The commands ``fedlowrank serve | join | app``, and ``run --engine flower``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ...config.experiment import ExperimentConfig
from ...config.sections.local_section import describe_precision
from ...core.errors import CheckpointError, ConfigError, FedlowrankError
from ...core.io.atomic_files import as_checkpoint_error, write_json
from ...core.io.private_files import is_readable_by_others, make_private_folder, refuse_readable
from ...data.overlap import sketch_files
from ...network.client import REJECTION_FILE, prepare, read_own_share
from ...network.deploy import guard
from ...network.deploy.address_checks import check_address, flower_home
from ...network.deploy.flower_app import CLIENT_REF, SERVER_REF, write_app, write_own_app
from ...network.deploy.flower_process import NewLines, ProcessError
from ...network.deploy.forget import forget as remove_client_data
from ...network.deploy.keys import ClientKeys, ServerKeys, name_revoked
from ...network.deploy.server_processes import RunStatus, SuperLink, SuperNode
from ...network.deploy.supervise import supervise
from ...network.enrollment.key_request import PASSPHRASE_VARIABLE
from ...network.enrollment.roster import ROSTER_FILE, KeyRoster
from ...network.operation.client_count import check_client_count
from ...network.operation.policy import Policy, preview_uploads, raise_violations
from ...network.operation.start_checks import check_network_experiment
from ...network.site.audit_log import AUDIT_FILE, SiteAudit
from ...network.site.signatures import read_public_key
from ...network.site.site_settings import SiteSettings
from ...storage.digest import digest_of
from ...storage.lock import exclusive
from ...storage.run_folder import RunFolder
from ...trust.privacy.site_ledger import open_state
from ..one_run import read_one, show_run
from ..terminal import say
from .key_commands import check_own_key, refusing_expired

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Number of times that a SuperLink that died is started again."""
STATUS_FAILURES = 10
"""Number of requests for the state of a run that may fail in a row; they are a minute apart."""
GRACE = 20
"""Seconds that a client's last reply may take to be sent."""


def _flower() -> Any:
    """Import the module that depends on flwr."""
    try:
        from ...network import flower
    except ImportError as error:
        raise ConfigError(f"Flower is missing: pip install 'fedlowrank[network]' ({error})") from error
    return flower


def read_experiment(file: Path, overrides: Sequence[str], method: str | None) -> ExperimentConfig:
    """Read an experiment for a command that runs one of its methods over a network."""
    return _choose_method(*read_one(file, overrides, method))


def _choose_method(experiment: ExperimentConfig, method: str) -> ExperimentConfig:
    """Return the experiment with the method, and with absolute paths of a base model, which hold in every process."""
    overrides: dict[str, Any] = {"method": method}
    paths = {"local": experiment.local.path}
    if experiment.language is not None:
        paths["language"] = experiment.language.path
    for section, path in paths.items():
        if path is not None and Path(path).exists():
            overrides[section] = {"path": str(Path(path).resolve())}
    return experiment.overlay(overrides)


def run_simulation(
    experiment: ExperimentConfig,
    name: str,
    folder: Path,
    *,
    resume: bool,
    force: bool,
    config: Mapping[str, Any],
) -> None:
    """Run a method in Flower's simulation, or continue its run.

    Args:
        experiment: experiment that holds the method.
        name: name of the method or variant.
        folder: folder of the run; the clients' folders are beside it, in ``FOLDER.clients``.
        resume: whether to continue the run in the folder.
        force: whether to move an existing run and its clients aside.
        config: content of ``run.json``.

    Raises:
        FolderInUseError: if another process runs it; nothing has changed then.
        CheckpointError: if the folder exists, and neither ``resume`` nor ``force`` is set.
    """
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    flower = _flower()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    single_experiment = _choose_method(experiment, name)
    clients_folder = folder.with_name(f"{folder.name}.clients")
    if not resume and folder.exists() and not force:
        raise RunFolder.taken(folder)

    @contextlib.contextmanager
    def hold_folders() -> Iterator[None]:
        if not resume:
            RunFolder.move_all_aside([path for path in (folder, clients_folder) if path.exists()])
        with as_checkpoint_error(f"cannot make {clients_folder}"):
            clients_folder.mkdir(parents=True, exist_ok=True)
        # the run folder has no lock until the clients' folders are made and Ray has started
        with exclusive(clients_folder):
            yield

    with warnings.catch_warnings():
        # a warning of Ray about accelerators
        warnings.simplefilter("ignore", FutureWarning)
        flower.run_flower_simulation(
            single_experiment, folder, clients_folder, hold_folders, resume=resume, config=config
        )


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
    """Start a server, run a method on the clients that join, and watch the run until its end.

    Raises:
        FedlowrankError: if the run did not finish; Flower's own commands would not report this.
    """
    _flower()
    experiment = read_experiment(file, overrides, method)
    check_network_experiment(experiment)
    tls_keys = server_keys(keys, insecure)
    out = out or Path("runs") / experiment.name / f"{experiment.method}-s{experiment.run.seed}"
    has_begun, has_failed_start = RunFolder.has_begun(out), RunFolder.is_failed_start(out)
    if has_begun and not resume:
        raise CheckpointError(f"{out} exists already. Go on with it by --resume, or choose another by -o.")
    if out.exists() and not has_begun and not has_failed_start:
        raise CheckpointError(f"{out} exists already and holds no run; choose another folder with -o.")
    if resume and not out.exists():
        raise CheckpointError(f"there is no run in {out} to go on with; start it without --resume")
    if has_failed_start:
        logger.info(
            f"the run in {out} ended before its first checkpoint; it is moved aside, and starts again"
        )
    server_folder = flower_home(out)
    refuse_readable(*([out] if has_begun else []), out.with_name(f"{out.name}.audit.jsonl"))
    make_private_folder(server_folder)
    flower = _flower()
    log = server_folder / "server.log"
    variables = {
        flower.EXPERIMENT: str((server_folder / "experiment.json").absolute()),
        flower.OUT: str(out.absolute()),
        flower.LOG: str(log.absolute()),
        guard.AUDIT: str(out.with_name(f"{out.name}.audit.jsonl").absolute()),
    }
    if tls_keys is not None:
        variables[flower.NODES] = str((server_folder / "nodes.json").absolute())
        variables[flower.ORDER_KEY] = str(tls_keys.orders.absolute())
        variables[flower.FEDERATION] = digest_of(tls_keys.authority.read_bytes())
    else:
        logger.info(
            "insecure: anyone who reaches this port can join, read all that is sent, and give orders to clients"
        )
    link = SuperLink(server_folder, tls_keys, host=host, port=port, variables=variables)
    with interrupted_once(), link, refusing_expired(keys):
        # only once this process is the only one in its home folder
        log.unlink(missing_ok=True)
        write_json(server_folder / "experiment.json", experiment.to_dict())
        write_own_app(server_folder / "app")
        if tls_keys is not None:
            nodes = {str(link.register(key)): client for client, key in sorted(tls_keys.clients.items())}
            _unregister_revoked(link)
            write_json(server_folder / "nodes.json", nodes)
        logger.info(
            f"clients join by: fedlowrank join {shlex.quote(str(file))} --client N --server HOST:{link.port}"
        )
        _see_through(link, server_folder / "app", log, out)
    return show_run(out)


def _unregister_revoked(link: SuperLink) -> None:
    """Unregister clients whose keys were revoked, so that no round waits for them, and log this."""
    for key in link.unregister_revoked():
        assert link.keys is not None, "else no key is known"
        logger.info("the key of %s was revoked; it is refused", name_revoked(link.keys.authority.parent, key))


def server_keys(keys: Path | None, insecure: bool) -> ServerKeys | None:
    """Read the server's keys; None if ``insecure`` was requested."""
    if keys is not None and insecure:
        raise ConfigError("--keys and --insecure exclude each other")
    if keys is None and not insecure:
        raise ConfigError(
            "a server needs keys: make them by `fedlowrank keys keys --clients N --host NAME`, and pass "
            "--keys keys/server. For a trial on one machine, --insecure does without."
        )
    return None if keys is None else ServerKeys.read(keys)


def _see_through(link: SuperLink, app: Path, log: Path, run_path: Path) -> None:
    """Submit the run and watch it; submit it again to continue if the SuperLink dies."""
    run, follower = link.submit(app), _Follower(log)
    last_check, death_count, failure_count = time.monotonic(), 0, 0
    while True:
        time.sleep(0.2)
        end_message = follower.news()
        if not link.alive():
            death_count += 1
            if death_count > RESTARTS:
                raise ProcessError(
                    f"the SuperLink died {death_count} times. The end of {link.log}:\n{link.tail()}"
                )
            logger.info(
                f"the SuperLink died; the run goes on from its last round ({death_count} of {RESTARTS})"
            )
            link.start()
            try:
                # its ServerApp ended with the old SuperLink, but the new one believes that it is alive
                link.stop(run)
            except ProcessError as error:
                logger.info("run %d of before could not be stopped: %s", run, error)
            run, last_check = link.submit(app), time.monotonic()
            continue
        try:
            _unregister_revoked(link)
        except ProcessError as error:
            logger.info("%s; it is tried again", error)
        # a status request takes a second of work, so it is made only if the run seems over, or once a minute
        if end_message is not None or time.monotonic() - last_check > 60:
            last_check = time.monotonic()
            try:
                status = link.status(run)
            except ProcessError as error:
                failure_count += 1
                if failure_count >= STATUS_FAILURES and end_message is None:
                    raise ProcessError(
                        f"the state of the run is not known: {failure_count} requests failed in a row, the last one with: "
                        f"{error}. Go on with the run by --resume; details: {link.log}"
                    ) from error
                logger.warning("the state of the run is not known: %s; it is asked again", error)
                status = RunStatus("unknown", "")
            else:
                failure_count = 0
            # lines that arrived while Flower answered
            end_message = end_message or follower.news()
            if status.is_completed or end_message == "finished":
                return
            if status.is_finished or end_message is not None:
                kind, reason = "error", f"{status.status}: {status.details}"
                if end_message is not None:
                    kind, _, reason = end_message.partition(": ")
                if reason.startswith("paused: "):
                    raise ProcessError(f"the run is {reason.rstrip('.')}. Details: {link.log}")
                advice = "Go on with it by --resume" if RunFolder.has_begun(run_path) else "Start it again"
                if kind == "refused":
                    # the reason says what to do
                    advice = "Nothing has changed"
                if disk_error := link.read_disk_error():
                    reason = f"{reason.rstrip('.')}. A likely cause: {disk_error}"
                    advice = f"Free space. {advice}"
                raise ProcessError(f"the run failed: {reason.rstrip('.')}. {advice}; details: {link.log}")


class _Follower:
    """Logs new lines of a file as they are written."""

    def __init__(self, path: Path) -> None:
        self.lines = NewLines(path)

    def news(self) -> str | None:
        """Log the new lines; return the text by which the run reports its end, if there is one."""
        end_message = None
        for line in self.lines.read():
            text = line.decode(errors="replace").rstrip("\n")
            logger.info(text)
            message = text.partition(" ")[2]
            if message == "finished" or message.startswith(("error: ", "refused: ")):
                end_message = message
        return end_message


def join(
    file: Path,
    overrides: Sequence[str],
    method: str | None,
    client: int,
    data: Path | None,
    test: Path | None,
    server: str,
    keys: Path | None,
    insecure: bool,
    folder: Path | None,
    stay: bool,
    no_evaluation: bool,
    exact_evaluation: bool,
    send_errors: bool,
    runs: int,
    max_download: int,
    forget: bool = False,
    policy: Path | None = None,
) -> int:
    """Take part in a run as one of its clients until the run is over; or remove the content of the client's folder.

    Raises:
        FedlowrankError: if the command, the data or the folder do not fit the experiment, in which case nothing in
            the folder has changed; or if the server does not let the client take part.
    """
    _flower()
    experiment = read_experiment(file, overrides, method)
    client_count = check_network_experiment(experiment)
    if not 0 <= client < client_count:
        raise ConfigError(f"--client {client}: clients go from 0 to {client_count - 1}")
    if data is None and test is not None:
        raise ConfigError(
            f"--test {test}: test data of your own belong to training data of your own; pass --data, too, or leave "
            "--test out"
        )
    check_address(server)
    folder = folder or Path("clients") / experiment.name / str(client)
    if forget:
        return _forget(folder, client)
    if (keys is None) != insecure:
        raise ConfigError(
            f"pass --keys keys/client-{client}, whose key you made by `fedlowrank keys keys/client-{client} --request "
            f"{client}` and the server's operator accepted; or, for a trial on one machine, --insecure, but not both"
        )
    if keys is not None:
        _refuse_keys_of_another(keys, client)
    client_keys = None if keys is None else ClientKeys.read(keys)
    passphrase = "" if client_keys is None else check_own_key(client_keys, client)
    if no_evaluation and exact_evaluation:
        raise ConfigError("--no-evaluation and --exact-evaluation exclude each other")
    if send_errors and experiment.run.privacy.kind != "none":
        raise ConfigError(
            "--send-errors: texts of errors are not private; leave it out where run.privacy is set"
        )
    if runs < 1:
        raise ConfigError(f"--runs {runs}: a client takes part in 1 run or more")
    if runs > 1 and experiment.run.secure.on:
        raise ConfigError(
            f"--runs {runs}: under secure sums a folder is for one run, for the totals of two runs may differ by what "
            "one client sent; leave out --runs, and choose another --folder for another run"
        )
    if max_download < 0:
        raise ConfigError(f"--max-download {max_download}: give a number of MiB, or 0 for the default")
    site = SiteSettings(
        order_key="" if client_keys is None else read_public_key(client_keys.orders),
        evaluation="none" if no_evaluation else "exact" if exact_evaluation else "rounded",
        send_errors=send_errors,
        runs=runs,
        max_download=max_download << 20,
        roster={} if client_keys is None or not experiment.run.secure.on else _roster(client_keys),
    )
    if client_keys is None:
        logger.info(
            "insecure: orders are not signed; whoever reaches the server may give orders to this client"
        )
    make_private_folder(folder)
    node = SuperNode(folder / "flower", server, folder, client_keys)
    # nothing in the folder changes while another process uses it
    node.reserve()
    try:
        _prepare_client(experiment, client, client_count, folder, data, test, site, policy)
        if passphrase:
            # other users cannot read the environment of a process
            node.variables[PASSPHRASE_VARIABLE] = passphrase
        _work(node, folder, stay)
    finally:
        node.close()
    return 0


def _prepare_client(
    experiment: ExperimentConfig,
    client_id: int,
    client_count: int,
    folder: Path,
    data: Path | None,
    test: Path | None,
    site: SiteSettings,
    policy: Path | None,
) -> None:
    """Read a client's data, compare the experiment with the policy of its site, and then write its folder."""
    sketch = None
    if experiment.run.privacy.kind != "none":
        # report errors before anybody waits for this client
        open_state()
    site_policy = Policy.of_folder(folder) if policy is None else Policy.read(policy)
    if data is None:
        logger.info(
            f"client {client_id} takes its share of the experiment's own data; pass --data for data of yours"
        )
        shares = experiment.shares()
        check_client_count(experiment, client_count, len(shares.data))
        if client_id >= len(shares.data):
            raise ConfigError(
                f"--client {client_id}: the experiment's own data have {len(shares.data)} clients, from 0 to "
                f"{len(shares.data) - 1}. Pass --data with data of this client"
            )
    else:
        shares = read_own_share(experiment, client_id, client_count, data, test)
        for note in shares.notes:
            logger.info("client %d: %s", client_id, note)
        if is_readable_by_others(data):
            command = f"chmod -R go-rwx {shlex.quote(str(data))}"
            logger.info(f"other users of this machine may be able to read {data}: {command}")
        if experiment.run.privacy.kind != "none":
            sketch = sketch_files([data])
    if site_policy is not None:
        train_count = len(shares.data[client_id].train)
        sends_metrics = site.evaluation != "none"

        def uploads() -> list[str]:
            return preview_uploads(folder, experiment, client_id, shares, site)

        raise_violations(
            site_policy,
            site_policy.find_violations(experiment, client_count, train_count, uploads, sends_metrics),
        )
    prepare(*(folder, experiment, client_id, shares, site), sketch=sketch, data_path=data, test_path=test)
    if site_policy is not None:
        site_policy.store(folder)
        SiteAudit(folder / AUDIT_FILE).log_policy(
            site_policy.digest, json.dumps(dataclasses.asdict(site_policy))
        )
        logger.info(f"client {client_id}: the experiment keeps to the policy, digest {site_policy.digest}")
    sizes = (len(getattr(shares.data[client_id], s)) for s in ("train", "val", "test"))
    logger.info(
        "client {}: {} examples for training, {} for validation, {} for testing".format(client_id, *sizes)
    )
    if experiment.language_here is not None:
        logger.info(
            "client %d: %s", client_id, describe_precision(experiment.language_here, experiment.run_here)
        )


def _work(node: SuperNode, folder: Path, stay: bool) -> None:
    """Keep a client's node running until its run is over, or until an interrupt if it stays.

    Raises:
        ProcessError: if the server does not let the client take part, unless the client stays.
    """
    stop = threading.Event()
    # a file of an earlier start
    (folder / REJECTION_FILE).unlink(missing_ok=True)
    # existing models and lines are listed before the thread begins, which may be late
    refusals = _RefusedDownloads(folder.absolute() / AUDIT_FILE)
    thread_args = folder.absolute(), _models(folder), node, stop, stay, refusals
    threading.Thread(target=_until_done, args=thread_args, daemon=True).start()
    try:
        with interrupted_once():
            supervise(node, stop)
    finally:
        stop.set()
    if reason := _rejection(folder):
        raise ProcessError(f"the server does not let this client take part: {reason}")
    for model in _models(folder):
        logger.info(f"its model: {model.parent}")


def _roster(keys: ClientKeys) -> dict[str, str]:
    """Public keys of all clients by their numbers, which the clients use in secure sums."""
    roster = KeyRoster.read(keys.key.parent / ROSTER_FILE, keys.authority)
    say(f"secure sums: the roster has number {roster.number}; all sites must see the same number")
    return {
        str(client_id): entry.key for client_id, entry in roster.clients.items() if not entry.has_expired()
    }


def _forget(folder: Path, client_id: int) -> int:
    """Remove the content of a client's folder, and print what was removed and what remains."""
    removed_paths, remaining_paths = remove_client_data(folder, client_id)
    for path in removed_paths:
        say(f"removed: {path}")
    for path in remaining_paths:
        say(f"still there: {path}")
    return 0


def _refuse_keys_of_another(keys: Path, client_id: int) -> None:
    """Refuse a folder that is named for another client, because the files in it name no client."""
    match = re.fullmatch(r"client-(\d+)", keys.resolve().name)
    if match and int(match[1]) != client_id:
        raise ConfigError(
            f"--client {client_id}, but {keys} holds the keys of client {match[1]}. Pass --client {match[1]}, or "
            f"--keys {shlex.quote(str(keys.parent / f'client-{client_id}'))}."
        )


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Make SIGINT, SIGTERM or a closed terminal end the block as Ctrl-C does; a second signal does not stop the cleanup.

    Otherwise processes that the block has started would keep running.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    # not every platform has it, and nohup ignores it so that the command outlives the terminal
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        for signal_number in signals:
            signal.signal(signal_number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.signal(signum, end) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _models(folder: Path) -> dict[Path, int]:
    """Files of the client's models, with the times at which they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.absolute().glob("*/model/model.safetensors")}


def _rejection(folder: Path) -> str:
    """Read why the server does not let a client take part; "" if it gave no reason."""
    try:
        return (folder / REJECTION_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class _RefusedDownloads:
    """Logs new lines of a site's audit log about downloads that are too large, each reason once."""

    def __init__(self, path: Path) -> None:
        self.lines = NewLines(path, path.stat().st_size if path.exists() else 0)
        self.logged_reasons: set[str] = set()

    def log_new(self) -> None:
        """Log the lines that were added since the last call."""
        path = self.lines.path
        if path.exists() and path.stat().st_size < self.lines.offset:
            # a person moved the file, and a new one has begun
            self.lines.offset = 0
        for line in self.lines.read():
            # after a loss of power a line may be incomplete
            with contextlib.suppress(ValueError):
                self._log_reason(str(json.loads(line).get("why", "")))

    def _log_reason(self, reason: str) -> None:
        if "--max-download" in reason and reason not in self.logged_reasons:
            self.logged_reasons.add(reason)
            logger.warning(
                "%s. If the method needs larger downloads, join with a larger --max-download", reason
            )


def _until_done(
    folder: Path,
    initial_models: Mapping[Path, int],
    node: SuperNode,
    stop: threading.Event,
    stay: bool,
    refusals: _RefusedDownloads,
) -> None:
    """Stop once this client has written a new model and the reply about it has been sent.

    Stop also if the server does not let the client take part. A client that stays only logs this. Refused downloads are
    logged meanwhile.
    """
    while not stop.wait(0.5):
        refusals.log_new()
        if reason := _rejection(folder):
            if stay:
                logger.warning("the server does not let this client take part: %s", reason)
                (folder / REJECTION_FILE).unlink(missing_ok=True)
                continue
            # the server waits for the confirmation
            stop.wait(3)
            stop.set()
        elif not stay and _models(folder).items() - initial_models.items():
            # the reply about the model must still be sent; a server that does not accept it is not waited for
            for _ in range(4 * GRACE):
                if not node.is_working():
                    break
                stop.wait(0.25)
            # Flower drops the replies of a node that left before the server fetched them
            stop.wait(5)
            stop.set()


def app(file: Path, overrides: Sequence[str], method: str | None, out: Path) -> int:
    """Write a Flower app of an experiment, for `flwr run`."""
    experiment = read_experiment(file, overrides, method)
    check_network_experiment(experiment)
    if out.exists() and any(p.name != "pyproject.toml" for p in out.iterdir()):
        raise FedlowrankError(
            f"{out} holds other things, which Flower would send to every client; choose an empty folder"
        )
    # settings of this machine are not sent
    tables = {name: table for name, table in experiment.to_dict().items() if name != "local"}
    settings = {
        "experiment": json.dumps(tables),
        "folder": f"runs/{experiment.name}/{experiment.method}-s{experiment.run.seed}",
    }
    write_app(out, "fedlowrank", SERVER_REF, CLIENT_REF, settings)
    say(f"Flower app: {out}. Run it by `flwr run {shlex.quote(str(out))} CONNECTION`.")
    return 0
