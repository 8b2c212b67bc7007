"""A server that sends one message to a node."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run, RunNotRunningException

from fedlowrank.network.deploy.node import Connection, PinnedApp

PINNED_APP = PinnedApp("fedlowrank/fedlowrank", "ab" * 32)


class OneMessageServer:
    """A server that sends one message and keeps what comes back."""

    def __init__(self, records: RecordDict, kind: str, run: Run, ahead: float = 0.0) -> None:
        metadata = Metadata(5, "", 1, 7, "", "round-1", time.time() + ahead, 60.0, kind)
        self.message: Message | None = Message(metadata=metadata, content=records)
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.tree = get_object_tree(self.message)
        self.objects = {i: o.deflate() for i, o in get_all_nested_objects(self.message).items()}
        self.run = run
        self.calls: list[str] = []
        self.reply: Any = None
        self.over = False

    def receive(self) -> Any:
        actual, self.message = self.message, None
        return None if actual is None else (actual, self.tree)

    def send(self, message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        assert seconds >= 0
        self.reply = message
        return set(get_all_nested_objects(message)), "session"

    def app(self, digest: str, run: int) -> Any:
        raise AssertionError("a node never fetches an app")

    def pull(self, run: int, name: str) -> bytes:
        self.calls.append("pull")
        if self.over:
            raise RunNotRunningException
        return self.objects[name]

    def connection(self) -> Connection:
        push = lambda run, session, name, content: self.calls.append("push")  # noqa: E731
        confirm = lambda run, message: self.calls.append("confirm")  # noqa: E731
        return Connection(
            7, self.receive, self.send, lambda run: self.run, self.app, self.pull, push, confirm
        )


def make_flower_run(app: str, digest: str) -> Run:
    made = Run.create_empty(5)
    made.fab_id, made.fab_hash = app, digest
    return made
