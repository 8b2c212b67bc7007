"""Roles of Sphinx in docstrings, such as ``:class:`Mean```, as plain code: an extension of griffe."""

from __future__ import annotations

from typing import Any

import griffe
from docstrings import remove_roles


class RemoveRoles(griffe.Extension):
    """Takes roles away from every docstring that is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was loaded."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = remove_roles(obj.docstring.value)
