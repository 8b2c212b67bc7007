"""Evaluation with a loss of the user's own, which may compare examples, and whose scores may have any form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.errors import ConfigError, DataError, LossError
from fedlowrank.core.learning.losses import as_loss
from fedlowrank.data.dataset import Examples
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.models.coupling import mixes_examples
from fedlowrank.results.evaluation import scoring
from fedlowrank.results.evaluation.pools import concatenate_sets
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.trust.trust_settings import Attack

torch.set_num_threads(1)


def cox(scores: Tensor, targets: Tensor) -> Tensor:
    """Partial likelihood of times and events: every example is compared with all that have a later time."""
    order = torch.argsort(targets[:, 0], descending=True)
    risks, events = scores[order, 0], targets[order, 1]
    losses = torch.empty_like(risks)
    losses[order] = -(risks - torch.logcumsumexp(risks, 0)) * events
    return losses


def rank(scores: Tensor, targets: Tensor) -> Tensor:
    """Hinge loss of each example with all that have a smaller target."""
    is_above = (targets > targets.T).float()
    return (F.relu(1 - (scores - scores.T)) * is_above).sum(1) / is_above.sum(1).clamp(min=1)


def two_targets(n: int, generator: torch.Generator) -> Tensor:
    events = (torch.rand(n, 1, generator=generator) < 0.7).float()
    return torch.cat([torch.rand(n, 1, generator=generator), events], 1)


def make_parts(make_y: Callable[[int, torch.Generator], Tensor]) -> list[dict[str, Any]]:
    """Three clients with parts of other sizes."""
    g = torch.Generator().manual_seed(0)
    sizes = ((20, 7, 5), (12, 4, 9), (16, 0, 6))
    return [
        {
            part: (torch.randn(n, 4, generator=g), make_y(n, g))
            for part, n in zip(("train", "val", "test"), counts, strict=True)
        }
        for counts in sizes
    ]


def zero_head() -> nn.Module:
    """Scores of all examples are equal until the first step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


def run(federation: Federation, method: str = "fedavg", **settings: Any) -> Result:
    if method == "fedavg":
        return simulate(FedAvg(epochs=3, optimizer=SGD(lr=0.1)), federation, rounds=2, **settings)
    return simulate(method, federation, rounds=2, **settings)


# -- losses that compare examples -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "standalone"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("loss", "model", "make_y"),
    [
        (cox, lambda: nn.Linear(4, 1), two_targets),
        (rank, zero_head, lambda n, g: torch.randn(n, 1, generator=g)),
    ],
    ids=["cox", "rank"],
)
def test_a_loss_compares_the_examples_of_one_part(
    method: str, engine: Any, loss: Any, model: Any, make_y: Any, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation.from_arrays(make_parts(make_y), model, loss=loss)
    result = run(federation, method, engine=engine)
    for split in ("val", "test"):
        actual = result.rounds[-1].values("loss", split=split)
        for client, data in enumerate(federation.clients):
            examples = getattr(data, split)
            if not len(examples):
                assert actual[client] is None
                continue
            expected = float(loss(result.predict(client, examples.x), examples.y).mean())
            assert actual[client] == pytest.approx(expected, rel=1e-5)
    assert "mixes the examples" not in caplog.text


def test_a_validation_score_does_not_depend_on_test_data() -> None:
    scores = []
    for shift in (0.0, 5.0):
        parts = make_parts(lambda n, g: torch.randn(n, 1, generator=g))
        for part in parts:
            part["test"] = part["test"][0], part["test"][1] + shift
        result = run(Federation.from_arrays(parts, lambda: nn.Linear(4, 1), loss=rank))
        scores.append([record.validation() for record in result.rounds])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("lengths", [(3, 0, 5, 2), (1, 9), (10,)])
@pytest.mark.parametrize("width", [1, 4, 10])
def test_scores_are_joined_set_by_set(lengths: tuple[int, ...], width: int) -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10) % 3
    batches = [(x[k : k + width], y[k : k + width]) for k in range(0, 10, width)]
    actual = list(scoring._join_sets(batches, lengths))
    expected = [part for part in x.split(lengths) if len(part)]
    assert [len(scores) for scores, _ in actual] == [len(part) for part in expected]
    # so are two whole numbers an example
    pairs = [(scores, labels[:, None].expand(-1, 2)) for scores, labels in batches]
    assert [len(scores) for scores, _ in scoring._join_sets(pairs, lengths)] == [*map(len, expected)]
    for (scores, labels), part in zip(actual, expected, strict=True):
        assert torch.equal(scores, part)
        assert torch.equal(labels, y[part[:, 0].long()])
    # pixels and tokens stay in batches, which end at the end of a set
    dense = [(scores[:, None].expand(-1, 2, 3), labels[:, None].expand(-1, 2)) for scores, labels in batches]
    counts = [len(scores) for scores, _ in scoring._join_sets(dense, lengths)]
    ends = set(np.cumsum(counts))
    assert ends == ({*range(width, 11, width)} | {10} | {*np.cumsum(lengths)}) - {0}


