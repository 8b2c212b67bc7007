"""Abilities that a method's contract allows: secure sums, robust means, privacy, compression.

The reasons why something cannot be done come from a trial: the method's first download to a client, what that client
would send if training moved every parameter, and its contribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, Each, Mean, ServerView, Sum, Task, Update
from ..core.contract.contribution import contribution_leaves, map_contributions
from ..core.errors import FedlowrankError, TaskError
from ..training.tracing import trace_upload
from .updates import compute_update

ABILITIES = {
    "secure": "secure sums",
    "secure_network": "secure sums over a network",
    "robust": "robust mean",
    "central": "central privacy",
    "local": "local privacy",
    "compression": "compression",
}
"""Names of what can be done with updates, by the title of the column in the table of methods."""

_WEIGHTS = "and robust rules put weights in their place"

_MANY_EXAMPLES = 100_000
"""Number of examples with which a client would take another number of steps than with a single example."""


@dataclass(frozen=True)
class _Trial:
    """A trial of the first round: the download, upload and contribution of one client of the method."""

    method: AnyMethod
    task: Task
    server: Any
    client: ClientInfo

    @classmethod
    def of_first_client(cls, method: AnyMethod, task: Task) -> _Trial:
        return cls(method, task, method.server_init(task), task.clients[0])

    @property
    def down(self) -> Any:
        return self.method.download(self.server, self.client)

    @property
    def update(self) -> Update:
        return self.method.describe_update(self.down, self.client, self.task)

    @property
    def reference(self) -> Any:
        return self.update.reference

    @property
    def upload(self) -> Any:
        return trace_upload(self.method, self.task, self.client, self.down)[0]

    def contribution(self, upload: Any, client: ClientInfo | None = None) -> Any:
        return self.method.contribution(self.server, upload, client or self.client)


def abilities(method: AnyMethod, task: Task) -> dict[str, str | None]:
    """Find out what can be done with the updates of a method.

    Args:
        method: method to examine.
        task: task on which the method is tried.

    Returns:
        For each of :data:`ABILITIES`, None if it can be done, or else the reason why not.

    Raises:
        TaskError: if the method raises an error in a trial; the message names the ability.
    """
    return _find_reasons(method, task, ABILITIES)


def _find_reasons(method: AnyMethod, task: Task, names: Iterable[str]) -> dict[str, str | None]:
    """For each of some abilities, None if the method has it, or else the reason why not."""
    server = method.server_init(task)
    trials = [_Trial(method, task, server, client) for client in task.clients]
    # clients of one architecture, rank and cluster send the same form
    trials_by_kind = {(t.client.architecture, t.client.rank, t.client.cluster): t for t in reversed(trials)}
    first_trial = trials[0]
    upload = first_trial.upload
    if not tree.tensors(upload):
        return dict.fromkeys(names, "its clients send nothing")

    def single_reason() -> str | None:
        return _single_replies(first_trial.contribution(upload))

    def count_reason() -> str | None:
        return _why_it_reads_examples(first_trial, upload, "which stays with the client")

    def secure_reason() -> str | None:
        return single_reason() or _other_structures([*trials_by_kind.values()]) or count_reason()

    checks: dict[str, Callable[[], str | None]] = {
        "secure": secure_reason,
        "secure_network": lambda: secure_reason() or _varying_form(first_trial, upload),
        "robust": lambda: single_reason() or _why_it_reads_examples(first_trial, upload, _WEIGHTS),
        "central": lambda: single_reason() or _not_central(trials, upload) or count_reason(),
        "local": lambda: _sends_more(first_trial, upload) or count_reason(),
        "compression": lambda: _nothing_to_compress(first_trial, upload),
    }
    reasons = {}
    for name in names:
        try:
            reasons[name] = checks[name]()
        except Exception as error:
            if isinstance(error, FedlowrankError) and not isinstance(error, tree.TreeError):
                # its message is for the user
                raise
            raise TaskError(
                f"{method.title} raised an error in the trial that finds out whether it goes with {ABILITIES[name]}: "
                f"{type(error).__name__}: {error}. Correct its contribution, describe_update or server_update, or run "
                f"it without {ABILITIES[name]}."
            ) from error
    return reasons


def require_ability(method: AnyMethod, task: Task, ability: str, entry: str) -> None:
    """Raise an error if one of the abilities is missing in a method.

    Args:
        method: method to examine.
        task: task of the run.
        ability: name of the ability, one of :data:`ABILITIES`.
        entry: entry of the experiment that asks for the ability.

    Raises:
        TaskError: if the method lacks the ability, or raises an error in the trial; the message gives the reason.
    """
    reason = _find_reasons(method, task, [ability])[ability]
    if reason is not None:
        hint = " robust.rule may be norm_bound, krum or multi_krum." if ability == "robust" else ""
        raise TaskError(
            f"{entry}: {method.title} cannot be used with it: {reason}.{hint}",
            command="`fedlowrank list --trust` shows what each method can do.",
        )


def require_no_examples(method: AnyMethod, task: Task, entry: str) -> None:
    """Raise an error if a server needs true numbers of examples, which robust rules replace by weights.

    Args:
        method: method to examine.
        task: task of the run.
        entry: entry of the experiment that asks for the rule.

    Raises:
        TaskError: if the server needs them; the message gives the reason.
    """
    trial = _Trial.of_first_client(method, task)
    upload = trial.upload
    if tree.tensors(upload) and (reason := _why_it_reads_examples(trial, upload, _WEIGHTS)) is not None:
        raise TaskError(
            f"{entry}: {method.title} cannot be used with it: {reason}.",
            command="`fedlowrank list --trust` shows what each method can do.",
        )


def require_no_sums_of_examples(method: AnyMethod, task: Task, entry: str) -> None:
    """Raise an error if the terms of a sum grow with the number of examples, of which a rule such as the median is no mean.

    Args:
        method: method to examine.
        task: task of the run.
        entry: entry of the experiment that asks for the rule.

    Raises:
        TaskError: if there is such a sum; the message names it.
    """
    trial = _Trial.of_first_client(method, task)
    upload = trial.upload
    clients = [dataclasses.replace(trial.client, example_count=n) for n in (1, 2)]
    few, many = (list(contribution_leaves(trial.contribution(upload, client))) for client in clients)
    for (path, leaf), (_, other) in zip(few, many, strict=True):
        if isinstance(leaf, Sum) and not leaf.counts and not tree.equal(leaf.value, other.value):
            raise TaskError(
                f"{entry}: {method.title} cannot be used with it: the terms of its sum at {path.strip('/') or 'the top'} grow "
                "with the number of examples, so that the rule's result is no sum of them. Contribute Mean(value, "
                "client.example_count), or set robust.weights = 'equal'."
            )


def _single_replies(contribution: Any) -> str | None:
    single_paths = [
        path.strip("/") or "replies"
        for path, leaf in contribution_leaves(contribution)
        if isinstance(leaf, Each)
    ]
    return f"its server must see single replies ({', '.join(single_paths)})" if single_paths else None


def _why_it_reads_examples(trial: _Trial, upload: Any, explanation: str) -> str | None:
    """The reason why a server needs the numbers of examples: its step changes if all clients have equally many more.

    Args:
        trial: trial of the method.
        upload: upload of the trial's client.
        explanation: the reason why the server does not have these numbers.
    """
    client = dataclasses.replace(trial.client, example_count=1)

    def total(_: str, leaf: Any) -> Any:
        return {client.id: leaf.value} if isinstance(leaf, Each) else leaf.value

    totals = map_contributions(total, trial.contribution(upload, client))
    view = ServerView(trial.task, 0, trial.task.key / "trial", [client])
    views = [
        view,
        dataclasses.replace(view, replied=[dataclasses.replace(client, example_count=_MANY_EXAMPLES)]),
    ]
    states_of_few, states_of_many = (
        tree.tensors(trial.method.server_update(trial.server, totals, v)) for v in views
    )
    if all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(states_of_few, states_of_many, strict=True)
    ):
        return None
    advice = "; set steps = N in the method, so that all take as many" if trial.method.steps is None else ""
    return f"its server computes with each client's number of examples, {explanation}{advice}"


def _other_structures(trials: list[_Trial]) -> str | None:
    forms = [_form(t.contribution(t.upload)) for t in trials]
    return None if all(f == forms[0] for f in forms) else "what clients contribute differs in form"


def _form(contribution: Any) -> list[Any]:
    return [(path, type(leaf), tree.form(leaf.value)) for path, leaf in contribution_leaves(contribution)]


def _sends_more(trial: _Trial, upload: Any) -> str | None:
    """The part of an upload that noise on its update cannot hide, as a reason; None if there is none."""
    covered_paths = compute_update(upload, trial.reference).keys()
    uncovered_paths = [path.strip("/") for path, _ in tree.leaves(upload) if path not in covered_paths]
    if uncovered_paths:
        return f"its clients send {', '.join(_short(uncovered_paths))}, which is no update"
    if plain_paths := [path.strip("/") or "a number" for path in _plain_values(upload)]:
        return f"its clients send {', '.join(_short(plain_paths))}, which is no tensor, so that no noise is added to it"
    return _varying_form(trial, upload)


def _plain_values(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the numbers and strings in a tree, which are no tensors."""
    children = tree.children(value, path)
    if children is None and not isinstance(value, (torch.Tensor, NoneType)):
        yield path
    for key, child in children or ():
        yield from _plain_values(child, tree.join_path(path, key))


