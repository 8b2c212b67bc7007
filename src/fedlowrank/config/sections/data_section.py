"""The section ``[data]``: a source, and the preparation of its examples before they are divided among clients."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.switch import refuse_unread_field
from ...core.errors import ConfigError, DataError
from ...data.arrays import Arrays
from ...data.dataset import Dataset, Normalization, normalize
from ...data.datasets.bundled import Digits
from ...data.datasets.csv_table import Csv
from ...data.datasets.huggingface import HuggingFace
from ...data.datasets.images import Folder
from ...data.datasets.shakespeare import Shakespeare
from ...data.datasets.synthetic import LowRankTeacher, Synthetic
from ...data.download.data_files import expand_path
from ...data.partitioning.concept import Concept, NaturalClusters
from ...data.sources import SOURCES
from ...data.text.text_sources import TEXT_SOURCES
from ..reading.parsing import build, build_tagged, print_fields, print_tagged, refuse_misspelled_tag

T = TypeVar("T")
DEFAULT_SOURCE = "digits"
"""Source of a section that names none."""

_OWN_SOURCES = Arrays, Csv, Folder, HuggingFace

_TEST_FIELDS = ("test", "test_split", "test_share", "held_out_category")
"""Fields of text sources that choose a test part."""


@dataclass(frozen=True)
class Preparation(CheckedFields):
    """Preparation of a data set from any source.

    Attributes:
        normalize: normalization of the inputs: none; or scale, to [0, 1]; or standard, to mean 0 and variance 1 of
            each channel or feature, both over the training examples of all clients, so not with join --data; or
            standard_per_client, the same over each client's own training examples, so that no statistic is shared.
        examples: number of official training examples to use, the same ones in every run; by default all.
        keep: share of its training examples that each client keeps, above 0 and at most 1, drawn at random with the
            seed of the run; validation and test parts stay complete.
        keep_at_least: number of training examples that a client keeps whatever the share is, if it has that many.
    """

    normalize: Normalization = "scale"
    examples: int | None = None
    keep: float = 1.0
    keep_at_least: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"data.keep must be a share above 0 and at most 1, not {self.keep!r}.")
        check_minimum("data.keep_at_least", self.keep_at_least, 1)
        if self.keep == 1:
            refuse_unread_field(
                self, "keep_at_least", "data", "with data.keep = 1", "set data.keep, such as to 0.1"
            )


@dataclass(frozen=True)
class DataSettings:
    """A source and the preparation of its examples; a file has the fields of both in one table.

    Attributes:
        source: source of the data, a :class:`~fedlowrank.data.sources.Source`, or a ``TextSource`` for a language model.
        preparation: preparation of the examples.
    """

    source: Any = Digits()
    preparation: Preparation = Preparation()

    @classmethod
    def parse(cls, values: Any, language: bool) -> DataSettings:
        """Build the settings from a table.

        Args:
            values: table of the fields.
            language: whether the source gives texts.

        Raises:
            ConfigError: if there is no such source, or a field is wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"data must be a table of fields, not {values!r}")
        refuse_misspelled_tag(values, "data", "source")
        name, shared_names = (
            str(values.get("source", DEFAULT_SOURCE)),
            {f.name for f in dataclasses.fields(Preparation)},
        )
        if name in TEXT_SOURCES and not language:
            raise ConfigError(
                f"data.source {name!r} is text, which needs a section [language] with the path of a model"
            )
        if language and name in SOURCES:
            raise ConfigError(
                f"data.source {name!r} gives no texts, and the section [language] adapts a language model to "
                f"texts. Set data.source to one of {', '.join(TEXT_SOURCES)}, or leave [language] out"
            )
        if ":" in name:
            raise ConfigError(
                f"data.source {name!r}: a function cannot be a source. Let it write an .npz file (numpy.savez with x, y "
                'and client) and set source = "arrays", or pass its arrays to Federation.from_arrays in Python.'
            )
        source_fields = {key: value for key, value in values.items() if key not in shared_names}
        sources = TEXT_SOURCES if language else SOURCES
        source = build_tagged(sources, source_fields, "data", DEFAULT_SOURCE, "source", sorted(shared_names))
        return cls(source, build(Preparation, {k: v for k, v in values.items() if k in shared_names}, "data"))

    @property
    def is_own(self) -> bool:
        """Whether the source reads the user's own data that are no texts."""
        return isinstance(self.source, _OWN_SOURCES)

    @property
    def names_test(self) -> bool:
        """Whether fields of the source choose a test part."""
        return any(getattr(self.source, name, None) for name in _TEST_FIELDS)

    def to_dict(self, short: bool) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads; ``short`` leaves out fields at their defaults."""
        source = print_tagged({**TEXT_SOURCES, **SOURCES}, self.source, short, "source")
        return {**source, **print_fields(self.preparation, short)}

    def load(self, seed: int) -> Dataset:
        """Read and normalize the data set; the last one is cached for the next run of a comparison.

        The data set is read again if a file at its path has changed.

        Args:
            seed: seed of the run, from which some synthetic data are drawn.

        Raises:
            DataError: if the data set cannot be read.
        """
        by_run = getattr(self.source, "seed", None) == "run"
        source = dataclasses.replace(self.source, seed=seed) if by_run else self.source
        return _load(source, self.preparation.normalize, _stamp_files(source))

    def check(self, concept: Concept) -> None:
        """Refuse settings that would silently change the task of a synthetic regression or of texts.

        Raises:
            ConfigError: if normalization or concept do not fit the source.
        """
        if isinstance(self.source, Shakespeare) and self.preparation.normalize != "none":
            raise ConfigError(
                f"data.normalize is {self.preparation.normalize!r}, but source 'shakespeare' gives numbers "
                "of characters, which must stay whole. Set data.normalize to 'none'."
            )
        if not isinstance(self.source, Synthetic | LowRankTeacher):
            return
        if self.preparation.normalize != "none":
            raise ConfigError(
                f"data.normalize is {self.preparation.normalize!r}, but the labels or targets of a synthetic "
                "source are a function of its inputs as they were drawn. Set data.normalize to 'none'."
            )
        clusters = self.source.clusters if isinstance(self.source, Synthetic) else None
        if clusters and isinstance(concept, NaturalClusters) and concept.clusters != clusters:
            raise ConfigError(
                f"concept.clusters is {concept.clusters}, but data.clusters is {clusters}: both "
                "number the same ground-truth tasks. Make them equal."
            )


def _stamp_files(source: Any) -> tuple[tuple[str, int, int], ...]:
    """Path, time of the last change in nanoseconds and size of each file that a source reads."""
    roots = [getattr(source, name, None) for name in ("path", "test")]
    stamps = []
    for root in (Path(expand_path(text)).absolute() for text in roots if isinstance(text, str)):
        files = root.rglob("*") if root.is_dir() else [root]
        for file in sorted(file for file in files if file.is_file()):
            status = file.stat()
            stamps.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(stamps)


@functools.lru_cache(maxsize=1)
def _load(source: Any, normalization: Normalization, files: tuple[tuple[str, int, int], ...]) -> Dataset:  # noqa: ARG001 - key
    try:
        return normalize(source.load(), normalization)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for memory of the CPU that does not suffice
        if isinstance(error, RuntimeError) and not re.search(r"allocate memory|overflow", str(error)):
            raise
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"data: the memory of this machine does not suffice for these data: {reason}. Lower the sizes in the section [data]"
        ) from error
