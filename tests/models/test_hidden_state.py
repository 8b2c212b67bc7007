"""Models and losses that compute with values outside of parameters and buffers are refused; those that only keep them are not."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.errors import ConfigError, TaskError
from fedlowrank.methods import FedAvg
from fedlowrank.models.architecture import Architecture
from fedlowrank.models.hidden_state import refuse_hidden_state

torch.set_num_threads(1)

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3
CLIENTS = [{"train": (X, Y)}, {"train": (X[:8], Y[:8])}]
FEDAVG = FedAvg(epochs=1, batch_size=4, optimizer=SGD(lr=0.1))


class Net(nn.Module):
    """A body, a function between, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.set_up()

    def set_up(self) -> None:
        """Define what subclasses keep."""

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.middle(torch.tanh(self.body(x))))
        return scores


def made(module: type[nn.Module] | nn.Module) -> Federation:
    return Federation.from_arrays(CLIENTS, module, classes=3, seed=1)


# -- models that are refused ----------------------------------------------------------------------------------


class Annealed(Net):
    """A temperature that falls with the steps taken."""

    steps: Any

    def set_up(self) -> None:
        self.steps = 0

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return h / 0.99**self.steps


class Alternating(Annealed):
    def middle(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h * (1 + self.steps % 2)


class MovingMean(Net):
    """A hand-written normalization, whose training scores do not depend on what it keeps."""

    def set_up(self) -> None:
        self.mean = torch.zeros(8)

    def middle(self, h: Tensor) -> Tensor:
        if not self.training:
            return h - self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - h.mean(0)


class Queue(Net):
    """Adds the mean of the batch before, in a list that is changed in place."""

    def set_up(self) -> None:
        self.earlier: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        self.earlier.append(h.detach().mean(0))
        return h + self.earlier[-2:][0]


class Initialized(Net):
    """Scales its first batch to deviation 1."""

    def set_up(self) -> None:
        self.scale, self.is_scaled = nn.Parameter(torch.ones(8)), False

    def middle(self, h: Tensor) -> Tensor:
        if not self.is_scaled:
            self.is_scaled = True
            with torch.no_grad():
                self.scale.copy_(1 / (h.std() + 1))
        return h * self.scale


class Inner(Net):
    """A layer of the model keeps the value."""

    def set_up(self) -> None:
        self.layer = Annealed()

    def middle(self, h: Tensor) -> Tensor:
        return h + self.layer(h[:, :6]).mean()


class OwnGenerator(Net):
    def set_up(self) -> None:
        self.generator = np.random.default_rng(0)

    def middle(self, h: Tensor) -> Tensor:
        return h * float(self.generator.random())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Annealed,
            r"in training mode .*: forward changes the attribute 'steps' of the module itself \(Annealed\)",
        ),
        (Alternating, r"the attribute 'steps' of the module itself \(Alternating\)"),
        (MovingMean, r"in evaluation mode .*: forward changes the attribute 'mean' of the module itself"),
        (Queue, "the attribute 'earlier' of the module itself"),
        (Initialized, "the attribute 'is_scaled' of the module itself"),
        (Inner, r"the attribute 'steps' of layer 'layer' \(Annealed\)"),
        (OwnGenerator, "no attribute shows it, so look for .* random generators of its own"),
    ],
)
@pytest.mark.parametrize("is_instance", [False, True])
def test_a_model_with_state_outside_of_its_buffers_is_refused(
    kind: Any, message: str, is_instance: bool
) -> None:
    with pytest.raises(TaskError, match=rf"^model model: .*{message}.*register_buffer\("):
        made(kind() if is_instance else kind)


