"""What needs the uploads of a round's clients together: attacks, and rules that weigh or bound single replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.contribution import Aggregator, Each, Mean, Sum, map_leaves
from ..core.errors import TaskError
from ..core.key import Key
from ..core.method import ClientInfo, Method, Task
from ..data.federation import Federation
from ..trust.attacks import attack_updates
from ..trust.robust import (
    COORDINATE_RULES,
    RobustAggregator,
    geometric_median_weights,
    hostile_count,
    krum_weights,
    norm_factors,
)
from ..trust.secure_sums import SecureAggregator
from ..trust.settings import Trust
from ..trust.updates import blocks, gram, norm, shrink, update_of, with_update
from .preparation import counted
from .round_results import Contribute, RoundResults
from .settings import RunSettings

AnyMethod = Method[Any, Any, Any, Any]

ON_UPDATES = ("sign_flip", "scaled", "gaussian", "alie", "inner_product")
"""Attacks on updates; the others are on data or sizes."""

WEIGHING = ("norm_bound", "krum", "multi_krum", "geometric_median")
"""Rules that look at whole replies; the others reduce numbers one by one."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Attacks on the uploads of a round, and the rule by which the server weighs them.

    Peak memory: all uploads of a round.

    Attributes:
        method: whose uploads.
        task: of the run.
        trust: says which attack and which rule.
        hostile: the hostile clients.
    """

    method: AnyMethod
    task: Task
    trust: Trust
    hostile: frozenset[int]

    @classmethod
    def of(cls, method: AnyMethod, task: Task, trust: Trust, hostile: frozenset[int]) -> Inspection | None:
        """None where no attack and no rule needs all uploads together."""
        needed = trust.attack.kind in ON_UPDATES or trust.robust.rule in WEIGHING
        return cls(method, task, trust, hostile) if needed else None

    def judge(
        self, uploads: Mapping[int, Any], server: Any, key: Key
    ) -> tuple[dict[int, Any], dict[int, float]]:
        """The uploads that are used, and how much each counts.

        Args:
            uploads: as they arrived, by client.
            server: the state of the server.
            key: randomness of the attack.

        Returns:
            Decoded uploads of the clients that the rule did not leave out, and the weight of every reply: of
            selection 0 or that of all who were selected, of a bound on norms the factor of the update.

        Raises:
            TaskError: if the rule cannot be applied to these uploads.
        """
        method, infos = self.method, {c.id: c for c in self.task.clients}
        found = {i: method.decode(u, infos[i], server) for i, u in uploads.items()}
        references = {i: method.reference(method.download(server, infos[i]), infos[i]) for i in found}
        if self.trust.attack.kind in ON_UPDATES:
            updates = {i: update_of(u, references[i]) for i, u in found.items()}
            sent = attack_updates(updates, self.hostile, self.trust.attack, key)
            changed = {i for i in found if i in self.hostile}
            found |= {i: with_update(found[i], references[i], sent[i]) for i in changed}
        weights = dict.fromkeys(found, 1.0)
        if self.trust.robust.rule in WEIGHING and found:
            weights = self._weigh(found, references, infos)
        if self.trust.robust.rule == "norm_bound":
            found = {i: self._bounded(u, references[i], weights[i], infos[i]) for i, u in found.items()}
        return {i: u for i, u in found.items() if weights[i] > 0}, weights

    def settle(
        self, found: RoundResults, contribute: Contribute, server: Any, key: Key
    ) -> dict[str, dict[str, float]]:
        """Add what the replies of a round contribute that have waited for each other.

        Args:
            found: the results of the round.
            contribute: maps an upload to a contribution.
            server: the state of the server.
            key: randomness of the attack.

        Returns:
            The weight of each reply, to be recorded, where a rule weighs them.
        """
        used: dict[int, Any] = {}
        weights: dict[int, float] = {}
        counts: dict[int, float] = {}
        infos = {c.id: c for c in self.task.clients}

        def judge(uploads: Mapping[int, Any]) -> Mapping[int, Any]:
            chosen, found = self.judge(uploads, server, key)
            used.update(chosen)
            weights.update(found)
            counts.update(zip(chosen, self._counts(infos, list(chosen)).tolist(), strict=True))
            return chosen

        def weighed(info: ClientInfo, upload: Any) -> Any:
            return self.weighed(contribute(info, upload), weights[info.id] / counts[info.id], len(used))

        found.contribute_together(judge, weighed)
        if self.trust.robust.rule not in WEIGHING:
            return {}
        return {"weight": {str(i): float(f"{w:.6g}") for i, w in weights.items()}}

    def weighed(self, contribution: Any, weight: float, count: int) -> Any:
        """What a reply contributes under the rule.

        Args:
            contribution: of its upload.
            weight: of the reply, over that by which it counts already.
            count: replies that are used.
        """
        return (
            reweighted(contribution, weight, count)
            if self.trust.robust.rule == "geometric_median"
            else contribution
        )

    def _weigh(
        self, uploads: Mapping[int, Any], references: Mapping[int, Any], infos: Mapping[int, ClientInfo]
    ) -> dict[int, float]:
        scales = {i: self.method.product_scale(self.task, infos[i]) for i in uploads}
        rule, n = self.trust.robust.rule, len(uploads)
        if rule == "norm_bound":
            norms = [norm(u, references[i], scales[i]) for i, u in uploads.items()]
            found = norm_factors(torch.tensor(norms, dtype=torch.float64))
        else:
            try:
                products = gram([blocks(u, references[i], scales[i]) for i, u in uploads.items()])
            except tree.TreeError as error:
                raise TaskError(
                    f"robust.rule = {rule!r} compares updates, and those of {self.method.title} differ in form: {error}. "
                    "Choose norm_bound."
                ) from error
            if rule == "geometric_median":
                found = geometric_median_weights(products, self._counts(infos, list(uploads)))
            else:
                hostile = hostile_count(self.trust.robust.hostile, n)
                found = krum_weights(products, hostile, 1 if rule == "krum" else n - hostile)
        return dict(zip(uploads, found.tolist(), strict=True))

    def _counts(self, infos: Mapping[int, ClientInfo], clients: Sequence[int]) -> Tensor:
        """By how much each client counts, float64 ``[n]``."""
        if self.trust.robust.weights == "equal":
            return torch.ones(len(clients), dtype=torch.float64)
        usual = max(1, median_low(info.examples for info in self.task.clients))
        robust = self.trust.robust
        return torch.tensor(
            [float(counted(infos[i], robust, usual).examples) for i in clients], dtype=torch.float64
        )

    def _bounded(self, upload: Any, reference: Any, factor: float, info: ClientInfo) -> Any:
        if factor >= 1:
            return upload
        scale = self.method.product_scale(self.task, info)
        return shrink(upload, reference, factor * norm(upload, reference, scale), scale)[0]


def aggregator_of(
    settings: RunSettings, clients: Sequence[ClientInfo], federation: Federation, round: int
) -> Aggregator:
    """What reduces the contributions of a round, by the rule that the settings ask for."""
    ids = [client.id for client in clients]
    if settings.secure.on:
        largest = max(info.examples for info in federation.infos)
        return SecureAggregator(ids, settings.secure, federation.key / "secure" / round, float(largest))
    if settings.robust.rule in COORDINATE_RULES:
        return RobustAggregator(ids, settings.robust.rule, settings.robust.hostile)
    return Aggregator(ids)


def reweighted(contribution: Any, weight: float, count: int) -> Any:
    """A contribution whose means weigh ``weight`` times what they do, and whose sums count ``count * weight`` times.

    Args:
        contribution: of a client.
        weight: its share of the whole.
        count: clients that contribute.
    """

    def change(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Mean):
            return Mean(leaf.value, leaf.weight * weight)
        if isinstance(leaf, Each):
            raise TaskError(f"the replies at {path or 'its top'} are seen one by one and have no weights")
        if leaf.counts:
            return leaf
        return Sum(tree.map(lambda t: _times(t, count * weight), leaf.value))

    return map_leaves(change, contribution)


def _times(t: Tensor, factor: float) -> Tensor:
    return t * factor if t.is_floating_point() else t
