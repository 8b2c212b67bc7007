"""Limits the connections of a server: in all, by address and by client, and the time until one proves who it is."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Hashable

STRANGERS = 128
"""Connections that have not proven who they are, in all."""

ADDRESS = 32
"""Connections that have not proven who they are, of one address (IPv6: of one network of 64 bits)."""

CLIENT = 16
"""Connections of one client; its node uses about four."""

SECONDS = 15.0
"""Seconds in which a connection has to prove who it is: TLS and the headers of the first call."""

KNOWN = 4096
"""Addresses that are remembered as those of clients."""

RESET = struct.pack("ii", 1, 0)
"""Closes at once, so that the caller sees a reset connection, after which Flower tries again."""


class Connections:
    """The open connections of a listening socket."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], CountedConnection] = {}
        self._known: dict[str, None] = {}

    def admits(self, address: str) -> bool:
        """Whether one more connection of an address is accepted."""
        strangers = Counter(one.network for one in self._open.values() if one.owner is None)
        network = network_of(address)
        # strangers cannot keep out clients that have called before
        return strangers[network] < ADDRESS and (network in self._known or strangers.total() < STRANGERS)

    def add(self, connection: CountedConnection, place: tuple[str, int]) -> None:
        """Note a connection by its address and port."""
        self._open[place] = connection

    def remove(self, place: tuple[str, int]) -> None:
        """Forget a connection that is closed."""
        self._open.pop(place, None)

    def prove(self, place: tuple[str, int] | None, owner: Hashable) -> bool:
        """Note whose connection it is; False if that has too many, and True if it is not known here."""
        connection = None if place is None else self._open.get((place[0], place[1]))
        if connection is None or connection.owner == owner:
            return True
        if owner != SERVER and sum(one.owner == owner for one in self._open.values()) >= CLIENT:
            return False
        connection.owner = owner
        self._known.pop(connection.network, None)
        self._known[connection.network] = None
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        return True


SERVER = "server"
"""The owner of connections of the server's own processes, which are not limited."""


def network_of(address: str) -> str:
    """An IPv4 address, or the network of an IPv6 address, whose owner has all of its addresses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((found, 64), strict=False))
    return address


class CountedConnection(socket.socket):
    """A connection that is counted until it is closed."""

    network: str
    owner: Hashable | None = None
    _place: tuple[str, int]
    _all: Connections
    _timer: asyncio.TimerHandle | None = None

    def watch(self, all_: Connections, place: tuple[str, int]) -> None:
        """Count it, and end it if it has not proven who it is in time."""
        self._all, self._place, self.network = all_, place, network_of(place[0])
        all_.add(self, place)
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._expire)

    def close(self) -> None:
        """See the base class."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._all.remove(self._place)
        super().close()

    def _expire(self) -> None:
        if self.owner is None:
            with contextlib.suppress(OSError):
                self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                # its transport sees the end, and closes it
                self.shutdown(socket.SHUT_RD)


class Listener(socket.socket):
    """A listening socket that refuses connections beyond the limits."""

    connections: Connections

    @classmethod
    def open(cls, host: str, port: int, connections: Connections) -> Listener:
        """Listen on an address."""
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as made:
            listener = cls(made.family, made.type, made.proto, fileno=made.detach())
        listener.setblocking(False)
        listener.connections = connections
        return listener

    def accept(self) -> tuple[CountedConnection, tuple[str, int]]:
        """Accept the next connection that is not beyond the limits; see the base class."""
        accepted, address = super().accept()
        connection = CountedConnection(
            accepted.family, accepted.type, accepted.proto, fileno=accepted.detach()
        )
        connection.setblocking(False)
        if not self.connections.admits(address[0]):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
            raise ConnectionAbortedError("too many connections of callers who have not proven who they are")
        connection.watch(self.connections, (address[0], address[1]))
        return connection, address
