"""Any method over Flower: the server's half as a ServerApp, a client's half as a ClientApp.

Only this module, :mod:`.message_bounds`, :mod:`.replies`, :mod:`.access` and the scripts :mod:`.deploy.node` and
:mod:`.deploy.guard` import flwr.

``server`` and ``client`` are the components of a Flower app. Their inputs are:

- The ServerApp reads environment variables: :data:`EXPERIMENT` (a JSON file of the experiment's tables),
  :data:`OUT` (run folder) and :data:`LOG`; if keys are checked,
  :data:`NODES` (the client of each registered key), :data:`ORDER_KEY` (file of the key that signs orders) and
  :data:`FEDERATION` (digest of the authority of the keys). An app that was submitted by hand has the
  tables and the folder in its run config.
- The ClientApp reads ``folder`` from its node's config, which ``fedlowrank join`` prepared. Without it, the
  app is the client ``partition-id`` of the experiment in the run config, and its folder lies under ``state``
  of the node's config.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid

from ..config.experiment import ExperimentConfig
from ..core.errors import CheckpointError, ConfigError, DataError, FedlowrankError, ResumeRefusedError
from ..core.io.atomic_files import as_checkpoint_error
from ..core.io.private_files import private_umask
from ..rounds.simulate import threads
from ..storage.run_files import CLIENT_FILE
from ..storage.run_folder import RunFolder
from .client import ClientRuntime, explain_error_at, prepare
from .drive import drive
from .enrollment.roster import ROSTER_FILE, KeyRoster
from .message_bounds import BoundedClient
from .messages import RefusedOrderError, digest_sections, to_one_line
from .operation.client_count import check_client_count
from .operation.start_checks import check_flower_simulation
from .replies import Replies
from .secure.signing import MemberKeys, MemberSigner
from .server import RunIsOverError
from .site.audit_log import AUDIT_FILE, SiteAudit
from .site.signatures import OrderSigner
from .site.site_settings import SiteSettings
from .transport import NodeMessage, Response

logger = logging.getLogger(__name__)

EXPERIMENT, OUT, NODES, LOG = "FEDLOWRANK_EXPERIMENT", "FEDLOWRANK_OUT", "FEDLOWRANK_NODES", "FEDLOWRANK_LOG"
ORDER_KEY = "FEDLOWRANK_ORDER_KEY"
FEDERATION = "FEDLOWRANK_FEDERATION"
"""Names of environment variables."""

DISCONNECTION_CODES = frozenset({3, 5})
"""Flower's error codes after which the node must register again: message unavailable, node unavailable."""

ERROR_MEANINGS = {
    1: "its client could not load the app",
    2: "its client met an error",
    3: "the message expired, or its node left, before it was fetched",
    4: "the reply expired before it was fetched",
    5: "its node is not connected any more",
    7: "its client answers no messages of this app",
    8: "its client crashed",
}
"""Texts for Flower's error codes, because Flower's own reason may be blank."""

UNLOGGED_REASON = "its audit log cannot be written"
"""The only reason of an error that leaves a site without a line in its audit log."""

ORDER_TYPE = "train.order"
"""Flower's type of messages that have a payload."""

_MESSAGE_TYPES = {"registration": "query.registration", "order": ORDER_TYPE}


def to_records(header: str, payload: bytes, signature: str = "") -> RecordDict:
    """Pack a message for Flower, with the payload as one array, because many arrays take ten times as long."""
    array = Array(dtype="uint8", shape=(len(payload),), stype="safetensors", data=payload)
    head = ConfigRecord({"json": header})
    if signature:
        head["signature"] = signature
    return RecordDict({"header": head, "payload": ArrayRecord({"tree": array})})


def from_records(records: RecordDict) -> tuple[str, bytes]:
    """Inverse of :func:`to_records`; raises FedlowrankError if the records are something else."""
    try:
        header = records.config_records["header"]["json"]
        payload = records.array_records["payload"]["tree"].data
    except (KeyError, AttributeError) as error:
        raise FedlowrankError(f"a message lacks its parts: {error!r}") from error
    if not isinstance(header, str) or not isinstance(payload, bytes):
        raise FedlowrankError("a message's header is not text, or its payload is not bytes")
    return header, payload


def read_signature(records: RecordDict) -> str:
    """Read the signature of a message; "" if it has none."""
    signature = records.config_records["header"].get("signature", "")
    return signature if isinstance(signature, str) else ""


NODES_MAX_AGE = 1.0
"""Seconds for which the list of reachable nodes is reused."""


