"""The client's update in an upload, and the forms that an upload may have, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

NO_UPDATE = None
"""Placeholder for a part of a reference: that part of the upload is no update. It is neither clipped nor compressed, and it
gets no noise."""

ZERO_REFERENCE = 0.0
"""Placeholder for a part of a reference: that part of the upload is itself the update."""


@dataclass(frozen=True)
class Update:
    """The update in an upload: the reference that it is relative to, its scale, and its possible forms.

    The update is the upload minus its reference. This difference is clipped, compressed, compared by robust rules and
    masked by noise.

    Attributes:
        reference: tree that the upload is relative to, such as the download. It has the form of the upload; dicts may
            replace its classes, and :data:`NO_UPDATE` or :data:`ZERO_REFERENCE` may replace a part. A part that the
            reference lacks beside other parts is itself the update.
        scale: s of the products B A of factors in the upload; the effective update is s(B A - B₀ A₀).
        form: types and shapes that an upload may have, with :class:`OneOf` and :class:`Lengths` where clients differ;
            the values are ignored. None for the form that ``local_update`` returns if training changes every
            parameter. A server over a network validates uploads against it.
    """

    reference: Any
    scale: float = 1.0
    form: Any = None


class OneOf:
    """A part of an upload's form that has one of several forms.

    Args:
        forms: possible forms, trees that may hold further choices.
    """

    def __init__(self, *forms: Any) -> None:
        self.forms = forms


@dataclass(frozen=True)
class Lengths:
    """A part of an upload's form whose tensors have a common length that a client chooses.

    Attributes:
        form: tree in which every dimension of 0 stands for that length.
        max_length: largest length that is allowed; the smallest is 1.
    """

    form: Any
    max_length: int


@runtime_checkable
class KeepsSumOfUploads(Protocol):
    """A method whose client and server each add up what the client sends, such as the control variates of SCAFFOLD.

    An upload may be clipped, masked by noise or compressed before the server receives it. The client's state is
    therefore recomputed from the upload as the server receives it, so that both sides add the same values.
    """

    def follow_upload(self, before: Any, after: Any, down: Any, upload: Any, view: Any) -> Any:
        """Return the next state of a client, given the upload as the server receives it.

        Args:
            before: state of the client before local training.
            after: state of the client after local training.
            down: download that the client received.
            upload: upload of the client, decoded; with error feedback the upload before compression, since what
                compression loses is sent later.
            view: view of the client.
        """
        ...
