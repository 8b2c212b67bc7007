"""LoRA ranks of clients under a method, and the remark on ranks that a method does not read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ...core.contract import AnyMethod, ClientInfo, Task
from ..stored_settings import unwrap


@runtime_checkable
class SetsRanks(Protocol):
    """Settings ``training`` of the methods for LoRA."""

    def find_set_rank(self, client: ClientInfo) -> int | None:
        """Find the rank that the client or the method sets."""


def find_client_rank(method: AnyMethod, client: ClientInfo) -> int | None:
    """Find the rank of a client's own LoRA factors; None if it trains those of the model, as under methods not for LoRA."""
    settings = getattr(unwrap(method), "training", None)
    return settings.find_set_rank(client) if isinstance(settings, SetsRanks) else None


def list_remarks(method: AnyMethod, task: Task, title: str) -> list[str]:
    """List the remarks of a method on a task under its title, and one if clients have ranks that the method does not read."""
    remarks = method.remarks(task)
    if any(c.rank for c in task.clients) and not any(find_client_rank(method, c) for c in task.clients):
        remarks = [*remarks, "it does not read the ranks of clients: all train the factors of the model"]
    return [f"{title}: {remark}" for remark in remarks]