class GridTransport:
    """A :class:`.transport.Transport` over the grid of a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, NodeMessage] = {}
        self._unsent: list[NodeMessage] = []
        self._nodes, self._nodes_at = set[int](), -math.inf
        self._bounded_client: BoundedClient | None = None
        self._replies: Replies | None = None
        if isinstance(grid, HttpGrid):
            self._replies = Replies(grid, grid._runtime_client)
            # a reply is fetched piece by piece, and fetching stops if it is too large
            self._bounded_client = BoundedClient(
                grid._runtime_client, lambda message_id: self._open[message_id].max_bytes
            )
            grid._client = self._bounded_client  # type: ignore[assignment]  # another class, on purpose

    def nodes(self) -> set[int]:
        """The nodes that can be reached; asks the server at most once a second, as a busy one takes about that long to answer."""
        if time.monotonic() - self._nodes_at > NODES_MAX_AGE:
            self._nodes = set(self._grid.get_node_ids())
            self._nodes_at = time.monotonic()
        return set(self._nodes)

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        """Send messages that expire after ``seconds``."""
        flower_messages = [
            FlowerMessage(
                to_records(m.header, m.payload, m.signature),
                m.node,
                _MESSAGE_TYPES[m.kind],
                ttl=seconds,
                group_id=group,
            )
            for m in messages
        ]
        if self._replies is not None:
            self._replies.limit({m.node: m.max_bytes for m in messages})
        ids = list(self._grid.push_messages(flower_messages)) if flower_messages else []
        # a registration may be pending while orders are sent, and a repeated one may be answered first;
        # the identifier is empty if the node has left in between
        self._open |= {str(i): m for i, m in zip(ids, messages, strict=True) if i}
        self._unsent += [m for i, m in zip(ids, messages, strict=True) if not i]

    def receive(self) -> list[Response]:
        """Return the responses since the last call."""
        responses = [
            Response(m.node, m.kind, problem="its node went away", disconnected=True) for m in self._unsent
        ]
        self._unsent = []
        for message_id, reason in self._replies.take_refused().items() if self._replies is not None else ():
            if (message := self._open.pop(message_id, None)) is not None:
                responses.append(Response(message.node, message.kind, too_large=reason))
        if self._open:
            responses += self._responses(self._grid.pull_messages(list(self._open)))
        return responses

    def cancel_orders(self) -> None:
        """Drop later responses to orders."""
        if self._replies is not None:
            self._replies.close([i for i, m in self._open.items() if m.kind == "order"])
        self._open = {i: m for i, m in self._open.items() if m.kind == "registration"}
        self._unsent = [m for m in self._unsent if m.kind == "registration"]

    def _responses(self, replies: Iterable[FlowerMessage]) -> Iterator[Response]:
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            message = self._open.pop(message_id, None)
            if message is None:
                continue
            self._open = {
                i: m for i, m in self._open.items() if (m.node, m.kind) != (message.node, message.kind)
            }
            make_response = functools.partial(Response, message.node, message.kind)
            if (
                self._bounded_client is not None
                and self._replies is not None
                and message_id in self._bounded_client.refused
            ):
                name, excess = self._bounded_client.take_refused(message_id)
                self._replies.remove(name)
                yield make_response(too_large=excess)
            elif reply.has_error():
                code, reason = reply.error.code, (reply.error.reason or "").strip()
                meaning = ERROR_MEANINGS.get(code, "an error that this release does not know")
                problem = f"{meaning} (Flower's error {code}{f': {reason}' if reason else ''})"
                yield make_response(problem=problem[:500], disconnected=code in DISCONNECTION_CODES)
            else:
                try:
                    yield make_response(*from_records(reply.content))
                except FedlowrankError as error:
                    yield make_response(problem=str(error))


def make_client_app(folder_of: Callable[[Context], Path]) -> ClientApp:
    """Make the ClientApp of the clients whose folders a function finds."""
    app = ClientApp()

    @app.query("registration")
    def register(message: FlowerMessage, context: Context) -> FlowerMessage:
        return _answer("registration", message, functools.partial(folder_of, context))

    @app.train("order")
    def order(message: FlowerMessage, context: Context) -> FlowerMessage:
        return _answer("order", message, functools.partial(folder_of, context))

    return app


def _answer(
    kind: Literal["registration", "order"], message: FlowerMessage, folder_of: Callable[[], Path]
) -> FlowerMessage:
    """Answer a message as the client. Flower would send the text of an exception, which may contain data."""
    try:
        header, payload = from_records(message.content)
        runtime = load_runtime(str(folder_of()))
        with threads(runtime.experiment.run.threads):
            reply = runtime.reply(kind, header, payload, read_signature(message.content))
        return FlowerMessage(to_records(*reply), reply_to=message)
    except Exception as error:  # noqa: BLE001 - whatever a client raises, its server learns the class
        return make_error_reply(message, error, folder_of)


def make_error_reply(
    message: FlowerMessage,
    error: Exception,
    folder_of: Callable[[], Path],
    code: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
) -> FlowerMessage:
    """Make an error reply whose reason contains none of the client's data.

    The reason is in the site's audit log before it leaves. If the log cannot be written, it is :data:`UNLOGGED_REASON`.

    Args:
        message: message that is answered.
        error: error because of which there is no reply.
        folder_of: function that finds the client's folder.
        code: Flower's error code.
    """
    if isinstance(error, RefusedOrderError):
        logger.info("refused: %s", error)
        reason = f"refused: {error}"
    else:
        logger.error("failed: %s: %s", type(error).__name__, to_one_line(str(error)), exc_info=error)
        reason = type(error).__name__
        # without a folder there is no log for the text
        with contextlib.suppress(ConfigError, DataError):
            reason = explain_error_at(folder_of(), error)
    with contextlib.suppress(ConfigError, DataError):
        try:
            SiteAudit(folder_of() / AUDIT_FILE).log_reply("error", to_one_line(reason), b"")
        except CheckpointError as audit_error:
            logger.error("no reason is sent: %s", audit_error)
            reason = UNLOGGED_REASON
    return FlowerMessage(Error(code, to_one_line(reason)), reply_to=message)


def make_server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """Make a ServerApp from a function."""
    app = ServerApp()
    app.main()(run)
    return app


@functools.lru_cache(maxsize=256)
def load_runtime(folder: str) -> ClientRuntime:
    """The client runtime of a folder, which a process reads only once."""
    runtime = ClientRuntime(Path(folder))
    runtime.signer = _SIGNERS.get(folder)
    return runtime


_SIGNERS: dict[str, MemberSigner] = {}


def sign_as(folder: Path, signer: MemberSigner) -> None:
    """Let the client of a folder sign its part of secure sums with a key of this process; call it before the first read."""
    _SIGNERS[str(folder)] = signer


def _find_client_folder(context: Context) -> Path:
    """Return the folder of this node's client; prepare it if it does not exist yet."""
    config = context.node_config
    if "folder" in config:
        return Path(str(config["folder"]))
    if "partition-id" not in config:
        raise ConfigError(
            "this node does not know which client it is. Start it by `fedlowrank join`, or give it "
            "--node-config 'folder=\"...\"' or 'partition-id=0'"
        )
    experiment, client_id = _read_run_config(context), int(config["partition-id"])
    state = Path(str(config.get("state", Path.home() / ".fedlowrank")))
    # one node may serve runs of several experiments with the same name
    digest = hashlib.blake2b(
        json.dumps(digest_sections(experiment.to_dict())).encode(), digest_size=6
    ).hexdigest()
    folder = state / f"{experiment.name}-{digest}" / f"client-{client_id}"
    if not (folder / CLIENT_FILE).exists():
        # the node runs what the server sends, in any number of runs
        prepare(folder, experiment, client_id, experiment.shares(), SiteSettings(runs=0))
    return folder


