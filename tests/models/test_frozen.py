"""Parameters that require no gradient are code: never trained, stored or sent, and one tensor for all who use
them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core import tree
from fedlowrank.core.errors import TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import client_view
from fedlowrank.engines.sequential import Sequential, Wire
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import Architecture
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.simulate import simulate
from tests.methods.setting import KINDS
from tests.support.standard_layers import standard_layers

torch.set_num_threads(1)

INPUTS, CLASSES = 6, 3
FROZEN = ("base.0.weight", "base.0.bias", "middle.bias")


class Net(nn.Module):
    """A frozen base, a layer of which the weight alone is trained, and a head; a buffer besides."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh()).requires_grad_(False)
        self.middle, self.head = nn.Linear(8, 5), nn.Linear(5, CLASSES)
        self.middle.bias.requires_grad_(False)
        self.register_buffer("shift", torch.full((5,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.middle(self.base(x)) + self.shift).relu())


@pytest.fixture(scope="module", autouse=True)
def _standard_modules() -> Iterator[None]:
    with standard_layers(Net):
        yield


def federation(module: Any = Net) -> Federation:
    rng = np.random.default_rng(0)
    rule = rng.normal(size=(INPUTS, CLASSES))
    data = []
    for n in (20, 13, 17):
        x = rng.normal(size=(n, INPUTS)).astype(np.float32)
        data.append({"train": (x, (x @ rule).argmax(1)), "test": (x, (x @ rule).argmax(1))})
    return Federation.from_arrays(data, module, classes=CLASSES, rank=[2] * 3)


EXAMPLE = torch.ones(1, INPUTS)


def test_they_are_no_part_of_the_initial_parameters() -> None:
    model = Architecture("net", Net(), EXAMPLE)
    assert set(model.initial) == {"middle.weight", "head.weight", "head.bias"}
    assert model.parameter_count == INPUTS * 8 + 8 + 8 * 5 + 5 + 5 * CLASSES + CLASSES
    assert set(model.head_of(model.initial)) == {"head.weight", "head.bias"}
    assert set(model.body_of(model.initial)) == {"middle.weight"}


@pytest.mark.parametrize(
    "make", [Net, lambda: add_lora(Net(), 2, target_modules=["base.0", "middle"], trainable=["head"])]
)
def test_one_tensor_serves_all_code(make: Any) -> None:
    module = make()
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    model = Architecture("net", module, EXAMPLE)
    there = dict(model.module.named_parameters())
    assert all(there[n].data_ptr() == p.data_ptr() for n, p in frozen.items())
    # what is trained is a copy
    own = {p.data_ptr() for p in module.parameters()}
    assert not own & {p.data_ptr() for p in model.initial.values()}
    # whoever changes the one base changes it for the representation and the whole
    x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model.represent(model.initial, x)
        for p in frozen.values():
            p.add_(0.3)
        r = model.represent(model.initial, x)
        assert float((r - before).abs().max()) > 0.1
        torch.testing.assert_close(model.head(model.initial, r), model.apply(model.initial, x))
        torch.testing.assert_close(model.apply(model.initial, x), module(x))


def test_sites_of_adapters_are_the_base_itself() -> None:
    wrapped = add_lora(Net(), 2, target_modules=["base.0"])
    for module, name in ((Net(), "base.0.weight"), (wrapped, "base.0.weight")):
        held = lora_of(Architecture("net", module, EXAMPLE, "head")).base[name]
        assert held.data_ptr() == dict(module.named_parameters())[name].data_ptr()


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [*KINDS, "fedprox"])
def test_training_neither_changes_nor_sends_them(name: str) -> None:
    on = federation()
    model = next(iter(on.architectures.values()))
    module = dict(model.module.named_parameters())
    before = {n: module[n].detach().clone() for n in FROZEN}
    size = sum(p.numel() for p in model.initial.values())
    run = Run(METHODS[name](optimizer=SGD(lr=0.1), batch_size=8), on, RunSettings(rounds=3), Wire())
    for _ in range(2):
        run.step()
    info = on.infos[1]
    trainer = run.engine.trainer(run.method, on, run.round, info)
    view = client_view(on, run.task, info, run.round, trainer)
    down = run.method.download(run.state.server, info)
    state, up = run.method.local_update(run.state_of(info), down, view)
    for what in (run.state.server, down, state, up, *run.state.clients.values()):
        assert not [p for p, _ in tree.leaves(what) if any(p.endswith(f"/{n}") for n in FROZEN)]
    if name in ("fedavg", "fedprox", "ditto"):
        assert tree.numel(up) == tree.numel(down) == size
    assert all(torch.equal(module[n], before[n]) for n in FROZEN)
    assert all(module[n] is p for n, p in model.module.named_parameters())
    # the personal model computes with them all the same
    x = on.clients[1].test.x
    personal = run.personal_params(info)
    own = copy.deepcopy(model.module)
    own.load_state_dict({**own.state_dict(), **{n: t for n, t in personal.items() if n in own.state_dict()}})
    torch.testing.assert_close(model.apply(personal, x), own(x), rtol=0, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto"])
def test_clients_at_once_share_them(name: str) -> None:
    ends = []
    for engine in (Sequential(), Vectorized()):
        run = Run(
            METHODS[name](optimizer=SGD(lr=0.1), batch_size=8), federation(), RunSettings(rounds=2), engine
        )
        for _ in range(2):
            run.step()
        ends.append(run.state.server)
    tree.map_leaves(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-6), *ends)


