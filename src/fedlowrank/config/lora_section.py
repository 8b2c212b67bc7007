"""The section ``[lora]`` of an experiment: which ranks clients have, and where a module of one's own gets LoRA layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..adapters.lora_layers import lora
from ..core.errors import ConfigError
from ..core.key import Key
from .tables import build


@dataclass(frozen=True)
class LoraTable:
    """LoRA of the built-in models and of one's own. For a language model ``[lora]`` holds the fields of ``peft.LoraConfig``.

    Attributes:
        ranks: of the clients; a shorter list is stretched evenly over them, so that of 100 clients and a list of ten the first
            ten get the first rank. Empty: ``methods.NAME.tuning.rank`` for all.
        r: rank that the layers are made for; None adds updates to the weights themselves and wraps nothing.
        lora_alpha: α; the scale of updates is α/r. None for a scale of 1.
        use_rslora: whether the scale is α/√r.
        target_modules: layers to wrap, by the end of their names; empty for all. The head is trained whole and never wrapped.
    """

    ranks: tuple[int, ...] = ()
    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranks(self.ranks)
        if self.r is None and (self.lora_alpha is not None or self.use_rslora or self.target_modules):
            raise ConfigError(
                "lora: lora_alpha, use_rslora and target_modules are of LoRA layers, for which lora.r is needed"
            )

    def wrapped(self, make: Callable[[], nn.Module], head: str | None, key: Key) -> Callable[[], nn.Module]:
        """A factory of the module with LoRA layers, or the factory itself where nothing is wrapped."""
        rank = self.r
        if rank is None:
            return make

        def made() -> nn.Module:
            module = make()
            whole = head if head is not None else getattr(module, "head_name", None)
            if whole is None and any(n == "head" for n, _ in module.named_modules()):
                whole = "head"
            held = () if whole is None else (whole,)
            target = self.target_modules or "all"
            found = lora(
                module, rank, self.lora_alpha, target_modules=target, rslora=self.use_rslora, trainable=held, key=key
            )
            if whole is not None:
                found.head_name = whole  # type: ignore[assignment]
            return found

        return made


def check_ranks(ranks: tuple[int, ...]) -> None:
    """Raise ConfigError where a rank is below 1."""
    if any(type(r) is not int or r < 1 for r in ranks):
        raise ConfigError(f"lora.ranks are whole numbers of at least 1; they are {list(ranks)}")


def split_table(table: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ranks of a section ``[lora]``, and its other fields."""
    rest = dict(table)
    ranks = rest.pop("ranks", ())
    if not isinstance(ranks, (list, tuple)):
        raise ConfigError(f"lora.ranks is a list of whole numbers, not {ranks!r}")
    check_ranks(tuple(ranks))
    return tuple(ranks), rest


def lora_table(table: Mapping[str, Any]) -> LoraTable:
    """The section for models other than language models."""
    made: LoraTable = build(LoraTable, dict(table), "lora")
    return made


def stretched(ranks: tuple[int, ...], clients: int) -> list[int | None]:
    """The rank of every client; None where none are given.

    Raises:
        ConfigError: if there are more ranks than clients.
    """
    if len(ranks) > clients:
        raise ConfigError(f"lora.ranks names {len(ranks)} ranks, but there are {clients} clients")
    return [ranks[i * len(ranks) // clients] if ranks else None for i in range(clients)]
