"""Orders that the server did not sign: whoever forges one, the client refuses it and goes on with the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlowrank.core.errors import ConfigError
from fedlowrank.network import flower
from fedlowrank.network.client import prepare
from fedlowrank.network.deploy.keys import ClientKeys, ServerKeys, add_client, make_keys
from fedlowrank.network.deploy.node import Node
from fedlowrank.network.flower import from_records, to_records
from fedlowrank.network.messages import Answer, RegistrationRequest
from fedlowrank.network.site.signatures import OrderSigner, payload_digest, read_public_key
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.rounds.run import Run
from tests.network.deploy.node_server import PINNED_APP, OneMessageServer, make_flower_run
from tests.network.orders_by_hand import RUN_NAME, encode_download, make_order
from tests.support.local_network import assert_equals_sequential_run, local, serve_run, small

SIGNER = OrderSigner(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
SITE = SiteSettings(order_key=SIGNER.key.public_key().public_bytes_raw().hex())
KINDS = {"registration": "query.registration", "order": "train.order"}


@pytest.fixture
def folder(experiment: Any, tmp_path: Path) -> Path:
    prepare(tmp_path / "client", experiment, 1, experiment.shares(), SITE)
    return tmp_path / "client"


def asked(folder: Path, kind: str, header: str, payload: bytes, signature: str) -> tuple[str, str]:
    """Header of what a client's node answers to a message of Flower, and why it refuses."""
    server = OneMessageServer(
        to_records(header, payload, signature), KINDS[kind], make_flower_run(*PINNED_APP)
    )
    Node(server.connection(), flower.client, PINNED_APP, folder, folder).step()
    if server.reply.has_error():
        return "", server.reply.error.reason
    return from_records(server.reply.content)[0], ""


def signed(kind: str, header: str, payload: bytes, client: int = 1, signer: OrderSigner = SIGNER) -> str:
    return signer.sign(kind, client, header, payload_digest(payload))


def test_a_client_does_what_its_server_signed(sequential_run: Run, folder: Path) -> None:
    request = RegistrationRequest(RUN_NAME).to_json()
    header, why = asked(folder, "registration", request, b"", signed("registration", request, b""))
    assert (why, '"client": 1' in header) == ("", True)
    text, down = make_order(sequential_run).to_json(), encode_download(sequential_run)
    header, why = asked(folder, "order", text, down, signed("order", text, down))
    assert (why, Answer.from_json(header).steps) == ("", 3)


OTHER = OrderSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"signature": ""}, "is not signed"),
        ({"signature": "no digits"}, "is not signed by the server"),
        ({"signer": OTHER}, "is not signed by the server"),
        ({"client": 0}, "is not signed by the server"),
        ({"kind": "registration"}, "is not signed by the server"),
        ({"was": {"run": "another"}}, "is not signed by the server"),
        ({"was": {"round": 1}}, "is not signed by the server"),
        ({"was": {"branch": 1}}, "is not signed by the server"),
        ({"down": 1.0}, "is not signed by the server"),
    ],
)
def test_a_forged_order_is_refused_and_the_servers_is_answered(
    changed: dict[str, Any],
    why: str,
    sequential_run: Run,
    folder: Path,
) -> None:
    """A client that trained on a forged order of a high round would refuse the server for ever."""
    text, down = make_order(sequential_run).to_json(), encode_download(sequential_run)
    other = dataclasses.replace(make_order(sequential_run), **changed.get("was", {})).to_json()
    sent = encode_download(sequential_run, changed.get("down", 0.0))
    signature = changed.get("signature") or signed(
        changed.get("kind", "order"), other, down, changed.get("client", 1), changed.get("signer", SIGNER)
    )
    signature = changed.get("signature", signature)
    header, actual = asked(folder, "order", text, sent, signature)
    assert (header, why in actual) == ("", True), actual
    # nothing of a run was made
    assert {p.name for p in folder.iterdir()} == {"client.json", "data.tree", "audit.jsonl"}
    header, actual = asked(folder, "order", text, down, signed("order", text, down))
    assert (actual, Answer.from_json(header).steps) == ("", 3)


def test_a_forged_request_to_register_gets_nothing(folder: Path) -> None:
    request = RegistrationRequest(RUN_NAME).to_json()
    for signature in ("", signed("order", request, b""), signed("registration", "{}", b"")):
        assert "is not signed" in asked(folder, "registration", request, b"", signature)[1]


@pytest.mark.parametrize("repeats", [{0: 10**9}, {10**9: 1}, {-1: 1}, {1: 0}])
def test_impossible_numbers_of_releases_are_refused(
    repeats: dict[int, int], sequential_run: Run, folder: Path, experiment: Any
) -> None:
    """Each release takes a line of the site's privacy ledger."""
    prepare(folder, experiment, 1, experiment.shares(), SiteSettings())
    text = make_order(sequential_run, repeats=repeats).to_json()
    header, _ = asked(folder, "order", text, encode_download(sequential_run), "")
    assert "impossible numbers of releases" in Answer.from_json(header).problem


@pytest.mark.parametrize(("round", "train"), [(4, True), (5, False), (10**9, True), (-1, True)])
def test_a_round_beyond_the_last_is_refused_without_keys_too(
    round: int,
    train: bool,
    sequential_run: Run,
    folder: Path,
    experiment: Any,
) -> None:
    prepare(folder, experiment, 1, experiment.shares(), SiteSettings())
    text = dataclasses.replace(make_order(sequential_run), round=round, train=train).to_json()
    header, _ = asked(folder, "order", text, encode_download(sequential_run), "")
    assert f"an order of round {round + 1} came, but the run has 4 rounds" in Answer.from_json(header).problem
    text = make_order(sequential_run).to_json()
    assert (
        Answer.from_json(asked(folder, "order", text, encode_download(sequential_run), "")[0]).problem == ""
    )


def test_a_whole_run_is_signed(tmp_path: Path) -> None:
    made = small("scaffold", 2, 2)
    site = dataclasses.replace(SiteSettings.simulated(), order_key=SITE.order_key)
    carrier = local(made, tmp_path, site=site)
    result = serve_run(carrier, made, tmp_path / "run", keys={100: 0, 101: 1}, signer=SIGNER)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    assert {m.kind for m in carrier.log} == {"registration", "order"}


def test_keys_hold_the_key_of_orders(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, [])
    add_client(tmp_path / "keys", 1)
    server = ServerKeys.read(tmp_path / "keys" / "server")
    public = OrderSigner.read(server.orders).key.public_key().public_bytes_raw().hex()
    for i in range(2):
        assert read_public_key(ClientKeys.read(tmp_path / "keys" / f"client-{i}").orders) == public
    for path in (server.key, server.authority, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"(no private key that can be read|of another kind)"):
            OrderSigner.read(path)
    for path in (server.clients[0], server.authority, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"(no public key that can be read|of another kind)"):
            read_public_key(path)