def _short(paths: list[str]) -> list[str]:
    return list(dict.fromkeys(path.split("/")[0] for path in paths))


def _varying_form(trial: _Trial, upload: Any) -> str | None:
    return "the form of what a client sends depends on its data" if _varies(trial, upload) else None


def _varies(trial: _Trial, upload: Any) -> bool:
    form = trial.update.form
    try:
        return form is not None and tree.form(form) != tree.form(upload)
    except tree.TreeError:
        # the form is a choice among forms and no tree
        return True


def _not_central(trials: list[_Trial], upload: Any) -> str | None:
    first_trial, *other_trials = trials
    if (reason := _sends_more(first_trial, upload)) is not None:
        return reason
    reference = first_trial.reference
    if not all(tree.equal(reference, trial.reference) for trial in other_trials):
        return "clients are sent different things, so that their sum has no common reference"
    if zero_paths := [path.strip("/") or "its top" for path in _plain_values(reference)]:
        return (
            f"the noised sum needs tensors where its reference is ZERO_REFERENCE ({', '.join(_short(zero_paths))}): give zeros "
            "of the shape"
        )
    client = dataclasses.replace(first_trial.client, example_count=1)
    for value in (upload, reference):
        for _, leaf in contribution_leaves(first_trial.contribution(value, client)):
            if isinstance(leaf, Mean) and leaf.weight != 1:
                return "the weights of its mean depend on what a client sends"
            if isinstance(leaf, Sum) and any(not t.is_floating_point() for t in tree.tensors(leaf.value)):
                return "it adds up numbers that are not real"
    return _counts_replies(first_trial, upload)


