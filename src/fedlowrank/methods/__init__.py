"""One paper, one file; :data:`METHODS` names them all."""

from __future__ import annotations

from ..core.contract import AnyMethod
from .apfl import APFL
from .ditto import Ditto
from .ensemble import Ensemble
from .fd import FD
from .fedala import FedALA
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbabu import FedBABU
from .fedbn import FedBN
from .feddyn import FedDyn
from .fedem import FedEM
from .fedex_lora import FedExLoRA
from .fedhl import FedHL
from .fedit import FedIT
from .fedkd import FedKD
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedYogi
from .fedper import FedPer
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrod import FedRoD
from .fedsa_lora import FedSALoRA
from .fedslr import FedSLR
from .fedspa import FedSpa
from .ffa_lora import FFALoRA
from .flexlora import FlexLoRA
from .flora import FLoRA
from .floral import FederatedFloral
from .fml import FML
from .gpgd import GPGD
from .hetlora import HetLoRA
from .ifca import IFCA
from .lg_fedavg import LGFedAvg
from .local_adaptor import LocalAdaptor
from .lpgd import LPGD
from .moon import MOON
from .per_fedavg import PerFedAvg
from .pfedlora import PFedLoRA
from .pfedme import PFedMe
from .scaffold import SCAFFOLD
from .standalone import Standalone

METHODS: dict[str, type[AnyMethod]] = {
    "standalone": Standalone,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fednova": FedNova,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "moon": MOON,
    "ditto": Ditto,
    "apfl": APFL,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "fedrep": FedRep,
    "fedper": FedPer,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "lg_fedavg": LGFedAvg,
    "fedrod": FedRoD,
    "fedala": FedALA,
    "fedspa": FedSpa,
    "fml": FML,
    "fedkd": FedKD,
    "fd": FD,
    "fedproto": FedProto,
    "pfedlora": PFedLoRA,
    "fedslr": FedSLR,
    "lpgd": LPGD,
    "gpgd": GPGD,
    "floral": FederatedFloral,
    "local_adaptor": LocalAdaptor,
    "ensemble": Ensemble,
    "fedem": FedEM,
    "ifca": IFCA,
    "fedit": FedIT,
    "hetlora": HetLoRA,
    "flexlora": FlexLoRA,
    "flora": FLoRA,
    "fedhl": FedHL,
    "ffa_lora": FFALoRA,
    "fedsa_lora": FedSALoRA,
    "fedex_lora": FedExLoRA,
}
"""Every method by the name of its file; those of FedOpt, one paper, share the file ``fedopt``."""

__all__ = [
    "APFL",
    "FD",
    "FML",
    "GPGD",
    "IFCA",
    "LPGD",
    "METHODS",
    "MOON",
    "SCAFFOLD",
    "Ditto",
    "Ensemble",
    "FFALoRA",
    "FLoRA",
    "FedALA",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedDyn",
    "FedEM",
    "FedExLoRA",
    "FedHL",
    "FedIT",
    "FedKD",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSLR",
    "FedSpa",
    "FedYogi",
    "FederatedFloral",
    "FlexLoRA",
    "HetLoRA",
    "LGFedAvg",
    "LocalAdaptor",
    "PFedLoRA",
    "PFedMe",
    "PerFedAvg",
    "Standalone",
]
