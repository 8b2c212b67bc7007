"""Limits on a server's connections: in total, by address and by client, and on the time to prove an identity."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Hashable

MAX_UNPROVEN = 128
"""Largest total number of connections whose callers have not proven an identity."""

MAX_UNPROVEN_BY_ADDRESS = 32
"""Largest number of such unproven connections from one address (IPv6: from one network of 64 bits)."""

MAX_BY_CLIENT = 16
"""Largest number of connections of one client; its node uses about four."""

PROOF_SECONDS = 15.0
"""Seconds within which a caller has to prove its identity: TLS and the headers of the first call."""

MAX_KNOWN_ADDRESSES = 4096
"""Largest number of addresses that are remembered as those of clients."""

RESET_OPTION = struct.pack("ii", 1, 0)
"""Socket option that closes at once, so that the caller sees a reset connection, after which Flower tries again."""


class Connections:
    """The open connections of a listening socket."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], CountedConnection] = {}
        self._known: dict[str, None] = {}

    def admits(self, address: str) -> bool:
        """Whether one more connection from an address is accepted."""
        unproven_counts = Counter(
            connection.network for connection in self._open.values() if connection.owner is None
        )
        network = find_network(address)
        # unknown callers cannot keep out clients that have called before
        return unproven_counts[network] < MAX_UNPROVEN_BY_ADDRESS and (
            network in self._known or unproven_counts.total() < MAX_UNPROVEN
        )

    def add(self, connection: CountedConnection, address: tuple[str, int]) -> None:
        """Record a connection by its address and port."""
        self._open[address] = connection

    def remove(self, address: tuple[str, int]) -> None:
        """Remove a connection that is closed."""
        self._open.pop(address, None)

    def prove(self, address: tuple[str, int] | None, owner: Hashable) -> bool:
        """Record the owner of a connection; False if the owner has too many, True if the connection is unknown."""
        connection = None if address is None else self._open.get((address[0], address[1]))
        if connection is None or connection.owner == owner:
            return True
        if (
            owner != SERVER_OWNER
            and sum(open_connection.owner == owner for open_connection in self._open.values())
            >= MAX_BY_CLIENT
        ):
            return False
        connection.owner = owner
        self._known.pop(connection.network, None)
        self._known[connection.network] = None
        while len(self._known) > MAX_KNOWN_ADDRESSES:
            del self._known[next(iter(self._known))]
        return True


SERVER_OWNER = "server"
"""Owner of the connections of the server's own processes, which are not limited."""


def find_network(address: str) -> str:
    """An IPv4 address, or the 64-bit network of an IPv6 address, all of whose addresses belong to one owner."""
    try:
        ip_address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip_address, ipaddress.IPv6Address):
        ipv4_address = ip_address.ipv4_mapped
        return (
            str(ipv4_address) if ipv4_address else str(ipaddress.ip_network((ip_address, 64), strict=False))
        )
    return address


class CountedConnection(socket.socket):
    """A connection that is counted until it is closed."""

    network: str
    owner: Hashable | None = None
    _place: tuple[str, int]
    _all: Connections
    _timer: asyncio.TimerHandle | None = None

    def watch(self, connections: Connections, address: tuple[str, int]) -> None:
        """Count the connection, and end it if its caller has not proven an identity in time."""
        self._all, self._place, self.network = connections, address, find_network(address[0])
        connections.add(self, address)
        self._timer = asyncio.get_running_loop().call_later(PROOF_SECONDS, self._expire)

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
                self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_OPTION)
                # the connection's transport notices the end and closes it
                self.shutdown(socket.SHUT_RD)


class Listener(socket.socket):
    """A listening socket that refuses connections beyond the limits."""

    connections: Connections

    @classmethod
    def open(cls, host: str, port: int, connections: Connections) -> Listener:
        """Open a socket that listens on an address."""
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as server_socket:
            listener = cls(
                server_socket.family, server_socket.type, server_socket.proto, fileno=server_socket.detach()
            )
        listener.setblocking(False)
        listener.connections = connections
        return listener

    def accept(self) -> tuple[CountedConnection, tuple[str, int]]:
        """Accept the next connection that is within the limits; see the base class."""
        client_socket, address = super().accept()
        connection = CountedConnection(
            client_socket.family, client_socket.type, client_socket.proto, fileno=client_socket.detach()
        )
        connection.setblocking(False)
        if not self.connections.admits(address[0]):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_OPTION)
            connection.close()
            raise ConnectionAbortedError("too many connections of callers who have not proven who they are")
        connection.watch(self.connections, (address[0], address[1]))
        return connection, address
