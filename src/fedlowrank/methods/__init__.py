"""One paper, one file; :data:`METHODS` names them all."""

from __future__ import annotations

from typing import Any

from ..method import Method
from .fd import FD
from .fedavg import FedAvg
from .fedkd import FedKD
from .fedproto import FedProto
from .fedprox import FedProx
from .fml import FML
from .lg_fedavg import LGFedAvg
from .pfedlora import PFedLoRA
from .standalone import Standalone

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "standalone": Standalone,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fml": FML,
    "fedkd": FedKD,
    "lg_fedavg": LGFedAvg,
    "fd": FD,
    "fedproto": FedProto,
    "pfedlora": PFedLoRA,
}
"""Every method by the name of its file."""

__all__ = ["FD", "FML", "METHODS", "FedAvg", "FedKD", "FedProto", "FedProx", "LGFedAvg", "PFedLoRA", "Standalone"]
