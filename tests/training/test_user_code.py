"""Modules and losses as users write them, in every engine, beside a plain PyTorch loop.

The loop loads the server's weights into each client's own copy of the module, calls ``train()``, and steps
through the same batches by ``backward()`` and ``torch.optim.SGD``. Python's, numpy's and torch's global
generators start at the seed of the client's pass.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.contract import AnyMethod, Batch, Method
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.engines import ENGINES
from fedlowrank.methods import FedAvg
from fedlowrank.models.standard import is_standard
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.training.trainer import LocalTrainer

HERE = ["sequential", "wire", "vectorized"]
LOCAL = [*HERE, "processes"]
LR, ROUNDS, SIZES = 0.2, 3, (24, 17)
SCALE = 1.0
"""Read by modules below as a global, and changed between rounds."""


class Base(nn.Module):
    """A body, something in the middle, and a head."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.middle(torch.tanh(self.body(x))))
        return scores


class FunctionalDropout(Base):
    def middle(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.4, training=self.training)


class StochasticDepth(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * 0.5 if self.training and random.random() < 0.5 else h + h.square()


class ManifoldMixup(Base):
    def middle(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        share = float(np.random.beta(2.0, 2.0))  # noqa: NPY002 - as users write it
        return share * h + (1 - share) * h.flip(0)


class Noise(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h + 0.3 * torch.randn_like(h) if self.training else h


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.rnn(h.reshape(-1, 2, 4))[0].reshape(-1, 8)


class Attention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        t = h.reshape(-1, 2, 4)
        return h + self.attention(t, t, t, need_weights=False)[0].reshape(-1, 8)


class SpectralNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))


class ModeCounter(Base):
    """Counts its forward passes with gradients in training mode in a buffer, and works by what it counts."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def middle(self, h: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.passes += 1
        return h / (1 + 0.1 * self.passes)


class MovingMean(Base):
    """Centers by a moving average that it assigns anew, as a hand-written batch normalization does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * h.detach().mean(0)
        return h - self.mean


class MeanTeacher(Base):
    """A moving average of the body in buffers, as the error about a changed frozen parameter advises."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body)
        for name, p in list(self.teacher.named_parameters()):
            delattr(self.teacher, name)
            self.teacher.register_buffer(name, p.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for t, p in zip(self.teacher.buffers(), self.body.parameters(), strict=True):
                    t.lerp_(p, 0.1)
        scores: Tensor = self.head(torch.tanh(self.body(x)) + torch.tanh(self.teacher(x)))
        return scores


class ReadsGlobal(Base):
    def middle(self, h: Tensor) -> Tensor:
        factor: Callable[[], float] = lambda: sum([SCALE * i for i in (1.0,)])  # noqa: E731
        return h * factor() * _helper()


def _helper() -> float:
    return 1.0 + SCALE / 10


class Settings:
    """An attribute of a class and not of an object."""

    factor = 1.0


class ReadsAttributes(Base):
    factor = 1.0

    def middle(self, h: Tensor) -> Tensor:
        return h * Settings.factor * self.factor


class DataDependent(Base):
    """Shapes and sizes that depend on the data, read into Python."""

    def middle(self, h: Tensor) -> Tensor:
        count = len(torch.nonzero(h > 0.2))
        groups = torch.bincount((h > 0).sum(1)).shape[0]
        return h * (1 + count / 100) / groups


class Checkpointed(Base):
    """Recomputes activations; with dropout, whose mask must be the same both times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))

    def middle(self, h: Tensor) -> Tensor:
        actual: Tensor = checkpoint(self.inner, h, use_reentrant=False)
        return actual


