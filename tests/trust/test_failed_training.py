"""Under privacy, whether a client's training failed stays with the client: it sends an update of zeros."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod, ClientView
from fedlowrank.core.errors import NonFiniteError, NonFiniteUploadError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import ClientJob
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Clipping, Privacy
from tests.methods.setting import federate_one_model, make_arrays

FAILING = 2
METHOD = FedAvg(batch_size=8, optimizer=SGD(lr=0.1))


def federation() -> Federation:
    """Client 2 has inputs of which the second step makes a NaN."""
    clients = make_arrays()
    x, y = clients[FAILING]["train"]
    clients[FAILING] = {**clients[FAILING], "train": (x * np.float32(1e30), y)}
    return federate_one_model(torch.float32, clients=clients)


def run_of(method: AnyMethod = METHOD, engine: str = "sequential", **settings: Any) -> Run:
    return Run(method, federation(), RunSettings(rounds=2, **settings), ENGINES[engine]())


def private(kind: Any, noise: float, norm: float = 0.05, quantile: float | None = None) -> dict[str, Any]:
    return {"privacy": Privacy(kind, noise=noise, delta=1e-3), "clipping": Clipping(norm, quantile)}


def vector(value: Any) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.tensors(value)])


def expected_step(norm: float) -> np.ndarray:
    """The mean of the clipped updates of all four clients, that of the failing one 0."""
    total: Any = 0.0
    for client in {0, 1, 2, 3} - {FAILING}:
        alone = run_of(on_nan="drop")
        start = vector(alone.state.server)
        alone.step({str(i): "left out" for i in range(4) if i != client})
        update = vector(alone.state.server) - start
        total = total + update * min(1.0, norm / float(np.linalg.norm(update)))
    return total / 4


def test_without_privacy_the_training_fails() -> None:
    with pytest.raises(NonFiniteError, match="client 2"):
        run_of().step()
    assert run_of(on_nan="drop").step().lost.keys() == {"2"}


@dataclasses.dataclass(frozen=True)
class NaNAfterTraining(FedAvg):
    """Client 1 trains to finite parameters, and sends a NaN."""

    def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
        state, upload = super().local_update(state, down, view)
        return state, tree.map_leaves(lambda t: t * float("nan"), upload) if view.info.id == 1 else upload


def nan_after_training(**settings: Any) -> Run:
    method = NaNAfterTraining(batch_size=8, optimizer=SGD(lr=0.1))
    return Run(
        method, federate_one_model(torch.float32), RunSettings(rounds=2, **settings), ENGINES["sequential"]()
    )


def test_a_nan_in_an_upload_after_a_finite_training_obeys_on_nan() -> None:
    with pytest.raises(NonFiniteUploadError, match="client 1, round 1: its upload holds a NaN"):
        nan_after_training().step()
    assert nan_after_training(on_nan="drop").step().lost.keys() == {"1"}


@pytest.mark.parametrize("on_nan", ["stop", "drop"])
@pytest.mark.parametrize("kind", ["central", "local"])
def test_under_privacy_a_nan_in_an_upload_stays_with_the_client(kind: str, on_nan: str) -> None:
    run = nan_after_training(on_nan=on_nan, **private(kind, 1e-5))
    assert run.step().lost == {}
    assert np.isfinite(vector(run.state.server.inner)).all()


@pytest.mark.parametrize("engine", ["sequential", "wire", "vectorized", "processes"])
@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_client_whose_training_fails_sends_an_update_of_zeros(kind: str, engine: str) -> None:
    steps = []
    for on_nan in ("stop", "drop"):
        run = run_of(engine=engine, on_nan=on_nan, **private(kind, 1e-5))
        start = vector(run.state.server.inner)
        record = run.step()
        run.engine.close()
        assert record.lost == {}
        assert all(np.isfinite(loss) for loss in record.training_losses.values())
        steps.append(vector(run.state.server.inner) - start)
    assert np.array_equal(*steps)
    assert np.allclose(steps[0], expected_step(0.05), rtol=0, atol=1e-5)


def test_its_update_of_zeros_has_the_noise_of_local_privacy() -> None:
    run = run_of(**private("local", 2.0))
    info = run.federation.infos[FAILING]
    down = run.method.download(run.state.server, info)
    jobs = [ClientJob(run.state_of(info), down, info)]
    (result,) = run.engine.run(run.method, run.federation, run.task, 0, jobs)
    noise = vector(result.upload) - vector(down)
    assert np.allclose(noise.mean(), 0, atol=5 * 0.1 / np.sqrt(len(noise)))
    low, high = stats.chi2(len(noise)).interval(0.9999)
    assert low < float((noise**2).sum()) / (2.0 * 0.05) ** 2 < high


def test_it_keeps_its_state_and_counts_as_clipped(caplog: pytest.LogCaptureFixture) -> None:
    """The norm follows a share within it of 0; SCAFFOLD's c_k moves by the noise that is sent, and by nothing else."""
    run = run_of(METHOD, **private("central", 0.3, 1e9, quantile=0.5))
    info = run.federation.infos[FAILING]
    down = run.method.download(run.state.server, info)
    jobs = [ClientJob(run.state_of(info), down, info)]
    with caplog.at_level(logging.WARNING):
        (result,) = run.engine.run(run.method, run.federation, run.task, 0, jobs)
    assert result.upload.indicator.tolist() == [0.0]
    assert "the server does not learn of the error" in caplog.text
    scaffold = run_of(SCAFFOLD(batch_size=8, optimizer=SGD(lr=0.1)), **private("local", 1e-5))
    state = scaffold.state_of(info)
    jobs = [ClientJob(state, scaffold.method.download(scaffold.state.server, info), info)]
    (result,) = scaffold.engine.run(scaffold.method, scaffold.federation, scaffold.task, 0, jobs)
    assert tree.equal(result.state.inner, result.upload.remainder.control)


