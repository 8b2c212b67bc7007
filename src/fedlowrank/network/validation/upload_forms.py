"""The form of an upload: its structure, types and shapes, and how an upload is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.contract import Lengths, OneOf

_MAX_TEXT = 300
"""Characters of what a client sent that may stand in a message."""


@dataclass(frozen=True)
class Template:
    """The form that an upload must have; made by :meth:`of`.

    Attributes:
        form: a tree with :class:`OneOf` and :class:`Lengths`, whose tensors have types and shapes but no
            values.
        bytes: size of the largest upload of that form.
        header: bytes of it that are not tensor data.
        bools: number of booleans, which take more memory than bytes of a message.
        trained: names of the passes in which a client trains for it.
    """

    form: Any
    bytes: int
    header: int
    bools: int
    trained: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: Any, trained: tuple[str, ...] = ()) -> Template:
        """The template of a form (:attr:`fedlowrank.core.contract.update.Update.form`)."""
        empty = erase_values(form)
        largest_header = _make_largest(empty, lambda t: (sum(1 for _ in tree.leaves(t)), tree.nbytes(t)))
        header = tree.encoded_size(largest_header) - tree.nbytes(largest_header)
        size = header + tree.nbytes(_make_largest(empty, tree.nbytes))
        return cls(empty, size, header, _count_bools(_make_largest(empty, _count_bools)), trained)


def _count_bools(value: Any) -> int:
    return sum(t.numel() for _, t in tree.leaves(value) if t.dtype == torch.bool)


def erase_values(form: Any) -> Any:
    """Replace each tensor by an expanded one of a single element, which takes no memory."""
    if isinstance(form, OneOf):
        return OneOf(*(erase_values(f) for f in form.forms))
    if isinstance(form, Lengths):
        return Lengths(erase_values(form.form), form.most)
    if isinstance(form, Tensor):
        return torch.zeros((), dtype=form.dtype).expand(form.shape)
    return _map_children(form, erase_values)


def _make_largest(form: Any, size: Callable[[Any], Any]) -> Any:
    """The largest tree of that form."""
    if isinstance(form, OneOf):
        return max((_make_largest(f, size) for f in form.forms), key=size)
    if isinstance(form, Lengths):
        return tree.map_leaves(lambda t: t.new_zeros(()).expand([n or form.most for n in t.shape]), form.form)
    return form if isinstance(form, Tensor) else _map_children(form, lambda f: _make_largest(f, size))


def _map_children(form: Any, change: Callable[[Any], Any]) -> Any:
    children = tree.children(form)
    return form if children is None else tree.rebuild(form, [(k, change(v)) for k, v in children])


class MismatchError(Exception):
    """A part of an upload does not have its form.

    Args:
        path: of the part, a JSON pointer.
        expected: description of the form.
        found: description of the part.
    """

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(path, expected, found)
        self.path, self.expected, self.found = path, expected, found


class _Length:
    """The common length of the tensors of a :class:`Lengths`: that of the first, if it is allowed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found: int | None = None

    def shape(self, form: Tensor, tensor: Tensor) -> list[int]:
        """The shape that a tensor must have; -1 where no length is valid."""
        out = list(form.shape)
        for axis, n in enumerate(out):
            if n == 0 and tensor.ndim == form.ndim:
                if self.found is None and 1 <= tensor.shape[axis] <= self.most:
                    self.found = tensor.shape[axis]
                out[axis] = -1 if self.found is None else self.found
        return out

    def text(self) -> str:
        """The length, or its range, for a message."""
        return f"1..{self.most}" if self.found is None else str(self.found)


def decode_upload(data: bytes, template: Template) -> Any:
    """Decode an upload, its keys in the template's order; raises TreeError or MismatchError."""
    return match_form(template.form, tree.decode(data, template.bools))


def match_form(form: Any, value: Any, path: str = "", length: _Length | None = None) -> Any:
    """Return an upload in the structure and the key order of its form.

    Args:
        form: of a :class:`Template`.
        value: the upload, a tree.
        path: of this part of the upload.
        length: meaning of a dimension of 0.

    Raises:
        MismatchError: if the upload has another form.
    """
    if isinstance(form, OneOf):
        return _match_any(form, value, path)
    if isinstance(form, Lengths):
        return match_form(form.form, value, path, _Length(form.most))
    if isinstance(form, Tensor):
        if not isinstance(value, Tensor) or value.dtype != form.dtype:
            raise MismatchError(path, describe_value(form, length), describe_value(value))
        if list(value.shape) != (list(form.shape) if length is None else length.shape(form, value)):
            raise MismatchError(path, describe_value(form, length), describe_value(value))
        return value
    if type(value) is not type(form):
        raise MismatchError(path, describe_value(form), describe_value(value))
    wanted = tree.children(form, path)
    if wanted is None:
        if isinstance(form, str) and value != form:
            raise MismatchError(path, repr(form), shorten_text(repr(value)))
        return value
    parts = dict(tree.children(value, path) or ())
    if parts.keys() != dict(wanted).keys():
        missing = [k for k, _ in wanted if k not in parts]
        superfluous = [k for k in parts if k not in dict(wanted)]
        raise MismatchError(
            path,
            f"{describe_value(form)} of {len(wanted)} parts",
            f"one {_describe_keys(missing, superfluous)}",
        )
    return tree.rebuild(
        form, [(k, match_form(f, parts[k], tree.join_path(path, k), length)) for k, f in wanted]
    )


def _match_any(form: OneOf, value: Any, path: str) -> Any:
    misfits = []
    for choice in form.forms:
        try:
            return match_form(choice, value, path)
        except MismatchError as error:
            misfits.append(error)
    first = misfits[0]
    raise MismatchError(
        first.path, f"{first.expected} (or one of {len(misfits) - 1} other forms)", first.found
    )


def describe_value(value: Any, length: _Length | None = None) -> str:
    """Description of a value without its numbers."""
    if isinstance(value, Tensor):
        shape = [length.text() if length is not None and n == 0 else str(n) for n in value.shape]
        return shorten_text(f"{str(value.dtype).removeprefix('torch.')} [{', '.join(shape)}]")
    return "None" if value is None else f"a {type(value).__name__}"


def _describe_keys(missing: Sequence[str], superfluous: Sequence[str]) -> str:
    groups = [("without", missing), ("with", superfluous)]
    return " and ".join(
        f"{word} {shorten_text(', '.join(map(repr, names[:4])))}" for word, names in groups if names
    )


def shorten_text(text: str) -> str:
    """The text in one line, cut off where it is long: it may be a client's."""
    line = "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT])
    return line if len(text) <= _MAX_TEXT else f"{line} … ({len(text)} characters)"
