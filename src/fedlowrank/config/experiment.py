"""An experiment: what a TOML file says, made into a federation and methods."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, did_you_mean
from ..core.key import Key
from ..core.method import Method
from ..data.augment import Augment
from ..data.checks import check_minimum
from ..data.clients import make_clients, subsample_training
from ..data.concept import CONCEPTS, Concept, NaturalClusters, apply_concept
from ..data.dataset import Dataset, Normalization, normalize, subset
from ..data.federation import Federation
from ..data.partition import PARTITIONS, Partition
from ..data.sources import SOURCES
from ..data.split import SPLITS, Split
from ..data.synthetic import Synthetic
from ..data.text.sources import TEXT_SOURCES
from ..methods import METHODS
from ..models.zoo import ModelSettings
from ..simulation.run import RunSettings
from .assembly import Shares, assemble
from .header import Header, Printed, Reference
from .lora_section import lora_table, split_table
from .network_settings import NetworkSettings
from .tables import build, check_sections, varied

if TYPE_CHECKING:
    from ..language.federation import Language, LanguageSettings


@dataclass(frozen=True)
class Preparation:
    """What is done to a data set of any source.

    Attributes:
        normalize: none; or scale, to [0, 1]; or standard, to mean 0 and variance 1 of each channel or feature.
        examples: use so many of the official training examples, the same in every run; by default all.
        keep: share of its training examples that each client keeps, above 0 and at most 1, drawn at random by the seed
            of the run; validation and test stay whole.
        keep_at_least: training examples that a client keeps whatever the share, if it has so many.
    """

    normalize: Normalization = "scale"
    examples: int | None = None
    keep: float = 1.0
    keep_at_least: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"data.keep must be a share above 0 and at most 1, not {self.keep!r}.")
        check_minimum("data.keep_at_least", self.keep_at_least, 1)


@dataclass(frozen=True)
class Experiment:
    """A checked experiment.

    Attributes:
        tables: the merged tables it was made from.
        header: its name and what it runs.
        run: its protocol.
        model: its models.
        augment: how the images of training batches are changed at random.
        partition: of the data set among clients.
        split: of each client's examples.
        concept: what differs between groups of clients.
    """

    tables: dict[str, Any]
    header: Header
    run: RunSettings
    model: ModelSettings
    augment: Augment
    partition: Partition
    split: Split
    concept: Concept

    @property
    def name(self) -> str:
        """Its name, for folders and reports."""
        return self.header.name

    @property
    def compared(self) -> list[str]:
        """Methods that ``compare`` runs unless told otherwise."""
        return list(self.header.compare) or [self.header.method]

    def chosen(self, method: str | None = None) -> str:
        """The one method that a command such as ``run`` runs.

        Args:
            method: what the command line names, or None for what the file names.

        Raises:
            ConfigError: if the file names only methods to compare.
        """
        if method is None and "method" not in self.tables and len(self.compared) > 1:
            raise ConfigError(
                f"the experiment names methods to compare ({', '.join(self.compared)}) and none to run. Choose one, such as "
                f"--method {self.compared[0]}, or run them all by `fedlowrank compare`."
            )
        return method or (self.header.method if "method" in self.tables else self.compared[0])

    def method(self, name: str) -> Method[Any, Any, Any, Any]:
        """A method with the settings of ``[defaults]``, overlaid by those of ``[methods.NAME]``.

        A table that names a ``method`` is a variant of it under a name of its own, with an own ``title`` if it has one.

        Raises:
            ConfigError: if there is no such method or a setting is wrong.
        """
        own = self._own(name)
        own.pop("title", None)
        kind = str(own.pop("method", name))
        return build(method_class(kind), {**_table(self.tables, "defaults"), **own}, f"methods.{name}")

    def title(self, name: str) -> str:
        """How reports call a method or a variant."""
        own = self._own(name)
        return str(own.get("title", name if "method" in own else method_class(name).title))

    def _own(self, name: str) -> dict[str, Any]:
        return _table(_table(self.tables, "methods"), name)

    def federation(self) -> Federation:
        """The clients, from the seed of the run.

        Raises:
            DataError: if the data cannot be read or shared out so.
            TaskError: if a model does not fit.
        """
        return assemble(self, self.shares())

    def shares(self) -> Shares:
        """What each client holds, from the seed of the run.

        Raises:
            DataError: if the data cannot be read or shared out so.
        """
        _, prepared, _ = _data_settings(self.tables)
        key = self._key()
        dataset, language = self._data(key)
        if prepared.examples is not None:
            dataset = subset(dataset, prepared.examples)
        data = make_clients(dataset, self.partition, self.split, key)
        if prepared.keep < 1:
            data = subsample_training(data, prepared.keep, prepared.keep_at_least, key / "keep")
        data = apply_concept(self.concept, data, len(dataset.classes))
        return Shares(tuple(data), dataset.classes, dataset.notes, language)

    def language(self, classes: tuple[str, ...]) -> Language | None:
        """The language model for classes of those names, or None where the experiment has none."""
        if "language" not in self.tables:
            return None
        from ..language.federation import language

        return language(self._language(), self.table("lora"), self._key() / "init" / "language", classes)

    def table(self, section: str) -> dict[str, Any]:
        """The fields of a section as they were given; of ``lora`` without the ranks."""
        fields = _table(self.tables, section)
        return split_table(fields)[1] if section == "lora" else fields

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the clients, as they were given."""
        return split_table(_table(self.tables, "lora"))[0]

    def _data(self, key: Key) -> tuple[Dataset, Language | None]:
        """The data set, and the language model where it is one of texts."""
        source, prepared, settings = _data_settings(self.tables)
        if "language" not in self.tables:
            return _dataset(source, json.dumps(settings, sort_keys=True), prepared.normalize), None
        from ..language.federation import prepare

        texts = build(_known(source, TEXT_SOURCES, "data"), settings, "data").load()
        return prepare(texts, self._language(), self.table("lora"), key / "init" / "language")

    def _language(self) -> LanguageSettings:
        from ..language.federation import LanguageSettings

        return build(LanguageSettings, _with_path(_table(self.tables, "language")), "language")

    def _key(self) -> Key:
        return Key((self.run.seed,))

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """Entries of ``run.json`` besides what :func:`fedlowrank.simulation.simulate.describe` knows.

        Args:
            name: of the method or variant that runs; by default the experiment's.
        """
        t = self.tables
        name = self.header.method if name is None else name
        return {
            "variant": {"name": name, "title": self.title(name)},
            "title": self.header.title or self.name,
            "paper": self.header.paper,
            **{s: _table(t, s) for s in ("data", "partition", "split")},
            **{s: _table(t, s) for s in ("concept", "language", "lora") if s in t},
            "model": dataclasses.asdict(self.model),
            "reference": self._reference(),
            "experiment": t,
        }

    def _reference(self) -> dict[str, Any] | None:
        """The paper's numbers for the value that the varied field has here."""
        if "reference" not in self.tables:
            return None
        given = build(Reference, self.tables["reference"], "reference")
        shown: dict[str, Any] = {"label": given.label}
        if given.score:
            shown["metric"] = given.metric
        # as runs had it before there were scores
        for name in ("accuracy", "communication", "parameters", *(("score",) if given.score else ())):
            numbers: Mapping[str, Printed] = getattr(given, name)
            chosen = {key: self._printed(value, f"reference.{name}.{key}") for key, value in numbers.items()}
            # null marks what did not converge; what the paper does not have is left out
            shown[name] = {k: None if isinstance(v, str) else v for k, v in chosen.items() if v is not None}
        return shown

    def _printed(self, value: Printed, where: str) -> float | str | None:
        if not isinstance(value, list):
            return value
        if len(self.header.vary) != 1:
            raise ConfigError(f"{where} holds a list, which needs one varied field; vary is {self.header.vary!r}")
        name, values = varied(self.header.vary[0])
        if len(value) != len(values):
            raise ConfigError(f"{where} holds {len(value)} numbers, but vary has {len(values)} values: {values}")
        now: Any = self.tables
        for part in name.split("."):
            now = now.get(part) if isinstance(now, Mapping) else None
        return value[values.index(now)] if now in values else None


