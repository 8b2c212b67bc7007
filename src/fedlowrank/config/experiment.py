"""An experiment file, parsed into the settings of its sections."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field, field_serializer, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ..core.arguments.user_code import import_named
from ..core.contract import AnyMethod, Method
from ..core.errors import ConfigError, did_you_mean
from ..core.learning.losses import AUTO, Loss
from ..data.augment import Augment
from ..data.federation import Federation
from ..data.partitioning.concept import CONCEPTS, Concept
from ..data.partitioning.own_partition import OwnPartition, as_partition, is_own_function, read_own_partition
from ..data.partitioning.partition import PARTITIONS, Partition
from ..data.partitioning.split import SPLITS, Split
from ..language.export.export_settings import ExportSettings
from ..language.language_model import Language, LanguageSettings
from ..language.lora.peft_config import make_lora_config
from ..methods import METHODS
from ..methods.shared.lora_family import LoRATraining
from ..models.fingerprint import describe_named
from ..models.zoo import ModelSettings
from ..rounds.config_changes import changes_of
from ..rounds.run_settings import RunSettings
from .assembly import Shares, assemble, load_language, share_data
from .reading.merging import (
    LayeredTables,
    find_inherited,
    format_key,
    format_toml,
    is_folder_name,
    lay_over,
)
from .reading.parsing import (
    CONFIG_ERROR,
    build,
    build_tagged,
    config_error,
    print_fields,
    print_tagged,
    refuse_conversions,
)
from .reading.unread_overrides import refuse_overrides_of_other_methods
from .sections.alternatives import SECTIONS
from .sections.data_section import DataSettings
from .sections.local_section import LocalSettings
from .sections.lora_section import LoraSettings, PeftSettings
from .sections.network_section import NetworkSettings
from .sections.reference_section import Reference
from .sections.tune_section import TuneSettings

TAGGED: dict[str, tuple[dict[str, type[Any]], str]] = {
    "partition": (PARTITIONS, SECTIONS["partition"].default),
    "split": (SPLITS, SECTIONS["split"].default),
    "concept": (CONCEPTS, SECTIONS["concept"].default),
}
"""Sections whose entry ``kind`` chooses among several dataclasses: these dataclasses, and the default."""

_DESCRIBED = ("data", "partition", "split", "concept", "language", "lora")
"""Sections that ``run.json`` holds in the form of the file."""

DEFAULT_METHOD = "pfedlora"
"""Method of an experiment that names none."""


class MethodSettings(pydantic.BaseModel):
    """A table ``[methods.NAME]``; further entries are fields of the method and override ``[defaults]``.

    Attributes:
        method: method of which NAME is a variant; by default NAME is the method.
        title: title of the variant in reports.
    """

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    method: str = ""
    title: str = ""


class ExperimentConfig(pydantic.BaseModel):
    """A parsed and checked experiment.

    Attributes:
        name: name of the experiment, for folders and reports; by default the name of its file without ``.toml``.
        title: title of the experiment for people; by default the name.
        paper: the paper that the experiment reproduces.
        method: method that ``run`` runs: a built-in method, a variant below, or your own ``module:Class``.
        compare: methods that ``compare`` runs; by default ``method``.
        seeds: seeds that ``compare`` runs; by default the seed of the run.
        vary: fields that ``compare`` varies, each ``section.field=v1,v2,...``; several fields run in every
            combination.
        language: the language model that is adapted, or None for models of other data.
        data: the source of the data.
        partition: partition of the data set among clients; ``kind`` may be your own ``module:function``.
        split: split of each client's examples; for texts whose source names a test part it is ``whole_test`` by
            default.
        concept: differences between the data of groups of clients.
        augment: random changes of the images in training batches.
        model: the models of the clients.
        lora: ranks of the clients, and LoRA layers.
        loss: loss that every method minimizes and every evaluation reports; a name stands for a table with that kind.
        export: form in which language models are written for other programs.
        run: the protocol.
        local: settings of this machine, which override ``language`` and ``run``; they are never compared or sent.
        network: settings of a server for clients that it reaches by messages.
        defaults: fields of every method.
        methods: settings of single methods, and variants of methods under other names.
        reference: numbers of a paper to show beside those of a run.
        tune: the grid search of ``fedlowrank tune``.
    """

    # infinity stays what it is: JSON has no word for it, and null would be read as no value
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    name: str = "experiment"
    title: str = ""
    paper: str = ""
    method: str = ""
    compare: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    vary: tuple[str, ...] = ()
    language: LanguageSettings | None = None
    data: DataSettings = Field({}, validate_default=True)
    partition: Partition = Field({}, validate_default=True)
    split: Split = Field({}, validate_default=True)
    concept: Concept = Concept()
    augment: Augment = Augment()
    model: ModelSettings = ModelSettings()
    lora: LoraSettings | PeftSettings = Field({}, validate_default=True)
    loss: Loss = AUTO
    export: ExportSettings = ExportSettings()
    run: RunSettings = RunSettings()
    local: LocalSettings = LocalSettings()
    network: NetworkSettings = NetworkSettings()
    defaults: dict[str, Any] = {}
    methods: dict[str, MethodSettings] = {}
    reference: Reference | None = None
    tune: TuneSettings | None = None

    _allow_code: bool = pydantic.PrivateAttr(True)
    _methods: dict[str, AnyMethod] = pydantic.PrivateAttr(default_factory=dict)

    @classmethod
    def parse(
        cls, tables: Mapping[str, Any], allow_code: bool = True, method: str | None = None
    ) -> ExperimentConfig:
        """Parse nested tables. Everything is checked before data are read.

        Args:
            tables: tables of the experiment.
            allow_code: whether to accept names of the user's own Python code. False for tables from a run folder,
                which may be somebody else's.
            method: method that will run instead of the experiment's, and is checked first.

        Raises:
            ConfigError: if a section, a name or a field is wrong.
        """
        if unknown := [name for name in tables if name not in cls.model_fields]:
            # first, because a misspelled name can make other sections look incomplete
            raise ConfigError("\n".join(map(_explain_section, unknown)))
        try:
            return cls.model_validate(dict(tables), context={"allow_code": allow_code, "method": method})
        except pydantic.ValidationError as error:
            raise config_error(error, cls) from error

    @classmethod
    def read(
        cls, path: str | Path, overrides: Sequence[str] = (), method: str | None = None
    ) -> ExperimentConfig:
        """Read an experiment file.

        Args:
            path: path of a TOML file.
            overrides: overrides ``section.field=value`` of the file.
            method: method that will run instead of the experiment's, and is checked first.

        Raises:
            ConfigError: if the file cannot be read, or something in it is wrong.
        """
        return cls.parse_laid(LayeredTables.read(Path(path), overrides), method)

    @classmethod
    def parse_laid(
        cls,
        config_tables: LayeredTables,
        method: str | None = None,
        methods: Sequence[str] = (),
        allow_code: bool = True,
    ) -> ExperimentConfig:
        """Parse tables with overrides, and check that something reads each override.

        Args:
            config_tables: tables and overrides of the experiment.
            method: see :meth:`parse`.
            methods: names of the methods that will run; by default this method or those that the experiment names.
            allow_code: see :meth:`parse`.

        Raises:
            ConfigError: if something is wrong, or nothing reads an override.
        """
        experiment = cls.parse(config_tables.merge(), allow_code, method)
        experiment.refuse_overrides_of_other_methods(
            config_tables, methods or ([method] if method else experiment.named_methods)
        )
        return experiment

    def refuse_overrides_of_other_methods(
        self, config_tables: LayeredTables, names: Sequence[str]
    ) -> list[str]:
        """Refuse overrides that the named methods do not read; see :mod:`.reading.unread_overrides`.

        Returns:
            A line for each override that only some of the methods read.
        """
        inherited = find_inherited(config_tables.tables, config_tables.overrides)
        own_fields = {
            name: [field for field in settings.model_extra or {} if (name, field) not in inherited]
            for name, settings in self.methods.items()
        }
        return refuse_overrides_of_other_methods(config_tables, own_fields, names)

    def overlay(self, tables: Mapping[str, Any]) -> ExperimentConfig:
        """Parse this experiment again with nested tables that override it.

        If the tables choose the value of a switch, such as ``run.robust.rule``, fields of this experiment that this
        value does not read are dropped: a comparison may switch a section off.
        """
        merged = self.to_dict()
        lay_over(merged, tables)
        return self.parse(merged, self._allow_code)

    def to_dict(self) -> dict[str, Any]:
        """Return the tables that :meth:`parse` reads, without default values."""
        tables = self.model_dump(mode="json", exclude_defaults=True)
        return {section: value for section, value in tables.items() if value != {}}

    def to_toml(self) -> str:
        """Return the experiment as the text of a file."""
        return format_toml(self.to_dict())

    @field_validator("vary", mode="before")
    @classmethod
    def _list_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("loss", mode="before")
    @classmethod
    def _name_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("data", "partition", "split", "concept", "lora", mode="plain")
    @classmethod
    def _choose(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Choose the dataclass of a section by its tag, or by whether there is a language model."""
        section, language = str(info.field_name), info.data.get("language") is not None
        if dataclasses.is_dataclass(value) or (section in ("data", "lora") and "language" not in info.data):
            # if [language] is wrong, that error is reported, and sections that depend on it cannot be checked
            return value
        if section == "partition":
            value = as_partition(value)
            if isinstance(value, OwnPartition):
                return value
            if isinstance(value, Mapping) and is_own_function(value.get("kind", "")):
                return read_own_partition(value)
        if section == "data":
            return DataSettings.parse(value, language)
        if section == "lora":
            kind: type[Any] = PeftSettings if language else LoraSettings
            return build(kind, value, section)
        classes, default = TAGGED[section]
        if section == "split" and _leaves_split_open(value) and _has_test_texts(info.data):
            default = "whole_test"
        advice = " A function of your own is named 'module:function'." if section == "partition" else ""
        return build_tagged(classes, value, section, default, advice=advice)

    @field_validator("*", mode="wrap")
    @classmethod
    def _collect(
        cls, value: Any, check: pydantic.ValidatorFunctionWrapHandler, info: pydantic.ValidationInfo
    ) -> Any:
        """Pass errors of a section to pydantic, which collects those of all sections in their order."""
        name = str(info.field_name)
        try:
            if name not in (*TAGGED, "data", "lora"):
                refuse_conversions(cls.model_fields[name].annotation, value, name)
            return check(value)
        except ConfigError as error:
            raise PydanticCustomError(CONFIG_ERROR, "{text}", {"text": str(error)}) from error

    @field_serializer("data", "partition", "split", "concept", "lora")
    def _print(self, value: Any, info: pydantic.FieldSerializationInfo) -> dict[str, Any]:
        short = info.exclude_defaults
        if info.field_name in TAGGED:
            if isinstance(value, OwnPartition):
                return value.to_dict()
            kinds, _ = TAGGED[info.field_name]
            return {} if type(value) is Concept else print_tagged(kinds, value, short)
        return value.to_dict(short) if isinstance(value, DataSettings) else print_fields(value, short)

    @model_validator(mode="after")
    def _check(self, info: pydantic.ValidationInfo) -> ExperimentConfig:
        # a run's folder bears the name of its method
        for field, name in [("name", self.name), *((f"methods.{format_key(n)}", n) for n in self.methods)]:
            if not is_folder_name(name):
                raise ConfigError(
                    f"{field}: {name!r} cannot be the name of a folder. Choose a name without /, \\ and control characters"
                )
        self._allow_code = (info.context or {}).get("allow_code", True)
        requested_method = (info.context or {}).get("method")
        if not self._allow_code:
            # the code of the requested method, too, so that one message names all code
            _refuse_code(
                tuple(
                    dict.fromkeys(
                        [
                            *self.code,
                            *([requested_method] if requested_method and ":" in requested_method else []),
                        ]
                    )
                )
            )
        method_names = [name for name in (requested_method, self.method, *self.compare) if name] or [
            DEFAULT_METHOD
        ]
        self._methods = {name: self._build(name) for name in dict.fromkeys((*method_names, *self.methods))}
        self._refuse_unread_ranks()
        self.concept.check(self.partition, self.augment)
        self.data.check(self.concept)
        for name in () if self.tune is None else self.tune.methods:
            if name not in self.compared_methods:
                suggestion = did_you_mean(name, self.compared_methods)
                raise ConfigError(
                    f"tune.methods.{name}: the experiment does not compare this method. {suggestion}"
                )
        if self.language is None and self.export != ExportSettings():
            raise ConfigError(
                "export: adapter folders are of language models; add [language] or remove [export]"
            )
        if self.language is None and (fields := self.local.language_fields):
            raise ConfigError(f"local.{fields[0]}: this is of a language model; add [language] or remove it")
        # raises an error for hardware and software that this machine lacks
        _ = self.run_here
        if isinstance(self.lora, PeftSettings):
            if self.local.start is not None and self.lora.start is None:
                raise ConfigError(
                    "local.start says where the adapter of lora.start lies on this machine, and lora.start is not set. Set it "
                    "in the file of all machines"
                )
            named_adapters = self.lora.start or ()
            adapter_count = 1 if isinstance(named_adapters, str) else len(named_adapters)
            if len(self.start_here) != adapter_count:
                raise ConfigError(
                    f"local.start has {len(self.start_here)} folders, and lora.start names {adapter_count} adapters; name the "
                    "location of each, in the same order"
                )
            make_lora_config(self.lora.model_extra or {})
        self.describe()
        return self

    def _refuse_unread_ranks(self) -> None:
        """Refuse a rank for clients without a rank of their own if ``lora.ranks`` gives every client one."""
        for name, method in self._methods.items():
            training = getattr(method, "training", None)
            if self.lora.ranks and isinstance(training, LoRATraining) and training.rank is not None:
                field = f"methods.{format_key(name)}.training"
                raise ConfigError(
                    f"{field}.rank = {training.rank} does nothing beside lora.ranks, which gives every client a rank: leave one "
                    f"of them out, or set {field}.common_rank, which goes before lora.ranks"
                )

    @property
    def run_here(self) -> RunSettings:
        """The settings of the run on this machine: ``[run]`` with the fields of ``[local]``."""
        return self.local.adapt_run(self.run)

    @property
    def language_here(self) -> LanguageSettings | None:
        """The settings of the language model on this machine: ``[language]`` with the fields of ``[local]``."""
        return None if self.language is None else self.local.adapt_language(self.language)

    @property
    def start_here(self) -> tuple[str, ...]:
        """Folders of the adapters to start from on this machine; empty for none."""
        start = self.lora.start if isinstance(self.lora, PeftSettings) else None
        start = start if self.local.start is None else self.local.start
        return (start,) if isinstance(start, str) else start or ()

    @property
    def allow_code(self) -> bool:
        """Whether names of the user's own Python code are accepted; see :meth:`parse`."""
        return self._allow_code

    @property
    def code(self) -> tuple[str, ...]:
        """Names of the user's own Python code, ``module:attribute``."""
        methods = (self.method, *self.compare, *self.methods, *(m.method for m in self.methods.values()))
        trainers = [] if self.language is None else [self.language.trainer, self.local.trainer or ""]
        names = [name for name in (*methods, *trainers) if ":" in name]
        return tuple(dict.fromkeys([*self._shared_code, *self.run.callbacks, *names]))

    @property
    def _shared_code(self) -> list[str]:
        """Names of the user's own code on which the results of every method depend."""
        names = [self.loss.kind] if self.loss.is_custom else []
        names += [self.partition.kind] if isinstance(self.partition, OwnPartition) else []
        return [*names, *self.model.own, *(metric for metric in self.run.metrics if ":" in metric)]

    @property
    def compared_methods(self) -> list[str]:
        """Methods that ``compare`` runs unless its options name others."""
        return list(self.compare) or [self.method or DEFAULT_METHOD]

    @property
    def named_methods(self) -> list[str]:
        """Methods that the experiment names to run or to compare."""
        return list(dict.fromkeys([*([self.method] if self.method else []), *self.compared_methods]))

    @property
    def default_method(self) -> str:
        """Method that runs unless another one is named."""
        return self.method or self.compared_methods[0]

    def choose_method(self, name: str | None = None) -> str:
        """Choose the one method that a command such as ``run`` runs.

        Args:
            name: method that the command line names, or None for the one that the file names.

        Raises:
            ConfigError: if the file names no method, or only methods to compare.
        """
        if not name and not self.method and not self.compare:
            raise ConfigError(
                'the experiment names no method. Write method = "fedavg" at the top of the file,',
                python="or pass a name; fedlowrank.METHODS has all.",
                command="or choose one, such as --method fedavg; `fedlowrank list` shows all.",
            )
        if not name and not self.method and len(self.compare) > 1:
            raise ConfigError(
                f"the experiment names methods to compare ({', '.join(self.compare)}) and none to run.",
                python=f"Pass one of them, such as {self.compare[0]!r}.",
                command=f"Choose one, such as --method {self.compare[0]}, or run them all by `fedlowrank compare`.",
            )
        return name or self.default_method

    def build_method(self, name: str) -> AnyMethod:
        """Build a method with the settings of ``[methods.NAME]`` over those of ``[defaults]``.

        Args:
            name: name of a built-in method or a variant, or ``module:Class`` of your own method.

        Raises:
            ConfigError: if there is no such method or a setting is wrong.
        """
        return self._methods[name] if name in self._methods else self._build(name)

    def _build(self, name: str) -> AnyMethod:
        own_fields = self.methods.get(name, MethodSettings()).model_extra or {}
        field_origins = {field: "defaults" for field in self.defaults if field not in own_fields}
        is_default = name == DEFAULT_METHOD and name not in (self.method, *self.compare, *self.methods)
        table = f"the default method {name}" if is_default else f"methods.{name}"
        return build(self._class_of(name), {**self.defaults, **own_fields}, table, field_origins)

    def base_method(self, name: str) -> str:
        """Built-in method or ``module:Class`` that runs under a name: a variant's method, or the name itself."""
        return (self.methods[name].method if name in self.methods else "") or name

    def _class_of(self, name: str) -> type[AnyMethod]:
        return method_class(self.base_method(name), self._allow_code)

    def method_title(self, name: str) -> str:
        """Title of a method or a variant in reports."""
        settings = self.methods.get(name, MethodSettings())
        return settings.title or (name if settings.method else self._class_of(name).title)

    def shares(self) -> Shares:
        """Data of each client, from the seed of the run; see :func:`.assembly.share_data`."""
        return share_data(self)

    def federation(self) -> Federation:
        """The clients and their models, from the seed of the run; see :func:`.assembly.assemble`."""
        return assemble(self, self.shares())

    def load_language(self, classes: tuple[str, ...], prompt_format: str = "") -> Language | None:
        """Language model for classes of those names, or None if the experiment has none; see :func:`.assembly.load_language`."""
        return load_language(self, classes, prompt_format)

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """Entries of ``run.json`` that the experiment adds to those of :func:`fedlowrank.rounds.simulate.describe_run`.

        Args:
            name: name of the method or variant that runs; by default the experiment's.
        """
        tables, name = self.to_dict(), name or self.default_method
        # the settings for all machines, with which a run that continues elsewhere is compared
        run = {} if self.run_here == self.run else {"run": dataclasses.asdict(self.run)}
        return {
            **run,
            "variant": {"name": name, "title": self.method_title(name)},
            "title": self.title or self.name,
            "paper": self.paper,
            **{section: tables[section] for section in _DESCRIBED if section in tables},
            "model": dataclasses.asdict(self.model),
            # a varied field may have its default value
            "reference": None
            if self.reference is None
            else self.reference.describe(self.vary, self.model_dump(mode="json")),
            "experiment": tables,
        }

    def describe_run(self, name: str | None = None) -> dict[str, Any]:
        """Return the entries of :meth:`describe` with digests of the user's own code, which is imported.

        The code of callbacks is kept separately, because results do not depend on it; see
        :func:`..rounds.config_changes.find_changed_callbacks`.
        """
        code = {
            "code": self._describe_code(name or self.default_method),
            "callback_code": describe_named(self._import_code(self.run.callbacks)),
        }
        return {**self.describe(name), **{section: texts for section, texts in code.items() if texts}}

    def _describe_code(self, name: str) -> dict[str, str]:
        """Describe the user's own code on which the results of a method depend, by ``module:attribute``."""
        cls, shared_code = self._class_of(name), self._import_code(self._shared_code)
        return describe_named({f"{cls.__module__}:{cls.__qualname__}": cls, **shared_code})

    def _import_code(self, names: Sequence[str]) -> dict[str, Any]:
        if not self._allow_code:
            _refuse_code(names)
        return {name: import_named(name, "code") for name in names}

    def changes_from(self, stored_config: Mapping[str, Any], name: str, vary: Mapping[str, Any]) -> list[str]:
        """Compare a run of this experiment field by field with the stored run that it would continue.

        Differences that only data and models show are found later, when the run continues.

        Args:
            stored_config: content of ``run.json`` of the stored run.
            name: name of the method or variant.
            vary: varied fields and their values.

        Returns:
            A line for each field that keeps the stored run from continuing as this one; more rounds do not.
        """
        method = self.build_method(name)
        fields = {"method": {"fields": dataclasses.asdict(method)}, "run": dataclasses.asdict(self.run)}
        new_sections = json.loads(json.dumps({**self.describe_run(name), "vary": vary, **fields}))
        del new_sections["variant"]
        stored_sections = {
            section: stored_config[section] for section in new_sections if section in stored_config
        }
        stored_sections["method"] = {"fields": stored_config["method"].get("fields")}
        # with defaults, so that a default value is named, too; parsing imports no code of these sections
        stored_experiment = self.parse(
            {section: stored_config[section] for section in _DESCRIBED if section in stored_config}
        )
        for tables, experiment in ((stored_sections, stored_experiment), (new_sections, self)):
            tables |= experiment.model_dump(mode="json", include=set(_DESCRIBED))
        return changes_of(stored_sections, new_sections, method)


