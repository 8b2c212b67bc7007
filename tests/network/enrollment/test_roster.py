"""Keys that sites make themselves: the request, its acceptance, the roster that all compare, and the end of a key."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedlowrank.cli.deployment import key_commands as commands
from fedlowrank.cli.main import main
from fedlowrank.core.errors import ConfigError
from fedlowrank.network.deploy.keys import (
    ClientKeys,
    ServerKeys,
    find_expired_clients,
    make_keys,
    revoke_client,
)
from fedlowrank.network.enrollment import roster as rosters
from fedlowrank.network.enrollment.key_request import load_client_key, request_key
from fedlowrank.network.enrollment.roster import KeyRoster, compute_fingerprint

Said = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """What was printed since the last call, in one line."""
    monkeypatch.setattr(commands.OUT, "_width", 200)

    def printed() -> str:
        actual = capsys.readouterr()
        return " ".join((actual.out + actual.err).split())

    return printed


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    """An operator's folder, in which no client has a key."""
    make_keys(tmp_path / "keys", 0, ["fl.example.org"])
    return tmp_path / "keys"


def copied(given: Path, site: Path) -> None:
    """What a site does with the files that it is given."""
    for path in given.iterdir():
        shutil.copy(path, site)


def digits(key: ec.EllipticCurvePublicKey) -> str:
    """The fingerprint by its definition."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    number = str(int(hashlib.sha256(der).hexdigest(), 16) % 10**30).zfill(30)
    return " ".join(number[i : i + 5] for i in range(0, 30, 5))


def test_a_site_makes_its_key_and_the_operator_never_has_it(
    operator: Path, tmp_path: Path, said: Said
) -> None:
    site = tmp_path / "site"
    assert main(["keys", str(site), "--request", "3"]) == 0
    private = load_ssh_private_key((site / "client.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    here = digits(private.public_key())
    assert f"read your key's fingerprint aloud to the operator: {here}" in said()
    assert {p.name for p in site.iterdir()} == {"client.key", "request.json"}
    assert b"PRIVATE" not in (site / "request.json").read_bytes()
    # the private key's number is in no other file
    secret = f"{private.private_numbers().private_value:x}"
    assert main(["keys", str(operator), "--accept", str(site / "request.json"), "--days", "30"]) == 0
    there = said()
    assert f"its key has the fingerprint {here}" in there
    authority = x509.load_pem_x509_certificate((operator / "server" / "ca.crt").read_bytes()).public_key()
    assert isinstance(authority, ec.EllipticCurvePublicKey)
    assert digits(authority) in there
    assert {p.name for p in (operator / "client-3").iterdir()} == {"ca.crt", "orders.pub", "roster.json"}
    for path in operator.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes().hex()
            assert path.name in ("ca.key", "server.key", "orders.key") or b"PRIVATE" not in path.read_bytes()
    copied(operator / "client-3", site)
    own = ClientKeys.read(site)
    assert commands.check_own_key(own, 3) == ""
    public = ServerKeys.read(operator / "server").clients[3]
    assert load_ssh_public_key(public.read_bytes()) == private.public_key()
    # all sites see the same roster
    assert main(["keys", str(operator), "--roster"]) == 0
    one = said()
    assert here in one
    for other in (site, operator / "server"):
        assert main(["keys", str(other), "--roster"]) == 0
        assert said() == one


def test_a_roster_is_signed_by_the_authority_of_the_certificate(operator: Path, tmp_path: Path) -> None:
    """Verified with nothing of the package: the signature covers the table without spaces, its keys sorted."""
    request_key(tmp_path / "site", 0)
    assert (
        main(["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json"), "--days", "10"])
        == 0
    )
    table = json.loads((operator / "client-0" / "roster.json").read_text())
    authority = x509.load_pem_x509_certificate((operator / "client-0" / "ca.crt").read_bytes()).public_key()
    assert isinstance(authority, ec.EllipticCurvePublicKey)
    content = json.dumps(table["clients"], sort_keys=True, separators=(",", ":")).encode()
    signed = b"fedlowrank roster 1\n" + content
    authority.verify(bytes.fromhex(table["signature"]), signed, ec.ECDSA(hashes.SHA384()))
    ends = datetime.datetime.fromisoformat(table["clients"]["0"]["expires"])
    left = ends - datetime.datetime.now(datetime.UTC)
    assert left / datetime.timedelta(days=1) == pytest.approx(10, abs=0.01)


def test_commands_name_a_folder_as_a_shell_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator, site = tmp_path / "our keys", tmp_path / "site of us"
    for arguments in (
        [str(operator), "--clients", "0"],
        [str(site), "--request", "1"],
        [str(operator), "--accept", str(site / "request.json")],
    ):
        assert main(["keys", *arguments]) == 0
    text = " ".join(capsys.readouterr().out.split())
    commands = [shlex.split(part) for part in text.split("`")[1::2] if str(tmp_path) in part]
    assert [command[2:4] for command in commands] == [
        [str(operator), "--accept"],
        [str(site), "--roster"],
        [str(operator), "--revoke"],
    ]


@pytest.mark.parametrize(
    "changed", ["key", "expires", "fingerprint", "number", "signature", "authority", "none"]
)
def test_a_roster_that_was_changed_is_refused(changed: str, operator: Path, tmp_path: Path) -> None:
    for client in (0, 1):
        request_key(tmp_path / f"site-{client}", client)
        request = tmp_path / f"site-{client}" / "request.json"
        assert main(["keys", str(operator), "--accept", str(request)]) == 0
    path, authority = operator / "server" / "roster.json", operator / "server" / "ca.crt"
    table = json.loads(path.read_text())
    clients = table["clients"]
    if changed == "key":
        clients["0"]["key"] = clients["1"]["key"]
    elif changed == "expires":
        clients["0"]["expires"] = "2099-01-01T00:00:00+00:00"
    elif changed == "fingerprint":
        clients["0"]["fingerprint"] = clients["1"]["fingerprint"]
    elif changed == "number":
        clients["7"] = clients.pop("1")
    elif changed == "signature":
        table["signature"] = "00"
    elif changed == "authority":
        make_keys(tmp_path / "other", 0, [])
        authority = tmp_path / "other" / "server" / "ca.crt"
    path.write_text(json.dumps(table))
    if changed == "none":
        assert set(KeyRoster.read(path, authority).clients) == {0, 1}
        return
    with pytest.raises(ConfigError, match=r"roster\.json is (not signed by|no roster)"):
        KeyRoster.read(path, authority)
    if changed != "authority":
        with pytest.raises(ConfigError, match=r"roster\.json"):
            ServerKeys.read(operator / "server")


def test_two_numbers_differ_where_one_key_differs(operator: Path, tmp_path: Path) -> None:
    """The number that sites compare shows an operator who gives them different rosters."""
    actual = []
    for name in ("one", "two"):
        shutil.copytree(operator, tmp_path / name)
        for client in (0, 1):
            site = tmp_path / ("site-0" if client == 0 else f"{name}-site-1")
            if not site.exists():
                request_key(site, client)
            assert main(["keys", str(tmp_path / name), "--accept", str(site / "request.json")]) == 0
        here = tmp_path / name / "client-0"
        actual.append(KeyRoster.read(here / "roster.json", here / "ca.crt"))
    assert actual[0].clients[0].key == actual[1].clients[0].key
    assert actual[0].number != actual[1].number


@pytest.mark.parametrize("spoiled", ["client", "key", "signature", "nothing", "other curve"])
def test_a_request_of_somebody_elses_key_or_number_is_refused(
    spoiled: str, operator: Path, tmp_path: Path, said: Said
) -> None:
    """Whoever carries a request cannot give the key another number, or the number another key."""
    request_key(tmp_path / "site", 1)
    request_key(tmp_path / "other", 2)
    path = tmp_path / "site" / "request.json"
    table, other = (json.loads((tmp_path / n / "request.json").read_text()) for n in ("site", "other"))
    if spoiled == "client":
        table["client"] = 2
    elif spoiled == "key":
        table["key"] = other["key"]
    elif spoiled == "signature":
        table["signature"] = other["signature"]
    elif spoiled == "other curve":
        weak = ec.generate_private_key(ec.SECP256R1()).public_key()
        table["key"] = weak.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    else:
        table = {}
    path.write_text(json.dumps(table))
    before = sorted(p for p in operator.rglob("*"))
    assert main(["keys", str(operator), "--accept", str(path)]) == 1
    message = said()
    assert "request.json" in message
    assert ("`fedlowrank keys FOLDER --request N`" in message) is (spoiled == "nothing")
    assert sorted(operator.rglob("*")) == before


def test_a_fingerprint_that_was_read_aloud_is_compared(operator: Path, tmp_path: Path, said: Said) -> None:
    made = request_key(tmp_path / "site", 0)
    accept = ["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json"), "--fingerprint"]
    assert main([*accept, made.fingerprint[:-1] + str((int(made.fingerprint[-1]) + 1) % 10)]) == 1
    assert "it is not the request that the client made" in said()
    assert not (operator / "client-0").exists()
    assert main([*accept, made.fingerprint.replace(" ", "")]) == 0


def test_a_client_gets_another_key_only_once_the_first_is_revoked(
    operator: Path, tmp_path: Path, said: Said
) -> None:
    first = request_key(tmp_path / "first", 0)
    second = request_key(tmp_path / "second", 0)
    accept = ["keys", str(operator), "--accept"]
    assert main([*accept, str(tmp_path / "first" / "request.json")]) == 0
    said()
    assert main([*accept, str(tmp_path / "second" / "request.json")]) == 1
    assert "client 0 has another key" in said()
    assert main(["keys", str(operator), "--revoke", "0"]) == 0
    assert KeyRoster.read(operator / "server" / "roster.json", operator / "server" / "ca.crt").clients == {}
    assert main([*accept, str(tmp_path / "second" / "request.json")]) == 0
    entries = KeyRoster.read(operator / "client-0" / "roster.json", operator / "client-0" / "ca.crt").clients
    assert entries[0].fingerprint == second.fingerprint != first.fingerprint
    # the site that was revoked sees it in the roster of now
    copied(operator / "client-0", tmp_path / "first")
    with pytest.raises(ConfigError, match="no such key of client 0"):
        commands.check_own_key(ClientKeys.read(tmp_path / "first"), 0)
    with pytest.raises(ConfigError, match="keys are never overwritten"):
        request_key(tmp_path / "first", 0)
    # whoever stole the first key sends its request again
    assert main(["keys", str(operator), "--revoke", "0"]) == 0
    said()
    assert main([*accept, str(tmp_path / "first" / "request.json")]) == 1
    assert "a key that was revoked" in said()


def test_a_key_belongs_to_one_client(operator: Path, tmp_path: Path, said: Said) -> None:
    request_key(tmp_path / "site", 0)
    key = load_client_key(tmp_path / "site" / "client.key")
    line = json.loads((tmp_path / "site" / "request.json").read_text())["key"]
    signature = key.sign(
        b"fedlowrank request 1\n" + json.dumps([1, line]).encode(), ec.ECDSA(hashes.SHA384())
    )
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"client": 1, "key": line, "signature": signature.hex()}))
    assert main(["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json")]) == 0
    said()
    assert main(["keys", str(operator), "--accept", str(second)]) == 1
    assert "has the key of client 0; a key belongs to one client" in said()


def test_a_key_made_by_the_operator_is_not_replaced_unnoticed(tmp_path: Path, said: Said) -> None:
    assert main(["keys", str(tmp_path / "keys"), "--clients", "1"]) == 0
    assert "whoever has or had this folder can act as every client" in said()
    request_key(tmp_path / "site", 0)
    assert main(["keys", str(tmp_path / "keys"), "--revoke", "0"]) == 0
    assert main(["keys", str(tmp_path / "keys"), "--accept", str(tmp_path / "site" / "request.json")]) == 1
    assert "holds a private key that was made here" in said()


def at(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the time of the rosters be so many days from now."""

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.now(tz) + datetime.timedelta(days=days)

    fake = type(datetime)("datetime")
    fake.__dict__.update({**datetime.__dict__, "datetime": Later})
    monkeypatch.setattr(rosters, "datetime", fake)


