"""Keys of a federation, against the TLS of the standard library, which makes nothing of them itself."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import ssl
import stat
import threading
from pathlib import Path

import pytest

from fedlowrank.cli.main import main
from fedlowrank.core.errors import CheckpointError, ConfigError

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedlowrank.network.deploy import keys
from fedlowrank.network.deploy.flower_process import ProcessError, listen
from fedlowrank.network.deploy.keys import (
    ClientKeys,
    ServerKeys,
    add_client,
    make_keys,
    renew_server,
)
from fedlowrank.network.deploy.server_processes import SuperLink, _explain_certificate
from fedlowrank.network.enrollment.key_files import AUTHORITY_DAYS

HOSTS = ["fl.example.org", "192.0.2.7", "2001:db8::7"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 2, HOSTS)
    return tmp_path / "keys"


def shakes_hands(server: ServerKeys, authority: Path, host: str) -> bool:
    """Whether a client that trusts an authority believes a server to be some host."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server.certificate, server.key)
    ours = ssl.create_default_context(cafile=authority)
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(to_client, to_server, server_hostname=host)
    other = theirs.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
    return client.version() is not None


def test_the_folder_holds_what_it_says_and_keeps_secrets_from_others(folder: Path) -> None:
    modes = {
        str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) & 0o077
        for p in folder.rglob("*")
        if p.is_file()
    }
    secret = {
        "ca.key",
        "server/server.key",
        "server/orders.key",
        "client-0/client.key",
        "client-1/client.key",
    }
    public = {
        f"server/{name}"
        for name in ("ca.crt", "server.pem", "orders.pub", "roster.json", "clients/0.pub", "clients/1.pub")
    }
    public |= {f"client-{i}/{name}" for i in range(2) for name in ("ca.crt", "orders.pub", "roster.json")}
    assert set(modes) == secret | public
    assert {name for name, others in modes.items() if not others} >= secret
    assert not any(b"PRIVATE" in (folder / name).read_bytes() for name in set(modes) - secret)
    assert {(folder / name / "ca.crt").read_bytes() for name in ("server", "client-0", "client-1")} == {
        (folder / "server" / "ca.crt").read_bytes()
    }


@pytest.mark.full
def test_a_client_believes_the_server_under_each_of_its_names_and_no_other(
    folder: Path, tmp_path: Path
) -> None:
    server, client = ServerKeys.read(folder / "server"), ClientKeys.read(folder / "client-1")
    for host in [*HOSTS, "localhost", "127.0.0.1", "::1"]:
        assert shakes_hands(server, client.authority, host), host
    for host in ["example.org", "192.0.2.8"]:
        assert not shakes_hands(server, client.authority, host), host
    make_keys(tmp_path / "other", 1, HOSTS)
    assert not shakes_hands(server, ClientKeys.read(tmp_path / "other" / "client-0").authority, "localhost")


def test_a_client_has_a_key_of_its_own_in_the_form_of_openssh(folder: Path) -> None:
    server = ServerKeys.read(folder / "server")
    seen = set()
    for number, path in server.clients.items():
        key = load_ssh_private_key(ClientKeys.read(folder / f"client-{number}").key.read_bytes(), None)
        public = load_ssh_public_key(path.read_bytes())
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.curve.name == "secp384r1"
        assert key.public_key() == public
        seen.add(path.read_bytes())
    assert len(seen) == 2


def test_certificates_begin_before_clocks_may_differ_and_end_as_asked(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, [], days=AUTHORITY_DAYS)
    make_keys(tmp_path / "short", 1, [], days=7)
    now = datetime.datetime.now(datetime.UTC)

    def life(folder: str, name: str) -> tuple[float, float]:
        actual = x509.load_pem_x509_certificate((tmp_path / folder / "server" / name).read_bytes())
        day = datetime.timedelta(days=1)
        return (actual.not_valid_before_utc - now) / day, (actual.not_valid_after_utc - now) / day

    assert life("short", "server.pem") == pytest.approx((-1, 7), abs=0.01)
    assert life("short", "ca.crt") == pytest.approx((-1, AUTHORITY_DAYS), abs=0.01)
    assert life("keys", "server.pem")[1] <= life("keys", "ca.crt")[1]


