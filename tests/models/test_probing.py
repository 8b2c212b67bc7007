"""Modules of users are the same after a federation was made of them, and may read their head's attributes."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedlowrank import SGD, Federation, Floral, simulate
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError
from fedlowrank.methods import FedAvg, FedRep
from fedlowrank.models.architecture import Architecture
from fedlowrank.training.flops import forward_flops
from fedlowrank.training.tracing import trace_upload

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Counting(nn.Module):
    """Counts the calls of a model with a head, or without one."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.body, self.last, self.calls = nn.Linear(4, 5), last, [0]
        self.add_module(last, nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        scores: Tensor = self.get_submodule(self.last)(self.body(x).tanh())
        return scores


@pytest.mark.parametrize(
    ("last", "passes"),
    # of a model: does it take the example and each client's first, is there a gradient in training; of a head: what
    # reaches it, with other values, and twice near the initial parameters; where none is named, one more to find it
    [("out", 8), ("head", 7)],
)
def test_a_federation_makes_no_pass_twice(last: str, passes: int) -> None:
    model = Counting(last)
    # no scores in [0, 1], which one more pass would explain
    nn.init.constant_(model.get_submodule(last).get_parameter("bias"), -3.0)
    Federation.from_arrays([(X, Y), (X, Y)], model)
    assert model.calls[0] == passes


class Restless(nn.Module):
    """Changes buffers, attributes and generators in every call."""

    head_name = "head"
    calls: Tensor
    mean: Tensor

    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        self.body = nn.LazyLinear(5) if lazy else nn.Linear(4, 5)
        self.norm, self.drop, self.head = nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))
        self.count, self.cache = 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        h = self.norm(self.body(x))
        self.mean, self.cache = 0.9 * self.mean + 0.1 * h.detach().mean(0), h.detach()
        scores: Tensor = self.head(self.drop(h) + random.random() + np.random.rand() + torch.rand(1))  # noqa: NPY002
        return scores


def state(module: nn.Module) -> list[Any]:
    modes = [(n, m.training) for n, m in module.named_modules()]
    return [
        {n: b.tolist() for n, b in module.named_buffers()},
        modes,
        *(getattr(module, n) for n in ("count",)),
    ]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_is_as_it_was(lazy: bool, frozen: bool) -> None:
    module = Restless(lazy)
    if frozen:
        module.eval()
        module.drop.train()
    before, buffers = state(module), dict(module.named_buffers())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    made = Federation.from_arrays([(X, Y), (X, Y)], module)
    model = made.architectures["model"]
    forward_flops(model)
    trace_upload(FedAvg(), made.task(1), made.infos[0], model.initial)
    assert state(module)[0] == before[0]
    assert all(b is buffers[n] for n, b in module.named_buffers())
    assert generators[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), generators[0])
    module = Restless(lazy)
    before = state(module)
    Federation.from_arrays([(X, Y), (X, Y)], module)
    assert state(module) == before
    assert module.cache.numel() == 0


def test_a_model_infers_in_evaluation_mode_whatever_the_user_sets() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    made = Federation.from_arrays([(X, Y), (X, Y)], module, val=0.2, test=0.2)
    assert module.training
    truth = copy.deepcopy(module).eval()(X)
    model = made.architectures["model"]
    assert torch.equal(model.apply(model.initial, X), truth)
    module.train()
    assert torch.equal(model.apply(model.initial, X), truth)
    result = simulate("fedavg", made, rounds=1)
    first = result.predict(0, X)
    module.train()
    assert torch.equal(result.predict(0, X), first)


class ReadsHead(nn.Module):
    """Reads attributes of its head before it calls it."""

    head_name = "head"

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.body, self.head, self.reads = nn.Linear(4, 5), nn.Linear(5, 3), reads

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x.to(self.head.weight.dtype))
        assert isinstance(self.head, nn.Linear)
        if self.reads == "width":
            h = h[:, : self.head.in_features]
        if self.reads == "values":
            h = h * self.head.weight.norm()
        scores: Tensor = self.head(h)
        return scores