def test_a_key_ends_and_is_prolonged(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for client, days in ((0, 10), (1, 30)):
        site = tmp_path / f"site-{client}"
        request_key(site, client)
        accept = ["keys", str(operator), "--accept", str(site / "request.json")]
        assert main([*accept, "--days", str(days)]) == 0
    server = operator / "server"
    assert list(ServerKeys.read(server).clients) == [0, 1]
    with monkeypatch.context() as patch:
        at(patch, 9.9)
        assert list(ServerKeys.read(server).clients) == [0, 1]
        at(patch, 10.1)
        assert list(ServerKeys.read(server).clients) == [1]
        assert find_expired_clients(server) == [0]
        assert any("the key of client 0 ended on" in line for line in caplog.messages)
        # by another number, and by the same request again
        assert main(["keys", str(operator), "--prolong", "0", "--days", "5"]) == 0
        assert list(ServerKeys.read(server).clients) == [0, 1]
        at(patch, 15.2)
        assert list(ServerKeys.read(server).clients) == [1]
        accept = ["keys", str(operator), "--accept", str(tmp_path / "site-0" / "request.json"), "--days", "5"]
        assert main(accept) == 0
        assert list(ServerKeys.read(server).clients) == [0, 1]
        # a client notices by its own files
        at(patch, 31)
        copied(operator / "client-1", tmp_path / "site-1")
        commands.check_own_key(ClientKeys.read(tmp_path / "site-1"), 1)
        assert any("ask the operator to prolong it" in line for line in caplog.messages)


def test_a_key_that_ends_while_a_server_runs_is_revoked(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_key(tmp_path / "site", 0)
    assert (
        main(["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json"), "--days", "1"]) == 0
    )
    monkeypatch.setattr(commands, "LOOK", 0.01)
    public = operator / "server" / "clients" / "0.pub"
    with commands.refusing_expired(operator / "server"):
        time.sleep(0.05)
        assert public.exists()
        at(monkeypatch, 1.1)
        for _ in range(500):
            if not public.exists():
                break
            time.sleep(0.01)
    assert (operator / "server" / "expired" / "0-1.pub").exists()
    # unlike one that was revoked, it may live on
    assert main(["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json")]) == 0
    assert public.exists()
    with commands.refusing_expired(None):
        pass