def _read_run_config(context: Context) -> ExperimentConfig:
    text = context.run_config.get("experiment")
    if not isinstance(text, str):
        raise ConfigError("the app's config holds no experiment; make the app by `fedlowrank app FILE.toml`")
    return ExperimentConfig.parse(json.loads(text))


def _serve(grid: Grid, context: Context) -> None:
    env = os.environ
    tables = json.loads(Path(env[EXPERIMENT]).read_text(encoding="utf-8")) if EXPERIMENT in env else None
    experiment = _read_run_config(context) if tables is None else ExperimentConfig.parse(tables)
    default_folder = f"runs/{experiment.name}/{experiment.default_method}-s{experiment.run.seed}"
    run_path = Path(env.get(OUT) or str(context.run_config.get("folder") or default_folder))
    keys = None
    if NODES in env:
        keys = {int(n): int(c) for n, c in json.loads(Path(env[NODES]).read_text(encoding="utf-8")).items()}
    signer = OrderSigner.read(Path(env[ORDER_KEY])) if ORDER_KEY in env else None
    member_keys = None
    if ORDER_KEY in env and experiment.run.secure.on:
        folder = Path(env[ORDER_KEY]).parent
        member_keys = MemberKeys.of(KeyRoster.read(folder / ROSTER_FILE, folder / "ca.crt"))
    with _log_to(Path(env[LOG]) if LOG in env else None):
        try:
            if RunFolder.is_failed_start(run_path):
                RunFolder.move_aside(run_path)
            audit_path = run_path.with_name(f"{run_path.name}.audit.jsonl")
            # an app on Flower's own server is not started by a command of this package
            with private_umask():
                with as_checkpoint_error(f"cannot make {run_path.parent}"):
                    run_path.parent.mkdir(parents=True, exist_ok=True)
                resume, federation = RunFolder.has_begun(run_path), env.get(FEDERATION, "")
                transport = GridTransport(grid)
                drive(
                    transport,
                    experiment,
                    run_path,
                    resume=resume,
                    keys=keys,
                    audit=audit_path,
                    federation=federation,
                    signer=signer,
                    member_keys=member_keys,
                )
        except RunIsOverError as note:
            logger.info("%s", note)
        except FedlowrankError as error:
            kind = "refused" if isinstance(error, ResumeRefusedError) else "error"
            logger.error("%s: %s", kind, error.for_command)
            raise
        logger.info("finished")


