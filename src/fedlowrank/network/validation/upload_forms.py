"""The form of an upload: its structure, dtypes and shapes, and how an upload is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.contract import Lengths, OneOf

_MAX_TEXT = 300
"""Largest number of characters of a client's text in a message."""


@dataclass(frozen=True)
class Template:
    """The form that an upload must have; made by :meth:`of`.

    Attributes:
        form: tree with :class:`OneOf` and :class:`Lengths`, whose tensors have dtypes and shapes but no
            values.
        bytes: size in bytes of the largest upload of that form.
        header: number of bytes of that upload that are not tensor data.
        bools: number of booleans, which take more memory than they take bytes in a message.
        trained: names of the passes that train for the upload.
    """

    form: Any
    bytes: int
    header: int
    bools: int
    trained: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: Any, pass_names: tuple[str, ...] = ()) -> Template:
        """Make the template of a form (:attr:`fedlowrank.core.contract.update.Update.form`)."""
        empty_form = erase_values(form)
        largest_header = _make_largest(empty_form, lambda t: (sum(1 for _ in tree.leaves(t)), tree.nbytes(t)))
        header = tree.encoded_size(largest_header) - tree.nbytes(largest_header)
        size = header + tree.nbytes(_make_largest(empty_form, tree.nbytes))
        return cls(
            empty_form, size, header, _count_bools(_make_largest(empty_form, _count_bools)), pass_names
        )


def _count_bools(value: Any) -> int:
    return sum(t.numel() for _, t in tree.leaves(value) if t.dtype == torch.bool)


def erase_values(form: Any) -> Any:
    """Replace each tensor by an expanded one of a single element, which takes no memory."""
    if isinstance(form, OneOf):
        return OneOf(*(erase_values(f) for f in form.forms))
    if isinstance(form, Lengths):
        return Lengths(erase_values(form.form), form.max_length)
    if isinstance(form, Tensor):
        return torch.zeros((), dtype=form.dtype).expand(form.shape)
    return _map_children(form, erase_values)


def _make_largest(form: Any, compute_size: Callable[[Any], Any]) -> Any:
    """Make the largest tree of a form."""
    if isinstance(form, OneOf):
        return max((_make_largest(f, compute_size) for f in form.forms), key=compute_size)
    if isinstance(form, Lengths):
        return tree.map_leaves(
            lambda t: t.new_zeros(()).expand([n or form.max_length for n in t.shape]), form.form
        )
    return form if isinstance(form, Tensor) else _map_children(form, lambda f: _make_largest(f, compute_size))


def _map_children(form: Any, function: Callable[[Any], Any]) -> Any:
    children = tree.children(form)
    return form if children is None else tree.rebuild(form, [(k, function(v)) for k, v in children])


class MismatchError(Exception):
    """A part of an upload does not have its form.

    Args:
        path: path of the part, a JSON pointer.
        expected: description of the form.
        actual: description of the part.
    """

    def __init__(self, path: str, expected: str, actual: str) -> None:
        super().__init__(path, expected, actual)
        self.path, self.expected, self.actual = path, expected, actual


class _Length:
    """The common length of the tensors of a :class:`Lengths`: that of the first, if it is allowed."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.found: int | None = None

    def shape(self, form: Tensor, tensor: Tensor) -> list[int]:
        """The shape that a tensor must have; -1 if no length is valid."""
        sizes = list(form.shape)
        for axis, n in enumerate(sizes):
            if n == 0 and tensor.ndim == form.ndim:
                if self.found is None and 1 <= tensor.shape[axis] <= self.max_length:
                    self.found = tensor.shape[axis]
                sizes[axis] = -1 if self.found is None else self.found
        return sizes

    def text(self) -> str:
        """Describe the length, or its range, for a message."""
        return f"1..{self.max_length}" if self.found is None else str(self.found)


def decode_upload(data: bytes, template: Template) -> Any:
    """Decode an upload, with keys in the template's order; raises TreeError or MismatchError."""
    return match_form(template.form, tree.decode(data, template.bools))


def match_form(form: Any, value: Any, path: str = "", length: _Length | None = None) -> Any:
    """Return an upload in the structure and the key order of its form.

    Args:
        form: form from a :class:`Template`.
        value: upload as a tree.
        path: path of this part of the upload.
        length: length that a dimension of 0 in the form stands for.

    Raises:
        MismatchError: if the upload has another form.
    """
    if isinstance(form, OneOf):
        return _match_any(form, value, path)
    if isinstance(form, Lengths):
        return match_form(form.form, value, path, _Length(form.max_length))
    if isinstance(form, Tensor):
        if not isinstance(value, Tensor) or value.dtype != form.dtype:
            raise MismatchError(path, describe_value(form, length), describe_value(value))
        if list(value.shape) != (list(form.shape) if length is None else length.shape(form, value)):
            raise MismatchError(path, describe_value(form, length), describe_value(value))
        return value
    if type(value) is not type(form):
        raise MismatchError(path, describe_value(form), describe_value(value))
    expected_children = tree.children(form, path)
    if expected_children is None:
        if isinstance(form, str) and value != form:
            raise MismatchError(path, repr(form), shorten_text(repr(value)))
        return value
    value_children = dict(tree.children(value, path) or ())
    if value_children.keys() != dict(expected_children).keys():
        missing_keys = [k for k, _ in expected_children if k not in value_children]
        extra_keys = [k for k in value_children if k not in dict(expected_children)]
        raise MismatchError(
            path,
            f"{describe_value(form)} of {len(expected_children)} parts",
            f"one {_describe_keys(missing_keys, extra_keys)}",
        )
    return tree.rebuild(
        form,
        [
            (k, match_form(f, value_children[k], tree.join_path(path, k), length))
            for k, f in expected_children
        ],
    )


def _match_any(form: OneOf, value: Any, path: str) -> Any:
    errors = []
    for choice in form.forms:
        try:
            return match_form(choice, value, path)
        except MismatchError as error:
            errors.append(error)
    first_error = errors[0]
    raise MismatchError(
        first_error.path,
        f"{first_error.expected} (or one of {len(errors) - 1} other forms)",
        first_error.actual,
    )


def describe_value(value: Any, length: _Length | None = None) -> str:
    """Describe a value without its numbers."""
    if isinstance(value, Tensor):
        shape = [length.text() if length is not None and n == 0 else str(n) for n in value.shape]
        return shorten_text(f"{str(value.dtype).removeprefix('torch.')} [{', '.join(shape)}]")
    return "None" if value is None else f"a {type(value).__name__}"


def _describe_keys(missing_keys: Sequence[str], extra_keys: Sequence[str]) -> str:
    groups = [("without", missing_keys), ("with", extra_keys)]
    return " and ".join(
        f"{word} {shorten_text(', '.join(map(repr, names[:4])))}" for word, names in groups if names
    )


def shorten_text(text: str) -> str:
    """Shorten a text to one line of limited length, because it may be a client's."""
    line = "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT])
    return line if len(text) <= _MAX_TEXT else f"{line} … ({len(text)} characters)"
