"""Steps that need all uploads of a round at once: attacks, and rules that weigh or bound single replies."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, Each, Mean, Sum, Task, Update
from ..core.contract.contribution import Aggregator, contribution_leaves, map_contributions
from ..core.errors import ConfigError, TaskError
from ..core.key import Key
from ..data.federation import Federation
from ..training.tracing import trace_upload
from ..trust.attacks import attack_updates
from ..trust.protection import decompress_upload
from ..trust.robust import (
    COORDINATE_RULES,
    RobustAggregator,
    geometric_median_weights,
    hostile_count,
    krum_weights,
    norm_factors,
)
from ..trust.secure_sums import MIN_REPLIES, SecureAggregator
from ..trust.trust_settings import Robust, Trust
from ..trust.updates import (
    clip_update,
    compute_gram_matrix,
    compute_norm,
    compute_update,
    compute_update_parts,
    describe_dense_update,
    list_fixed_factors,
    replace_update,
    split_products,
)
from .round_results import Contribute, RefusedError, RoundResults
from .run_settings import RunSettings

logger = logging.getLogger(__name__)

BY_MEAN = ("alie", "inner_product")
"""Attacks that send a multiple of the honest mean or of its deviation."""

ON_UPDATES = ("sign_flip", "scaled", "gaussian", "alie", "inner_product")
"""Attacks on updates; the others change data or sizes."""

WEIGHING = ("norm_bound", "krum", "multi_krum", "geometric_median")
"""Rules that compare whole replies; the others reduce each coordinate separately."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Attacks on the uploads of a round, and the rule by which the server weighs them.

    Peak memory: all uploads of a round.

    Attributes:
        method: method that made the uploads.
        task: task of the run.
        trust: settings that name the attack and the rule.
        hostile: identifiers of the hostile clients.
        effective: whether products are compared; False where the server averages the factors separately.
    """

    method: AnyMethod
    task: Task
    trust: Trust
    hostile: frozenset[int]
    effective: bool = True

    @classmethod
    def of(cls, method: AnyMethod, task: Task, trust: Trust, hostile: frozenset[int]) -> Inspection | None:
        """Make the inspection of a run, or return None if no attack and no rule needs all uploads at once."""
        is_needed = trust.attack.kind in ON_UPDATES or trust.robust.rule in WEIGHING
        if not is_needed:
            return None
        server, client = method.server_init(task), task.clients[0]
        down = method.download(server, client)
        upload, _ = trace_upload(method, task, client, down)
        reference = describe_dense_update(method, down, client, task).reference
        if trust.attack.kind in BY_MEAN and list_fixed_factors(upload, reference):
            raise ConfigError(
                f"attack.kind = {trust.attack.kind!r} needs the mean of honest updates, and {method.title} sends an update as "
                "new factors, whose mean is no update. Choose sign_flip, scaled or gaussian"
            )
        averaged = averages_factors(method.contribution(server, upload, client))
        return cls(method, task, trust, hostile, not averaged)

    def judge(
        self,
        uploads: Mapping[int, Any],
        server: Any,
        key: Key,
        weigh: Callable[[int, Any], float],
        refused_count: int = 0,
    ) -> tuple[dict[int, Any], dict[int, float]]:
        """Select the uploads that are used and compute the weight of each.

        Args:
            uploads: uploads as they arrived, by client.
            server: state of the server.
            key: key of the attack's randomness.
            weigh: function that gives the weight of a client's decoded upload in the method's own mean.
            refused_count: number of further replies of the round that were refused.

        Returns:
            Decoded uploads of the clients that the rule has kept, and the weight of every reply. A selection rule
            gives the share of each selected reply and 0 to the others; a bound on norms gives the factor that scales
            the update.

        Raises:
            TaskError: if the rule cannot be applied to these uploads.
        """
        method, infos = self.method, {c.id: c for c in self.task.clients}
        decoded_uploads = {i: decompress_upload(method, server, u, infos[i]) for i, u in uploads.items()}
        definitions = {i: self._update(infos[i], server) for i in decoded_uploads}
        references = {i: definition.reference for i, definition in definitions.items()}
        if self.trust.attack.kind in ON_UPDATES:
            updates = {i: compute_update(u, references[i]) for i, u in decoded_uploads.items()}
            attacked_updates = attack_updates(updates, self.hostile, self.trust.attack, key)
            attacked_ids = {i for i in decoded_uploads if i in self.hostile}
            for i in attacked_ids:
                fixed_factors = {
                    p: updates[i][p] for p in list_fixed_factors(decoded_uploads[i], references[i])
                }
                attacked_update = attacked_updates[i] | fixed_factors
                decoded_uploads[i] = replace_update(decoded_uploads[i], references[i], attacked_update)
        weights = dict.fromkeys(decoded_uploads, 1.0)
        if self.trust.robust.rule in WEIGHING and decoded_uploads:
            weights = self._weigh(decoded_uploads, definitions, weigh, refused_count)
            if self.trust.robust.rule == "norm_bound":
                for i, u in decoded_uploads.items():
                    decoded_uploads[i] = self._bounded(u, definitions[i], weights[i])
        return {i: u for i, u in decoded_uploads.items() if weights[i] > 0}, weights

    def judge_round(
        self, results: RoundResults, contribute: Contribute, server: Any, key: Key
    ) -> dict[str, dict[str, float]]:
        """Add the contributions of the replies that were held back until all had arrived.

        Args:
            results: results of the round.
            contribute: function that maps an upload to a contribution.
            server: state of the server.
            key: key of the attack's randomness.

        Returns:
            The weight of each reply for the record, if a rule weighs them.
        """
        used_uploads: dict[int, Any] = {}
        weights: dict[int, float] = {}
        own_weights: dict[int, float] = {}
        infos = {c.id: c for c in self.task.clients}

        def weigh(client_id: int, upload: Any) -> float:
            try:
                own_weights[client_id] = find_weight(contribute(infos[client_id], upload))
            except RefusedError:
                # it is refused again, with its reason, when its contribution is added
                own_weights[client_id] = 0.0
            return own_weights[client_id]

        def judge(uploads: Mapping[int, Any]) -> Mapping[int, Any]:
            refused_count = len(results.refused)
            quorum = least_replies(self.trust.robust, len(uploads) + refused_count, refused_count)
            if uploads and len(uploads) < quorum:
                results.aggregator.reason = (
                    f"{self.trust.robust.rule} needs at least {quorum} replies, and there were {len(uploads)}"
                )
                return {}
            selected_uploads, rule_weights = self.judge(uploads, server, key, weigh, refused_count)
            used_uploads.update(selected_uploads)
            weights.update(rule_weights)
            return selected_uploads

        def contribute_weighted(info: ClientInfo, upload: Any) -> Any:
            contribution = contribute(info, upload)
            if self.trust.robust.rule != "geometric_median":
                return contribution
            # the contribution has the method's weight already; relative to the mean, so that a sum, which has no weights,
            # keeps its size
            mean_weight = sum(own_weights[i] for i in used_uploads) / len(used_uploads)
            factor = weights[info.id] * mean_weight / own_weights[info.id] if own_weights[info.id] else 0.0
            return reweight(contribution, factor, len(used_uploads))

        results.contribute_together(judge, contribute_weighted)
        if self.trust.robust.rule not in WEIGHING:
            return {}
        return {"weight": {str(i): float(f"{w:.6g}") for i, w in weights.items()}}

    def _update(self, info: ClientInfo, server: Any) -> Update:
        down = self.method.download(server, info)
        return describe_dense_update(self.method, down, info, self.task)

    def _weigh(
        self,
        uploads: Mapping[int, Any],
        definitions: Mapping[int, Update],
        weigh: Callable[[int, Any], float],
        refused_count: int,
    ) -> dict[int, float]:
        rule, n, effective = self.trust.robust.rule, len(uploads), self.effective
        if rule == "norm_bound":
            norms = [
                compute_norm(u, definitions[i].reference, definitions[i].scale, effective=effective)
                for i, u in uploads.items()
            ]
            weights = norm_factors(torch.tensor(norms, dtype=torch.float64))
        else:
            own_weights = torch.tensor([weigh(i, u) for i, u in uploads.items()], dtype=torch.float64)
            try:
                products = compute_gram_matrix(
                    [
                        compute_update_parts(
                            u, definitions[i].reference, definitions[i].scale, effective=effective
                        )
                        for i, u in uploads.items()
                    ]
                )
            except tree.TreeError as error:
                raise TaskError(
                    f"robust.rule = {rule!r} compares updates, and those of {self.method.title} differ in "
                    f"form: {error}. Choose norm_bound."
                ) from error
            if rule == "geometric_median":
                is_equal = self.trust.robust.weights == "equal"
                base_weights = torch.ones_like(own_weights) if is_equal else own_weights
                weights = geometric_median_weights(products, base_weights)
            else:
                hostile = _hostile(self.trust.robust, n + refused_count, refused_count)
                weights = krum_weights(products, hostile, 1 if rule == "krum" else n - hostile)
                shares = weights * own_weights
                weights = shares / shares.sum() if float(shares.sum()) > 0 else weights
        return dict(zip(uploads, weights.tolist(), strict=True))

    def _bounded(self, upload: Any, definition: Update, factor: float) -> Any:
        if factor >= 1:
            return upload
        size = compute_norm(upload, definition.reference, definition.scale, effective=self.effective)
        return clip_update(
            upload, definition.reference, factor * size, definition.scale, effective=self.effective
        )[0]


def least_replies(robust: Robust, count: int, refused_count: int = 0) -> int:
    """Count the replies that a rule needs besides those that were refused; 0 if any number suffices.

    Krum needs 2 f + 3 replies, a trimmed mean 2 f + 1 (one more than it drops), and the median 3 (that of two is
    their mean).

    Args:
        robust: settings of the rule.
        count: number of replies that are expected or that came, including the refused ones.
        refused_count: number of refused replies among them; they count as hostile.
    """
    hostile = _hostile(robust, count, refused_count)
    minimum_by_rule = {
        "krum": 2 * hostile + 3,
        "multi_krum": 2 * hostile + 3,
        "trimmed_mean": 2 * hostile + 1,
        "median": 3,
    }
    return minimum_by_rule.get(robust.rule, 0)


def _hostile(robust: Robust, count: int, refused_count: int) -> int:
    """Count the remaining replies that may be hostile."""
    return max(0, hostile_count(robust.hostile, count) - refused_count)


def check_replies(trust: Trust, count: int) -> None:
    """Refuse a protection that needs more replies than a round is expected to have.

    Args:
        trust: settings of the protection.
        count: number of replies that are expected.

    Raises:
        ConfigError: if more replies are needed; the message says how many.
    """
    if count < (quorum := least_replies(trust.robust, count)):
        advice = "" if trust.robust.rule == "median" else " or lower robust.hostile"
        raise ConfigError(
            f"robust.rule = {trust.robust.rule!r} needs at least {quorum} replies a round, and {count} clients are "
            f"drawn; raise run.participation{advice}"
        )
    if trust.secure.on and count < MIN_REPLIES:
        raise ConfigError(
            f"secure.on needs at least {MIN_REPLIES} replies a round, for the sum of one is what a client sent, and "
            f"{count} clients are drawn; raise run.participation"
        )


def warn_of_few_replies(robust: Robust, count: int, round: int) -> None:
    """Warn if a coordinate-wise rule had fewer replies than it needs against the assumed share of hostile ones.

    Args:
        robust: settings of the rule.
        count: number of replies that came.
        round: index of the round, from 0.
    """
    quorum = least_replies(robust, count)
    if robust.rule in COORDINATE_RULES and 0 < count < quorum:
        logger.warning(
            "round %d: %s of %d replies needs at least %d: a hostile reply among them is not dropped",
            round + 1,
            robust.rule,
            count,
            quorum,
        )


def find_weight(contribution: Any) -> float:
    """Find the weight of a contribution in a mean, the largest if there are several; 1 if there is none."""
    leaves = contribution_leaves(contribution)
    return max((float(leaf.weight) for _, leaf in leaves if isinstance(leaf, Mean)), default=1.0)


def averages_factors(contribution: Any) -> bool:
    """Whether the server averages factors and not products; then the reply (cB, A/c) differs from (B, A)."""

    def holds(value: Any) -> bool:
        if split_products(value):
            return True
        return any(holds(child) for _, child in tree.children(value) or ())

    return any(
        isinstance(leaf, (Mean, Sum)) and holds(leaf.value) for _, leaf in contribution_leaves(contribution)
    )


def aggregator_of(
    settings: RunSettings, clients: Sequence[ClientInfo], federation: Federation, round: int
) -> Aggregator:
    """Make the aggregator of a round for the rule that the settings name."""
    client_ids = [client.id for client in clients]
    if settings.secure.on:
        max_examples = max(info.example_count for info in federation.infos)
        return SecureAggregator(
            client_ids, settings.secure, federation.key / "secure" / round, float(max_examples)
        )
    if settings.robust.rule in COORDINATE_RULES:
        return RobustAggregator(client_ids, settings.robust.rule, settings.robust.hostile)
    return Aggregator(client_ids)


def reweight(contribution: Any, weight: float, count: int) -> Any:
    """Multiply the weights of a contribution's means by ``weight``, and its sums by ``count * weight``.

    Args:
        contribution: contribution of a client.
        weight: share of the client in the whole.
        count: number of clients that contribute.
    """

    def change(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Mean):
            return Mean(leaf.value, leaf.weight * weight)
        if isinstance(leaf, Each):
            raise TaskError(f"the replies at {path or 'its top'} are seen one by one and have no weights")
        if leaf.counts:
            return leaf
        return Sum(tree.map_leaves(lambda t: _times(t, count * weight), leaf.value))

    return map_contributions(change, contribution)


def _times(t: Tensor, factor: float) -> Tensor:
    return t * factor if t.is_floating_point() else t
