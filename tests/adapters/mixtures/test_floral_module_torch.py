"""Floral beside PyTorch's own machinery: modules with two names, checkpointing, replicas, distributed
training, threads."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel, replicate
from torch.utils.checkpoint import checkpoint

from fedlowrank import Floral
from fedlowrank.adapters.mixtures.mixture import Pairs
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core.errors import TaskError
from tests.adapters.mixtures.floral_networks import (
    REAL,
    TOLERANCES,
    TiedLanguageModel,
    build_network,
    draw_normal,
    draw_parameters,
)


class Twice(nn.Module):
    """One linear layer under two names, and another under the name of a method of ``nn.Module``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.type = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        last: nn.Module = dict(self.named_children())["type"]
        return last(self.b(self.a(x).tanh()).tanh())


def mixed_by_hand(model: Floral, pi: Tensor) -> dict[str, Tensor]:
    """The mixed weights, by einsum."""
    w = dict(model.base.named_parameters())
    for name, a in model.adapted().items():
        dense = torch.einsum("cik,cjk->cij", a.u, a.v) if isinstance(a, Pairs) else a
        w[name] = w[name] + model.alpha * torch.einsum("c,c...->...", pi, dense)
    return w


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return actual


def test_modules_with_two_names_or_the_name_of_a_method() -> None:
    model = draw_parameters(Floral(Twice().double(), rank=2, num_clusters=3))
    before = copy.deepcopy(model.base.state_dict())
    objects = {n: id(p) for n, p in model.base.named_parameters(remove_duplicate=False)}
    x = draw_normal(4, 3)
    w = mixed_by_hand(model, torch.softmax(model.theta, 0))

    def twice(h: Tensor) -> Tensor:
        return torch.tanh(h @ w["a.weight"].T + w["a.bias"])

    expected = twice(twice(x)) @ w["type.weight"].T + w["type.bias"]
    truth = gradients(model, expected.square().sum())
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, **TOLERANCES)
        torch.testing.assert_close(gradients(model, model(x).square().sum()), truth, **TOLERANCES)
    assert len(truth) == 4 + 2 * 2 + 2 + 1
    for name, t in model.base.state_dict().items():
        assert torch.equal(t, before[name]), name
    assert {n: id(p) for n, p in model.base.named_parameters(remove_duplicate=False)} == objects
    torch.testing.assert_close(model.merge()(x), expected, **TOLERANCES)
    other = Floral(Twice().double(), rank=2, num_clusters=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    model.precondition_()
    model.center_()


@pytest.mark.parametrize("reparameterize", [True, False])
def test_hooks_of_the_user_fire_once_a_forward_and_see_what_the_layer_gives(reparameterize: bool) -> None:
    base, seen = build_network(), []
    base[1].register_forward_hook(lambda _, __, out: seen.append(out))
    base[0].register_forward_pre_hook(lambda *_: seen.append(None))
    base.register_forward_hook(lambda *_: seen.append(None))
    norm = copy.deepcopy(base[1])
    norm._forward_hooks.clear()
    model = draw_parameters(Floral(base, rank=2, reparameterize=reparameterize)).eval()
    merged = model.merge()
    x = draw_normal(4, 2, 5, 5)
    seen.clear()
    model(x)
    assert len(seen) == 3
    # the layer's output as a plain module with the mixed weights has it
    torch.testing.assert_close(seen[1], functional.batch_norm(
        merged[0](x), norm.running_mean, norm.running_var, merged[1].weight, merged[1].bias, eps=norm.eps
    ), **TOLERANCES)  # fmt: skip


class Inside(nn.Module):
    """Checkpoints a block, a function that reads a weight, or a function that is given it."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(3, 3), nn.Linear(3, 3)
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        weight, bias = self.block.weight, self.block.bias
        run: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "block": (self.block, (h,)),
            "function": (lambda h: functional.linear(h, self.block.weight, self.block.bias), (h,)),
            "given": (functional.linear, (h, weight, bias)),
        }
        if self.how == "plain":
            return self.block(h)
        function, args = run[self.how]
        out: Tensor = checkpoint(function, *args, use_reentrant=self.reentrant)
        return out


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["block", "function"])
def test_checkpointing_inside_the_base_is_refused(how: str, reentrant: bool) -> None:
    model = draw_parameters(Floral(Inside(how, reentrant).double(), rank=2))
    x = draw_normal(2, 3)
    before = copy.deepcopy(model.base.state_dict())
    with pytest.raises(TaskError, match=r"torch\.utils\.checkpoint.*wrapper"):
        model(x)
    assert all(torch.equal(t, before[n]) for n, t in model.base.state_dict().items())
    assert all(isinstance(p, nn.Parameter) for p in model.base.parameters())
    # without gradients nothing is recomputed
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.merge()(x), **TOLERANCES)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_is_given_the_mixed_weights_is_exact(reentrant: bool) -> None:
    model = draw_parameters(Floral(Inside("plain", reentrant).double(), rank=2))
    x = draw_normal(2, 3)
    plain = gradients(model, model(x).square().sum())
    model.base.how = "given"
    torch.testing.assert_close(gradients(model, model(x).square().sum()), plain, **TOLERANCES)


class Outer(nn.Module):
    """A block around the wrapper, which is called twice in it and after other random numbers."""

    def __init__(self, model: Floral) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(functional.dropout(self.model(x), 0.5)).square()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("top", [None, 2])
def test_the_noise_is_replayed_where_a_block_is_recomputed(reentrant: bool, top: int | None) -> None:
    router = Router(noise=1.0, top=top)
    block = Outer(draw_parameters(Floral(nn.Linear(3, 3).double(), rank=2, num_clusters=3, router=router)))

    def loss(checkpointed: bool) -> Tensor:
        torch.manual_seed(3)
        h = draw_normal(2, 3).requires_grad_()
        for _ in range(2):
            h = checkpoint(block, h, use_reentrant=reentrant) if checkpointed else block(h)
        return h.sum()

    with torch.random.fork_rng(devices=[]):
        plain, again = gradients(block, loss(False)), gradients(block, loss(True))
    torch.testing.assert_close(again, plain, **TOLERANCES)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(model: nn.Module, wrapper: Floral, routes: list[Any]) -> None:
    optimizer = torch.optim.SGD(wrapper.parameter_groups(), lr=0.05)
    for i, route in enumerate(routes):
        wrapper.route(route)
        optimizer.zero_grad()
        functional.cross_entropy(model(draw_normal(6, 2, 5, 5, seed=i)), torch.arange(6) % 3).backward()
        wrapper.precondition_()
        optimizer.step()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("routes", [[1, 1, 1], [None, 2, None, [0.5, 0.25, 0.25]]])
def test_distributed_training_with_a_fixed_route(routes: list[Any]) -> None:
    model = draw_parameters(Floral(build_network(), rank=2, num_clusters=3))
    by_ddp = copy.deepcopy(model)
    steps(DistributedDataParallel(by_ddp), by_ddp, routes)
    steps(model, model, routes)
    start = draw_parameters(Floral(build_network(), rank=2, num_clusters=3)).theta
    assert torch.equal(model.theta, start) == (None not in routes)
    torch.testing.assert_close(dict(by_ddp.named_parameters()), dict(model.named_parameters()), **TOLERANCES)


def test_a_fixed_route_gives_no_gradient_outside_distributed_training() -> None:
    model = Floral(nn.Linear(3, 3))
    model.route(1)
    model(torch.ones(1, 3)).sum().backward()
    assert model.theta.grad is None


def replicas(model: nn.Module, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``DataParallel``'s own replication, whose broadcast alone needs GPUs: here it is a copy that gradients
    pass through."""

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[t if detach and d == 0 else t.clone() for t in tensors] for d in devices]

    # the function hides the module of the same name
    monkeypatch.setitem(replicate.__globals__, "_broadcast_coalesced_reshape", broadcast)
    return replicate(model, list(range(count)))


