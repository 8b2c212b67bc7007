"""A small federation for the tests of methods: four clients of unequal size and skewed classes, models of two
forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlowrank.core.contract import AnyMethod
from fedlowrank.core.learning.optimizer import SGD, Schedule
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import Engine
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods import METHODS
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)
INPUTS, CLASSES, WIDTH = 12, 4, 10
SIZES = (23, 9, 31, 14)
# label 3 belongs to client 2 alone
OWNED = ((0, 1), (0, 1, 2), (2, 3), (1, 2))
SMALL_PARAMETERS = WIDTH * INPUTS + WIDTH + CLASSES * WIDTH + CLASSES
"""Parameter count of the small model."""
LR = 0.3
LOCAL: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 8, "epochs": 2}
SLOW_LOCAL: dict[str, Any] = {**LOCAL, "optimizer": SGD(lr=0.2)}
# the rate differs between rounds, for a method that used the first one would be wrong
FALLING_LOCAL: dict[str, Any] = {
    **LOCAL,
    "optimizer": SGD(lr=LR, schedule=Schedule("exponential", factor=0.5)),
}
FALLING_RATES = [LR, LR / 2, LR / 4]
SAMPLE: dict[str, Any] = {"participation": 0.75}
FLOAT32: dict[str, Any] = {"dtype": torch.float32}
KINDS = (
    *("standalone", "fedavg", "fedadam", "scaffold", "feddyn"),
    *("ditto", "per_fedavg", "fedrep", "fedspa", "fedbabu"),
    *("fedkd", "fd", "fedproto", "pfedlora"),
    *("fedslr", "floral", "fedem", "ifca"),
    *("fedhl", "hetlora", "fedit"),
)
"""A method of each kind of message, state and inference, for tests of code that all methods share. What is a method's
own is tested by the battery of ``fedlowrank.testing.check``, which every method passes."""


class Net(nn.Module):
    """Linear layers with ReLU between them, computed in the type of the parameters whatever that of the
    inputs. The fixture ``standard_net`` lets engines batch clients that hold it."""

    head_name = "head"

    def __init__(
        self, *hidden: int, inputs: int = INPUTS, classes: int = CLASSES, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in zip((inputs, *hidden), hidden, strict=False):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], classes)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(next(self.parameters()).dtype)))


def make_arrays(
    seed: int = 0, sizes: Sequence[int] = SIZES, owned: Sequence[Sequence[int]] = OWNED
) -> list[dict[str, Any]]:
    """Train and test examples of every client; classes are shifted Gaussians."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=(CLASSES, INPUTS))
    out = []
    for n, labels in zip(sizes, owned, strict=True):
        parts = {}
        for part, m in (("train", n), ("test", 11)):
            # every label at least once, then at random
            y = np.concatenate([labels, rng.choice(labels, m - len(labels))])
            parts[part] = ((center[y] + rng.normal(size=(m, INPUTS))).astype(np.float32), y)
        out.append(parts)
    return out


def federate_one_model(dtype: torch.dtype = torch.float64, seed: int = 0, **kwargs: Any) -> Federation:
    """Build a federation whose clients all hold the small model."""
    return Federation.from_arrays(
        kwargs.pop("clients", None) or make_arrays(),
        {"small": lambda: Net(WIDTH, dtype=dtype)},
        classes=CLASSES,
        seed=seed,
        **kwargs,
    )


def federate_two_models(
    deep_width: int = WIDTH, dtype: torch.dtype = torch.float64, seed: int = 0, **kwargs: Any
) -> Federation:
    """Build a federation whose clients 0 and 2 hold a deeper model than clients 1 and 3, with a representation
    of ``deep_width``."""
    models = {"deep": lambda: Net(9, deep_width, dtype=dtype), "small": lambda: Net(WIDTH, dtype=dtype)}
    return Federation.from_arrays(make_arrays(), models, classes=CLASSES, seed=seed, **kwargs)


def federate_for(name: str, **kwargs: Any) -> Federation:
    """Build a federation of two models where a method accepts them, of one otherwise."""
    return (federate_two_models if METHODS[name].heterogeneous else federate_one_model)(**kwargs)


def prepare_run(method: AnyMethod, federation: Federation) -> Run:
    """Build a run of one round, and start nothing."""
    return Run(method, federation, RunSettings(rounds=1), Sequential())


def run_rounds(
    method: AnyMethod,
    federation: Federation,
    rounds: int = 3,
    steps: int | None = None,
    engine: type[Engine] = Sequential,
    **kwargs: Any,
) -> Run:
    """Build a run and take so many of its rounds, all by default."""
    run = Run(method, federation, RunSettings(rounds=rounds, **kwargs), engine())
    for _ in range(rounds if steps is None else steps):
        run.step()
    return run
