"""Floral over every kind of layer: exactly the module at the start, merged ≡ unmerged, and the sum over
adaptors by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlowrank import Floral
from fedlowrank.adapters.mixtures.mixture import Pairs, choose_fold
from tests.adapters.mixtures.floral_networks import CONSTRUCTIONS, REAL, TOLERANCES, draw_normal

torch.set_num_threads(1)


def shake(model: Floral) -> Floral:
    """Random adaptors and θ, and random parameters and statistics of norms, which else are ones and zeros."""
    with torch.no_grad():
        for i, p in enumerate([*model.adaptors.parameters(), model.theta]):
            p.copy_(draw_normal(*p.shape, seed=i))
        for i, (name, t) in enumerate([*model.base.named_parameters(), *model.base.named_buffers()]):
            if t.is_floating_point():
                t.copy_(
                    draw_normal(*t.shape, seed=100 + i).abs() + 0.5
                    if name.endswith("var")
                    else draw_normal(*t.shape, seed=i)
                )
    return model


def by_hand(model: Floral, *args: Any, **kwargs: Any) -> Tensor:
    """base(x) + α Σ_c π_c layer_c(x): C + 1 passes, with layers whose parameters are the adaptors alone."""
    pi = torch.softmax(model.theta.detach(), 0)
    out = copy.deepcopy(model.base)(*args, **kwargs)
    for c in range(len(pi)):
        layer = copy.deepcopy(model.base)
        for name, p in layer.named_parameters():
            a = model.adapted()[name]
            if isinstance(a, Pairs):
                fold = choose_fold(tuple(p.shape), model.construction)
                p.data = fold.unfold(a.u[c] @ a.v[c].T).detach().clone()
            else:
                p.data = a[c].detach().clone()
        out = out + model.alpha * pi[c] * layer(*args, **kwargs)
    return out


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 4), (3, 5)),
    "linear of sequences": (nn.Linear(5, 4, bias=False), (3, 2, 5)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (2, 4, 11)),
    "conv2d same": (nn.Conv2d(4, 6, 3, padding="same", dilation=2, groups=2), (2, 4, 8, 7)),
    "conv2d circular": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular", bias=False), (2, 4, 8, 7)),
    "conv3d": (nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 0), groups=2), (2, 2, 4, 5, 3)),
    "transposed 1d": (
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 5),
    ),
    "transposed 3d": (nn.ConvTranspose3d(4, 2, 2, stride=(1, 2, 1), groups=2), (1, 4, 3, 2, 3)),
    "layer norm": (nn.LayerNorm((3, 4)), (2, 3, 4)),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 5)),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), (2, 4, 5, 3)),
    "instance norm with statistics": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 5)),
    "batch norm 1d": (nn.BatchNorm1d(4), (6, 4)),
    "batch norm 2d": (nn.BatchNorm2d(4), (3, 4, 2, 2)),
    "batch norm 3d": (nn.BatchNorm3d(4), (3, 4, 2, 2, 1)),
    "batch norm of batches": (nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
    "rms norm": (nn.RMSNorm(4), (3, 4)),
}


@pytest.mark.parametrize(
    ("name", "reparameterize"),
    [*((n, True) for n in LAYERS), *((n, False) for n in LAYERS if "batch norm" in n)],
)
def test_a_layer(name: str, reparameterize: bool) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    layer, x = layer.double().eval(), draw_normal(*shape)
    before = layer(x)
    model = Floral(layer, rank=2, num_clusters=3, alpha=0.7, reparameterize=reparameterize).eval()
    assert torch.equal(model(x), before)
    assert torch.equal(model.merge()(x), before)
    shake(model)
    assert not torch.allclose(model(x), model.base(x))
    merged = model.merge()
    assert type(merged) is type(layer)
    torch.testing.assert_close(model(x), merged(x), **TOLERANCES)
    if reparameterize:
        torch.testing.assert_close(model(x), by_hand(model, x), **TOLERANCES)
        model.train()
        torch.testing.assert_close(model(x), by_hand(model, x), **TOLERANCES)
    frozen = next(layer.parameters()).requires_grad_(False)
    model(x).square().sum().backward()
    assert frozen.grad is None
    for n, p in [*model.adaptors.named_parameters(), ("theta", model.theta)]:
        assert p.grad is not None, n
        assert p.grad.abs().max() > 0, n


@given(st.data())
@pytest.mark.filterwarnings("ignore::fedlowrank.core.errors.LoweredRankWarning")
def test_convolutions_of_any_shape(data: st.DataObject) -> None:
    def draw(low: int, high: int, name: str) -> int:
        return data.draw(st.integers(low, high), name)

    def pair(low: int, high: int, name: str) -> tuple[int, int]:
        return draw(low, high, name), draw(low, high, name)

    groups, transposed = draw(1, 3, "groups"), data.draw(st.booleans(), "transposed")
    channels = groups * draw(1, 3, "in"), groups * draw(1, 3, "out")
    kernel, stride, padding, dilation = (
        pair(1, 3, "k"),
        pair(1, 3, "stride"),
        pair(0, 2, "pad"),
        pair(1, 2, "dilation"),
    )
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    size = pair(3, 6, "size")
    extent = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    if transposed:
        assume(all((size[i] - 1) * stride[i] - 2 * padding[i] + extent[i] > 0 for i in (0, 1)))
    else:
        assume(all(size[i] + 2 * padding[i] >= extent[i] for i in (0, 1)))
    layer = kind(
        *channels, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, dtype=REAL
    )
    rank, clusters = data.draw(st.sampled_from([1, 2, 5, 0.2, 0.9]), "rank"), draw(1, 4, "C")
    construction = data.draw(st.sampled_from(CONSTRUCTIONS), "construction")
    alpha = data.draw(st.sampled_from([0.5, 1.0, 3.0]), "alpha")
    model = Floral(layer, rank, clusters, alpha=alpha, construction=construction)
    x = draw_normal(2, channels[0], *size)
    assert torch.equal(model(x), layer(x))
    shake(model)
    torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)
    torch.testing.assert_close(model(x), by_hand(model, x), **TOLERANCES)


@pytest.mark.parametrize("bag", [False, True])
def test_embeddings_and_their_padding_row(bag: bool) -> None:
    layer = nn.EmbeddingBag(7, 3, padding_idx=2, mode="sum") if bag else nn.Embedding(7, 3, padding_idx=2)
    layer, x = layer.double(), torch.tensor([[0, 2, 5], [6, 2, 2]])
    model = Floral(layer, rank=2, num_clusters=3)
    assert torch.equal(model(x), layer(x))
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.01)
    before = model.merge()
    for _ in range(4):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        model.precondition_()
        optimizer.step()
    a = model.adapted()["weight"]
    assert isinstance(a, Pairs)
    assert not a.u[:, 2].any()
    assert a.u[:, 0].any()
    after = model.merge()
    for old, new in zip(before.weight[[2, 1]], after.weight[[2, 1]], strict=True):
        assert torch.equal(old, new)
    assert torch.allclose(model(x), after(x), **TOLERANCES)
    if not bag:
        torch.testing.assert_close(model(x), by_hand(model, x), **TOLERANCES)


def test_attention() -> None:
    for options in ({"add_bias_kv": True}, {"kdim": 3, "vdim": 5}):
        layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=REAL, **options)
        sizes = (4, 3, 5) if "kdim" in options else (4, 4, 4)
        q, k, v = (draw_normal(2, 3, d, seed=d) for d in sizes)
        model = Floral(layer, rank=2, num_clusters=3)
        before = layer(q, k, v, need_weights=False)[0]
        assert torch.equal(model(q, k, v, need_weights=False)[0], before)
        shake(model)
        out, weights = model(q, k, value=v)
        merged, same = model.merge()(q, k, v)
        torch.testing.assert_close((out, weights), (merged, same), **TOLERANCES)
        assert not torch.allclose(out, layer(q, k, v)[0])


def test_a_transformer_in_both_modes() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=REAL)
    model, x = Floral(encoder, rank=2), draw_normal(2, 5, 8)
    # the fast path of evaluation without gradients reads the weights by another way
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), encoder(x))
        shake(model)
        torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)
    with torch.enable_grad():
        torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)


def batch_norms(model: Floral) -> tuple[Any, Any]:
    return model.adaptors.get_submodule("weight"), model.adaptors.get_submodule("bias")


def own_norms(training: bool, momentum: float | None = 0.1) -> tuple[Floral, list[nn.BatchNorm2d]]:
    """A BatchNorm whose adaptors keep their own statistics, and the C BatchNorms of appendix F.2 one by
    one."""
    model = Floral(
        nn.BatchNorm2d(3, momentum=momentum, eps=1e-2, dtype=REAL),
        num_clusters=3,
        alpha=0.7,
        reparameterize=False,
    )
    shake(model)
    gamma, beta = batch_norms(model)
    gamma.running_mean.copy_(draw_normal(3, 3, seed=50))
    gamma.running_var.copy_(draw_normal(3, 3, seed=51).exp())
    alone = []
    for c in range(3):
        norm = nn.BatchNorm2d(3, momentum=momentum, eps=1e-2, dtype=REAL).train(training)
        values = {"weight": gamma.offset, "bias": beta.offset}
        norm.load_state_dict(
            {n: t[c] for n, t in values.items()} | {n: t[c] for n, t in gamma.named_buffers()}
        )
        alone.append(norm)
    return model.train(training), alone


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.6, None])
def test_adaptors_with_their_own_statistics_are_the_papers_sum(
    training: bool, momentum: float | None
) -> None:
    model, alone = own_norms(training, momentum)
    main = copy.deepcopy(model.base)
    pi = torch.softmax(model.theta.detach(), 0)
    for step in range(3):
        x = 3 * draw_normal(4, 3, 2, 2, seed=step) + 1
        expected = main(x) + 0.7 * sum(pi[c] * alone[c](x) for c in range(3))
        torch.testing.assert_close(model(x), expected, **TOLERANCES)
        torch.testing.assert_close(dict(model.base.named_buffers()), dict(main.named_buffers()), **TOLERANCES)
        gamma, _ = batch_norms(model)
        for c in range(3):
            mine = {n: t[c] for n, t in gamma.named_buffers()}
            torch.testing.assert_close(mine, dict(alone[c].named_buffers()), **TOLERANCES)


def test_they_fold_into_one_batch_norm_and_can_be_centered() -> None:
    model, _ = own_norms(training=False)
    x = draw_normal(4, 3, 2, 2)
    merged = model.merge()
    assert type(merged) is nn.BatchNorm2d
    torch.testing.assert_close(merged(x), model(x), **TOLERANCES)
    each = [model.merge(c)(x) for c in range(3)]
    before = model.base.weight.detach().clone()
    model.center_([0.5, 0.25, 0.25])
    assert not torch.equal(model.base.weight, before)
    for c in range(3):
        torch.testing.assert_close(model.merge(c)(x), each[c], **TOLERANCES)
    torch.testing.assert_close(model(x), merged(x), **TOLERANCES)


def test_statistics_of_an_adaptor_see_the_batches_in_which_it_has_a_share() -> None:
    model, alone = own_norms(training=True)
    model.route(1)
    x = 3 * draw_normal(4, 3, 2, 2) + 1
    model(input=x)
    alone[1](x)
    gamma, _ = batch_norms(model)
    for c in range(3):
        torch.testing.assert_close(gamma.running_mean[c], alone[c].running_mean)
        torch.testing.assert_close(gamma.running_var[c], alone[c].running_var)
    assert gamma.num_batches_tracked.tolist() == [0, 1, 0]


def test_a_base_that_keeps_its_statistics_keeps_those_of_the_adaptors() -> None:
    model, alone = own_norms(training=True)
    model.base.eval()
    x, (gamma, _) = 3 * draw_normal(4, 3, 2, 2) + 1, batch_norms(model)
    pi, main = torch.softmax(model.theta.detach(), 0), model.base(x)
    before = gamma.running_mean.clone()
    expected = main + 0.7 * sum(pi[c] * alone[c].eval()(x) for c in range(3))
    torch.testing.assert_close(model(x), expected, **TOLERANCES)
    torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)
    assert torch.equal(gamma.running_mean, before)


def test_statistics_begin_as_those_of_the_base_and_travel_with_the_state() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.arange(12.0).reshape(4, 3))
    model = Floral(norm, reparameterize=False)
    gamma, _ = batch_norms(model)
    assert torch.equal(gamma.running_mean, norm.running_mean.expand(4, 3))
    assert torch.equal(gamma.running_var, norm.running_var.expand(4, 3))
    names = set(model.state_dict())
    assert {f"adaptors.weight.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")} < names
