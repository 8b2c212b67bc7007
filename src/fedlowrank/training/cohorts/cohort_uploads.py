"""The uploads of a cohort, stacked, and what they contribute to a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core import tree
from ...core.contract.contribution import Each, Mean, Sum, contribution_leaves, map_contributions
from ...core.contract.method import ClientInfo
from ..stacked import Stacked
from .closeness import is_close
from .cohort_trainer import CohortMemory
from .cohort_view import CohortInfo
from .control_flow import expand_to_clients, select_clients, split_clients, unwrap_stacked
from .division import divide

ContributeUpload = Callable[[Any, Any], Any]
"""Maps an upload and the info of its client to a contribution: of one client, or of a cohort."""


@dataclass(frozen=True)
class CohortContribution:
    """What some clients contribute.

    Attributes:
        clients: their identifiers.
        value: a contribution whose tensors are stacked ``[K, ...]``, see
            :meth:`fedlowrank.core.contract.contribution.Aggregator.add_rows`; or of one client, as it gives it alone.
        weights: of each client by the path of a mean; None of one client.
    """

    clients: list[int]
    value: Any
    weights: Mapping[str, Sequence[float]] | None


class CohortUploads:
    """The uploads of clients whose trees have one form.

    Args:
        stacked: the uploads as one tree; a tensor that is not stacked is the same at all clients.
        clients: how many there are.
        kind: of the cohort, by which is remembered whether its contributions can be computed at once.
        memory: of the engine.

    Attributes:
        stacked: as above.
        clients: as above.
    """

    def __init__(self, stacked: Any, clients: int, kind: Any, memory: CohortMemory) -> None:
        self.stacked, self.clients = stacked, clients
        self._kind, self._memory = ("contribution", kind), memory
        self._rows: list[Any] | None = None
        self._finite: list[bool] | None = None

    def row(self, place: int) -> Any:
        """The upload of one client."""
        if self._rows is None:
            self._rows = split_clients(self.stacked, self.clients)
        return self._rows[place]

    def is_finite(self, place: int) -> bool:
        """Whether all numbers of a client's upload are finite."""
        if self._finite is None:
            finite = torch.ones(self.clients, dtype=torch.bool)
            for t in tree.tensors(self.stacked):
                own = unwrap_stacked(t)
                if not (own.is_floating_point() or own.is_complex()) or not own.numel():
                    continue
                if isinstance(t, Stacked):
                    finite &= own.isfinite().reshape(self.clients, -1).all(1).cpu()
                elif not bool(own.isfinite().all()):
                    finite[:] = False
            self._finite = finite.tolist()
        return self._finite[place]

    def contributions(
        self, places: Sequence[int], infos: Sequence[ClientInfo], contribute: ContributeUpload
    ) -> list[CohortContribution]:
        """What clients contribute: of all at once where the method's function allows it.

        Args:
            places: of the clients in this cohort.
            infos: of these clients.
            contribute: the method's function.
        """
        known = self._memory.is_equal.get(self._kind)
        if known is False or len(places) == 1:
            return [self._alone(k, i, contribute) for k, i in zip(places, infos, strict=True)]

        def together(members: Sequence[tuple[int, ClientInfo]], _: None) -> list[CohortContribution]:
            if len(members) == 1:
                return [self._alone(*members[0], contribute)]
            return [self._together(members, contribute)]

        def alone(member: tuple[int, ClientInfo], _: None) -> CohortContribution:
            return self._alone(*member, contribute)

        members = list(zip(places, infos, strict=True))
        found = divide(members, together, alone, None, lambda why: self._memory.log("contribution", why))
        if known is None:
            is_equal = any(c.weights is not None for c in found) and self._is_equal(
                found, members[-1], contribute
            )
            self._memory.is_equal[self._kind] = is_equal
            if not is_equal:
                return [self._alone(*member, contribute) for member in members]
        return found

    def _alone(self, place: int, info: ClientInfo, contribute: ContributeUpload) -> CohortContribution:
        return CohortContribution([info.id], contribute(self.row(place), info), None)

    def _together(
        self, members: Sequence[tuple[int, ClientInfo]], contribute: ContributeUpload
    ) -> CohortContribution:
        places, count = [place for place, _ in members], len(members)
        upload = self.stacked
        if places != list(range(self.clients)):
            upload = select_clients(self.stacked, places)
        given = contribute(upload, CohortInfo([info for _, info in members]))
        weights: dict[str, list[float]] = {}

        def rows(path: str, leaf: Any) -> Any:
            if isinstance(leaf, Each):
                return Each(split_clients(leaf.value, count))
            value = tree.map_leaves(lambda t: expand_to_clients(t, count), leaf.value)
            if isinstance(leaf, Sum):
                return Sum(value, leaf.counts)
            weight = leaf.weight
            many = (
                unwrap_stacked(weight).double().tolist()
                if isinstance(weight, Stacked)
                else [float(weight)] * count
            )
            weights[path] = many
            return Mean(value, 0.0)

        return CohortContribution([info.id for _, info in members], map_contributions(rows, given), weights)

    def _is_equal(
        self,
        found: Sequence[CohortContribution],
        member: tuple[int, ClientInfo],
        contribute: ContributeUpload,
    ) -> bool:
        """Whether a client contributes the same as alone, up to rounding."""
        (own,) = (c for c in found if member[1].id in c.clients)
        if own.weights is None:
            return True
        k, expected = own.clients.index(member[1].id), self._alone(*member, contribute).value
        pairs = zip(contribution_leaves(own.value), contribution_leaves(expected), strict=True)
        for (path, many), (alone_path, alone) in pairs:
            if path != alone_path or type(many) is not type(alone):
                return False
            value = many.value[k] if isinstance(many, Each) else tree.map_leaves(lambda t: t[k], many.value)
            if not is_close(value, alone.value):
                return False
            if isinstance(alone, Mean) and not is_close(own.weights[path][k], float(alone.weight)):
                return False
        return True
