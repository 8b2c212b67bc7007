"""``module.load_state_dict(result.personal(i))`` gives the model by which a client infers, of modules of any
kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank import Clipping, Compression, simulate
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.contract import ClientInfo, ClientView, ServerView, Task
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.data.federation import Federation
from fedlowrank.methods import METHODS, FedAvg
from fedlowrank.methods.shared.lora_family import LoRATraining

INPUTS, CLASSES = 6, 3
LORA = ("fedhl", "flexlora", "flora", "hetlora", "fedit", "ffa_lora", "fedsa_lora", "fedex_lora")
UNEQUAL = ("fedhl", "flexlora", "flora", "hetlora")


class Net(nn.Module):
    """A convolution, two layers with one weight, a batch normalization, a buffer and a head."""

    head_name = "head"

    def __init__(self, batch: bool = False) -> None:
        super().__init__()
        self.line = nn.Conv1d(1, 4, 4)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(12) if batch else nn.LayerNorm(12)
        self.register_buffer("shift", torch.full((12,), 0.25))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x[:, None]).flatten(1)
        return self.head(self.norm(torch.tanh(self.second(torch.tanh(self.first(h)))) + self.shift))


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _made(kind)


def _made(kind: str) -> nn.Module:
    base = Net(batch=kind == "batch norm")
    if kind in ("plain", "batch norm"):
        return base
    base.second.weight = nn.Parameter(base.second.weight.detach().clone())
    if kind == "ours":
        return add_lora(base, 2, 3.0, target_modules=["line", "first", "second"], trainable=("head",))
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["first", "second"], modules_to_save=None)
    return peft.get_peft_model(base, config)


def federation(kind: str, ranks: list[int]) -> tuple[Federation, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(INPUTS, CLASSES, generator=generator)
    clients = []
    for n in (15, 10, 12):
        x = torch.randn(n, INPUTS, generator=generator)
        clients.append({"train": (x, (x @ rule).argmax(1)), "test": (x, (x @ rule).argmax(1))})
    module = made(kind)
    head = "base_model.model.head" if kind == "peft" else "head"
    return Federation.from_arrays(clients, module, head=head, classes=CLASSES, rank=ranks), module


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((m, k) for m in ("fedavg", "fedrep", "fedhl") for k in ("plain", "batch norm")),
        *(("fedavg", k) for k in ("ours", "peft")),
        *((m, ("ours", "peft")[i % 2]) for i, m in enumerate(LORA)),
        *((m, "ours") for m in UNEQUAL[1::2]),
    ],
)
def test_a_module_that_loads_it_infers_as_the_client(method: str, kind: str) -> None:
    # ranks below, at and above that of the module's slots
    ranks = [1, 2, 3] if method in UNEQUAL else [3, 3, 3]
    data, module = federation(kind, ranks)
    given: dict[str, Any] = {"training": LoRATraining(rank=2)} if method in LORA else {}
    result = simulate(METHODS[method](optimizer=SGD(lr=0.2), batch_size=5, **given), data, rounds=2)
    start = made(kind).eval()
    for info in data.infos:
        loaded, state = made(kind).eval(), result.personal(info.id)
        before = {n: t.clone() for n, t in state.items()}
        # strict: every key is there, and none that the module does not have
        loaded.load_state_dict(state)
        x = data.clients[info.id].test.x
        predict = next(iter(result.run.local_model(info).predictors.values()))
        torch.testing.assert_close(loaded(x), predict(x), rtol=1e-4, atol=1e-5)
        assert float((loaded(x) - start(x)).detach().abs().max()) > 1e-3
        # using the module changes neither the federation's nor what was given
        for parameter in loaded.parameters():
            nn.init.constant_(parameter, 7.0)
        assert all(torch.equal(t, before[n]) for n, t in result.personal(info.id).items())
    assert all(
        torch.equal(t, u)
        for t, u in zip(module.state_dict().values(), start.state_dict().values(), strict=True)
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_what_is_frozen_is_one_tensor_for_all_clients(kind: str) -> None:
    data, module = federation(kind, [2, 2, 2])
    result = simulate(METHODS["fedit"](training=LoRATraining(rank=2)), data, rounds=1)
    states = [result.personal(k) for k in range(3)]
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    assert any(n.endswith("first.weight" if kind == "ours" else "base_layer.weight") for n in frozen)
    own = dict(module.named_parameters())
    for name in [*frozen, *(n for n, _ in module.named_buffers())]:
        places = {s[name].data_ptr() for s in states}
        assert places == {dict(module.state_dict())[name].data_ptr()}
        assert name not in own or own[name].data_ptr() in places


@pytest.mark.full
def test_ranks_of_the_slots_leave_factors_as_they_are() -> None:
    data, _ = federation("ours", [1, 2, 3])
    result = simulate(METHODS["fedhl"](optimizer=SGD(lr=0.2), training=LoRATraining(rank=2)), data, rounds=2)
    base = copy.deepcopy(data.architectures["model"].module.state_dict())
    moved = []
    for k, rank in enumerate((1, 2, 3)):
        state, factors = result.personal(k), result.run.personal_params(data.infos[k])
        a, b = state["first.lora_A"], state["first.lora_B"]
        assert (a.shape, b.shape) == ((2, 12), (12, 2))
        used = 0 if rank > 2 else rank
        assert torch.equal(a[:used], factors["first.lora_A"][:used])
        assert torch.equal(b[:, :used], factors["first.lora_B"][:, :used])
        assert not bool(a[used:].any())
        assert not bool(b[:, used:].any())
        moved.append(not torch.equal(state["first.weight"], base["first.weight"]))
    # a rank that the module has no room for is added to the weight
    assert moved == [False, False, True]


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "standalone", "fedit"])
def test_a_state_may_be_changed_in_place(method: str) -> None:
    data, _ = federation("ours", [3, 3, 3])
    given: dict[str, Any] = {"training": LoRATraining(rank=2)} if method == "fedit" else {}
    result = simulate(METHODS[method](optimizer=SGD(lr=0.2), batch_size=5, **given), data, rounds=1)
    trained = dict(result.run.personal_params(data.infos[0]))
    copies = [{n: t.clone() for n, t in result.personal(k).items()} for k in range(3)]
    before = result.predict(0)
    total = result.personal(0)
    for name in trained:
        total[name] += result.personal(1)[name]
        total[name] += result.personal(2)[name]
        torch.testing.assert_close(total[name], sum(copy[name] for copy in copies))
    assert torch.equal(result.predict(0), before)


class Counting(FedAvg):
    """Server and clients count their rounds."""

    title = "Counting"

    def server_init(self, task: Task) -> Any:
        return {"w": super().server_init(task), "rounds": torch.zeros(())}

    def client_init(self, client: ClientInfo, task: Task) -> Any:
        return {"rounds": torch.zeros(())}

    def download(self, server: Any, client: ClientInfo) -> Any:
        return server["w"]

    def local_update(self, state: Any, down: Any, view: ClientView) -> Any:
        return {"rounds": state["rounds"] + 1}, super().local_update(None, down, view)[1]

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        return {"w": super().server_update(server["w"], total, view), "rounds": server["rounds"] + 1}


@pytest.mark.parametrize("statistics", ["local", "averaged"])
@pytest.mark.parametrize("protected", [False, True])
def test_states_are_those_of_the_method(statistics: Any, protected: bool) -> None:
    """Kept optimizers, buffers, residuals and statistics are not in them."""
    data = [(torch.randn(12, 3), torch.arange(12) % 2) for _ in range(3)]
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    federation = Federation.from_arrays(data, module, classes=2)
    more: dict[str, Any] = (
        {"clipping": Clipping(norm=1.0), "compression": Compression("top_k:0.5")} if protected else {}
    )
    method = Counting(optimizer=SGD(lr=0.1, momentum=0.9, keep=True), batch_size=4)
    result = simulate(method, federation, rounds=3, unseen=0.3, statistics=statistics, **more)
    (unseen,) = result.run.client_sampler.unseen
    counts = [result.client_state(i) for i in range(3)]
    assert counts == [{"rounds": 0.0 if i == unseen else 3.0} for i in range(3)]
    assert (result.server_state["rounds"], set(result.server_state)) == (3, {"w", "rounds"})