def load(tables: dict[str, Any], allow_code: bool = True) -> Experiment:
    """Check the tables of an experiment (see :func:`fedlowrank.config.tables.read`).

    Args:
        tables: of the experiment.
        allow_code: accept names of Python code of the user's own, which is imported when data and models are made. False for
            tables that come from a run folder, which may be somebody else's.

    Raises:
        ConfigError: if a section, a name or a field is wrong. Everything is checked before data is read.
    """
    check_sections(tables)
    top = {f.name: tables[f.name] for f in dataclasses.fields(Header) if f.name in tables}
    if isinstance(top.get("vary"), str):
        top["vary"] = [top["vary"]]
    parts = []
    for section, known, default in (
        ("partition", PARTITIONS, "iid"),
        ("split", SPLITS, "local"),
        ("concept", CONCEPTS, "none"),
    ):
        kind, fields = _tagged(tables, section, "kind", default)
        parts.append(build(_known(kind, known, section), fields, section))
    experiment = Experiment(
        tables,
        build(Header, top, "experiment"),
        build(RunSettings, _table(tables, "run"), "run"),
        build(ModelSettings, _table(tables, "model"), "model"),
        build(Augment, _table(tables, "augment"), "augment"),
        *parts,
    )
    if experiment.model.own and not allow_code:
        raise ConfigError(
            f"the run's configuration names Python code, model.names = {list(experiment.model.own)}, which would be imported "
            "and run. If you trust this run folder, add --allow-code."
        )
    for name in {*experiment.compared, experiment.header.method, *_table(tables, "methods")}:
        experiment.method(name)
    experiment.concept.check(experiment.partition, experiment.augment)
    build(NetworkSettings, _table(tables, "network"), "network")
    source, prepared, settings = _data_settings(tables)
    ranks, rest = split_table(_table(tables, "lora"))
    if "language" in tables:
        from ..language.adapt import lora_config
        from ..language.federation import LanguageSettings

        build(LanguageSettings, _with_path(_table(tables, "language")), "language")
        lora_config(dict(rest))
        build(_known(source, TEXT_SOURCES, "data"), settings, "data")
    elif source in TEXT_SOURCES:
        raise ConfigError(f"data.source {source!r} is text, which needs a section [language] with the path of a model")
    else:
        lora_table({**rest, "ranks": ranks})
    if "language" not in tables and issubclass(cls := _known(source, SOURCES, "data"), Synthetic):
        _check_synthetic(build(cls, settings, "data"), prepared, experiment.concept)
    experiment.describe()
    return experiment


