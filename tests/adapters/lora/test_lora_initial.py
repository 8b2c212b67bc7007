"""What LoRA factors begin with, against what PEFT's own layers draw."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_factors import find_lora
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.adapters.wire_format import unpack_factors
from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedit import FedIT
from fedlowrank.methods.fedsa_lora import FedSALoRA
from fedlowrank.methods.ffa_lora import FFALoRA
from fedlowrank.methods.flexlora import FlexLoRA
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

WORDS, WIDTH, HIDDEN = 700, 600, 500
RANK = 20


class Reader(nn.Module):
    """Words, a linear layer and a head."""

    head_name = "head"

    def __init__(self, words: int = WORDS, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.words, self.fc, self.head = (
            nn.Embedding(words, width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.words(x.long()).mean(1))))


def by_peft(module: nn.Module, rank: int = RANK, initial: Any = True) -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=["words", "fc"], init_lora_weights=initial
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped: nn.Module = peft.get_peft_model(copy.deepcopy(module), config)
    return wrapped


def theirs(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """The factors B and A that PEFT drew."""
    layer: Any = module.get_submodule(f"base_model.model.{name}")
    if name == "words":
        return layer.lora_embedding_B["default"].detach(), layer.lora_embedding_A["default"].detach()
    return layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()


def alike(ours: Tensor, peft: Tensor) -> None:
    """Of one shape and drawn from one distribution: the quantiles of 10,000 numbers and more."""
    assert ours.shape == peft.shape
    at = torch.tensor([0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
    mine, other = ours.flatten().quantile(at), peft.flatten().quantile(at)
    spread = float(peft.std())
    assert float(ours.std()) == pytest.approx(spread, rel=0.03)
    # the extremes of a normal distribution vary
    assert float((mine - other)[1:-1].abs().max()) <= 0.05 * spread
    assert float((mine - other).abs().max()) <= 1.5 * spread


@pytest.mark.parametrize("initial", [True, "gaussian"])
@pytest.mark.parametrize("name", ["words", "fc"])
def test_factors_begin_as_peft_draws_them(name: str, initial: Any) -> None:
    wrapped = by_peft(Reader(), initial=initial)
    pair = find_lora(wrapped, "head").draw_factors(RANK, Key((0,)))[name]
    b, a = theirs(wrapped, name)
    alike(pair.b, b)
    alike(pair.a, a)
    zero = "a" if name == "words" else "b"
    assert not bool(getattr(pair, zero).any())
    if name == "fc":
        assert float(pair.a.std()) == pytest.approx(
            1 / RANK if initial == "gaussian" else (3 * WIDTH) ** -0.5, rel=0.03
        )


def test_our_layers_begin_as_peft_draws_them() -> None:
    made, wrapped = add_lora(Reader(), RANK, trainable=("head",)), by_peft(Reader())
    for name in ("words", "fc"):
        layer: Any = made.get_submodule(name)
        b, a = theirs(wrapped, name)
        alike(layer.lora_B.detach(), b)
        alike(layer.lora_A.detach(), a)


@pytest.mark.parametrize("initial", ["pissa_niter_2", "orthogonal", False])
def test_an_adapter_that_does_not_begin_at_zero_is_refused(initial: Any) -> None:
    wrapped = by_peft(Reader(40, 8, 8), 2, initial)
    with pytest.raises(
        TaskError, match=f"init_lora_weights = {initial!r}.* Make it with True .*, 'gaussian' or one of those"
    ):
        find_lora(wrapped, "head")


def reading(module: Any, head: str | None = None) -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = []
    for n in (16, 10, 12):
        x = torch.randint(0, 12, (n, 4), generator=generator)
        clients.append({"train": (x, x[:, 0] % 3), "test": (x, x[:, 0] % 3)})
    return Federation.from_arrays(clients, module, classes=3, rank=[2, 2, 2], head=head)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (FedHL, "peft"),
        (FlexLoRA, "ours"),
        (FLoRA, "peft"),
        (HetLoRA, "ours"),
        (FedIT, "peft"),
        (FedSALoRA, "ours"),
    ],
    ids=lambda x: getattr(x, "title", x),
)
def test_every_method_trains_an_embedding_from_there(kind: Any, how: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = Reader(12, 6, 5)
    module = add_lora(base, 2, trainable=("head",)) if how == "ours" else by_peft(base, 2, "gaussian")
    federation = reading(module, "head" if how == "ours" else "base_model.model.head")
    method = kind(
        training=LoRATraining(rank=2, head="frozen"), optimizer=SGD(lr=0.5, weight_decay=0.01), batch_size=4
    )
    run = Run(method, federation, RunSettings(rounds=3, evaluate_every=9), Sequential())
    info, x, y = federation.infos[0], federation.clients[0].train.x, federation.clients[0].train.y

    def scores() -> Tensor:
        return run.local_model(info).predictors["personal"](x).detach()

    first = base(x).detach()
    torch.testing.assert_close(scores(), first)
    if kind in (FedHL, FlexLoRA, HetLoRA, FedIT):
        down = run.method.download(run.state.server, info)
        sent = unpack_factors(getattr(down, "message", down).factors)
        drawn = find_lora(module, "head").draw_factors(2, run.task.key / "lora")
        for name in ("words", "fc"):
            assert torch.equal(sent[name].b, drawn[name].b)
            assert torch.equal(sent[name].a, drawn[name].a)
            assert bool(sent[name].b.any()) == (name == "words")
    for _ in range(3):
        run.step()
    assert float((scores() - first).abs().max()) > 1e-2
    assert nn.functional.cross_entropy(scores(), y) < nn.functional.cross_entropy(first, y) - 1e-3
    site, params = find_lora(module, "head").layers["words"], run.personal_params(info)
    assert bool(params[str(site.a)].any()) or not torch.equal(params[site.weight], base.words.weight)


def test_ffa_refuses_an_embedding() -> None:
    federation = reading(add_lora(Reader(12, 6, 5), 2, trainable=("head",)))
    with pytest.raises(
        TaskError, match="freezes A, which for an embedding begins at zero, so words would not learn"
    ):
        Run(FFALoRA(training=LoRATraining(rank=2)), federation, RunSettings(rounds=1), Sequential())


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "vera": ("VeraConfig", {"r": 2, "target_modules": ["fc"]}, "type VERA, not LORA"),
    "ia3": ("IA3Config", {"target_modules": ["fc"], "feedforward_modules": []}, "type IA3"),
    "oft": ("OFTConfig", {"oft_block_size": 2, "target_modules": ["fc"]}, "type OFT"),
    "loha": ("LoHaConfig", {"r": 2, "target_modules": ["fc"]}, "type LOHA"),
    "lokr": ("LoKrConfig", {"r": 2, "target_modules": ["fc"]}, "type LOKR"),
    "adalora": (
        "AdaLoraConfig",
        {"target_modules": ["fc"], "total_step": 9, "tinit": 1, "tfinal": 1},
        "type ADALORA",
    ),
    "dora": (
        "LoraConfig",
        {"target_modules": ["fc"], "use_dora": True},
        "use_dora = True, but its magnitudes",
    ),
    "bias of B": ("LoraConfig", {"target_modules": ["fc"], "lora_bias": True}, "lora_bias = True"),
    "parameter": (
        "LoraConfig",
        {"target_modules": ["fc"], "target_parameters": ["head.weight"]},
        "target_parameters = ",
    ),
    "attention": (
        "LoraConfig",
        {"target_modules": ["attention"]},
        r"attention \(MultiheadAttention\) has PEFT's adapter",
    ),
    "output": (
        "LoraConfig",
        {"target_modules": ["out_proj"]},
        r"attention\.out_proj .* Leave the layer out of target_mod",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_an_adapter_that_is_no_update_of_the_weight_is_refused(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config, settings, message = OTHERS[kind]
    module = Reader(40, 8, 8)
    module.attention = nn.MultiheadAttention(8, 2)
    wrapped = peft.get_peft_model(module, getattr(peft, config)(**settings))
    with pytest.raises(TaskError, match=message):
        find_lora(wrapped, None)
