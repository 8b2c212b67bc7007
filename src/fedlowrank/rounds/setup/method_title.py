"""How a method is called where people read it: runs, reports and pictures."""

from __future__ import annotations

from ...core.contract import AnyMethod
from ..stored_settings import unwrap


def class_title(cls: type[AnyMethod]) -> str:
    """The title of a method's class; of a user's own class that sets none, that of its base and its name.

    Such a class is no more the method that its base is: ``FedAvg (mine:Own)``.
    """
    if "title" in vars(cls) or cls.__module__.partition(".")[0] == "fedlowrank":
        return cls.title
    is_importable = cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__
    name = f"{cls.__module__}:{cls.__qualname__}" if is_importable else cls.__name__
    return f"{cls.title} ({name})"


def method_title(method: AnyMethod) -> str:
    """The title of a method, without what its updates and statistics are wrapped in."""
    return class_title(type(unwrap(method)))
