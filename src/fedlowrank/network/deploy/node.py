"""A client's node: pulls messages from the server and answers each with the installed fedlowrank.

Flower's own SuperNode unpacks the app that the server names and runs its code. This program speaks the same
protocol, but never fetches an app. It hands a message to :data:`..flower.client` of the installed package, and
only if the message belongs to the app that fedlowrank itself submits (same identifier, same SHA-256 of the
packed app). It answers any other message with an error and logs it.

One process answers all messages, so PyTorch is imported once. :class:`.server_processes.SuperNode` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from .. import flower, message_bounds
from ..enrollment.key_request import PASSPHRASE_VARIABLE, load_key_pair
from ..message_bounds import FetchBound
from ..messages import RefusedOrderError, to_one_line
from ..secure.signing import MemberSigner
from ..site.audit_log import AUDIT_FILE, SiteAudit
from .flower_app import write_own_app
from .server_processes import NO_MESSAGES, WORKING_FILE

logger = logging.getLogger("fedlowrank.network.deploy.node")

MIN_PAUSE_SECONDS = 0.5
"""Shortest pause in seconds between two requests for a message."""

MAX_PAUSE_SECONDS = 3.0
"""Longest pause in seconds between two requests for a message."""


MAX_PIECE_BYTES = message_bounds.CHUNK_BYTES + (1 << 16)
"""Largest size in bytes of the server's answer to a call for a piece of a message."""

MAX_CALL_BYTES = 1 << 20
"""Largest size in bytes of the server's answer to any other call."""

UNANSWERED_ERRORS = (RunNotRunningException, httpx.HTTPError, ObjectPullError, ObjectPushError)
"""Errors after which a message is not answered: the run may be over, or the message too old."""


ERROR_LOG_SECONDS = 60.0
"""Seconds for which the same error of the connection is not logged again."""

PIECE_SECONDS = 120.0
"""Seconds within which a piece of a message must appear at the server; without a limit, the node would wait until the
run ends for a piece that the server lost."""

_MAX_RUNS = 100
"""Number of the server's runs for which the decision to refuse is stored."""


def choose_pause(idle_seconds: float) -> float:
    """Choose the seconds until the next request for a message, given those since the last message.

    The pause is a twentieth of the wait, so that rounds of minutes are noticed promptly and hundreds of waiting clients leave
    the server time for its work.
    """
    return min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, idle_seconds / 20))


