"""LoRA layers for any module: nothing changes at the start, what is chosen, what is trained, what is
refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_layers import LoRALayer, add_lora
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.core.key import Key

torch.set_num_threads(1)


class Net(nn.Module):
    """Layers of every kind, none of them square, in places of several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)
        self.block = nn.ModuleDict({"fc1": nn.Linear(6, 5), "norm": nn.LayerNorm(5), "fc11": nn.Linear(5, 4)})
        self.line = nn.Conv1d(4, 5, 3, padding=1, padding_mode="reflect")
        self.image = nn.Conv2d(1, 3, (2, 3), stride=2, dilation=(1, 2), padding=2)
        self.cube = nn.Conv3d(1, 3, (1, 2, 2), bias=False)
        self.head = nn.Sequential(nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block["fc11"](self.block["norm"](self.block["fc1"](self.words(x))))
        y = self.image(self.line(y.mT)[:, None])
        return self.head(self.cube(y.mean(1, keepdim=True)[:, None].expand(-1, 1, 2, -1, -1)).mean((2, 3, 4)))


def net() -> Net:
    made = Net()
    draw = torch.Generator().manual_seed(0)
    for p in made.parameters():
        nn.init.normal_(p, std=0.4, generator=draw)
    return made


def tokens() -> Tensor:
    return torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(1))


ALL = ["words", "block.fc1", "block.fc11", "line", "image", "cube", "head.0"]


def wrapped(module: nn.Module) -> list[str]:
    return [n for n, m in module.named_modules() if isinstance(m, LoRALayer)]


def test_at_the_start_the_output_is_the_original_bit_for_bit() -> None:
    plain = net()
    before = copy.deepcopy(plain.state_dict())
    state = torch.get_rng_state()
    made = add_lora(plain, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(made(tokens()), plain(tokens()))
    # the module that was given stays as it is, its parameters trainable, and shares nothing with the copy
    assert wrapped(plain) == []
    assert all(torch.equal(t, before[n]) for n, t in plain.state_dict().items())
    assert all(p.requires_grad for p in plain.parameters())
    assert not {p.data_ptr() for p in plain.parameters()} & {p.data_ptr() for p in made.parameters()}


@pytest.mark.parametrize(
    ("alpha", "rslora", "scale"),
    [(None, False, 1.0), (6.0, False, 3.0), (6.0, True, 6 / 2**0.5), (None, True, 2**0.5)],
)
def test_the_scale(alpha: float | None, rslora: bool, scale: float) -> None:
    made = add_lora(net(), 2, alpha, rslora=rslora)
    assert all(made.get_submodule(n).lora_scaling == pytest.approx(scale, rel=1e-15) for n in wrapped(made))
    assert all(made.get_submodule(n).lora_rslora == rslora for n in wrapped(made))


def test_what_is_chosen() -> None:
    for target, chosen in {
        "all": ALL,
        ("fc1", "line"): ["block.fc1", "line"],
        ("block.fc11",): ["block.fc11"],
        ("0",): ["head.0"],
        r"block\.fc\d+": ["block.fc1", "block.fc11"],
        r".*(fc1|cube)": ["block.fc1", "cube"],
    }.items():
        assert wrapped(add_lora(net(), 2, target_modules=target)) == chosen
    for target in ("fc1", ["c1"], ["norm"], "block", r"blockxfc1", []):
        with pytest.raises(TaskError) as error:
            add_lora(net(), 2, target_modules=target)
        told = str(error.value)
        assert f"target_modules = {target!r} matches no layer" in told
        assert told.endswith("there are: words × 1, fc1 × 1, fc11 × 1, line × 1, image × 1, cube × 1, 0 × 1")


def test_only_the_factors_and_what_is_named_are_trained() -> None:
    made = add_lora(net(), 2, target_modules=["fc1", "fc11"], trainable=["head", "block.norm"])
    trained = {n for n, p in made.named_parameters() if p.requires_grad}
    assert trained == {
        *(f"block.{n}.lora_{f}" for n in ("fc1", "fc11") for f in "AB"),
        *("head.0.weight", "head.0.bias", "block.norm.weight", "block.norm.bias"),
    }
    # what is trained whole has no factors, even if it is asked for
    assert wrapped(add_lora(net(), 2, trainable=["head"])) == ALL[:-1]
    with pytest.raises(TaskError, match=r"there is no submodule 'heads'; the module has \['block', 'cube'"):
        add_lora(net(), 2, trainable=["heads"])
    with pytest.raises(TaskError, match="matches no layer"):
        add_lora(net(), 2, target_modules=["0"], trainable=["head"])


def test_factors_have_the_layers_shapes_and_type_and_come_from_the_key() -> None:
    made, again, other = (add_lora(net().double(), 2, key=Key((s,))) for s in (4, 4, 5))
    shapes = {"words": (6, 13), "block.fc1": (5, 6), "line": (5, 12), "image": (3, 6), "cube": (3, 4)}
    for name, (d, k) in shapes.items():
        layer = made.get_submodule(name)
        assert layer.lora_A.shape == (2, k)
        assert layer.lora_B.shape == (d, 2)
        assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float64
        random = "lora_B" if name == "words" else "lora_A"
        drawn = getattr(layer, random)
        assert torch.equal(drawn, getattr(again.get_submodule(name), random))
        assert not torch.equal(drawn, getattr(other.get_submodule(name), random))
    assert torch.equal(add_lora(net(), 2).line.lora_A, add_lora(net(), 2, key=Key((0,))).line.lora_A)
    half = add_lora(nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}).to(torch.bfloat16), 2)
    assert half["a"].lora_A.dtype == torch.bfloat16
    assert not torch.equal(half["a"].lora_A, half["b"].lora_A)


class Twice(nn.Module):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.one(x).tanh()))


def test_a_layer_under_two_names_gets_one_pair() -> None:
    made = add_lora(Twice(), 2)
    assert made.one is made.again
    assert isinstance(made.one, LoRALayer)
    assert len([n for n, _ in made.named_parameters() if "lora_" in n]) == 4
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    plain = Twice()
    plain.load_state_dict(
        {n: t for n, t in made.state_dict().items() if "lora" not in n and "_extra" not in n}
    )
    assert torch.equal(made(x), plain(x))
    nn.init.ones_(made.one.lora_B)
    plain.one.weight.data += made.one.lora_B.detach() @ made.one.lora_A.detach()
    torch.testing.assert_close(made(x), plain(x))


def test_a_lone_layer() -> None:
    alone = add_lora(nn.Linear(4, 3), 2)
    assert isinstance(alone, LoRALayer)


def test_what_is_refused() -> None:
    whole = nn.Linear(4, 3)
    whole.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.int8), requires_grad=False)
    for module, rank, error, match in (
        (net(), 0, ConfigError, "add_lora.rank must be a whole number of at least 1; it is 0"),
        (nn.Sequential(nn.LayerNorm(3)), 1, TaskError, "there are: none"),
        (add_lora(net(), 2), 2, TaskError, "layer words has LoRA factors already"),
        (nn.Sequential(whole), 2, TaskError, r"layer 0 \(Linear\) has a weight of type torch.int8"),
    ):
        with pytest.raises(error, match=match):
            add_lora(module, rank)
    assert wrapped(add_lora(net(), 3, trainable=["head"])) == ALL[:-1]
