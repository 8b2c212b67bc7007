"""One pass of a client over its data: against a bare loop, with hooks, randomness, failures and the count of
operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.contract import Batch, ClientInfo, ClientView, Pass
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import NonFiniteError, TaskError
from fedlowrank.core.key import Key
from fedlowrank.core.learning.batch_losses import cross_entropy
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule, clip
from fedlowrank.data.dataset import Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import ClientJob, client_view
from fedlowrank.engines.sequential import Sequential
from fedlowrank.engines.vectorized import Vectorized
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models.architectures.cnn import CNN
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.local_data import LocalData
from tests.methods.setting import CLASSES, INPUTS, SIZES, Net, make_arrays


def linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    return Linear(INPUTS, CLASSES, dtype=dtype)


def federation(make: Callable[[], nn.Module] = linear, **kwargs: Any) -> Federation:
    return Federation.from_arrays(
        kwargs.pop("clients", None) or make_arrays(), {"m": make}, classes=CLASSES, **kwargs
    )


def view(
    fed: Federation, client: int = 0, round: int = 0, epochs: int = 1, batch_size: int = 8
) -> ClientView:
    info = fed.infos[client]
    method = FedAvg(epochs=epochs, batch_size=batch_size)
    return client_view(fed, fed.task(5), info, round, Sequential().trainer(method, fed, round, info))


def ce(v: ClientView) -> Callable[..., Tensor]:
    return lambda p, batch, *_: cross_entropy(v.model.apply(p, batch.x), batch)


def bare(fed: Federation, v: ClientView, make: Any, hook: Any = None, after: Any = None) -> dict[str, Tensor]:
    """The same pass written out with torch's optimizer."""
    module = linear()
    module.load_state_dict(fed.architectures["m"].initial)
    optimizer = make(module.parameters())
    data = fed.clients[v.info.id].train
    for index in v.trainer.data.order("local"):
        optimizer.zero_grad()
        functional.cross_entropy(module(data.x[index]), data.y[index]).backward()
        if hook:
            hook(module)
        optimizer.step()
        if after:
            after(module)
    return {n: p.detach() for n, p in module.named_parameters()}


def assert_close(a: Any, b: Any, atol: float = 1e-12) -> None:
    tree.map_leaves(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=atol), a, b)


# -- against a bare loop -------------------------------------------------------------------------------------


def test_a_pass_with_clipping_momentum_and_decay_is_a_bare_loop() -> None:
    fed = federation()
    v = view(fed, epochs=3)
    optimizer = SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, clip=0.3)
    actual = v.train(ce(v), v.model.initial, "local", optimizer)
    expected = bare(
        fed, v, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        hook=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.3),
    )  # fmt: skip
    assert_close(actual, expected)


def test_a_pass_with_adamw_is_a_bare_loop() -> None:
    fed = federation()
    v = view(fed, epochs=3)
    actual = v.train(ce(v), v.model.initial, "local", AdamW(lr=0.02, weight_decay=0.1))
    assert_close(actual, bare(fed, v, lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)))


def test_the_schedule_sees_the_round() -> None:
    fed = federation()
    v = view(fed, round=3)
    actual = v.train(
        ce(v), v.model.initial, "local", SGD(lr=0.8, schedule=Schedule("exponential", factor=0.5))
    )
    assert_close(actual, bare(fed, v, lambda p: torch.optim.SGD(p, lr=0.1)))


