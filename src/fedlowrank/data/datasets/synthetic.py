"""Synthetic data with known ground truth: FLoRAL's regressions, and a linear classifier of a chosen rank.

The regressions have a common weight with a low-rank update per cluster. Source: Almansoori et al. (FLoRAL),
Appendices G.1 and G.2. The paper draws every parameter from N(0, 1/√d_in), where d_in is the input dimension of the
layer, and does not say whether 1/√d_in is the variance or the standard deviation; here it is the standard deviation
(the usual initialization). d_in is ``inputs`` for W, U and V, which make up one layer, and ``hidden`` for Φ. Clients
are natural ones: use partition ``natural``, split ``own_test`` with val = 0, concept ``natural`` with as many
clusters, and data.normalize = "none", since x is standard normal and y is a function of x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.shares import multiply_share, round_half_up
from ...core.errors import ConfigError
from ...core.key import Key
from ..dataset import Dataset, Examples
from ..partitioning.checks import check_positive

TargetFunction: TypeAlias = Callable[[Tensor, int], Tensor]
"""Function from inputs [n, inputs] and a cluster to targets [n, outputs], both float64."""


@dataclass(frozen=True)
class Synthetic(CheckedFields):
    """A regression without noise, with x ~ N(0, I), in which client k belongs to cluster c = k mod C.

    Attributes:
        clients: number K of natural clients, at least 1.
        clusters: number C of clusters, from 1 to the number of clients.
        inputs: width of x.
        outputs: width of y.
        rank: rank of the update of each cluster.
        alpha: factor α of the updates, above 0.
        share: number of training examples of a client as a share of d, above 0.
        test: number of test examples of each client, at least 1.
        seed: seed of all draws, so that the data do not depend on the seed of the run; ``"run"`` uses the seed of the
            run.
    """

    clients: int = 10
    clusters: int = 2
    inputs: int = 10
    outputs: int = 3
    rank: int = 1
    alpha: float = 2.0
    share: float = 0.25
    test: int = 1000
    seed: int | Literal["run"] = 0

    def __post_init__(self) -> None:
        for name in ("clients", "clusters", "inputs", "outputs", "rank", "test"):
            check_minimum(f"data.{name}", getattr(self, name), 1)
        check_positive("data.alpha", self.alpha)
        check_positive("data.share", self.share)
        if self.clusters > self.clients:
            raise ConfigError(f"data.clusters is {self.clusters}, but there are only {self.clients} clients.")


@dataclass(frozen=True)
class SyntheticLinear(Synthetic):
    """Linear regressions y = (W + α U_c V_cᵀ) x, where x ~ N(0, I) and client k is of cluster c = k mod C.

    Each client has N = share·d training examples (rounded, half up), where d = outputs·inputs is the size of W: too
    few to find W alone, enough together. There is no noise.
    """

    def load(self) -> Dataset:
        """Draw the examples of all clients, x [n, inputs] and y [n, outputs]."""
        key = _make_key("synthetic_linear", self.seed)
        weights = _draw_weights(self, self.outputs, key)
        size = self.outputs * self.inputs
        return _draw_dataset(self, "synthetic_linear", size, lambda x, c: x @ weights[c].T, key)


@dataclass(frozen=True)
class SyntheticMLP(Synthetic):
    """Regressions y = Φ relu((W + α U_c V_cᵀ) x), where x ~ N(0, I) and client k is of cluster c = k mod C.

    Each client has N = share·d training examples (rounded, half up), where d = hidden·inputs is the size of W, the
    layer in which clusters differ. The paper's models are twice as wide as this target, model.hidden = [20]. There is
    no noise.

    Attributes:
        alpha: factor α of the updates, above 0; eq. 44 of the paper has no factor, which is α = 1.
        hidden: width of the target's hidden layer.
    """

    clients: int = 20
    clusters: int = 4
    outputs: int = 1
    share: float = 0.5
    hidden: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("data.hidden", self.hidden, 1)

    def load(self) -> Dataset:
        """Draw the examples of all clients, x [n, inputs] and y [n, outputs]."""
        key = _make_key("synthetic_mlp", self.seed)
        weights = _draw_weights(self, self.hidden, key)
        top_weight = _draw_normal(key / "phi", self.outputs, self.hidden) / self.hidden**0.5
        size = self.hidden * self.inputs
        return _draw_dataset(
            self, "synthetic_mlp", size, lambda x, c: (x @ weights[c].T).relu() @ top_weight.T, key
        )


@dataclass(frozen=True)
class LowRankTeacher(CheckedFields):
    """Classes y = argmax W x with x ~ N(0, I), where W has rank R and equal singular values.

    A linear model that starts at W = 0 needs W up to a positive scale and a row vector that all classes share, so an
    update of rank R - 1 or more: clients whose LoRA rank is below that cannot represent it. With rank 1 only two of the classes
    occur, because the sign of one direction of x decides. There is no noise, so the best accuracy is 1. The data have one
    training and one test part, which any partition and split may divide.

    Attributes:
        inputs: width of x.
        classes: number of classes, at least 2.
        rank: rank R of W, at most the smaller of ``inputs`` and ``classes``.
        examples: number of training examples, at least 1.
        test: number of test examples, at least 1.
        seed: seed of all draws; ``"run"`` uses the seed of the run, so that every run has its own teacher.
    """

    inputs: int = 64
    classes: int = 32
    rank: int = 8
    examples: int = 10_000
    test: int = 1000
    seed: int | Literal["run"] = 0

    def __post_init__(self) -> None:
        for name, minimum in (("inputs", 1), ("classes", 2), ("rank", 1), ("examples", 1), ("test", 1)):
            check_minimum(f"data.{name}", getattr(self, name), minimum)
        if self.rank > min(self.inputs, self.classes):
            raise ConfigError(
                f"data.rank is {self.rank}, but a matrix of {self.classes} × {self.inputs} has at most rank "
                f"{min(self.inputs, self.classes)}."
            )

    def load(self) -> Dataset:
        """Draw the examples, x [n, inputs] and y [n] of int64."""
        key = _make_key("low_rank_teacher", self.seed)
        left_vectors, right_vectors = (
            torch.linalg.qr(_draw_normal(key / name, size, self.rank))[0]
            for name, size in (("U", self.classes), ("V", self.inputs))
        )

        def draw(part: str, count: int) -> Examples:
            x = _draw_normal(key / part, count, self.inputs)
            return Examples(x.float(), (x @ right_vectors @ left_vectors.T).argmax(1))

        classes = tuple(map(str, range(self.classes)))
        return Dataset("low_rank_teacher", draw("train", self.examples), draw("test", self.test), classes)


def _make_key(name: str, seed: int | Literal["run"]) -> Key:
    """Root key of a source's draws."""
    if seed == "run":
        raise ConfigError('data.seed is "run", but there is no run. Give a number.')
    return Key((name, seed))


