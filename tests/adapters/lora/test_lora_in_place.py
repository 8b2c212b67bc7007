"""A layer with LoRA factors stays the layer that it is: its options and hooks; reading its weight gives the adapted one.

Everything is compared with plain modules of PyTorch that hold the weight W + s·B A.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, methods, simulate
from fedlowrank.adapters.deployment import load_deployed, save_deployed
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import LoRALayer, add_lora, merge_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.linalg.pair import Pair
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import Architecture
from fedlowrank.rounds.outcome.export import export_model, write

torch.set_num_threads(1)

S = 1.5
"""The scale: α = 3 of rank 2."""


def with_random_factors(module: nn.Module, **kwargs: Any) -> nn.Module:
    made = add_lora(module.double(), 2, 2 * S, **kwargs)
    draw = torch.Generator().manual_seed(5)
    for n, p in made.named_parameters():
        if "lora_" in n:
            nn.init.normal_(p, std=0.5, generator=draw)
    return made


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


TOKENS = torch.tensor([[1, 3, 3, 0], [3, 2, 1, 8]])

OPTIONS: dict[str, dict[str, Any]] = {
    "padding": {"padding_idx": 3},
    "padding from the end": {"padding_idx": -1},
    "frequency": {"scale_grad_by_freq": True},
    "frequency and padding": {"scale_grad_by_freq": True, "padding_idx": 1},
    "norm": {"max_norm": 0.7, "norm_type": 1.0},
    "sparse": {"sparse": True, "padding_idx": 3},
    "norm, sparse": {"sparse": True, "max_norm": 0.7},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_embedding_keeps_its_options(name: str) -> None:
    plain = nn.Embedding(9, 5, **OPTIONS[name])
    made: Any = with_random_factors(nn.Sequential(plain))[0]
    a, b = made.lora_A.detach(), made.lora_B.detach()
    before = plain.weight.detach().clone()
    held = copy.deepcopy(plain)
    held.weight.data += S * (b @ a).mT
    g = drawn(2, 4, 5)
    actual, expected = made(TOKENS), held(TOKENS)
    torch.testing.assert_close(actual, expected)
    (actual * g).sum().backward()
    (expected * g).sum().backward()
    # the gradient of W + s (B A)^T that PyTorch's own layer gives, by the chain rule
    grad = held.weight.grad.to_dense()
    torch.testing.assert_close(made.lora_A.grad, S * b.mT @ grad.mT)
    torch.testing.assert_close(made.lora_B.grad, S * grad.mT @ a.mT)
    # what is frozen is not renormalized in place
    assert torch.equal(dict(made.named_parameters())["weight"], before)
    assert made.padding_idx == plain.padding_idx


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


WEIGHTS = drawn(7).abs()
BAGS: dict[str, dict[str, Any]] = {
    "mean": {"padding_idx": 3},
    "sum": {"mode": "sum", "padding_idx": -1},
    "weighted": {"mode": "sum", "padding_idx": 3},
    "max": {"mode": "max", "padding_idx": 3},
    "frequency": {"scale_grad_by_freq": True},
    "norm": {"max_norm": 0.7, "norm_type": 1.0, "padding_idx": 3},
    "sparse": {"mode": "sum", "sparse": True, "padding_idx": 3},
    "norm, sparse": {"sparse": True, "max_norm": 0.7},
    "last offset": {"include_last_offset": True, "padding_idx": 3},
}


@pytest.mark.parametrize("name", BAGS)
def test_a_bag_of_rows_keeps_its_options(name: str) -> None:
    plain = nn.EmbeddingBag(9, 5, **BAGS[name])
    made: Any = with_random_factors(nn.Sequential(plain))[0]
    a, b = made.lora_A.detach(), made.lora_B.detach()
    before = plain.weight.detach().clone()
    held = copy.deepcopy(plain)
    held.weight.data += S * (b @ a).mT
    # an empty bag, and one of padding alone
    x, offsets = torch.tensor([1, 3, 3, 0, 2, 8, 3]), torch.tensor([0, 4, 4, 6, 7])
    args = (x, offsets if name == "last offset" else offsets[:4])
    more = {"per_sample_weights": WEIGHTS} if name == "weighted" else {}
    actual, expected = made(*args, **more), held(*args, **more)
    torch.testing.assert_close(actual, expected)
    g = drawn(4, 5)
    (actual * g).sum().backward()
    (expected * g).sum().backward()
    grad = held.weight.grad.to_dense()
    torch.testing.assert_close(made.lora_A.grad, S * b.mT @ grad.mT)
    torch.testing.assert_close(made.lora_B.grad, S * grad.mT @ a.mT)
    if name != "frequency":
        assert not bool(made.lora_A.grad[:, plain.padding_idx or 4].any())
    assert torch.equal(dict(made.named_parameters())["weight"], before)
    if not plain.max_norm:
        torch.testing.assert_close(merge_lora(made)(*args, **more), actual)


def test_clients_adapt_a_bag_of_rows() -> None:
    bag = nn.EmbeddingBag(6, 4, padding_idx=2, sparse=True)
    module = add_lora(nn.Sequential(Whole(), bag, nn.Linear(4, 3)), 2, trainable=["2"])
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 6, (12, 3), generator=draw), torch.randint(0, 3, (12,), generator=draw))
        for _ in range(3)
    ]
    data = Federation.from_arrays(clients, module, head="2", classes=3, seed=0, rank=[2] * 3)
    for name in ("fedit", "fedhl", "fedavg"):
        method = METHODS[name](optimizer=SGD(lr=0.5, momentum=0.9, weight_decay=0.01), batch_size=4)
        state = simulate(method, data, rounds=2).personal(0)
        # FedHL rounds in its decomposition
        assert float(state["1.lora_A"][:, 2].abs().max()) < 1e-6
        assert bool(state["1.lora_A"][:, 1].any())


def test_a_row_of_padding_does_not_move() -> None:
    plain = nn.Sequential(nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 3))
    made = add_lora(plain, 2, target_modules=["0"])
    row = plain[0].weight[2].detach().clone()
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        made(torch.tensor([[2, 1, 0, 2, 5]])).square().sum().backward()
        optimizer.step()
    assert torch.equal(made[0](torch.tensor([2]))[0], row)
    assert torch.equal(made[0].weight[2], row)
    assert not torch.equal(made[0].weight[1], plain[0].weight[1])


def test_a_row_of_padding_does_not_move_in_a_federation() -> None:
    table = nn.Embedding(6, 4, padding_idx=2)
    module = add_lora(nn.Sequential(Whole(), table, nn.Flatten(), nn.Linear(12, 3)), 2, trainable=["3"])
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 6, (12, 3), generator=draw), torch.randint(0, 3, (12,), generator=draw))
        for _ in range(3)
    ]
    data = Federation.from_arrays(clients, module, head="3", classes=3, seed=0)
    method = methods.FedAvg(optimizer=SGD(lr=0.5, momentum=0.9, weight_decay=0.01), batch_size=4)
    result = simulate(method, data, rounds=2)
    state = result.personal(0)
    assert not bool(state["1.lora_A"][:, 2].any())
    assert bool(state["1.lora_A"][:, 1].any())


def test_an_exported_model_is_merged(tmp_path: Path) -> None:
    module = add_lora(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 2, trainable=["2"])
    clients = [(drawn(12, 4).float() + i, torch.arange(12) % 3) for i in range(2)]
    data = Federation.from_arrays(clients, module, head="2", classes=3, seed=0)
    result = simulate(methods.FedAvg(optimizer=SGD(lr=0.5), batch_size=4), data, rounds=2)
    made, state = export_model(result.run, 0), result.personal(0)
    held = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    held.load_state_dict({n: t for n, t in state.items() if "lora" not in n and "_extra" not in n})
    assert bool(state["0.lora_B"].any())
    held[0].weight.data += state["0.lora_B"] @ state["0.lora_A"]
    assert [type(m) for m in made.modules()] == [type(m) for m in held.modules()]
    x = drawn(6, 4).float()
    torch.testing.assert_close(made(x), held(x))
    save_deployed(made, tmp_path / "model.safetensors")
    # both a module with factors and a plain one are of that architecture
    for like in (module, held):
        assert torch.equal(load_deployed(like, tmp_path / "model.safetensors")(x), made(x))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["flora", "hetlora"])
def test_models_of_lora_methods_are_exported(name: str, tmp_path: Path) -> None:
    module = add_lora(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), 2, trainable=["1"])
    clients = [(drawn(12, 4).float() + i, torch.arange(12) % 3) for i in range(2)]
    # ranks below and above that of the module's own layers
    data = Federation.from_arrays(clients, module, head="1", classes=3, seed=0, rank=[1, 3])
    result = simulate(METHODS[name](optimizer=SGD(lr=0.5), batch_size=4), data, rounds=2)
    for client in range(2):
        gain = write(result.run, client, None, "small", tmp_path / "model.safetensors", 1)
        assert gain.difference < 1e-6
        params = result.run.personal_params(data.infos[client])
        x = drawn(6, 4).float()
        expected = data.architectures["model"].apply(params, x)
        torch.testing.assert_close(export_model(result.run, client)(x), expected)


class Scaled(nn.Linear):
    """A layer of a user's: an attribute and a buffer more, and a forward of its own."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__(d, k)
        self.scaling, self.calls = 3.0, 0
        self.register_buffer("shift", torch.ones(k))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.scaling * self.weight, self.bias) + self.shift


