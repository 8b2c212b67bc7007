"""What in an upload is the client's update, and the forms that an upload may have, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

NO_UPDATE = None
"""In the place of a part of a reference: that part of the upload is no update. It is neither clipped nor compressed, and no
noise hides it."""

ZERO_REFERENCE = 0.0
"""In the place of a part of a reference: that part of the upload is itself the update."""


@dataclass(frozen=True)
class Update:
    """The update in an upload: relative to what, at which scale, and in which forms.

    The update is the upload minus its reference. That difference is clipped, compressed, compared by robust rules
    and hidden by noise.

    Attributes:
        reference: what the upload is relative to, such as the download. It has the form of the upload; dicts may
            stand for its classes, and :data:`NO_UPDATE` or :data:`ZERO_REFERENCE` for a part. A part whose place has
            other parts is itself the update.
        scale: s of the products B A of factors in the upload; the effective update is s(B A - B₀ A₀).
        form: types and shapes that an upload may have, with :class:`OneOf` and :class:`Lengths`
            where clients differ; values mean nothing. None for the form that
            ``local_update`` returns if training changes every parameter. A server over a network validates uploads
            by it.
    """

    reference: Any
    scale: float = 1.0
    form: Any = None


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
        max_length: the largest length; the smallest is 1.
    """

    form: Any
    max_length: int


@runtime_checkable
class KeepsSumOfUploads(Protocol):
    """A method whose client and server each add up what the client sends, such as the control variates of SCAFFOLD.

    An upload may be clipped, hidden by noise or compressed on its way. So that both sides add the same, the client's state
    is made once more of the upload as the server gets it.
    """

    def follow_upload(self, before: Any, after: Any, down: Any, upload: Any, view: Any) -> Any:
        """The next state of a client, given the upload as the server gets it.

        Args:
            before: state of the client before local training.
            after: its state after local training.
            down: what it was sent.
            upload: what it sends back, decoded; with error feedback before it is compressed, since what compression
                loses is sent later.
            view: of the client.
        """
        ...
