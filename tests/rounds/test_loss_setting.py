"""``loss=`` in whole runs against plain PyTorch loops: data and models of every kind, engines, metrics, files, resuming."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlowrank import METHODS, SGD, Federation, Loss, simulate
from fedlowrank.core.arguments.user_code import import_named
from fedlowrank.core.errors import CheckpointError, ConfigError, DataError, LossError, TaskError
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.fml import FML
from fedlowrank.report.figures.data_figures import plot_embeddings
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.storage.run_files import read_representations

SIZES = 5, 3
LR = 0.5
WEIGHTS = (0.5, 2.0, 1.0)


class Tokens(nn.Module):
    """Scores of a few classes for each token."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(input_ids))
        return scores


class OnePixel(nn.Conv2d):
    """A score for each pixel, [b, H, W]."""

    def __init__(self) -> None:
        super().__init__(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


def clients(x: Callable[[int], Any], y: Callable[[int], Tensor], test: int = 4) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{"train": (x(n), y(n)), "test": (x(test), y(test))} for n in SIZES]


def vectors(n: int) -> Tensor:
    return torch.randn(n, 4)


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 3, 2)


def labels(n: int) -> Tensor:
    # all classes, so that weights of any test part are those of a mean
    return (torch.arange(n) + torch.randint(0, 3, ()).item()) % 3


def presences(n: int) -> Tensor:
    return torch.randint(0, 2, (n, 3))


def with_ignored(y: Callable[[int], Tensor], value: int) -> Callable[[int], Tensor]:
    def make(n: int) -> Tensor:
        made = y(n)
        made.view(-1)[0] = value
        return made

    return make


def pixel_labels(n: int) -> Tensor:
    return torch.randint(0, 3, (n, 3, 2))


def token_labels(n: int) -> Tensor:
    return torch.randint(0, 3, (n, 5))


def ids(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 6, (n, 5))}


def fourth_power(scores: Tensor, targets: Tensor) -> Tensor:
    """A loss of the user's own."""
    return (scores - F.one_hot(targets, 3)).pow(4).sum(1) / 99


linear = lambda: nn.Linear(4, 3)  # noqa: E731
weight = torch.tensor(WEIGHTS)

CASES: dict[str, tuple[Any, list[dict[str, Any]], Any, Any]] = {
    "labels, smoothed": (
        Loss("cross_entropy", label_smoothing=0.1),
        clients(vectors, labels),
        linear,
        lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1),
    ),
    "class weights": (
        Loss("cross_entropy", class_weights=WEIGHTS),
        clients(vectors, labels),
        linear,
        lambda s, y: F.cross_entropy(s, y, weight),
    ),
    "several labels": (
        "bce",
        clients(vectors, presences),
        linear,
        lambda s, y: F.binary_cross_entropy_with_logits(s, y.float()),
    ),
    "pos_weight": (
        Loss("bce", pos_weight=[3.0, 1.0, 0.5]),
        clients(vectors, presences),
        linear,
        lambda s, y: F.binary_cross_entropy_with_logits(
            s, y.float(), pos_weight=torch.tensor([3.0, 1.0, 0.5])
        ),
    ),
    "one score": (
        "bce",
        clients(vectors, lambda n: torch.arange(n) % 2),
        lambda: nn.Linear(4, 1),
        lambda s, y: F.binary_cross_entropy_with_logits(s[:, 0], y.float()),
    ),
    "segmentation": (
        Loss("cross_entropy", ignore_index=255),
        clients(images, with_ignored(pixel_labels, 255)),
        lambda: nn.Conv2d(2, 3, 1),
        lambda s, y: F.cross_entropy(s, y, ignore_index=255),
    ),
    "a score per pixel": (
        "bce",
        clients(images, lambda n: torch.rand(n, 3, 2) > 0.5),
        OnePixel,
        lambda s, y: F.binary_cross_entropy_with_logits(s, y.float()),
    ),
    "a number per pixel": ("mse", clients(images, lambda n: torch.rand(n, 3, 2)), OnePixel, F.mse_loss),
    "tokens": (
        "cross_entropy",
        clients(ids, with_ignored(token_labels, -100)),
        Tokens,
        lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
    ),
    "huber": (
        Loss("huber", delta=0.3),
        clients(vectors, lambda n: torch.randn(n, 3)),
        linear,
        lambda s, y: F.huber_loss(s, y, delta=0.3),
    ),
    "focal": ("focal", clients(vectors, labels), linear, lambda s, y: focal(s, y)),
    "a function": (fourth_power, clients(vectors, labels), linear, lambda s, y: fourth_power(s, y).mean()),
    "a module": (nn.CrossEntropyLoss(reduction="none"), clients(vectors, labels), linear, F.cross_entropy),
}


