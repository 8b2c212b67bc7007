"""Tables of an experiment file in which one field says which of the others are read."""

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
    """What a table is read as, by the value of one of its fields.

    Attributes:
        default: the value where the table names none.
        switch: the field, and for each of the others the values with which it is read.
        own_code: whether the value may name code of the user's own, which reads all fields beside it.
    """

    default: Any
    switch: Switch
    own_code: bool = False

    def unread(self, old_table: Mapping[str, Any], new_table: Mapping[str, Any]) -> list[str]:
        """The fields of a table that it no longer reads with a new one laid over it, which does not give them.

        A field that no value reads is not among them, so that a misspelled one is still an error.
        """
        tag = self.switch.field
        if (
            tag not in new_table
            or isinstance(new_table[tag], Mapping)
            or new_table[tag] == old_table.get(tag, self.default)
        ):
            return []
        # several models, or the values of a grid
        values = new_table[tag] if isinstance(new_table[tag], list) else [new_table[tag]]
        field_names = [name for name in old_table if name != tag and name not in new_table]
        if self.own_code and any(map(is_own_function, values)):
            return []
        switch = self.switch
        if self.own_code and is_own_function(old_table.get(tag)):
            # what only the function of before reads
            switch = Switch(tag, {**dict.fromkeys(field_names, ("",)), **switch.reads})
        return [name for name in field_names if not any(switch.is_read(name, value) for value in values)]


def _of_classes(
    classes: Mapping[str, type[Any]], default: str, tag: str = "kind", shared_class: type[Any] | None = None
) -> Alternatives:
    """The alternatives of a table that is made into one of several dataclasses, and into one besides."""
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
    """The alternatives of settings that have a switch among their fields."""
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
"""Sections by their path."""

_OPTIMIZER = _of_classes({"sgd": SGD, "adamw": AdamW}, "sgd")
_TABLES: Mapping[str, Alternatives] = {
    "schedule": _of_switch(Schedule),
    "local_schedule": _of_switch(LocalSchedule),
    "router": _of_switch(Router),
    "weighing": _of_switch(Weighing),
    "delta_form": Alternatives("auto", Switch("kind", {"cap": ("capped",)})),
}
"""Tables in other ones, by their name."""


def find_alternatives(path: str) -> Alternatives | None:
    """The alternatives of the table of a path, such as ``defaults.optimizer``; None for one without a switch."""
    name = path.rpartition(".")[2]
    return SECTIONS.get(path) or _TABLES.get(name) or (_OPTIMIZER if name.endswith("optimizer") else None)
