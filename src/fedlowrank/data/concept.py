"""What differs between groups of clients: images turned, labels shifted, or tasks that differ by nature.

Client k belongs to cluster k mod C, its ground-truth task, in every kind but ``none``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import ConfigError, DataError
from .augment import Augment
from .counting import at_least
from .dataset import ClientData, Examples
from .partition import LabelGroups, Natural, Partition


@dataclass(frozen=True)
class Concept:
    """All clients hold the examples as they are, and nobody knows of any clusters."""

    def cluster(self, client: int) -> int | None:
        """The ground-truth task of a client, or None where there is none."""
        del client
        return None

    def check(self, partition: Partition, augment: Augment) -> None:
        """Refuse settings that contradict each other, before any data is read.

        Raises:
            ConfigError: if partition or augmentation do not go with this concept.
        """

    def quarter_turns(self, cluster: int) -> int:
        """By how many quarter turns, counter-clockwise, the images of a cluster are turned, 0..3."""
        del cluster
        return 0

    def change(self, examples: Examples, cluster: int, classes: int) -> Examples:
        """The examples as a cluster sees them; the given ones, if nothing is to be changed.

        Args:
            examples: of one client, any number.
            cluster: from 0 on.
            classes: number of classes; 0 for a regression.

        Raises:
            DataError: if such examples cannot be changed so.
        """
        del cluster, classes
        return examples

    def note(self, cluster: int) -> str:
        """What a reader of notes about a client's classes must know besides; empty for nothing."""
        del cluster
        return ""


@dataclass(frozen=True)
class Rotation(Concept):
    """Cluster c sees all images (training, validation and test) turned by 360·c/C degrees counter-clockwise.

    Quarter turns move pixels and are exact. Other angles turn about the center of the image by bilinear interpolation.
    Source: Almansoori et al. (FLoRAL), after Werner et al., "Provably Personalized and Robust Federated Learning" (2023).

    Attributes:
        clusters: number C of clusters, at least 1.
        fill: value of what a turn by another angle brings in from outside of the image, in the units of the inputs
            after normalization: what black is. 0 with data.normalize = "none" or "scale" (where black occurs in the
            training part); with "standard" it is not 0.
    """

    clusters: int = 4
    fill: float = 0.0

    def __post_init__(self) -> None:
        at_least("concept.clusters", self.clusters, 1)
        if not math.isfinite(self.fill):
            raise ConfigError(f"concept.fill must be a finite number, not {self.fill!r}.")

    def cluster(self, client: int) -> int | None:
        """See the base class."""
        return client % self.clusters

    def check(self, partition: Partition, augment: Augment) -> None:
        """See the base class."""
        del partition
        if augment.flip and 4 % self.clusters:
            raise ConfigError(
                f"augment.flip mirrors images after they were turned, and with concept.clusters = {self.clusters} some "
                f"are turned by {360 / self.clusters:g} degrees, about which no mirror of the pixels goes. Set "
                "augment.flip to false, or concept.clusters to 1, 2 or 4."
            )

    def quarter_turns(self, cluster: int) -> int:
        """See the base class; 0 for angles that are no quarter turns."""
        turns, rest = divmod(4 * (cluster % self.clusters), self.clusters)
        return 0 if rest else turns

    def change(self, examples: Examples, cluster: int, classes: int) -> Examples:
        """See the base class."""
        del classes
        x = examples.inputs
        if isinstance(x, dict) or x.ndim != 4:
            found = f"named ones ({', '.join(x)})" if isinstance(x, dict) else str(list(x.shape))
            raise DataError(
                f"concept 'rotation' needs images [n, channels, height, width] as inputs, not {found}. Use another "
                "concept.kind for these data."
            )
        if cluster % self.clusters == 0:
            return examples
        turns, (height, width) = self.quarter_turns(cluster), x.shape[2:]
        if turns % 2 and height != width:
            raise DataError(
                f"concept 'rotation' turns images of {height}×{width} into ones of {width}×{height}, which no model "
                "takes beside the others. Use square images, or concept.clusters = 2."
            )
        if turns:
            return Examples(torch.rot90(x, turns, (2, 3)).contiguous(), examples.y)
        return Examples(rotate(x, 2 * math.pi * cluster / self.clusters, self.fill), examples.y)