def _draw_weights(source: Synthetic, outputs: int, key: Key) -> list[Tensor]:
    """Draw the first layer of each cluster, [outputs, inputs]."""
    scale = source.inputs**-0.5
    common_weight = _draw_normal(key / "W", outputs, source.inputs) * scale
    weights = []
    for c in range(source.clusters):
        u = _draw_normal(key / "U" / c, outputs, source.rank) * scale
        v = _draw_normal(key / "V" / c, source.inputs, source.rank) * scale
        weights.append(common_weight + source.alpha * u @ v.T)
    return weights


def _draw_dataset(source: Synthetic, name: str, size: int, target: TargetFunction, key: Key) -> Dataset:
    parts = []
    for part, n in (
        ("train", max(1, round_half_up(multiply_share(source.share, size)))),
        ("test", source.test),
    ):
        x = [_draw_normal(key / part / k, n, source.inputs).float() for k in range(source.clients)]
        y = [target(rows.double(), k % source.clusters).float() for k, rows in enumerate(x)]
        client_ids = torch.arange(source.clients).repeat_interleave(n)
        parts.append((Examples(torch.cat(x), torch.cat(y)), client_ids))
    (train, train_clients), (test, test_clients) = parts
    return Dataset(name, train, test, (), train_clients, test_clients)


def _draw_normal(key: Key, *shape: int) -> Tensor:
    """Draw standard normal numbers, float64."""
    return torch.randn(shape, generator=key.generator(), dtype=torch.float64)
