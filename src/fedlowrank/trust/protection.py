"""A method whose updates are clipped, compressed or hidden by noise on their way to the server.

    client:  update -> clip -> [local noise] -> compress (with error feedback) -> message
    server:  decode -> contribution -> rule (mean or robust) -> [central noise] -> server_update

:class:`Protected` is itself a method and wraps another one, so every engine, the network and resumed
runs treat it like any method: the state that it keeps of a client, such as the error feedback, is committed with the
client's state, and the counted bytes are those of its messages.

Central differential privacy adds noise to a *sum*: noise of the server, or under secure sums over a network noise of the
clients (:mod:`fedlowrank.network.secure.distributed_noise`). A client's contribution is therefore the difference of the
contributions of its upload and of the reference, every client with weight 1. Its norm is bounded once more, and the noised
sum is divided by the expected number of clients, not by the number of those that replied.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.contract import (
    AnyMethod,
    ClientInfo,
    ClientModel,
    ClientView,
    Contribution,
    KeepsSumOfUploads,
    Mean,
    ServerView,
    Sum,
    Task,
    Update,
)
from ..core.contract.contribution import contribution_leaves, map_contributions
from ..core.contract.hook_results import check_pair
from ..core.contract.model import without_data
from ..core.contract.wrapper import MethodWrapper
from ..core.errors import NonFiniteError
from ..core.key import Key
from ..core.tree import Params
from ..training.tracing import trace_upload
from .abilities import require_ability, require_no_examples, require_no_sums_of_examples
from .compression import Compressed, compress, decompress, parse_stages, with_feedback
from .privacy.accounting import default_count_noise, next_clip, split_noise
from .privacy.budget import Budget
from .privacy.noise import NoiseSource, gaussian
from .stages import Stage
from .trust_settings import Trust
from .updates import (
    clip_update,
    compute_norm,
    compute_update,
    describe_dense_update,
    read_reference,
    remove_compared,
    replace_parts,
    replace_update,
    restore_compared,
)

logger = logging.getLogger(__name__)

_NORM_TOLERANCE = 1e-6
"""Largest relative difference between the norms that two machines compute for one update."""


@tree.tree_dataclass
class ClientState:
    """The client state of the wrapped method, and the residual of compression so far."""

    inner: Any
    residual: Params | None


@tree.tree_dataclass
class ServerState:
    """The server state of the wrapped method, and the clipping norm of the next round."""

    inner: Any
    clip: float


@tree.tree_dataclass
class Download:
    """The download of the wrapped method, and the clipping norm if it is adaptive."""

    message: Any
    clip: float | None


@tree.tree_dataclass
class Upload:
    """The upload of the wrapped method, with its update compressed.

    Attributes:
        remainder: the upload, without the update if that is compressed.
        update: the compressed update, or None.
        indicator: tensor ``[1]``, 1 if the norm was within the clipping norm, which adapts to it; None without adaptation.
    """

    remainder: Any
    update: Compressed | None
    indicator: Tensor | None


@dataclass(frozen=True)
class Protected(MethodWrapper[ServerState, ClientState, Download, Upload]):
    """A method with clipped, compressed and private updates; made by :func:`protect`.

    Attributes:
        inner: the wrapped method.
        task: task of the run; the examples of its models are copies that share no storage with a client's data.
        trust: settings of what happens to updates.
        noise: σ, the noise multiplier; 0 for no noise.
        expected: expected number of clients in a round, qN.
        system: whether noise comes from the operating system, and not from the seed of the run.
        distributed: whether, under central privacy, each client has added a part of the noise before the sum.
    """

    task: Task = field(kw_only=True, repr=False)
    trust: Trust = field(kw_only=True)
    noise: float = field(kw_only=True, default=0.0)
    expected: float = field(kw_only=True, default=1.0)
    system: bool = field(kw_only=True, default=False)
    distributed: bool = field(kw_only=True, default=False)

    title = "Protected"
    """Title of the class only; an object has the title of the wrapped method."""

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return parse_stages(self.trust.compression.uplink)

    @property
    def is_central(self) -> bool:
        """Whether the server adds noise."""
        return self.trust.privacy.kind == "central"

    @property
    def is_adaptive(self) -> bool:
        """Whether the clipping norm follows the norms of updates."""
        return self.trust.clipping.quantile is not None

    def describe_update(self, down: Download, client: ClientInfo, task: Task) -> Update:
        """Describe the wrapped method's update in a decoded upload; a compressed upload has one form."""
        update = self._update(down.message, client)
        indicator = torch.zeros(1) if self.is_adaptive else None
        form = None if self._stages or update.form is None else Upload(update.form, None, indicator)
        return Update(Upload(update.reference, None, None), update.scale, form)

    def _update(self, message: Any, client: ClientInfo) -> Update:
        return describe_dense_update(self.inner, message, client, self.task)

    def server_init(self, task: Task) -> ServerState:
        """The wrapped method's initial state, and the first clipping norm."""
        return ServerState(self.inner.server_init(task), float(self.trust.clipping.norm or 0.0))

    def client_init(self, client: ClientInfo, task: Task) -> ClientState:
        """The wrapped method's initial state, without a residual."""
        return ClientState(self.inner.client_init(client, task), None)

    def download(self, server: ServerState, client: ClientInfo) -> Download:
        """The wrapped method's download, and the clipping norm if it is adaptive."""
        return Download(self.inner.download(server.inner, client), server.clip if self.is_adaptive else None)

    def local_update(
        self, state: ClientState, down: Download, view: ClientView
    ) -> tuple[ClientState, Upload]:
        """Run the wrapped method's ``local_update``, then clip, add noise and compress."""
        definition = self._update(down.message, view.info)
        reference = definition.reference
        try:
            inner_state, upload = check_pair(
                self.inner, self.inner.local_update(state.inner, down.message, view)
            )
            is_trained = True
        except Exception as error:
            if not self._must_hide(error):
                raise
            logger.warning(
                "%s: %s Under privacy.kind = %r run.on_nan does not apply: the client sends an update of zeros and keeps "
                "its state, and the server does not learn of the error.",
                type(error).__name__,
                error,
                self.trust.privacy.kind,
            )
            inner_state, upload, is_trained = state.inner, self._without_change(reference, down, view), False
        upload, indicator = self._clip_update(upload, definition, down)
        if indicator is not None and not is_trained:
            indicator = torch.zeros(1)
        if self.trust.privacy.kind == "local":
            upload = self._with_local_noise(upload, reference, down, view)
        follow_upload = functools.partial(self._follow, state.inner, inner_state, down.message, view)
        if not self._stages:
            return ClientState(follow_upload(upload), None), Upload(upload, None, indicator)
        update = compute_update(upload, reference, compared_only=True)
        key, has_feedback = view.key / "compression", self.trust.compression.error_feedback
        reference_numbers = read_reference(reference, reference)
        remainder, residual = remove_compared(upload, reference), None
        if has_feedback:
            # what compression loses is sent later, so that sums of all uploads are exact up to the current residual
            compressed, residual = with_feedback(self._stages, update, state.residual, key, reference_numbers)
        else:
            compressed = compress(self._stages, tree.cast_like(update, reference_numbers), key)
            if isinstance(self.inner, KeepsSumOfUploads):
                upload = restore_compared(
                    remainder, reference, decompress(self._stages, compressed, reference_numbers)
                )
        return ClientState(follow_upload(upload), residual), Upload(remainder, compressed, indicator)

    def _follow(self, state: Any, next_state: Any, message: Any, view: ClientView, upload: Any) -> Any:
        method: Any = self.inner
        if not isinstance(method, KeepsSumOfUploads):
            return next_state
        return method.follow_upload(state, next_state, message, upload, view)

    def _must_hide(self, error: Exception) -> bool:
        """Whether to hide from the server that training failed; a simulation hides no programming error."""
        is_private = self.trust.privacy.kind != "none"
        return is_private and (self.system or isinstance(error, NonFiniteError))

    def _without_change(self, reference: Any, down: Download, view: ClientView) -> Any:
        """An upload without any change, in the form that shape tracing finds without data."""
        upload, _ = trace_upload(self.inner, self.task, view.info, down.message)
        return replace_parts(upload, read_reference(upload, reference))

    def _clip_update(self, upload: Any, definition: Update, down: Download) -> tuple[Any, Tensor | None]:
        bound = self.trust.clipping.norm if down.clip is None else down.clip
        if bound is None:
            return upload, None
        # noise hides the numbers that are sent, so their norm is bounded; without noise, that of the effective update
        effective, reference = self.trust.privacy.kind == "none", definition.reference
        upload, norm = clip_update(upload, reference, bound, definition.scale, effective=effective)
        if not effective and not math.isfinite(norm):
            # an update that cannot be bounded is not sent
            upload = replace_parts(upload, read_reference(upload, reference))
        return upload, torch.tensor([float(norm <= bound)]) if self.is_adaptive else None

    def _with_local_noise(self, upload: Any, reference: Any, down: Download, view: ClientView) -> Any:
        # computed in float64, and rounded once
        update = {path: u.double() for path, u in compute_update(upload, reference).items()}
        bound = self.trust.clipping.norm if down.clip is None else down.clip
        noise = gaussian(update, self.noise * float(bound or 0.0), self._source(view.key))
        return replace_update(upload, reference, {path: u + noise[path] for path, u in update.items()})

    def decode(self, server: ServerState, upload: Upload, client: ClientInfo) -> Upload:
        """The upload with its update decompressed; :meth:`contribution` accepts both forms."""
        if upload.update is None:
            return upload
        reference = self._update(self.inner.download(server.inner, client), client).reference
        reference_numbers = read_reference(reference, reference)
        decoded_upload = restore_compared(
            upload.remainder, reference, decompress(self._stages, upload.update, reference_numbers)
        )
        return Upload(decoded_upload, None, upload.indicator)

    def contribution(self, server: ServerState, upload: Upload, client: ClientInfo) -> Contribution:
        """The wrapped method's contribution; under central privacy, its difference from that of the reference."""
        upload = self.decode(server, upload, client)
        if self.is_central:
            down = self.inner.download(server.inner, client)
            contribution: Contribution = {
                "sum": Sum(self.change(server, Download(down, None), upload, client))
            }
        else:
            # a client's number of examples is private, so under privacy no weight depends on it
            client = client if self.trust.privacy.kind == "none" else _unweighted(client)
            contribution = self.inner.contribution(
                server.inner, self._bound(server, upload.remainder, client), client
            )
        if upload.indicator is None:
            return contribution
        # b - 1/2: a client changes the sum by at most 1/2
        indicator = upload.indicator.double().clamp(0, 1) - 0.5
        count = Sum(torch.ones_like(indicator), counts=True)
        return {"method": contribution, "within": Sum(indicator, counts=True), "count": count}

    def _bound(self, server: ServerState, upload: Any, client: ClientInfo) -> Any:
        """The upload with its update clipped to the clipping norm again, since a hostile client may have exceeded it.

        The update of an honest client is within the norm, so nothing changes. This does not hold for compressed updates, to
        which a client adds its residual, nor for updates with local noise; and the server does not see masked updates.
        """
        trust = self.trust
        if trust.clipping.norm is None or trust.privacy.kind != "none" or self._stages or trust.secure.on:
            return upload
        bound = server.clip if self.is_adaptive else trust.clipping.norm
        update = self._update(self.inner.download(server.inner, client), client)
        norm = compute_norm(upload, update.reference, update.scale)
        if norm <= bound * (1 + _NORM_TOLERANCE):
            return upload
        if not math.isfinite(norm):
            return replace_parts(upload, read_reference(upload, update.reference))
        return clip_update(upload, update.reference, bound, update.scale)[0]

    def change(self, server: ServerState, down: Download, upload: Upload, client: ClientInfo) -> Params:
        """The difference between the contributions of an upload and of the reference, clipped to the clipping norm C.

        Args:
            server: state of the server; its initial state if clients compute the difference.
            down: download that the client received.
            upload: decoded upload of the client.
            client: client that sent the upload; its example count is not used.

        Returns:
            Float64 tensors by their paths in the contribution, whose joint norm is at most C.
        """
        client = _unweighted(client)
        reference_numbers = dict(_numbers(self._base(server, down.message, client)))
        upload_numbers = dict(_numbers(self.inner.contribution(server.inner, upload.remainder, client)))
        change = {path: upload_numbers[path].double() - t.double() for path, t in reference_numbers.items()}
        norm = math.sqrt(sum(float(t.square().sum()) for t in change.values()))
        return {path: t * min(1.0, server.clip / norm) if norm else t for path, t in change.items()}

    def _base(self, server: ServerState, message: Any, client: ClientInfo) -> Contribution:
        """The contribution of the reference, as of a client whose training changed nothing."""
        reference = self._update(message, client).reference
        return self.inner.contribution(server.inner, reference, _unweighted(client))

    def without_replies(self) -> Any:
        """An empty sum if the server adds the noise, since a round without clients releases noise, too; otherwise None."""
        if not self.is_central or self.distributed:
            return None
        zero = torch.zeros(1, dtype=torch.float64)
        empty_sum: Any = {"sum": {}}
        return {"method": empty_sum, "within": zero, "count": zero} if self.is_adaptive else empty_sum

    def server_update(self, server: ServerState, total: Any, view: ServerView) -> ServerState:
        """Run the wrapped method's server step on the total or the noised sum, and adapt the clipping norm."""
        clip, noise = server.clip, self.noise
        if self.is_adaptive:
            share = self._share_within(total, self._source(view.key))
            if self.is_central:
                noise = split_noise(noise, default_count_noise(self.expected))
            clip = next_clip(clip, share, self.trust.clipping.quantile or 0.5, self.trust.clipping.rate)
            total = total["method"]
        if self.is_central:
            total = self._add_noise(server, total["sum"], noise, view)
            view = dataclasses.replace(view, replied=(), planned=self.expected)
        elif self.trust.privacy.kind == "local":
            view = dataclasses.replace(view, replied=[_unweighted(client) for client in view.replied])
        return ServerState(self.inner.server_update(server.inner, total, view), clip)

    def _share_within(self, total: Any, source: NoiseSource) -> float:
        """Share of the updates that were within the clipping norm."""
        indicator_sum, count = float(total["within"]), float(total["count"])
        if self.is_central:
            noise_source = source if isinstance(source, str) else source / "within"
            std = default_count_noise(self.expected)
            indicator_sum += float(gaussian({"": torch.zeros(1)}, std, noise_source)[""])
            count = self.expected
        return 0.5 + indicator_sum / count

    def _source(self, key: Key) -> NoiseSource:
        """Source of the noise: the operating system or a key."""
        return "system" if self.system else key / "noise"

    def _add_noise(self, server: ServerState, change_sums: Params, noise: float, view: ServerView) -> Any:
        """The wrapped method's total: contribution of the reference plus noised sum divided by the expected number."""
        first_client = view.task.clients[0]
        base = self._base(server, self.inner.download(server.inner, first_client), first_client)
        zeros = {path: torch.zeros_like(t, dtype=torch.float64) for path, t in _numbers(base)}
        std = 0.0 if self.distributed else noise * server.clip
        noise_tensors = gaussian(zeros, std, self._source(view.key))
        noised = {path: change_sums.get(path, zero) + noise_tensors[path] for path, zero in zeros.items()}

        def total(path: str, leaf: Any) -> Any:
            # in a Sum, the reference counts once for every expected client
            factor, divisor = (1.0, self.expected) if isinstance(leaf, Mean) else (self.expected, 1.0)
            return replace_parts(
                leaf.value,
                {
                    leaf_path: (t.double() * factor + noised[path + leaf_path] / divisor).to(t)
                    for leaf_path, t in tree.leaves(leaf.value)
                },
            )

        return map_contributions(total, base)

    def client_model(self, state: ClientState, down: Download, view: ClientView) -> ClientModel:
        """The wrapped method's model of a client."""
        return self.inner.client_model(state.inner, down.message, view)

    def server_model(self, server: ServerState, state: ClientState, view: ClientView) -> Params | None:
        """The wrapped method's model of the server."""
        return self.inner.server_model(server.inner, state.inner, view)

    def server_metrics(self, server: ServerState) -> dict[str, dict[str, float]]:
        """The wrapped method's metrics, and the clipping norm if it is adaptive."""
        clip = {"clipping": {"norm": server.clip}} if self.is_adaptive else {}
        return {**self.inner.server_metrics(server.inner), **clip}


