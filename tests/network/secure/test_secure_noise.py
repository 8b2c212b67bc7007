"""Central privacy on secure sums: the noise of a total, its bound, and what colluding sites take away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError
from fedlowrank.engines.sequential import Sequential
from fedlowrank.network.messages import Order
from fedlowrank.network.secure import distributed_noise
from fedlowrank.network.secure.contributions import make_grid
from fedlowrank.network.secure.distributed_noise import DistributedNoise, describe_collusion
from fedlowrank.network.transport import NodeMessage
from fedlowrank.rounds.run import Run
from fedlowrank.trust.trust_settings import SecureSums
from tests.network.secure.secure_sites import (
    MAX_NORM,
    flatten_values,
    is_close,
    make_private_experiment,
    run_secure,
)
from tests.support.local_network import fault_on_orders


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["fedavg", "pfedlora", "fedrep", "scaffold"])
def test_with_little_noise_it_is_the_plain_private_run(method: str, tmp_path: Path) -> None:
    made = make_private_experiment(method, 1e-5)
    _, result = run_secure(made, tmp_path)
    open_ = made.overlay({"run": {"secure": {"on": False, "bits": 22, "bound": 8.0}}})
    run = Run(made.build_method(method), open_.federation(), open_.run, Sequential())
    before = flatten_values(run.state.server)
    for _ in range(2):
        run.step()
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]
    assert is_close(result.run.state.server, run.state.server, 1e-4)
    assert np.abs(flatten_values(run.state.server) - before).max() > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_noise_of_a_total_has_a_part_of_each_that_replied(lost: int, tmp_path: Path) -> None:
    """Models that barely train, so that the change of the server is the noise: σ²C² k/t of k clients, over n."""

    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        return [] if client < lost and Order.from_json(message.header).step == "mask" else None

    larger = {"defaults": {"optimizer": {"lr": 1e-12}}, "model": {"names": ["mlp"], "hidden": [400]}}
    made = make_private_experiment("fedavg", 3.0, rounds=1).overlay(larger)
    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert len(result.rounds[1].lost) == lost
    run = Run(made.build_method("fedavg"), made.federation(), made.run, Sequential())
    noise = flatten_values(result.run.state.server) - flatten_values(run.state.server)
    std = 3.0 * MAX_NORM * math.sqrt((4 - lost) / 3) / 4
    statistic = float((noise**2).sum() / std**2)
    assert len(noise) > 3000
    assert stats.chi2.ppf(1e-8, len(noise)) < statistic < stats.chi2.isf(1e-8, len(noise))


def test_a_lost_round_releases_nothing(tmp_path: Path) -> None:
    def act(carrier: Any, message: NodeMessage, t: int, client: int) -> Any:
        return [] if client < 2 and Order.from_json(message.header).step == "reveal" else None

    made = make_private_experiment("fedadam", 3.0, rounds=1).overlay({"network": {"min_replies": 0}})
    _, result = run_secure(made, tmp_path, fault_on_orders(act))
    assert len(result.rounds[1].lost) == 4
    run = Run(made.build_method("fedadam"), made.federation(), made.run, Sequential())
    assert tree.equal(result.run.state.server, run.state.server)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1e6])
def test_a_change_keeps_its_norm_on_the_grid(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        distributed_noise, "discrete_gaussian", lambda size, std: np.zeros(size, dtype=np.int64)
    )
    grid, norm = make_grid(SecureSums(on=True, bits=16), 5), 1e-3
    # a change of the norm C whose numbers are all rounded up
    size = int((norm / (50.6 * grid.sum_step)) ** 2)
    v = torch.full((size,), norm / math.sqrt(size), dtype=torch.float64) * factor
    actual = DistributedNoise(norm, 1.0, 5, grid).vector({"w": v}).view(np.int64) * grid.sum_step
    assert np.linalg.norm(actual) <= norm
    if factor < 1:
        assert np.abs(actual - v.numpy()).max() <= grid.sum_step / 2 * (1 + 1e-9)
    else:
        assert np.linalg.norm(actual) > 0.95 * norm


def test_sites_that_tell_their_noise_lower_the_privacy_of_the_others() -> None:
    import dp_accounting as dp

    made = make_private_experiment("fedavg", 2.0, clients=5, rounds=7)
    run = Run(made.build_method("fedavg"), made.federation(), made.run, Sequential())
    assert run.budget is not None
    told = describe_collusion(run.budget, 5)
    # t = 4 of 5; three sites with the server could open the sum itself
    for colluding, name in ((0, "server,"), (1, "1 other site,"), (2, "2 other sites")):
        accountant = dp.rdp.RdpAccountant()
        accountant.compose(dp.GaussianDpEvent(2.0 * math.sqrt((4 - colluding) / 4)), 7)
        assert f"{accountant.get_epsilon(1e-3):.4g} against the server" in told
        assert name in told
    assert "3 other" not in told


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"privacy": {"accountant": "pld"}}, "'pld' is not; set 'rdp'"),
        ({"privacy": {"noise": 0.1}, "clipping": {"norm": MAX_NORM, "quantile": 0.5}}, "set a fixed clipping.norm alone"),
        ({"secure": {"on": True, "bits": 2, "bound": 1e6}}, "too wide"),
        ({"secure": {"on": True, "bits": 30, "bound": 1e-8}}, "raise secure.bound"),
        ({"compression": {"uplink": "int8"}}, "masked numbers cannot be compressed"),
    ],
)  # fmt: skip
def test_what_has_no_distributed_noise_is_refused(run: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        run_secure(make_private_experiment("fedavg", 1.0, **run), tmp_path)


@pytest.mark.full
def test_local_noise_needs_no_other_under_secure_sums(tmp_path: Path) -> None:
    made = make_private_experiment("fedavg", 1.0, privacy={"kind": "local"})
    _, result = run_secure(made, tmp_path)
    assert [r.lost for r in result.rounds[1:]] == [{}, {}]
