"""The form of an upload: its structure, its types and its shapes, and whether something is of that form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.method import Lengths, OneOf

_TEXT = 300
"""Characters of what a client sent that may stand in a message."""


@dataclass(frozen=True)
class Template:
    """What an upload has to look like; make it by :meth:`of`.

    Attributes:
        form: a tree with :class:`OneOf` and :class:`Lengths`, whose tensors have types and shapes but hold nothing.
        bytes: size of the largest upload of that form.
        header: how many of these may be other than tensor data.
        bools: booleans in it, which take more memory than bytes of a message.
        trained: names of the passes in which a client trains for it.
    """

    form: Any
    bytes: int
    header: int
    bools: int
    trained: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: Any, trained: tuple[str, ...] = ()) -> Template:
        """The template of a form as :meth:`fedlowrank.core.method.Method.upload_form` returns it."""
        held = erase_values(form)
        wordy = _largest(held, lambda t: (sum(1 for _ in tree.leaves(t)), tree.nbytes(t)))
        header = tree.encoded_size(wordy) - tree.nbytes(wordy)
        size = header + tree.nbytes(_largest(held, tree.nbytes))
        return cls(held, size, header, _bools(_largest(held, _bools)), trained)


def _bools(value: Any) -> int:
    return sum(t.numel() for _, t in tree.leaves(value) if t.dtype == torch.bool)


def erase_values(form: Any) -> Any:
    """The form with tensors of one element that is seen everywhere, so that it takes no memory."""
    if isinstance(form, OneOf):
        return OneOf(*(erase_values(f) for f in form.forms))
    if isinstance(form, Lengths):
        return Lengths(erase_values(form.form), form.most)
    if isinstance(form, Tensor):
        return torch.zeros((), dtype=form.dtype).expand(form.shape)
    return _map_children(form, erase_values)


def _largest(form: Any, size: Callable[[Any], Any]) -> Any:
    """The largest tree of that form."""
    if isinstance(form, OneOf):
        return max((_largest(f, size) for f in form.forms), key=size)
    if isinstance(form, Lengths):
        return tree.map(lambda t: t.new_zeros(()).expand([n or form.most for n in t.shape]), form.form)
    return form if isinstance(form, Tensor) else _map_children(form, lambda f: _largest(f, size))


def _map_children(form: Any, change: Callable[[Any], Any]) -> Any:
    children = tree._items(form, "")
    return form if children is None else tree._rebuild(form, [(k, change(v)) for k, v in children])


class MismatchError(Exception):
    """A part of an upload is not of its form.

    Args:
        path: of the part, a JSON pointer.
        expected: what it should be, in words.
        found: what it is.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(path, expected, found)
        self.path, self.expected, self.found = path, expected, found


class _Length:
    """The common length of the tensors of a :class:`Lengths`: that of the first, if it is allowed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: int | None = None

    def shape(self, form: Tensor, found: Tensor) -> list[int]:
        """The shape that a tensor must have; -1 where none is right."""
        out = list(form.shape)
        for axis, n in enumerate(out):
            if n == 0 and found.ndim == form.ndim:
                if self.found is None and 1 <= found.shape[axis] <= self.most:
                    self.found = found.shape[axis]
                out[axis] = -1 if self.found is None else self.found
        return out

    def text(self) -> str:
        """What stands for it in a message."""
        return f"1..{self.most}" if self.found is None else str(self.found)


def match_form(form: Any, found: Any, path: str = "", length: _Length | None = None) -> Any:
    """What was found, in the structure and the order of keys of its form.

    Args:
        form: of a :class:`Template`.
        found: a tree.
        path: where in the upload this is.
        length: what a dimension of 0 stands for.

    Raises:
        MismatchError: if it is of another form.
    """
    if isinstance(form, OneOf):
        return _match_any(form, found, path)
    if isinstance(form, Lengths):
        return match_form(form.form, found, path, _Length(form.most))
    if isinstance(form, Tensor):
        if not isinstance(found, Tensor) or found.dtype != form.dtype:
            raise MismatchError(path, kind(form, length), kind(found))
        if list(found.shape) != (list(form.shape) if length is None else length.shape(form, found)):
            raise MismatchError(path, kind(form, length), kind(found))
        return found
    if type(found) is not type(form):
        raise MismatchError(path, kind(form), kind(found))
    wanted = tree._items(form, path)
    if wanted is None:
        if isinstance(form, str) and found != form:
            raise MismatchError(path, repr(form), shorten(repr(found)))
        return found
    held = dict(tree._items(found, path) or ())
    if held.keys() != dict(wanted).keys():
        missing = [k for k, _ in wanted if k not in held]
        more = [k for k in held if k not in dict(wanted)]
        raise MismatchError(
            path, f"{kind(form)} of {len(wanted)} parts", f"one {_describe_keys(missing, more)}"
        )
    return tree._rebuild(form, [(k, match_form(f, held[k], tree.join(path, k), length)) for k, f in wanted])


def _match_any(form: OneOf, found: Any, path: str) -> Any:
    misfits = []
    for choice in form.forms:
        try:
            return match_form(choice, found, path)
        except MismatchError as error:
            misfits.append(error)
    first = misfits[0]
    raise MismatchError(
        first.path, f"{first.expected} (or one of {len(misfits) - 1} other forms)", first.found
    )


def kind(value: Any, length: _Length | None = None) -> str:
    """What a value is, in words, without its numbers."""
    if isinstance(value, Tensor):
        shape = [length.text() if length is not None and n == 0 else str(n) for n in value.shape]
        return shorten(f"{str(value.dtype).removeprefix('torch.')} [{', '.join(shape)}]")
    return "None" if value is None else f"a {type(value).__name__}"


def _describe_keys(missing: Sequence[str], more: Sequence[str]) -> str:
    found = [("without", missing), ("with", more)]
    return " and ".join(
        f"{word} {shorten(', '.join(map(repr, names[:4])))}" for word, names in found if names
    )


def shorten(text: str) -> str:
    """The text, cut off where it is long, and in one line: it may be a client's."""
    line = "".join(c if c.isprintable() else "?" for c in text[:_TEXT])
    return line if len(text) <= _TEXT else f"{line} … ({len(text)} characters)"