def method_class(name: str) -> type[Method[Any, Any, Any, Any]]:
    """The method of that name.

    Raises:
        ConfigError: if there is none; the message names the nearest.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}. {did_you_mean(name, METHODS)}")
    return METHODS[name]


def _table(tables: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = tables.get(section, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"[{section}] must be a table of fields, not {found!r}")
    return dict(found)


def _tagged(tables: Mapping[str, Any], section: str, tag: str, default: str) -> tuple[str, dict[str, Any]]:
    fields = _table(tables, section)
    return str(fields.pop(tag, default)), fields


def _data_settings(tables: Mapping[str, Any]) -> tuple[str, Preparation, dict[str, Any]]:
    """The source of the data, what is done to them, and the source's own fields."""
    source, fields = _tagged(tables, "data", "source", "digits")
    own = {f.name: fields.pop(f.name) for f in dataclasses.fields(Preparation) if f.name in fields}
    return source, build(Preparation, own, "data"), fields


def _check_synthetic(source: Synthetic, prepared: Preparation, concept: Concept) -> None:
    """Refuse what would make another task of a synthetic regression without a word."""
    if prepared.normalize != "none":
        raise ConfigError(
            f"data.normalize is {prepared.normalize!r}, but the targets of a synthetic source are a function of its inputs "
            "as they were drawn. Set data.normalize to 'none'."
        )
    if isinstance(concept, NaturalClusters) and concept.clusters != source.clusters:
        raise ConfigError(
            f"concept.clusters is {concept.clusters}, but data.clusters is {source.clusters}: both number the same "
            "ground-truth tasks. Make them equal."
        )


def _known(name: str, known: Mapping[str, type[Any]], section: str) -> type[Any]:
    if name not in known:
        raise ConfigError(f"{section}: there is no {name!r}. {did_you_mean(name, known)}")
    return known[name]


@functools.lru_cache(maxsize=1)
def _dataset(source: str, settings: str, how: Any) -> Dataset:
    """A data set, kept for the next run of a comparison."""
    fields = _with_path(json.loads(settings))
    return normalize(build(_known(source, SOURCES, "data"), fields, "data").load(), how)


def _with_path(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with ``~`` and environment variables written out in the path."""
    if not isinstance(fields.get("path"), str):
        return fields
    return fields | {"path": os.path.expandvars(os.path.expanduser(fields["path"]))}  # noqa: PTH111 - a hub name is no path
