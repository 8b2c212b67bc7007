"""Methods minimize the loss of the task: their NumPy references with another loss in them.

The gradient of the cross-entropy is softmax - t with one-hot targets t; with smoothed labels t = (1 - ε) one-hot + ε/C.
So a reference whose targets are smoothed is that of ``Loss("cross_entropy", label_smoothing=ε)``: in training, in the
choice of a cluster, and in steps before inference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedlowrank import Loss
from fedlowrank.engines.sequential import Sequential
from fedlowrank.methods.ifca import IFCA
from golden import contrast_and_mixture_reference, floral_reference, reference

from . import (
    setting,
    test_clusters,
    test_contrast_and_mixture_methods,
    test_fedslr,
    test_floral,
    test_golden,
    test_personal_methods,
)

SHARE = 0.3
CASES: list[tuple[ModuleType, str, tuple[Any, ...]]] = [
    (test_golden, "test_fedprox", (2.0,)),
    (test_golden, "test_fml", (0.3, 0.8)),
    (test_golden, "test_fedkd", ((0.6, 0.9),)),
    (test_golden, "test_fd", (0.4,)),
    (test_golden, "test_fedproto", (0.3, "uniform")),
    (test_golden, "test_pfedlora", (True, 0.5, setting.unlike)),
    (test_personal_methods, "test_per_fedavg_of_first_order", ("examples",)),
    (test_contrast_and_mixture_methods, "test_moon", (1.0, 0.5)),
    (test_clusters, "test_ifca", ("examples",)),
    (test_floral, "test_the_mfl_router_weighs_the_averaged_models", ()),
    (test_fedslr, "test_rounds_are_those_of_the_numpy_reference", ({}, {}, True)),
]
"""Tests of a method against its reference, and the arguments before the engine."""


def smoothed(y: Any, classes: int) -> Any:
    return (1 - SHARE) * np.eye(classes)[y] + SHARE / classes


def smoothed_cross_entropy(scores: Any, y: Any) -> float:
    return float(-(smoothed(y, scores.shape[1]) * np.log(reference.softmax(scores))).sum(1).mean())


@pytest.mark.few(3)
@pytest.mark.parametrize(("module", "name", "arguments"), CASES, ids=[name for _, name, _ in CASES])
def test_a_method_minimizes_the_loss_of_the_task(
    module: ModuleType, name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Loss("cross_entropy", label_smoothing=SHARE)
    for maker in ("alike", "unlike"):
        if hasattr(module, maker):
            monkeypatch.setattr(module, maker, functools.partial(getattr(setting, maker), loss=loss))
    check: Callable[..., None] = getattr(module, name)
    arguments = tuple(functools.partial(a, loss=loss) if a is setting.unlike else a for a in arguments)
    for golden in (reference, floral_reference, contrast_and_mixture_reference):
        monkeypatch.setattr(golden, "one_hot", smoothed)
        if hasattr(golden, "cross_entropy"):
            monkeypatch.setattr(golden, "cross_entropy", smoothed_cross_entropy)
    check(*arguments, Sequential)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_cluster_is_chosen_by_the_loss_of_the_task(sign: int) -> None:
    federation = setting.alike(loss=lambda s, y: sign * functional.cross_entropy(s, y, reduction="none"))
    run = setting.run_of(IFCA(clusters=2), federation, steps=0)
    module, models = federation.architectures["small"].module, run.method.server_init(run.task)
    for info in federation.infos:
        train = federation.clients[info.id].train
        losses = [
            functional.cross_entropy(
                torch.func.functional_call(module, {n: t[c] for n, t in models.items()}, train.inputs),
                train.y,
            )
            for c in range(2)
        ]
        assert run.local_model(info).routes == [
            float(c == np.argmin([sign * v for v in losses])) for c in range(2)
        ]
