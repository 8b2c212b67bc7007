"""The checks that every method passes; users run them on their own methods."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import tree
from ..core.contract import AnyMethod, ClientView, Method
from ..core.contract.update import KeepsSumOfUploads
from ..core.errors import FedlowrankError, NonFiniteError, TaskError
from ..core.learning.optimizer import SGD
from ..data.federation import Federation
from ..engines import Sequential, Vectorized, Wire
from ..engines.engine import Engine
from ..linalg.matricize import sum_parts
from ..results.evaluation.pools import ScoringPool
from ..results.evaluation.scoring import measure_predictor
from ..rounds.run import Run
from ..rounds.run_settings import RunSettings
from ..storage.checkpoint import load, save
from ..storage.client_store import ClientStore
from ..storage.state import State
from ..trust.updates import compute_update, describe_dense_update, read_reference
from .learning_rates import RecordedRates, schedule_to_half
from .purity import CalledTwice, ImpureError
from .server_step import apply_uploads, compare_absent_clients, compute_uploads

_UNUSUAL_SEED = 7_331_904_217
"""Seed that no method is likely to set."""

_STILL_RATE = 1e-15
"""Learning rate that moves no weight: it is used in place of 0 for a method that divides by it."""


@dataclass(frozen=True)
class CheckFinding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str = ""


class _Net(nn.Module):
    """A small network whose body differs between clients and whose representation and head do not."""

    head_name = "head"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def small_federation(
    heterogeneous: bool, seed: int = 0, client_count: int = 5, scale: int = 1, shift: int = 1
) -> Federation:
    """A small federation with clients of uneven size.

    Args:
        heterogeneous: whether there are two architectures, or one.
        seed: seed of data, models and run.
        client_count: number of clients.
        scale: factor on the number of examples of each client.
        shift: number by which the labels of every second client are shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(6, 3, generator=generator)
    data = []
    for i in range(client_count):
        x = torch.randn(scale * (24 + 7 * i), 6, generator=generator)
        data.append((x, ((x @ rule).argmax(-1) + shift * (i % 2)) % 3))
    models = (
        {"small": lambda: _Net(4), "wide": lambda: _Net(7)} if heterogeneous else {"small": lambda: _Net(4)}
    )
    # ranks as small as the layers: a method's own default rank may be larger
    return Federation.from_arrays(data, models, classes=3, seed=seed, rank=[2] * client_count)


def check_method(method: AnyMethod, device: str = "cpu") -> list[CheckFinding]:
    """Test a method against the contract of :mod:`fedlowrank.core.contract.method`.

    Args:
        method: method with settings under which it trains (learning rate not 0).
        device: device of all runs: cpu; or cuda, where states are compared up to 1e-6 instead of bit for bit.

    Returns:
        One finding for each check that applies to the method; a check that raises fails, with the error as its
        detail. If the hooks are no pure functions, that is the only finding: other checks would fail for the same reason.
    """
    findings = []
    trajectory = Trajectory(method, device)
    for name, test in _CHECKS.items():
        if not _applies(test, method):
            continue
        try:
            detail = test(trajectory)
        except Exception as error:  # noqa: BLE001 - a user's method may raise anything
            detail = f"{type(error).__name__}: {error}{_describe_location(method, error)}"
        if test is _check_pure and detail is not None:
            return [CheckFinding(name, False, f"{detail}. Mend this first: the other checks were not run")]
        findings.append(CheckFinding(name, detail is None, detail or ""))
    return findings


def _applies(test: Callable[[Trajectory], str | None], method: AnyMethod) -> bool:
    """Whether a check tests a property that the method claims."""
    if test is _check_one_model:
        return method.one_model
    if test is _check_follows:
        return isinstance(method, KeepsSumOfUploads)
    return not (test is _check_extended and method.uses_rounds)


