"""Checks of what the hooks and functions of a method return and take, with messages for a person."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..arguments.user_code import is_of_package
from ..errors import FedlowrankError, NonFiniteError, TaskError
from ..learning.optimizer import SGD, AdamW
from .client_model import ClientModel
from .task import Pass

T = TypeVar("T")

logger = logging.getLogger(__name__)

_VARIADIC = inspect.CO_VARARGS


class NonFiniteResultError(NonFiniteError):
    """A hook returned a NaN or an infinity, although what it was given held none.

    Args:
        result: description of what the hook returned, with the hook.
        round: index of the training round, from 0, or None if it is not known.
        path: path of the first such number in what was returned.
        advice: what to do about it.
        client_id: identifier of the client; -1 for the server.
        owner: name of the client in the message; empty for the server.
    """

    def __init__(
        self, result: str, round: int | None, path: str, advice: str, client_id: int = -1, owner: str = ""
    ) -> None:
        super().__init__(client_id, -1 if round is None else round, "", None, owner)
        location = [owner] if owner else []
        if round is not None:
            location.append(f"round {round + 1}")
        prefix = f"{', '.join(location)}: " if location else ""
        self.finding = f"{prefix}{result} holds a NaN or an infinity at {path or 'the top'}"
        self.result, self.path, self.advice = result, path, advice
        self._round = round
        FedlowrankError.__init__(self, f"{self.finding}. {advice}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result, self._round, self.path, self.advice, self.client_id, self.owner)


def check_tree(method: Any, hook: str, value: T) -> T:
    """Return the result of a hook; raise TreeError with the name of the hook if it is no tree."""
    try:
        tree.map_leaves(lambda t: t, value)
    except tree.TreeError as error:
        raise tree.TreeError(f"{name_class(method)}.{hook}: {error}") from error
    return value


def check_pair(method: Any, result: Any, before: Any = None) -> tuple[Any, Any]:
    """Return the result of ``local_update``.

    Args:
        method: method whose hook was called.
        result: result of the hook.
        before: state of the client that the hook was given.

    Raises:
        TaskError: if the result is no pair, or the client's state is lost.
        TreeError: if it is no pair of trees.
    """
    if isinstance(result, tuple) and len(result) == 2:
        if result[0] is None and before is not None and tree.tensors(before):
            raise TaskError(
                f"{name_class(method)}.local_update returned None for the client's next state, which was "
                f"{describe_kind(before)}. Write return state, upload if it does not change, and return {{}}, upload if it shall "
                "be dropped"
            )
        for part, value in zip(("state", "upload"), result, strict=True):
            check_tree(method, f"local_update ({part})", value)
        return result
    description = f"a tuple of {len(result)}" if isinstance(result, tuple) else describe_kind(result)
    raise TaskError(
        f"{name_class(method)}.local_update must return the pair (state, upload); it returned {description}. Write "
        "return None, upload if a client keeps nothing"
    )


def check_client_model(method: Any, result: Any) -> ClientModel:
    """Return the result of ``client_model``; raise TaskError if it is no ClientModel of parameters."""
    name = f"{name_class(method)}.client_model"
    if not isinstance(result, ClientModel):
        raise TaskError(
            f"{name} must return a ClientModel; it returned {describe_kind(result)}. Write return ClientModel(params)"
        )
    for field, value in {"params": result.params, **result.series}.items():
        if not isinstance(value, dict) and not callable(value):
            raise TaskError(
                f"{name}: {field} must be a dict of parameters by name or a function; it is {describe_kind(value)}. Without a "
                "client_model of its own a client uses what download returns, by default the server's state: see what "
                "server_init and server_update return"
            )
    return result


def check_passes(method: Any, passes: Any) -> dict[str, Pass]:
    """Return the result of ``passes``; raise TaskError if it is no dict of passes."""
    if isinstance(passes, dict) and passes and all(isinstance(value, Pass) for value in passes.values()):
        return passes
    raise TaskError(
        f"{name_class(method)}.passes must return a dict of passes by name; it returned {describe_kind(passes)}. Write "
        'return {"local": self.main_pass}'
    )


def check_participants(
    method: Any,
    client_ids: Any,
    sampled: Collection[int],
    available: Collection[int],
    *,
    may_differ: bool,
) -> list[int]:
    """Return the result of ``participants`` as a list of numbers.

    Args:
        method: method that chose the clients.
        client_ids: result of its hook.
        sampled: identifiers of the clients that the protocol sampled.
        available: identifiers of all clients that may train.
        may_differ: whether the method may choose other clients than the sampled ones; False if a privacy budget
            accounts for the sampling.

    Raises:
        TaskError: if the result is no list of different identifiers of available clients, or differs from the sampled
            ones although it may not.
    """
    name = f"{name_class(method)}.participants"
    if not isinstance(client_ids, Iterable):
        raise TaskError(
            f"{name} must return a list of client identifiers; it returned {describe_kind(client_ids)}. Write return sampled"
        )
    try:
        chosen_ids = [operator.index(i) for i in client_ids]
    except TypeError as error:
        raise TaskError(
            f"{name} must return a list of client identifiers, which are whole numbers: {error}. Write return sampled"
        ) from error
    distinct_ids = set(chosen_ids)
    other_ids = distinct_ids.difference(sampled)
    if unavailable_ids := other_ids.difference(available) if other_ids else ():
        raise TaskError(
            f"{name} returned the client {min(unavailable_ids)}, which is not available in this run. Choose among the "
            "identifiers in available"
        )
    if len(distinct_ids) < len(chosen_ids):
        repeated_id = next(i for i in chosen_ids if chosen_ids.count(i) > 1)
        raise TaskError(
            f"{name} returned the client {repeated_id} more than once, but a client trains once in a round. Leave out "
            "repetitions; a client counts more by its weight in contribution"
        )
    if not may_differ and distinct_ids != set(sampled):
        example = (
            f"adds client {min(other_ids)}"
            if other_ids
            else f"leaves out client {min(set(sampled) - distinct_ids)}"
        )
        raise TaskError(
            f"{name} {example}, but with privacy.kind = 'central' exactly the sampled clients train: ε is computed for "
            "this sampling. Write return sampled, or choose privacy.kind = 'local'"
        )
    return chosen_ids


def check_server_metrics(method: Any, metrics: Any) -> dict[str, dict[str, float]]:
    """Return the result of ``server_metrics`` with plain numbers; raise TaskError if it is no table of numbers.

    A number may be one of PyTorch or NumPy.
    """
    name = f"{name_class(method)}.server_metrics"
    if not isinstance(metrics, Mapping) or not all(isinstance(table, Mapping) for table in metrics.values()):
        raise TaskError(
            f"{name} must return a dict of dicts of numbers, by name and series; it returned {describe_kind(metrics)}. Write "
            'return {"norm": {"w": 1.5}}'
        )
    return {
        str(key): {str(series): _plain_number(name, key, value) for series, value in table.items()}
        for key, table in metrics.items()
    }


def _plain_number(name: str, key: str, value: Any) -> float:
    if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float):
        raise TaskError(f"{name}: the values of {key!r} must be numbers; one is {describe_kind(value)}")
    return value


def check_server_state(method: Any, before: Any, state: Any, round: int | None = None) -> Any:
    """Return the result of ``server_update``; log a warning if a tensor in it changes to a wider floating-point type.

    Args:
        method: method whose hook was called.
        before: state of the server that the hook was given.
        state: result of the hook.
        round: index of the round, from 0, for error messages; None if it is not known.

    Raises:
        TaskError: if the server's state is lost, or a tensor in it changes to a narrower floating-point type.
        TreeError: if the state is no tree.
        NonFiniteError: if a tensor holds a NaN, and none did before.
    """
    name = f"{name_class(method)}.server_update"
    if state is None and before is not None:
        raise TaskError(
            f"{name} returned None, which would be the server's next state. Return the state, such as return total"
        )
    check_tree(method, "server_update", state)
    # the types alone are listed several times faster than with their places
    if [t.dtype for t in tree.tensors(before)] != [t.dtype for t in tree.tensors(state)]:
        _check_types(name, before, state)
    if tree.not_finite(state) is not None:
        _refuse_not_finite(name, before, state, round)
    return state


def _check_types(name: str, before: Any, state: Any) -> None:
    """Raise TaskError if a tensor of the server's state has a narrower type than before; warn if it has a wider type."""
    widened_tensor = None
    for path, old_type, new_type in _list_other_types(before, state):
        old, new = torch.finfo(old_type), torch.finfo(new_type)
        if new.max < old.max or new.eps > old.eps:
            raise TaskError(
                f"{name} returned {new_type} at {path or 'the top'} of the server's state, which had {old_type} there, with "
                f"more digits or a wider range. Convert it in server_update, such as by .to({old_type}), or begin with "
                f"{new_type} in server_init"
            )
        widened_tensor = widened_tensor or (path, old_type, new_type)
    if widened_tensor is not None:
        path, old_type, new_type = widened_tensor
        logger.warning(
            "%s returned %s at %s of the server's state, which had %s there. If it is a parameter of a model, training will "
            "fail with a message about two dtypes: convert what clients upload, such as tensors from NumPy, by .to(%s)",
            name,
            new_type,
            path or "the top",
            old_type,
            old_type,
        )