def focal(scores: Tensor, y: Tensor) -> Tensor:
    p = scores.softmax(1)[torch.arange(len(y)), y]
    return (-((1 - p) ** 2) * p.log()).mean()


def make(loss: Any, data: list[dict[str, Any]], model: Any) -> Federation:
    classes = None if loss in ("bce", "mse") or getattr(loss, "kind", "") in ("bce", "huber") else 3
    return Federation.from_arrays(data, model, loss=loss, classes=classes)


def plain_loop(
    federation: Federation, data: list[dict[str, Any]], loss: Any, rounds: int = 2
) -> tuple[Any, list[float]]:
    """FedAvg with two steps of all examples a round, and the loss on the test examples of each client."""
    architecture = federation.architectures["model"]
    weights = {n: p.clone() for n, p in architecture.initial.items()}

    def scores(p: Any, x: Any) -> Tensor:
        return (
            torch.func.functional_call(architecture.module, p, kwargs=x)
            if isinstance(x, dict)
            else torch.func.functional_call(architecture.module, p, x)
        )

    for _ in range(rounds):
        replies = []
        for part in data:
            x, y = part["train"]
            own = {n: p.clone().requires_grad_() for n, p in weights.items()}
            for _ in range(2):
                grads = torch.autograd.grad(loss(scores(own, x), y), list(own.values()))
                own = {
                    n: (p - LR * g).detach().requires_grad_()
                    for (n, p), g in zip(own.items(), grads, strict=True)
                }
            replies.append(own)
        weights = {
            n: sum(k * r[n] for k, r in zip(SIZES, replies, strict=True)) / sum(SIZES) for n in weights
        }
    return weights, [float(loss(scores(weights, p["test"][0]), p["test"][1])) for p in data]