def test_every_epoch_sees_every_example_once_in_an_order_of_its_own() -> None:
    fed = federation()
    v = view(fed, epochs=3, batch_size=8)
    order = v.trainer.data.order("local")
    n = SIZES[0]
    assert [len(i) for i in order] == [8, 8, n - 16] * 3
    epochs = [torch.cat(order[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert v.steps("local") == 9
    other = view(fed, round=1, epochs=3, batch_size=8).trainer.data.order("local")
    assert torch.cat(other).tolist() != torch.cat(order).tolist()
    # a longer pass begins as a shorter one
    assert torch.cat(view(fed, epochs=1).trainer.data.order("local")).tolist() == epochs[0]


def test_a_pass_that_the_method_does_not_name_is_refused() -> None:
    v = view(federation())
    with pytest.raises(TaskError, match="'locale'"):
        v.train(ce(v), v.model.initial, "locale", SGD())


# -- hooks ---------------------------------------------------------------------------------------------------


def test_the_proximal_step_follows_every_step_with_the_rate_of_the_round() -> None:
    fed = federation()
    v = view(fed, round=2, epochs=2)
    rates = []

    def shrink(p: Any, lr: float, anchor: Any) -> Any:
        rates.append(lr)
        return tree.map_leaves(lambda a, b: a - 3 * lr * (a - b), p, anchor)

    anchor = tree.map_leaves(torch.ones_like, v.model.initial)
    optimizer = SGD(lr=0.4, momentum=0.5, schedule=Schedule("exponential", factor=0.5))
    actual = v.train(ce(v), v.model.initial, "local", optimizer, constants=(anchor,), prox=shrink)

    def after(module: nn.Module) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(3 * 0.1 * (p - 1))

    assert_close(actual, bare(fed, v, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), after=after))
    assert rates == pytest.approx([0.1] * v.steps("local"))


def test_the_gradient_is_preconditioned_before_clipping_and_decay() -> None:
    fed = federation()
    v = view(fed, epochs=2)
    scale = tree.map_leaves(lambda t: torch.full_like(t, 100.0), v.model.initial)
    actual = v.train(
        ce(v), v.model.initial, "local", SGD(lr=0.1, clip=0.2, weight_decay=0.3), constants=(scale,),
        precondition=lambda g, p, s: tree.map_leaves(lambda a, b, c: a * c + 0.5 * b, g, p, s),
    )  # fmt: skip

    def hook(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad = 100 * p.grad + 0.5 * p.detach()
        nn.utils.clip_grad_norm_(module.parameters(), 0.2)

    assert_close(actual, bare(fed, v, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3), hook=hook))


def turned(value: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(value.items()))


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_what_hooks_return_is_matched_by_name_and_not_by_order(engine: Any) -> None:
    class Turned(FedProx):
        def local_update(self, state: Any, down: Any, view: ClientView) -> Any:
            model = view.model

            def loss(p: Any, b: Batch, _: Any) -> Tensor:
                return cross_entropy(model.apply(p, b.x), b)

            def hook(g: Any, p: Any, q: Any) -> Any:
                return turned(tree.map_leaves(lambda a, b, c: a + self.mu * (b - c), g, p, q))

            def prox(p: Any, lr: float, q: Any) -> Any:
                return turned(p)

            return None, view.train(
                loss, down, "local", self.optimizer, constants=(down,), precondition=hook, prox=prox
            )

    def square() -> nn.Module:
        # weights of equal shape, so that nothing but the values would tell of an exchange
        return nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh(), nn.Linear(INPUTS, INPUTS))

    ends = []
    for method in (Turned, FedProx):
        with pytest.warns(UserWarning, match="scores"):
            fed = federation(square)
        run = Run(method(mu=0.1, batch_size=8, optimizer=SGD(lr=0.1)), fed, RunSettings(rounds=1), engine())
        run.step()
        ends.append(run.state.server)
    assert_close(*ends, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.1, clip=0.01), SGD(lr=0.1, weight_decay=0.5), SGD(lr=0.1, momentum=0.9, nesterov=True)],
)
def test_parameters_whose_gradients_are_one_tensor_are_stepped_as_if_they_were_two(optimizer: SGD) -> None:
    fed = federation()
    v = view(fed)
    start = {"a": torch.ones(CLASSES, dtype=torch.float64), "b": 2 * torch.ones(CLASSES, dtype=torch.float64)}

    def added(p: Any, batch: Batch) -> Tensor:
        return cross_entropy((p["a"] + p["b"]).expand(len(batch), -1), batch)

    def apart(p: Any, batch: Batch) -> Tensor:
        return cross_entropy((p["a"] * 1.0 + p["b"] * 1.0).expand(len(batch), -1), batch)

    assert_close(v.train(added, start, "local", optimizer), v.train(apart, start, "local", optimizer))


def test_gradients_that_are_one_number_repeated_can_be_stepped() -> None:
    v = view(federation(), batch_size=100)
    start = {"a": torch.ones(3), "unused": torch.ones(2)}
    actual = v.train(lambda p, batch: p["a"].sum(), start, "local", SGD(lr=0.5, weight_decay=0.2, clip=10.0))
    assert torch.allclose(actual["a"], torch.full((3,), 1 - 0.5 * 1.2))
    # without a gradient, so without weight decay, as in torch.optim
    assert torch.equal(actual["unused"], torch.ones(2))


