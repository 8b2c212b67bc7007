"""The uploads of a cohort in one tree, and their contributions to a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import tree
from ...core.contract import ClientInfo, Each, Mean, Sum
from ...core.contract.contribution import contribution_leaves, map_contributions
from ..client_tensors.client_tensor import ClientTensor
from ..client_tensors.control_flow import (
    expand_to_clients,
    select_clients,
    split_clients,
    unwrap_client_tensor,
)
from .closeness import is_close
from .cohort_trainer import CohortMemory
from .cohort_view import CohortInfo
from .division import divide

ContributeUpload = Callable[[Any, Any], Any]
"""Function that maps an upload and the info of its client to a contribution: of one client, or of a cohort."""


@dataclass(frozen=True)
class CohortContribution:
    """The contribution of one client, of all clients of a cohort, or of a part of them.

    Attributes:
        client_ids: identifiers of these clients.
        value: contribution with tensors ``[K, ...]``, see
            :meth:`fedlowrank.core.contract.contribution.Aggregator.add_rows`; or that of one client, with plain tensors.
        weights: weights of the clients, by the path of each mean; None for one client.
    """

    client_ids: list[int]
    value: Any
    weights: Mapping[str, Sequence[float]] | None


class CohortUploads:
    """The uploads of clients whose trees have the same form.

    Args:
        stacked: uploads as one tree of client tensors; an ordinary tensor is the same for all clients.
        client_count: number of clients.
        kind: key of the cohort in ``memory``, which stores whether its contributions can be computed together.
        memory: objects that the engine keeps from round to round.

    Attributes:
        stacked: the argument ``stacked``.
        client_count: the argument ``client_count``.
    """

    def __init__(self, stacked: Any, client_count: int, kind: Any, memory: CohortMemory) -> None:
        self.stacked, self.client_count = stacked, client_count
        self._kind, self._memory = ("contribution", kind), memory
        self._rows: list[Any] | None = None
        self._finite: list[bool] | None = None

    def row(self, index: int) -> Any:
        """The upload of one client."""
        if self._rows is None:
            self._rows = split_clients(self.stacked, self.client_count)
        return self._rows[index]

    def is_finite(self, index: int) -> bool:
        """Whether all numbers of a client's upload are finite."""
        if self._finite is None:
            self._finite = self._find_finite().tolist()
        return self._finite[index]

    def _find_finite(self) -> Tensor:
        """Find whether all numbers of each client's upload are finite, as ``[clients]``."""
        mask = torch.ones(self.client_count, dtype=torch.bool)
        # most rounds have no NaN, and a norm takes a tenth of the time of a test of every element
        if tree.not_finite(tree.map_leaves(unwrap_client_tensor, self.stacked)) is None:
            return mask
        for t in tree.tensors(self.stacked):
            values = unwrap_client_tensor(t)
            if not (values.is_floating_point() or values.is_complex()) or not values.numel():
                continue
            if isinstance(t, ClientTensor):
                mask &= values.isfinite().reshape(self.client_count, -1).all(1).cpu()
            elif not bool(values.isfinite().all()):
                mask[:] = False
        return mask

    def contributions(
        self, positions: Sequence[int], infos: Sequence[ClientInfo], contribute: ContributeUpload
    ) -> list[CohortContribution]:
        """Compute the contributions of clients, for all of them together where the method's function allows it.

        Args:
            positions: indices of the clients in this cohort.
            infos: info of each of these clients.
            contribute: function of the method that maps an upload to its contribution.
        """
        was_equal = self._memory.is_equal.get(self._kind)
        if was_equal is False or len(positions) == 1:
            return [self._contribute_one(k, i, contribute) for k, i in zip(positions, infos, strict=True)]

        def call_for_cohort(members: Sequence[tuple[int, ClientInfo]], _: None) -> list[CohortContribution]:
            if len(members) == 1:
                return [self._contribute_one(*members[0], contribute)]
            return [self._contribute_many(members, contribute)]

        def call_for_client(member: tuple[int, ClientInfo], _: None) -> CohortContribution:
            return self._contribute_one(*member, contribute)

        # in the order of the cohort, so that nothing is copied if all clients contribute
        members = sorted(zip(positions, infos, strict=True), key=lambda member: member[0])
        contributions = divide(
            members,
            call_for_cohort,
            call_for_client,
            None,
            lambda reason: self._memory.log("contribution", reason),
        )
        if was_equal is None:
            is_equal = any(c.weights is not None for c in contributions) and self._is_equal(
                contributions, members[-1], contribute
            )
            self._memory.is_equal[self._kind] = is_equal
            if not is_equal:
                return [self._contribute_one(*member, contribute) for member in members]
        return contributions

    def _contribute_one(
        self, index: int, info: ClientInfo, contribute: ContributeUpload
    ) -> CohortContribution:
        return CohortContribution([info.id], contribute(self.row(index), info), None)

    def _contribute_many(
        self, members: Sequence[tuple[int, ClientInfo]], contribute: ContributeUpload
    ) -> CohortContribution:
        positions, count = [position for position, _ in members], len(members)
        upload = self.stacked
        if positions != list(range(self.client_count)):
            upload = select_clients(self.stacked, positions)
        contribution = contribute(upload, CohortInfo([info for _, info in members]))
        weights: dict[str, list[float]] = {}

        def expand_leaf(path: str, leaf: Any) -> Any:
            if isinstance(leaf, Each):
                return Each(split_clients(leaf.value, count))
            value = tree.map_leaves(lambda t: expand_to_clients(t, count), leaf.value)
            if isinstance(leaf, Sum):
                return Sum(value, leaf.counts)
            weight = leaf.weight
            weights[path] = (
                unwrap_client_tensor(weight).double().tolist()
                if isinstance(weight, ClientTensor)
                else [float(weight)] * count
            )
            return Mean(value, 0.0)

        return CohortContribution(
            [info.id for _, info in members], map_contributions(expand_leaf, contribution), weights
        )

    def _is_equal(
        self,
        contributions: Sequence[CohortContribution],
        member: tuple[int, ClientInfo],
        contribute: ContributeUpload,
    ) -> bool:
        """Whether the contribution of a client in its cohort equals that of the client alone, up to rounding."""
        (cohort_contribution,) = (c for c in contributions if member[1].id in c.client_ids)
        if cohort_contribution.weights is None:
            return True
        k, expected = (
            cohort_contribution.client_ids.index(member[1].id),
            self._contribute_one(*member, contribute).value,
        )
        pairs = zip(
            contribution_leaves(cohort_contribution.value), contribution_leaves(expected), strict=True
        )
        for (path, leaf), (expected_path, expected_leaf) in pairs:
            if path != expected_path or type(leaf) is not type(expected_leaf):
                return False
            value = leaf.value[k] if isinstance(leaf, Each) else tree.map_leaves(lambda t: t[k], leaf.value)
            if not is_close(value, expected_leaf.value):
                return False
            if isinstance(expected_leaf, Mean) and not is_close(
                cohort_contribution.weights[path][k], float(expected_leaf.weight)
            ):
                return False
        return True
