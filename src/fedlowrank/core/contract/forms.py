"""Forms of uploads in which clients may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class OneOf:
    """In the form of an upload: a part that has one of several forms.

    Args:
        forms: trees, which may hold further choices.
    """

    def __init__(self, *forms: Any) -> None:
        self.forms = forms


@dataclass(frozen=True)
class Lengths:
    """In the form of an upload: a part whose tensors have a common length that a client chooses.

    Attributes:
        form: a tree; every dimension of 0 is that length.
        most: the largest length; the smallest is 1.
    """

    form: Any
    most: int
