"""One step of the server computed by hand, and the check that it does not depend on clients that never train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..core import tree
from ..core.contract import ClientInfo, ServerView
from ..core.contract.contribution import Aggregator
from ..core.tree import Params
from ..engines import Sequential
from ..engines.engine import ClientJob
from ..rounds.run import Run
from ..storage.client_store import ClientStore
from ..storage.state import State

_ABSENT = 1
"""Position of the client that never trains; not the last, so that clients after it can be confused with it."""

_ADDED_CLIENTS = 3
"""Number of clients that are added to the larger federation and never train."""


def compute_uploads(run: Run, infos: Sequence[ClientInfo]) -> dict[int, Any]:
    """Compute the uploads of these clients in the next round, without taking the round."""
    jobs = [ClientJob(run.state_of(i), run.method.download(run.state.server, i), i) for i in infos]
    results = Sequential().run(run.method, run.federation, run.task, run.round, jobs)
    return {i.id: r.upload for i, r in zip(infos, results, strict=True) if r.upload is not None}


def apply_uploads(run: Run, uploads: dict[int, Any], unseen: frozenset[int] = frozenset()) -> Any:
    """Compute the server's next state.

    Args:
        run: run before the round.
        uploads: uploads by client.
        unseen: identifiers of clients that never train.
    """
    server, aggregator, infos = run.state.server, Aggregator(list(uploads)), run.federation.infos
    for client_id, upload in uploads.items():
        aggregator.add(client_id, run.method.contribution(server, upload, infos[client_id]))
    total = aggregator.finish()
    replied = [infos[client_id] for client_id in uploads]
    view = ServerView(run.task, run.round, run.federation.key, replied, unseen=unseen)
    return server if total is None else run.method.server_update(server, total, view)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A round in which some clients never train: the clients' models before it, the uploads, and the models after it."""

    before: dict[str, Params]
    uploads: dict[str, Any]
    after: dict[str, Params]


def compare_absent_clients(start: Callable[[], Run]) -> tuple[Any, Any]:
    """Take a round twice, the second time among more clients that never train.

    The same clients send the same uploads in both rounds. The second task has further clients, and another number of examples
    for a client that does not train either.

    Args:
        start: function that makes a run before its first round.

    Returns:
        The models of the clients that trained, after each of the two rounds. The models before the round, twice, if they or
        the uploads already depend on the clients of the task.
    """
    infos = start().federation.infos
    absent = infos[_ABSENT]
    larger = [dataclasses.replace(i, example_count=10 * i.example_count) if i is absent else i for i in infos]
    larger += [dataclasses.replace(infos[0], id=len(infos) + n) for n in range(_ADDED_CLIENTS)]
    trained = [i for i in infos if i is not absent]
    first, second = (_take_round(start(), clients, trained) for clients in (infos, larger))
    if not tree.equal([first.before, first.uploads], [second.before, second.uploads]):
        return first.before, first.before
    return first.after, second.after


def _take_round(run: Run, clients: Sequence[ClientInfo], trained: Sequence[ClientInfo]) -> _Step:
    """Take the first round of a run whose task has these clients, some of which train and the others never do."""
    run.task = dataclasses.replace(run.task, clients=clients)
    run.restore(State(0, run.engine.boundary(run.method.server_init(run.task)), ClientStore()))
    before = _compute_models(run, trained)
    uploads = compute_uploads(run, trained)
    unseen = frozenset(i.id for i in clients) - {i.id for i in trained}
    run.restore(State(1, run.engine.boundary(apply_uploads(run, uploads, unseen)), ClientStore()))
    return _Step(before, {str(i): upload for i, upload in uploads.items()}, _compute_models(run, trained))


def _compute_models(run: Run, infos: Sequence[ClientInfo]) -> dict[str, Params]:
    """Compute the parameters of the models that these clients would use now, by client."""
    return {f"client {i.id}": run.personal_params(i) for i in infos}
