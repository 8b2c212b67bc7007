"""Downloads of a round, computed once for all clients that get the same message."""

from __future__ import annotations

import dataclasses
from typing import Any

from .hook_results import check_tree
from .method import AnyMethod
from .task import ClientInfo

_FIELDS = frozenset(f.name for f in dataclasses.fields(ClientInfo))

MAX_MESSAGES = 64
"""Largest number of messages kept for further clients."""


class _ReadInfo(ClientInfo):
    """A client's info that records which of its fields are read."""

    def __getattribute__(self, name: str) -> Any:
        """Get a field or property, and record the name if it is a field."""
        if name in _FIELDS:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)


class Downloads:
    """The messages of one server state.

    ``download`` is a pure function of the state and of the client's info. Clients with equal values in the fields
    that it reads, such as the rank, therefore get one message, the same object.

    Args:
        method: method that makes the messages.
        server: state of the server.
    """

    def __init__(self, method: AnyMethod, server: Any) -> None:
        self._method, self._server = method, server
        self._known: dict[tuple[str, ...], dict[tuple[Any, ...], Any]] = {}

    def message_to(self, client: ClientInfo) -> Any:
        """Return the message to a client."""
        for names, messages in self._known.items():
            if (values := tuple(getattr(client, name) for name in names)) in messages:
                return messages[values]
        noted_info = _ReadInfo(**{name: getattr(client, name) for name in _FIELDS})
        vars(noted_info).pop("_read", None)
        message = check_tree(self._method, "download", self._method.download(self._server, noted_info))
        names = tuple(sorted(vars(noted_info).get("_read", ())))
        if not {"id", "name"} & set(names) and sum(map(len, self._known.values())) < MAX_MESSAGES:
            self._known.setdefault(names, {})[tuple(getattr(client, name) for name in names)] = message
        return message