def test_parts_of_the_tree_can_have_rates_of_their_own() -> None:
    v = view(federation(), batch_size=100)
    start = {"slow": {"w": torch.ones(2)}, "fast": torch.ones(2)}
    optimizer = SGD(lr=0.1, groups={"slow": Group(lr=0.01)})
    actual = v.train(lambda p, batch: p["slow"]["w"].sum() + p["fast"].sum(), start, "local", optimizer)
    assert torch.allclose(actual["slow"]["w"], torch.full((2,), 0.99))
    assert torch.allclose(actual["fast"], torch.full((2,), 0.9))


# -- purity --------------------------------------------------------------------------------------------------


def test_the_start_and_what_is_given_are_left_untouched() -> None:
    v = view(federation())
    start, extra = tree.canonical(v.model.initial), {"x": torch.ones(3)}
    before = tree.encode([start, extra])
    actual = v.train(ce(v), start, "local", SGD(lr=0.5), constants=(extra,))
    assert tree.encode([start, extra]) == before
    assert not torch.equal(actual["weight"], start["weight"])
    assert all(t.is_contiguous() and not t.requires_grad for _, t in tree.leaves(actual))
    assert {t.data_ptr() for _, t in tree.leaves(actual)}.isdisjoint(
        {t.data_ptr() for _, t in tree.leaves(start)}
    )


def test_no_gradient_is_taken_for_what_is_given() -> None:
    v = view(federation())
    extra = {"x": torch.ones(3, requires_grad=True)}
    v.train(lambda p, batch, e: cross_entropy(v.model.apply(p, batch.x), batch) + e["x"].sum(), v.model.initial, "local",
            SGD(), constants=(extra,))  # fmt: skip
    assert extra["x"].grad is None


def test_a_statistic_is_the_sum_over_all_examples() -> None:
    rng = np.random.default_rng(0)
    # more than two chunks, the last of them short
    x, y = rng.normal(size=(600, INPUTS)).astype(np.float32), rng.integers(0, CLASSES, 600)
    v = view(federation(clients=[{"train": (x, y)}]))
    total, count = v.sum_over_data(
        lambda p, b, s: (b.sum(b.x * s["k"]), b.sum(torch.ones(len(b)))),
        {},
        constants=({"k": torch.tensor(2.0)},),
    )
    np.testing.assert_allclose(total.numpy(), 2 * x.sum(0), rtol=0, atol=1e-3)
    assert float(count) == 600


# -- dropout -------------------------------------------------------------------------------------------------


class Wet(Net):
    """A network with dropout."""

    def __init__(self) -> None:
        super().__init__(10)
        self.body.append(nn.Dropout(0.5))


def wet() -> tuple[FedAvg, Federation]:
    return FedAvg(optimizer=SGD(lr=0.1), batch_size=8), federation(Wet)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_dropout_is_reproducible_and_independent_of_the_order_of_clients(engine: Any) -> None:
    method, fed = wet()
    start = method.server_init(fed.task(1))

    def uploads(order: list[int], seed: int) -> dict[int, bytes]:
        torch.manual_seed(seed)
        jobs = [ClientJob(None, start, fed.infos[k]) for k in order]
        outcomes = engine().run(method, fed, fed.task(1), 0, jobs)
        return {k: tree.encode(o.upload) for k, o in zip(order, outcomes, strict=True)}

    first = uploads([0, 1, 2, 3], 1)
    assert uploads([3, 1, 0, 2], 2) == first
    assert uploads([2], 3)[2] == first[2]


def test_dropout_acts_in_training_and_only_there() -> None:
    _, fed = wet()
    dry = federation(lambda: Net(10))
    initial = fed.architectures["m"].initial
    assert tree.equal(initial, dry.architectures["m"].initial)
    v, w = view(fed), view(dry)
    assert not torch.equal(
        v.train(ce(v), initial, "local", SGD(lr=0.1))["head.weight"],
        w.train(ce(w), initial, "local", SGD(lr=0.1))["head.weight"],
    )
    x = fed.clients[0].train.x
    assert torch.equal(v.model.apply(initial, x), w.model.apply(initial, x))
    assert torch.equal(v.model.represent(initial, x), w.model.represent(initial, x))


