"""Under privacy no answer of a client tells whether its training failed: nothing but noisy numbers leaves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedlowrank.core import tree
from fedlowrank.data.dataset import Examples
from fedlowrank.network.client import ClientRuntime, prepare
from fedlowrank.network.messages import Answer, Order
from tests.network.secure.secure_sites import flatten_values, make_private_experiment, run_secure
from tests.support.local_network import log_lines, small

RUN = "0123456789abcdef"


def settings(kind: str) -> dict[str, Any]:
    return {"privacy": {"kind": kind, "noise": 4.0, "delta": 1e-3}, "clipping": {"norm": 0.1}}


def answer(folder: Path, download: bytes, **order: Any) -> tuple[Answer, bytes]:
    fields: dict[str, Any] = {"round": 0, "stamp": 0, "train": True, "evaluate": False, **order}
    return ClientRuntime(folder).answer(Order(run=RUN, **fields), download)


def download_of(folder: Path, change: Any = None) -> bytes:
    mine = ClientRuntime(folder)
    task, info = mine.federation.task(mine.experiment.run.rounds), mine.federation.infos[mine.client]
    down = mine.method.download(mine.method.server_init(task), info)
    leaves = dict(tree.leaves(down))
    return tree.encode(tree.map_leaves(lambda t: t if change is None else change(t, leaves), down))


@pytest.mark.parametrize("kind", ["local", "central"])
def test_a_crafted_model_does_not_tell_whether_a_site_has_an_example(kind: str, tmp_path: Path) -> None:
    """By weights of 3e38 for one input, training fails where a single example has it."""
    made = small("fedavg", run=settings(kind))
    shares = made.shares()
    actual = []
    for has in (False, True):
        x = shares.data[1].train.inputs.clone()
        x[:, 0] = 0
        x[3, 0] = float(has)
        own = dataclasses.replace(shares.data[1], train=Examples(x, shares.data[1].train.y))
        data = (shares.data[0], own, shares.data[2])
        prepare(tmp_path / str(has), made, 1, dataclasses.replace(shares, data=data))

        def craft(t: Tensor, leaves: dict[str, Tensor]) -> Tensor:
            if t.ndim != 2:
                return t
            weight = torch.full_like(t, 10.0)
            if t is next(w for w in leaves.values() if w.ndim == 2):
                weight = t.clone()
                weight[:, 0] = 3e38
            return weight

        with log_lines() as lines:
            reply, upload = answer(tmp_path / str(has), download_of(tmp_path / str(has), craft))
        assert any("NonFiniteError" in line for line in lines) is has
        actual.append((reply.problem, reply.kind, tree.form(tree.decode(upload))))
    assert actual[0][:2] == ("", "")
    assert actual[0] == actual[1]


@pytest.mark.parametrize("kind", ["local", "central"])
def test_other_errors_of_training_stay_at_the_site_too(kind: str, tmp_path: Path) -> None:
    """A head with fewer classes than the examples is an error only where an example is of the last class."""
    made = small("fedavg", run=settings(kind))
    prepare(tmp_path / "site", made, 1, made.shares())
    crafted = download_of(tmp_path / "site", lambda t, _: t[:2].clone() if t.shape[0] == 3 else t)
    with log_lines() as lines:
        reply, upload = answer(tmp_path / "site", crafted)
    assert (reply.problem, reply.kind, bool(upload)) == ("", "", True)
    assert any("IndexError" in line for line in lines)


def test_the_last_order_does_not_tell_whether_the_sites_own_model_could_be_made(tmp_path: Path) -> None:
    """Per-FedAvg adapts the model before it is written."""
    made = small("per_fedavg", run=settings("central"))
    prepare(tmp_path / "site", made, 1, made.shares())
    crafted = download_of(tmp_path / "site", lambda t, _: torch.full_like(t, 3e38))
    with log_lines() as lines:
        reply, _ = answer(tmp_path / "site", crafted, train=False, last=True)
    assert (reply.problem, reply.kind) == ("", "")
    assert any("NonFiniteError" in line for line in lines)


def test_the_total_of_a_secure_sum_of_failed_trainings_is_noise(tmp_path: Path) -> None:
    made = make_private_experiment("fedavg", 3.0, rounds=1).overlay(
        {"defaults": {"optimizer": {"lr": 1e30}, "epochs": 3}}
    )
    _, result = run_secure(made, tmp_path)
    assert result.rounds[1].lost == {}
    plain = made.overlay({"defaults": {"optimizer": {"lr": 1e-12}, "epochs": 1}})
    start = flatten_values(run_secure(plain, tmp_path / "plain")[1].run.state.server)
    noise = flatten_values(result.run.state.server) - start
    # both runs have noise of σ C √(4/3) / 4, which has no seed
    deviation = np.sqrt(2) * 3.0 * 0.1 * np.sqrt(4 / 3) / 4
    lowest, highest = stats.chi2(noise.size).ppf([1e-7, 1 - 1e-7])
    assert lowest < np.square(noise / deviation).sum() < highest