def test_optimizer_states_of_before_are_kept() -> None:
    method = FedAvg(batch_size=8, optimizer=SGD(lr=0.1, momentum=0.5, keep=True))
    healthy = Run(
        method,
        federate_one_model(torch.float32),
        RunSettings(rounds=2, **private("central", 1e-5)),
        ENGINES["sequential"](),
    )
    healthy.step()
    state, info = healthy.state.clients[FAILING], healthy.federation.infos[FAILING]
    failing = run_of(method, **private("central", 1e-5))
    jobs = [ClientJob(state, failing.method.download(failing.state.server, info), info)]
    (result,) = failing.engine.run(failing.method, failing.federation, failing.task, 1, jobs)
    assert tree.tensors(state)
    assert tree.equal(result.state, state)


class Counting(torch.nn.Module):
    """A linear layer that keeps the mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(12, 4)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += x.mean(0)
        return self.head(x)


def test_buffers_of_a_failed_pass_are_dropped() -> None:
    clients = make_arrays()
    for factor in (1.0, 1e30):
        x, y = clients[FAILING]["train"]
        clients[FAILING] = {**clients[FAILING], "train": (x * np.float32(factor), y)}
        made = Federation.from_arrays(clients, {"counting": Counting}, classes=4)
        settings = RunSettings(rounds=2, **private("central", 1e-5))
        run = Run(METHOD, made, settings, ENGINES["sequential"]())
        run.step()
        assert hasattr(run.state.clients[FAILING], "buffers") is (factor == 1.0)


class Handling(FedAvg):
    """A client whose training fails sends what it was sent."""

    def local_update(self, state: None, down: Any, view: Any) -> tuple[None, Any]:
        try:
            return super().local_update(state, down, view)
        except NonFiniteError:
            return None, down


def test_a_method_may_handle_the_error_in_a_cohort_too() -> None:
    method = Handling(batch_size=8, optimizer=SGD(lr=0.1))
    runs = [run_of(method, engine) for engine in ("sequential", "vectorized")]
    for run in runs:
        record = run.step()
        assert record.lost == {}
        assert np.isfinite(record.training_losses["local"])
    assert np.allclose(*(vector(run.state.server) for run in runs), rtol=0, atol=1e-6)