class FrozenNormalization(Base):
    """Keeps a pretrained batch normalization in evaluation mode, by the usual override of ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(2.0)

    def train(self, mode: bool = True) -> FrozenNormalization:
        super().train(mode)
        self.norm.eval()
        return self

    def middle(self, h: Tensor) -> Tensor:
        actual: Tensor = self.norm(h)
        return actual


class Renormalized(Base):
    """An embedding that rescales its own rows in place, as ``max_norm`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8, max_norm=0.5)

    def middle(self, h: Tensor) -> Tensor:
        actual: Tensor = h + self.table(h[:, :2].detach().argmax(1))
        return actual


MODULES: list[type[Base]] = [
    *(
        FunctionalDropout,
        StochasticDepth,
        ManifoldMixup,
        Noise,
        Recurrent,
        Attention,
        SpectralNorm,
        ModeCounter,
    ),
    *(
        MovingMean,
        MeanTeacher,
        ReadsGlobal,
        ReadsAttributes,
        DataDependent,
        Checkpointed,
        FrozenNormalization,
        Renormalized,
    ),
]


CARRIED = [ModeCounter, ReadsGlobal, ReadsAttributes, ManifoldMixup]
"""One module each of what an engine must carry to another process: buffers, globals, attributes, random
draws."""


def clients() -> list[dict[str, tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(7)
    actual = []
    for n in SIZES:
        x, y = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
        actual.append({"train": (x, y), "test": (x[:5], y[:5])})
    return actual


def module_of(kind: type[Base]) -> Base:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def change(model: Base, round: int) -> None:
    """What a user changes between two rounds: a global, an attribute of a class, an attribute of the
    model."""
    global SCALE
    SCALE = 1.0 + round / 4
    Settings.factor = 1.0 + round / 3
    if isinstance(model, ReadsAttributes):
        model.factor = 1.0 - round / 5


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def plain_loop(start: Base, run: Run, loss: Loss = cross_entropy) -> dict[str, Tensor]:
    """Federated averaging by hand; returns the server's parameters."""
    models = [copy.deepcopy(start) for _ in SIZES]
    server = {n: p.detach().clone() for n, p in start.named_parameters()}
    for t in range(ROUNDS):
        ends: list[dict[str, Tensor]] = []
        for k, model in enumerate(models):
            change(model, t)
            model.load_state_dict(server, strict=False)
            model.train()
            trainer = run.engine.trainer(run.method, run.federation, t, run.federation.infos[k])
            seed = (trainer.data.key / "local").seed()
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            data = run.federation.clients[k].train
            for index in trainer.data.order("local"):
                optimizer.zero_grad()
                loss(model, data.inputs[index], data.y[index]).backward()  # type: ignore[index, no-untyped-call]
                optimizer.step()
            ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
        weights = [n / sum(SIZES) for n in SIZES]
        server = {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) for n in server}  # type: ignore[misc]
    return server


def federated(model: Base, engine: str, method: AnyMethod, evaluate_every: int = 1) -> Run:
    federation = Federation.from_arrays(clients(), model, seed=0)
    settings = RunSettings(rounds=ROUNDS, evaluate_every=evaluate_every)
    run = Run(method, federation, settings, ENGINES[engine]())
    with torch.random.fork_rng():
        for t in range(ROUNDS):
            change(model, t)
            run.step()
    run.engine.close()
    return run


FEDAVG = FedAvg(epochs=2, batch_size=5, optimizer=SGD(lr=LR))


@pytest.fixture(autouse=True)
def _restore() -> Any:
    yield
    change(Base(), 0)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(
            k, e, marks=() if e in HERE or k in CARRIED else pytest.mark.full, id=f"{k.__name__}-{e}"
        )
        for k in MODULES
        for e in LOCAL
    ],
)
def test_a_module_is_trained_as_a_plain_loop_trains_it(kind: type[Base], engine: str) -> None:
    run = federated(module_of(kind), engine, FEDAVG)
    expected = plain_loop(module_of(kind), run)
    assert run.state.server.keys() == expected.keys()
    for name, p in run.state.server.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", MODULES, ids=lambda k: k.__name__)
def test_none_of_these_modules_is_called_standard(kind: type[Base]) -> None:
    assert not is_standard(kind())


@dataclass(frozen=True)
class OwnLoss(Method[dict[str, Tensor], None, dict[str, Tensor], dict[str, Tensor]]):
    """A user's method: federated averaging with a loss of its own."""

    title: ClassVar[str] = "own loss"
    citation: ClassVar[str] = ""

    def server_init(self, task: Any) -> Any:
        return task.common_model(self.title).initial

    def client_init(self, client: Any, task: Any) -> None:
        return None

    def download(self, server: Any, client: Any) -> Any:
        return server

    def local_update(self, state: None, down: Any, view: Any) -> Any:
        def loss(params: Any, batch: Batch) -> Tensor:
            return user_loss(lambda x: view.model.apply(params, x), batch.x, batch.y)

        return None, view.train(loss, down, "local", self.optimizer)

    def server_update(self, server: Any, total: Any, view: Any) -> Any:
        return total


def user_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mixup by numpy, a mean over some of the examples, and a penalty that reads a global."""
    share = float(np.random.beta(1.0, 1.0))  # noqa: NPY002 - as users write it
    each = functional.cross_entropy(model(share * x + (1 - share) * x.flip(0)), y, reduction="none")
    return each[y != 0].mean() * SCALE if (y != 0).any() else each.mean()


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("kind", [Base, FunctionalDropout], ids=lambda k: k.__name__)
def test_a_loss_of_the_user_is_evaluated_as_it_is_written(kind: type[Base], engine: str) -> None:
    run = federated(module_of(kind), engine, OwnLoss(epochs=2, batch_size=5, optimizer=SGD(lr=LR)))
    expected = plain_loop(module_of(kind), run, user_loss)
    for name, p in run.state.server.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "wire", "vectorized", "auto"])
def test_hooks_run_once_a_step(engine: str) -> None:
    """No forward pass is added for counting operations or for finding a faster way, and none is left out."""
    model, seen = nn.Sequential(nn.Linear(6, 80), nn.ReLU(), nn.Linear(80, 3)), []
    assert is_standard(model)

    def hook(module: nn.Module, _: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():
            seen.append((module.training, out.requires_grad))

    model[0].register_forward_hook(hook)
    assert not is_standard(model)
    steps = ROUNDS * sum(2 * -(-n // 5) for n in SIZES)
    run = federated(model, engine, FEDAVG, evaluate_every=10**6)  # type: ignore[arg-type]
    assert run.round == ROUNDS
    # the first is that of the federation, which asks whether a gradient reaches the parameters in training
    assert seen == [(True, True)] * (1 + steps)


def test_a_hook_on_all_modules_is_seen() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_standard(model)
    handle.remove()
    assert is_standard(model)


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.1), nn.RReLU(), nn.LSTM(3, 3), nn.TransformerEncoderLayer(4, 2), nn.Embedding(3, 3, max_norm=1.0),
     nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), type("Mine", (nn.Linear,), {})(3, 3)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_layers_whose_behavior_is_not_proven_are_not_standard(layer: nn.Module) -> None:
    assert not is_standard(nn.Sequential(nn.Linear(3, 3), layer))


def test_a_forward_replaced_on_an_object_is_not_standard() -> None:
    layer = nn.Linear(3, 3)
    assert is_standard(layer)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_standard(layer)


def test_global_generators_stand_where_they_stood() -> None:
    """Users' own draws between rounds are neither moved by training nor move it."""
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
    first = federated(module_of(ManifoldMixup), "sequential", FEDAVG)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    second = federated(module_of(ManifoldMixup), "sequential", FEDAVG)
    assert all(torch.equal(p, second.state.server[n]) for n, p in first.state.server.items())


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("kind", [MovingMean, ModeCounter], ids=lambda k: k.__name__)
def test_buffers_belong_to_the_client(kind: type[Base], engine: str) -> None:
    """They go on from round to round, evaluation does not move them, and they are part of a client's own
    model."""
    runs = [federated(module_of(kind), engine, FEDAVG, every) for every in (1, 10**6)]
    assert all(torch.equal(p, runs[1].state.server[n]) for n, p in runs[0].state.server.items())
    for k, info in enumerate(runs[0].federation.infos):
        personal = runs[0].personal_params(info)
        fresh = module_of(kind)
        fresh.load_state_dict(personal)
        if isinstance(fresh, ModeCounter):
            assert int(fresh.passes) == ROUNDS * 2 * -(-SIZES[k] // 5)
        x = runs[0].federation.clients[k].test.inputs
        scores = runs[0].local_model(info).predictors["personal"](x)
        torch.testing.assert_close(scores, fresh.eval()(x).detach())


@pytest.mark.parametrize("kind", [MovingMean, Attention], ids=lambda k: k.__name__)
def test_a_stop_changes_no_bit(kind: type[Base], tmp_path: Any) -> None:
    """Buffers are part of the checkpoint, and counting operations in a fresh process does not change the
    order of sums."""

    def run(rounds: int, **settings: Any) -> Any:
        federation = Federation.from_arrays(clients(), module_of(kind), seed=0)
        return simulate(FEDAVG, federation, rounds=4, on_round=_stop_after(rounds), **settings)

    with pytest.raises(KeyboardInterrupt):
        run(2, folder=tmp_path / "r")
    resumed, unbroken = run(4, folder=tmp_path / "r", resume=True), run(4)
    for name, p in unbroken.run.state.server.items():
        assert torch.equal(p, resumed.run.state.server[name])
    again = resumed.personal(1)
    assert all(torch.equal(t, again[name]) for name, t in unbroken.personal(1).items())


def _stop_after(round: int) -> Callable[[RoundRecord], None]:
    def stop(record: RoundRecord) -> None:
        if record.round == round and round < 4:
            raise KeyboardInterrupt

    return stop


def test_a_hook_on_a_parameter_is_refused() -> None:
    """A client trains copies of the parameters, on which it would not run."""
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda g: g * 0)
    with pytest.raises(TaskError, match=r"weight has a hook .*precondition"):
        Federation.from_arrays(clients(), model)


def test_a_reentrant_checkpoint_never_gives_a_wrong_gradient() -> None:
    """PyTorch itself refuses it under ``autograd.grad``."""

    class Reentrant(Base):
        def middle(self, h: Tensor) -> Tensor:
            actual: Tensor = checkpoint(torch.tanh, h, use_reentrant=True) if self.training else h.tanh()
            return actual

    with pytest.raises(TaskError, match="use_reentrant=False"):
        Federation.from_arrays(clients(), module_of(Reentrant))


def test_shortcuts_run_where_all_is_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[bool] = []
    ask = LocalTrainer.is_standard

    def noted(self: LocalTrainer, request: Any) -> bool:
        actual.append(ask(self, request))
        return actual[-1]

    monkeypatch.setattr(LocalTrainer, "is_standard", noted)
    for method in (FEDAVG, OwnLoss()):
        simulate(method, Federation.from_arrays(clients(), nn.Linear(6, 3)), rounds=1)
    assert actual == [True, True, False, False]


def test_randomness_in_evaluation_is_seeded_and_put_back() -> None:
    class AlwaysNoisy(Base):
        def middle(self, h: Tensor) -> Tensor:
            return h + torch.randn_like(h) + float(np.random.randn())  # noqa: NPY002 - as users write it

    actual = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state()
        result = simulate(FEDAVG, Federation.from_arrays(clients(), module_of(AlwaysNoisy)), rounds=2)
        assert torch.equal(torch.get_rng_state(), before)
        actual.append([r.values("loss") for r in result.rounds])
    assert actual[0] == actual[1]


class Centered(Base):
    """Couples the examples of a batch by their mean."""

    def middle(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Normalized(Base):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def middle(self, h: Tensor) -> Tensor:
        actual: Tensor = self.norm(h[:, :, None]).squeeze(2)
        return actual


COUPLED: dict[str, Callable[[], nn.Module]] = {
    "standard layers": lambda: nn.Sequential(nn.Linear(6, 8), nn.Softmax(dim=0), nn.Linear(8, 3)),
    **{
        kind.__name__: kind
        for kind in (ManifoldMixup, SpectralNorm, ModeCounter, MovingMean, MeanTeacher, DataDependent)
    },
    "Centered": Centered,
    "batch": lambda: Normalized(nn.BatchNorm1d(8)),
    "of batches": lambda: Normalized(nn.BatchNorm1d(8, track_running_stats=False)),
    "synchronized": lambda: Normalized(nn.SyncBatchNorm(8)),
}
SINGLE: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in MODULES if kind.__name__ not in COUPLED},
    "layer": lambda: Normalized(nn.LayerNorm(1)),
    "group": lambda: Normalized(nn.GroupNorm(2, 8)),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", [*COUPLED, *SINGLE])
def test_batches_are_taken_in_parts_only_where_examples_are_by_themselves(kind: str) -> None:
    federation = Federation.from_arrays(clients(), (COUPLED | SINGLE)[kind])
    if kind in COUPLED:
        with pytest.raises(ConfigError, match=r"micro_batch = 2.*(couples|depend on the other|buffers)"):
            simulate(FEDAVG, federation, rounds=1, micro_batch=2)
        return
    before = {n: p.clone() for n, p in federation.architectures["model"].initial.items()}
    Run(FEDAVG, federation, RunSettings(micro_batch=2), ENGINES["sequential"]())
    assert all(torch.equal(p, before[n]) for n, p in federation.architectures["model"].initial.items())
    if any(word in kind for word in ("Dropout", "Depth", "Noise", "Recurrent", "Attention", "Checkpointed")):
        return  # they draw random numbers for each part
    parts, whole = (simulate(FEDAVG, federation, rounds=1, micro_batch=m).run.state.server for m in (2, None))
    for n, p in whole.items():
        torch.testing.assert_close(parts[n], p, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["per_fedavg", "pfedme", "fedkd"])
def test_losses_that_are_no_mean_over_examples_are_not_taken_in_parts(name: str) -> None:
    """Inner steps and quotients of losses: with parts, models differed by 7e-5 to 4e-4 in float64."""
    federation = Federation.from_arrays(clients(), (COUPLED | SINGLE)[next(iter(SINGLE))])
    with pytest.raises(ConfigError, match=r"micro_batch = 2.*no mean over the examples"):
        simulate(name, federation, rounds=1, micro_batch=2)
