"""Defaults are those of the papers."""

from __future__ import annotations

from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.methods.fedavgm import FedAvgM
from fedlowrank.methods.fedbabu import FedBABU
from fedlowrank.methods.fedbn import FedBN
from fedlowrank.methods.fednova import FedNova
from fedlowrank.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlowrank.methods.fedrep import FedRep
from fedlowrank.methods.fedspa import FedSpa
from fedlowrank.methods.per_fedavg import PerFedAvg


def test_defaults_of_averaging_methods_are_those_of_the_papers() -> None:
    assert (FedAvgM().server_momentum, FedAvgM().server_lr) == (0.9, 1.0)
    assert (FedAdagrad().beta1, FedAdam().beta1, FedAdam().beta2) == (0.0, 0.9, 0.99)
    assert (FedYogi().beta1, FedYogi().beta2, FedYogi().tau) == (0.9, 0.99, 0.001)
    assert (FedBABU().fine_tuning_epochs, FedBABU().fine_tuned_part, FedBN().layers) == (5, "whole", "batch")
    assert FedNova().mu == 0.0


def test_defaults_of_personal_methods_are_those_of_the_papers() -> None:
    assert PerFedAvg().optimizer == SGD(lr=0.001)
    assert (PerFedAvg().alpha, PerFedAvg().weighting) == (0.01, "uniform")
    assert FedRep().head_epochs == 10
    assert FedSpa().density == 0.5
