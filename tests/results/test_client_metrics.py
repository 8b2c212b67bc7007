"""Further metrics of every client against scikit-learn and plain NumPy, in every engine, over a resume and from the file."""

from __future__ import annotations

import gzip
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import sklearn.metrics
import torch
from torch import nn

from fedlowrank import EarlyStopping, Federation, Loss, simulate
from fedlowrank.core.errors import ConfigError
from fedlowrank.data.dataset import Examples
from fedlowrank.report import compare_runs
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.results.client_metrics import METRICS as NAMES
from fedlowrank.results.client_metrics import choose_metrics, compute_metric, log_odds
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.run import Run
from fedlowrank.storage.run_files import RECORDS_FILE
from tests.results.labeled_clients import CLASSES, make_labeled_federation
from tests.support.client_tables import read_tables

torch.set_num_threads(1)

NAMED = [
    "macro_f1", "weighted_f1", "balanced_accuracy", "auroc", "average_precision", "top3", "top5", "ece"
]  # fmt: skip


def own_scores(run: Run, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and labels of every client, by calling its model plainly."""
    module = run.federation.architectures["model"].module
    actual = []
    for info, data in zip(run.federation.infos, run.federation.clients, strict=True):
        part = getattr(data, split)
        with torch.no_grad():
            scores = torch.func.functional_call(module, run.personal_params(info), (part.x,))
        actual.append((scores.double().numpy(), part.y.numpy()))
    return actual


def check(
    record: RoundRecord, name: str, split: str, expected: list[float | None], rel: float = 1e-5
) -> None:
    """Assert the values of a metric, which records hold to six digits."""
    assert record.is_evaluated
    actual = record.values(name, series="personal", split=split)
    assert [v is None for v in actual] == [v is None for v in expected], name
    for value, right in zip(actual, expected, strict=True):
        assert value == (None if right is None else pytest.approx(right, rel=rel, abs=1e-6)), name


def probabilities(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def one_versus_rest(of: Callable[[Any, Any], float], s: np.ndarray, y: np.ndarray) -> float | None:
    present = sorted(set(y.tolist()))
    p = probabilities(s)
    return None if len(present) < 2 else sum(of(y == c, p[:, c]) for c in present) / len(present)


def pairs(positive: np.ndarray, p: np.ndarray) -> float:
    """AUROC as the share of pairs in the right order (Mann and Whitney)."""
    a, b = p[positive][:, None], p[~positive][None]
    return float(((a > b) + 0.5 * (a == b)).mean())


def calibration(s: np.ndarray, y: np.ndarray) -> float:
    p, total = probabilities(s), 0.0
    for k in range(15):
        mine = (p.max(1) > k / 15) & (p.max(1) <= (k + 1) / 15)
        if mine.any():
            gap = (s.argmax(1) == y)[mine].mean() - p.max(1)[mine].mean()
            total += abs(gap) * mine.mean()
    return total


def accuracy_in_top(k: int, s: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean([label in np.argsort(-row)[:k] for row, label in zip(s, y, strict=True)]))


EXPECTED: dict[str, Callable[[np.ndarray, np.ndarray], float | None]] = {
    "macro_f1": lambda s, y: float(sklearn.metrics.f1_score(y, s.argmax(1), average="macro")),
    "weighted_f1": lambda s, y: float(sklearn.metrics.f1_score(y, s.argmax(1), average="weighted")),
    "balanced_accuracy": lambda s, y: float(
        np.mean([(s.argmax(1)[y == c] == c).mean() for c in set(y.tolist())])
    ),
    "auroc": lambda s, y: one_versus_rest(pairs, s, y),
    "average_precision": lambda s, y: one_versus_rest(sklearn.metrics.average_precision_score, s, y),
    "top3": lambda s, y: accuracy_in_top(3, s, y),
    "top5": lambda s, y: accuracy_in_top(5, s, y),
    "ece": calibration,
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
@pytest.mark.parametrize("method", ["fedavg", "standalone"])
def test_values_by_hand(engine: str, method: str) -> None:
    result = simulate(method, make_labeled_federation(), rounds=2, engine=engine, metrics=NAMED)
    assert result.rounds[-1].is_evaluated
    assert result.rounds[-1].measured.metrics == NAMED
    for split in ("val", "test"):
        clients = own_scores(result.run, split)
        assert [len(y) for _, y in clients].count(0) == (split == "test")
        for name, of in EXPECTED.items():
            check(result.rounds[-1], name, split, [of(s, y) if len(y) else None for s, y in clients])
    if engine == "processes":
        plain = simulate(method, make_labeled_federation(), rounds=2, engine="sequential", metrics=NAMED)
        assert [r.untimed() for r in result.rounds] == [r.untimed() for r in plain.rounds]


def test_balanced_accuracy_and_auroc_are_scikit_learn_s_where_all_classes_are_present() -> None:
    result = simulate("fedavg", make_labeled_federation(), rounds=1, metrics=["balanced_accuracy", "auroc"])
    s, y = own_scores(result.run, "val")[0]
    assert len({*y.tolist()}) == CLASSES
    actual = read_tables(result.rounds[-1].measured)
    balanced = sklearn.metrics.balanced_accuracy_score(y, s.argmax(1))
    assert actual["balanced_accuracy"]["personal"]["val"][0] == pytest.approx(balanced, rel=1e-5)
    area = sklearn.metrics.roc_auc_score(y, probabilities(s), multi_class="ovr")
    assert actual["auroc"]["personal"]["val"][0] == pytest.approx(area, rel=1e-5)


def test_regression() -> None:
    result = simulate("fedavg", make_labeled_federation(2), rounds=2, metrics=["rmse", "mae", "r2"])
    clients = own_scores(result.run, "test")
    for name, of in (
        ("rmse", lambda s, y: math.sqrt(sklearn.metrics.mean_squared_error(y, s))),
        ("mae", lambda s, y: float(sklearn.metrics.mean_absolute_error(y, s))),
        ("r2", lambda s, y: float(sklearn.metrics.r2_score(y, s))),
    ):
        check(result.rounds[-1], name, "test", [of(s, y) if len(y) else None for s, y in clients], rel=1e-4)


def test_nothing_is_measured_unless_asked_for() -> None:
    record = simulate("fedavg", make_labeled_federation(), rounds=1).rounds[-1]
    assert record.measured is not None
    assert record.measured.metrics == []


def test_a_subset_of_clients_a_resume_and_the_file(tmp_path: Path) -> None:
    how: dict[str, Any] = {"metrics": ["ece", "auroc"], "evaluate_clients": 3, "evaluate_every": 1}
    whole = simulate("fedavg", make_labeled_federation(), rounds=4, **how)
    simulate("fedavg", make_labeled_federation(), rounds=2, folder=tmp_path / "run", **how)
    resumed = simulate(
        "fedavg", make_labeled_federation(), rounds=4, folder=tmp_path / "run", resume=True, **how
    )
    assert [r.untimed() for r in resumed.rounds] == [r.untimed() for r in whole.rounds]
    assert [r.untimed() for r in RunRecord.load(tmp_path / "run").rounds] == [
        r.untimed() for r in whole.rounds
    ]
    assert whole.rounds[-1].measured is not None
    evaluated = whole.rounds[-1].measured.client_ids
    (*_, line) = gzip.decompress((tmp_path / "run" / RECORDS_FILE).read_bytes()).splitlines()
    (stored,) = (
        c["values"]
        for c in json.loads(line)["measured"]["columns"]
        if (c["name"], c["series"], c["split"]) == ("ece", "personal", "test")
    )
    assert len(stored) == len(evaluated) == 3
    expected = [calibration(s, y) if len(y) else None for s, y in own_scores(whole.run, "test")]
    check(whole.rounds[-1], "ece", "test", [expected[i] for i in evaluated])
    assert stored == whole.rounds[-1].values("ece", series="personal", split="test")


def test_more_metrics_in_a_resumed_run(tmp_path: Path) -> None:
    simulate("fedavg", make_labeled_federation(), rounds=1, folder=tmp_path / "run")
    more = simulate(
        "fedavg", make_labeled_federation(), rounds=2, folder=tmp_path / "run", resume=True, metrics=["ece"]
    )
    assert [r.values("ece") == [] for r in more.rounds] == [True, True, False]


OWN = """
import numpy as np

def largest_label(scores, labels):
    assert scores.dtype == np.float64 and scores.shape == (len(labels), 7)
    assert labels.dtype == np.int64 and len(labels)
    return labels.max() if labels.max() else None

def not_a_number(scores, labels):
    return np.float64("nan")

def fails(scores, labels):
    return 1 / 0

def a_list(scores, labels):
    return [1, 2]

number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_measures.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_measures", raising=False)
    return "own_measures"


def test_a_function_of_the_user_s(own: str) -> None:
    names = [f"{own}:largest_label", f"{own}:not_a_number"]
    result = simulate("fedavg", make_labeled_federation(), rounds=1, metrics=names)
    labels = [y for _, y in own_scores(result.run, "test")]
    largest = [int(y.max()) or None if len(y) else None for y in labels]
    assert largest[2:4] == [None, None]
    check(result.rounds[-1], names[0], "test", [None if v is None else float(v) for v in largest])
    missing = result.rounds[-1].values(names[1])
    assert [v if v is None else math.isnan(v) for v in missing] == [True, True, True, None, True, True]


@pytest.mark.parametrize(
    ("names", "targets", "says"),
    [
        ("macro_f1", 0, r"a list is needed, such as \['macro_f1'\]"),
        (["macro_f"], 0, "Did you mean 'macro_f1'"),
        (["loss"], 0, "loss is always measured"),
        (["ece", "ece"], 0, "'ece' twice"),
        (["auroc"], 1, "auroc is a metric of a classification, and these data are a regression"),
        (["rmse"], 0, "rmse is a metric of a regression.*macro_f1"),
        (["own_measures:absent"], 0, "'own_measures:absent' cannot be imported"),
        (["own_measures:number"], 0, "is a int and not a function"),
        (["own_measures:fails"], 0, r"'own_measures:fails'.*scores \[20, 7\].*ZeroDivisionError"),
        (["own_measures:a_list"], 0, "must return a number or None"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_does_not_fit_is_refused_before_training(names: Any, targets: int, says: str) -> None:
    trained: list[RoundRecord] = []
    with pytest.raises(ConfigError, match=says):
        simulate("fedavg", make_labeled_federation(targets), rounds=1, metrics=names, on_round=trained.append)
    assert trained == []


def test_language_models_that_predict_tokens_take_no_metrics() -> None:
    examples = Examples({"input_ids": torch.zeros(2, 5).long()}, torch.zeros(2, 5).long())
    with pytest.raises(ConfigError, match="Loss and token_accuracy are always measured"):
        choose_metrics(["macro_f1"], examples, 0, Loss("next_token"))


def test_top5_of_few_classes_is_refused() -> None:
    x = torch.zeros(20, 2)
    made = Federation.from_arrays([(x, torch.arange(20) % 5)], lambda: nn.Linear(2, 5))
    with pytest.raises(ConfigError, match="top5 needs more than 5 classes, and these data have 5"):
        simulate("fedavg", made, rounds=1, metrics=["top5"])


def test_scores_of_a_model_that_diverged_make_no_number() -> None:
    for bad in (math.nan, math.inf):
        scores = np.eye(CLASSES)
        scores[3, 2] = bad
        for name in NAMED:
            assert math.isnan(compute_metric(name, NAMES[name], scores, np.arange(CLASSES)) or 0)
        scores[3] = -math.inf
        assert math.isnan(compute_metric("ece", NAMES["ece"], scores, np.arange(CLASSES)) or 0)
    # a probability of zero is none of them
    scores = np.where(np.eye(CLASSES) > 0, 0.0, -math.inf)
    assert compute_metric("auroc", NAMES["auroc"], scores, np.arange(CLASSES)) == 1


Pair = tuple[np.ndarray, np.ndarray]


def odds(s: np.ndarray) -> np.ndarray:
    """Log-odds of each class against the others, column by column."""
    others = [scipy.special.logsumexp(np.delete(s, c, axis=1), axis=1) for c in range(s.shape[1])]
    return s - np.stack(others, axis=1)


def cases() -> dict[str, Pair]:
    """Scores and labels: usual ones, ties, saturated probabilities, storage types, classes without examples."""
    random = np.random.default_rng(0)
    y = random.integers(0, 5, 60)
    usual = random.normal(size=(60, 5)) + np.eye(5)[y]
    two = random.integers(0, 2, 40)
    close = random.normal(size=(40, 2)) + np.eye(2)[two]
    actual = {
        "usual": (usual, y),
        "ties": (random.integers(0, 3, (60, 5)).astype(float), y),
        "constant": (np.zeros((60, 5)), y),
        "gaps of 40": (40 * usual, y),
        "gaps of 750": (750 * usual, y),
        "offset": (usual + 1e6 * random.normal(size=(60, 1)), y),
        "absent classes": (usual, y % 2 + 1),
        "two classes": (close, two),
        "two classes, gaps of 750": (750 * close, two),
        "two classes, ties": (np.round(close), two),
    }
    for type_ in (torch.bfloat16, torch.float16):
        stored = (torch.from_numpy(40 * usual).to(type_).double().numpy(), y)
        actual[str(type_).removeprefix("torch.")] = stored
    return actual


def mean_over_present(of: Callable[[Any, Any], float], s: np.ndarray, y: np.ndarray) -> float:
    if s.shape[1] == 2:
        return of(y, s[:, 1] - s[:, 0])
    return float(np.mean([of(y == c, odds(s)[:, c]) for c in set(y.tolist())]))


OF_SCIKIT_LEARN: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "macro_f1": lambda s, y: sklearn.metrics.f1_score(y, s.argmax(1), average="macro"),
    "weighted_f1": lambda s, y: sklearn.metrics.f1_score(y, s.argmax(1), average="weighted"),
    "balanced_accuracy": lambda s, y: sklearn.metrics.balanced_accuracy_score(y, s.argmax(1)),
    "auroc": lambda s, y: mean_over_present(sklearn.metrics.roc_auc_score, s, y),
    "average_precision": lambda s, y: mean_over_present(sklearn.metrics.average_precision_score, s, y),
    "top3": lambda s, y: sklearn.metrics.top_k_accuracy_score(y, s, k=3, labels=range(s.shape[1])),
}


@pytest.mark.few(24)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning")
@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", OF_SCIKIT_LEARN)
def test_metrics_are_those_of_scikit_learn(name: str, case: str) -> None:
    s, y = cases()[case]
    if name == "top3" and s.shape[1] == 2:
        return
    assert compute_metric(name, NAMES[name], s, y) == pytest.approx(OF_SCIKIT_LEARN[name](s, y), rel=1e-12)


@pytest.mark.parametrize("gap", [1.0, 10.0])
def test_auroc_ranks_beyond_the_rounding_of_probabilities(gap: float) -> None:
    s, y = gap * np.array([[0, 40.0], [0, 50], [0, 38], [0, 60]]), np.array([0, 1, 0, 1])
    # likewise of three classes, one of which no model takes for possible
    for scores in (s, np.column_stack([s, [-1e3] * 4])):
        for name in ("auroc", "average_precision"):
            assert compute_metric(name, NAMES[name], scores, y) == 1.0


def test_equal_scores_in_another_order_are_a_tie() -> None:
    random = np.random.default_rng(1)
    row = random.normal(size=9)
    # the score of class 0 stays, the others change places
    s = np.stack([np.append(row[0], random.permutation(row[1:])) for _ in range(40)])
    y = np.arange(40) % 2
    of_class_0 = log_odds(s)[:, 0]
    assert np.ptp(of_class_0) == 0
    assert of_class_0[0] == pytest.approx(odds(s)[0, 0], rel=1e-12)
    scores = np.stack([row, row])
    assert compute_metric("average_precision", NAMES["average_precision"], scores, np.array([0, 1])) == 0.5
    assert compute_metric("auroc", NAMES["auroc"], s[:, [0, 1, 2]] * 0, y) == 0.5


def test_one_class_and_no_example_have_no_ranking() -> None:
    for name in ("auroc", "average_precision"):
        for width in (2, 4):
            for label in (0, 1):
                assert compute_metric(name, NAMES[name], np.eye(width), np.full(width, label)) is None
            assert compute_metric(name, NAMES[name], np.zeros((0, width)), np.zeros(0, int)) is None


def test_top3_counts_ties_as_scikit_learn_and_not_for_the_model() -> None:
    s, y = np.zeros((12, 6)), np.arange(12) % 6
    assert compute_metric("top3", NAMES["top3"], s, y) == pytest.approx(3 / 6)


def worst_recall(scores: np.ndarray, targets: np.ndarray) -> float | None:
    """The recall of the class that is recognized worst, by scikit-learn."""
    if not len(np.unique(targets)) > 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            sklearn.metrics.recall_score(
                targets, scores.argmax(1), average=None, labels=np.unique(targets)
            ).min()
        )


class Above:
    """The share of outputs above a bound; a callable object."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def __call__(self, scores: np.ndarray, targets: np.ndarray) -> float:
        return float((scores.max(1) > self.bound).mean())


def test_functions_are_metrics(tmp_path: Path) -> None:
    actual = simulate(
        "fedavg",
        make_labeled_federation(),
        rounds=2,
        metrics=["macro_f1", worst_recall, Above(0.5)],
        folder=tmp_path / "r",
    )
    assert actual.rounds[-1].measured.metrics == ["macro_f1", "worst_recall", "Above"]
    for split in ("val", "test"):
        for name, metric in (("worst_recall", worst_recall), ("Above", Above(0.5))):
            got = actual.rounds[-1].values(name, series="personal", split=split)
            expected = [metric(*both) if len(both[1]) else None for both in own_scores(actual.run, split)]
            assert [a is None for a in got] == [b is None for b in expected]
            assert [a for a in got if a is not None] == pytest.approx(
                [b for b in expected if b is not None], rel=1e-5
            )
    assert {"worst_recall", "Above"} <= {*actual.to_frame()}
    table = compare_runs([RunRecord.load(tmp_path / "r")])
    assert [c.title for c in table.result_tables["metrics"].columns] == ["macro F1", "worst recall", "Above"]
    assert "metric_worst_recall" in to_csv(table)
    more = simulate(
        "fedavg",
        make_labeled_federation(),
        rounds=3,
        metrics=[worst_recall],
        folder=tmp_path / "r",
        resume=True,
    )
    assert more.rounds[-1].measured.metrics == ["worst_recall"]


def f1_macro(scores: Any, targets: Any) -> float:
    return 0.0


def failing(scores: Any, targets: Any) -> float:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (worst_recall, r"metrics is a list, such as \[worst_recall\]"),
        ([lambda scores, targets: 0.0], "has no name for tables; define it by def NAME"),
        ([Above], r"Above is a class; pass an object of it, such as Above\(\)"),
        ([f1_macro, f1_macro], "'f1_macro' as another one"),
        ([type("accuracy", (Above,), {})(0.5)], "'accuracy' as something else"),
        ([type("client", (Above,), {})(0.5)], "'client' as something else"),
        ([failing], "'failing' must return a number or None, and failed on scores .* no such thing"),
        ([worst_recall, 3], "value 0: input should be a valid string"),
    ],
)
def test_functions_that_are_no_metrics(metrics: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate("fedavg", make_labeled_federation(), rounds=1, metrics=metrics)


@pytest.mark.few(1)
@pytest.mark.parametrize(("lower_is_better", "stops"), [(False, 1), (True, 8)])
def test_early_stopping_by_a_metric(lower_is_better: bool, stops: int) -> None:
    rounds = iter(range(1000))

    def falling(scores: Any, targets: Any) -> float:
        return -float(next(rounds))

    actual = simulate(
        "fedavg", make_labeled_federation(), rounds=8, metrics=[falling], evaluate_every=1,
        on_round=EarlyStopping(1, metric="falling", lower_is_better=lower_is_better),
    )  # fmt: skip
    assert actual.rounds[-1].round == stops
    with pytest.raises(ConfigError, match="measures no metric and not 'falling'"):
        simulate("fedavg", make_labeled_federation(), rounds=1, on_round=EarlyStopping(1, metric="falling"))
