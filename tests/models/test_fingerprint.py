"""A model is recognized by its layers: every change is named, and an equal model made again is equal."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, simulate
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import CheckpointError
from fedlowrank.methods import FedAvg
from fedlowrank.models.fingerprint import compare_layers, describe_layers

torch.set_num_threads(1)


def plain(activation: nn.Module | None = None, *, bias: bool = True, p: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=bias), activation or nn.ReLU(), nn.Dropout(p), nn.Linear(3, 2))


class Own(nn.Module):
    """Its activation and scale are attributes, and a function from outside."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 3), nn.Linear(3, 2)
        self.activation, self._scale = activation, scale
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.out(self.activation(self.body(x)) * self._scale)
        return out


def closing_over(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    """A class of the same name and source, whose forward captures an activation."""

    class Captures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            actual: Tensor = activation(self.out(x))
            return actual

    return Captures()


def written(folder: Path, body: str, name: str = "Net") -> nn.Module:
    """A module whose class is in a file of its own."""
    source = f"""
        import torch
        from torch import nn
        from torch.nn import functional as F
        SLOPE = 0.1

        def helper(x):
            return F.leaky_relu(x, SLOPE)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.Linear(4, 2)

            def forward(self, x):
                {body}
    """
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "net.py"
    path.write_text(textwrap.dedent(source))
    space: dict[str, Any] = {"__name__": "net"}
    exec(compile(path.read_text(), path, "exec"), space)
    made: nn.Module = space[name]()
    return made


def tied(*, is_tied: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = plain()
    model[0].weight.requires_grad_(False)
    return model


def encoder(activation: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, activation=activation)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "activation": (plain, lambda: plain(nn.Tanh()), "layer '1' was ReLU"),
    "option": (plain, lambda: plain(p=0.2), "layer '2' was Dropout(inplace=False, p=0.1)"),
    "no bias": (plain, lambda: plain(bias=False), "no bias"),
    "type": (plain, lambda: plain().bfloat16(), "weight bfloat16 [3, 4]"),
    "frozen": (plain, frozen, "weight float32 [3, 4] frozen"),
    "tied": (lambda: tied(is_tied=False), lambda: tied(is_tied=True), "weight tied to 0.weight"),
    "one more": (plain, lambda: nn.Sequential(*plain(), nn.Identity()), "layer '4' is only in the new model"),
    "padding": (lambda: nn.Embedding(5, 3), lambda: nn.Embedding(5, 3, padding_idx=0), "padding_idx=0"),
    "stride": (lambda: nn.Conv2d(1, 2, 3), lambda: nn.Conv2d(1, 2, 3, stride=2), "stride=[2, 2]"),
    "eps": (lambda: nn.LayerNorm(3), lambda: nn.LayerNorm(3, eps=0.1), "eps=0.1"),
    "heads": (lambda: nn.MultiheadAttention(8, 2), lambda: nn.MultiheadAttention(8, 4), "num_heads=4"),
    "buffers": (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False), "no buffer"),
    "function": (lambda: encoder("relu"), lambda: encoder("gelu"), "activation=gelu"),
    "attribute": (Own, lambda: Own(torch.tanh), "activation=tanh"),
    "own function": (lambda: Own(lambda x: x), lambda: Own(lambda x: -x), "activation=<lambda>"),
    "partial": (
        lambda: Own(functools.partial(functional.leaky_relu, negative_slope=0.1)),
        lambda: Own(functools.partial(functional.leaky_relu, negative_slope=0.2)),
        "0.2",
    ),
    "private attribute": (Own, lambda: Own(scale=2.0), "_scale=2.0"),
    "captured": (lambda: closing_over(torch.relu), lambda: closing_over(torch.tanh), "code"),
    "LoRA": (
        lambda: add_lora(plain(), rank=2),
        lambda: add_lora(plain(), rank=2, alpha=9.0),
        "was",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_and_the_same_model_is_equal(change: str) -> None:
    before, after, says = CHANGES[change]
    assert compare_layers(describe_layers(before()), describe_layers(before())) == []
    assert says in " | ".join(compare_layers(describe_layers(before()), describe_layers(after())))


@pytest.mark.parametrize(
    ("body", "other", "is_equal"),
    [
        ("return F.relu(self.out(x))", "return F.gelu(self.out(x))", False),
        ("return F.relu(self.out(x))", "return F.relu( self.out(x) )  # now in one line", True),
        ("return helper(self.out(x))", "SLOPE = 0.3; return helper(self.out(x))", False),
    ],
)
def test_code_counts_and_its_layout_does_not(tmp_path: Path, body: str, other: str, is_equal: bool) -> None:
    one, two = (describe_layers(written(tmp_path / str(i), text)) for i, text in enumerate((body, other)))
    assert (one == two) is is_equal


def test_functions_that_are_called_by_name_count(tmp_path: Path) -> None:
    plain_text = "return helper(self.out(x))"
    one = describe_layers(written(tmp_path / "a", plain_text))
    path = tmp_path / "b" / "net.py"
    written(tmp_path / "b", plain_text)
    for old, new in (("SLOPE = 0.1", "SLOPE = 0.2"), ("F.leaky_relu(x", "F.leaky_relu(-x")):
        text = (tmp_path / "a" / "net.py").read_text().replace(old, new)
        path = tmp_path / f"{len(new)}.py"
        path.write_text(text)
        space: dict[str, Any] = {"__name__": "net"}
        exec(compile(text, path, "exec"), space)
        assert describe_layers(space["Net"]()) != one


def federation(model: Callable[[], nn.Module]) -> Federation:
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(12, 4, generator=g), torch.arange(12) % 2) for _ in range(2)]
    return Federation.from_arrays(data, model, classes=2)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (lambda: plain(nn.Tanh()), r"model model: layer '1' was ReLU\(inplace=False\) and is Tanh\(\)"),
        (lambda: plain(p=0.3), r"p=0.1\) and is Dropout\(inplace=False, p=0.3\)"),
    ],
)
def test_a_run_is_not_resumed_with_another_model(
    tmp_path: Path, after: Callable[[], nn.Module], says: str
) -> None:
    folder = tmp_path / "run"
    simulate("fedavg", federation(plain), rounds=1, folder=folder)
    with pytest.raises(CheckpointError, match=says):
        simulate("fedavg", federation(after), rounds=2, folder=folder, resume=True)
    # the very model, also where its object or a copy has trained before
    result = simulate("fedavg", federation(plain), rounds=2, folder=folder, resume=True)
    assert len(result.rounds) == 3


