"""The section ``[export]``: the form in which language models of a run are written for other programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError


@dataclass(frozen=True)
class ExportSettings(CheckedFields):
    """How ``fedlowrank adapters`` and ``run.adapters`` write the models of a run.

    Attributes:
        form: form of the written models. adapters: every model is written as a LoRA adapter of the base, which PEFT,
            vLLM and llama.cpp load, and is truncated to ``rank`` if its update has a larger rank; exact: nothing is
            truncated, and a layer whose update is a full matrix is stored whole.
        rank: maximum rank of an adapter; None for the largest rank of a client. ``fedlowrank serve`` and ``join``
            truncate only if it is set.
        merged: whether the server's model is also written as a whole model, in the dtype of the base: the base plus
            the written adapter. Only for ``fedlowrank adapters``.
        card: whether a model card, README.md, is written to each folder.
        base_model: name of the base on the Hugging Face Hub, for adapter_config.json and the card; None for the
            path in ``[language]``.
        push: repository on the Hugging Face Hub, OWNER/NAME, to which ``fedlowrank adapters RUN --push`` uploads
            the server's model. Nothing is uploaded without ``--push``.
    """

    section = "export"

    form: Literal["adapters", "exact"] = "adapters"
    rank: int | None = None
    merged: bool = False
    card: bool = True
    base_model: str | None = None
    push: str | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_minimum("export.rank", self.rank, 1)
            if self.form == "exact":
                raise ConfigError(
                    "export.rank truncates, and export.form = 'exact' does not; leave one of the two out"
                )
        if self.base_model is not None and not is_hub_name(self.base_model):
            raise ConfigError(
                f"export.base_model: {self.base_model!r} is no name on the Hugging Face Hub; type OWNER/NAME"
            )
        if self.push is not None and not is_repository(self.push):
            raise ConfigError(
                f"export.push: {self.push!r} is no repository on the Hugging Face Hub; type OWNER/NAME"
            )


def is_hub_name(text: str) -> bool:
    """Whether a text can be the name of a model on the Hugging Face Hub, NAME or OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text) is not None


def is_repository(text: str) -> bool:
    """Whether a text can be the name of a repository that somebody owns, OWNER/NAME."""
    return is_hub_name(text) and "/" in text