def run(federation: Federation, **settings: Any) -> Result:
    return simulate(FedAvg(batch_size=9, epochs=2, optimizer=SGD(lr=LR)), federation, rounds=2, **settings)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_is_that_of_a_plain_loop(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, data, model, plain = CASES[name]
    federation = make(loss, data, model)
    expected, risks = plain_loop(federation, data, plain)
    for settings in (
        {"engine": "sequential"},
        {"engine": "vectorized"},
        {"engine": "sequential", "micro_batch": 2},
    ):
        with caplog.at_level("INFO", "fedlowrank"):
            result = run(federation, **settings)
        for parameter, value in result.run.state.server.items():
            torch.testing.assert_close(value, expected[parameter].detach(), rtol=1e-4, atol=1e-5)
        actual = result.rounds[-1].values("loss", split="test")
        np.testing.assert_allclose(actual, risks, rtol=1e-4)
    assert ("one client after another in 'local': the loss" in caplog.text) == (
        name in ("a function", "a module")
    )


def test_simulate_replaces_the_loss() -> None:
    data = clients(vectors, labels)
    named = run(make("focal", data, linear), engine="sequential")
    other = simulate(
        FedAvg(batch_size=9, epochs=2, optimizer=SGD(lr=LR)),
        make("auto", data, linear),
        rounds=2,
        engine="sequential",
        loss="focal",
    )
    assert named.rounds[-1].measured == other.rounds[-1].measured


def test_multi_label_metrics_are_those_of_scikit_learn() -> None:
    data = clients(vectors, presences, test=9)
    names = ["micro_f1", "macro_f1", "weighted_f1", "mean_iou", "average_precision", "auroc"]
    result = run(make("bce", data, linear), metrics=names)
    for client, part in enumerate(data):
        y = part["test"][1].numpy()
        scores = result.predict(client).numpy()
        chosen = (scores > 0).astype(int)
        expected = {
            "micro_f1": sklearn.metrics.f1_score(y, chosen, average="micro"),
            "macro_f1": sklearn.metrics.f1_score(y, chosen, average="macro", zero_division=0),
            "weighted_f1": sklearn.metrics.f1_score(y, chosen, average="weighted", zero_division=0),
            "mean_iou": sklearn.metrics.jaccard_score(y, chosen, average="macro", zero_division=0),
            "average_precision": sklearn.metrics.average_precision_score(y, scores, average="macro"),
            "auroc": sklearn.metrics.roc_auc_score(y, scores, average="macro"),
        }
        last = result.rounds[-1]
        for name, value in expected.items():
            assert last.is_evaluated
            actual = last.values(name, split="test")[client]
            assert actual == pytest.approx(value, abs=1e-5), name
        accuracy = last.values("accuracy", split="test")[client]
        assert accuracy == pytest.approx(sklearn.metrics.accuracy_score(y, chosen))
        table = result.predictions(client)
        assert table["correct"].mean() == pytest.approx(accuracy)
        np.testing.assert_array_equal(table[[f"prediction_{k}" for k in range(3)]], chosen)


def test_pixels_are_counted_one_by_one() -> None:
    data = clients(images, with_ignored(pixel_labels, 255))
    result = run(
        make(Loss("cross_entropy", ignore_index=255), data, lambda: nn.Conv2d(2, 3, 1)),
        metrics=["mean_iou", "macro_f1"],
    )
    last = result.rounds[-1]
    assert last.is_evaluated
    for client, part in enumerate(data):
        y = part["test"][1].flatten().numpy()
        chosen = result.predict(client).argmax(1).flatten().numpy()[y != 255]
        y = y[y != 255]
        assert last.values("accuracy", split="test")[client] == pytest.approx((chosen == y).mean())
        for name, function in (
            ("mean_iou", sklearn.metrics.jaccard_score),
            ("macro_f1", sklearn.metrics.f1_score),
        ):
            actual = last.values(name, split="test")[client]
            assert actual == pytest.approx(function(y, chosen, average="macro"), abs=1e-5)
    with pytest.raises(ConfigError, match="each pixel or token; predict"):
        result.predictions()


def test_a_function_of_pixels_has_their_metrics() -> None:
    def dice(scores: Tensor, y: Tensor) -> Tensor:
        p, t = scores.softmax(1), F.one_hot(y, 3).movedim(-1, 1)
        return 1 - 2 * (p * t).flatten(1).sum(1) / (p + t).flatten(1).sum(1)

    data = clients(images, pixel_labels)
    result = run(make(dice, data, lambda: nn.Conv2d(2, 3, 1)), metrics=["mean_iou"])
    y, chosen = data[0]["test"][1].numpy().ravel(), result.predict(0).argmax(1).numpy().ravel()
    last = result.rounds[-1]
    assert last.is_evaluated
    actual = last.values("mean_iou", split="test")[0]
    assert actual == pytest.approx(sklearn.metrics.jaccard_score(y, chosen, average="macro"), abs=1e-5)
    # several labels as whole numbers are labels of three places to a function
    own = lambda s, y: F.binary_cross_entropy_with_logits(s, y.float(), reduction="none").mean(1)  # noqa: E731
    federation = Federation.from_arrays(clients(vectors, presences), linear, loss=own)
    assert run(federation).rounds[-1].values("accuracy", split="test") == [None, None]
    with pytest.raises(ConfigError, match="macro_f1 needs a score of each class for each label"):
        run(federation, metrics=["macro_f1"])


def test_a_score_per_pixel_is_right_pixel_by_pixel() -> None:
    data = clients(images, lambda n: torch.rand(n, 3, 2) > 0.5)
    result = run(make("bce", data, OnePixel), metrics=["micro_f1"])
    y, chosen = data[0]["test"][1].numpy().ravel(), (result.predict(0) > 0).numpy().ravel()
    last = result.rounds[-1]
    assert last.is_evaluated
    assert last.values("accuracy", split="test")[0] == pytest.approx((y == chosen).mean())
    assert last.values("micro_f1", split="test")[0] == pytest.approx(
        sklearn.metrics.f1_score(y, chosen), abs=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        ("cross_entropy", lambda n: torch.rand(n, 3), r"'cross_entropy' needs labels.*y.argmax\(1\).*'bce'"),
        (
            "bce",
            lambda n: torch.arange(n) % 3,
            "client 0: loss 'bce' needs targets from 0 to 1, and train has a 2",
        ),
        ("next_token", labels, "'next_token' is for language models"),
        (
            Loss("focal", pos_weight=2.0),
            labels,
            "loss.pos_weight does nothing with labels: set loss.class_weights",
        ),
        (Loss("focal", class_weights=[1, 2]), lambda n: torch.rand(n, 3), "does nothing with real targets"),
        (Loss("focal", class_weights=[1, 2]), labels, "has 2 numbers, and there are 3 classes"),
        (Loss("bce", pos_weight=[1, 2]), presences, r"has 2 numbers, and the targets.*3 classes"),
        ("auto", presences, r"3 classes|2 classes at \[3\] places.*loss='bce'"),
        ("cross_entropy", lambda n: torch.full((n,), -100), "no label counts"),
        ("huber", lambda n: torch.randn(n), r"its target is \[1, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(loss: Any, y: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError, TaskError), match=message):
        Federation.from_arrays(clients(vectors, y), linear, loss=loss)


def test_labels_of_tokens_say_what_they_mean() -> None:
    data = clients(ids, token_labels)
    with pytest.raises(
        DataError, match="Set loss='cross_entropy' for the class of each token, or loss='next_token'"
    ):
        Federation.from_arrays(data, Tokens)
    own = [{part: (x, x["input_ids"]) for part, (x, _) in client.items()} for client in data]
    with pytest.raises(ConfigError, match="the labels are the tokens themselves"):
        Federation.from_arrays(own, Tokens, loss="cross_entropy")


def test_a_mean_accuracy_of_a_model_that_predicts_tokens_names_the_loss() -> None:
    data = [{part: (x, x["input_ids"]) for part, (x, _) in client.items()} for client in clients(ids, labels)]
    federation = Federation.from_arrays(data, lambda: Tokens(6), loss="next_token")
    result = simulate("fedavg", federation, rounds=1)
    assert result.accuracy() == [None, None]
    with pytest.raises(
        DataError, match=r"no mean accuracy, because these models are judged by their loss.*to_frame"
    ):
        result.mean_accuracy()
    with pytest.raises(DataError, match=r"no client has examples in the split 'val'"):
        result.mean_accuracy("val")
    assert result.to_frame(last=True).query("split == 'test'")["loss"].notna().all()


def test_a_model_that_ends_in_a_sigmoid_gets_a_remark() -> None:
    with pytest.warns(
        UserWarning, match="ends in a sigmoid.*binary cross-entropy, which applies a sigmoid itself"
    ):
        make("bce", clients(vectors, presences), lambda: nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()))


@pytest.mark.parametrize("name", [n for n, method in METHODS.items() if method.needs_classes])
def test_methods_of_classes_say_why_they_refuse(name: str) -> None:
    several = make("bce", clients(vectors, presences), linear)
    pixels = make("cross_entropy", clients(images, pixel_labels), lambda: nn.Conv2d(2, 3, 1))
    ignored = make("cross_entropy", clients(vectors, with_ignored(labels, -100)), linear)
    for federation, message in (
        (several, "works on classes and cannot learn a task without them"),
        (pixels, "one class for each example, and these data have labels of pixels"),
        (ignored, "client 0 has examples with the label -100"),
    ):
        with pytest.raises(TaskError, match=message):
            simulate(name, federation, rounds=1)


@pytest.mark.parametrize(
    "method",
    [FD(), FML(), FedKD(), FedRoD(), FedProto(inference="nearest"), FedProto(inference="nearest_own")],
    ids=["fd", "fml", "fedkd", "fedrod", "fedproto nearest", "fedproto nearest_own"],
)
def test_methods_that_exchange_class_scores_refuse_fewer_scores_than_classes(method: Any) -> None:
    def ordinal(scores: Tensor, y: Tensor) -> Tensor:
        is_above = (y[:, None] > torch.arange(scores.shape[1])).float()
        return F.binary_cross_entropy_with_logits(scores, is_above, reduction="none").mean(1)

    def two_layers(outputs: int) -> nn.Module:
        return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), head=nn.Linear(5, outputs)))

    data = clients(vectors, labels)
    fits, lacks = (
        Federation.from_arrays(data, two_layers(n), loss=loss, head="head")
        for n, loss in ((3, fourth_power), (2, ordinal))
    )
    simulate(method, fits, rounds=1)
    message = rf"{method.title} needs one score for each class, and model model makes \[1, 2\].*3 classes"
    with pytest.raises(TaskError, match=message):
        simulate(method, lacks, rounds=1)
    # prototypes by label need no class scores
    assert simulate("fedproto", lacks, rounds=1).accuracy() == [None, None]


