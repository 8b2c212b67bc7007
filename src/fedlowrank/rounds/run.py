"""One run: its state, and the steps of a round. The loop over rounds is in :mod:`.round_loop`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, ServerView
from ..core.contract.contribution import Aggregator
from ..core.contract.download_cache import Downloads
from ..core.contract.hook_results import (
    check_participants,
    check_server_metrics,
    check_server_state,
    check_tree,
)
from ..core.io.text import format_count
from ..core.tree import Params
from ..data.federation import Federation
from ..engines.engine import ClientJob, Engine
from ..engines.jobs import LazyJobs
from ..results.client_metrics import OwnMetrics, choose_metrics
from ..results.evaluation.backdoor import backdoor_success
from ..results.evaluation.evaluator import Evaluator
from ..results.evaluation.local_model import LocalModel, make_local_model
from ..results.measurements import ClientTable
from ..results.records import RoundRecord
from ..storage.client_store import ClientStore, LazyMapping
from ..storage.state import State
from ..training.cohorts.cohort_uploads import CohortContribution, CohortUploads
from ..training.flops import forward_flops
from ..training.hook_calls import (
    check_call,
    check_single_call,
    init_client_state,
    refuse_global_draws,
    seed_for_hook,
)
from ..trust.attacks import trigger_value
from ..trust.privacy.budget import Budget
from ..trust.protection import protect, total_without_replies
from ..trust.secure_sums import SecureAggregator, warn_of_coarse_grid
from .inspection import Inspection, aggregator_of, check_replies, warn_of_few_replies
from .participation.communication import Volume, draw_lost_replies
from .participation.devices import DeviceClock, RoundTiming
from .participation.participants import Participants
from .participation.unequal_sampling import check_weights, next_losses
from .plan import Plan
from .round_results import Clock, RoundResults
from .run_settings import RunSettings
from .setup.averaged_statistics import average_statistics
from .setup.client_ranks import find_client_rank
from .setup.preparation import (
    apply_attack,
    check_classes,
    check_parts,
    compute_median_examples,
    limit_weight,
    move_to_device,
)
from .setup.single_examples import check_single_examples

MAX_CLIENTS_TO_EVALUATE_ALL = 1000
"""Maximum number of clients that are all evaluated; of more clients, half of this number is evaluated."""

logger = logging.getLogger(__name__)


class Run:
    """A run with everything that it needs to go on.

    Args:
        method: method that the run trains.
        federation: clients and their data.
        settings: protocol of the run.
        engine: engine that executes the clients of a round. Runs may share it: the attribute :attr:`engine` is this
            one, or a copy with the micro batch of the settings.
        plan: plan of a resumed run; None for a new run, which is planned by its number of rounds.
        own_metrics: functions that are measured besides ``run.metrics``.

    Attributes:
        plan: values that follow from the number of rounds with which the run began.
        state: current state; replaced as a whole, so that an interrupted round leaves the previous state.
        unsaved: identifiers of clients whose state changed since it was last saved.
        client_sampler: sampler of the participants of each round.
        budget: privacy budget, or None.
        hostile: identifiers of hostile clients, in a simulation of attacks.
        evaluated: records of the clients that are evaluated.
        stopped: reason why the run ends before its last round; empty if it does not.
        device_clock: simulated speed and availability of the clients.
        evaluate_every: number of rounds between evaluations, known once the first round has measured the cost of
            training.

    Raises:
        TaskError: if the method does not fit the federation.
    """

    evaluates_late: ClassVar[bool] = False
    """Whether a round's evaluation is known only after the next round, by :meth:`take_late_evaluation`."""

    is_deployed: ClassVar[bool] = False
    """Whether the clients are on other machines, which must not know the noise that is drawn."""

    def __init__(
        self,
        method: AnyMethod,
        federation: Federation,
        settings: RunSettings,
        engine: Engine,
        plan: Plan | None = None,
        own_metrics: OwnMetrics | None = None,
    ) -> None:
        plan = plan or Plan.of(settings.rounds)
        self.trust = settings.trust
        for architecture in federation.architectures.values():
            architecture.refuse_later_changes()
        is_backdoor = self.trust.attack.kind == "backdoor"
        self._trigger = trigger_value(federation.clients) if is_backdoor else None
        self.hostile, federation = apply_attack(federation, settings)
        self.federation = move_to_device(federation, settings)
        self.settings = settings
        self.engine = engine.with_micro_batch(settings.micro_batch)
        self.device_clock = DeviceClock(settings.devices, len(federation.infos), federation.key)
        check_parts(method, self.federation, settings.micro_batch)
        self.task = self.federation.task(settings.rounds)
        check_classes(method, self.federation)
        secret = self.is_deployed and settings.privacy.kind != "none"
        self.client_sampler = Participants(len(federation.infos), settings, federation.key, secret=secret)
        if not self.is_deployed:
            check_single_examples(method, self.federation, self.client_sampler.unseen)
        self.budget = self._make_budget(plan)
        if settings.sampling in ("size", "loss"):
            check_weights(method, self.task, settings.sampling)
        method = average_statistics(method, self.task, settings)
        count = round(self.client_sampler.expected)
        engine_name = self.engine.choose_for_run(method, self.federation, count, plan.engine)
        self.plan = Plan(plan.interval, None if self.budget is None else self.budget.noise, engine_name)
        self.method = protect(
            method,
            self.task,
            self.trust,
            self.budget,
            expected_count=self.client_sampler.expected,
            is_deployed=self.is_deployed,
        )
        self.inspection = Inspection.of(self.method, self.task, self.trust, self.hostile)
        check_replies(self.trust, count)
        if self.trust.secure.on:
            warn_of_coarse_grid(self.trust.secure)
        self.evaluator = self._make_evaluator(own_metrics)
        initial = {name: model.initial for name, model in self.task.architectures.items()}
        with (
            seed_for_hook(self.method, "server_init", self.task.key),
            check_single_call(self.method, "server_init", task=initial),
        ):
            server = check_tree(self.method, "server_init", self.method.server_init(self.task))
        server = self.engine.boundary(server)
        self.state = State(0, server, self.new_store())
        self.unsaved: set[int] = set()
        self._warned: set[int] = set()
        self._warned_of_clipping = False
        self._warned_of_coarse_weights = False
        self._draws_refused: dict[str, int] = {}
        self.stopped = ""
        # each value is stored with the federation it was computed from: a federation is frozen, and no other
        # object can have its identity while it is referenced here
        self._median_examples: tuple[Federation, int] | None = None
        self._examples_by_size: tuple[Federation, dict[int, int]] | None = None
        self.evaluated = self._evaluated_clients()
        self.evaluate_every = settings.evaluate_every or 1
        # make every client's state now, so that a method that does not fit fails here and not in round 7
        for info in federation.infos:
            init_client_state(self.method, self.task, info)

    def _make_budget(self, plan: Plan) -> Budget | None:
        """Make the privacy budget of the run; None for a run without privacy."""
        if self.trust.privacy.kind == "none":
            return None
        return Budget(
            self.trust.privacy,
            self.client_sampler.sampling,
            self.settings.rounds,
            self.settings.participation,
            seeded=not self.is_deployed,
            noise=plan.noise,
        )

    def _make_evaluator(self, own_metrics: OwnMetrics | None) -> Evaluator:
        """Make the evaluator of clients' models, with the metrics of the settings and the user's own functions."""
        form = self.federation.clients[0].train
        metrics = choose_metrics(
            self.settings.metrics,
            form,
            self.task.classes,
            self.task.loss,
            own_metrics,
            self.task.architectures.values(),
        )
        return Evaluator(self.method, self.federation, self.task, self.engine, metrics)

    @property
    def round(self) -> int:
        """Number of completed rounds."""
        return self.state.round

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        device = self.settings.device
        moved_states = LazyMapping(state.clients, lambda i: tree.move(state.clients[i], device))
        client_states = self.new_store() | (state.clients if device == "cpu" else moved_states)
        self.state = State(state.round, tree.move(state.server, device), client_states, dict(state.losses))

    def new_store(self) -> ClientStore:
        """Make an empty client-state store with the memory limit of the settings."""
        limit = self.settings.client_memory
        return ClientStore(None if limit is None else limit << 20, self.settings.device)

    def state_of(self, info: ClientInfo) -> Any:
        """Get the state of a client, a fresh one if it never took part."""
        if info.id in self.state.clients:
            return self.state.clients[info.id]
        return self.engine.boundary(init_client_state(self.method, self.task, info))

    def personal_params(self, info: ClientInfo) -> Params:
        """Get the parameters of the whole model that a client would use now, with its batch statistics."""
        return self.local_model(info).personal()

    def local_model(self, info: ClientInfo) -> LocalModel:
        """Get the models by which a client would infer now, with their parts."""
        t = max(self.round - 1, 0)
        server, state = self.state.server, self.state_of(info)
        return make_local_model(
            self.method, self.federation, self.task, self.engine, state, info, t, server=server
        )

    def participants(self, round: int) -> list[ClientInfo]:
        """Draw the clients that train in a round; the draw is the same for every method.

        Raises:
            TaskError: if the method chooses clients that cannot train, or that the privacy budget does not allow.
        """
        infos = self.federation.infos
        sampled_ids = self.client_sampler.draw(round, [i.example_count for i in infos], self.state.losses)
        available_ids, budget = self.client_sampler.seen, self.budget
        with seed_for_hook(self.method, "participants", self.federation.key / "participants" / round):
            # the hook gets a copy: a change in place would change what its result is compared with
            chosen_ids = self.method.participants([*sampled_ids], available_ids)
        participant_ids = check_participants(
            self.method,
            chosen_ids,
            sampled_ids,
            available_ids,
            may_differ=budget is None or budget.is_local,
        )
        return [
            infos[i] for i in (participant_ids if budget is None else budget.allowed(participant_ids, round))
        ]

    @property
    def excluded_from_means(self) -> frozenset[int]:
        """Identifiers of clients that are left out of mean results: those that never train, and hostile ones."""
        return self.client_sampler.unseen | frozenset(self.hostile)

    @property
    def is_over(self) -> bool:
        """Whether no round remains: all are done, the run was stopped, or the privacy budget is spent."""
        return bool(self.stopped) or self.round >= self.settings.rounds or self._is_spent

    @property
    def _is_spent(self) -> bool:
        """Whether the privacy budget allows no further round."""
        return self.budget is not None and not self.budget.allowed(self.client_sampler.seen, self.round)

    def stop_by_budget(self) -> None:
        """Set the reason of the run's end if the privacy budget ends it before its last round."""
        if self.budget is not None and not self.stopped and self.round < self.settings.rounds:
            self.stopped = self.budget.reason()

    def clients(self) -> list[dict[str, Any]]:
        """List the rows of ``clients.json``, one for each client."""
        rows = zip(self.federation.describe(), self.federation.infos, strict=True)
        hostile_flags = [
            {"hostile": i.id in self.hostile} if self.hostile else {} for i in self.federation.infos
        ]
        return [
            {
                **row,
                "rank": find_client_rank(self.method, i),
                "cluster": i.cluster,
                "unseen": i.id in self.client_sampler.unseen,
                **hostile_flag,
            }
            for (row, i), hostile_flag in zip(rows, hostile_flags, strict=True)
        ]

    def step(self, lost_replies: Mapping[str, str] | None = None) -> RoundRecord:
        """Execute one round. The run changes only if the whole round succeeds.

        Args:
            lost_replies: reasons of the replies that are lost in any case, by client, as in a record; for repeating a
                run that lost replies.
        """
        t, clock, download_volume = self.round, Clock(), Volume()
        with clock("server"):
            infos = self._draw_participants(t)
            results = self._begin_results(infos, t, download_volume, lost_replies or {})
            self._train_clients(results, infos, t, download_volume, clock)
            server_metrics = self._judge_together(results, t)
            server = self._server_step(results, t)
        self._warn_of_dropped(results)
        warn_of_few_replies(self.trust.robust, len(results.aggregator.contributed), t)
        server_metrics = {**server_metrics, **self._clipped_numbers(results.aggregator)}
        self._commit(server, results, infos)
        record = self._record_round(infos, results, download_volume, server_metrics)
        if t == 0:
            self.plan_evaluations(record.flops)
        return self._add_evaluation(record, clock)

    def _draw_participants(self, t: int) -> list[ClientInfo]:
        """Draw the clients that train in round t, and charge the privacy budget for them."""
        infos = self.participants(t)
        self.charge_drawn(t, [i.id for i in infos])
        return infos

    def charge_drawn(self, round: int, client_ids: Collection[int]) -> None:
        """Charge the privacy budget for a round in which these clients are drawn."""
        self._charge(round, client_ids)

    def _charge(self, round: int, client_ids: Collection[int]) -> None:
        if self.budget is not None:
            self.budget.charge(round, self.state.server.clip, client_ids)

    def _begin_results(
        self, infos: Sequence[ClientInfo], t: int, download_volume: Volume, lost_replies: Mapping[str, str]
    ) -> RoundResults:
        """Make the empty results of round t.

        Args:
            infos: records of the participants.
            t: index of the round, from 0.
            download_volume: sizes of the downloads; each client's size is entered before its result is added.
            lost_replies: reasons of the replies that are lost in any case, by client.
        """
        unlucky = draw_lost_replies(
            [i.id for i in infos], self.settings.lost_replies, self.federation.key / "lost" / t
        )
        return RoundResults(
            infos,
            lost_replies=lost_replies,
            unlucky=unlucky,
            drop_diverged=self._drops_diverged,
            store=self.state.clients.empty(),
            aggregator=self.aggregator(infos, t),
            timing=RoundTiming(self.device_clock, t, download_volume),
            wait=self.inspection is not None,
        )

    def _train_clients(
        self,
        results: RoundResults,
        infos: Sequence[ClientInfo],
        t: int,
        download_volume: Volume,
        clock: Clock,
    ) -> None:
        """Send each client its download, train it, and add its result.

        Args:
            results: results of the round, to which the client results are added.
            infos: records of the participants.
            t: index of the round, from 0.
            download_volume: sizes of the downloads, to which those of this round are added.
            clock: clock to which the time of training is added.
        """
        downloads = Downloads(self.method, self.state.server)

        def job(info: ClientInfo) -> ClientJob:
            with self._refuse_draws("download", f"{info.title}, round {t + 1}"):
                down = downloads.message_to(info)
            download_volume.add(info.id, down)
            return ClientJob(self.state_of(info), down, info)

        engine_run = self.engine.run(self.method, self.federation, self.task, t, LazyJobs(infos, job))
        call = check_call(self.method, "download or contribution", f"round {t + 1}", server=self.state.server)
        with call, contextlib.closing(engine_run) as client_results:
            for info, result in zip(infos, clock.timed("train", client_results), strict=True):
                results.add(info, result, self.contribute, self.contribute_cohort)

    def _judge_together(self, results: RoundResults, t: int) -> dict[str, dict[str, float]]:
        """Attack and weigh uploads that have waited for each other, if the run does so; return the values to record."""
        if self.inspection is None:
            return {}
        key = self.federation.key / "attack" / t
        return self.inspection.judge_round(results, self.contribute, self.state.server, key)

    def _commit(self, server: Any, results: RoundResults, infos: Sequence[ClientInfo]) -> None:
        """Replace the state of the run by the state after the round.

        Args:
            server: next state of the server.
            results: results of the round.
            infos: records of the participants.
        """
        self.unsaved |= results.arrived
        losses = self.state.losses
        if self.settings.sampling == "loss":
            losses = next_losses(losses, results.client_losses(), [i.id for i in infos])
        # a client commits when its reply has been acknowledged; otherwise dual methods break
        client_states = self.state.clients | results.client_states()
        self.state = State(self.round + 1, server, client_states, losses)

    def _record_round(
        self,
        infos: Sequence[ClientInfo],
        results: RoundResults,
        download_volume: Volume,
        server_metrics: dict[str, dict[str, float]],
    ) -> RoundRecord:
        """Make the record of the round that was committed last, without its evaluation."""
        download_size, upload_size, meters = download_volume.total, results.volume.total, results.meters
        return RoundRecord(
            round=self.round,
            participants=[i.id for i in infos],
            lost=results.lost,
            bytes_down=download_size.bytes,
            bytes_up=upload_size.bytes,
            parameters_down=download_size.parameters,
            parameters_up=upload_size.parameters,
            steps=sum(m.steps for m in meters),
            flops=sum(m.flops for m in meters),
            training_losses=results.mean_losses(),
            server_metrics=server_metrics,
            simulated_seconds=results.timing.seconds,
        )

    @property
    def _drops_diverged(self) -> bool:
        """Whether the run goes on without replies that are not finite.

        A private run does not stop, because a stop would reveal something about a client's data. A run over a network
        does not stop, because one client could then stop it.
        """
        return self.settings.on_nan == "drop" or self.budget is not None or self.is_deployed

    def _warn_of_dropped(self, results: RoundResults) -> None:
        """Warn once of each client whose reply is left out because it is not finite."""
        reasons = {
            client_id: reason
            for client_id, reason in results.not_finite.items()
            if client_id not in self._warned
        }
        self._warned |= reasons.keys()
        for client_id, reason in reasons.items():
            count = self.federation.infos[client_id].example_count
            examples = format_count(count, "training example")
            logger.warning("client %d (%s) is left out: %s", client_id, examples, reason)

    def _clipped_numbers(self, aggregator: Aggregator) -> dict[str, dict[str, float]]:
        """Count the numbers that a simulated secure sum has clipped, for the record, if there are any.

        Warns once of clipped numbers, and once of weights that were rounded coarsely.
        """
        if not isinstance(aggregator, SecureAggregator):
            return {}
        if aggregator.coarse_weights and not self._warned_of_coarse_weights:
            self._warned_of_coarse_weights = True
            logger.warning(
                "round %d: %s",
                self.round + 1,
                aggregator.grid.describe_coarse_weights(aggregator.coarse_weights),
            )
        if not aggregator.clipped:
            return {}
        if not self._warned_of_clipping:
            self._warned_of_clipping = True
            logger.warning(
                "round %d: secure sums clip numbers to ±secure.bound = %g, and %d that clients sent were above it, so that "
                "the server's model is not the mean of what clients trained. Raise secure.bound. Later rounds are "
                "counted in the records, under 'secure'",
                self.round + 1,
                self.trust.secure.bound,
                aggregator.clipped,
            )
        return {"secure": {"clipped": aggregator.clipped}}

    def aggregator(self, infos: Sequence[ClientInfo], round: int) -> Aggregator:
        """Make the aggregator of a round's contributions."""
        return aggregator_of(self.settings, infos, self.federation, round)

    def contribute(self, info: ClientInfo, upload: Any) -> Any:
        """Compute the contribution of an upload to the round.

        Raises:
            RefusedError: if the server cannot use the upload; the round goes on without it.
        """
        return self._contribution_of(upload, self.weigh_client(info))

    def _contribution_of(self, upload: Any, info: Any) -> Any:
        """Compute the contribution of the upload of a client, or of the uploads of a cohort."""
        location = f"round {self.round + 1}"
        if isinstance(info, ClientInfo):
            call = check_single_call(self.method, "contribution", f"{info.title}, {location}", upload=upload)
        else:
            call = check_call(self.method, "contribution", location, upload=upload)
        with self._refuse_draws("contribution", location), call:
            return self.method.contribution(self.state.server, upload, info)

    @contextlib.contextmanager
    def _refuse_draws(self, hook: str, location: str) -> Iterator[None]:
        """Refuse draws in the first call of a hook in a round; each check takes as long as a step of a small client."""
        if self._draws_refused.get(hook) == self.round:
            yield
            return
        with refuse_global_draws(self.method, hook, location):
            yield
        self._draws_refused[hook] = self.round

    def contribute_cohort(
        self, cohort: CohortUploads, infos_by_position: Mapping[int, ClientInfo]
    ) -> list[CohortContribution]:
        """Compute the contributions of clients that trained as one cohort, see :meth:`contribute`."""
        return cohort.contributions(
            list(infos_by_position),
            [self.weigh_client(info) for info in infos_by_position.values()],
            self._contribution_of,
        )

    def weigh_client(self, info: ClientInfo) -> ClientInfo:
        """Replace a client's number of examples by the one that the rule and the sampling of the run give it."""
        if self.settings.sampling == "loss":
            return dataclasses.replace(info, example_count=1)
        if self.settings.sampling == "size":
            if self._examples_by_size is None or self._examples_by_size[0] is not self.federation:
                sizes = [i.example_count for i in self.federation.infos]
                self._examples_by_size = self.federation, self.client_sampler.weights(sizes)
            return dataclasses.replace(
                info, example_count=self._examples_by_size[1].get(info.id, info.example_count)
            )
        robust = self.trust.robust
        if robust.rule == "mean":
            return info
        if self._median_examples is None or self._median_examples[0] is not self.federation:
            self._median_examples = self.federation, compute_median_examples(self.federation.infos)
        return limit_weight(info, robust, self._median_examples[1])

    def _server_step(self, results: RoundResults, t: int) -> Any:
        total = results.aggregator.finish()
        if reason := results.aggregator.reason:
            # nothing of the round is used, so no client keeps a state of it
            logger.warning("round %d gives nothing: %s", t + 1, reason)
            for client_id in sorted(results.arrived):
                results.discard_reply(client_id, reason)
        if total is None:
            total = total_without_replies(self.method)
        if total is None:
            return self.state.server
        replied_infos = [self.weigh_client(self.federation.infos[i]) for i in results.aggregator.contributed]
        key = self.federation.key / "server" / t
        view = ServerView(self.task, t, key, replied_infos, unseen=self.client_sampler.unseen)
        return self.server_update(total, view, results)

    def server_update(self, total: Any, view: ServerView, results: RoundResults) -> Any:
        """Compute the server's next state from the total of the contributions."""
        del results
        before = self.state.server
        location = f"round {view.round + 1}"
        with (
            seed_for_hook(self.method, "server_update", view.key),
            check_single_call(self.method, "server_update", location, server=before, total=total),
        ):
            state = self.method.server_update(before, total, view)
        return self.engine.boundary(check_server_state(self.method, before, state, view.round))

    def is_due(self) -> bool:
        """Whether the models are to be evaluated now."""
        return self.round % self.evaluate_every == 0 or self.round in (0, 1) or self.is_over

    def plan_evaluations(self, flops: int) -> None:
        """Choose the number of rounds between evaluations, unless the settings give it.

        Args:
            flops: number of floating-point operations of the training in the first round.
        """
        if self.settings.evaluate_every is not None:
            return
        max_interval = self.plan.interval
        models = self.federation.architectures
        cost = {name: forward_flops(model) if max_interval > 1 else 0 for name, model in models.items()}
        work = sum(cost[info.architecture] * self.count_evaluated_examples(info) for info in self.evaluated)
        self.evaluate_every = min(max_interval, max(1, -(-4 * work // max(flops, 1))))
        if self.evaluate_every > 1:
            logger.info(
                "evaluates every %d rounds: each time takes %.2f times the operations of a round's training",
                self.evaluate_every,
                work / max(flops, 1),
            )

    def count_evaluated_examples(self, info: ClientInfo) -> int:
        """Number of validation and test examples of a client."""
        data = self.federation.clients[info.id]
        return len(data.val) + len(data.test)

    def _evaluated_clients(self) -> list[ClientInfo]:
        """Choose the clients to evaluate: all, or a random subset."""
        infos = self.federation.infos
        count = self.settings.evaluate_clients
        if count is None:
            count = (
                len(infos) if len(infos) <= MAX_CLIENTS_TO_EVALUATE_ALL else MAX_CLIENTS_TO_EVALUATE_ALL // 2
            )
        order = (self.federation.key / "evaluated").numpy().permutation(len(infos))[:count]
        return [infos[i] for i in sorted(order.tolist())]

    def record_initial_models(self) -> RoundRecord:
        """Make the record of round 0, with the models before any training."""
        return self._add_evaluation(RoundRecord(round=0), Clock())

    def evaluate_last(self, record: RoundRecord) -> RoundRecord:
        """Evaluate the models and enter the results into the record of a round that turned out to be the last one."""
        evaluated_record = self._add_evaluation(record, clock := Clock())
        seconds, cpu = {**record.seconds, **clock.wall}, {**record.cpu_seconds, **clock.cpu}
        return dataclasses.replace(evaluated_record, seconds=seconds, cpu_seconds=cpu)

    def evaluate(self) -> ClientTable | None:
        """Evaluate the current models; None if the results are only known later, see :meth:`take_late_evaluation`."""
        t = max(self.round - 1, 0)
        server, location = self.state.server, f"evaluation after round {self.round}"
        with check_call(self.method, "download or server_model", location, server=server):
            return self.evaluator.evaluate(server, self.state_of, t, self.evaluated, self.round > 0)

    def take_late_evaluation(self) -> ClientTable | None:
        """Take the evaluation of the last round but one, if :meth:`evaluate` did not know it; otherwise None."""
        return None

    def finish(self) -> None:
        """Do what remains after the last round, such as notifying the clients."""

    def _with_backdoor(self, record: RoundRecord) -> RoundRecord:
        if self.trust.attack.kind != "backdoor":
            return record
        # includes clients that never train: a backdoor succeeds at every client that receives the model
        honest_clients = [info for info in self.evaluated if info.id not in self.hostile]
        attack, trigger = self.trust.attack, self._trigger
        rate = backdoor_success(self.federation, honest_clients, attack, trigger, self.local_model)
        if rate is None:
            return record
        return dataclasses.replace(
            record, server_metrics={**record.server_metrics, "backdoor": {"success": rate}}
        )

    def _add_evaluation(self, record: RoundRecord, clock: Clock) -> RoundRecord:
        if self.excluded_from_means and self.is_due():
            record = dataclasses.replace(record, excluded_from_means=sorted(self.excluded_from_means))
        client_table = None
        if self.is_due():
            with clock("evaluate"):
                client_table = self.evaluate()
                record = self._with_backdoor(record)
        server, location = self.state.server, f"round {self.round}"
        with (
            refuse_global_draws(self.method, "server_metrics", location),
            check_single_call(self.method, "server_metrics", location, server=server),
        ):
            own_metrics = check_server_metrics(self.method, self.method.server_metrics(server))
        metrics = {**record.server_metrics, **own_metrics}
        # with privacy loss distributions, computing ε takes as long as a round of a small model
        if self.budget is not None and (client_table is not None or self.trust.privacy.accountant == "rdp"):
            metrics["privacy"] = self.budget.describe(self.round)
        return dataclasses.replace(
            record,
            measured=client_table,
            ranks={name: int(rank) for name, rank in metrics.pop("ranks", {}).items()},
            server_metrics=metrics,
            seconds=clock.wall,
            cpu_seconds=clock.cpu,
        )