class Standardized(nn.Conv2d):
    """Weight standardization, as in BiT: PyTorch's forward with another convolution."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, w, bias)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), drawn(2, 4)),
    "own forward": (lambda: Scaled(4, 3), drawn(2, 4)),
    "own convolution": (lambda: Standardized(2, 3, 2), drawn(1, 2, 4, 4)),
    "bilinear convolution": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2, groups=1), drawn(1, 2, 4)),
    "depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4, dilation=2, padding=2), drawn(1, 4, 6)),
    "shared row": (lambda: nn.Embedding(9, 4), TOKENS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_stays_the_layer_that_it_is(name: str) -> None:
    make, x = LAYERS[name]
    plain = make().double().eval()
    rank = {"rank": 1} if name == "depthwise" else {"rank": 2}
    seen: list[Tensor] = []
    plain.register_forward_hook(lambda *call: seen.append(call[2]))
    made: Any = add_lora(plain, alpha=S * rank["rank"], **rank)
    nn.init.normal_(made.lora_A, std=0.5)
    nn.init.normal_(made.lora_B, std=0.5)
    assert isinstance(made, type(plain))
    assert made.training is False
    assert {n for n, _ in plain.named_parameters()} <= {n for n, _ in made.named_parameters()}
    assert vars(plain).keys() <= vars(made).keys()
    held = copy.deepcopy(plain)
    update = made.lora_B @ made.lora_A
    held.weight.data += (
        S * (update.mT if name == "shared row" else update).reshape(held.weight.shape).detach()
    )
    out = made(x)
    torch.testing.assert_close(made.weight, held.weight)
    torch.testing.assert_close(out, held(x))
    # the hook of the layer saw its output, once
    assert seen[0] is out
    grad, held_grad = torch.autograd.grad(out.square().sum(), made.lora_B), torch.zeros(0)
    held(x).square().sum().backward()
    g = held.weight.grad.reshape(len(held.weight), -1)
    held_grad = S * (g.mT if name == "shared row" else g) @ made.lora_A.detach().mT
    torch.testing.assert_close(grad[0], held_grad)


class Tied(nn.Module):
    """A model that reads its table's weight without calling the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.body(self.table(x)).tanh(), self.table.weight)


