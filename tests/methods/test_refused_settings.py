"""Settings out of range, NaN, and choices that do not exist are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core.errors import ConfigError
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group
from fedlowrank.methods.apfl import APFL
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.fd import FD
from fedlowrank.methods.fedala import FedALA
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.fedavgm import FedAvgM
from fedlowrank.methods.fedbabu import FedBABU
from fedlowrank.methods.fedbn import FedBN
from fedlowrank.methods.feddyn import FedDyn
from fedlowrank.methods.fedem import FedEM
from fedlowrank.methods.fedhl import FedHL
from fedlowrank.methods.fedkd import FedKD
from fedlowrank.methods.fednova import FedNova
from fedlowrank.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlowrank.methods.fedper import FedPer
from fedlowrank.methods.fedproto import FedProto
from fedlowrank.methods.fedprox import FedProx
from fedlowrank.methods.fedrep import FedRep
from fedlowrank.methods.fedrod import FedRoD
from fedlowrank.methods.fedslr import FedSLR
from fedlowrank.methods.fedspa import FedSpa
from fedlowrank.methods.flora import FLoRA
from fedlowrank.methods.floral import FederatedFloral
from fedlowrank.methods.fml import FML
from fedlowrank.methods.gpgd import GPGD
from fedlowrank.methods.hetlora import HetLoRA
from fedlowrank.methods.ifca import IFCA
from fedlowrank.methods.local_adaptor import LocalAdaptor
from fedlowrank.methods.lpgd import LPGD
from fedlowrank.methods.moon import MOON
from fedlowrank.methods.per_fedavg import PerFedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.pfedme import PFedMe
from fedlowrank.methods.scaffold import SCAFFOLD
from fedlowrank.methods.shared.effective_delta import Weighing
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.rounds.run_settings import RunSettings


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (FedAvgM, {"server_momentum": 1.0}, "server_momentum must be >= 0 and < 1; it is 1.0"),
        (FedAvgM, {"server_lr": 0.0}, "server_lr"),
        (FedAdagrad, {"tau": 0.0}, "tau"),
        (FedAdam, {"beta2": 1.0}, "beta2"),
        (FedYogi, {"beta1": -0.1}, "beta1"),
        (FedBN, {"layers": "group"}, "layers"),
        (FedBABU, {"fine_tuning_epochs": 0}, "fine_tuning_epochs"),
        (FedBABU, {"fine_tuned_part": "neck"}, "fine_tuned_part"),
        (FedBABU, {"fine_tuning_optimizer": torch.optim.SGD}, "fine_tuning_optimizer"),
        (PerFedAvg, {"alpha": -0.1}, "alpha"),
        (PerFedAvg, {"alpha": float("inf")}, "alpha"),
        (PerFedAvg, {"delta": 0.0}, "delta"),
        (PerFedAvg, {"variant": "hessian"}, "hessian_free"),
        (PerFedAvg, {"weighting": "example"}, "examples"),
        (FedRep, {"head_epochs": 0}, "head_epochs"),
        (FedRep, {"epochs": 0}, "epochs"),
        (FedPer, {"batch_size": 0}, "batch_size"),
        (FedSpa, {"density": 0.0}, "density"),
        (FedSpa, {"density": 1.1}, "density"),
        (FedSpa, {"density": float("nan")}, "density"),
        (FedSpa, {"prune": -0.1}, "prune"),
        (FedSpa, {"prune": 1.5}, "prune"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SCAFFOLD(optimizer=SGD(lr=0.1, momentum=0.9)), "has momentum"),
        (lambda: SCAFFOLD(optimizer=AdamW()), "has kind = 'adamw'"),
        (lambda: SCAFFOLD(optimizer=SGD(groups={"head": Group(lr=0.1)})), "has groups"),
        (lambda: SCAFFOLD(optimizer=SGD(clip=1.0)), "has clip"),
        (lambda: SCAFFOLD(server_lr=0.0), "server_lr"),
        (lambda: SCAFFOLD(server_lr=float("inf")), "server_lr"),
        (lambda: SCAFFOLD(server_lr=float("nan")), "server_lr"),
        (lambda: FedDyn(alpha=0.0), "alpha"),
        (lambda: FedDyn(alpha=-0.1), "alpha"),
        (lambda: FedDyn(alpha=float("nan")), "alpha"),
        (lambda: FedDyn(inference="clients"), "inference"),
        (lambda: Ditto(lam=-0.1), "lam"),
        (lambda: Ditto(lam=float("inf")), "lam"),
        (lambda: APFL(alpha=-0.01), "alpha"),
        (lambda: APFL(alpha=1.01), "alpha"),
        (lambda: APFL(alpha=float("nan")), "alpha"),
        (lambda: APFL(optimizer=AdamW()), "adaptive = true"),
        (
            lambda: APFL(optimizer=SGD(groups={"a": Group(weight_decay=0.1)})),
            "leave them out of optimizer.groups.a",
        ),
        (
            lambda: APFL(adaptive=False, optimizer=SGD(groups={"a": Group(lr=0.1)})),
            "leave them out of optimizer.groups.a",
        ),
        (lambda: FedNova(mu=0.1, optimizer=SGD(clip=1.0)), "optimizer has clip"),
        (
            lambda: PFedLoRA(optimizer=SGD(groups={"fc1": Group(lr=0.1)})),
            "set adapter_optimizer",
        ),
        (lambda: PFedMe(epochs=3, local_rounds=2), "pFedMe.epochs = 3 does nothing"),
        (lambda: FederatedFloral(precondition=False, eps=0.1), "FLoRAL.eps = 0.1 does nothing"),
        (lambda: LocalAdaptor(precondition=False, eps=0.1), "Local Adaptor.eps = 0.1 does nothing"),
        (
            lambda: FederatedFloral(center=True, optimizer=SGD(momentum=0.9, keep=True)),
            "factorizes the adaptors anew",
        ),
        (
            lambda: FederatedFloral(center=True, server_optimizer=SGD(lr=1.0, momentum=0.9)),
            "server_optimizer may be plain SGD only",
        ),
        (
            lambda: FederatedFloral(center=True, server_optimizer=AdamW()),
            "server_optimizer may be plain SGD only",
        ),
        (
            lambda: FederatedFloral(router=Router(keep=False), optimizer=SGD(momentum=0.9, keep=True)),
            "learns θ anew in every round",
        ),
        (
            lambda: Ensemble(router=Router(keep=False), optimizer=SGD(momentum=0.9, keep=True)),
            "learns θ anew in every round",
        ),
        (lambda: MOON(mu=-1.0), "mu"),
        (lambda: MOON(temperature=0.0), "temperature"),
        (lambda: FedRoD(gamma=-0.1), "gamma"),
        (lambda: PFedMe(lam=0.0), "lam"),
        (lambda: PFedMe(inner_steps=0), "inner_steps"),
        (lambda: PFedMe(local_rounds=0), "local_rounds"),
        (lambda: PFedMe(beta=0.0), "beta"),
        (lambda: PFedMe(weighting="even"), "weighting"),
        (lambda: FedALA(weights_lr=-1.0), "weights_lr"),
        (lambda: FedALA(first_epochs=0), "first_epochs"),
        (lambda: FedALA(layers=0), "layers"),
        (lambda: FedALA(data_share=0.0), "data_share"),
    ],
)
def test_bad_settings_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedProx(mu=-1.0),
        lambda: FML(alpha=1.5),
        lambda: FML(beta=-0.1),
        lambda: FedKD(energy_start=0.9, energy_end=0.8),
        lambda: FedKD(energy_start=0.0),
        lambda: FedKD(energy_end=1.1),
        lambda: FD(gamma=-1.0),
        lambda: FedProto(lam=-1.0),
        lambda: PFedLoRA(mu=0.4),
        lambda: PFedLoRA(mu=1.1),
        lambda: PFedLoRA(width=0),
        lambda: FedAvg(epochs=0),
        lambda: FedAvg(batch_size=0),
    ],
)
def test_settings_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_settings_of_fedslr_and_its_variants_out_of_range_are_refused() -> None:
    for bad in (
        {"lam": -1.0},
        {"mu": -1e-9},
        {"prox_step": 0.0},
        {"prox_step": -2.0},
        {"lam": float("nan")},
        {"fusion_epochs": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            FedSLR(**bad)
    for bad in ({"lam": -1.0}, {"prox_step": 0.0}):
        with pytest.raises(ConfigError):
            GPGD(**bad)
    with pytest.raises(ConfigError):
        LPGD(lam=-1.0)
    with pytest.raises(ConfigError, match="low_rank"):
        FedSLR(global_norm="lowrank")


def test_settings_of_federated_lora_out_of_range_are_refused() -> None:
    for make, match in (
        (lambda: LoRATraining(rank=0), "training.rank must be a whole number of at least 1; it is 0"),
        (lambda: LoRATraining(head="kept"), "head"),  # type: ignore[arg-type]
        (lambda: FedHL(residual=True), "'exact' or 'capped', not 'auto'"),
        (lambda: Weighing(eps=0.0), "weighing: eps must be > 0; it is 0.0"),
        (lambda: Weighing(eps=float("nan")), "weighing: eps must be > 0; it is nan"),
        (lambda: Weighing(eps=float("inf")), "weighing: eps must be > 0; it is inf"),
        (lambda: Weighing(temperature=-1.0), "weighing: temperature must be >= 0; it is -1.0"),
        (lambda: Weighing(temperature=float("nan")), "weighing: temperature must be >= 0; it is nan"),
        (lambda: HetLoRA(prune=0.0), "prune must be > 0 and <= 1"),
        (lambda: HetLoRA(penalty=-1.0), "penalty must be >= 0"),
        (lambda: FLoRA(base_updates="merge"), "Did you mean 'merged'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=match):
            make()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (FedProx, "mu"),
        (FD, "gamma"),
        (FedProto, "lam"),
        (FML, "alpha"),
        (FedKD, "energy_start"),
        (PFedLoRA, "mu"),
    ],
    ids=lambda v: getattr(v, "title", None),
)
def test_a_setting_that_is_not_a_number_is_refused(method, setting: str) -> None:
    # NaN compares false with everything, so that a check of the form `x < 0` lets it pass
    with pytest.raises(ConfigError):
        method(**{setting: float("nan")})


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(weighting="example"),
        lambda: FedProto(inference="neares"),
        lambda: FedProto(weighting="example"),
        lambda: PFedLoRA(start="SVD"),
        lambda: RunSettings(on_nan="stopp"),
    ],
    ids=["FedAvg weighting", "FedProto infer", "FedProto weighting", "pFedLoRA start", "on_nan"],
)
def test_a_choice_that_does_not_exist_is_refused(make) -> None:
    # it would otherwise be taken for the other one, without a word
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("make", [Ensemble, FedEM, IFCA, FederatedFloral])
@pytest.mark.parametrize("count", [0, -1])
def test_there_is_at_least_one_cluster(make: Any, count: int) -> None:
    with pytest.raises(ConfigError, match=f"{make.title}: clusters must be >= 1; it is {count}"):
        make(clusters=count)


@pytest.mark.parametrize("make", [FederatedFloral, LocalAdaptor])
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_the_factor_on_adaptors_is_positive(make: Any, alpha: float) -> None:
    with pytest.raises(ConfigError, match=f"{make.title}: alpha must be > 0"):
        make(alpha=alpha)


@pytest.mark.parametrize("make", [Ensemble, IFCA])
def test_choices_are_checked(make: Any) -> None:
    name = "mixed" if make is Ensemble else "weighting"
    with pytest.raises(ConfigError, match=name):
        make(**{name: "both"})
