"""What a method's contract allows: secure sums, robust means, privacy, compression.

The reasons for a no come from a trial: the method's first download to a client, what that client would send
if training moved every parameter, and what that contributes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..core import tree
from ..core.contract.contribution import Each, Mean, Sum, contribution_leaves
from ..core.contract.method import AnyMethod, ClientInfo, Task
from ..core.contract.update import Update
from ..core.errors import TaskError
from ..training.tracing import trace_upload
from .updates import update_of

ABILITIES = {
    "secure": "secure sums",
    "robust": "robust mean",
    "central": "central privacy",
    "local": "local privacy",
    "compression": "compression",
}
"""What may be done with updates, by the title of its column."""


@dataclass(frozen=True)
class _Trial:
    """What a client of the method sends and contributes in the first round."""

    method: AnyMethod
    task: Task
    server: Any
    client: ClientInfo

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
        return self.method.contribution(upload, client or self.client, self.server)


def abilities(method: AnyMethod, task: Task) -> dict[str, str | None]:
    """What can be done with the updates of a method.

    Args:
        method: which.
        task: on which it is tried.

    Returns:
        For each of :data:`ABILITIES` None if it can be done, or the reason why not.
    """
    server = method.server_init(task)
    first, last = (_Trial(method, task, server, client) for client in (task.clients[0], task.clients[-1]))
    upload = first.upload
    if not tree.tensors(upload):
        return dict.fromkeys(ABILITIES, "its clients send nothing")
    single = _single_replies(first.contribution(upload))
    return {
        "secure": single or _other_structures(first, last),
        "robust": single,
        "central": single or _not_central(first, last, upload),
        "local": _sends_more(first, upload),
        "compression": _nothing_to_compress(first, upload),
    }


def require_ability(method: AnyMethod, task: Task, ability: str, entry: str) -> None:
    """Raise an error if something cannot be done with the updates of a method.

    Args:
        method: which.
        task: of the run.
        ability: one of :data:`ABILITIES`.
        entry: of the experiment that asks for it.

    Raises:
        TaskError: with the reason.
    """
    reason = abilities(method, task)[ability]
    if reason is not None:
        others = " robust.rule may be norm_bound, krum or multi_krum." if ability == "robust" else ""
        raise TaskError(
            f"{entry}: {method.title} cannot be used with it: {reason}.{others}",
            command="`fedlowrank list --trust` shows what each method can do.",
        )


def _single_replies(contribution: Any) -> str | None:
    seen = [
        path.strip("/") or "replies"
        for path, leaf in contribution_leaves(contribution)
        if isinstance(leaf, Each)
    ]
    return f"its server must see single replies ({', '.join(seen)})" if seen else None


def _other_structures(first: _Trial, last: _Trial) -> str | None:
    forms = [_form(t.contribution(t.upload)) for t in (first, last)]
    return None if forms[0] == forms[1] else "what clients contribute differs in form"


def _form(contribution: Any) -> list[Any]:
    return [(path, type(leaf), tree.form(leaf.value)) for path, leaf in contribution_leaves(contribution)]


def _sends_more(trial: _Trial, upload: Any) -> str | None:
    """What a client sends that noise on its update cannot hide."""
    covered = update_of(upload, trial.reference).keys()
    more = [path.strip("/") for path, _ in tree.leaves(upload) if path not in covered]
    if more:
        return f"its clients send {', '.join(_short(more))}, which is no update"
    if _varies(trial, upload):
        return "the form of what a client sends depends on its data"
    return None


def _short(paths: list[str]) -> list[str]:
    return list(dict.fromkeys(path.split("/")[0] for path in paths))


def _varies(trial: _Trial, upload: Any) -> bool:
    form = trial.update.form
    try:
        return form is not None and tree.form(form) != tree.form(upload)
    except tree.TreeError:
        # a choice among forms is no tree
        return True


def _not_central(first: _Trial, last: _Trial, upload: Any) -> str | None:
    if (reason := _sends_more(first, upload)) is not None:
        return reason
    if not tree.equal(first.reference, last.reference):
        return "clients are sent different things, so that their sum has no common reference"
    one = dataclasses.replace(first.client, examples=1)
    for value in (upload, first.reference):
        for _, leaf in contribution_leaves(first.contribution(value, one)):
            if isinstance(leaf, Mean) and leaf.weight != 1:
                return "the weights of its mean depend on what a client sends"
            if isinstance(leaf, Sum) and any(not t.is_floating_point() for t in tree.tensors(leaf.value)):
                return "it adds up numbers that are not real"
    return None


def _nothing_to_compress(trial: _Trial, upload: Any) -> str | None:
    if _varies(trial, upload):
        return "it compresses or selects what it sends itself"
    update = update_of(upload, trial.reference)
    alone = update.keys() - update_of(upload, trial.reference, compared=True).keys()
    if alone:
        what = ", ".join(_short(sorted(path.strip("/") for path in alone)))
        return f"{what}: its clients send it compared with nothing that both sides know"
    return None