class Attention(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


READERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), drawn(2, 4, 6)),
    "encoder stack": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2),
        drawn(2, 4, 6),
    ),
    "decoder": (lambda: Decoder(), drawn(2, 4, 6)),
    "tied by use": (Tied, TOKENS),
    "attention": (Attention, drawn(2, 4, 6)),
    "attention of three weights": (lambda: Attention(kdim=6, vdim=6, bias=False), drawn(2, 4, 6)),
    "attention of other widths": (lambda: Cross(), drawn(2, 4, 6)),
}


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self) -> None:
        super().__init__(6, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=3, vdim=4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[..., :3], x[..., :4])[0]


def updated_by_hand(plain: nn.Module, made: nn.Module) -> nn.Module:
    """A plain copy with s·B A added to each weight that has factors."""
    held, factors = copy.deepcopy(plain), dict(made.named_parameters())
    for name, p in held.named_parameters():
        stem = name.removesuffix("weight")
        if f"{stem}lora_A" in factors:
            update = (factors[f"{stem}lora_B"] @ factors[f"{stem}lora_A"]).detach()
            p.data += S * (update if update.shape == p.shape else update.mT)
    return held


@pytest.mark.few(6)
@pytest.mark.parametrize("name", READERS)
def test_reading_a_weight_gives_the_adapted_one(name: str) -> None:
    make, x = READERS[name]
    plain = make().double()
    made = with_random_factors(plain)
    held = updated_by_hand(plain, made)
    count = sum("lora_A" in n for n, _ in made.named_parameters())
    assert count == sum(p.ndim > 1 for p in plain.parameters())
    assert float((held(x) - plain(x)).detach().abs().max()) > 0.1
    for training in (True, False):
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            made.train(training), held.train(training)
            with mode():
                torch.testing.assert_close(made(x), held(x))
    # gradients of the factors by the chain rule, from those of the weights
    made(x).square().sum().backward()
    held(x).square().sum().backward()
    actual, grads = dict(made.named_parameters()), {n: p.grad for n, p in held.named_parameters()}
    for n, p in actual.items():
        if n.endswith("lora_B"):
            grad, a = grads[n.removesuffix("lora_B") + "weight"], actual[n.removesuffix("B") + "A"].detach()
            torch.testing.assert_close(p.grad, S * (grad if a.shape[1] == grad.shape[1] else grad.mT) @ a.mT)
    # copies, files and the state dict
    stream = io.BytesIO()
    torch.save(made, stream)
    stream.seek(0)
    loaded = add_lora(plain, 2, 2 * S)
    loaded.load_state_dict(made.state_dict())
    for copied in (copy.deepcopy(made), torch.load(stream, weights_only=False), loaded.eval()):
        torch.testing.assert_close(copied(x), held(x))
    # merged into a module of PyTorch's own layers, with the state dict of the plain one
    merged = merge_lora(made)
    assert not any(isinstance(m, LoRALayer) for m in merged.modules())
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    plain.load_state_dict(merged.state_dict())
    torch.testing.assert_close(plain.eval()(x), held(x))


