"""The section ``[lora]``: the ranks of clients, and the layers of your own module that get LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic
from torch import nn

from ...adapters.lora.lora_layers import add_lora
from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError
from ...core.key import Key


@dataclass(frozen=True)
class LoraSettings(CheckedFields):
    """LoRA of the built-in models and of your own modules; for language models see :class:`PeftSettings`.

    Attributes:
        ranks: ranks of the clients; a shorter list is repeated evenly over the clients, so that of 100 clients and a
            list of ten the first ten get the first rank. Empty: ``methods.NAME.training.rank`` for all, which is r by
            default. ``training.common_rank`` of a method goes before them.
        r: rank that the layers are made for, lowered where it is larger than a layer allows; None adds updates to the
            weights themselves and wraps nothing.
        lora_alpha: coefficient α; the scale of updates is α/r. None for a scale of 1.
        use_rslora: whether the scale is α/√r.
        target_modules: layers to wrap, by the end of their names; empty for all. The whole head is trained and never
            wrapped.
    """

    section = "lora"

    ranks: tuple[int, ...] = ()
    r: int | None = None
    lora_alpha: float | None = None
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranks(self.ranks)
        if self.r is not None:
            check_minimum("lora.r", self.r, 1)
        if self.r is None and (self.lora_alpha is not None or self.use_rslora or self.target_modules):
            raise ConfigError("lora: lora_alpha, use_rslora and target_modules are of layers: set lora.r")

    def wrap(self, make: Callable[[], nn.Module], head: str | None, key: Key) -> Callable[[], nn.Module]:
        """Turn a factory of modules into a factory of modules with LoRA layers; without r it is returned unchanged."""
        rank = self.r
        if rank is None:
            return make

        def make_with_lora() -> nn.Module:
            module = make()
            head_name = head if head is not None else getattr(module, "head_name", None)
            if head_name is None and any(name == "head" for name, _ in module.named_modules()):
                head_name = "head"
            trainable = () if head_name is None else (head_name,)
            options: dict[str, Any] = {
                "rslora": self.use_rslora,
                "target_modules": self.target_modules or "all",
            }
            wrapped_module = add_lora(module, rank, self.lora_alpha, trainable=trainable, key=key, **options)
            if head_name is not None:
                wrapped_module.head_name = head_name  # type: ignore[assignment]  # torch types attributes as tensors
            return wrapped_module

        return make_with_lora


class PeftSettings(pydantic.BaseModel):
    """The section ``[lora]`` of a language model: ranks, and the fields of ``peft.LoraConfig``.

    Attributes:
        ranks: ranks of the clients; see :class:`LoraSettings`.
        start: folder of a PEFT adapter that all clients start from, or a list of folders, such as one of each client,
            to start from the mean of the adapters. r, lora_alpha and target_modules are those of the adapter unless
            they are set; those of a mean are the sum of the ranks, and an α that gives the scale 1.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    ranks: tuple[int, ...] = ()
    start: str | tuple[str, ...] | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> PeftSettings:
        check_ranks(self.ranks)
        if self.start == ():
            raise ValueError("start is an empty list; name at least one adapter folder, or leave it out")
        return self


def check_ranks(ranks: tuple[int, ...]) -> None:
    """Raise ConfigError if a rank is no whole number of at least 1."""
    for index, rank in enumerate(ranks):
        check_minimum(f"lora.ranks, value {index}", rank, 1)


def broadcast_ranks(ranks: tuple[int, ...], client_count: int) -> list[int | None]:
    """Repeat a list of ranks evenly over the clients, in order; None for each client if the list is empty.

    Raises:
        ConfigError: if there are more ranks than clients.
    """
    if len(ranks) > client_count:
        raise ConfigError(f"lora.ranks names {len(ranks)} ranks, but there are {client_count} clients")
    return [ranks[i * len(ranks) // client_count] if ranks else None for i in range(client_count)]
