"""How many connections the server keeps, for how long, and what strangers cost it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from fedlowrank.network.access import connections
from fedlowrank.network.access.connections import (
    SERVER_OWNER,
    Connections,
    CountedConnection,
    Listener,
    find_network,
)
from fedlowrank.network.deploy.flower_process import find_free_port
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, make_keys
from fedlowrank.network.deploy.server_processes import SuperLink, SuperNode
from tests.support.local_network import until


@pytest.fixture
def made() -> Iterator[list[socket.socket]]:
    """Connections that the test opens; closed at its end."""
    actual: list[socket.socket] = []
    yield actual
    for one in actual:
        one.close()


def opened(all_: Connections, address: str, count: int, port: int = 1) -> list[bool]:
    """Open connections of an address as far as they are admitted."""
    actual = []
    for i in range(count):
        actual.append(all_.admits(address))
        if actual[-1]:
            connection = CountedConnection()
            connection.network = find_network(address)
            all_.add(connection, (address, port + i))
            connection.detach()
    return actual


def test_strangers_are_limited_in_all_and_by_address() -> None:
    all_ = Connections()
    assert opened(all_, "192.0.2.1", 40).count(True) == connections.MAX_UNPROVEN_BY_ADDRESS == 32
    # who owns a network of IPv6 has all of its addresses
    assert [sum(opened(all_, f"2001:db8::{i}", 20)) for i in range(1, 4)] == [20, 12, 0]
    assert opened(all_, "::ffff:192.0.2.1", 1) == [False]
    assert [sum(opened(all_, f"198.51.100.{i}", 32)) for i in range(1, 4)] == [32, 32, 0]
    # one that proves who it is makes room for another, and its address is known from then on
    assert all_.prove(("192.0.2.1", 1), b"key")
    assert opened(all_, "192.0.2.1", 2, 100) == [True, False]
    all_.remove(("198.51.100.1", 1))
    assert opened(all_, "203.0.113.1", 2) == [True, False]
    assert all_.prove(("192.0.2.1", 2), b"key")
    assert opened(all_, "192.0.2.1", 1, 200) == [True]


def test_a_client_has_a_limited_number_of_connections_and_the_server_has_not() -> None:
    all_ = Connections()
    for port in range(connections.MAX_BY_CLIENT + 1):
        opened(all_, "192.0.2.1", 1, port)
        assert all_.prove(("192.0.2.1", port), b"key") == (port < connections.MAX_BY_CLIENT)
    # one more call by a connection that is proven
    assert all_.prove(("192.0.2.1", 0), b"key")
    assert all_.prove(("192.0.2.1", connections.MAX_BY_CLIENT), b"another key")
    for port in range(100, 150):
        opened(all_, "127.0.0.1", 1, port)
        assert all_.prove(("127.0.0.1", port), SERVER_OWNER)
    # of a socket that is not counted
    assert all_.prove(None, b"key")
    assert all_.prove(("192.0.2.9", 9), b"key")


def test_a_connection_that_proves_nothing_ends_and_a_proven_one_stays(
    monkeypatch: pytest.MonkeyPatch, made: list[socket.socket]
) -> None:
    monkeypatch.setattr(connections, "PROOF_SECONDS", 0.2)
    monkeypatch.setattr(connections, "MAX_UNPROVEN_BY_ADDRESS", 3)
    port, all_ = find_free_port(), Connections()

    async def run() -> list[bytes | str]:
        with Listener.open("127.0.0.1", port, all_) as listener:
            server = await asyncio.get_running_loop().create_server(asyncio.Protocol, sock=listener)
            for _ in range(4):
                made.append(socket.create_connection(("127.0.0.1", port)))
                made[-1].setblocking(False)
                await asyncio.sleep(0.02)
            assert all_.prove(made[0].getsockname(), b"key")
            await asyncio.sleep(0.4)
            actual = [received(one) for one in made]
            for one in made:
                one.close()
            await asyncio.sleep(0.05)
            server.close()
            return actual

    assert asyncio.run(run()) == ["open", "reset", "reset", "reset"]
    assert all_.admits("127.0.0.1")


def received(one: socket.socket) -> bytes | str:
    try:
        return one.recv(1)
    except BlockingIOError:
        return "open"
    except ConnectionResetError:
        return "reset"


@pytest.mark.full
def test_forty_strangers_that_withhold_the_last_byte_cost_the_server_no_memory(
    tmp_path: Path, made: list[socket.socket]
) -> None:
    make_keys(tmp_path / "keys", 1, [])
    keys = ServerKeys.read(tmp_path / "keys" / "server")
    trusted = ssl.create_default_context(cafile=keys.authority)
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (16 << 20)
    with SuperLink(tmp_path / "link", keys) as link:
        link.register(keys.clients[0])
        place = ("127.0.0.1", link.port)
        process = psutil.Process(link.pid)
        before = process.memory_info().rss
        for _ in range(40):
            with contextlib.suppress(OSError):
                made.append(trusted.wrap_socket(socket.create_connection(place), server_hostname="localhost"))
                made[-1].sendall(head + bytes((16 << 20) - 1))
        assert process.memory_info().rss - before < 40 << 20
        # who does not even begin
        for _ in range(200):
            with contextlib.suppress(OSError):
                made.append(socket.create_connection(place, timeout=5))
        assert process.memory_info().rss - before < 60 << 20
        assert len(process.net_connections()) < 60
        node = SuperNode(
            tmp_path / "node", link.address, tmp_path, ClientKeys.read(tmp_path / "keys" / "client-0")
        )
        try:
            node.start()
            # strangers of its own address are gone by then
            until(lambda: node.read_node_id() is not None, 60)
        finally:
            node.close()
        time.sleep(connections.PROOF_SECONDS)
        assert len(process.net_connections()) < 10
