"""The title of a method's class that states none."""

from __future__ import annotations

from typing import Any

from ..arguments.user_code import is_of_package


class InheritedTitle:
    """The attribute ``title`` of a class that states none: the title of its nearest base that does, and its own name.

    It is no text in the body of the class, and so no part of its code, whose digest a run keeps.

    Args:
        text: the title.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> str:
        return self._text


def inherit_title(cls: type[Any]) -> None:
    """Give a class outside this package that states no title one of its own, such as ``FedAvg (mine:Own)``.

    Such a class is no more the method that its base is. A class without a base that states a title gets none.
    """
    titles = (vars(base).get("title") for base in cls.__mro__)
    title = next((t for t in titles if t is not None and not isinstance(t, InheritedTitle)), None)
    if "title" in vars(cls) or is_of_package(cls) or not isinstance(title, str):
        return
    is_importable = cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__
    name = f"{cls.__module__}:{cls.__qualname__}" if is_importable else cls.__name__
    type.__setattr__(cls, "title", InheritedTitle(f"{title} ({name})"))
