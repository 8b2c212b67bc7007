"""Federated learning with low-rank parts: pFedLoRA and the methods it is measured against.

from fedlowrank import Federation, simulate
federation = Federation.from_arrays([(x0, y0), (x1, y1)], model)
result = simulate("pfedlora", federation, rounds=50)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .adapters.floral_module import Floral
    from .core.client_model import ClientModel
    from .core.contribution import Each, Mean, Sum
    from .core.errors import FedlowrankError
    from .core.key import Key
    from .core.loss import cross_entropy, supervised_loss, task_loss
    from .core.losses import Loss
    from .core.method import Batch, ClientInfo, ClientView, Method, Pass, ProximalTerm, ServerView, Task
    from .core.optimizer import SGD, AdamW, Group, LocalSchedule, Schedule
    from .core.update import Update
    from .data.augment import Augment
    from .data.federation import Federation
    from .methods import METHODS
    from .simulation.callbacks import Callback, EarlyStopping
    from .simulation.devices import Devices
    from .simulation.frames import average_by_examples, load_rounds, load_runs
    from .simulation.result import Result
    from .simulation.settings import RunSettings
    from .simulation.simulate import simulate
    from .trust.settings import Attack, Clipping, Compression, Privacy, Robust, SecureSums

_MODULES = {
    "adapters.floral_module": "Floral",
    "core.client_model": "ClientModel",
    "core.contribution": "Each, Mean, Sum",
    "core.errors": "FedlowrankError",
    "core.key": "Key",
    "core.loss": "cross_entropy, supervised_loss, task_loss",
    "core.losses": "Loss",
    "core.method": "Batch, ClientInfo, ClientView, Method, Pass, ProximalTerm, ServerView, Task",
    "core.optimizer": "SGD, AdamW, Group, LocalSchedule, Schedule",
    "core.update": "Update",
    "data.augment": "Augment",
    "data.federation": "Federation",
    "methods": "METHODS",
    "simulation.frames": "average_by_examples, load_rounds, load_runs",
    "simulation.result": "Result",
    "simulation.devices": "Devices",
    "simulation.callbacks": "Callback, EarlyStopping",
    "simulation.settings": "RunSettings",
    "simulation.simulate": "simulate",
    "trust.settings": "Attack, Clipping, Compression, Privacy, Robust, SecureSums",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import fedlowrank`` starts at once."""
    for module, names in _MODULES.items():
        if name in names.split(", "):
            value = getattr(import_module(f".{module}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "METHODS",
    "SGD",
    "AdamW",
    "Attack",
    "Augment",
    "Batch",
    "Callback",
    "ClientInfo",
    "ClientModel",
    "ClientView",
    "Clipping",
    "Compression",
    "Devices",
    "Each",
    "EarlyStopping",
    "Federation",
    "FedlowrankError",
    "Floral",
    "Group",
    "Key",
    "LocalSchedule",
    "Loss",
    "Mean",
    "Method",
    "Pass",
    "Privacy",
    "ProximalTerm",
    "Result",
    "Robust",
    "RunSettings",
    "Schedule",
    "SecureSums",
    "ServerView",
    "Sum",
    "Task",
    "Update",
    "average_by_examples",
    "cross_entropy",
    "load_rounds",
    "load_runs",
    "simulate",
    "supervised_loss",
    "task_loss",
]
