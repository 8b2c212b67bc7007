"""A method of one's own, ``module:Class``, over a network: registration, training and the end are as in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlowrank.core.errors import ConfigError
from fedlowrank.network.client import ClientRuntime, prepare
from tests.support.local_network import assert_equals_sequential_run, local, serve_run, small

CODE = """
from dataclasses import dataclass
from fedlowrank.methods import FedAvg

@dataclass(frozen=True)
class Damped(FedAvg):
    title = "Damped FedAvg"

    def server_update(self, server, *rest):
        mean = super().server_update(server, *rest)
        return {name: (value + mean[name]) / 2 for name, value in server.items()}
"""


@pytest.mark.full
@pytest.mark.parametrize("variant", [False, True])
def test_a_class_is_named_in_the_file(variant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"own_damped_{variant}".lower()
    (tmp_path / f"{module}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{module}:Damped"
    made = small("half", methods={"half": {"method": name}}) if variant else small(name)
    carrier = local(made, tmp_path / "clients")
    result = serve_run(carrier, made, tmp_path / "run")
    assert assert_equals_sequential_run(result, carrier, made) == set()
    method = json.loads((tmp_path / "run" / "run.json").read_text())["method"]
    assert (method["name"], method["title"]) == (("half", "half") if variant else (name, "Damped FedAvg"))


DRAWS = """
import random
from dataclasses import dataclass
import torch
from torch import nn
from fedlowrank import ClientModel
from fedlowrank.methods import FedAvg

@dataclass(frozen=True)
class Draws(FedAvg):
    title = "FedAvg with drawn scales"

    def participants(self, sampled, available):
        return sorted(random.sample(available, max(1, len(available) - 1)))

    def client_init(self, client, task):
        return {"scale": nn.Linear(2, 3).weight.detach().clone()}

    def local_update(self, state, down, view):
        upload = super().local_update(None, down, view)[1]
        return {"scale": state["scale"] + torch.rand(3, 2)}, upload

    def server_update(self, server, *rest):
        mean = super().server_update(server, *rest)
        return {name: value + 0.01 * torch.rand(value.shape) for name, value in mean.items()}

    def client_model(self, state, down, view):
        return ClientModel({name: p * state["scale"].mean() + torch.rand(()) for name, p in down.items()})
"""


@pytest.mark.full
def test_what_hooks_draw_from_the_global_generators_is_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_draws.py").write_text(DRAWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = small("own_draws:Draws")
    carrier = local(made, tmp_path / "clients")
    result = serve_run(carrier, made, tmp_path / "run")
    assert len({tuple(r.participants) for r in result.rounds[1:]}) > 1
    assert_equals_sequential_run(result, carrier, made)


NORMALIZED = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Linear(*shape, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))
"""


@pytest.mark.full
@pytest.mark.parametrize("statistics", ["local", "averaged"])
def test_a_model_with_batch_normalization(
    statistics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_normalized.py").write_text(NORMALIZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    sections = {"model": {"names": ["own_normalized:net"]}, "run": {"statistics": statistics}}
    made = small("fedavg", rounds=2, defaults={"drop_last": True}, **sections)
    carrier = local(made, tmp_path / "clients")
    result = serve_run(carrier, made, tmp_path / "run")
    assert assert_equals_sequential_run(result, carrier, made) == set()


def test_a_client_refuses_parts_of_batches_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(NORMALIZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = small("fedavg", model={"names": ["own_parts:net"]}, run={"micro_batch": 4})
    prepare(tmp_path / "client", made, 0, made.shares())
    with pytest.raises(ConfigError, match=r"run\.micro_batch = 4 .* batch normalization '1'"):
        _ = ClientRuntime(tmp_path / "client").method


LOSS = """
from torch.nn import functional

def tempered(scores, targets):
    return functional.cross_entropy(scores / 3, targets, reduction="none")
"""


@pytest.mark.full
def test_a_loss_is_named_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tempered.py").write_text(LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = small("fedavg", rounds=2, loss={"kind": "own_tempered:tempered"})
    carrier = local(made, tmp_path / "clients")
    result = serve_run(carrier, made, tmp_path / "run")
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss"]["kind"] == "own_tempered:tempered"