def test_smoothed_labels_and_missing_classes_do_not_meet() -> None:
    data = clients(vectors, labels)
    with pytest.raises(TaskError, match=r"FedRoD.*label smoothing"):
        simulate(
            "fedrod",
            Federation.from_arrays(data, linear, loss=Loss("cross_entropy", label_smoothing=0.1)),
            rounds=1,
        )


def test_engines_say_that_a_function_is_not_batched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fedlowrank"):
        run(make(fourth_power, clients(vectors, labels), linear), engine="vectorized")
    assert "one client after another in 'local': the loss" in caplog.text
    assert "fourth_power is code of your own" in caplog.text


def test_a_wrong_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LossError, match=r"gave a tensor \[\] for .* examples"):
        run(make(F.cross_entropy, clients(vectors, labels), linear))


def test_a_run_goes_on_with_its_own_loss_alone(tmp_path: Path) -> None:
    data = clients(vectors, labels)
    power = 4

    def own(scores: Tensor, targets: Tensor) -> Tensor:
        return (scores - F.one_hot(targets, 3)).abs().pow(power).sum(1)

    def go(loss: Any, rounds: int, **more: Any) -> Result:
        return simulate("fedavg", make(loss, data, linear), rounds=rounds, folder=tmp_path / "run", **more)

    go(own, 1)
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["loss"]
    assert stored["kind"].endswith(":test_a_run_goes_on_with_its_own_loss_alone.<locals>.own")
    go(own, 2, resume=True)
    power = 2
    with pytest.raises(CheckpointError, match=r"loss\.code was"):
        go(own, 3, resume=True)
    with pytest.raises(CheckpointError, match="loss"):
        go("focal", 3, resume=True)


