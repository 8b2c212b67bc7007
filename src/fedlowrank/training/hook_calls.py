"""Calls of a method's hooks: hooks change no argument in place, keep nothing outside of their results, and draw by their client.

A hook may break these rules in a line that looks harmless, such as ``down["w"].mul_(0.9)``. The result of a run would then
depend on the engine, on the order of the clients or on the rounds with an evaluation, without any message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments.user_code import is_of_package
from ..core.contract import AnyMethod, ClientInfo, Method, Model, Task
from ..core.contract.hook_results import check_tree, name_class
from ..core.contract.wrapper import MethodWrapper
from ..core.errors import FedlowrankError, TaskError
from ..core.key import Key, generator_states
from .client_tensors.client_tensor import ClientTensor, NoRuleError
from .client_tensors.control_flow import DifferingError


@contextlib.contextmanager
def refuse_in_place(call: str, **arguments: Any) -> Iterator[None]:
    """Refuse that the block changes a tensor of some trees in place.

    Args:
        call: what the block calls, such as ``Mine.local_update (client 3, round 2)``, for the message.
        arguments: trees by the name of the argument.

    Raises:
        TaskError: if a tensor has been changed; the message names the argument and the tensor.
    """
    arguments = {name: _name_clients(value) for name, value in arguments.items()}
    versions = {name: list_versions(value) for name, value in arguments.items()}
    yield
    for name, tensor_versions in versions.items():
        changed = next((t for t, version in tensor_versions if t._version != version), None)
        if changed is not None:
            path = next((path for path, t in tree.leaves(arguments[name]) if t is changed), "")
            raise TaskError(
                f"{call} changes its argument {name!r} in place{path and f', at {path}'}. Others may read the same tensor, so "
                "that the result could depend on the engine and on the order of the calls. Compute a new tensor, such as "
                "x = x * 0.9 in place of x *= 0.9 or x.mul_(0.9), or change a copy (x.clone())"
            )


def _name_clients(value: Any) -> Any:
    """Make the numbers of clients, by which a total has single contributions, names of a tree; leave out what is no tree."""
    if isinstance(value, Mapping):
        return {str(key): _name_clients(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_name_clients(part) for part in value]
    try:
        tree.tensors(value)
    except tree.TreeError:
        return None
    return value


def list_versions(value: Any) -> list[tuple[Tensor, int]]:
    """List the tensors of a tree with the number of times that each was changed in place.

    Left out are tensors of inference mode, which cannot be changed outside of it, and those of a cohort, whose operations
    return new tensors.
    """
    return [(t, t._version) for t in tree.tensors(value) if type(t) is Tensor and not t.is_inference()]


@contextlib.contextmanager
def check_call(
    method: AnyMethod, hook: str, location: str = "", model: Model | None = None, **arguments: Any
) -> Iterator[None]:
    """Refuse that a hook, called in the block, changes its arguments in place or stores values outside of its results.

    Args:
        method: method of the hook.
        hook: name of the hook.
        location: client and round of the call, for the messages.
        model: code of the client's model if the hook gets it, to which it may add no attribute.
        arguments: trees that the hook gets, by the name of the argument.

    Raises:
        TaskError: if the hook breaks one of these rules. What it stored on the method or the model is removed.
    """
    call = _name_call(method, hook, location)
    layers = list_layers(method)
    values = [dict(vars(layer)) for layer in layers]
    model_names = set() if model is None else set(vars(model))
    with refuse_in_place(call, **arguments):
        try:
            yield
        finally:
            stored_names = [name for pair in zip(layers, values, strict=True) for name in _restore(*pair)]
            added_names = [] if model is None else _remove_added(model, model_names)
    owner, names = ("self", stored_names) if stored_names else ("view.model", added_names)
    if names:
        raise TaskError(
            f"{call} stores {', '.join(names)} on {owner}, from where it could go to another client, and which other processes "
            "and resumed runs may lack. Keep it in the state of the client (client_init, and the first result of "
            "local_update) or of the server (server_init, server_update); a constant can be a functools.cached_property"
        )


@contextlib.contextmanager
def check_single_call(
    method: AnyMethod, hook: str, location: str = "", model: Model | None = None, **arguments: Any
) -> Iterator[None]:
    """As :func:`check_call`, for a hook that is called for one client or the server, and so sees no tensors of a cohort.

    Raises:
        TaskError: also if the hook uses a value that an earlier call for many clients has kept. Errors of other libraries
            get a note that names the call.
    """
    call = _name_call(method, hook, location)
    try:
        with check_call(method, hook, location, model, **arguments):
            yield
    except FedlowrankError:
        raise
    except Exception as error:
        error.add_note(call)
        raise
    except (NoRuleError, DifferingError) as error:
        raise TaskError(
            f"{call} uses a value that another call has kept, on self, on the model or in a variable of the module: "
            f"{error}. Keep it in the state of the client (client_init, and the first result of local_update) or of the "
            "server (server_init, server_update)"
        ) from error


def _name_call(method: AnyMethod, hook: str, location: str) -> str:
    return f"{name_class(method)}.{hook}" + (f" ({location})" if location else "")


def refuse_cohort_tensors(value: Any) -> None:
    """Raise NoRuleError if the result of a hook that was called for one client holds a tensor of a cohort."""
    if any(isinstance(t, ClientTensor) for t in tree.tensors(value)):
        raise NoRuleError("the result holds a tensor of several clients")


def list_layers(method: AnyMethod) -> list[AnyMethod]:
    """List a method and the methods that it wraps, one within the other."""
    layers = [method]
    while isinstance(layers[-1], MethodWrapper):
        layers.append(layers[-1].inner)
    return layers


def _restore(method: AnyMethod, values: dict[str, Any]) -> list[str]:
    """Give a method the attributes that it had, and list the names of those that were others."""
    attributes = vars(method)
    names = [
        name
        for name, value in attributes.items()
        if (name not in values or values[name] is not value) and not _is_cached(method, name)
    ]
    for name in names:
        del attributes[name]
    attributes.update(values)
    return names


def _remove_added(model: Model, names: set[str]) -> list[str]:
    """Remove the public attributes that were added to a model, and list their names."""
    added_names = [
        n for n in vars(model) if n not in names and not n.startswith("_") and not _is_cached(model, n)
    ]
    for name in added_names:
        del vars(model)[name]
    return added_names


def _is_cached(value: object, name: str) -> bool:
    """Whether an attribute is the stored result of a property."""
    return isinstance(getattr(type(value), name, None), cached_property)


def may_draw(method: AnyMethod, hook: str) -> bool:
    """Whether a hook may draw from the global generators: it is the user's own, in the method or in one that it wraps."""
    default = getattr(Method, hook)
    types = [type(layer) for layer in list_layers(method)]
    return any(not is_of_package(t) and getattr(t, hook) is not default for t in types)


