"""Titles of method classes that state none."""

from __future__ import annotations

from typing import Any

from ..arguments.user_code import is_of_package


class InheritedTitle:
    """The attribute ``title`` of a class that states none: the title of its nearest base that states one, and its own name.

    It is not stored as text in the body of the class, so the digest of the class's code that a run keeps does not
    include it.

    Args:
        text: text of the title.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> str:
        return self._text


def inherit_title(cls: type[Any]) -> None:
    """Give a class outside this package that states no title one of its own, such as ``FedAvg (mine:Own)``.

    Such a class is another method than its base. A class without a base that states a title gets none.
    """
    titles = (vars(base).get("title") for base in cls.__mro__)
    title = next((t for t in titles if t is not None and not isinstance(t, InheritedTitle)), None)
    if "title" in vars(cls) or is_of_package(cls) or not isinstance(title, str):
        return
    is_importable = cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__
    name = f"{cls.__module__}:{cls.__qualname__}" if is_importable else cls.__name__
    type.__setattr__(cls, "title", InheritedTitle(f"{title} ({name})"))
