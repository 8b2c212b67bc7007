"""What an experiment file says of itself: its name, what it runs, and a paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import ConfigError

Printed = float | str | list[float | str]


@dataclass(frozen=True)
class Reference:
    """A paper's numbers, shown beside ours.

    Each by method, or by ``method.series``. Where the experiment varies a field, a list holds a number for each value.

    Attributes:
        label: where they stand, such as ``pFedLoRA, Table 2, CIFAR-10, N=10``.
        accuracy: in percent; ``"-"`` where the paper marks a failure to converge.
        communication: of the whole session, both ways and all clients, in GB.
        parameters: of a client's model, in millions.
        metric: what ``score`` is, in words.
        score: in percent, of an evaluation that ``fedlowrank score`` makes after a run.
    """

    label: str
    accuracy: Mapping[str, Printed] = field(default_factory=dict)
    communication: Mapping[str, Printed] = field(default_factory=dict)
    parameters: Mapping[str, Printed] = field(default_factory=dict)
    metric: str = ""
    score: Mapping[str, Printed] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """What stands at the top of an experiment file.

    Attributes:
        name: of the experiment, for folders and reports.
        title: for people; by default the name.
        paper: which paper it reproduces.
        method: that ``run`` runs.
        compare: methods that ``compare`` runs; by default the one above.
        seeds: that ``compare`` runs; by default that of the run.
        vary: what ``compare`` varies, each ``section.field=v1,v2,...``; of several, every combination.
    """

    name: str = "experiment"
    title: str = ""
    paper: str = ""
    method: str = "pfedlora"
    compare: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    vary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or any(c in self.name for c in "/\\"):
            raise ConfigError(f"name: {self.name!r} cannot be the name of a folder")
