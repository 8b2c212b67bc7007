"""Models that a method cannot train are refused before any training, with what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core.errors import TaskError
from fedlowrank.data.federation import Federation
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedala import FedALA
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedem import FedEM
from fedlowrank.methods.fedper import FedPer
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.fedrep import FedRep
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.ifca import IFCA
from fedlowrank.methods.lg_fedavg import LGFedAvg
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.methods.moon import MOON
from fedlowrank.methods.pfedlora import PFedLoRA

from .setting import CLASSES, INPUTS, federate_two_models, make_arrays, prepare_run, run_rounds


@pytest.mark.parametrize("method", [FedAvg(), FedProx()])
def test_averaging_whole_models_refuses_different_ones(method) -> None:
    with pytest.raises(TaskError, match=r"client 0 holds deep.*client 1 holds small"):
        prepare_run(method, federate_two_models())


@pytest.mark.parametrize("method", [Ensemble(), FedEM(), IFCA(), LocalAdaptor()], ids=lambda m: m.title)
def test_unequal_models_are_refused_by_name(method: Any) -> None:
    with pytest.raises(TaskError, match=f"{method.title} averages whole models"):
        run_rounds(method, federate_two_models(), steps=0)


@pytest.mark.parametrize("method", [PFedLoRA(), FedProto()])
def test_representations_of_two_widths_are_refused_with_clients_and_widths(method) -> None:
    with pytest.raises(TaskError, match=r"client 0 \(deep\) has 7 and client 1 \(small\) has 10"):
        prepare_run(method, federate_two_models(deep_width=7))


@pytest.mark.parametrize("method", [MOON, FedRoD, FedALA, FedRep, FedPer])
def test_a_model_without_a_head_is_refused(method: Any) -> None:
    federation = Federation.from_arrays(
        make_arrays(), {"bare": lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES))}, classes=4
    )
    with pytest.raises(TaskError, match="names no head"):
        prepare_run(method(), federation)


class Bare(nn.Module):
    """A model of one parameter that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(INPUTS, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


@pytest.mark.parametrize("method", [FederatedFloral(), LocalAdaptor()], ids=lambda m: m.title)
def test_a_model_without_a_layer_to_adapt_is_refused(method: Any) -> None:
    federation = Federation.from_arrays(make_arrays(), Bare, classes=CLASSES)
    with pytest.raises(TaskError, match=r"no layer to adapt.*Bare"):
        prepare_run(method, federation)


@pytest.mark.parametrize("method", [FD(), FedProto(), LGFedAvg()])
def test_models_of_other_types_are_refused_where_they_exchange_numbers(method: Any) -> None:
    clients = [(np.zeros((6, 4)), np.arange(6) % 3)] * 2
    models = {"a": Headed, "b": lambda: Headed().double()}
    federation = Federation.from_arrays(clients, models, classes=3)
    with pytest.raises(TaskError, match=r"float64"):
        method.server_init(federation.task(2))


def test_the_adapter_of_pfedlora_has_the_widest_type_whatever_the_order_of_clients() -> None:
    clients = [(np.zeros((6, 4), dtype="float32"), np.arange(6) % 3)] * 2
    nets = {"a": Headed, "b": lambda: Headed().bfloat16()}
    for order in (["a", "b"], ["b", "a"]):
        federation = Federation.from_arrays(clients, {n: nets[n] for n in order}, classes=3)
        assert PFedLoRA(width=2).server_init(federation.task(2)).a.dtype == torch.float32


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(self.body.weight.dtype)).relu())
