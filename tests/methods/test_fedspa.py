"""FedSpa: against NumPy, the densities of layers, how masks change, and that masked values alone are sent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedspa import FedSpa, layer_counts, next_mask
from fedlowrank.models.architectures.resnet import ResNet18
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.trust.trust_settings import Clipping, Compression, Privacy, Robust, SecureSums
from tests.golden import personal_reference, reference

from .comparisons import assert_nested_close, to_layers
from .run_contents import (
    SpyTrainer,
    get_client_states,
    get_download,
    get_initial_networks,
    get_personal_parameters,
    get_state,
    get_train_data,
    get_upload,
    list_batches,
    make_view,
    plan_rounds,
)
from .setting import (
    FLOAT32,
    LOCAL,
    LR,
    SAMPLE,
    SIZES,
    WIDTH,
    Net,
    federate_one_model,
    make_arrays,
    run_rounds,
)


@pytest.mark.few(3)
@pytest.mark.parametrize(("density", "prune"), [(0.5, 0.5), (0.6, 1.0), (0.5, 0.0)])
def test_fedspa(density: float, prune: float, engine: type[Engine]) -> None:
    federation = federate_one_model()
    method = FedSpa(density=density, prune=prune, **LOCAL)
    run = run_rounds(method, federation, engine=engine, **SAMPLE)
    first = [method.client_init(i, run.task) for i in federation.infos]
    names = [n for n, p in federation.architectures["small"].initial.items() if p.ndim == 2]
    masks = [[m[n].numpy() for n in names] for m in first]
    net, masks = personal_reference.fedspa(
        get_initial_networks(federation)[0], masks, get_train_data(federation), plan_rounds(run), LR, prune
    )
    assert_nested_close(to_layers(run.state.server.model), net)
    for k, state in enumerate(get_client_states(run)):
        for n, m in zip(names, masks[k], strict=True):
            assert np.array_equal(state[n].numpy(), m)
            assert torch.equal(state[n], first[k][n]) == (prune == 0)
        assert_nested_close(to_layers(get_personal_parameters(run, k)), personal_reference.on(net, masks[k]))


def get_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


@pytest.mark.parametrize("density", [0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("make", [lambda: Net(9, WIDTH), lambda: ResNet18((3, 32, 32), 10, width=16)])
def test_erk_densities_are_those_of_the_formula(make, density: float) -> None:
    params = get_parameters(make())
    counts = layer_counts(params, density)
    expected = personal_reference.erk_counts([tuple(p.shape) for p in params.values()], density)
    for name, count in zip([n for n, p in params.items() if p.ndim > 1], expected, strict=True):
        assert counts[name] == pytest.approx(count, abs=0.5 + 1e-6)
        assert 1 <= counts[name] <= params[name].numel()
    vectors = sum(p.numel() for p in params.values() if p.ndim == 1)
    total = sum(p.numel() for p in params.values())
    assert sum(counts.values()) + vectors == pytest.approx(density * total, abs=len(counts) / 2)


def test_a_density_that_the_vectors_use_up_is_refused_before_training() -> None:
    # 14 of 174 parameters are vectors, and each of the two weights needs an entry
    fits = Run(FedSpa(density=0.1), federate_one_model(), RunSettings(rounds=1), Sequential())
    assert {n: int(m.sum()) for n, m in get_state(fits, 0).items()} == {"body.0.weight": 2, "head.weight": 1}
    with pytest.raises(TaskError, match=r"density 0\.08"):
        Run(FedSpa(density=0.08), federate_one_model(), RunSettings(rounds=1), Sequential())


def test_erk_densities_by_hand() -> None:
    # sums of the shapes 5, 24 and 16; a budget of 70: 70 / 45 is more than the first can take (6 of 7.8), and
    # the others share 64 at 24 : 16
    params = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(10, 8, 3, 3),
        "c": torch.zeros(8, 8),
        "v": torch.zeros(2),
    }
    counts = layer_counts(params, 72 / 792)
    assert counts == {"a": 6, "b": round(64 * 24 / 40), "c": round(64 * 16 / 40)}
    # the long weight is full although it is the larger: 30 · 21 / 29 is more than its 20, and 10 are left
    assert layer_counts({"square": torch.zeros(4, 4), "long": torch.zeros(1, 20)}, 30 / 36) == {
        "long": 20,
        "square": 10,
    }


def test_pruning_and_regrowth_entry_by_entry() -> None:
    rng = np.random.default_rng(0)
    for trial, rate in itertools.product(range(8), (0.0, 0.07, 0.5, 1.0)):
        shape = ((4, 5), (3, 2, 3, 3))[trial % 2]
        mask = rng.random(shape) < (0.2, 0.5, 0.9, 1.0)[trial // 2]
        weight, gradient = rng.normal(size=shape) * mask, rng.normal(size=shape)
        # some inputs of a ReLU network are dead
        gradient[rng.random(shape) < 0.4] = 0
        actual = next_mask(*map(torch.as_tensor, (mask, weight, gradient)), rate).numpy()
        assert np.array_equal(actual, personal_reference.exchanged(mask, weight, gradient, rate))
        assert actual.sum() == mask.sum()
        if rate == 0:
            assert np.array_equal(actual, mask)


def test_a_mask_stays_where_nothing_has_a_gradient() -> None:
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    weight = torch.where(mask, torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), 0.0)
    assert torch.equal(next_mask(mask, weight, torch.zeros(6, 7), 0.5), mask)


def test_the_share_exchanged_falls_by_half_a_cosine() -> None:
    federation, rounds = federate_one_model(**FLOAT32), 4
    run = run_rounds(FedSpa(prune=0.8, **LOCAL), federation, rounds=rounds, steps=0)
    for t in range(rounds):
        before = get_state(run, 0)
        spy = SpyTrainer(run.engine.trainer(run.method, federation, t, federation.infos[0]))
        after, _ = run.method.local_update(before, get_download(run, 0), make_view(run, 0, t, spy))
        end, slope = (result for _, result in spy.seen)
        rate = (0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5))[t]
        for n, m in before.items():
            expected = personal_reference.exchanged(m.numpy(), end[n].numpy(), slope[n].numpy(), rate)
            assert np.array_equal(after[n].numpy(), expected)


def test_the_gradient_that_grows_is_dense_and_leaves_the_model_alone() -> None:
    federation = federate_one_model()
    run = run_rounds(FedSpa(**LOCAL), federation, steps=1)
    spy = SpyTrainer(run.engine.trainer(run.method, federation, run.round, federation.infos[2]))
    state, down = get_state(run, 2), get_download(run, 2)
    _, up = run.method.local_update(state, down, make_view(run, 2, run.round, spy))
    (_, end), (_, moved) = spy.seen
    (last,) = list_batches(run, run.round, federation.infos[2])[1]
    x, y = get_train_data(federation)[2]
    gradient = reference.gradient(to_layers(end), x[last], y[last])
    assert_nested_close(to_layers(moved), [(-LR * w, -LR * b) for w, b in gradient])
    # the update is that of the masked training alone
    for n, u in up.update.items():
        trained = end[n][state[n]] if n in state else end[n]
        torch.testing.assert_close(u, down[n] - trained, rtol=0, atol=1e-15)


def test_small_gradients_of_half_precision_determine_what_grows() -> None:
    """A learning rate times a gradient below 6e-8 is 0 in float16, and all such entries would be equal."""
    federation = federate_one_model(torch.float16)
    run = run_rounds(FedSpa(**{**LOCAL, "optimizer": SGD(lr=1e-7)}), federation, steps=0)
    spy = SpyTrainer(run.engine.trainer(run.method, federation, 0, federation.infos[2]))
    run.method.local_update(get_state(run, 2), get_download(run, 2), make_view(run, 2, 0, spy))
    _, (_, step) = spy.seen
    assert all(t.dtype == torch.float32 for t in step.values())
    assert all(len(t.unique()) > t.numel() / 2 for t in step.values() if t.ndim > 1)


@pytest.mark.parametrize("optimizer", [SGD(lr=LR, momentum=0.9, weight_decay=0.1, clip=0.5), AdamW(lr=0.1)])
@pytest.mark.parametrize("engine_", [Sequential, Vectorized])
def test_density_is_constant_and_all_is_zero_outside_the_mask(optimizer, engine_: type[Engine]) -> None:
    federation = federate_one_model(**FLOAT32)
    method = FedSpa(optimizer=optimizer, batch_size=8, epochs=2)
    run = run_rounds(method, federation, rounds=4, steps=0, engine=engine_, lost_replies=0.3, **SAMPLE)
    initial = federation.architectures["small"].initial
    counts, first = layer_counts(initial, 0.5), {k: get_state(run, k) for k in range(len(SIZES))}
    assert len({tree.encode(m) for m in first.values()}) == len(SIZES)
    for _ in range(4):
        run.step()
        for k in range(len(SIZES)):
            masks, model = get_state(run, k), get_personal_parameters(run, k)
            assert {n: int(m.sum()) for n, m in masks.items()} == counts
            # the server cuts by what the client holds, also where a reply was lost
            assert tree.equal(masks, run.state.server.masks[str(k)])
            for n, p in model.items():
                assert p.shape == initial[n].shape
                held = masks.get(n, torch.ones_like(p, dtype=torch.bool))
                assert torch.equal(p, torch.where(held, run.state.server.model[n], 0.0))
    assert any(not tree.equal(first[k], get_state(run, k)) for k in first)


def test_training_moves_nothing_outside_the_mask() -> None:
    federation = federate_one_model(**FLOAT32)
    method = FedSpa(optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.1), batch_size=8)
    run = run_rounds(method, federation, steps=1)
    for k in range(len(SIZES)):
        spy = SpyTrainer(run.engine.trainer(method, federation, run.round, federation.infos[k]))
        method.local_update(get_state(run, k), get_download(run, k), make_view(run, k, trainer=spy))
        end = spy.seen[0][1]
        for n, m in get_state(run, k).items():
            assert (end[n][~m] == 0).all()
            assert (end[n][m] != 0).all()


@pytest.mark.parametrize("prune", [0.5, 0.0])
def test_masked_values_and_new_masks_as_bits_are_all_that_crosses(prune: float) -> None:
    federation = federate_one_model(**FLOAT32)
    run = run_rounds(FedSpa(prune=prune, **LOCAL), federation, steps=1)
    initial = federation.architectures["small"].initial
    counts = layer_counts(initial, 0.5)
    vectors = sum(p.numel() for p in initial.values() if p.ndim == 1)
    bits = sum(-(-initial[n].numel() // 8) for n in counts) if prune else 0
    down = get_download(run, 0)
    _, up = run.method.local_update(get_state(run, 0), down, make_view(run, 0))
    values = sum(counts.values()) + vectors
    assert values == pytest.approx(0.5 * federation.architectures["small"].parameter_count, abs=1)
    assert tree.numel(down) == tree.numel(up) == values
    assert tree.nbytes(down) == 4 * values
    assert tree.nbytes(up) == 4 * values + bits
    # the file around them holds no array besides
    for message, size in ((down, 4 * values), (up, 4 * values + bits)):
        whole = tree.encode(message)
        assert len(whole) - 8 - int.from_bytes(whole[:8], "little") == size
    assert all(v.ndim == 1 for v in (*down.values(), *up.update.values()))


def test_fedspa_of_full_density_is_fedavg_of_uniform_weights() -> None:
    dense = run_rounds(FedSpa(density=1.0, **LOCAL), federate_one_model(), **SAMPLE)
    plain = run_rounds(FedAvg(weighting="uniform", **LOCAL), federate_one_model(), **SAMPLE)
    tree.map_leaves(
        lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12),
        dense.state.server.model,
        plain.state.server,
    )
    # by examples the mean is another
    other = run_rounds(FedAvg(**LOCAL), federate_one_model(), **SAMPLE)
    assert any((dense.state.server.model[n] - p).abs().max() > 1e-3 for n, p in other.state.server.items())


def test_secure_sums_of_static_masks_are_the_plain_sums() -> None:
    method = FedSpa(prune=0.0, **LOCAL)
    plain = run_rounds(method, federate_one_model(), rounds=2)
    secure = run_rounds(method, federate_one_model(), rounds=2, secure=SecureSums(on=True))
    for name, weights in plain.state.server.model.items():
        assert not torch.equal(weights, federate_one_model().architectures["small"].initial[name])
        torch.testing.assert_close(secure.state.server.model[name], weights, rtol=0, atol=1e-5)


def test_the_median_of_static_masks_is_that_of_the_zero_padded_updates() -> None:
    method = FedSpa(prune=0.0, **LOCAL)
    run = run_rounds(
        method, federate_one_model(clients=make_arrays()[:3]), rounds=1, steps=0, robust=Robust("median")
    )
    start, dense_updates = run.state.server.model, []
    for k in range(3):
        masks, upload = get_state(run, k), get_upload(run, k)
        dense = {n: np.zeros(w.shape) for n, w in start.items()}
        for n, values in upload.update.items():
            dense[n][masks[n].numpy() if n in masks else ...] = values.numpy()
        dense_updates.append(dense)
    run.step()
    for n, w in start.items():
        median = np.median([dense[n] for dense in dense_updates], axis=0)
        np.testing.assert_allclose(run.state.server.model[n].numpy(), w.numpy() - median, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("uplink", "tolerance"), [("top_k:1.0", 1e-12), ("bfloat16", 2**-8)])
def test_static_masks_go_with_compression(uplink: str, tolerance: float) -> None:
    method = FedSpa(prune=0.0, **LOCAL)
    plain = run_rounds(method, federate_one_model(), rounds=2, steps=0)
    compressed = run_rounds(
        method, federate_one_model(), rounds=2, steps=0, compression=Compression(uplink, error_feedback=False)
    )
    uploads = [get_upload(plain, k) for k in range(len(SIZES))]
    plain.step()
    compressed.step()
    for n, weights in plain.state.server.model.items():
        largest_update = max(float(upload.update[n].abs().max()) for upload in uploads)
        torch.testing.assert_close(
            compressed.state.server.inner.model[n], weights, rtol=0, atol=tolerance * largest_update
        )


@pytest.mark.parametrize("kind", ["central", "local"])
def test_static_masks_under_privacy_give_the_plain_mean_if_the_noise_is_tiny(kind: Any) -> None:
    method = FedSpa(prune=0.0, **LOCAL)
    plain = run_rounds(method, federate_one_model(), rounds=1)
    private = run_rounds(
        method,
        federate_one_model(),
        rounds=1,
        privacy=Privacy(kind, noise=1e-5, delta=1e-3),
        clipping=Clipping(50.0),
    )
    for n, weights in plain.state.server.model.items():
        torch.testing.assert_close(private.state.server.inner.model[n], weights, rtol=0, atol=5e-3)


def test_masks_that_change_are_refused_with_the_reason() -> None:
    for settings in ({"secure": SecureSums(on=True)}, {"robust": Robust("median")}):
        with pytest.raises(TaskError, match=r"its server must see single replies \(masks\)"):
            run_rounds(FedSpa(**LOCAL), federate_one_model(), steps=0, **settings)
