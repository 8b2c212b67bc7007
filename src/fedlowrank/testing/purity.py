"""Check that each function of a method gives the same result when it is called again, and does not change its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core import tree
from ..core.contract import (
    ClientInfo,
    ClientModel,
    ClientView,
    Each,
    Mean,
    Pass,
    ServerView,
    Sum,
    Task,
    Update,
)
from ..core.contract.wrapper import MethodWrapper
from ..core.errors import FedlowrankError
from ..core.key import generator_states


class ImpureError(FedlowrankError):
    """A function of a method changes an argument, or gives another result when it is called again."""


_COMPARED_ARGUMENTS = ("server", "state", "down", "upload", "total", "sampled", "available")
"""Arguments that a hook must leave as they are."""


@dataclass(frozen=True)
class CalledTwice(MethodWrapper[Any, Any, Any, Any]):
    """A wrapper of a method that calls each function twice and compares the results and the arguments."""

    def passes(self) -> dict[str, Pass]:
        """See the base class."""
        self._twice("passes")
        return super().passes()

    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        """See the base class."""
        chosen: list[int] = self._twice("participants", sampled=sampled, available=available)
        return chosen

    def server_init(self, task: Task) -> Any:
        """See the base class."""
        return self._twice("server_init", task=task)

    def client_init(self, client: ClientInfo, task: Task) -> Any:
        """See the base class."""
        return self._twice("client_init", client=client, task=task)

    def download(self, server: Any, client: ClientInfo) -> Any:
        """See the base class."""
        return self._twice("download", server=server, client=client)

    def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
        """See the base class."""
        result: tuple[Any, Any] = self._twice("local_update", state=state, down=down, view=view)
        return result

    def contribution(self, server: Any, upload: Any, client: ClientInfo) -> Any:
        """See the base class."""
        return self._twice("contribution", server=server, upload=upload, client=client)

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        """See the base class."""
        return self._twice("server_update", server=server, total=total, view=view)

    def describe_update(self, down: Any, client: ClientInfo, task: Task) -> Update:
        """See the base class."""
        update: Update = self._twice("describe_update", down=down, client=client, task=task)
        return update

    def client_model(self, state: Any, down: Any, view: ClientView) -> ClientModel:
        """See the base class."""
        client_model: ClientModel = self._twice("client_model", state=state, down=down, view=view)
        return client_model

    def server_model(self, server: Any, state: Any, view: ClientView) -> Any:
        """See the base class."""
        return self._twice("server_model", server=server, state=state, view=view)

    def server_metrics(self, server: Any) -> Any:
        """See the base class."""
        return self._twice("server_metrics", server=server)

    def _twice(self, hook: str, **arguments: Any) -> Any:
        trees = {n: a for n, a in arguments.items() if n in _COMPARED_ARGUMENTS}
        contents = {n: _content(a) for n, a in trees.items()}
        call = getattr(self.inner, hook)
        states = generator_states()
        result = call(*arguments.values())
        first_content = _content(result)
        second_content = _content(call(*arguments.values()))
        for name, content_before in contents.items():
            if _content(trees[name]) != content_before:
                raise ImpureError(
                    f"{hook} changes its input in place: its argument {name!r}. Return a new tree"
                )
        if first_content != second_content:
            raise ImpureError(
                f"{hook} gives another result when it is called again with the same arguments. It may keep nothing in "
                f"itself, and {_describe_randomness(arguments)}"
            )
        if generator_states() != states:
            raise ImpureError(
                f"{hook} draws from a global generator of torch, Python or NumPy, or seeds it. It may keep nothing in itself, "
                f"and {_describe_randomness(arguments)}"
            )
        return result


def _describe_randomness(arguments: Mapping[str, Any]) -> str:
    """Describe from which key a hook with these arguments may draw random numbers."""
    if "view" in arguments:
        return "draw random numbers from view.key alone"
    if "task" in arguments:
        key = "task.key / client.id" if "client" in arguments else "task.key"
        return f"draw random numbers from {key} alone"
    if "sampled" in arguments:
        return "it has no key to draw random numbers from: sampled is already drawn at random"
    if not arguments:
        return "it may draw no random numbers"
    return (
        "it has no key to draw random numbers from. Draw them in server_init or server_update and keep them in the server's "
        "state, or in local_update"
    )


def _content(value: Any) -> Any:
    """The content of an argument or a result that is compared."""
    if isinstance(value, ClientModel):
        series = {name: predictor for name, predictor in value.series.items() if not callable(predictor)}
        return _content([dict(value.whole()), series, value.routes])
    if isinstance(value, Update):
        return _content(value.reference), value.scale
    if isinstance(value, (Mean, Sum, Each)):
        return type(value), _content(value.value), getattr(value, "weight", None)
    if isinstance(value, dict):
        return [(key, _content(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_content(item) for item in value]
    try:
        return tree.encode(value)
    except tree.TreeError:
        return repr(value)
