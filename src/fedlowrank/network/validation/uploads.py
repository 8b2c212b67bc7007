"""Two-stage validation of uploads.

:func:`inspect_upload` accepts an upload that has the form that the method declares
(:func:`.shape_tracing.trace_template`), is no larger than that, and is finite. Faults that no form expresses, such
as a class that does not exist, appear when the server computes with the upload: such a reply is refused, and the round
continues without it. A client with too many refused replies is put on the :class:`Blocklist`.

Plausible but wrong numbers pass both stages. Their effect is bounded by the norm of an update (:mod:`.norms`)
and by the number of examples by which a reply is weighted (``examples_ratio``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config.sections.network_section import Limits
from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, Contribution, ServerView, Task
from ...core.contract.contribution import Aggregator, fault_of
from ...core.contract.hook_results import NonFiniteResultError, check_server_state
from ...core.errors import FedlowrankError
from ...training.hook_calls import seed_for_hook
from .norms import difference_norm, iterate_floats
from .shape_tracing import trace_template
from .upload_forms import MismatchError, Template, decode_upload, shorten_text

FAULT_TYPES = (
    RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
    FedlowrankError,
)  # fmt: skip
"""Exceptions that a method may raise on unforeseen numbers."""

SLACK_BYTES = 2**16
"""Bytes that an upload or its header may have beyond twice the expected size, for other library versions."""

_MAX_TEMPLATES = 256
"""Number of templates in the cache; a method that sends missed updates has one for each number of missed rounds."""


class RefusedReplyError(FedlowrankError):
    """A client's reply or registration was refused; nothing of it is used.

    Args:
        client_id: identifier of the client.
        reason: description of what is wrong.
        path: path of the fault, a JSON pointer; empty for the whole reply.
        counts: whether the refusal counts towards the blocklist; not if training of an honest client may diverge.
        not_finite: whether the reply holds a NaN or an infinity.
    """

    def __init__(
        self, client_id: int, reason: str, *, path: str = "", counts: bool = True, not_finite: bool = False
    ) -> None:
        location = f" at {path}" if path else ""
        super().__init__(f"the reply of client {client_id} was refused{location}: {reason}")
        self.client = client_id
        self.path = path
        self.reason = reason
        self.counts = counts
        self.not_finite = not_finite


class Templates:
    """A cache of :func:`trace_template` for clients of the same kind and downloads of the same form."""

    def __init__(self, method: AnyMethod, task: Task) -> None:
        self.method, self.task = method, task
        self._known: dict[tuple[Any, ...], Template] = {}

    def of(self, info: ClientInfo, down: Any) -> Template:
        """The template of a client's next upload, after a download.

        Raises:
            RefusedReplyError: if the method fails on the download. Before the first round that is an error in
                the method or its settings; later this client's uploads may be the cause.
        """
        key = (info.architecture, info.rank, info.cluster, tree.signature(down))
        template = self._known.pop(key, None)
        if template is None:
            try:
                template = trace_template(self.method, self.task, info, down)
            except FAULT_TYPES as error:
                reason = (
                    f"{self.method.title} cannot work with what it would be sent: {shorten_text(repr(error))}"
                )
                raise RefusedReplyError(info.id, reason) from error
        # the most recently used templates are at the end
        self._known[key] = template
        if len(self._known) > _MAX_TEMPLATES:
            del self._known[next(iter(self._known))]
        return template


def inspect_upload(data: bytes, template: Template, client: ClientInfo, limits: Limits) -> Any:
    """Decode and validate an upload: its size, its form, and that it is finite.

    Returns:
        A tree with the template's structure, dtypes and shapes, and keys in the template's order.

    Raises:
        RefusedReplyError: if the upload is invalid.
    """
    # sizes are checked first, because a header of many small parts takes many times its size in memory when it is read
    max_bytes, header_bytes = max_upload_bytes(template, limits), int.from_bytes(data[:8], "little")
    if len(data) > max_bytes:
        reason = f"it has {len(data)} bytes; at most {max_bytes} are taken (limits.max_bytes)"
        raise RefusedReplyError(client.id, reason)
    if header_bytes > 2 * template.header + SLACK_BYTES:
        reason = f"its header has {header_bytes} bytes, where about {template.header} are expected"
        raise RefusedReplyError(client.id, reason)
    try:
        upload = decode_upload(data, template)
    except tree.TreeError as error:
        raise RefusedReplyError(client.id, shorten_text(str(error))) from error
    except MismatchError as error:
        reason = f"expected {error.expected}, found {error.actual}"
        raise RefusedReplyError(client.id, reason, path=error.path) from error
    total = 0.0
    for path, number in iterate_floats(upload):
        total = math.hypot(total, difference_norm(number))
        if not math.isfinite(total):
            raise RefusedReplyError(client.id, "it holds a NaN or an infinity", path=path, not_finite=True)
    if limits.max_norm is not None and total > limits.max_norm:
        reason = f"its norm is {total:.4g}, above limits.max_norm = {limits.max_norm:.4g}"
        raise RefusedReplyError(client.id, reason, counts=False)
    return upload


def max_upload_bytes(template: Template, limits: Limits) -> int:
    """Largest size of an upload in bytes."""
    return 2 * template.bytes + SLACK_BYTES if limits.max_bytes is None else limits.max_bytes


def decode_checked(
    decode: Callable[[Any, ClientInfo], Any], upload: Any, client: ClientInfo, title: str
) -> Any:
    """Decode an upload with the method; raises RefusedReplyError if that fails."""
    try:
        return decode(upload, client)
    except FAULT_TYPES as error:
        reason = shorten_text(f"{title} cannot decode it: {type(error).__name__}: {error}")
        raise RefusedReplyError(client.id, reason) from error


def make_contribution(method: AnyMethod, server: Any, upload: Any, client: ClientInfo) -> Contribution:
    """Compute the contribution of an upload; raises RefusedReplyError if the method fails or it is not finite."""
    try:
        contribution = method.contribution(server, upload, client)
        fault = fault_of(contribution)
    except FAULT_TYPES as error:
        raise RefusedReplyError(client.id, _describe_fault(method, client, error)) from error
    if fault is not None:
        raise RefusedReplyError(client.id, f"{method.title} cannot use what it contributes: {fault}")
    return contribution


def update_server(method: AnyMethod, server: Any, total: Any, view: ServerView) -> Any:
    """Compute the server's next state.

    Raises:
        FedlowrankError: if the state is not finite.
        Exception: if the method raises one of :data:`FAULT_TYPES`.
    """
    try:
        with seed_for_hook(method, "server_update", view.key):
            new_state = check_server_state(
                method, server, method.server_update(server, total, view), view.round
            )
    except NonFiniteResultError as error:
        raise _make_not_finite_error(method, view, error.path) from error
    for path, number in iterate_floats(new_state):
        if not math.isfinite(difference_norm(number)):
            raise _make_not_finite_error(method, view, path)
    return new_state


def _make_not_finite_error(method: AnyMethod, view: ServerView, path: str) -> FedlowrankError:
    return FedlowrankError(
        f"{method.title}, round {view.round + 1}: the server's new state would hold a NaN or an infinity at {path or 'its top'}. "
        "Lower the learning rate, clip the gradient (optimizer.clip), or set limits.max_norm."
    )


def update_without_faulty(
    method: AnyMethod,
    server: Any,
    compute_contribution: Callable[[ClientInfo], Any],
    view: ServerView,
    make_aggregator: Callable[[Sequence[ClientInfo]], Aggregator],
) -> tuple[Any, dict[int, str]]:
    """Compute the server's next state without the replies on which the update fails alone.

    Args:
        method: method whose update failed on the total of all contributions.
        server: state of the server.
        compute_contribution: function that computes a client's contribution again.
        view: view of the round, with the clients that replied.
        make_aggregator: function that makes the aggregator for the contributions of some clients.

    Returns:
        The new state (the old one if no reply is left), and the reason for every client that was left out, by client.

    Raises:
        Exception: as in :func:`update_server`, if no single reply is the cause, or the others fail together.
    """

    def update(clients: Sequence[ClientInfo]) -> Any:
        aggregator = make_aggregator(clients)
        for client in clients:
            aggregator.add(client.id, compute_contribution(client))
        return update_server(method, server, aggregator.finish(), dataclasses.replace(view, replied=clients))

    fault_reasons: dict[int, str] = {}
    for client in view.replied:
        try:
            update([client])
        except FAULT_TYPES as error:
            fault_reasons[client.id] = _describe_fault(method, client, error)
    valid_clients = [client for client in view.replied if client.id not in fault_reasons]
    return (update(valid_clients) if valid_clients else server), fault_reasons


def _describe_fault(method: AnyMethod, client: ClientInfo, error: Exception) -> str:
    reason = shorten_text(f"{type(error).__name__}: {error}")
    return f"{method.title} cannot use the reply of client {client.id}: {reason}"


@dataclass
class Blocklist:
    """Clients that are excluded because too many of their replies were refused.

    Attributes:
        after: number of refused replies after which a client is blocked; 0 for never.
        counts: number of refused replies, by client.
    """

    after: int
    counts: dict[int, int] = field(default_factory=dict)

    def add_refusal(self, client_id: int) -> bool:
        """Count a refused reply; return whether its client is blocked now."""
        self.counts[client_id] = self.counts.get(client_id, 0) + 1
        return self.is_blocked(client_id)

    def is_blocked(self, client_id: int) -> bool:
        """Whether the client is excluded."""
        return 0 < self.after <= self.counts.get(client_id, 0)

    def reason(self, client_id: int) -> str:
        """The reason why a client is blocked."""
        return f"client {client_id} is on the blocklist: {self.counts[client_id]} of its replies were refused"
