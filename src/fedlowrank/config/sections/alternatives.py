"""Tables of an experiment file in which one field decides which of the others are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...adapters.mixtures.router import Router
from ...core.arguments.switch import Switch
from ...core.learning.losses import Loss
from ...core.learning.optimizer import SGD, AdamW, LocalSchedule, Schedule
from ...data.partitioning.concept import CONCEPTS
from ...data.partitioning.own_partition import is_own_function
from ...data.partitioning.partition import PARTITIONS
from ...data.partitioning.split import SPLITS
from ...data.sources import SOURCES
from ...data.text.text_sources import TEXT_SOURCES
from ...methods.shared.effective_delta import Weighing
from ...models.zoo import ModelSettings
from ...trust.trust_settings import Attack, Clipping, Compression, Privacy, Robust, SecureSums
from .data_section import DEFAULT_SOURCE, Preparation


class Alternatives(NamedTuple):
    """The fields that a table reads, by the value of one of its fields.

    Attributes:
        default: value of the field if the table does not set it.
        switch: the deciding field, and for each other field the values for which it is read.
        own_code: whether the value may name the user's own code, which reads all other fields.
    """

    default: Any
    switch: Switch
    own_code: bool = False

    def unread(self, old_table: Mapping[str, Any], new_table: Mapping[str, Any]) -> list[str]:
        """List the fields of an old table that are set there, not in the new table, and not read with the new table's tag.

        A field that no value reads is not listed, so that a misspelled one is still an error.
        """
        tag = self.switch.field
        if (
            tag not in new_table
            or isinstance(new_table[tag], Mapping)
            or new_table[tag] == old_table.get(tag, self.default)
        ):
            return []
        # a list holds several models, or the values of a grid
        values = new_table[tag] if isinstance(new_table[tag], list) else [new_table[tag]]
        field_names = [name for name in old_table if name != tag and name not in new_table]
        if self.own_code and any(map(is_own_function, values)):
            return []
        switch = self.switch
        if self.own_code and is_own_function(old_table.get(tag)):
            # fields that only the former function reads
            switch = Switch(tag, {**dict.fromkeys(field_names, ("",)), **switch.reads})
        return [name for name in field_names if not any(switch.is_read(name, value) for value in values)]


def _of_classes(
    classes: Mapping[str, type[Any]], default: str, tag: str = "kind", shared_class: type[Any] | None = None
) -> Alternatives:
    """Alternatives of a table that is built into one of several dataclasses, and into a shared class."""
    shared_names = (
        {tag} if shared_class is None else {tag, *(field.name for field in dataclasses.fields(shared_class))}
    )
    reads: dict[str, tuple[str, ...]] = {}
    for value, cls in classes.items():
        for field in dataclasses.fields(cls):
            reads[field.name] = (*reads.get(field.name, ()), value)
    return Alternatives(
        default, Switch(tag, {name: v for name, v in reads.items() if name not in shared_names})
    )


def _of_switch(cls: Any) -> Alternatives:
    """Alternatives of settings with a switch among their fields."""
    return Alternatives(getattr(cls(), cls.switch.field), cls.switch)


SECTIONS: Mapping[str, Alternatives] = {
    "data": _of_classes({**SOURCES, **TEXT_SOURCES}, DEFAULT_SOURCE, "source", Preparation),
    "partition": _of_classes(PARTITIONS, "iid")._replace(own_code=True),
    "split": _of_classes(SPLITS, "local"),
    "concept": _of_classes(CONCEPTS, "none"),
    "model": _of_switch(ModelSettings),
    "loss": _of_switch(Loss),
    "run.compression": _of_switch(Compression),
    "run.clipping": _of_switch(Clipping),
    "run.privacy": _of_switch(Privacy),
    "run.robust": _of_switch(Robust),
    "run.attack": _of_switch(Attack),
    "run.secure": _of_switch(SecureSums),
}
"""Alternatives of sections by path."""

_OPTIMIZER = _of_classes({"sgd": SGD, "adamw": AdamW}, "sgd")
_TABLES: Mapping[str, Alternatives] = {
    "schedule": _of_switch(Schedule),
    "local_schedule": _of_switch(LocalSchedule),
    "router": _of_switch(Router),
    "weighing": _of_switch(Weighing),
    "delta_form": Alternatives("auto", Switch("kind", {"cap": ("capped",)})),
}
"""Alternatives of nested tables by name."""


def find_alternatives(path: str) -> Alternatives | None:
    """Alternatives of the table at a path, such as ``defaults.optimizer``; None for a table without a switch."""
    name = path.rpartition(".")[2]
    return SECTIONS.get(path) or _TABLES.get(name) or (_OPTIMIZER if name.endswith("optimizer") else None)
