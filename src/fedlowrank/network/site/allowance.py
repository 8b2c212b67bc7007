"""Counts the runs, evaluations and trainings that a server asks of a site, and limits them.

Every answer reveals something about the examples, so a server with unlimited requests can read them. A folder takes
part in one run, or in as many as ``join --runs`` allows. In each run, the rounds of evaluations only increase up to
``run.rounds``, so there are at most ``run.rounds`` + 1 evaluations. A server that goes back to an earlier checkpoint
repeats rounds of training, but evaluations of these rounds are not repeated. Trainings are counted, including repeated
ones, up to :func:`max_trainings`. Requests are counted before they are computed.

FOLDER/site.json contains the counts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pydantic

from ...core.errors import CheckpointError
from ...storage.digest import read_sealed, write_sealed
from ..messages import RefusedOrderError

COUNTS_FILE = "site.json"
"""Name of the file in a client's folder."""


@dataclasses.dataclass(frozen=True)
class RunRequests:
    """Requests of a server to a site in one run.

    Attributes:
        trainings: number of times that the client has trained, or written its model at the end of the run.
        round: number of completed rounds at the last evaluation; -1 before the first.
        order: digest of the order that asked for that evaluation, which gets the same answer again.
    """

    trainings: int = 0
    round: int = -1
    order: str = ""


_ADAPTER = pydantic.TypeAdapter(dict[str, RunRequests])


def max_trainings(rounds: int) -> int:
    """Largest number of trainings for a run of ``rounds`` rounds, which leaves room for repeated rounds."""
    return 3 * rounds + 10


class Allowance:
    """The remaining requests that a site allows the server.

    Args:
        folder: folder of the client.
        runs: number of runs in which the client may take part; 0 for any number.

    Raises:
        CheckpointError: if the file is damaged.
    """

    def __init__(self, folder: Path, runs: int) -> None:
        self.path, self.runs = folder / COUNTS_FILE, runs
        self._asked: dict[str, RunRequests] = {}
        if self.path.exists():
            try:
                self._asked = _ADAPTER.validate_python(read_sealed(self.path).get("runs"))
            except pydantic.ValidationError as error:
                raise CheckpointError(f"{self.path} is damaged: {error}") from error

    def check_run(self, run: str) -> None:
        """Raise RefusedOrderError if the folder does not take part in a run, and may not start to."""
        if run not in self._asked and self.runs and len(self._asked) >= self.runs:
            raise RefusedOrderError(
                f"the server names a run {run!r}, but this client's folder belongs to the run "
                f"{', '.join(map(repr, self._asked))}. Start it by `fedlowrank join` with another --folder, or "
                "with --runs NUMBER if the folder may take part in more than one run"
            )

    def of(self, run: str) -> RunRequests:
        """Requests in a run until now."""
        return self._asked.get(run, RunRequests())

    def count(self, run: str, run_requests: RunRequests) -> None:
        """Store the requests in a run, before the answer is sent.

        Raises:
            RefusedOrderError: if the folder does not take part in the run.
            CheckpointError: if the disk is full; nothing has changed then.
        """
        self.check_run(run)
        if self._asked.get(run) != run_requests:
            runs = {**self._asked, run: run_requests}
            counts = {name: dataclasses.asdict(requests) for name, requests in runs.items()}
            write_sealed(self.path, {"runs": counts})
            self._asked = runs