def test_a_forward_may_read_attributes_of_its_head_and_hooks_of_it_run_once() -> None:
    module = ReadsHead("width")
    calls: list[int] = []
    module.head.register_forward_hook(lambda *_: calls.append(1))
    model = Architecture("m", module, X[:1])
    params = {n: p + 0.5 for n, p in model.initial.items()}
    assert torch.allclose(
        model.represent(params, X), X @ params["body.weight"].T + params["body.bias"], atol=1e-6
    )
    calls.clear()
    model.represent(params, X)
    assert calls == []
    assert torch.equal(model.head(params, model.represent(params, X)), model.apply(params, X))
    assert len(calls) == 2
    assert "forward" not in vars(module.head)
    simulate(FedRep(), Federation.from_arrays([(X, Y), (X, Y)], module), rounds=1)


def test_a_forward_that_computes_with_its_heads_values_cannot_be_split() -> None:
    with pytest.raises(TaskError, match=r"computes with the values of parameters of its head 'head'"):
        Architecture("m", ReadsHead("values"), X[:1])


@pytest.mark.parametrize(
    "wrap",
    [lambda m: add_lora(m, 2), lambda m: Floral(m, 1, 2), lambda m: Floral(m, 1, 2, reparameterize=False)],
)
def test_a_module_is_as_it_was_after_a_wrapper_was_made(wrap: Any) -> None:
    module = Restless()
    module.drop.eval()
    tensors = {n: t.clone() for n, t in module.state_dict().items()}
    before, generator = state(module), torch.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    free = [p.requires_grad for p in module.parameters()]
    wrap(module)
    assert state(module) == before
    assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    assert free == [p.requires_grad for p in module.parameters()]


class Gradient(nn.Module):
    """The gradient of an energy, as a Hamiltonian network computes it, with a buffer that every pass changes."""

    calls: Tensor

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if normalize else nn.Identity()
        self.energy = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("normalize", [False, True])
def test_a_forward_may_differentiate(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 6, generator=generator), torch.randn(20, 6, generator=generator)
    parts = {"train": (x, y), "test": (x, y)}
    federation = Federation.from_arrays([parts] * 2, Gradient(normalize))
    result = simulate(FedAvg(optimizer=SGD(lr=0.1), batch_size=20), federation, rounds=1)
    module = Gradient(normalize)
    module.load_state_dict(federation.architectures["model"].initial, strict=False)
    loss = (module.train()(x) - y).square().sum(1).mean() / 2
    parameters = dict(module.named_parameters())
    # the last bias does not change the gradient of the energy
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    for name, gradient in zip(parameters, gradients, strict=True):
        expected = module.get_parameter(name).detach() - 0.1 * gradient
        torch.testing.assert_close(result.personal(0)[name], expected, rtol=1e-5, atol=1e-6)
    trained = Gradient(normalize)
    trained.load_state_dict(result.personal(0))
    scores = trained.eval()(x).detach()
    torch.testing.assert_close(result.predict(0, x), scores, rtol=1e-5, atol=1e-6)
    recorded = result.rounds[-1].mean("loss", split="test")
    assert recorded == pytest.approx(float((scores - y).square().sum(1).mean() / 2), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "subject"),
    [
        (lambda: torch.jit.script(nn.Linear(6, 2)), "the module"),
        (lambda: torch.jit.trace(nn.Linear(6, 2), torch.zeros(1, 6)), "the module"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 4)), nn.Linear(4, 2)), "its layer '0'"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torchscript_are_refused(model: Any, subject: str) -> None:
    y = torch.arange(8) % 2
    for x in (torch.zeros(8, 6), torch.zeros(8, 6, dtype=torch.int64)):
        for given in (model, model()):
            with pytest.raises(TaskError, match=rf"{subject} is compiled by torch\.jit.*the nn\.Module"):
                Federation.from_arrays([(x, y)], given)


