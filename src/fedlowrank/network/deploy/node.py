"""A client's node: pulls messages from the server and answers each by the installed fedlowrank.

Flower's own SuperNode unpacks the app that the server names and runs its code. This program speaks the same
protocol, but never fetches an app. It hands a message to :data:`..flower.client` of the installed package, and
only if the message belongs to the app that fedlowrank itself submits (same identifier, same SHA-256 of the
packed app). It answers any other message with an error and logs it.

One process answers all messages, so PyTorch is imported once. :class:`.processes.SuperNode` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message, RecordDict
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
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from ...core.errors import ConfigError
from .. import flower
from ..messages import plain
from .flower_app import write_own_app
from .processes import WORKING

logger = logging.getLogger("fedlowrank.network.deploy.node")

PAUSE = 0.5
"""Seconds between two looks for a message."""


class Connection(NamedTuple):
    """Calls to the server, as Flower's connection gives them.

    Attributes:
        node: number of this node at the server.
        receive: the next message without its content, and the tree of its objects; None if there is none.
        send: announces a reply; returns the objects that the server lacks, and a session to push them by.
        get_run: the server's description of a run.
        get_app: the packed app of a run; never called.
        pull: an object of a message.
        push: an object of a reply.
        confirm: reports that all objects of a message have arrived.
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
    """The one app whose messages are answered.

    Attributes:
        name: publisher and name.
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
        """Why messages of a run are refused, or None if they are answered."""
        if (run.fab_id, run.fab_hash) == self:
            return None
        offered = plain(f"{run.fab_id} with the digest {run.fab_hash}", 200)
        return (
            f"this client answers messages of the app {self.name} with the digest {self.digest} only, not "
            f"of {offered}. If the server is a `fedlowrank serve`, install the same releases of fedlowrank "
            "and Flower on both."
        )


class Node:
    """Answers the messages of a server.

    Args:
        connection: to the server.
        app: answers a message; it belongs to the installed package.
        pinned: the app whose messages are answered.
        folder: of the client.
        home: where the file :data:`.processes.WORKING` lies.
    """

    def __init__(
        self, connection: Connection, app: ClientApp, pinned: PinnedApp, folder: Path, home: Path
    ) -> None:
        self.connection, self.app, self.pinned, self.folder, self.home = connection, app, pinned, folder, home
        self._refusals: dict[int, str | None] = {}

    def step(self) -> bool:
        """Answer the next message; whether there was one."""
        try:
            received = self.connection.receive()
            if received is None:
                return False
            with self._working():
                began = time.monotonic()
                reply = self._reply(*received)
                self._send(reply, time.monotonic() - began)
        except (RunNotRunningException, httpx.HTTPError, ObjectPullError, ObjectPushError) as error:
            # the run may be over, or the message too old; the server asks again for what it still needs
            logger.info("a message was given up: %r", error)
        return True

    def _reply(self, message: Message, objects: Any) -> Message:
        metadata, run = message.metadata, message.metadata.run_id
        logger.info("message %s %s of run %d", metadata.message_type, metadata.group_id, run)
        if run not in self._refusals:
            self._refusals[run] = self.pinned.refusal(self.connection.get_run(run))
        refusal = self._refusals[run]
        if refusal is not None:
            logger.info("refused: %s", refusal)
            return Message(Error(ErrorCode.INVALID_FAB, refusal), reply_to=message)
        wanted = [tree.object_id for tree in iterate_object_tree(objects)]
        contents = pull_objects(wanted, functools.partial(self.connection.pull, run))
        self.connection.confirm(run, metadata.message_id)
        whole = inflate_object_from_contents(objects.object_id, contents)
        if not isinstance(whole, Message):
            raise TypeError(f"the server sent a {type(whole).__name__} for a message")
        # the content does not say by which identifier the server knows it
        whole.metadata.__dict__["_message_id"] = metadata.message_id
        node: dict[str, Any] = {"folder": str(self.folder)}
        context = Context(run, self.connection.node, node, RecordDict(), {})
        try:
            return self.app(whole, context)
        except Exception as error:
            reason = plain(f"{type(error).__name__}: {error}")
            logger.exception("failed: %s", reason)
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=whole)

    def _send(self, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            wanted, session = self.connection.send(reply, get_object_tree(reply), seconds)
            push = functools.partial(self.connection.push, reply.metadata.run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted)
        logger.info("replied after %.1f s", seconds)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        (self.home / WORKING).touch()
        try:
            yield
        finally:
            (self.home / WORKING).unlink(missing_ok=True)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(0)


def _private_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no private key that can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is a key of another kind; make keys by `fedlowrank keys`")
    return key, key.public_key()


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
    logger.setLevel(logging.INFO)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, _end)
    (args.home / WORKING).unlink(missing_ok=True)
    pinned = PinnedApp.installed()
    keys = None if args.key is None else _private_key(args.key)
    authority = None if args.authority is None else args.authority.read_bytes()
    with http_request_response(args.server, authority is None, authority, keys) as calls:
        node = Node(Connection(*calls), flower.client, pinned, args.folder, args.home)
        logger.info("SuperNode ID: %d", node.connection.node)
        while True:
            if not node.step():
                time.sleep(PAUSE)


if __name__ == "__main__":
    main()