class Casts(nn.Module):
    """Takes float32 whatever its own type is."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = self.out(x.to(self.out.weight.dtype)).float()
        return actual


def test_the_same_model_in_another_type_is_named(tmp_path: Path) -> None:
    simulate("fedavg", federation(Casts), rounds=1, folder=tmp_path / "run")
    says = r"layer 'out' was weight float32 \[2, 4\]; bias float32 \[2\] and is weight bfloat16"
    other = federation(lambda: Casts().bfloat16())
    with pytest.raises(CheckpointError, match=says):
        simulate("fedavg", other, rounds=2, folder=tmp_path / "run", resume=True)


@pytest.mark.full
def test_an_own_module_resumes_in_its_own_process_and_with_its_own_federation(tmp_path: Path) -> None:
    same = federation(lambda: Own(torch.tanh, 0.5))
    simulate("fedavg", same, rounds=1, folder=tmp_path / "run")
    assert len(simulate("fedavg", same, rounds=2, folder=tmp_path / "run", resume=True).rounds) == 3
    again = federation(lambda: Own(torch.tanh, 0.5))
    assert len(simulate("fedavg", again, rounds=3, folder=tmp_path / "run", resume=True).rounds) == 4


def test_frozen_weights_and_buffers_are_part_of_a_model(tmp_path: Path) -> None:
    def with_base(value: float) -> nn.Module:
        model = frozen()
        nn.init.constant_(model[0].weight, value)
        return model

    how: dict[str, Any] = {"folder": tmp_path / "run"}
    method = FedAvg(optimizer=SGD(lr=0.1))
    simulate(method, federation(lambda: with_base(0.5)), rounds=1, **how)
    with pytest.raises(
        CheckpointError, match="model model: its frozen parameters or buffers have other values"
    ):
        simulate(method, federation(lambda: with_base(0.25)), rounds=2, resume=True, **how)
    simulate(method, federation(lambda: with_base(0.5)), rounds=2, resume=True, **how)


def test_clients_with_different_models_are_compared_each_with_its_own(tmp_path: Path) -> None:
    def made(second: nn.Module) -> Federation:
        g = torch.Generator().manual_seed(0)
        data = [(torch.randn(12, 4, generator=g), torch.arange(12) % 2) for _ in range(2)]
        return Federation.from_arrays(data, {"a": plain(), "b": second}, classes=2)

    torch.manual_seed(0)
    simulate("standalone", made(plain(nn.GELU())), rounds=1, folder=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"model b: layer '1' was GELU\(approximate='none'\) and is Sigmoid\(\)"
    ):
        simulate("standalone", made(plain(nn.Sigmoid())), rounds=2, folder=tmp_path / "run", resume=True)