def protect(
    method: AnyMethod,
    task: Task,
    trust: Trust,
    budget: Budget | None,
    *,
    expected_count: float,
    is_deployed: bool,
) -> AnyMethod:
    """Wrap a method so that its updates are protected as the settings say; return the method if they say nothing.

    Args:
        method: method to protect.
        task: task of the run.
        trust: settings of what happens to updates.
        budget: privacy budget, or None for none.
        expected_count: expected number of clients in a round, qN.
        is_deployed: whether the run is over a network, where noise comes from the operating system, since others could
            know the seed of a run, and where under secure sums the clients add the noise of central privacy.

    Raises:
        TaskError: if something cannot be done with the method's updates; the message gives the reason.
    """
    privacy, rule = trust.privacy.kind, trust.robust.rule
    if privacy != "none":
        require_ability(method, task, privacy, f"privacy.kind = {privacy!r}")
    stages = parse_stages(trust.compression.uplink)
    if stages:
        require_ability(method, task, "compression", f"compression.uplink = {trust.compression.uplink!r}")
    if rule != "mean":
        require_no_examples(method, task, f"robust.rule = {rule!r}")
    if rule in ("median", "trimmed_mean", "geometric_median"):
        require_ability(method, task, "robust", f"robust.rule = {rule!r}")
        if trust.robust.weights == "examples":
            require_no_sums_of_examples(
                method, task, f"robust.rule = {rule!r} with robust.weights = 'examples'"
            )
    if trust.secure.on:
        require_ability(method, task, "secure", "secure.on")
    if not stages and trust.clipping.norm is None:
        return method
    noise = 0.0 if budget is None else budget.noise
    if privacy == "central" and trust.clipping.quantile is not None:
        # raises an error for too few clients before any client is trained
        split_noise(noise, default_count_noise(expected_count))
    models = {name: without_data(model) for name, model in task.architectures.items()}
    protected_method = Protected(
        inner=method,
        trust=trust,
        noise=noise,
        expected=expected_count,
        system=is_deployed,
        distributed=is_deployed and trust.secure.on and privacy == "central",
        task=dataclasses.replace(task, architectures=models),
    )
    if stages:
        _warn_of_growth(method, protected_method, task, trust.compression.uplink)
    return protected_method