def _refuse_not_finite(name: str, before: Any, state: Any, round: int | None) -> None:
    """Raise NonFiniteResultError at the first tensor of the server's state that holds a NaN, if none did before.

    An infinity is accepted: it may be a bound that was not reached yet.
    """
    if any(bool(t.isnan().any()) for t in tree.tensors(before)):
        return
    for path, t in tree.leaves(state):
        if bool(t.isnan().any()):
            raise NonFiniteResultError(
                f"the server's state that {name} returned",
                round,
                path,
                "Look at what the hook computes, at an Each in contribution, and at the learning rates. If such a number "
                "means something, let server_init begin with it, or hold it as a Python number",
            )


def _list_other_types(
    before: Any, after: Any, path: str = ""
) -> Iterator[tuple[str, torch.dtype, torch.dtype]]:
    """List the floating-point tensors that have another type in a second tree.

    Compared are tensors at the same place. Lists of different lengths have no such places: they may grow at any end.

    Yields:
        Path, first type and second type.
    """
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.is_floating_point() and after.is_floating_point() and before.dtype != after.dtype:
            yield path, before.dtype, after.dtype
    elif type(before) is type(after):
        old_children, new_children = (dict(tree.children(value) or ()) for value in (before, after))
        if not isinstance(before, list | tuple) or len(before) == len(after):
            for key, child in old_children.items():
                if key in new_children:
                    yield from _list_other_types(child, new_children[key], tree.join_path(path, key))