def method_class(name: str, allow_code: bool = True) -> type[AnyMethod]:
    """Find a method's class.

    Args:
        name: name of a built-in method, or your own ``module:Class``.
        allow_code: whether to import your own class.

    Raises:
        ConfigError: if there is no such method; the message names the nearest.
    """
    if ":" not in name:
        if name not in METHODS:
            raise ConfigError(f"there is no method {name!r}. {did_you_mean(name, METHODS)}")
        return METHODS[name]
    if not allow_code:
        _refuse_code((name,))
    cls = import_named(name, "method")
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise ConfigError(f"method: {name!r} is no subclass of fedlowrank.Method")
    cls.check_class()
    return cls


def _explain_section(name: str) -> str:
    """Explain that an experiment has no section of this name."""
    if name == "extends":
        # a file's own entry was read with the file
        return "extends names the file that an experiment file extends, and stands only at the top of such a file"
    return f"there is no section {name!r}. {did_you_mean(name, ['extends', *ExperimentConfig.model_fields])}"


def _leaves_split_open(value: Any) -> bool:
    """Whether a section ``[split]`` names neither a kind nor a field that only one kind has."""
    return isinstance(value, Mapping) and set(value) <= {"val"}


def _has_test_texts(sections: Mapping[str, Any]) -> bool:
    """Whether the section ``[data]`` chooses a test part of texts, which the default split would not use."""
    data = sections.get("data")
    return sections.get("language") is not None and isinstance(data, DataSettings) and data.names_test


def _refuse_code(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"the run's configuration names Python code, {', '.join(names)}, which would be imported and run. "
            "If you trust this run folder,",
            python="pass allow_code=True.",
            command="add --allow-code.",
        )