class Connection(NamedTuple):
    """Calls to the server, as functions of Flower's connection.

    Attributes:
        node: Flower's number of this node at the server.
        receive: function that returns the next message without its content, and the tree of its objects; None if
            there is none.
        send: function that announces a reply; returns the objects that the server lacks, and a session for pushing them.
        get_run: function that returns the server's description of a run.
        get_app: function that returns the packed app of a run; never called.
        pull: function that fetches an object of a message.
        push: function that sends an object of a reply.
        confirm: function that reports that all objects of a message have arrived.
    """

    node: int
    receive: Callable[[], tuple[Message, Any] | None]
    send: Callable[[Message, Any, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_app: Callable[[str, int], Any]
    pull: Callable[[int, str], bytes]
    push: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class PinnedApp(NamedTuple):
    """Identity of the only app whose messages are answered.

    Attributes:
        name: publisher and name of the app.
        digest: SHA-256 of the packed app.
    """

    name: str
    digest: str

    @classmethod
    def installed(cls) -> PinnedApp:
        """The app of the installed fedlowrank."""
        with tempfile.TemporaryDirectory() as folder:
            name = write_own_app(Path(folder))
            return cls(name, hashlib.sha256(build_fab_from_disk(Path(folder))).hexdigest())

    def refusal(self, run: Run) -> str | None:
        """The reason why messages of a run are refused, or None if they are answered."""
        if (run.fab_id, run.fab_hash) == self:
            return None
        app_description = to_one_line(f"{run.fab_id} with the digest {run.fab_hash}", 200)
        return (
            f"this client answers messages of the app {self.name} with the digest {self.digest} only, not "
            f"of {app_description}. If the server is a `fedlowrank serve`, install the same releases of fedlowrank "
            "and Flower on both."
        )


class Node:
    """Answers the messages of a server.

    Args:
        connection: connection to the server.
        app: app of the installed package that answers a message.
        pinned_app: identity of the app whose messages are answered.
        folder: folder of the client.
        process_folder: folder of the file :data:`.server_processes.WORKING_FILE`.
    """

    def __init__(
        self,
        connection: Connection,
        app: ClientApp,
        pinned_app: PinnedApp,
        folder: Path,
        process_folder: Path,
    ) -> None:
        self.connection, self.app, self.pinned, self.folder, self.home = (
            connection,
            app,
            pinned_app,
            folder,
            process_folder,
        )
        self._refusals: dict[int, str | None] = {}
        self._logged_kind: tuple[Any, ...] = ()
        self._logged_time = 0.0

    def step(self) -> bool:
        """Answer the next message; return whether there was one, and no error of the connection."""
        next_message = None
        try:
            next_message = self.connection.receive()
            if next_message is None:
                return False
            with self._working():
                start_time = time.monotonic()
                reply = self._reply(*next_message)
                # by the server's clock: by this machine's clock, the reply may have expired before it was made
                reply.metadata.created_at = next_message[0].metadata.created_at
                reply.metadata.ttl = next_message[0].metadata.ttl
                self._send(reply, time.monotonic() - start_time)
        except UNANSWERED_ERRORS as error:
            # the run may be over, or the message too old; the server asks again if it still needs a reply
            self._log_error(NO_MESSAGES if next_message is None else "a message was given up", error)
            return False
        return True

    def _log_error(self, problem: str, error: BaseException) -> None:
        """Log an error of the connection; one of its kind at most once in :data:`ERROR_LOG_SECONDS`."""
        # answers of one kind may differ, as by the time of day
        kind: tuple[Any, ...] = problem, type(error)
        response_text = ""
        if isinstance(error, httpx.HTTPStatusError):
            kind, response_text = (*kind, error.response.status_code), error.response.text
        if isinstance(error, RunNotRunningException):
            # Flower raises it for every answer 403
            response_text = "(HTTP 403: the run is over, or the server refuses the calls of this client)"
        text = f"{problem}: {to_one_line(f'{error!r} {response_text}')}"
        if kind != self._logged_kind or time.monotonic() - self._logged_time >= ERROR_LOG_SECONDS:
            self._logged_kind, self._logged_time = kind, time.monotonic()
            logger.info(text)

    def _reply(self, message: Message, object_tree: Any) -> Message:
        metadata, run_id = message.metadata, message.metadata.run_id
        logger.info(
            "message %s of run %d", to_one_line(f"{metadata.message_type} {metadata.group_id}", 100), run_id
        )
        if run_id not in self._refusals:
            if len(self._refusals) >= _MAX_RUNS:
                self._refusals.clear()
            self._refusals[run_id] = self.pinned.refusal(self.connection.get_run(run_id))
        refusal = self._refusals[run_id]
        if refusal is not None:
            return self._refuse(message, RefusedOrderError(refusal), ErrorCode.INVALID_FAB)
        try:
            full_message = self._fetch(message, object_tree)
        except UNANSWERED_ERRORS:
            raise
        except RefusedOrderError as error:
            return self._refuse(message, error, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
        except Exception as error:  # noqa: BLE001 - a message that cannot be read does not end the node
            return flower.make_error_reply(message, error, lambda: self.folder)
        try:
            # the content lacks the identifier by which the server knows the message
            full_message.metadata.__dict__["_message_id"] = metadata.message_id
            context = Context(run_id, self.connection.node, {"folder": str(self.folder)}, RecordDict(), {})
            return self.app(full_message, context)
        except Exception as error:  # noqa: BLE001 - such as a message of a type that the app does not answer
            return flower.make_error_reply(message, error, lambda: self.folder)

    def _refuse(self, message: Message, error: RefusedOrderError, code: int) -> Message:
        SiteAudit(self.folder / AUDIT_FILE).log_refusal(message.metadata.message_type, str(error))
        return flower.make_error_reply(message, error, lambda: self.folder, code)

    def _fetch(self, message: Message, object_tree: Any) -> Message:
        """Fetch the content of a message, stopping if it is too large; raises RefusedOrderError then."""
        run_id, lock = message.metadata.run_id, threading.Lock()
        bound = FetchBound(self._max_bytes(message.metadata.message_type), "fedlowrank join --max-download")
        # a message may name a piece many times, so only the allowed number of names is read
        pieces = itertools.islice(iterate_object_tree(object_tree), bound.pieces + 1)
        object_ids = [piece.object_id for piece in pieces]
        bound.expect(len(object_ids))

        def pull(name: str) -> bytes:
            check()
            content = self.connection.pull(run_id, name)
            with lock:
                bound.add(content)
            check()
            return content

        def check() -> None:
            if bound.problem:
                raise RefusedOrderError(f"a message of the server was not read to its end: {bound.problem}")

        check()
        # plus the time that a large payload takes at 1 MiB/s, because the server may still be storing it
        max_seconds = PIECE_SECONDS + bound.max_bytes / 2**20
        contents = pull_objects(list(dict.fromkeys(object_ids)), pull, max_time=max_seconds)
        self.connection.confirm(run_id, message.metadata.message_id)
        full_message = inflate_object_from_contents(object_tree.object_id, contents)
        if not isinstance(full_message, Message):
            raise TypeError(f"the server sent a {type(full_message).__name__} for a message")
        return full_message

    def _max_bytes(self, message_type: str) -> int:
        """Largest size in bytes of a message of a type; only orders have a payload."""
        return flower.load_runtime(str(self.folder)).max_download if message_type == flower.ORDER_TYPE else 0

    def _send(self, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            missing_ids, session = self.connection.send(reply, get_object_tree(reply), seconds)
            push = functools.partial(self.connection.push, reply.metadata.run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=missing_ids)
        logger.info("replied after %.1f s", seconds)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        (self.home / WORKING_FILE).touch()
        try:
            yield
        finally:
            (self.home / WORKING_FILE).unlink(missing_ok=True)


class TooLargeAnswerError(httpx.HTTPError):
    """The server's answer to a call exceeds its limit and was not read to its end."""


class _Counted(httpx.SyncByteStream):
    """The body of an answer, limited to a number of bytes."""

    def __init__(self, stream: httpx.SyncByteStream, max_bytes: int) -> None:
        self._stream, self._most = stream, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        byte_count = 0
        for chunk in self._stream:
            byte_count += len(chunk)
            if byte_count > self._most:
                raise TooLargeAnswerError(f"the server's answer has more than {self._most} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def limit_answers(client: httpx.Client) -> None:
    """Limit the bytes of each answer that are read into memory, refuse packed answers, and follow no redirect."""

    def limit(response: httpx.Response) -> None:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise TooLargeAnswerError(f"the server's answer is packed ({to_one_line(coding, 40)})")
        assert isinstance(response.stream, httpx.SyncByteStream)
        max_bytes = MAX_PIECE_BYTES if response.request.url.path.endswith("/pull-object") else MAX_CALL_BYTES
        response.stream = _Counted(response.stream, max_bytes)

    client.event_hooks = {"response": [limit]}
    client.headers["accept-encoding"] = "identity"
    client.follow_redirects = False


def _limit_all_answers() -> None:
    """Limit what the clients of Flower's API in this process read."""
    original_init = ProtobufClient.__init__

    def make_limited(self: ProtobufClient, *arguments: Any, **settings: Any) -> None:
        original_init(self, *arguments, **settings)
        limit_answers(self._client)

    ProtobufClient.__init__ = make_limited  # type: ignore[method-assign]  # replaced on purpose


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(0)


def main() -> None:
    """Connect to the server and answer its messages until terminated."""
    parser = argparse.ArgumentParser(description="the node of a client; `fedlowrank join` starts it")
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    parser.add_argument("--folder", type=Path, required=True, help="of the client")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--authority", type=Path, help="certificate that vouches for the server's")
    parser.add_argument("--key", type=Path, help="private key of the client")
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    logging.getLogger("fedlowrank.network").setLevel(logging.INFO)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _end)
    (args.home / WORKING_FILE).unlink(missing_ok=True)
    _limit_all_answers()
    pinned_app = PinnedApp.installed()
    keys = None
    if args.key is not None:
        keys = load_key_pair(args.key, os.environ.pop(PASSPHRASE_VARIABLE, ""))
        flower.sign_as(args.folder, MemberSigner(keys[0]))
    authority = None if args.authority is None else args.authority.read_bytes()
    with http_request_response(args.server, authority is None, authority, keys) as calls:
        node = Node(Connection(*calls), flower.client, pinned_app, args.folder, args.home)
        logger.info("SuperNode ID: %d", node.connection.node)
        last_message = time.monotonic()
        while True:
            if node.step():
                last_message = time.monotonic()
            else:
                time.sleep(choose_pause(time.monotonic() - last_message))


if __name__ == "__main__":
    main()
