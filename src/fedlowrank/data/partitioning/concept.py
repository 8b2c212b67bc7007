"""Concepts: differences between clusters of clients, e.g. rotated images or shifted labels.

Client k belongs to cluster k mod C, its ground-truth task, in every concept but ``none``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError
from ..augment import Augment
from ..dataset import ClientData, Examples
from .partition import LabelGroups, Natural, Partition

# ruff: noqa: ARG002 - concepts ignore the arguments that they do not need


@dataclass(frozen=True)
class Concept(CheckedFields):
    """No concept: all clients see their examples unchanged, and there are no clusters."""

    def cluster(self, client_id: int) -> int | None:
        """Index of a client's ground-truth task, or None if there are no clusters."""
        return None

    def check(self, partition: Partition, augment: Augment) -> None:
        """Reject a partition or augmentation that this concept contradicts, before any data are read."""

    def quarter_turns(self, cluster: int) -> int:
        """Number of counter-clockwise quarter turns of a cluster's images, 0..3."""
        return 0

    def transform(self, examples: Examples, cluster: int, class_count: int) -> Examples:
        """Transform examples to those that a cluster sees; the same object if nothing changes.

        Args:
            examples: examples of one client, any number.
            cluster: index of the cluster, from 0.
            class_count: number of classes; 0 for a regression.

        Raises:
            DataError: if the concept does not apply to such examples.
        """
        return examples

    def note(self, cluster: int) -> str:
        """Text to append to notes about a client's classes; may be empty."""
        return ""


@dataclass(frozen=True)
class ClusteredConcept(Concept):
    """Client k belongs to cluster k mod C.

    Attributes:
        clusters: number C of clusters, at least 1.
    """

    clusters: int = 4

    def __post_init__(self) -> None:
        check_minimum("concept.clusters", self.clusters, 1)

    def cluster(self, client_id: int) -> int | None:
        """See `Concept.cluster`."""
        return client_id % self.clusters


@dataclass(frozen=True)
class Rotation(ClusteredConcept):
    """Cluster c sees all images (training, validation and test) rotated by 360·c/C degrees counter-clockwise.

    Quarter turns are exact, and turn the labels of pixels, too. Other angles rotate about the center of the image by
    bilinear interpolation.
    Source: Almansoori et al. (FLoRAL), after Werner et al., "Provably Personalized and Robust Federated
    Learning" (2023).

    Attributes:
        fill: value outside of the image for other angles than quarter turns, in the units of the inputs after
            normalization. 0 is black with data.normalize = "none" or "scale" (if the training part has black pixels),
            but not with "standard".
    """

    fill: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.fill):
            raise ConfigError(f"concept.fill must be a finite number, not {self.fill!r}.")

    def check(self, partition: Partition, augment: Augment) -> None:
        """See `Concept.check`."""
        if augment.flip and 4 % self.clusters:
            raise ConfigError(
                f"augment.flip mirrors images after the rotation. With concept.clusters = {self.clusters} "
                f"some are rotated by {360 / self.clusters:g} degrees, and no mirror image of their pixels "
                "exists. Set augment.flip to false, or concept.clusters to 1, 2 or 4."
            )

    def quarter_turns(self, cluster: int) -> int:
        """See `Concept.quarter_turns`; 0 for angles that are no quarter turns."""
        turns, remainder = divmod(4 * (cluster % self.clusters), self.clusters)
        return 0 if remainder else turns

    def transform(self, examples: Examples, cluster: int, class_count: int) -> Examples:
        """See `Concept.transform`."""
        x = examples.inputs
        if isinstance(x, dict) or x.ndim != 4:
            shapes = f"named ones ({', '.join(x)})" if isinstance(x, dict) else str(list(x.shape))
            raise DataError(
                f"concept 'rotation' needs images [n, channels, height, width] as inputs, not {shapes}. Use "
                "another concept.kind for these data."
            )
        if cluster % self.clusters == 0:
            return examples
        turns, (height, width) = self.quarter_turns(cluster), x.shape[2:]
        if turns % 2 and height != width:
            raise DataError(
                f"concept 'rotation' turns images of {height}×{width} into {width}×{height}, which no model "
                "accepts beside the others. Use square images, or concept.clusters = 2."
            )
        y, has_pixel_labels = examples.y, examples.y.ndim > 2
        if turns:
            y = torch.rot90(y, turns, (-2, -1)).contiguous() if has_pixel_labels else y
            return Examples(torch.rot90(x, turns, (2, 3)).contiguous(), y)
        if has_pixel_labels:
            raise DataError(
                f"concept 'rotation' with {self.clusters} clusters turns images by angles at which the labels of their pixels "
                "have no place. Set concept.clusters to 1, 2 or 4."
            )
        return Examples(rotate_images(x, 2 * math.pi * cluster / self.clusters, self.fill), examples.y)


