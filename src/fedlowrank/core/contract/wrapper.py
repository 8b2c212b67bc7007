"""A method that wraps another one."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..arguments.user_code import is_of_package
from .method import AnyMethod, C, D, Method, S, U
from .task import Pass, Task

# bounds and keep_refusal belong to the wrapper's own fields
_DESCRIPTION = [
    name
    for name, kind in Method.__annotations__.items()
    if str(kind).startswith("ClassVar") and name not in ("bounds", "keep_refusal")
]


@dataclass(frozen=True)
class MethodWrapper(Method[S, C, D, U]):
    """A method that changes the messages between the clients and the server of another method.

    Passes, participants and the class variables that describe the method are those of the wrapped method.

    Attributes:
        inner: the wrapped method.
    """

    inner: AnyMethod = field(kw_only=True)

    title = "Wrapper"
    """Title of the class; an object of a class of this package has the title of its wrapped method instead."""

    def __post_init__(self) -> None:
        for name in _DESCRIPTION:
            if name != "title" or is_of_package(type(self)):
                object.__setattr__(self, name, getattr(self.inner, name))

    def passes(self) -> dict[str, Pass]:
        """See the base class."""
        return self.inner.local_passes()

    def remarks(self, task: Task) -> list[str]:
        """See the base class."""
        return self.inner.remarks(task)

    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        """See the base class."""
        return self.inner.participants(sampled, available)