class Shared(nn.Module):
    """A table and an output layer of one parameter."""

    def __init__(self, first: str = "table") -> None:
        super().__init__()
        if first == "table":
            self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        else:
            self.out, self.table = nn.Linear(6, 9), nn.Embedding(9, 6)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).tanh())


@pytest.mark.parametrize("first", ["table", "out"])
@pytest.mark.parametrize("target", ["all", ["table"], ["out"]])
def test_a_shared_weight_has_one_update(first: str, target: Any) -> None:
    plain = Shared(first).double()
    made: Any = with_random_factors(plain, target_modules=target)
    assert sum("lora" in n for n, _ in made.named_parameters()) == 2
    torch.testing.assert_close(made.table.weight, made.out.weight, rtol=0, atol=0)
    held = copy.deepcopy(plain)
    update = (made.table.lora_B @ made.table.lora_A).detach()
    held.table.weight.data += S * (update if update.shape == (9, 6) else update.mT)
    assert held.out.weight is held.table.weight
    torch.testing.assert_close(made(TOKENS), held(TOKENS))
    merged: Any = merge_lora(made)
    assert merged.out.weight is merged.table.weight
    torch.testing.assert_close(merged(TOKENS), held(TOKENS))


@pytest.mark.parametrize("how", ["plain", "adapted"])
@pytest.mark.parametrize("first", ["table", "out"])
def test_clients_update_a_shared_weight_everywhere(first: str, how: str) -> None:
    plain = Shared(first).double()
    module = plain if how == "plain" else with_random_factors(plain)
    model = Architecture("shared", module, TOKENS)
    lora = lora_of(model)
    (layer,) = lora.layers
    pair = Pair(drawn(lora.shapes[layer][0], 3), drawn(3, lora.shapes[layer][1]))
    moved = lora.add_to_weights({layer: drawn(*lora.shapes[layer])})
    for weights in (None, moved):
        held = copy.deepcopy(plain)
        update = 0.7 * pair.dense() + (0 if weights is None else drawn(*lora.shapes[layer]))
        held.table.weight.data += update if update.shape == (9, 6) else update.mT
        params = lora.insert_factors({layer: pair}, 0.7, moved_weights=weights)
        torch.testing.assert_close(model.apply(params, TOKENS), held(TOKENS))