@dataclass(frozen=True)
class LabelShift(ClusteredConcept):
    """Cluster c sees label y, of training, validation and test examples, as (y + c) mod classes; negative labels stay.

    Source: Almansoori et al. (FLoRAL), after Werner et al., "Provably Personalized and Robust Federated
    Learning" (2023).

    Attributes:
        clusters: number C of clusters, from 1 to the number of classes.
    """

    def transform(self, examples: Examples, cluster: int, class_count: int) -> Examples:
        """See `Concept.transform`."""
        if class_count == 0:
            raise DataError("concept 'label_shift' needs class labels, but these data are a regression.")
        if self.clusters > class_count:
            raise DataError(
                f"concept 'label_shift': {self.clusters} clusters cannot all differ with {class_count} classes. "
                f"Lower concept.clusters to {class_count} or less."
            )
        if not cluster:
            return examples
        shifted = (examples.y + cluster) % class_count
        # negative numbers are no class: pixels and tokens without a label
        return Examples(examples.x, torch.where(examples.y < 0, examples.y, shifted))

    def note(self, cluster: int) -> str:
        """See `Concept.note`."""
        return f" (before labels were shifted by {cluster})" if cluster else ""


@dataclass(frozen=True)
class NaturalClusters(ClusteredConcept):
    """The clients' tasks differ already; nothing is changed, but their clusters become known.

    Use it with partition ``label_groups`` and as many groups; or with ``natural`` and all clients, if client k in the
    order of the ids belongs to cluster k mod C, as in the synthetic sources.
    """

    def check(self, partition: Partition, augment: Augment) -> None:
        """See `Concept.check`."""
        if isinstance(partition, LabelGroups):
            if partition.groups != self.clusters:
                raise ConfigError(
                    f"concept 'natural' with {self.clusters} clusters does not fit partition.groups = "
                    f"{partition.groups}: each group of labels is a cluster. Make them equal."
                )
        elif not isinstance(partition, Natural):
            raise ConfigError(
                "concept 'natural' needs clients whose tasks differ by k mod C, which this partition does "
                "not make. Use partition 'label_groups' or 'natural'."
            )
        elif partition.clients is not None or partition.min_examples > 1:
            raise ConfigError(
                "concept 'natural' needs all natural clients: among some of them, client k would not be of "
                "cluster k mod C. Leave out partition.clients and partition.min_examples."
            )


CONCEPTS: dict[str, type] = {
    "none": Concept,
    "rotation": Rotation,
    "label_shift": LabelShift,
    "natural": NaturalClusters,
}
"""Concepts by name."""


def apply_concept(concept: Concept, clients: Sequence[ClientData], class_count: int) -> list[ClientData]:
    """Transform the examples of every client to those that its cluster sees; ``class_count`` is 0 for a regression.

    Clients of one cluster still share the tensors that they shared before.

    Raises:
        DataError: if the concept does not apply to the examples.
    """
    # a test part that all clients share is transformed once per cluster, not once per client, to save memory
    cache: dict[tuple[int, int], Examples] = {}
    transformed_clients = []
    for k, data in enumerate(clients):
        c = concept.cluster(k)
        if c is not None:
            parts = (data.train, data.val, data.test)
            for part in parts:
                if (id(part), c) not in cache:
                    cache[id(part), c] = concept.transform(part, c, class_count)
            train, val, test = (cache[id(part), c] for part in parts)
            notes = tuple(note + concept.note(c) for note in data.notes)
            data = ClientData(train, val, test, notes, concept.quarter_turns(c), data.name)
        transformed_clients.append(data)
    return transformed_clients


def rotate_images(x: Tensor, angle: float, fill: float) -> Tensor:
    """Rotate images [n, channels, height, width] about their center by bilinear interpolation.

    Args:
        x: images to rotate; they stay unchanged.
        angle: angle in radians, counter-clockwise.
        fill: value outside of the images.
    """
    if len(x) == 0:
        return x
    height, width = x.shape[2:]
    cos, sin = math.cos(angle), math.sin(angle)
    # source of each pixel, in units of half the height and half the width; rows count downwards
    theta = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]], device=x.device)
    grid = functional.affine_grid(theta[None].to(x.dtype), [1, 1, height, width], align_corners=False)
    # grid_sample can only pad with 0
    out = functional.grid_sample(x - fill, grid.expand(len(x), -1, -1, -1), align_corners=False) + fill
    return out.contiguous()