class Stateful(nn.Module):
    """A language model that begins each batch with the last state of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(5, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 5)
        self.state: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        h, state = self.rnn(self.table(input_ids), self.state)
        self.state = state.detach()
        scores: Tensor = self.head(h)
        return scores


def test_a_language_model_that_keeps_its_last_state_is_refused() -> None:
    tokens = torch.arange(32).reshape(8, 4) % 5
    with pytest.raises(TaskError, match=r"the attribute 'state' of the module itself \(Stateful\)"):
        Federation.from_arrays([({"input_ids": tokens}, tokens)] * 2, Stateful, loss="next_token")


def test_the_same_model_with_a_buffer_is_accepted() -> None:
    class Buffered(Annealed):
        def set_up(self) -> None:
            self.register_buffer("steps", torch.zeros(()))

    result = simulate(FEDAVG, made(Buffered), rounds=2)
    # 16 and 8 examples in batches of 4, twice
    assert [float(result.personal(k)["steps"]) for k in (0, 1)] == [8.0, 4.0]


def test_compiled_models_are_checked_without_compiling_a_further_shape() -> None:
    shapes = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append(inputs)
        return graph.forward

    for kind in (Annealed, Net):
        model = Architecture("m", torch.compile(kind(), backend=backend), X[:1])
        if kind is Net:
            refuse_hidden_state(model)
        else:
            with pytest.raises(TaskError, match=r"'steps' of layer '_orig_mod' \(Annealed\)"):
                refuse_hidden_state(model)
    assert shapes == []


def test_the_check_leaves_the_module_as_it_is() -> None:
    module = Queue()
    model = Architecture("m", module, X[:1])
    module.earlier.clear()
    for _ in range(2):
        with pytest.raises(TaskError, match="'earlier'"):
            refuse_hidden_state(model)
    assert module.earlier == []


# -- models that only keep values -----------------------------------------------------------------------------


class Keeping(Net):
    """Keeps values for later inspection, a table that is computed once, and masks by size."""

    def set_up(self) -> None:
        self.calls, self.cosines, self.masks = 0, None, {}  # type: ignore[var-annotated]
        self.norms: list[float] = []
        self.activations: dict[str, Tensor] = {}
        self.body.register_forward_hook(lambda _, __, out: self.activations.update(body=out))

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.norms.append(float(h.detach().norm()))
        self.last_attention = h.detach().softmax(1)
        if self.cosines is None:
            self.cosines = torch.cos(torch.arange(8.0))
        return h * self.cosines * self.masks.setdefault(len(h), torch.ones(8))


class Plain(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.cos(torch.arange(8.0)) * torch.ones(8)


class Recurrent(Net):
    def set_up(self) -> None:
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        out: Tensor = self.rnn(h[:, None])[0][:, 0]
        return out


class Quantized(Net):
    """The nearest of some vectors, which move towards the batch, in a buffer."""

    vectors: Tensor

    def set_up(self) -> None:
        self.register_buffer("vectors", torch.eye(8))

    def middle(self, h: Tensor) -> Tensor:
        index = torch.cdist(h, self.vectors).argmin(1)
        if self.training:
            with torch.no_grad():
                self.vectors[index] = 0.9 * self.vectors[index] + 0.1 * h
        return h + (self.vectors[index] - h).detach()


class Table(Net):
    """Frozen rows that the layer itself rescales to a bound."""

    def set_up(self) -> None:
        self.table = nn.Embedding(3, 8, max_norm=0.5).requires_grad_(False)

    def middle(self, h: Tensor) -> Tensor:
        rows: Tensor = self.table(h[:, :2].detach().argmax(1))
        return h + rows


class Normalized(Net):
    def set_up(self) -> None:
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def middle(self, h: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.weighted(h)))
        return out


def test_values_that_change_no_score_change_no_result() -> None:
    servers = [simulate(FEDAVG, made(kind), rounds=2).run.state.server for kind in (Keeping, Plain)]
    for name, p in servers[1].items():
        assert torch.equal(servers[0][name], p)


@pytest.mark.parametrize("kind", [Recurrent, Quantized, Table, Normalized])
def test_models_whose_state_is_in_their_buffers_are_accepted(
    kind: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        simulate(FEDAVG, made(kind), rounds=2)
    assert "not checked" not in caplog.text


def test_a_model_that_cannot_be_copied_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Net()
    forward = module.body.forward
    module.body.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    with caplog.at_level("INFO"):
        made(module)
    assert (
        "Model model is not checked for state outside of its parameters and buffers: TaskError" in caplog.text
    )


# -- frozen parameters ----------------------------------------------------------------------------------------


class MeanTeacher(Net):
    """A moving average of the body in frozen parameters, which equal the body at first."""

    begins_at = 0

    def set_up(self) -> None:
        self.teacher, self.calls = copy.deepcopy(self.body).requires_grad_(False), 0

    def update(self, t: Tensor, p: Tensor) -> None:
        t.lerp_(p, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls > self.begins_at:
            with torch.no_grad():
                for t, p in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                    self.update(t, p)
        scores: Tensor = self.head(torch.tanh(self.body(x)) + torch.tanh(self.teacher(x)))
        return scores


class Reassigned(MeanTeacher):
    """Assigns the data of the parameter, so that its version stays the same."""

    def update(self, t: Tensor, p: Tensor) -> None:
        t.data = 0.999 * t.data + 0.001 * p.data


class Late(MeanTeacher):
    """Begins after some training passes, so that the check of the federation does not see it."""

    begins_at = 5


@pytest.mark.parametrize("kind", [MeanTeacher, Reassigned])
def test_a_model_that_changes_frozen_parameters_is_refused(kind: type[Net]) -> None:
    message = r"forward changes the frozen parameter teacher\.weight .*self\.teacher\.register_buffer\('weight', weight\)"
    with pytest.raises(TaskError, match=message):
        made(kind)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_pass_that_changes_a_frozen_parameter_ends_the_run(engine: Any) -> None:
    federation = made(Late)
    with pytest.raises(TaskError, match=r"^client 1 .*: model model: .*frozen parameter teacher\.weight"):
        simulate(FEDAVG, federation, rounds=2, engine=engine)


# -- losses ---------------------------------------------------------------------------------------------------


class Focused(nn.Module):
    """Cross-entropy with a weight that grows with the calls, or only a count of them."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.calls, self.is_used = 0, is_used

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        losses = functional.cross_entropy(scores, targets, reduction="none")
        return losses * self.calls if self.is_used else losses


