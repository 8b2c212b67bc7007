"""Simulated devices of the clients: speed, bandwidth, availability, and the simulated clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.switch import refuse_unread_field
from ...core.errors import ConfigError
from ...core.key import Key
from .communication import PayloadSize, Volume
from .device_table import read_device_table

MEGABIT = 1e6 / 8
"""Number of bytes in a megabit."""

_LISTS = ("speeds", "uplink", "downlink", "availability")


@dataclass(frozen=True)
class Devices(CheckedFields):
    """Capabilities of the clients' devices, in a simulation.

    A number holds for all clients. A list is repeated evenly over the clients, in order, like ``lora.ranks``: with
    100 clients and a list of two, the first fifty get the first number. A table gives each client its own numbers.

    Attributes:
        flops_per_second: floating-point operations per second of a device with speed 1; None: computation takes no time.
        speeds: relative speeds of the devices, > 0.
        uplink: bandwidth from a client to the server in megabits per second; None: uploads take no time.
        downlink: bandwidth from the server to a client in megabits per second; None: downloads take no time.
        latency: seconds that every message takes in addition.
        availability: probability, in (0, 1], that a participant stays until it has replied; otherwise its reply is lost.
        deadline: seconds from the start of a round after which replies are lost. None waits for all.
        per_client: whether lists hold one number for each client; a list of another length is then refused.
        file: path of a CSV file with a row for each client: the column ``client`` (0, 1, ...) and one or more of
            ``speed``, ``uplink``, ``downlink`` and ``availability``. It is read once, into the fields above, so that
            a run records the numbers and not the path; ``per_client`` is then set.
    """

    flops_per_second: float | None = None
    speeds: float | tuple[float, ...] = 1.0
    uplink: float | tuple[float, ...] | None = None
    downlink: float | tuple[float, ...] | None = None
    latency: float = 0.0
    availability: float | tuple[float, ...] = 1.0
    deadline: float | None = None
    per_client: bool = False
    file: str = ""

    def __post_init__(self) -> None:
        if self.file:
            self._read()
        for name in _LISTS:
            if isinstance(getattr(self, name), list):
                # Python code passes lists
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("flops_per_second", *_LISTS, "deadline"):
            self._check(name)
        if self.per_client and not any(isinstance(getattr(self, name), tuple) for name in _LISTS):
            advice = "give run.devices.speeds, uplink, downlink or availability a list"
            refuse_unread_field(self, "per_client", "run.devices", "without a list", advice)
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"run.devices.latency is a number of seconds, at least 0; it is {self.latency}")
        if any(a > 1 for a in _values(self.availability)):
            raise ConfigError(
                f"run.devices.availability is a probability in (0, 1]; it is {self.availability}"
            )
        if self.flops_per_second is None and any(s != 1 for s in _values(self.speeds)):
            raise ConfigError(
                "run.devices.speeds are relative; set run.devices.flops_per_second, too, such as 1e9"
            )
        if self.deadline is not None and not self.has_clock:
            raise ConfigError(
                "run.devices.deadline needs a simulated clock; set run.devices.flops_per_second, uplink, "
                "downlink or latency, too"
            )

    def _read(self) -> None:
        """Copy the columns of the table into the fields."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, values in read_device_table(self.file).items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"run.devices.{name} is given twice: by the setting and by the table {self.file!r}; leave out one"
                )
            object.__setattr__(self, name, values)
        object.__setattr__(self, "per_client", True)
        object.__setattr__(self, "file", "")

    def _check(self, name: str) -> None:
        value = getattr(self, name)
        values = () if value is None else _values(value)
        if (value is not None and not values) or any(not 0 < v < math.inf for v in values):
            raise ConfigError(f"run.devices.{name} must be > 0 and finite; it is {value}")

    @property
    def has_clock(self) -> bool:
        """Whether anything takes simulated time."""
        return (self.flops_per_second, self.uplink, self.downlink) != (None,) * 3 or self.latency > 0