def in_threads(models: list[Any], inputs: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(lambda m, x: m(x), models, inputs))


@pytest.mark.parametrize("make", [Twice, TiedLanguageModel])
def test_replicas_of_data_parallel(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draw_parameters(Floral(make().double(), rank=2, num_clusters=3))
    inputs = torch.arange(12).reshape(4, 3) % 9 if make is TiedLanguageModel else draw_normal(4, 3)

    def scores(out: Any) -> Tensor:
        return out.logits if make is TiedLanguageModel else out

    before = copy.deepcopy(model.base.state_dict())
    whole = scores(model(inputs))
    truth = gradients(model, whole.square().sum())
    outs = [scores(out) for out in in_threads(replicas(model, 2, monkeypatch), list(inputs.chunk(2)))]
    torch.testing.assert_close(torch.cat(outs), whole, **TOLERANCES)
    torch.testing.assert_close(gradients(model, torch.cat(outs).square().sum()), truth, **TOLERANCES)
    assert all(torch.equal(t, before[n]) for n, t in model.base.state_dict().items())
    model.route(1)
    for out, x in zip(
        in_threads(replicas(model, 2, monkeypatch), list(inputs.chunk(2))), inputs.chunk(2), strict=True
    ):
        torch.testing.assert_close(scores(out), scores(model.merge(1)(x)), **TOLERANCES)


def test_replicas_with_statistics_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = draw_parameters(Floral(build_network(), rank=2, reparameterize=False))
    x = draw_normal(16, 2, 5, 5)
    alone = [copy.deepcopy(model) for _ in range(4)]
    expected = [m(part) for m, part in zip(alone, x.chunk(4), strict=True)]
    outs = in_threads(replicas(model, 4, monkeypatch), list(x.chunk(4)))
    torch.testing.assert_close(outs, expected, **TOLERANCES)
    assert not any(m._forward_hooks for m in model.modules())
    # statistics are those of the first part, as BatchNorm's are
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone[0].named_buffers()), **TOLERANCES)


