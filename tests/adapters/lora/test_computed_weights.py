"""Layers that compute their weight from other parameters: one answer of all methods, whose advice works."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from fedlowrank import SGD, Federation, Floral, simulate
from fedlowrank.adapters.deployment import deploy
from fedlowrank.adapters.lora.lora_layers import add_lora, merge_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.methods import METHODS

torch.set_num_threads(1)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = nn.utils.weight_norm(layer)
    return made


KINDS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "weight_norm": (parametrizations.weight_norm, "the parametrization WeightNorm"),
    "spectral_norm": (parametrizations.spectral_norm, "the parametrization SpectralNorm"),
    "orthogonal": (parametrizations.orthogonal, "the parametrization Orthogonal"),
    "old weight_norm": (old_weight_norm, "WeightNorm"),
    "old spectral_norm": (spectral_norm, "SpectralNorm"),
    "pruned": (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), "L1Unstructured"),
}


def net(kind: str) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.ReLU(),
        nn.ModuleDict({"l": KINDS[kind][0](nn.Linear(6, 5))})["l"],
        nn.Linear(5, 3),
    )


def federation(model: Callable[[], nn.Module], head: str | None = "3") -> Federation:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(9, 4, generator=draw), torch.randint(0, 3, (9,), generator=draw)) for _ in range(2)
    ]
    return Federation.from_arrays(clients, model, head=head, classes=3, seed=0)


def run(name: str, data: Federation, **kwargs: Any) -> Any:
    return simulate(METHODS[name](batch_size=4, optimizer=SGD(lr=0.1), **kwargs), data, rounds=1)


LORA = ["fedit", "ffa_lora", "fedsa_lora", "flexlora", "hetlora", "flora", "fedex_lora", "fedhl"]
ADAPTORS = ["floral", "local_adaptor"]
FORMS = ["fedslr", "fedspa", "gpgd", "lpgd"]


class Bags(nn.Module):
    """Rows of a table, summed."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = parametrizations.weight_norm(nn.EmbeddingBag(6, 4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.bag(x.long() % 6))
        return scores


def test_a_bag_of_rows_is_asked_for_its_weight_like_other_layers() -> None:
    data = federation(Bags, "head")
    asks: list[Callable[[], Any]] = [lambda: add_lora(Bags(), 2), lambda: Floral(Bags(), 1, 2)]
    for ask in (*asks, lambda: run("floral", data), lambda: run("local_adaptor", data)):
        with pytest.raises(TaskError, match=r"layer bag \(EmbeddingBag\) has the parametrization WeightNorm"):
            ask()
    assert run("floral", data, kinds=("linear",))


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_says_which_layer_it_is_and_what_to_type(kind: str) -> None:
    model = net(kind)
    data = federation(lambda: net(kind))
    asked: list[Callable[[], Any]] = [lambda: add_lora(model, 2), lambda: Floral(model, 1, 2)]
    asked += [lambda name=name: run(name, data) for name in (*LORA, *ADAPTORS, *FORMS)]
    for ask in asked:
        with pytest.raises(TaskError, match=r"layer 2 \(Linear\) has " + KINDS[kind][1]) as error:
            ask()
    (advice,) = set(re.findall(r"by (torch\S+\(model\.get_submodule\('2'\), 'weight'\))", str(error.value)))
    x = torch.randn(3, 4)
    before = model.eval()(x)
    exec(advice, {"torch": torch, "model": model})
    torch.testing.assert_close(add_lora(model, 2)(x), before)
    # where the layer can be left out
    left = net("weight_norm")
    assert torch.equal(add_lora(left, 2, target_modules=["0"])(x), left(x))
    Floral(left, 1, 2, exclude=lambda name, _: name.startswith("2"))


def test_methods_that_need_no_weight_train_such_a_layer() -> None:
    for name in ("fedavg", "pfedlora"):
        assert run(name, federation(lambda: net("weight_norm"))).rounds
    # its parameters are not those of the low-rank form
    sources = tuple(f"2.parametrizations.weight.original{i}" for i in "01")
    assert run("fedslr", federation(lambda: net("weight_norm")), exclude=sources).rounds


def test_fedspa_needs_the_weights_of_other_layers_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = parametrizations.weight_norm(nn.GRU(4, 5, batch_first=True), "weight_hh_l0")
            self.head = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x[:, None])[0][:, 0])

    with pytest.raises(
        TaskError, match=r"layer rnn \(GRU\) has the parametrization WeightNorm of its weight_hh_l0"
    ):
        run("fedspa", federation(Net, "head"))


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "lora"])
def test_a_head_without_a_plain_weight_has_no_decomposition(kind: str) -> None:
    def make() -> nn.Module:
        if kind == "lora":
            return add_lora(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), 2)
        return nn.Sequential(nn.Linear(4, 6), KINDS[kind][0](nn.Linear(6, 3)))

    data = federation(make, "1")
    with pytest.raises(TaskError, match=r"start = 'svd' needs a head .* Use start = 'random'"):
        run("pfedlora", data, start="svd")


def test_attention_and_layers_of_peft() -> None:
    attention = parametrizations.weight_norm(nn.MultiheadAttention(4, 2), "in_proj_weight")
    with pytest.raises(
        TaskError, match=r"MultiheadAttention\) has the parametrization WeightNorm of its in_proj_weight"
    ):
        add_lora(nn.Sequential(attention), 2)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["2"])
    wrapped = peft.get_peft_model(net("weight_norm"), config)
    with pytest.raises(TaskError, match=r"layer base_model\.model\.2\.base_layer \(Linear\) has the param"):
        run("fedit", federation(lambda: wrapped, None))


@pytest.mark.parametrize("kind", ["old weight_norm", "old spectral_norm"])
def test_a_module_is_copied_with_a_layer_whose_weight_a_hook_computes(kind: str) -> None:
    module, x = net(kind), torch.randn(5, 4)
    module(x)
    module.eval()
    copies = [
        add_lora(module, 2, target_modules=["0"]),
        merge_lora(module),
        Floral(module, 1, 2, exclude=lambda name, _: name == "2").merge(),
        deploy(module, {}),
    ]
    for copied in copies:
        torch.testing.assert_close(copied.eval()(x), module(x))


def test_an_lstm_that_shares_an_adapted_weight_is_copied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 16, bias=False)
            self.out.weight = self.rnn.weight_ih_l0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(x)[0])

    model, x = add_lora(Tied(), 2), torch.randn(2, 3, 4)
    nn.init.normal_(model.get_parameter("out.lora_B"))
    expected = model(x)
    torch.testing.assert_close(merge_lora(model)(x), expected)
    torch.testing.assert_close(deploy(model, {})(x), expected)