def test_a_function_is_named_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlowrank.config.experiment import ExperimentConfig

    (tmp_path / "own_losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def twice(scores, targets):\n    return 2 * cross_entropy(scores, targets, reduction='none')\n"
    )
    monkeypatch.chdir(tmp_path)
    experiment = ExperimentConfig.parse({"loss": "own_losses:twice", "data": {"source": "digits"}})
    assert experiment.code == ("own_losses:twice",)
    assert experiment.to_dict()["loss"] == {"kind": "own_losses:twice"}
    federation = experiment.federation()
    assert federation.loss.function is import_named("own_losses:twice", "loss")
    with pytest.raises(ConfigError, match="own_losses:twice, which would be imported"):
        ExperimentConfig.parse(experiment.to_dict(), allow_code=False)
    table = ExperimentConfig.parse({"loss": {"kind": "focal", "gamma": 1.0}})
    assert table.loss == Loss("focal", gamma=1.0)
    # a grid may change the kind of a loss with options
    assert table.overlay({"loss": {"kind": "cross_entropy"}}).loss == Loss("cross_entropy")
    with pytest.raises(ConfigError, match=r"loss\.gamma = 1\.0 does nothing"):
        ExperimentConfig.parse({"loss": {"gamma": 1.0}})


@pytest.mark.full
def test_padding_has_no_infinite_loss() -> None:
    # client 1 has fewer examples and lacks class 0, whose score FedRoD makes -∞
    data = [(torch.randn(9, 4), torch.arange(9) % 3), (torch.randn(5, 4), 1 + torch.arange(5) % 2)]
    model = lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))  # noqa: E731
    method = METHODS["fedrod"](batch_size=4, optimizer=SGD(lr=0.1))
    one, other = (
        simulate(
            method,
            Federation.from_arrays(data, model, head="1", loss="focal", classes=3, val=0, test=0),
            rounds=1,
            engine=engine,
        )
        for engine in ("sequential", "vectorized")
    )
    for name, value in one.run.state.server.items():
        torch.testing.assert_close(other.run.state.server[name], value)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_real_targets_have_no_embedding_plot(loss: str, tmp_path: Path) -> None:
    model = lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))  # noqa: E731
    data = clients(vectors, lambda n: presences(n).float())
    simulate(
        "fedavg", Federation.from_arrays(data, model, head="1", loss=loss), rounds=1, folder=tmp_path / "run"
    )
    stored = RunRecord.load(tmp_path / "run")
    actual = read_representations(stored.folder)
    assert actual is not None
    assert (actual["label"].shape, actual["client"].tolist()) == ((8, 3), [0] * 4 + [1] * 4)
    group: Any = SimpleNamespace(first=stored)
    assert plot_embeddings([group]) == []