def test_dropout_differs_from_round_to_round_and_from_client_to_client() -> None:
    seen = []

    class Spy(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(torch.ones_like(x))
            if self.training:
                seen.append(out[0].tolist())
            return x * out

    class Model(Net):
        def __init__(self) -> None:
            super().__init__(40)
            self.body.append(Spy(0.5))

    fed = federation(Model)
    first = []
    for client, round_ in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seen.clear()
        v = view(fed, client, round_, batch_size=100)
        v.train(ce(v), v.model.initial, "local", SGD(lr=0.1))
        first.append(tuple(seen[0]))
    assert len(set(first)) == 3
    assert first[0] == first[3]


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_a_loss_that_is_not_finite_names_client_round_pass_and_step(engine: Any) -> None:
    fed = federation()
    # after the check of what is given
    fed.clients[2].train.x[5] = torch.inf  # type: ignore[index]
    run = Run(FedAvg(batch_size=4, epochs=1), fed, RunSettings(rounds=3), engine())
    with pytest.raises(
        NonFiniteError, match=r"client 2, round 1, pass 'local': the loss of step \d+"
    ) as caught:
        run.step()
    order = view(fed, 2, batch_size=4).trainer.data.order("local")
    hit = next(s for s, i in enumerate(order) if 5 in i.tolist())
    assert (caught.value.client_id, caught.value.round, caught.value.name, caught.value.step) == (
        2,
        0,
        "local",
        hit,
    )
    # the interrupted round left the run as it was
    assert (run.round, run.state.clients) == (0, {})


def test_parameters_that_are_not_finite_are_caught_after_the_last_step() -> None:
    v = view(federation(), batch_size=100)
    with pytest.raises(NonFiniteError, match="the parameters after the pass") as caught:
        v.train(lambda p, batch: p["a"].sqrt().sum(), {"a": torch.zeros(2)}, "local", SGD(lr=0.1))
    assert caught.value.step is None


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_a_client_that_fails_can_be_dropped(engine: Any) -> None:
    fed = federation()
    fed.clients[2].train.x[:] = torch.nan  # type: ignore[index]
    run = Run(FedAvg(batch_size=8), fed, RunSettings(rounds=1, on_nan="drop", evaluate_every=1), engine())
    start = run.state.server
    record = run.step()
    assert list(record.lost) == ["2"]
    assert "client 2, round 1" in record.lost["2"]
    assert sorted(run.state.clients) == [0, 1, 3]
    rest = {k: view(fed, k) for k in (0, 1, 3)}
    expected = mean(
        [v.train(ce(v), start, "local", SGD(lr=0.01)) for v in rest.values()], [SIZES[k] for k in rest]
    )
    assert_close(run.state.server, expected)


def test_a_hook_of_another_structure_is_refused() -> None:
    v = view(federation())
    with pytest.raises(TaskError, match=r"^precondition, in pass 'local': .*the second dict lacks 'bias'"):
        v.train(ce(v), v.model.initial, "local", SGD(), precondition=lambda g, p: {"weight": g["weight"]})
    with pytest.raises(TaskError, match=r"^prox, in pass 'local': .*has in addition 'more'"):
        v.train(ce(v), v.model.initial, "local", SGD(), prox=lambda p, lr: {**p, "more": torch.ones(1)})


# -- operations ----------------------------------------------------------------------------------------------


def flops(method: Any, fed: Federation, client: int = 0) -> int:
    engine = Sequential()
    task = fed.task(1)
    info = fed.infos[client]
    job = ClientJob(method.client_init(info, task), method.download(method.server_init(task), info), info)
    (outcome,) = engine.run(method, fed, task, 0, [job])
    return outcome.meter.flops


@pytest.mark.parametrize("batch_size", [8, 23, 100])
def test_operations_of_a_linear_layer_are_counted_forward_and_backward(batch_size: int) -> None:
    # forward 2 b i o, backward the same for the weight; the inputs need no gradient, and the batch sizes sum
    # to n
    n = SIZES[0]
    assert flops(FedAvg(batch_size=batch_size), federation()) == 2 * (2 * n * INPUTS * CLASSES)
    assert flops(FedAvg(batch_size=batch_size, epochs=3), federation()) == 3 * 2 * (2 * n * INPUTS * CLASSES)


def test_operations_of_two_layers() -> None:
    n, h = SIZES[1], 10
    fed = federation(lambda: Net(h))
    # the second layer's backward also gives the gradient of its input
    assert flops(FedAvg(batch_size=4), fed, 1) == 2 * (2 * n * INPUTS * h) + 3 * (2 * n * h * CLASSES)


def test_operations_of_a_convolution() -> None:
    rng = np.random.default_rng(0)
    clients = [{"train": (rng.normal(size=(6, 1, 8, 8)).astype(np.float32), np.arange(6) % 3)}]
    fed = Federation.from_arrays(clients, lambda: CNN((1, 8, 8), 3, (2, 3), (7, 5)), classes=3)
    first, second = 2 * 64 * 2 * (1 * 9), 2 * 16 * 3 * (2 * 9)
    dense = 2 * (12 * 7 + 7 * 5 + 5 * 3)
    assert flops(FedAvg(batch_size=4), fed) == 6 * (2 * first + 3 * second + 3 * dense)


def test_operations_of_the_two_passes_of_pfedlora() -> None:
    n, h, d = SIZES[0], 10, 5
    layer, head, a, b = (2 * n * i * o for i, o in ((INPUTS, h), (h, CLASSES), (h, d), (d, CLASSES)))
    # model: backward through the frozen adapter costs one product a layer, as its weights take no gradient
    model = 2 * layer + 3 * head + 2 * a + 2 * b
    # adapter: one forward of the body, which takes no gradient, and no head
    adapter = layer + 2 * a + 3 * b
    assert flops(PFedLoRA(width=d, batch_size=8), federation(lambda: Net(h))) == model + adapter


def test_operations_are_counted_for_each_architecture_of_a_ledger() -> None:
    models = {"a": lambda: Net(10), "b": lambda: Net(20)}
    fed = Federation.from_arrays(make_arrays(), models, classes=CLASSES)
    alone, engine = Standalone(batch_size=8), Sequential()
    jobs = [ClientJob(alone.client_init(i, fed.task(1)), None, i) for i in fed.infos]
    actual = [o.meter.flops for o in engine.run(alone, fed, fed.task(1), 0, jobs)]
    expected = [
        2 * (2 * n * INPUTS * h) + 3 * (2 * n * h * CLASSES)
        for n, h in zip(SIZES, (10, 20, 10, 20), strict=True)
    ]
    assert actual == expected


def test_steps_and_losses_are_those_of_the_pass() -> None:
    fed = federation()
    run = Run(FedAvg(batch_size=8, epochs=2, optimizer=SGD(lr=0.0)), fed, RunSettings(rounds=1), Sequential())
    record = run.step()
    assert record.steps == sum(2 * math.ceil(n / 8) for n in SIZES)
    means = []
    for k in range(len(SIZES)):
        v = view(fed, k, epochs=2)
        data = fed.clients[k].train
        losses = [
            float(functional.cross_entropy(v.model.apply(v.model.initial, data.x[i]), data.y[i]))
            for i in v.trainer.data.order("local")
        ]
        means.append(np.mean(losses))
    assert record.training_losses["local"] == pytest.approx(np.mean(means))


def test_a_pass_may_end_after_a_number_of_steps() -> None:
    data = Examples(torch.zeros(10, 2), torch.zeros(10, dtype=torch.int64))
    sweeps = Pass(epochs=2, batch_size=4), Pass(epochs=2, batch_size=4, steps=4)
    whole, cut = (LocalData(ClientInfo(0, 10, "a"), data, {"local": p}, Key((0,))) for p in sweeps)
    assert whole.steps("local") == len(whole.order("local")) == 6
    assert cut.steps("local") == len(cut.order("local")) == 4
    assert all(torch.equal(a, b) for a, b in zip(cut.order("local"), whole.order("local"), strict=False))


def test_clipping_keeps_the_type_of_each_gradient() -> None:
    """A factor from gradients of float64 would widen a gradient without axes, as PyTorch promotes types."""
    grads = [torch.tensor(3.0), torch.tensor([4.0], dtype=torch.float64)]
    clipped = clip(grads, 1.0)
    assert [g.dtype for g in clipped] == [torch.float32, torch.float64]
    assert [g.sum().item() for g in clipped] == pytest.approx([0.6, 0.8])
