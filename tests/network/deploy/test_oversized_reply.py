"""A real client that replies with 400 MB where the server's half takes one: what stays on the server's disk."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from fedlowrank.network.deploy.flower_app import write_app
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, make_keys
from fedlowrank.network.deploy.server_processes import SuperLink
from fedlowrank.network.enrollment.key_request import load_key_pair
from fedlowrank.network.flower import to_records
from tests.support.local_network import until

pytestmark = pytest.mark.usefixtures("no_process_left")

SERVER_APP = """
import json, time
from pathlib import Path
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from fedlowrank.network.flower import GridTransport
from fedlowrank.network.transport import NodeMessage

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context):
    transport = GridTransport(grid)
    while not (nodes := transport.nodes()):
        time.sleep(0.1)
    (node,) = nodes
    found = []
    for round in range(2):
        transport.send([NodeMessage(node, "order", json.dumps({"round": round}), b"", 1 << 20)], "round", 300.0)
        responses, end = [], time.monotonic() + 240
        while not responses and time.monotonic() < end:
            responses = transport.receive()
            time.sleep(0.1)
        transport.cancel_orders()
        found += [[r.header, r.too_large, r.problem] for r in responses]
    Path(context.run_config["out"]).with_suffix(".part").write_text(json.dumps(found))
    Path(context.run_config["out"]).with_suffix(".part").rename(context.run_config["out"])
    time.sleep(30)
"""


@pytest.mark.full
def test_four_hundred_megabytes_do_not_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "oversized_app.py").write_text(SERVER_APP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{Path(__file__).parents[3] / 'src'}")
    out = tmp_path / "found.json"
    write_app(
        tmp_path / "app", "oversized", "oversized_app:server", "oversized_app:server", {"out": str(out)}
    )
    make_keys(tmp_path / "keys", 1, [])
    keys = ServerKeys.read(tmp_path / "keys" / "server")
    own = ClientKeys.read(tmp_path / "keys" / "client-0")
    sizes: list[int] = []
    refusals: list[tuple[int, str]] = []
    with SuperLink(tmp_path / "link", keys) as link:
        link.register(keys.clients[0])

        def watch() -> None:
            while link.alive():
                files = [p for p in (tmp_path / "link").glob("superlink.db*") if p.exists()]
                sizes.append(sum(p.stat().st_size for p in files))
                time.sleep(0.2)

        threading.Thread(target=watch, daemon=True).start()
        with http_request_response(
            link.address, False, own.authority.read_bytes(), load_key_pair(own.key)
        ) as calls:
            _, receive, send, _, _, pull, push, confirm = calls
            link.submit(tmp_path / "app")
            payload = os.urandom(400 << 20)
            for size in (len(payload), 1000):
                received = until(receive, 60)
                order, tree = received
                names = [piece.object_id for piece in iterate_object_tree(tree)]
                pull_objects(names, functools.partial(pull, order.metadata.run_id))
                confirm(order.metadata.run_id, order.metadata.message_id)
                reply = Message(to_records("large", payload[:size]), reply_to=order)
                with no_object_id_recompute():
                    reply.metadata.__dict__["_message_id"] = reply.object_id
                    objects = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
                    try:
                        expected, session = send(reply, get_object_tree(reply), 1.0)
                        for name in expected:
                            push(order.metadata.run_id, session, name, objects[name])
                    except httpx.HTTPStatusError as error:
                        refusals.append((error.response.status_code, error.response.text))
            actual = json.loads(until(lambda: out.exists() and out.read_text(), 240))
        time.sleep(1)
        print(f"largest {max(sizes) >> 20} MiB, at the end {sizes[-1] >> 20} MiB, {actual}")
        ((status, told),) = refusals
        (_, why, _), (header, *rest) = actual
        assert "too many: 1114112 bytes are taken" in why
        assert (status, told) == (413, why)
        assert (header, rest) == ("large", ["", ""])
        assert max(sizes) < 30 << 20
        assert sizes[-1] < 12 << 20