def test_a_private_key_may_need_a_passphrase(
    operator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    site, word = tmp_path / "site", "correct horse"
    assert main(["keys", str(site), "--request", "0", "--passphrase"]) == 1
    assert "set FEDLOWRANK_PASSPHRASE" in said()
    assert not (site / "client.key").exists()
    monkeypatch.setenv("FEDLOWRANK_PASSPHRASE", word)
    assert main(["keys", str(site), "--request", "0", "--passphrase"]) == 0
    assert main(["keys", str(operator), "--accept", str(site / "request.json")]) == 0
    copied(operator / "client-0", site)
    with pytest.raises(TypeError):
        load_pem_private_key((site / "client.key").read_bytes(), None)
    assert isinstance(
        load_pem_private_key((site / "client.key").read_bytes(), word.encode()), ec.EllipticCurvePrivateKey
    )
    own = ClientKeys.read(site)
    assert commands.check_own_key(own, 0) == word
    monkeypatch.setenv("FEDLOWRANK_PASSPHRASE", "wrong")
    with pytest.raises(ConfigError, match="the passphrase is wrong"):
        commands.check_own_key(own, 0)
    monkeypatch.delenv("FEDLOWRANK_PASSPHRASE")
    with pytest.raises(ConfigError, match="needs its passphrase"):
        commands.check_own_key(own, 0)
    with pytest.raises(ConfigError, match="no private key that can be read"):
        load_client_key(site / "ca.crt")
    # a key without one needs none, even if one is set
    request_key(tmp_path / "open", 0)
    assert load_client_key(tmp_path / "open" / "client.key", "any") is not None


def test_a_server_refuses_a_key_that_is_not_the_one_of_the_roster(operator: Path, tmp_path: Path) -> None:
    """Somebody who can write the server's folder, but has no ca.key, puts a key of his own in."""
    request_key(tmp_path / "site", 0)
    made = request_key(tmp_path / "thief", 0)
    assert main(["keys", str(operator), "--accept", str(tmp_path / "site" / "request.json")]) == 0
    (operator / "server" / "clients" / "0.pub").write_text(made.key + "\n")
    with pytest.raises(ConfigError, match=r"0\.pub is not the key of client 0"):
        ServerKeys.read(operator / "server")


def test_prolonging_a_key_that_was_moved_away_names_its_file_and_the_way_back(
    tmp_path: Path, said: Said
) -> None:
    operator = tmp_path / "keys"
    assert main(["keys", str(operator), "--clients", "2"]) == 0
    public = operator / "server" / "clients" / "1.pub"
    expired, _ = revoke_client(operator, 1, "expired")
    said()
    assert main(["keys", str(operator), "--prolong", "1"]) == 1
    message = "".join(said().split())
    assert f"moveditto{expired}.Moveitbackto{public}" in message
    expired.rename(public)
    assert main(["keys", str(operator), "--prolong", "1", "--days", "5"]) == 0
    assert list(ServerKeys.read(operator / "server").clients) == [0, 1]
    # a key that was revoked does not come back by the file of its expiry
    shutil.copy(public, expired)
    revoke_client(operator, 1)
    said()
    assert main(["keys", str(operator), "--prolong", "1"]) == 1
    assert "Move it back" not in said()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--request", "1", "--renew"], "exclude each other"),
        (["--accept", "request.json", "--roster"], "exclude each other"),
        (["--passphrase"], "--passphrase does nothing without --request"),
        (["--fingerprint", "12345"], "--fingerprint does nothing without --accept"),
        (["--request", "-1"], "clients are numbered from 0"),
        (["--accept", "missing.json"], "has no file ca.key"),
        (["--prolong", "1"], "has no file ca.key"),
        (["--roster"], "has no ca.crt"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], why: str, tmp_path: Path, said: Said) -> None:
    assert main(["keys", str(tmp_path / "none"), *options]) == 1
    assert why in said()


def test_a_fingerprint_has_thirty_digits_in_groups_of_five() -> None:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    assert compute_fingerprint(key) == digits(key)
    assert [len(group) for group in compute_fingerprint(key).split(" ")] == [5] * 6
    assert os.linesep not in compute_fingerprint(key)


def test_a_damaged_file_of_the_authority_is_named(operator: Path, said: Said) -> None:
    for name, damage in (("ca.key", "no private key"), ("server/ca.crt", "no certificate")):
        path = operator / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        said()
        assert main(["keys", str(operator), "--renew"]) == 1
        assert f"{path} is {damage} that can be read" in said()
        path.write_bytes(whole)
    path = operator / "server" / "ca.crt"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"ca\.crt is no certificate"):
        KeyRoster.read(operator / "server" / "roster.json", path)
