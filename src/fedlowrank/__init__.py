"""Federated learning with low-rank parts: pFedLoRA and the methods it is measured against.

from fedlowrank import Federation, simulate
federation = Federation.from_arrays([(x0, y0), (x1, y1)], model)
result = simulate("pfedlora", federation, rounds=50)
"""

from __future__ import annotations

__version__ = "0.1.0"

from .adapters.floral_module import Floral
from .core.errors import FedlowrankError
from .core.key import Key
from .core.loss import cross_entropy, task_loss
from .core.method import Batch, ClientInfo, ClientView, Method, Pass, ServerView, Task
from .core.optimizer import SGD, AdamW, Group, Schedule
from .data.augment import Augment
from .data.federation import Federation
from .methods import METHODS
from .simulation.run import RunSettings
from .simulation.simulate import Result, simulate

__all__ = [
    "METHODS",
    "SGD",
    "AdamW",
    "Augment",
    "Batch",
    "ClientInfo",
    "ClientView",
    "Federation",
    "FedlowrankError",
    "Floral",
    "Group",
    "Key",
    "Method",
    "Pass",
    "Result",
    "RunSettings",
    "Schedule",
    "ServerView",
    "Task",
    "cross_entropy",
    "simulate",
    "task_loss",
]