def decompress_upload(method: AnyMethod, server: Any, upload: Any, client: ClientInfo) -> Any:
    """Undo the compression of an upload, whose numbers are then relative to the reference of its update.

    Args:
        method: method of the run.
        upload: upload as it arrived.
        client: client that sent the upload.
        server: state of the server.
    """
    return method.decode(server, upload, client) if isinstance(method, Protected) else upload


def total_without_replies(method: AnyMethod) -> Any:
    """The total of a round without contributions; None if the server keeps its state."""
    return method.without_replies() if isinstance(method, Protected) else None


def _warn_of_growth(method: AnyMethod, protected_method: Protected, task: Task, uplink: str) -> None:
    """Log a warning if compressed messages are larger than plain ones."""
    info = task.clients[0]
    sizes = []
    for candidate in (method, protected_method):
        down = candidate.download(candidate.server_init(task), info)
        sizes.append(tree.encoded_size(trace_upload(candidate, task, info, down)[0]))
    if sizes[1] >= sizes[0]:
        logger.warning(
            "compression.uplink = %r makes messages of %d bytes of %d; leave it out for so small an update",
            uplink,
            sizes[1],
            sizes[0],
        )


def _numbers(contribution: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a contribution's sums and means, with their paths."""
    for path, leaf in contribution_leaves(contribution):
        if isinstance(leaf, (Mean, Sum)):
            yield from tree.leaves(leaf.value, path)


def _unweighted(client: ClientInfo) -> ClientInfo:
    """The client with one example, so that its contribution has weight 1."""
    return dataclasses.replace(client, example_count=1)