def with_loss(loss: Any) -> Federation:
    return Federation.from_arrays(CLIENTS, Net, classes=3, seed=1, loss=loss)


def test_a_loss_that_depends_on_an_attribute_is_refused() -> None:
    loss = Focused(is_used=True)
    with pytest.raises(
        ConfigError, match=r"gives other values .*attribute 'calls' of the module itself \(Focused\)"
    ):
        with_loss(loss)


def test_a_loss_that_counts_its_calls_is_accepted() -> None:
    servers = [
        simulate(FEDAVG, with_loss(loss), rounds=2).run.state.server
        for loss in (Focused(is_used=False), nn.CrossEntropyLoss(reduction="none"))
    ]
    for name, p in servers[1].items():
        assert torch.equal(servers[0][name], p)


class Centered(nn.Module):
    """Divides by a moving average of the loss in a buffer, which it changes in place or assigns anew."""

    mean: Tensor

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.is_in_place = is_in_place

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(scores, targets, reduction="none")
        if self.is_in_place:
            self.mean.lerp_(losses.detach().mean(), 0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
        return losses / self.mean


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_loss_that_changes_its_buffers_is_refused(is_in_place: bool) -> None:
    with pytest.raises(ConfigError, match="changes its buffer 'mean' when it is called"):
        with_loss(Centered(is_in_place))


class Moved(nn.Module):
    """Moves its buffer to the type of the scores, and makes another one in its first call."""

    weight: Tensor
    shift: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3, dtype=torch.float64))
        self.register_buffer("shift", None)

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        self.weight = self.weight.to(scores)
        self.shift = scores.new_ones(3) if self.shift is None else self.shift
        return functional.cross_entropy(scores + self.shift, y, weight=self.weight, reduction="none")


def test_a_loss_that_moves_or_makes_a_buffer_is_accepted() -> None:
    Federation.from_arrays(CLIENTS, Net, classes=3, loss=Moved())


