"""The section ``[local]``: settings in which this machine differs from the others of a federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError
from ...language.device_map import NO_MAP
from ...language.language_model import LanguageSettings
from ...rounds.run_settings import RunSettings

_LANGUAGE = (
    *("path", "dtype", "quantize", "attention", "gradient_checkpointing", "autocast", "offline"),
    *("trainer", "trainer_args", "device_map", "max_memory", "offload_folder"),
)
_RUN = ("device", "micro_batch")


@dataclass(frozen=True)
class LocalSettings(CheckedFields):
    """Settings of this machine alone. They are never compared with other machines, and never sent.

    A field that is not set has its value from ``[language]`` or ``[run]``. Factors and heads are float32 on every
    machine, so clients of different precision can be in one federation.

    Attributes:
        path: location of the base model on this machine, a folder or a name on the hub. Its files must equal those of
            the other machines.
        dtype: type of the base's weights in memory; auto takes the type of the files.
        quantize: quantization of the weights, 4bit or 8bit; none loads them unquantized although the experiment
            quantizes them.
        attention: see ``language.attention``.
        gradient_checkpointing: see ``language.gradient_checkpointing``.
        autocast: type in which matrices are multiplied; none keeps the type of the weights.
        offline: whether to load without asking the hub.
        device_map: see ``language.device_map``; none keeps the base on ``run.device`` although the experiment places it.
        max_memory: see ``language.max_memory``.
        offload_folder: see ``language.offload_folder``.
        trainer: see ``language.trainer``.
        trainer_args: see ``language.trainer_args``.
        device: device of the computation: cpu, cuda, or cuda:1 and so on.
        micro_batch: number of examples for which a gradient is computed at once; 0 uses whole batches although the
            experiment sets ``run.micro_batch``.
        start: location on this machine of the adapter that ``lora.start`` names, or of each of its adapters. Their
            weights must equal those of the other machines.
    """

    section: ClassVar[str] = "local"

    path: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    quantize: Literal["none", "4bit", "8bit"] | None = None
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] | None = None
    gradient_checkpointing: bool | None = None
    autocast: Literal["none", "bfloat16", "float16"] | None = None
    offline: bool | None = None
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[str, Any] | None = None
    offload_folder: str | None = None
    trainer: str | None = None
    trainer_args: Mapping[str, Any] | None = None
    device: str | None = None
    micro_batch: int | None = None
    start: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 0:
            raise ConfigError(
                f"local.micro_batch is a number of examples, or 0 for whole batches; it is {self.micro_batch}"
            )

    @property
    def language_fields(self) -> tuple[str, ...]:
        """Names of the fields that are set and belong to a language model."""
        return tuple(name for name in (*_LANGUAGE, "start") if getattr(self, name) is not None)

    def adapt_language(self, settings: LanguageSettings) -> LanguageSettings:
        """Replace settings of a language model by those of this machine."""
        changes = {name: getattr(self, name) for name in self.language_fields if name != "start"}
        if self.quantize == "none":
            changes["quantize"] = None
        if self.trainer == "own" and self.trainer_args is None:
            changes["trainer_args"] = {}
        if self.device_map == NO_MAP:
            changes |= dict.fromkeys(("device_map", "max_memory", "offload_folder"))
        if self.path is not None:
            # a revision belongs to the name that it was given for
            changes["revision"] = None
        return dataclasses.replace(settings, **changes)

    def adapt_run(self, settings: RunSettings) -> RunSettings:
        """Replace settings of a run by those of this machine."""
        changes = {name: getattr(self, name) for name in _RUN if getattr(self, name) is not None}
        if self.micro_batch == 0:
            changes["micro_batch"] = None
        return dataclasses.replace(settings, **changes)


def describe_precision(language: LanguageSettings, run: RunSettings) -> str:
    """Describe the precision of a language model on a machine for its log: ``"base in bfloat16, 4bit, on cuda"``."""
    parts = [f"base in {language.dtype}"]
    parts += [language.quantize] if language.quantize is not None else []
    parts += [f"autocast {language.autocast}"] if language.autocast != "none" else []
    return ", ".join([*parts, f"on {run.device}"])
