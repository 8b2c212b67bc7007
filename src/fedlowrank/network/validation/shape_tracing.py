"""Shape tracing: finds the form of a client's upload by calling ``local_update`` without data.

The method's ``local_update`` gets a download of zeros and a trainer that trains nothing, and its result has
the form of the upload. If clients may send tensors of different shapes, a method states the form in
:attr:`fedlowrank.core.contract.update.Update.form`.
"""

from __future__ import annotations

from typing import Any

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, Task
from ...training.tracing import trace_upload
from .upload_forms import Template


def trace_template(method: AnyMethod, task: Task, info: ClientInfo, down: Any) -> Template:
    """Trace the template of a client's upload; only the form of the download is used, and errors are not caught."""
    # with zeros, nothing that a client once sent can influence the form, and equal forms have equal templates
    down = tree.zeros_like(down)
    upload, pass_names = trace_upload(method, task, info, down)
    form = method.describe_update(down, info, task).form
    return Template.of(upload if form is None else form, pass_names)