def _describe_location(method: AnyMethod, error: Exception) -> str:
    """Describe where an error was raised: the last line in the method's own file, or the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(method).__module__), "__file__", None)
    method_frames = [frame for frame in frames if frame.filename == file]
    if not method_frames and isinstance(error, FedlowrankError):
        # the error's message says what to write, and no line of the method was reached
        return ""
    last_frame = (method_frames or frames)[-1]
    return f" ({Path(last_frame.filename).name}:{last_frame.lineno})"


class RunWithoutEvaluation(Run):
    """A run that never evaluates its models, not even after the first and the last round."""

    def is_due(self) -> bool:
        """Whether the models are to be evaluated now: never."""
        return False


ROUNDS = 3
"""Number of rounds of the runs in the checks."""


class Trajectory:
    """The states of a method's sequential run, computed once for all checks.

    States are kept as bytes, so that a method that changes a state in place does not change the compared states.

    Args:
        method: method that is checked.
        device: device of the run.
    """

    def __init__(self, method: AnyMethod, device: str = "cpu") -> None:
        self.method = method
        self.device = device
        self._run: Run | None = None
        self._encoded_states: list[bytes] = []

    def start(
        self,
        engine: Engine | None = None,
        total_rounds: int = ROUNDS,
        federation: Federation | None = None,
        method: AnyMethod | None = None,
        **settings: Any,
    ) -> Run:
        """Create a run before its first round, of the method and on a small federation unless others are given."""
        arguments: dict[str, Any] = {
            "rounds": total_rounds,
            "participation": 0.8,
            "device": self.device,
            **settings,
        }
        data = small_federation(self.method.heterogeneous) if federation is None else federation
        # no check reads the accuracies
        return RunWithoutEvaluation(
            method or self.method, data, RunSettings(**arguments), engine or Sequential()
        )

    def run_rounds(self, engine: Engine, total_rounds: int = ROUNDS) -> Any:
        """Compute server state and client states after three of ``total_rounds`` rounds with an engine."""
        run = self.start(engine, total_rounds)
        for _ in range(ROUNDS):
            run.step()
        return _states(run)

    def encode_states(self, rounds: int) -> bytes:
        """Encode server state and client states after some rounds as bytes."""
        if self._run is None:
            self._run = self.start()
            self._encoded_states.append(tree.encode(_states(self._run)))
        while len(self._encoded_states) <= rounds:
            self._run.step()
            self._encoded_states.append(tree.encode(_states(self._run)))
        return self._encoded_states[rounds]

    def states(self, rounds: int) -> Any:
        """Server state and client states after some rounds."""
        return tree.decode(self.encode_states(rounds))

    def run(self, rounds: int, **settings: Any) -> Run:
        """Create a run that continues after some rounds."""
        server, clients = self.states(rounds)
        run = self.start(**settings)
        run.restore(State(rounds, server, ClientStore() | {int(i): c for i, c in clients.items()}))
        return run


def _states(run: Run) -> Any:
    """Server state and client states, on the CPU."""
    states = run.state.server, {str(i): c for i, c in sorted(run.state.clients.items())}
    return tree.map_leaves(lambda t: t.cpu(), states)


def _first_difference(a: Any, b: Any, rtol: float, atol: float) -> str | None:
    second_leaves = dict(tree.leaves(b))
    first_leaves = dict(tree.leaves(a))
    if first_leaves.keys() != second_leaves.keys():
        return f"the states differ in structure at {sorted(first_leaves.keys() ^ second_leaves.keys())[0]}"
    for path, x in first_leaves.items():
        y = second_leaves[path]
        if x.shape != y.shape or not torch.allclose(
            x.double(), y.double(), rtol=rtol, atol=atol, equal_nan=True
        ):
            gap = (x.double() - y.double()).abs().max() if x.shape == y.shape else math.nan
            return f"{path} differs by {float(gap):.2g}"
    return None


def _compare_states(a: Any, b: Any, device: str = "cpu") -> str | None:
    if device != "cpu":
        # the choice of GPU kernels also depends on the addresses of tensors
        return _first_difference(a, b, 1e-6, 1e-9)
    return None if tree.equal(a, b) else _first_difference(a, b, 0, 0) or "some bits differ"


def _check_wire(trajectory: Trajectory) -> str | None:
    return _compare_states(trajectory.states(3), trajectory.run_rounds(Wire()), trajectory.device)


def _check_vectorized(trajectory: Trajectory) -> str | None:
    return _first_difference(trajectory.states(3), trajectory.run_rounds(Vectorized()), 1e-3, 1e-4)


def _check_resume(trajectory: Trajectory) -> str | None:
    final_states, interrupted_run = trajectory.states(3), trajectory.run(2)
    models = tree.decode(_encode_models(interrupted_run))
    # a new process lacks what a method keeps outside its states; in this one, a run on other data overwrites it
    other_federation = small_federation(trajectory.method.heterogeneous, seed=1)
    other_run = trajectory.start(federation=other_federation, participation=1.0)
    for _ in range(ROUNDS):
        other_run.step()
    resumed_run = trajectory.start()
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), interrupted_run.round, interrupted_run.state.server, interrupted_run.state.clients)
        resumed_run.restore(load(Path(folder)))
    resumed_models = tree.decode(_encode_models(resumed_run))
    difference = _compare_states(models, resumed_models, trajectory.device)
    if difference is None:
        resumed_run.step()
        difference = _compare_states(final_states, _states(resumed_run), trajectory.device)
    else:
        difference = f"a client infers by another model: {difference}"
    return (
        None
        if difference is None
        else f"{difference}. Keep what a later round or client_model reads in the state of the server or of the client, not "
        "in a variable of the module or class, which another process does not have"
    )


def _encode_models(run: Run) -> bytes:
    """Encode the parameters of the models that the clients would use now, by client."""
    models = {f"client {i.id}": run.personal_params(i) for i in run.federation.infos}
    return tree.encode(tree.map_leaves(lambda t: t.cpu(), models))


def _check_extended(trajectory: Trajectory) -> str | None:
    # a schedule over 3 rounds has ended when one over 40 rounds has hardly begun
    difference = _compare_states(
        trajectory.states(ROUNDS), trajectory.run_rounds(Sequential(), 40), trajectory.device
    )
    return (
        None
        if difference is None
        else f"a round depends on the number of all rounds; set uses_rounds = True: {difference}"
    )


def _check_pure(trajectory: Trajectory) -> str | None:
    if trajectory.device == "cpu" and (message := _impure_function(trajectory)) is not None:
        return message
    run = trajectory.start()
    initial_models = tree.encode([a.initial for a in run.federation.architectures.values()])
    with torch.random.fork_rng(devices=[]):
        # a seed that no method sets: one that seeds the generator itself would otherwise leave the state that it finds
        generator_state = torch.manual_seed(_UNUSUAL_SEED).get_state()
        for _ in range(2):
            run.step()
        encoded_states = tree.encode(_states(run))
        if encoded_states != trajectory.encode_states(2):
            return (
                "two equal runs end in different states: a hook or a loss draws random numbers that come from no key, or reads "
                "a variable that has changed"
            )
        apply_uploads(run, compute_uploads(run, run.participants(run.round)))
        run.evaluate()
        if not torch.equal(generator_state, torch.get_rng_state()):
            return "a round draws from torch's global generator, or seeds it; use view.key"
    if stored_names := _stored_on(trajectory.method):
        return (
            f"a function of the method stores {', '.join(stored_names)} on self, which another process or a resumed run does "
            "not have. Keep it in the state of the server or of the client"
        )
    final_models = tree.encode([a.initial for a in run.federation.architectures.values()])
    return (
        None
        if encoded_states == tree.encode(_states(run)) and initial_models == final_models
        else "a function of the method changes its input in place"
    )


def _stored_on(method: AnyMethod) -> list[str]:
    """List the attributes that the functions of a method have added to it; those of ``cached_property`` may stay."""
    added_names = vars(method).keys() - vars(dataclasses.replace(method)).keys()
    method_type = type(method)
    return sorted(
        name for name in added_names if not isinstance(getattr(method_type, name, None), cached_property)
    )


def _impure_function(trajectory: Trajectory) -> str | None:
    """Find the first function that changes an argument, or gives another result when it is called again."""
    try:
        run = trajectory.start(method=CalledTwice(inner=trajectory.method))
        for _ in range(2):
            run.step()
        run.evaluate()
        run.method.server_metrics(run.state.server)
        for info in run.federation.infos[:1]:
            run.method.describe_update(run.method.download(run.state.server, info), info, run.task)
    except ImpureError as error:
        return str(error)
    return None


def _without_training(method: AnyMethod, rate: float) -> AnyMethod:
    """Return the method at a learning rate that moves no weight, and without penalties that act all the same."""
    still_optimizers = {
        f.name: dataclasses.replace(value, lr=rate, weight_decay=0.0, groups={})
        for f in dataclasses.fields(method)
        if hasattr(value := getattr(method, f.name), "learning_rate")
    }
    # a penalty acts even at a learning rate of 0; a method names the settings that turn it off for this check
    return dataclasses.replace(method, **still_optimizers, **type(method).zero_step_settings)


def _check_at_rest(method: AnyMethod, test: Callable[[AnyMethod], str | None]) -> str | None:
    """Test a method at a learning rate of 0, or at :data:`_STILL_RATE` if the method divides by 0 there."""
    try:
        return test(_without_training(method, 0.0))
    except (NonFiniteError, ZeroDivisionError):
        # such as option II of SCAFFOLD, (x - y) / (τ η); a run has no round with a learning rate of 0
        pass
    try:
        return test(_without_training(method, _STILL_RATE))
    except (NonFiniteError, ZeroDivisionError) as error:
        cause = error.finding if isinstance(error, NonFiniteError) else f"ZeroDivisionError: {error}"
        return (
            f"with a learning rate of 0, {cause}{_describe_location(method, error)}. If the method divides by the change of "
            "the parameters or by its norm, which are 0 here, write what it does in this case"
        )


def _check_still(trajectory: Trajectory) -> str | None:
    def test(method: AnyMethod) -> str | None:
        run = trajectory.start(method=method, participation=1.0)
        if (change := _describe_change(run, {})) is not None:
            return (
                f"{change}. If a penalty or weight decay of the method acts without training, or its server sends other models "
                "in other rounds, name its setting with the value that turns this off, such as "
                'zero_step_settings = {"penalty": 0.0}; otherwise server_update does not average'
            )
        run = trajectory.start(method=method, participation=1.0)
        if (change := _describe_change(run, {"0": "lost"})) is not None:
            return (
                f"{change}, but only if the reply of a client is lost. A mean is over the clients that replied: use Mean in "
                "contribution, or view.replied in server_update, and not task.clients"
            )
        return None

    return _check_at_rest(trajectory.method, test)


def _describe_change(run: Run, lost_replies: dict[str, str]) -> str | None:
    """Take a round without training, and describe a change of a client's model; None if there is none.

    A server may send other models in other rounds. If the round changes no tensor of the server, models are therefore
    computed with the server before the round, and only what the clients keep can change them.
    """
    initial_models = {i.id: run.personal_params(i) for i in run.federation.infos}
    # copied, because a method that changes its state in place would also change a reference to it
    server_before = tree.map_leaves(Tensor.clone, run.state.server)
    run.step(lost_replies)
    tensors_before, tensors_after = (
        {path: t for path, t in tree.leaves(server) if t.is_floating_point()}
        for server in (server_before, run.state.server)
    )
    if _first_difference(tensors_before, tensors_after, 1e-5, 1e-6) is None:
        run.restore(dataclasses.replace(run.state, server=server_before))
    for info in run.federation.infos:
        gap = _first_difference(run.personal_params(info), initial_models[info.id], 1e-5, 1e-6)
        if gap is not None:
            return f"with a learning rate of 0 the model of client {info.id} changes: {gap}"
    return None


_DESCRIBE_UPLOAD = (
    "Return from describe_update an Update with the reference that the upload equals without training, with ZERO_REFERENCE "
    "for a part that is itself the update, and NO_UPDATE for one that is no update"
)


def _check_described(trajectory: Trajectory) -> str | None:
    def test(method: AnyMethod) -> str | None:
        run = trajectory.start(method=method)
        for client_id, upload in compute_uploads(run, run.participants(run.round)).items():
            info = run.federation.infos[client_id]
            down = run.method.download(run.state.server, info)
            reference = describe_dense_update(run.method, down, info, run.task).reference
            try:
                mistake = _describe_update_at_rest(upload, reference, is_default=is_default)
            except tree.TreeError as error:
                mistake = f"{error}. {_DESCRIBE_UPLOAD}"
            except TaskError:
                # factors that the method itself rounds have no update, and what needs one refuses them
                continue
            if mistake is not None:
                return (
                    f"client {client_id}: {mistake}. Clipping, compression, privacy and robust rules act on the update that "
                    "describe_update describes, by default upload - download"
                )
        return None

    is_default = type(trajectory.method).describe_update is Method.describe_update
    return _check_at_rest(trajectory.method, test)


def _describe_update_at_rest(upload: Any, reference: Any, *, is_default: bool) -> str | None:
    """Describe an update that is not 0 although nothing was trained; None if it is 0.

    A part whose reference is 0 may hold anything, such as statistics of the data: it is itself the update. By default this
    is not so for a part that the download lacks, because its author has described nothing.
    """
    base = read_reference(upload, reference)
    described = compute_update(upload, reference, compared_only=True) if is_default else base
    for path, update in compute_update(upload, reference).items():
        tolerance = 1e-6 + 1e-4 * base[path].abs()
        is_statistic = path in described and not bool(base[path].any())
        if is_statistic or bool((update.abs() <= tolerance).all()):
            continue
        if bool(((update + base[path]).abs() <= tolerance).all()):
            return (
                f"with a learning rate of 0, {path} of its upload is 0, so that the upload is a change of the model and not the "
                "model. Return Update(zeros_like(down)) from describe_update"
            )
        return (
            f"with a learning rate of 0, {path} of its update is not 0, but up to {float(update.abs().max()):.2g}. "
            f"{_DESCRIBE_UPLOAD}"
        )
    return None


def _check_absent(trajectory: Trajectory) -> str | None:
    gap = _first_difference(
        *compare_absent_clients(lambda: trajectory.start(participation=1.0)), rtol=1e-5, atol=1e-6
    )
    return (
        None
        if gap is None
        else f"the server's step depends on clients that sent nothing and never train: {gap}. A mean is over the clients that "
        "replied: use Mean in contribution, or view.replied in server_update, and not view.task.clients, which are all clients. "
        "view.trainable are those that can train, and view.share is the share of them that replied"
    )


def _check_schedule(trajectory: Trajectory) -> str | None:
    scheduled_method = schedule_to_half(trajectory.method)
    if scheduled_method is None:
        return None
    methods = [RecordedRates(inner=method) for method in (trajectory.method, scheduled_method)]
    runs = [trajectory.run(1, method=method) for method in methods]
    for run in runs:
        run.step()
    if methods[0].recorded_rates != methods[1].recorded_rates:
        # a learning rate that is no field of an optimizer is not doubled
        return None
    difference = _first_difference(_states(runs[0]), _states(runs[1]), 1e-4, 1e-5)
    return (
        None
        if difference is None
        else f"with a schedule, a round differs from one at the same constant learning rate: {difference}. The learning rate of "
        "a round is self.optimizer.learning_rate(view.round), and its sum over the local steps "
        "self.optimizer.total_rate(view.round, view.steps(name)); self.optimizer.lr is the one before the schedule"
    )


def _check_learns(trajectory: Trajectory) -> str | None:
    method = fast_method = trajectory.method
    if isinstance(method.optimizer, SGD):
        fast_method = dataclasses.replace(
            method, optimizer=dataclasses.replace(method.optimizer, lr=0.1), batch_size=8
        )
    federation = small_federation(method.heterogeneous, scale=8, shift=0)
    run = trajectory.start(method=fast_method, federation=federation, rounds=30, participation=1.0)
    before = after = _mean_accuracy(run)
    while run.round < 30 and after <= before + 0.1:
        for _ in range(3):
            run.step()
        after = _mean_accuracy(run)
    return (
        None
        if after > before + 0.1
        else f"accuracy goes from {before:.2f} to {after:.2f} in {run.round} rounds"
    )


def _mean_accuracy(run: Run) -> float:
    """Compute the mean accuracy of the headline series over all sets of all clients."""
    shares = []
    for info, data in zip(run.federation.infos, run.federation.clients, strict=True):
        predict = next(iter(run.local_model(info).predictors.values()))
        with torch.inference_mode():
            accuracy = measure_predictor(predict, ScoringPool([data.train, data.val, data.test])).accuracy
        shares += [share for share in accuracy if share is not None]
    return sum(shares) / len(shares)


def _check_unseen(trajectory: Trajectory) -> str | None:
    run = trajectory.run(1)
    seen_ids = set(run.state.clients)
    unseen_infos = [i for i in run.federation.infos if i.id not in seen_ids]
    if not unseen_infos and run.state.clients:
        return "every client took part; nothing was tested"
    evaluation = run.evaluate()
    tables = [evaluation.by_client(series=series) for series in evaluation.series()] if evaluation else []
    values = [table[i.id] for table in tables for i in unseen_infos]
    return (
        None
        if all(v is not None and 0 <= v <= 1 for v in values)
        else "a client that has not trained has no model to evaluate"
    )


def _check_lost(trajectory: Trajectory) -> str | None:
    run = trajectory.run(2, lost_replies=0.6)
    # encoded, because a method that changes its state in place would also change a reference to it
    before = {i: tree.encode(s) for i, s in run.state.clients.items()}
    record = run.step()
    after = {i: tree.encode(s) for i, s in run.state.clients.items()}
    lost_ids = [int(client_id) for client_id in record.lost]
    if not before.keys() & set(lost_ids):
        return "no client with a state lost its reply; nothing was tested"
    changed_ids = [i for i in lost_ids if before.get(i) != after.get(i)]
    return f"client {changed_ids[0]} changed its state although its reply was lost" if changed_ids else None


class _NotFollowedError(FedlowrankError):
    """The state of ``follow_upload`` is another one than that of ``local_update``."""


@dataclass(frozen=True)
class _FollowsOwnUpload(CalledTwice):
    """A wrapper that calls ``follow_upload`` with the upload itself, as if nothing were clipped or compressed."""

    def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
        method: Any = self.inner
        after, upload = method.local_update(state, down, view)
        followed = method.follow_upload(state, after, down, upload, view)
        if (gap := _first_difference(followed, after, 1e-5, 1e-6)) is not None:
            raise _NotFollowedError(
                f"follow_upload of an unchanged upload is another state than local_update returns: {gap}"
            )
        return after, upload


def _check_follows(trajectory: Trajectory) -> str | None:
    run = trajectory.start(method=_FollowsOwnUpload(inner=trajectory.method))
    for _ in range(2):
        run.step()
    return None


def _check_measured(trajectory: Trajectory) -> str | None:
    run, method = trajectory.run(2), trajectory.method
    for info in run.federation.infos:
        down = method.download(run.state.server, info)
        if tree.encoded_size(down) != len(tree.encode(down)):
            return "the size of a download depends on more than its structure"
    uploads = compute_uploads(run, run.participants(run.round))
    if any(tree.encoded_size(upload) != len(tree.encode(upload)) for upload in uploads.values()):
        return "the size of an upload depends on more than its structure"
    return None


def _check_adds_up(trajectory: Trajectory) -> str | None:
    run = trajectory.run(2)
    for info in run.federation.infos:
        local_model = run.local_model(info)
        predictors = local_model.predictors
        x = run.federation.clients[info.id].train.inputs
        for name, parts in local_model.parts.items():
            if name not in predictors:
                return f"ClientModel.parts names the series {name!r}; series has {sorted(predictors)}"
            with torch.inference_mode():
                scores = local_model.model.apply(sum_parts(parts, local_model.model.initial), x)
                if not torch.allclose(scores, predictors[name](x), rtol=1e-4, atol=1e-5):
                    model = f"the model that client {info.id} infers by"
                    return f"the parts of series {name!r} do not add up to {model}"
    return None


def _check_one_model(trajectory: Trajectory) -> str | None:
    run = trajectory.run(2)
    first_info, *other_infos = run.federation.infos
    for info in other_infos:
        gap = _compare_states(run.personal_params(info), run.personal_params(first_info))
        if info.architecture == first_info.architecture and gap is not None:
            return (
                f"client {info.id} uses another model than client {first_info.id}; leave out one_model: {gap}"
            )
    return None


def _check_refuses(trajectory: Trajectory) -> str | None:
    if trajectory.method.heterogeneous:
        return None
    try:
        trajectory.start(federation=small_federation(True))
    except TaskError:
        return None
    return "a federation of unequal models is accepted; use task.common_model, or set heterogeneous = True"


_CHECKS: dict[str, Callable[[Trajectory], str | None]] = {
    # the first one, for a method that fails it would fail others for the same reason
    "hooks are pure functions": _check_pure,
    "serialization round trip (engine wire = sequential, bit for bit)": _check_wire,
    "a run of more rounds begins like one of fewer (bit for bit)": _check_extended,
    "batched = sequential (engine vectorized, to 1e-3)": _check_vectorized,
    "a learning rate of 0 changes no model": _check_still,
    "a learning rate of 0 gives an update of 0": _check_described,
    "a schedule only changes the learning rate (to 1e-4)": _check_schedule,
    "it learns": _check_learns,
    "clients that never train do not change the server's step": _check_absent,
    "a client that has not trained has a model": _check_unseen,
    "a lost reply leaves its client as it was": _check_lost,
    "follow_upload returns the state of local_update": _check_follows,
    "computed sizes of messages are their sizes": _check_measured,
    "the parts of a model add up to it": _check_adds_up,
    "one_model holds: all clients use the server's model": _check_one_model,
    "unequal models are refused where they must be": _check_refuses,
    # the last one, for it overwrites what a method wrongly keeps outside its states
    "a resumed run ends as an unbroken one (bit for bit)": _check_resume,
}


def _alone(check: Callable[[Trajectory], str | None]) -> Callable[[AnyMethod], str | None]:
    @functools.wraps(check)
    def run(method: AnyMethod) -> str | None:
        return check(Trajectory(method)) if _applies(check, method) else None

    return run


CHECKS: dict[str, Callable[[AnyMethod], str | None]] = {name: _alone(c) for name, c in _CHECKS.items()}
"""Every check as a function of a method, by name: returns None if the method passes, otherwise what is wrong."""