class Margin(nn.Module):
    """A loss with a class center and a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers, self.temperature = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        cosines = F.normalize(scores) @ F.normalize(self.centers).T
        return F.cross_entropy(cosines * self.temperature, targets, reduction="none")


def test_a_loss_with_trainable_parameters_is_refused_and_a_frozen_one_is_not() -> None:
    margin = Margin()
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, torch.arange(12) % 3)] * 2
    model = nn.Linear(4, 8)
    losses: list[Any] = [margin, lambda scores, y: margin(scores, y), margin.forward]
    for loss in losses:
        with pytest.raises(ConfigError, match=r"trainable parameters of its own.*requires_grad_\(False\)"):
            Federation.from_arrays(data, model, loss=loss)
    margin.requires_grad_(False)
    state, before = torch.get_rng_state(), margin.centers.clone()
    federation = Federation.from_arrays([{"train": pair, "test": pair} for pair in data], model, loss=margin)
    record = simulate("fedavg", federation, rounds=1).rounds[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(margin.centers, before)
    with torch.no_grad():
        expected = float(margin(model(x), data[0][1]).mean())
    assert record.mean("loss", split="test") == pytest.approx(expected, rel=1e-5)


def test_an_own_loss_beyond_its_scores_says_that_labels_are_as_they_were_given() -> None:
    def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets, reduction="none")

    data = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), 1 + torch.arange(6) % 3)] * 2
    with pytest.raises(IndexError) as error:
        simulate("fedavg", Federation.from_arrays(data, nn.Linear(4, 3), loss=cross_entropy), rounds=1)
    assert "it gets labels as they were given, and scores [" in error.value.__notes__[0]