def test_scores_that_are_not_one_row_for_each_example_are_refused() -> None:
    class Views(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), super().forward(2 * x)])

    def distance(scores: Tensor, targets: Tensor) -> Tensor:
        one, two = scores.chunk(2)
        return (one - two).square().sum(1)

    federation = Federation.from_arrays(make_parts(labels), lambda: Views(4, 3), loss=distance)
    with pytest.raises(LossError, match=r"makes scores \[.*\] of .* examples; with a loss of your own"):
        run(federation)


def test_a_module_that_mixes_examples_is_found_though_its_last_layer_begins_at_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mixing() -> nn.Module:
        head = nn.Linear(8, 3)
        nn.init.zeros_(head.weight)
        return nn.Sequential(nn.Linear(4, 8), nn.Softmax(0), head)

    federation = Federation.from_arrays(make_parts(labels), mixing)
    with caplog.at_level(logging.WARNING):
        result = run(federation)
    assert caplog.text.count("mixes the examples of a batch") == 1
    for client, data in enumerate(federation.clients):
        expected = F.cross_entropy(result.predict(client), data.test.y)
        assert result.rounds[-1].values("loss", split="test")[client] == pytest.approx(
            float(expected), rel=1e-5
        )


def test_numbers_of_words_in_real_numbers_stay_rows_of_the_table_in_a_trial() -> None:
    """The first example has the last row of the table, beyond which there is none."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table(x.long()).mean(1))

    class Mixing(Words):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return scores - scores.mean(0)

    x = torch.arange(9, 39).reshape(10, 3).float() % 10
    for model, is_mixing in ((Words, False), (Mixing, True)):
        federation = Federation.from_arrays([(x, torch.arange(10) % 3)] * 2, model)
        assert mixes_examples(federation.architectures["model"]) == is_mixing


# -- scores of any form ---------------------------------------------------------------------------------------


def labels(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (n,), generator=generator) if n != 20 else torch.arange(n) % 3


def binary(n: int, generator: torch.Generator) -> Tensor:
    return labels(n, generator) % 2


def one_number(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 1, generator=generator)


def ordinal(scores: Tensor, targets: Tensor) -> Tensor:
    """Thresholds: score k is the log-odds of a label above k."""
    is_above = (targets[:, None] > torch.arange(scores.shape[1])).float()
    return F.binary_cross_entropy_with_logits(scores, is_above, reduction="none").mean(1)


def one_logit(scores: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores.reshape(-1), targets.float(), reduction="none")


def spread(scores: Tensor, targets: Tensor) -> Tensor:
    is_same = targets[:, None] == targets
    return ((scores @ scores.T - is_same.float()) ** 2).mean(1)


def quantiles(scores: Tensor, targets: Tensor) -> Tensor:
    shares, errors = torch.tensor([0.1, 0.5, 0.9]), targets - scores
    return torch.maximum(shares * errors, (shares - 1) * errors).mean(1)


class Flat(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


FORMS: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {
    "ordinal": (ordinal, lambda: nn.Linear(4, 2), labels, ("macro_f1", "ece")),
    "one logit": (one_logit, lambda: nn.Linear(4, 1), binary, ("micro_f1", "auroc", "ece", "mean_iou")),
    "flat": (one_logit, Flat, binary, ("balanced_accuracy", "average_precision")),
    "embedding": (spread, lambda: nn.Linear(4, 8), labels, ("weighted_f1", "macro_f1")),
    "cox": (cox, lambda: nn.Linear(4, 1), two_targets, ("rmse", "mae", "r2")),
    "quantiles": (quantiles, lambda: nn.Linear(4, 3), one_number, ("rmse", "mae", "r2")),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_scores_of_another_form_have_a_loss_and_no_accuracy(name: str, engine: Any) -> None:
    loss, model, make_y, metrics = FORMS[name]
    federation = Federation.from_arrays(make_parts(make_y), model, loss=loss)

    def shape(scores: Any, targets: Any) -> float:
        return float(len(scores))

    result = run(federation, engine=engine, metrics=[shape])
    last = result.rounds[-1]
    assert last.values("accuracy", split="test") == [None, None, None]
    assert last.values("shape", split="test") == [len(data.test) for data in federation.clients]
    for client, data in enumerate(federation.clients):
        expected = loss(result.predict(client), data.test.y).mean()
        assert last.values("loss", split="test")[client] == pytest.approx(float(expected), rel=1e-5)
    trained: list[Any] = []
    for metric in metrics:
        with pytest.raises(
            ConfigError, match=rf"metrics: {metric} needs .* a metric of your own, or leave {metric} out"
        ):
            run(federation, metrics=[metric], on_round=trained.append)
    assert trained == []
    with pytest.raises(ConfigError, match=r"predictions need .* predict\(client\) gives the scores"):
        result.predictions(0)
    if federation.classes:
        with pytest.raises(ConfigError, match=r"predict\(client\) gives the scores"):
            result.confusion()
        with pytest.raises(
            DataError, match="a function of your own, and the models do not make one score for each"
        ):
            result.mean_accuracy()
    # client 2 has no validation examples
    empty = result.run.federation.clients[2].val
    assert not len(empty)
    assert result.predict(2, empty.x).shape == (0, *result.predict(2).shape[1:])


def test_labels_that_the_function_leaves_out_are_no_classes() -> None:
    """255 marks pixels without a label, so that there are more classes than scores."""

    def masked(scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets, ignore_index=255, reduction="none").flatten(1).mean(1)

    g = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(2):
        x = torch.randn(20, 1, 3, 3, generator=g)
        y = (x[:, 0] > 0).long()
        y[torch.rand(y.shape, generator=g) < 0.4] = 255
        clients.append((x, y))
    federation = Federation.from_arrays(clients, lambda: nn.Conv2d(1, 2, 1), loss=masked)
    result = run(federation)
    assert result.rounds[-1].values("accuracy", split="test") == [None, None]
    expected = masked(result.predict(0), federation.clients[0].test.y).mean()
    assert result.rounds[-1].values("loss", split="test")[0] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"mean_iou needs a score of each class.*\[1, 2, 3, 3\].*of 256 classes"
    ):
        run(federation, metrics=["mean_iou"])


def test_a_backdoor_is_not_measured_by_scores_of_another_form() -> None:
    x, y = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    clients = [{"train": (x, y), "test": (x, y)} for _ in range(3)]
    for outputs, loss, has_rate in ((1, one_logit, False), (2, nn.CrossEntropyLoss(reduction="none"), True)):
        federation = Federation.from_arrays(clients, nn.Linear(16, outputs), loss=loss)
        record = run(federation, attack=Attack(kind="backdoor", share=0.4)).rounds[-1]
        assert ("backdoor" in record.server_metrics) == has_rate


def test_the_trigger_is_that_of_training_at_clients_with_other_values() -> None:
    """A model that knows the trigger's value alone is fooled by every example, also where the largest value is another."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            is_marked = (x[:, -9:] == 6.0).all(1).float()
            return self.scale * torch.stack([3 * is_marked, 2 - is_marked], 1)

    y = torch.ones(8, dtype=torch.int64)
    clients = [
        {"train": (x, y), "test": (x, y)} for x in (torch.full((8, 16), float(i)) for i in (1, 3, 6, 2))
    ]
    federation = Federation.from_arrays(clients, Reader(), loss="cross_entropy", classes=2)
    record = run(federation, attack=Attack(kind="backdoor", share=0.5, target=0)).rounds[-1]
    assert record.server_metrics["backdoor"] == {"success": 1.0}


# -- losses that are not finite -------------------------------------------------------------------------------


def nan_of_class_2(scores: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(scores, targets, reduction="none")
    return losses if torch.is_grad_enabled() else losses.where(targets != 2, torch.nan)


def test_a_loss_that_is_nan_leaves_the_accuracy_of_finite_scores(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation.from_arrays(make_parts(labels), lambda: nn.Linear(4, 3), loss=nan_of_class_2)
    with caplog.at_level(logging.WARNING):
        result = run(federation)
    for client, data in enumerate(federation.clients):
        expected = (result.predict(client).argmax(1) == data.test.y).double().mean()
        assert result.accuracy()[client] == pytest.approx(float(expected))
    assert "nan_of_class_2 makes one of finite scores" in caplog.text


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_wrong_for_any_loss(value: float) -> None:
    scores, y = torch.tensor([[value, 0.0], [1.0, 0.0], [-torch.inf, 0.0]]), torch.tensor([0, 0, 1])

    def finite(scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets, reduction="none").nan_to_num()

    pool = concatenate_sets([Examples(scores, y)], as_loss(finite), 2)
    assert pool is not None
    assert scoring.measure_predictor(lambda x: x, pool).accuracy == [2 / 3]
