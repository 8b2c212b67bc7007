"""Low-rank methods on models that break rules of thumb: groups, biases, names that lie about what they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedlowrank import simulate

from .awkward_setting import MATRICES, federate_images, make_low_rank_method

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["fedslr", "gpgd", "lpgd"])
def test_roles_come_from_shapes_and_never_from_names(name: str) -> None:
    result = simulate(make_low_rank_method(name), federate_images(), rounds=3)
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

    result = simulate(make_low_rank_method(name), federate_images(model), rounds=1)
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