@contextlib.contextmanager
def seed_for_hook(
    method: AnyMethod, hook: str, key: Key, device: torch.device | None = None
) -> Iterator[None]:
    """Seed the global generators for a hook that is called in the block, and restore them after it.

    So a draw such as ``torch.randn(3)``, or the initial weights of a new ``nn.Linear``, is the same in every engine, and
    another one at each client and in each round. The methods of this package never draw from the global generators.

    Args:
        method: method of the hook.
        hook: name of the hook.
        key: key of the client and the round, or of the server and the round.
        device: device of the client's data; None if the hook gets none.
    """
    with (
        (key / "hook" / hook).global_generators(device)
        if may_draw(method, hook)
        else contextlib.nullcontext()
    ):
        yield


def init_client_state(method: AnyMethod, task: Task, client: ClientInfo) -> Any:
    """Make the state of a client that has never taken part; every call for a client gives the same state.

    Raises:
        TaskError: if ``client_init`` returns no tree, or breaks a rule of :func:`check_call`.
    """
    with (
        seed_for_hook(method, "client_init", task.key / client.id),
        check_single_call(method, "client_init", client.title),
    ):
        return check_tree(method, "client_init", method.client_init(client, task))


@contextlib.contextmanager
def refuse_global_draws(method: AnyMethod, hook: str, location: str) -> Iterator[None]:
    """Refuse that a hook without a key, called in the block, draws from the global generators.

    Args:
        method: method of the hook.
        hook: name of the hook.
        location: client and round of the call, for the message.

    Raises:
        TaskError: if it draws. How often such a hook is called depends on the engine, so a seed could not make equal runs
            equal.
    """
    if not may_draw(method, hook):
        yield
        return
    states = generator_states()
    yield
    if generator_states() != states:
        raise TaskError(
            f"{_name_call(method, hook, location)} draws from a global generator of torch, Python or NumPy, so that two equal "
            "runs would differ. Draw the numbers in server_init, server_update, client_init or local_update, and keep or send "
            "them"
        )


@contextlib.contextmanager
def refuse_draws(method: AnyMethod, hook: str, key: Key, device: torch.device) -> Iterator[None]:
    """Refuse that a hook, called in the block for many clients at once, draws from the global generators; restore them.

    Args:
        method: method of the hook.
        hook: name of the hook.
        key: key of one of the clients.
        device: device of the clients' data.

    Raises:
        NoRuleError: if it draws, because all clients would get one draw.
    """
    if not may_draw(method, hook):
        yield
        return
    with key.global_generators(device):
        states = generator_states(device)
        yield
        if generator_states(device) != states:
            raise NoRuleError(
                "it draws from a global generator, which belongs to one client; view.key draws for all"
            )