def _counts_replies(trial: _Trial, upload: Any) -> str | None:
    """The reason why a server needs to know who replied, which central privacy hides; None if it does not."""
    client = dataclasses.replace(trial.client, example_count=1)
    totals = map_contributions(lambda _, leaf: leaf.value, trial.contribution(upload, client))
    view = ServerView(trial.task, 0, trial.task.key / "trial", [], planned=2.0)
    try:
        state = trial.method.server_update(trial.server, totals, view)
    except ArithmeticError as error:
        found_problem = f"it raises {type(error).__name__}: {error}"
    else:
        if all(bool(t.isfinite().all()) for t in tree.tensors(state)):
            return None
        found_problem = "its state is not finite"
    return (
        f"without the clients that replied, which are private, its server_update fails: {found_problem}. Divide by "
        "view.planned, the expected number of replies"
    )


def _nothing_to_compress(trial: _Trial, upload: Any) -> str | None:
    if _varies(trial, upload):
        return "it compresses or selects what it sends itself"
    update = compute_update(upload, trial.reference)
    uncompared_paths = update.keys() - compute_update(upload, trial.reference, compared_only=True).keys()
    if uncompared_paths:
        names = ", ".join(_short(sorted(path.strip("/") for path in uncompared_paths)))
        return f"{names}: its clients send it compared with nothing that both sides know"
    return None