class Cut(nn.Module):
    """The scores have no gradient for a parameter, but they have one for something else, or none at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last = how, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inputs":
            x = x.requires_grad_()
        weight = (
            nn.Parameter(self.last.weight.detach()) if self.how == "parameter" else self.last.weight.detach()
        )
        return x @ weight.T


@pytest.mark.parametrize("how", ["nothing", "inputs", "parameter"])
def test_scores_without_a_gradient_for_a_parameter_are_refused(how: str) -> None:
    with pytest.raises(TaskError, match="no gradient of the scores of model model reaches its parameters"):
        Federation.from_arrays([(X, Y), (X, Y)], Cut(how))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_part_that_is_recomputed_is_trained_or_refused(use_reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            scores: Tensor = self.last(checkpoint(self.body, x, use_reentrant=use_reentrant))
            return scores

    if use_reentrant:
        with pytest.raises(TaskError, match=r"hides the gradients.*use_reentrant=False"):
            Federation.from_arrays([(X, Y), (X, Y)], Recomputed())
        return
    federation = Federation.from_arrays([(X, Y), (X, Y)], Recomputed())
    result = simulate(FedAvg(optimizer=SGD(lr=0.1)), federation, rounds=1)
    start = federation.architectures["model"].initial
    assert all(not torch.equal(p, start[n]) for n, p in result.run.state.server.items())


def test_a_forward_differentiates_by_its_parameters_in_evaluation_too() -> None:
    class Inner(nn.Linear):
        """Takes a step before it answers, as in MAML."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = (x @ self.weight.T).square().mean()
                (gradient,) = torch.autograd.grad(loss, self.weight, create_graph=True)
            return x @ (self.weight - 0.1 * gradient).T + self.bias

    network = Inner(4, 3)
    federation = Federation.from_arrays([{"train": (X, Y), "test": (X, Y)}] * 2, network)
    result = simulate(FedAvg(epochs=1, batch_size=12, optimizer=SGD(lr=0.1)), federation, rounds=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    functional.cross_entropy(network(X), Y).backward()
    optimizer.step()
    torch.testing.assert_close(result.predict(0, X), network(X).detach())


def test_the_hint_at_a_head_names_what_follows_it() -> None:
    class Example(nn.Module):
        """Ends as PyTorch's own example for MNIST."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return functional.log_softmax(self.fc(self.body(x).relu()), dim=1)

    federation = Federation.from_arrays([(X, Y), (X, Y)], Example())
    with pytest.raises(TaskError, match=r"names no head.*leave out its last operation, a log_softmax"):
        simulate(FedRep(), federation, rounds=1)
    with pytest.raises(TaskError, match=r"does not end in 'fc'.*leave out its last operation, a log_softmax"):
        Federation.from_arrays([(X, Y), (X, Y)], Example(), head="fc")


class WithAuxiliary(nn.Module):
    """Returns the scores of an auxiliary head, too, in training alone, as a tuple or with names."""

    Outputs = collections.namedtuple("Outputs", ["logits", "auxiliary"])

    def __init__(self, *, has_names: bool) -> None:
        super().__init__()
        self.body, self.last, self.auxiliary = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.has_names = has_names

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        if not self.training:
            return self.last(h)
        outputs = self.last(h), self.auxiliary(h)
        return self.Outputs(*outputs) if self.has_names else outputs


@pytest.mark.parametrize("has_names", [True, False])
def test_several_outputs_in_training_mode_are_refused(has_names: bool) -> None:
    with pytest.raises(TaskError, match=r"returns a (tuple|Outputs) in training mode.*a loss of your own"):
        Federation.from_arrays([(X, Y), (X, Y)], WithAuxiliary(has_names=has_names))


class Layers(nn.Module):
    """Reads the hidden states of a layer of a transformer, which transformers capture by hooks."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert, self.out, self.counts = transformers.BertModel(config), nn.Linear(8, 3), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        states = self.bert(input_ids=x.long(), output_hidden_states=True).hidden_states
        self.counts.append(len(states))
        scores: Tensor = self.out(states[-2].mean(1))
        return scores


@pytest.mark.parametrize("is_called_before", [False, True])
def test_hidden_states_of_a_transformer_are_captured_once(is_called_before: bool) -> None:
    ids = torch.randint(0, 20, (12, 5), generator=torch.Generator().manual_seed(0))
    network = Layers()
    if is_called_before:
        network(ids)
    federation = Federation.from_arrays([{"train": (ids, Y), "test": (ids, Y)}] * 2, network)
    result = simulate(FedAvg(epochs=1, batch_size=12, optimizer=SGD(lr=0.1)), federation, rounds=1)
    trained = Layers()
    trained.load_state_dict(federation.architectures["model"].initial, strict=False)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    functional.cross_entropy(trained(ids), Y).backward()
    optimizer.step()
    torch.testing.assert_close(result.predict(0, ids), trained(ids).detach(), rtol=1e-4, atol=1e-5)
    network(ids)
    assert {*network.counts, *trained.counts} == {5}