def check_start(start: Any, path: str = "") -> None:
    """Refuse a number and a tensor of whole numbers in the tree to train, because training would not change them.

    Raises:
        TaskError: if the tree to train holds a float or a tensor without a gradient; the message names its place.
    """
    if type(start) is float:
        raise TaskError(
            f"view.train: at {path or 'the top'} of what is trained stands the number {start!r}, which would stay as it "
            "is. Make it a tensor, as by torch.tensor(...), or leave it out of what is trained"
        )
    if isinstance(start, Tensor):
        if not (start.is_floating_point() or start.is_complex()):
            raise TaskError(
                f"view.train: at {path or 'the top'} of what is trained stands a tensor of {start.dtype}, which has no "
                "gradient. Leave it out of what is trained, pass it in constants, or convert it by .float()"
            )
        return
    for key, child in tree.children(start, path) or ():
        check_start(child, tree.join_path(path, key))


def check_optimizer(optimizer: Any) -> None:
    """Raise TaskError if an optimizer is none of this package, such as one of PyTorch."""
    if not isinstance(optimizer, SGD | AdamW):
        raise TaskError(
            f"view.train: the optimizer must be one of fedlowrank; it is {describe_kind(optimizer)} of "
            f"{type(optimizer).__module__}. Write self.optimizer, or make one, such as fedlowrank.SGD(lr=0.1)"
        )


def check_function(
    title: str, function: Callable[..., Any], first_arguments: Sequence[str], constants: Any
) -> None:
    """Raise TaskError if a function that a method passes on cannot take its arguments.

    Args:
        title: name of the argument that the function is passed as.
        function: function of the method; only plain functions are examined, by their code, which takes a microsecond.
        first_arguments: names of its arguments before the constants.
        constants: trees that are passed after these arguments; must be a tuple or a list.
    """
    if not isinstance(constants, (tuple, list)):
        raise TaskError(
            f"constants must be a tuple of trees, such as (down,); it is {describe_kind(constants)}"
        )
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return
    code, count = function.__code__, len(first_arguments) + len(constants)
    min_count = code.co_argcount - len(function.__defaults__ or ())
    if min_count <= count and (count <= code.co_argcount or code.co_flags & _VARIADIC):
        return
    arguments = [*first_arguments, *(f"constants[{i}]" for i in range(len(constants)))]
    raise TaskError(
        f"{title} at line {code.co_firstlineno} takes {inspect.signature(function)} and is called with "
        f"({', '.join(arguments)})"
    )


def name_class(method: Any) -> str:
    """Return the name of the class of a method, without the wrappers of this package around it."""
    while hasattr(method, "inner") and is_of_package(type(method)):
        method = method.inner
    return type(method).__name__


def describe_kind(value: Any) -> str:
    """Describe the type of a value in words."""
    if isinstance(value, dict) and value:
        return f"a dict of {describe_kind(next(iter(value.values())))}"
    return "None" if value is None else f"a {type(value).__name__}"
