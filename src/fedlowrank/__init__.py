"""Federated learning with low-rank parts: pFedLoRA and the methods it is measured against.

from fedlowrank import Federation, simulate
federation = Federation.from_arrays([(x0, y0), (x1, y1)], model)
result = simulate("pfedlora", federation, rounds=50)
"""

from __future__ import annotations

__version__ = "0.1.0"

from .adapters.floral_module import Floral
from .core.client_model import ClientModel
from .core.contribution import Each, Mean, Sum
from .core.errors import FedlowrankError
from .core.key import Key
from .core.loss import cross_entropy, supervised_loss, task_loss
from .core.method import Batch, ClientInfo, ClientView, Method, Pass, ProximalTerm, ServerView, Task
from .core.optimizer import SGD, AdamW, Group, Schedule
from .data.augment import Augment
from .data.federation import Federation
from .methods import METHODS
from .simulation.settings import RunSettings
from .simulation.simulate import Result, simulate

__all__ = [
    "METHODS",
    "SGD",
    "AdamW",
    "Augment",
    "Batch",
    "ClientInfo",
    "ClientModel",
    "ClientView",
    "Each",
    "Federation",
    "FedlowrankError",
    "Floral",
    "Group",
    "Key",
    "Mean",
    "Method",
    "Pass",
    "ProximalTerm",
    "Result",
    "RunSettings",
    "Schedule",
    "ServerView",
    "Sum",
    "Task",
    "cross_entropy",
    "simulate",
    "supervised_loss",
    "task_loss",
]
