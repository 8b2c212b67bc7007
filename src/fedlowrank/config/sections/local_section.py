"""The section ``[local]``: in what this machine differs from the others of a federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError
from ...language.language_model import LanguageSettings
from ...rounds.run_settings import RunSettings

_LANGUAGE = (
    *("path", "dtype", "quantize", "attention", "gradient_checkpointing", "autocast", "offline"),
    *("trainer", "trainer_args"),
)
_RUN = ("device", "micro_batch")


@dataclass(frozen=True)
class LocalSettings(CheckedFields):
    """What holds on this machine alone. It is never compared with other machines, and never sent.

    A field that is not set is that of ``[language]`` or ``[run]``. Factors and heads are float32 on every
    machine, so clients of different precision can be in one federation.

    Attributes:
        path: where the base model lies on this machine, a folder or a name on the hub. Its files must be
            those of the others.
        dtype: of the base's weights in memory; auto takes that of the files.
        quantize: 4bit or 8bit; none loads the weights unquantized although the experiment quantizes them.
        attention: see ``language.attention``.
        gradient_checkpointing: see ``language.gradient_checkpointing``.
        autocast: type in which matrices are multiplied; none leaves that of the weights.
        offline: do not ask the hub.
        trainer: see ``language.trainer``.
        trainer_args: see ``language.trainer_args``.
        device: cpu, cuda, or cuda:1 and so on.
        micro_batch: examples of which a gradient is taken at once; 0 takes batches whole although the
            experiment sets ``run.micro_batch``.
        start: where the adapter that ``lora.start`` names lies on this machine. Its weights must be those of the others.
    """

    section: ClassVar[str] = "local"

    path: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    quantize: Literal["none", "4bit", "8bit"] | None = None
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None
    gradient_checkpointing: bool | None = None
    autocast: Literal["none", "bfloat16", "float16"] | None = None
    offline: bool | None = None
    trainer: str | None = None
    trainer_args: Mapping[str, Any] | None = None
    device: str | None = None
    micro_batch: int | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 0:
            raise ConfigError(
                f"local.micro_batch is a number of examples, or 0 for whole batches; it is {self.micro_batch}"
            )

    @property
    def language_fields(self) -> tuple[str, ...]:
        """The fields that are set and belong to a language model."""
        return tuple(name for name in (*_LANGUAGE, "start") if getattr(self, name) is not None)

    def adapt_language(self, settings: LanguageSettings) -> LanguageSettings:
        """The settings of a language model as they are on this machine."""
        changes = {name: getattr(self, name) for name in self.language_fields if name != "start"}
        if self.quantize == "none":
            changes["quantize"] = None
        if self.trainer == "own" and self.trainer_args is None:
            changes["trainer_args"] = {}
        if self.path is not None:
            # a revision is of the name that it was given for
            changes["revision"] = None
        return dataclasses.replace(settings, **changes)

    def adapt_run(self, settings: RunSettings) -> RunSettings:
        """The settings of a run as they are on this machine."""
        changes = {name: getattr(self, name) for name in _RUN if getattr(self, name) is not None}
        if self.micro_batch == 0:
            changes["micro_batch"] = None
        return dataclasses.replace(settings, **changes)


def describe_precision(language: LanguageSettings, run: RunSettings) -> str:
    """How a language model computes on a machine, for its log: ``"base in bfloat16, 4bit, on cuda"``."""
    parts = [f"base in {language.dtype}"]
    parts += [language.quantize] if language.quantize is not None else []
    parts += [f"autocast {language.autocast}"] if language.autocast != "none" else []
    return ", ".join([*parts, f"on {run.device}"])