class DeviceClock:
    """Simulates the clients' seconds and which of them drop out.

    Args:
        devices: capabilities of the clients' devices.
        client_count: number of clients in the federation.
        key: root key of the federation's randomness.

    Raises:
        ConfigError: if a list has more entries than there are clients or, with ``per_client``, fewer.
    """

    def __init__(self, devices: Devices, client_count: int, key: Key) -> None:
        self.devices = devices
        self._key, self._clients = key / "available", client_count
        self._speeds, self._up, self._down, self._available = (
            _broadcast(name, getattr(devices, name), client_count, devices.per_client)
            for name in ("speeds", "uplink", "downlink", "availability")
        )

    def unavailable(self, round: int) -> set[int]:
        """Draw the clients that drop out of a round if they take part; the same draw for every method."""
        if all(a == 1 for a in self._available):
            return set()
        draws = torch.rand(self._clients, generator=(self._key / round).generator(), dtype=torch.float64)
        return {i for i, u in enumerate(draws.tolist()) if u >= self._available[i]}

    def seconds(
        self, client_id: int, download_size: PayloadSize, upload_size: PayloadSize, flops: int
    ) -> float:
        """Compute the seconds from the start of a round until the reply of a client arrives.

        Args:
            client_id: identifier of the client.
            download_size: size of the message to the client.
            upload_size: size of the client's reply.
            flops: number of floating-point operations of the client's training.
        """
        compute = 0.0
        if self.devices.flops_per_second is not None:
            compute = flops / (self._speeds[client_id] * self.devices.flops_per_second)
        download = download_size.bytes / (self._down[client_id] * MEGABIT)
        upload = upload_size.bytes / (self._up[client_id] * MEGABIT)
        return 2 * self.devices.latency + download + compute + upload


class RoundTiming:
    """Measures a round by the simulated clock.

    Without a deadline the round takes as long as its slowest participant. With a deadline, later replies are lost and
    the round ends at the deadline. The server need not wait for a client that drops out.

    Args:
        clock: simulated clock of the clients.
        round: index of the round, from 0.
        download_volume: sizes of the messages to the participants.

    Attributes:
        round: index of the round, from 0.
    """

    def __init__(self, clock: DeviceClock, round: int, download_volume: Volume) -> None:
        self.round = round
        self._clock, self._unavailable, self._sent = clock, clock.unavailable(round), download_volume
        self._longest = 0.0

    @property
    def seconds(self) -> float | None:
        """Simulated seconds of the round so far; None if nothing takes time."""
        return self._longest if self._clock.devices.has_clock else None

    def add(self, client_id: int, upload_size: PayloadSize, flops: int) -> str | None:
        """Add the time of a participant.

        Args:
            client_id: identifier of the client.
            upload_size: size of the client's reply.
            flops: number of floating-point operations of the client's training.

        Returns:
            The reason why the reply is lost, or None if it arrives in time.
        """
        if client_id in self._unavailable:
            return "the client dropped out of the round"
        deadline = self._clock.devices.deadline
        seconds = self._clock.seconds(client_id, self._sent.of(client_id), upload_size, flops)
        self._longest = max(self._longest, seconds if deadline is None else min(seconds, deadline))
        if deadline is None or seconds <= deadline:
            return None
        return f"too slow: {seconds:.4g} s, and the deadline is {deadline:g} s"


def _values(value: float | Sequence[float]) -> tuple[float, ...]:
    return (value,) if isinstance(value, int | float) else tuple(value)


def _broadcast(
    name: str, value: float | Sequence[float] | None, client_count: int, per_client: bool
) -> list[float]:
    """Expand a setting to one number for each client; infinity, for a link that takes no time, if none is given."""
    values = (math.inf,) if value is None else _values(value)
    is_list = not isinstance(value, int | float | None)
    if len(values) > client_count > 0 or (per_client and is_list and len(values) != client_count):
        hint = "; the table of devices needs a row for each" if per_client else ""
        raise ConfigError(
            f"run.devices.{name} has {len(values)} numbers, but there are {client_count} clients{hint}"
        )
    return [values[i * len(values) // client_count] for i in range(client_count)]