@pytest.mark.full
def test_fedavg_of_a_frozen_base_is_fedavg_of_what_is_after_it() -> None:
    on = federation()
    module = next(iter(on.architectures.values())).module

    class After(nn.Module):
        """The trained part alone, on features computed beforehand."""

        def __init__(self) -> None:
            super().__init__()
            self.middle, self.head = copy.deepcopy(module.middle), copy.deepcopy(module.head)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.middle(x) + 0.25).relu())

    def features(examples: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            return module.base(examples.x).numpy(), examples.y.numpy()

    data = [{"train": features(c.train), "test": features(c.test)} for c in on.clients]
    after = Federation.from_arrays(data, After(), head="head", classes=CLASSES)
    ends = []
    for held in (on, after):
        run = Run(
            METHODS["fedavg"](optimizer=SGD(lr=0.2), batch_size=8), held, RunSettings(rounds=3), Sequential()
        )
        for _ in range(3):
            run.step()
        ends.append(run.state.server)
    assert ends[0].keys() == ends[1].keys() == {"middle.weight", "head.weight", "head.bias"}
    for n, t in ends[0].items():
        torch.testing.assert_close(t, ends[1][n], rtol=0, atol=1e-6)


def test_new_initial_values_leave_them_as_they_are() -> None:
    model = Architecture("net", Net(), EXAMPLE)
    other = model.reinitialize(Key((5,)))
    assert other.keys() == model.initial.keys()
    assert not any(torch.equal(t, model.initial[n]) for n, t in other.items())


def test_new_initial_values_are_those_of_a_constructor_where_a_layer_has_a_rule_for_its_parts() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])

    drawn = Architecture("net", Attention(), EXAMPLE).reinitialize(Key((5,)))
    # PyTorch's rule: the bias of the inner linear layer is zero
    assert not drawn["attention.out_proj.bias"].any()
    assert drawn["attention.out_proj.weight"].any()


def test_a_model_that_is_frozen_whole_is_refused() -> None:
    with pytest.raises(TaskError, match=r"model net: all its parameters are frozen \(requires_grad=False\)"):
        Architecture("net", Net().requires_grad_(False), EXAMPLE)
    with pytest.raises(TaskError, match="all its parameters are frozen"):
        federation(lambda: Net().requires_grad_(False))


@pytest.mark.parametrize("change", ["frozen", "thawed", "loaded"])
def test_a_module_that_has_changed_since_the_federation_was_made_is_refused(change: str) -> None:
    module = Net()
    made = federation(module)
    if change == "loaded":
        module.load_state_dict(Net().state_dict())
    elif change == "frozen":
        module.middle.requires_grad_(False)
    else:
        module.base.requires_grad_(True)
    with pytest.raises(TaskError, match="its module has changed since the federation was made"):
        simulate("fedavg", made, rounds=1)
    assert simulate("fedavg", federation(module), rounds=1).rounds


def test_loading_trained_parameters_afterwards_changes_no_later_run() -> None:
    """As after a run, to use the module in a notebook."""
    module = Net()
    made = federation(module)
    first = simulate("fedavg", made, rounds=1)
    module.load_state_dict(first.run.state.server, strict=False)
    again = simulate("fedavg", made, rounds=1)
    assert tree.equal(first.run.state.server, again.run.state.server)
