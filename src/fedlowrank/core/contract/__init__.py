"""The contract of a federated method: hooks, views, messages and updates."""

from .client_model import ClientModel
from .contribution import Contribution, Each, Mean, Sum
from .method import AnyMethod, ClientView, Method, ServerView
from .model import EngineModel, Model
from .task import Batch, ClientInfo, Pass, Task
from .training_request import PaddedDimensions, ProximalTerm
from .update import NO_UPDATE, ZERO_REFERENCE, KeepsSumOfUploads, Lengths, OneOf, Update

__all__ = [
    "NO_UPDATE",
    "ZERO_REFERENCE",
    "AnyMethod",
    "Batch",
    "ClientInfo",
    "ClientModel",
    "ClientView",
    "Contribution",
    "Each",
    "EngineModel",
    "KeepsSumOfUploads",
    "Lengths",
    "Mean",
    "Method",
    "Model",
    "OneOf",
    "PaddedDimensions",
    "Pass",
    "ProximalTerm",
    "ServerView",
    "Sum",
    "Task",
    "Update",
]