class Uncopyable(nn.Module):
    """Has a trainable parameter, and a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.lock = nn.Parameter(torch.ones(3)), threading.Lock()

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(scores * self.factor, y, reduction="none")


def test_trainable_parameters_of_a_loss_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(ConfigError, match="trainable parameters of its own"):
        Federation.from_arrays(CLIENTS, Net, classes=3, loss=Uncopyable())


class Shared(nn.Linear):
    """A backbone that all copies of a model share."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


class WithShared(Net):
    """Has such a backbone, with a hook."""

    def set_up(self) -> None:
        self.backbone = Shared(8, 8).requires_grad_(False)
        self.backbone.register_forward_hook(lambda module, inputs, output: 10 * output)

    def middle(self, h: Tensor) -> Tensor:
        return self.backbone(h)  # type: ignore[no-any-return]


def test_hooks_of_a_layer_that_copies_share_stay() -> None:
    module = WithShared()
    scores = module(X).detach()
    made(module)
    assert torch.equal(module(X), scores)


class Converging(Net):
    """Iterates until it converges, which needs weights below 1."""

    def set_up(self) -> None:
        self.weight = nn.Parameter(-0.9 * torch.eye(8))

    def middle(self, h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        for _ in range(10_000):
            z, last = torch.tanh(z @ self.weight + 0.1 * h), z
            if (z - last).norm() < 1e-4:
                return z
        raise AssertionError("a user's loop has no bound")


def test_a_forward_that_iterates_until_it_converges_ends() -> None:
    federation = made(Converging)
    assert "is without hidden state" in federation.architectures["model"].cache


# -- buffers that are not tensors all the time ----------------------------------------------------------------


class Filled(Net):
    """A mean that is unknown before the first step."""

    mean: Tensor | None

    def set_up(self) -> None:
        self.register_buffer("mean", None)

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            mean = h.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return h if self.mean is None else h - self.mean


class Emptied(Net):
    mean: Any

    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(8))

    def middle(self, h: Tensor) -> Tensor:
        self.mean = None
        return h


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Filled, "'mean'.*a buffer that is None at first and must begin as a tensor"),
        (Emptied, "sets the buffer mean.*None"),
    ],
)
def test_a_buffer_begins_and_stays_a_tensor(module: type[Net], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        simulate(FEDAVG, made(module()), rounds=1)


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_a_sparse_buffer_is_one_like_any_other(layout: torch.layout) -> None:
    """The adjacency of a graph convolution."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            adjacency = torch.eye(6) + torch.eye(6).roll(1, 0)
            self.register_buffer(
                "adjacency", adjacency.to_sparse(layout=layout) if layout != torch.strided else adjacency
            )
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.last((self.adjacency @ x.T).T)
            return scores

    network = Graph()
    start = {n: p.detach().clone() for n, p in network.named_parameters()}
    result = simulate(FedAvg(epochs=1, batch_size=16, optimizer=SGD(lr=0.1)), made(network), rounds=1)
    ends = []
    for x, y in ((X, Y), (X[:8], Y[:8])):
        # PyTorch does not copy a module with a CSR tensor
        trained = Graph()
        trained.load_state_dict(start, strict=False)
        functional.cross_entropy(trained(x), y).backward()
        ends.append({n: p.detach() - 0.1 * p.grad for n, p in trained.named_parameters()})
    for name, p in result.run.state.server.items():
        torch.testing.assert_close(p, (2 * ends[0][name] + ends[1][name]) / 3)


# -- values that are kept in evaluation mode ------------------------------------------------------------------


class Cached(Net):
    """Keeps the normalized weight in evaluation mode, until it trains again."""

    def set_up(self) -> None:
        self.weight, self.cache = nn.Parameter(torch.randn(8, 8)), None

    def train(self, mode: bool = True) -> Any:
        if mode:
            self.cache = None
        return super().train(mode)

    def middle(self, h: Tensor) -> Tensor:
        # a multiple of the parameters has the same normalized weight
        weight = self.weight / self.weight.norm() if self.cache is None else self.cache
        if not self.training:
            self.cache = weight
        return h @ weight


def test_a_value_that_is_computed_of_the_parameters_and_kept_is_refused() -> None:
    with pytest.raises(TaskError, match="give other scores in evaluation mode"):
        made(Cached)