BAD_HOSTS = (
    "",
    "a b",
    "https://a.org",
    "a.org:8000",
    "192.0.2.300",
    "-a.org",
    "[::1]",
    "a..b",
    "ä.org",
    "192.0.2.1/24",
)


@pytest.mark.parametrize(
    ("clients", "host", "days", "why"),
    [
        *((1, host, 365, "neither the name of a machine nor an IP address") for host in BAD_HOSTS),
        (-1, "good.org", 365, "cannot have -1 clients"),
        *((1, "good.org", days, "between 1 and") for days in (0, AUTHORITY_DAYS + 1)),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, clients: int, host: str, days: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_keys(tmp_path / "keys", clients, ["good.org", host], days)
    assert not list(tmp_path.iterdir())


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=str(folder)):
        make_keys(folder, 3, [])
    with pytest.raises(ConfigError, match="client-1"):
        add_client(folder, 1)
    with pytest.raises(ConfigError, match="from 0"):
        add_client(folder, -1)
    (folder / "client-1" / "client.key").unlink()
    with pytest.raises(ConfigError, match="client-1"):
        add_client(folder, 1)
    before.pop(folder / "client-1" / "client.key")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_client_is_added_without_the_authority(folder: Path) -> None:
    (folder / "ca.key").unlink()
    known = ServerKeys.read(folder / "server").clients
    add_client(folder, 12)
    add_client(folder, 3)
    server = ServerKeys.read(folder / "server")
    assert list(server.clients) == [0, 1, 3, 12]
    assert {number: server.clients[number] for number in known} == known
    assert shakes_hands(server, ClientKeys.read(folder / "client-12").authority, "localhost")


def test_the_server_is_renewed_and_clients_notice_nothing(folder: Path) -> None:
    before = ServerKeys.read(folder / "server")
    old = before.key.read_bytes(), before.authority.read_bytes()
    renew_server(folder, ["new.example.org"], days=30)
    after, client = ServerKeys.read(folder / "server"), ClientKeys.read(folder / "client-0")
    assert shakes_hands(after, client.authority, "new.example.org")
    assert not shakes_hands(after, client.authority, "fl.example.org")
    assert after.key.read_bytes() != old[0]
    assert after.authority.read_bytes() == old[1]
    assert stat.S_IMODE(after.key.stat().st_mode) == 0o600


def test_an_authority_vouches_for_nothing_beyond_its_end(folder: Path, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_now", lambda: now - datetime.timedelta(days=AUTHORITY_DAYS - 10))
        make_keys(tmp_path / "old", 1, [])
        patch.setattr(keys, "_now", lambda: now - datetime.timedelta(days=AUTHORITY_DAYS + 1))
        make_keys(tmp_path / "ended", 1, [])
    renew_server(tmp_path / "old", [], days=365)
    actual = x509.load_pem_x509_certificate((tmp_path / "old" / "server" / "server.pem").read_bytes())
    assert (actual.not_valid_after_utc - now).days in (9, 10)
    with pytest.raises(ConfigError, match="ended on"):
        renew_server(tmp_path / "ended", [])
    (folder / "ca.key").write_bytes((tmp_path / "old" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.key is not the key of"):
        renew_server(folder, [])


def test_a_file_that_is_missing_or_misnamed_is_named(folder: Path) -> None:
    server, client = folder / "server", folder / "client-0"
    (server / "clients" / "1.pub").rename(server / "clients" / "berlin.pub")
    with pytest.raises(ConfigError, match=r"berlin\.pub"):
        ServerKeys.read(server)
    for name in ("ca.crt", "server.pem", "server.key", "orders.key"):
        (server / name).rename(server / "away")
        with pytest.raises(ConfigError, match=f"no file {name}"):
            ServerKeys.read(server)
        (server / "away").rename(server / name)
    for name in ("ca.crt", "client.key", "orders.pub"):
        (client / name).rename(client / "away")
        with pytest.raises(ConfigError, match=f"no file {name}"):
            ClientKeys.read(client)
        (client / "away").rename(client / name)


def test_the_command_renews_the_certificate_for_the_same_hosts_or_for_others(folder: Path) -> None:
    before = (folder / "server" / "server.pem").read_bytes()
    assert main(["keys", str(folder), "--renew", "--days", "30"]) == 0
    server = ServerKeys.read(folder / "server")
    assert server.certificate.read_bytes() != before
    authority = ClientKeys.read(folder / "client-0").authority
    assert shakes_hands(server, authority, "fl.example.org")
    end = x509.load_pem_x509_certificate(server.certificate.read_bytes()).not_valid_after_utc
    assert 29 <= (end - datetime.datetime.now(datetime.UTC)).days <= 30
    assert main(["keys", str(folder), "--renew", "--host", "other.example.org"]) == 0
    assert shakes_hands(ServerKeys.read(folder / "server"), authority, "other.example.org")
    assert not shakes_hands(ServerKeys.read(folder / "server"), authority, "fl.example.org")


def test_the_command_takes_a_key_away(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = (folder / "server" / "clients" / "1.pub").read_bytes()
    assert main(["keys", str(folder), "--revoke", "1"]) == 0
    assert list(ServerKeys.read(folder / "server").clients) == [0]
    assert (folder / "server" / "revoked" / "1-1.pub").read_bytes() == public
    assert main(["keys", str(folder / "server"), "--revoke", "0"]) == 0
    assert main(["keys", str(folder), "--revoke", "1"]) == 1
    assert "no public key of client 1" in capsys.readouterr().err
    assert main(["keys", str(folder), "--revoke", "1", "--renew"]) == 1
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "mode"), [("client.key", 0o640), ("client.key", 0o604), (".", 0o755), (".", 0o710)]
)
def test_keys_that_other_users_can_read_are_refused(folder: Path, name: str, mode: int) -> None:
    for own, read in (("client-0", ClientKeys.read), ("server", ServerKeys.read)):
        path = folder / own / name.replace("client.key", {"server": "server.key"}.get(own, name))
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"other users of this machine can read or change .*chmod"):
            read(folder / own)
        path.chmod(before)
        read(folder / own)


def test_a_full_disk_leaves_no_part_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = keys.write_key_file

    def fail(path: Path, content: bytes, mode: int = 0o644) -> None:
        if path.name == "client.key":
            raise CheckpointError(f"cannot write {path}: No space left on device")
        write(path, content, mode)

    with monkeypatch.context() as patch:
        patch.setattr(keys, "write_key_file", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            make_keys(tmp_path / "keys", 1, [])
    assert not list(tmp_path.iterdir())
    make_keys(tmp_path / "keys", 1, [])
    assert ClientKeys.read(tmp_path / "keys" / "client-0").key.is_file()


def test_a_key_and_a_certificate_that_do_not_belong_together_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "other", 1, [])
    server = folder / "server"
    before = ServerKeys.read(server)
    assert shakes_hands(before, before.authority, "localhost")
    # a copy that stopped halfway
    shutil.copy(tmp_path / "other" / "server" / "server.key", server / "server.key")
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        shakes_hands(before, before.authority, "localhost")
    with pytest.raises(
        ConfigError, match=r"server\.key is not the key of .*server\.pem\. Put the two of one make"
    ):
        ServerKeys.read(server)
    (server / "server.pem").write_text("half")
    with pytest.raises(ConfigError, match=r"server\.pem is no certificate"):
        ServerKeys.read(server)


@pytest.mark.parametrize(
    ("days", "host", "advice"),
    [
        (0, "127.0.0.1", ""),
        (3, "127.0.0.1", "Set the clock of this machine"),
        (0, "127.0.0.2", "Make one with"),
    ],
)
def test_a_certificate_that_is_not_good_is_refused_with_what_to_do(
    days: int, host: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(keys, "_now", lambda: later)
    make_keys(tmp_path / "keys", 1, [])
    server = ServerKeys.read(tmp_path / "keys" / "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    with listen(host, 0) as listener:
        link = SuperLink(tmp_path / "home", server, host=host, port=listener.getsockname()[1])

        def serve() -> None:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1 << 16)
                secured.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        if advice:
            with pytest.raises(ProcessError, match=f"{host}:.*{advice}"):
                link._is_answering()
        else:
            assert link._is_answering()
        thread.join(10)


def test_a_client_is_told_of_a_clock_that_is_wrong() -> None:
    reason = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid"
    assert "The clock of this machine" in _explain_certificate(reason)
    assert "ask the server's operator" in _explain_certificate(
        reason.replace("is not yet valid", "has expired")
    )
