"""Federated learning with low-rank parts: clients with different data, models and hardware, each with a personal model.

from fedlowrank import Federation, simulate

federation = Federation.from_arrays([(x0, y0), (x1, y1)], model)
result = simulate("pfedlora", federation, rounds=50)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .adapters.mixtures.floral_module import Floral
    from .adapters.mixtures.router import Router
    from .core.contract import (
        NO_UPDATE,
        ZERO_REFERENCE,
        Batch,
        ClientInfo,
        ClientModel,
        ClientView,
        Each,
        Mean,
        Method,
        PaddedDimensions,
        Pass,
        ProximalTerm,
        ServerView,
        Sum,
        Task,
        Update,
    )
    from .core.errors import FedlowrankError
    from .core.key import Key
    from .core.learning.batch_losses import cross_entropy, supervised_loss, task_loss
    from .core.learning.losses import Loss
    from .core.learning.optimizer import SGD, AdamW, Group, LocalSchedule, Schedule
    from .data.augment import Augment
    from .data.federation import Federation
    from .methods import METHODS
    from .results.frames import average_by_examples, load_rounds, load_runs
    from .rounds.callbacks import Callback, EarlyStopping
    from .rounds.outcome.result import Result
    from .rounds.participation.devices import Devices
    from .rounds.run_settings import RunSettings
    from .rounds.simulate import simulate
    from .trust.trust_settings import Attack, Clipping, Compression, Privacy, Robust, SecureSums

_MODULES = {
    "adapters.mixtures.floral_module": "Floral",
    "adapters.mixtures.router": "Router",
    "core.errors": "FedlowrankError",
    "core.key": "Key",
    "core.learning.batch_losses": "cross_entropy, supervised_loss, task_loss",
    "core.learning.losses": "Loss",
    "core.contract": (
        "NO_UPDATE, ZERO_REFERENCE, Batch, ClientInfo, ClientModel, ClientView, Each, Mean, Method, PaddedDimensions, "
        "Pass, ProximalTerm, ServerView, Sum, Task, Update"
    ),
    "core.learning.optimizer": "SGD, AdamW, Group, LocalSchedule, Schedule",
    "data.augment": "Augment",
    "data.federation": "Federation",
    "methods": "METHODS",
    "results.frames": "average_by_examples, load_rounds, load_runs",
    "rounds.outcome.result": "Result",
    "rounds.participation.devices": "Devices",
    "rounds.callbacks": "Callback, EarlyStopping",
    "rounds.run_settings": "RunSettings",
    "rounds.simulate": "simulate",
    "trust.trust_settings": "Attack, Clipping, Compression, Privacy, Robust, SecureSums",
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
    "NO_UPDATE",
    "SGD",
    "ZERO_REFERENCE",
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
    "PaddedDimensions",
    "Pass",
    "Privacy",
    "ProximalTerm",
    "Result",
    "Robust",
    "Router",
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
