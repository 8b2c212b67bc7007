"""One paper, one file; :data:`METHODS` names them all."""

from __future__ import annotations

from typing import Any

from ..method import Method
from .apfl import APFL
from .ditto import Ditto
from .ensemble import Ensemble
from .fd import FD
from .fedavg import FedAvg
from .feddyn import FedDyn
from .fedem import FedEM
from .fedkd import FedKD
from .fedper import FedPer
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrep import FedRep
from .fedslr import FedSLR
from .fedspa import FedSpa
from .floral import Floral
from .fml import FML
from .gpgd import GPGD
from .ifca import IFCA
from .lg_fedavg import LGFedAvg
from .local_adaptor import LocalAdaptor
from .lpgd import LPGD
from .per_fedavg import PerFedAvg
from .pfedlora import PFedLoRA
from .scaffold import SCAFFOLD
from .standalone import Standalone

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "standalone": Standalone,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "ditto": Ditto,
    "apfl": APFL,
    "per_fedavg": PerFedAvg,
    "fedrep": FedRep,
    "fedper": FedPer,
    "lg_fedavg": LGFedAvg,
    "fedspa": FedSpa,
    "fml": FML,
    "fedkd": FedKD,
    "fd": FD,
    "fedproto": FedProto,
    "pfedlora": PFedLoRA,
    "fedslr": FedSLR,
    "lpgd": LPGD,
    "gpgd": GPGD,
    "floral": Floral,
    "local_adaptor": LocalAdaptor,
    "ensemble": Ensemble,
    "fedem": FedEM,
    "ifca": IFCA,
}
"""Every method by the name of its file."""

__all__ = [
    "APFL",
    "FD",
    "FML",
    "GPGD",
    "IFCA",
    "LPGD",
    "METHODS",
    "SCAFFOLD",
    "Ditto",
    "Ensemble",
    "FedAvg",
    "FedDyn",
    "FedEM",
    "FedKD",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSpa",
    "Floral",
    "LGFedAvg",
    "LocalAdaptor",
    "PFedLoRA",
    "PerFedAvg",
    "Standalone",
]
