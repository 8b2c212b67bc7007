"""A partition by a function of the user, and the check of what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.user_code import import_named
from ...core.errors import ConfigError, DataError
from ...core.key import Key
from .apportion import IntArray, Parts
from .checks import check_labels

PartitionFunction = Callable[..., Any]
"""Function ``function(labels, natural, generator, **options)`` that returns the positions of each client's examples."""

_SIGNATURE = "function(labels, natural, generator, **options)"


@dataclass(frozen=True)
class OwnPartition(CheckedFields):
    """A function of your own assigns the examples: ``function(labels, natural, generator, **options)``.

    The function gets the labels of all examples, integers ``[n]`` (the targets ``[n, d]`` for a regression); their
    natural clients, integers ``[n]`` with a negative number for none, or None if the data have none; and a NumPy
    generator seeded by the run, the only source of randomness that makes a run repeatable. It returns a list with the
    positions of each client's examples, from 0 to n - 1. No position may occur twice; missing positions stay unused.

    Attributes:
        kind: name of the function, ``module:function``.
        options: further entries of the table, which the function gets as keyword arguments. If ``clients`` is among
            them, the function must return that many clients.
    """

    repeatable: ClassVar[bool] = False

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> PartitionFunction | None:
        """The function, once :func:`as_partition` or :meth:`with_function` has set it."""
        function: PartitionFunction | None = vars(self).get("_function")
        return function

    @property
    def clients(self) -> int | None:
        """Number of clients, if the options contain it."""
        count = self.options.get("clients")
        return count if isinstance(count, int) else None

    def with_function(self) -> OwnPartition:
        """Return the partition with its function; a function that is only named is imported, which runs its module.

        Raises:
            ConfigError: if the function cannot be imported, is no function, or takes other arguments.
        """
        function = self.function or import_named(self.kind, "partition.kind")
        return _set_function(self, function)

    def to_dict(self) -> dict[str, Any]:
        """The table from which the partition is read."""
        return {"kind": self.kind, **self.options}

    def assign(
        self, labels: np.ndarray, class_count: int, key: Key, natural_clients: IntArray | None = None
    ) -> Parts:
        """See :meth:`fedlowrank.data.partitioning.partition.Partition.assign`.

        Raises:
            DataError: if the function returns anything but the positions of each client.
        """
        n = check_labels(labels, class_count, 1, ignores_labels=True)
        function = self.with_function().function
        if function is None:
            raise AssertionError("an imported partition has a function")
        # copies, because the function may modify them
        arguments = (
            labels.copy(),
            None if natural_clients is None else natural_clients.copy(),
            (key / "own").numpy(),
        )
        return self._check_positions(function(*arguments, **self.options), n)

    def _check_positions(self, result: Any, n: int) -> Parts:
        """Check the function's result and return the sorted positions of each client."""
        name = f"partition {self.kind!r}"
        if isinstance(result, (str, Mapping)) or not hasattr(result, "__iter__"):
            raise DataError(
                f"{name} must return a list with the positions of each client's examples, not a {type(result).__name__}."
            )
        parts = [
            self._check_client_positions(name, client_id, part, n) for client_id, part in enumerate(result)
        ]
        if not parts:
            raise DataError(
                f"{name} returned no client. Return a list with the positions of each client's examples."
            )
        if self.clients is not None and len(parts) != self.clients:
            raise DataError(
                f"{name} returned {len(parts)} clients, but partition.clients is {self.clients}. Return as many, or "
                "leave partition.clients out."
            )
        owners = np.full(n, -1)
        for client_id, part in enumerate(parts):
            if (is_taken := owners[part] >= 0).any():
                position = part[is_taken][0]
                raise DataError(
                    f"{name} gave example {position} to client {owners[position]} and to client {client_id}. Give each "
                    "example to one client at most."
                )
            owners[part] = client_id
        return parts

    @staticmethod
    def _check_client_positions(name: str, client_id: int, part: Any, n: int) -> IntArray:
        title = f"{name}: the positions of client {client_id}"
        try:
            positions = np.asarray(part)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{title} are no list of integers: {error}") from error
        if positions.size == 0:
            raise DataError(
                f"{name} gave client {client_id} no examples. Leave such clients out of the list."
            )
        if positions.dtype == bool:
            raise DataError(f"{title} are truth values. Return np.flatnonzero(mask) in the place of a mask.")
        if positions.ndim != 1 or not np.issubdtype(positions.dtype, np.integer):
            raise DataError(f"{title} must be integers [n_k], not {positions.dtype} {list(positions.shape)}.")
        if positions.min() < 0 or positions.max() >= n:
            invalid_position = positions[(positions < 0) | (positions >= n)][0]
            raise DataError(
                f"{title} must lie between 0 and {n - 1}, for there are {n} examples; one is {invalid_position}."
            )
        positions = np.sort(positions.astype(np.int64))
        if (is_repeated := positions[1:] == positions[:-1]).any():
            raise DataError(f"{title} hold example {positions[1:][is_repeated][0]} more than once.")
        return positions


def as_partition(value: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Convert a user's value to a partition: a partition, or a function that assigns the examples.

    Args:
        value: partition, which is returned unchanged, or function.
        options: keyword arguments of the function.

    Raises:
        ConfigError: if the function takes other arguments.
    """
    if not callable(value) or isinstance(value, type) or hasattr(value, "assign"):
        return value
    function = value.func if isinstance(value, functools.partial) else value
    named_object = function if hasattr(function, "__qualname__") else type(function)
    return _set_function(
        OwnPartition(f"{named_object.__module__}:{named_object.__qualname__}", options or {}), value
    )


def is_own_function(kind: Any) -> bool:
    """Whether the kind of a partition is a function of the user."""
    return callable(kind) or ":" in str(kind)


def read_own_partition(table: Mapping[str, Any]) -> Any:
    """Make the partition of a table whose ``kind`` is ``module:function`` or a function.

    Raises:
        ConfigError: if the name does not have two parts.
    """
    kind, options = table["kind"], {name: value for name, value in table.items() if name != "kind"}
    if callable(kind):
        return as_partition(kind, options)
    if not all(str(kind).partition(":")):
        raise ConfigError(f"partition.kind: a function of your own is named module:function; it is {kind!r}")
    return OwnPartition(str(kind), options)


def _set_function(partition: OwnPartition, function: Any) -> OwnPartition:
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"partition.kind: {partition.kind!r} is {function!r} and not a function {_SIGNATURE}"
        )
    try:
        inspect.signature(function).bind(None, None, None, **partition.options)
    except ValueError:
        # a function whose signature cannot be read is called without this check
        pass
    except TypeError as error:
        options_text = "".join(f", {name}={value!r}" for name, value in partition.options.items())
        raise ConfigError(
            f"partition.kind: {partition.kind!r} is called as function(labels, natural, generator{options_text}), but {error}. "
            "Further entries of [partition] are its keyword arguments."
        ) from error
    partition_with_function = OwnPartition(partition.kind, partition.options)
    object.__setattr__(partition_with_function, "_function", function)
    return partition_with_function