@dataclass(frozen=True)
class LabelShift(Concept):
    """Cluster c sees label y, of training, validation and test examples, as (y + c) mod classes.

    Source: Almansoori et al. (FLoRAL), after Werner et al., "Provably Personalized and Robust Federated Learning" (2023).

    Attributes:
        clusters: number C of clusters, from 1 to the number of classes.
    """

    clusters: int = 4

    def __post_init__(self) -> None:
        at_least("concept.clusters", self.clusters, 1)

    def cluster(self, client: int) -> int | None:
        """See the base class."""
        return client % self.clusters

    def change(self, examples: Examples, cluster: int, classes: int) -> Examples:
        """See the base class."""
        if classes == 0:
            raise DataError("concept 'label_shift' needs class labels, but these data are a regression.")
        if self.clusters > classes:
            raise DataError(
                f"concept 'label_shift': {self.clusters} clusters cannot all differ with {classes} classes. "
                f"Lower concept.clusters to {classes} or less."
            )
        return Examples(examples.x, (examples.y + cluster) % classes) if cluster else examples

    def note(self, cluster: int) -> str:
        """See the base class."""
        return f" (before labels were shifted by {cluster})" if cluster else ""


@dataclass(frozen=True)
class ByNature(Concept):
    """Nothing is changed: the clients' tasks differ already, and this says whose is whose.

    It goes with partition ``label_groups`` and as many groups, and with ``natural`` and all clients, where client k in
    the order of the ids must be of cluster k mod C, as in the synthetic sources.

    Attributes:
        clusters: number C of clusters, at least 1.
    """

    clusters: int = 4

    def __post_init__(self) -> None:
        at_least("concept.clusters", self.clusters, 1)

    def cluster(self, client: int) -> int | None:
        """See the base class."""
        return client % self.clusters

    def check(self, partition: Partition, augment: Augment) -> None:
        """See the base class."""
        del augment
        if isinstance(partition, LabelGroups):
            if partition.groups != self.clusters:
                raise ConfigError(
                    f"concept 'natural' with {self.clusters} clusters does not fit partition.groups = "
                    f"{partition.groups}: each group of labels is a cluster. Make them equal."
                )
        elif not isinstance(partition, Natural):
            raise ConfigError(
                "concept 'natural' says whose task is whose, but the clients of this partition do not differ in their "
                "tasks by k mod C. Use partition 'label_groups' or 'natural'."
            )
        elif partition.clients is not None or partition.min_examples > 1:
            raise ConfigError(
                "concept 'natural' needs all natural clients: among some of them, client k would not be of cluster "
                "k mod C. Leave out partition.clients and partition.min_examples."
            )


CONCEPTS: dict[str, type] = {
    "none": Concept,
    "rotation": Rotation,
    "label_shift": LabelShift,
    "natural": ByNature,
}
"""Concepts by name."""


def apply_concept(concept: Concept, clients: Sequence[ClientData], classes: int) -> list[ClientData]:
    """What each client sees of its examples.

    Args:
        concept: how clusters differ.
        clients: their examples, in the order of the federation.
        classes: number of classes; 0 for a regression.

    Returns:
        The clients in the same order. Tensors that clients of one cluster shared, they share still.

    Raises:
        DataError: if the examples cannot be changed so.
    """
    # A test part that all clients share is turned once a cluster: a copy a client would multiply its memory.
    known: dict[tuple[int, int], Examples] = {}

    def changed(examples: Examples, cluster: int) -> Examples:
        at = id(examples), cluster
        if at not in known:
            known[at] = concept.change(examples, cluster, classes)
        return known[at]

    out = []
    for k, data in enumerate(clients):
        c = concept.cluster(k)
        if c is not None:
            train, val, test = (changed(part, c) for part in (data.train, data.val, data.test))
            notes = tuple(note + concept.note(c) for note in data.notes)
            data = replace(data, train=train, val=val, test=test, notes=notes, quarter_turns=concept.quarter_turns(c))
        out.append(data)
    return out


def rotate(x: Tensor, angle: float, fill: float) -> Tensor:
    """Images turned about their center, bilinearly.

    Args:
        x: images [n, channels, height, width].
        angle: in radians, counter-clockwise as one sees them.
        fill: value outside of the images.

    Returns:
        New images of the same shape.
    """
    if len(x) == 0:
        return x
    height, width = x.shape[2:]
    cos, sin = math.cos(angle), math.sin(angle)
    # Where each pixel comes from, in units of half the height and half the width; rows count downwards.
    source = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], device=x.device)
    grid = functional.affine_grid(source[None].to(x.dtype), [1, 1, height, width], align_corners=False)
    # The sampler knows no fill but 0.
    out = functional.grid_sample(x - fill, grid.expand(len(x), -1, -1, -1), align_corners=False) + fill
    return out.contiguous()