class _OneLine(logging.Formatter):
    """Formats a record as one line, because ``fedlowrank serve`` interprets some lines as the end of the run."""

    def format(self, record: logging.LogRecord) -> str:
        """See the base class."""
        return super().format(record).replace("\n", " | ")


@contextlib.contextmanager
def _log_to(log_path: Path | None) -> Iterator[None]:
    """Log to the standard output, and to a file that ``fedlowrank serve`` follows."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    handlers[0].setFormatter(logging.Formatter("fedlowrank: %(message)s"))
    if log_path is not None:
        handlers.append(logging.FileHandler(log_path))
        handlers[1].setFormatter(_OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
    # all warnings of the package, and what its network part reports
    package_logger, network_logger = logging.getLogger("fedlowrank"), logging.getLogger(__package__)
    level = network_logger.level
    network_logger.setLevel(logging.INFO)
    for handler in handlers:
        package_logger.addHandler(handler)
    try:
        yield
    finally:
        network_logger.setLevel(level)
        for handler in handlers:
            package_logger.removeHandler(handler)
            handler.close()


client = make_client_app(_find_client_folder)
server = make_server_app(_serve)


def _remove_default_bounds(experiment: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment with update_ratio and max_fall off, unless its tables set them."""
    network = experiment.to_dict().get("network", {})
    ratio = network.get("limits", {}).get("update_ratio", 0.0)
    fall = network.get("max_fall", 0.0)
    return experiment.overlay({"network": {"max_fall": fall, "limits": {"update_ratio": ratio}}})


def run_flower_simulation(
    experiment: ExperimentConfig,
    run_path: Path,
    clients_folder: Path,
    hold_folders: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    *,
    resume: bool = False,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Run an experiment in Flower's simulation, see :func:`.drive.drive`; ``clients_folder`` has the clients' folders.

    ``hold_folders`` is entered for the whole simulation, after the experiment is checked and before anything is written.

    The clients are this machine's own, so no update is shortened and the run does not pause, unless the experiment
    sets ``network.limits.update_ratio`` or ``network.max_fall`` to values other than the defaults.

    Raises:
        ConfigError: if Ray is not installed, or the experiment cannot run over a network.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Flower's simulation needs Ray: pip install 'fedlowrank[network-simulation]'")
    from flwr.simulation import run_simulation

    experiment = _remove_default_bounds(experiment)
    client_count, shares = check_flower_simulation(experiment), experiment.shares()
    check_client_count(experiment, client_count, len(shares.data))
    if client_count > len(shares.data):
        raise ConfigError(
            f"network.clients is {client_count}, but the experiment's data have {len(shares.data)} clients. Set it to "
            f"{len(shares.data)}"
        )
    sizes = [len(data.train) for data in shares.data]
    errors: list[FedlowrankError] = []

    def run(grid: Grid, context: Context) -> None:
        del context
        try:
            transport = GridTransport(grid)
            settings: dict[str, Any] = {"resume": resume, "config": config, "promised": sizes}
            drive(transport, experiment, run_path, progress=True, at_site=False, **settings)
        except FedlowrankError as error:
            # otherwise Flower wraps the error in one of its own
            errors.append(error)

    app = make_client_app(lambda context: clients_folder / str(context.node_config["partition-id"]))
    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with hold_folders():
        for i in range(client_count):
            prepare(clients_folder / str(i), experiment, i, shares, SiteSettings.simulated(), sketch=())
        run_simulation(make_server_app(run), app, client_count, backend_config=resources)
    if errors:
        raise errors[0]