def test_replicas_refuse_checkpointing_inside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = draw_parameters(Floral(Inside("block", False).double(), rank=2))
    (replica,) = replicas(model, 1, monkeypatch)
    with pytest.raises(TaskError, match=r"torch\.utils\.checkpoint"):
        replica(draw_normal(2, 3))


def test_threads_that_share_a_model_wait_for_each_other() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            time.sleep(0.002)
            return self.b(h)

    model = draw_parameters(Floral(Slow().double(), rank=2)).eval()
    x = draw_normal(2, 3)
    before, expected = copy.deepcopy(model.base.state_dict()), model.merge()(x)
    outs = in_threads([model] * 8, [x] * 8)
    assert all(torch.allclose(out, expected, **TOLERANCES) for out in outs)
    assert all(torch.equal(t, before[n]) for n, t in model.base.state_dict().items())
    assert all(isinstance(p, nn.Parameter) for p in model.base.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(5, 4), nn.LSTM(4, 6)
        self.position = nn.Parameter(torch.zeros(1, 7, 4))
        self.start = nn.Parameter(torch.zeros(1, 1, 4))
        self.head = nn.Linear(6, 5)


def test_weight_matrices_without_adaptors_are_named_once() -> None:
    base = Recurrent()
    with pytest.warns(UserWarning, match="no adaptors") as caught:
        Floral(base, rank=1)
    (only,) = caught
    matrices = base.cell.weight_ih_l0.numel() + base.cell.weight_hh_l0.numel() + base.position.numel()
    share = matrices / sum(p.numel() for p in base.parameters())
    said = str(only.message)
    assert "cell.weight_ih_l0 (LSTM), cell.weight_hh_l0 (LSTM)" in said
    assert "position (Recurrent)" in said
    assert f"{share:.1%} of the parameters" in said
    assert "start" not in said
    assert "exclude" in said
    assert only.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Floral(base, rank=1, exclude=lambda _, layer: isinstance(layer, nn.LSTM | Recurrent))
        # what a setting leaves out is no news
        Floral(base.head, rank=1, kinds=("bias",))


class RootMeanSquare(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class MyRMSNorm(RootMeanSquare):
    """A normalization by its name."""


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is stored inputs first."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(draw_normal(inputs, outputs)),
            nn.Parameter(draw_normal(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_norm_by_its_name() -> None:
    model = draw_parameters(Floral(MyRMSNorm(4).double(), num_clusters=2))
    assert {n: s.kind for n, s in model._adapted.items()} == {"weight": "norm"}
    x = draw_normal(3, 4)
    weight = mixed_by_hand(model, torch.softmax(model.theta, 0))["weight"]
    torch.testing.assert_close(model(x), weight * functional.rms_norm(x, (4,), eps=0.0), **TOLERANCES)
    with pytest.raises(TaskError, match="no layer to adapt"):
        Floral(RootMeanSquare(4))


@pytest.mark.parametrize("rank", [2, 0.5])
def test_a_conv1d_of_gpt2_learns_as_the_linear_layer_that_it_is(rank: float) -> None:
    stored = Conv1D(6, 4)
    linear = nn.Linear(4, 6, dtype=REAL)
    with torch.no_grad():
        linear.weight.copy_(stored.weight.T)
        linear.bias.copy_(stored.bias)
    models = [Floral(base, rank, 3, alpha=0.5) for base in (stored, linear)]
    optimizers = [torch.optim.SGD(m.parameter_groups(), lr=0.1) for m in models]
    for i in range(5):
        x = draw_normal(8, 4, seed=i)
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            m.precondition_()
            optimizer.step()
    torch.testing.assert_close(models[0](x), models[1](x), **TOLERANCES)
    torch.testing.assert_close(models[0].merge(1)(x), models[1].merge(1)(x), **TOLERANCES)
    torch.testing.assert_close(models[0].theta, models[1].theta, **TOLERANCES)
    for m in models:
        m.center_()
    torch.testing.assert_close(stored.weight.T, linear.weight, **TOLERANCES)
    (first, second) = (next(iter(m._adapted.values())) for m in models)
    assert (first.kind, first.rank) == (second.kind, second.rank)
    assert first.parameter_count == second.parameter_count