def test_a_weight_that_is_trained_whole_has_no_update() -> None:
    made = add_lora(nn.ModuleDict({"tied": Shared(), "line": nn.Linear(4, 3)}), 2, trainable=["tied.out"])
    assert {n for n, p in made.named_parameters() if p.requires_grad} == {
        *("line.lora_A", "line.lora_B", "tied.table.weight", "tied.out.bias")
    }
    with pytest.raises(TaskError, match="matches no layer"):
        add_lora(Shared(), 2, trainable=["out"])


def test_attention_is_chosen_by_its_name_or_by_a_projection() -> None:
    names = "linear1", "linear2", "self_attn", "self_attn.out_proj"
    for target, chosen in (
        (["self_attn"], {"in_proj_lora_A", "out_proj.lora_A"}),
        (["in_proj"], {"in_proj_lora_A"}),
        (["out_proj"], {"out_proj.lora_A"}),
        (r"self_attn\.in.*", {"in_proj_lora_A"}),
    ):
        made = add_lora(nn.TransformerEncoderLayer(6, 2, 8), 2, target_modules=target)
        actual = {n.removeprefix("self_attn.") for n, _ in made.named_parameters() if n.endswith("lora_A")}
        assert actual == chosen
    assert {
        n
        for n, m in add_lora(nn.TransformerEncoderLayer(6, 2, 8), 2).named_modules()
        if n in names and isinstance(m, LoRALayer)
    } == set(names)


def test_replicas_read_their_own_weight() -> None:
    made: Any = with_random_factors(nn.Linear(4, 3))
    # what torch.nn.parallel.replicate does for each device
    replica = made._replicate_for_data_parallel()
    for n, p in made.named_parameters():
        setattr(replica, n, 2 * p.detach())
    torch.testing.assert_close(replica.weight, 2 * made.base_weight() + 4 * S * (made.lora_B @ made.lora_A))


def test_numbers_that_take_no_gradient_are_left_as_they_are() -> None:
    module = nn.ModuleDict({"line": nn.Linear(4, 3), "head": nn.Module()})
    module["head"].register_parameter(
        "count", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    )
    module["head"].register_parameter("shift", nn.Parameter(torch.ones(2)))
    made = add_lora(module, 2, trainable=["head"])
    assert [n for n, p in made["head"].named_parameters() if p.requires_grad] == ["shift"]
