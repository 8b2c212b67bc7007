"""Low-rank methods on models that break rules of thumb: groups, biases, names that lie about what they
hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Federation, simulate
from fedlowrank.core.contract.method import Method
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.methods import METHODS

torch.set_num_threads(1)


class Lying(nn.Module):
    """Matrices named as biases and norms, vectors named as weights of convolutions; groups, a bias, a kernel
    of 3×1."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Conv2d(2, 6, 3, padding=1, groups=2)
        self.norm = nn.Conv2d(6, 8, (3, 1), bias=True)
        self.conv_weight = nn.Parameter(torch.ones(8))
        self.fc = nn.ModuleDict({"downsample 1/β": nn.Linear(8, 5)})
        self.γ = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(torch.relu(self.bias(x)))).mean((2, 3)) * self.conv_weight
        return self.γ(torch.relu(self.fc["downsample 1/β"](y)))


MATRICES = {
    # scheme 2: O·K1 rows, I·K2 columns, I being the channels of one group
    "bias.weight": (6 * 3, 1 * 3),
    "norm.weight": (8 * 3, 6 * 1),
    "fc.downsample 1/β.weight": (5, 8),
    "γ.weight": (3, 5),
}


def federation(model: Callable[[], nn.Module] = Lying) -> Federation:
    rng = np.random.default_rng(0)
    data = []
    for i in range(4):
        y = rng.integers(0, 3, 30)
        x = rng.normal(size=(30, 2, 6, 6)).astype(np.float32) + y[:, None, None, None].astype(np.float32) * (
            i % 2 - 0.5
        )
        data.append((x, y))
    return Federation.from_arrays(data, model, classes=3)


def made(name: str) -> Method:
    return METHODS[name](batch_size=10, optimizer=SGD(lr=0.05), lam=0.03)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedslr", "gpgd", "lpgd"])
def test_roles_come_from_shapes_and_never_from_names(name: str) -> None:
    result = simulate(made(name), federation(), rounds=3)
    weights = result.personal(client=0)
    assert all(bool(torch.isfinite(w).all()) for w in weights.values())
    if name == "lpgd":
        return
    ranks = result.rounds[-1].ranks
    assert set(ranks) == set(MATRICES)
    shared = result.run.state.server.w if name == "fedslr" else result.run.state.server
    dense = shared.dense(result.run.task.common_model("").initial)
    for key, shape in MATRICES.items():
        w = dense[key].numpy().astype(np.float64)
        matrix = w.transpose(0, 2, 1, 3).reshape(shape) if w.ndim == 4 else w
        assert np.linalg.matrix_rank(matrix, tol=1e-5) == ranks[key], key
    assert 0 < sum(ranks.values()) < sum(min(shape) for shape in MATRICES.values())
    # vectors keep all their entries, whatever they are called
    for key in set(dense) - set(MATRICES):
        assert bool((dense[key] != 0).all()), key


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fedslr", "gpgd", "lpgd"])
def test_batch_norm_is_no_matrix_and_its_statistics_are_the_client_s(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))

    result = simulate(made(name), federation(model), rounds=1)
    assert not {"1.weight", "1.bias"} & set(result.rounds[-1].ranks)
    plain = model().eval()
    assert set(plain.load_state_dict(result.personal(1), strict=False).missing_keys) <= {
        "1.num_batches_tracked"
    }
    x = result.run.federation.clients[1].train.x
    predict = next(iter(result.run.local_model(result.run.federation.infos[1]).predictors.values()))
    torch.testing.assert_close(plain(x).detach(), predict(x).detach())
    before = plain[0](x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(
        result.personal(1)["1.running_var"], before.var(1).detach(), rtol=1e-4, atol=1e-6
    )


def test_a_client_that_never_took_part_has_no_personal_part() -> None:
    result = simulate(made("fedslr"), federation(), rounds=2, participation=0.25)
    seen = set(result.run.state.clients)
    record = result.rounds[-1]
    assert record.is_evaluated
    unseen = set(range(4)) - seen
    assert unseen
    for i in range(4):
        same = record.values("parameters", "", "mixed")[i] == record.values("parameters", "", "gkr")[i]
        assert same == (i in unseen)
        if i in unseen:
            assert (
                record.values("accuracy", "test", "mixed")[i] == record.values("accuracy", "test", "gkr")[i]
            )


@pytest.mark.full
def test_a_sparse_penalty_that_kills_every_personal_part_leaves_the_global_model() -> None:
    method = METHODS["fedslr"](batch_size=10, optimizer=SGD(lr=0.05), lam=0.03, mu=1e6)
    record = simulate(method, federation(), rounds=2).rounds[-1]
    assert record.is_evaluated
    assert record.values("accuracy", "test", "mixed") == record.values("accuracy", "test", "gkr")
    assert record.values("parameters", "", "mixed") == record.values("parameters", "", "gkr")
