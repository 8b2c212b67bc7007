"""Downloads from a server on this machine that cuts connections, ignores ranges or has another file."""

from __future__ import annotations

import hashlib
import lzma
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.cli.main import main
from fedlowrank.core.errors import DataError
from fedlowrank.data.download import downloads
from fedlowrank.data.download.downloads import DOWNLOADS, DataDownload
from fedlowrank.data.download.remote_files import RemoteFile, download_file

CONTENT = bytes(range(256)) * 1000
MD5, SHA = hashlib.md5(CONTENT).hexdigest(), hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves ``files``; sends at most ``cut`` bytes of an answer, and the whole file if ``ranges`` is off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/a.bin": CONTENT}
        self.cut: int | None = None
        self.ranges = True
        self.asked: list[str | None] = []

    def url(self, path: str = "/a.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        expected, content = self.headers["Range"], self.server.files.get(self.path)
        self.server.asked.append(expected)
        if content is None:
            return self.send_error(404)
        start = int(re.findall(r"bytes=(\d+)-", expected)[0]) if expected and self.server.ranges else 0
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.cut])
        return None

    def log_message(self, *args: Any) -> None:
        pass


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last: tuple[int, int | None] = (0, None)

    def progress(self, name: str, byte_count: int, total: int | None) -> None:
        self.last = byte_count, total

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_whole_file_is_checked_and_not_downloaded_twice(server: Server, tmp_path: Path) -> None:
    report = Lines()
    file = RemoteFile(server.url(), f"md5:{MD5}", len(CONTENT))
    path = download_file(file, tmp_path / "new" / "folder", report)
    assert path.read_bytes() == CONTENT
    assert report.last == (len(CONTENT), len(CONTENT))
    download_file(file, path.parent, report)
    assert len(server.asked) == 1
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(DataError, match="instead of " + MD5):
        download_file(file, path.parent, report)


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.cut, server.ranges = 100_000, ranges
    file = RemoteFile(server.url(), f"sha256:{SHA}")
    with pytest.raises(DataError, match="100,000 of 256,000 bytes arrived"):
        download_file(file, tmp_path, Lines())
    assert not (tmp_path / "a.bin").exists()
    server.cut = None
    assert download_file(file, tmp_path, Lines()).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]
    assert not (tmp_path / "a.bin.part").exists()


def test_a_part_that_is_complete_or_too_long(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    with pytest.raises(DataError, match="Delete it"):
        download_file(RemoteFile(server.url()), tmp_path, Lines())
    assert (
        download_file(RemoteFile(server.url(), size=len(CONTENT)), tmp_path, Lines()).read_bytes() == CONTENT
    )
    assert server.asked == ["bytes=256000-"]


def test_wrong_content_is_kept_and_named(server: Server, tmp_path: Path) -> None:
    file = RemoteFile(server.url(), "md5:" + "0" * 32)
    with pytest.raises(DataError, match=rf"the MD5 {MD5} instead of 0000.*Delete .*a\.bin\.part"):
        download_file(file, tmp_path, Lines())
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT
    assert not (tmp_path / "a.bin").exists()
    with pytest.raises(DataError, match=r"256,000 bytes instead of 5"):
        download_file(RemoteFile(server.url(), size=5), tmp_path / "other", Lines())


def test_a_file_without_a_published_checksum_shows_what_was_found(server: Server, tmp_path: Path) -> None:
    report = Lines()
    download_file(RemoteFile(server.url()), tmp_path, report)
    assert SHA in report.lines[0]


def test_missing_files_and_hosts(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"answers 404 .*Download {server.url('/b.bin')} elsewhere"):
        download_file(RemoteFile(server.url("/b.bin")), tmp_path, Lines())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(DataError, match=rf"cannot reach {host} .*put it at '{tmp_path}/a\.bin'"):
            download_file(RemoteFile(f"http://{host}/a.bin"), tmp_path, Lines())


def test_the_command(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = DataDownload(
        "three words", (RemoteFile(server.url(), f"md5:{MD5}"),), "MIT", 'path = "{folder}"', "1 MB"
    )
    monkeypatch.setattr(downloads, "DOWNLOADS", {"toy": row})
    monkeypatch.setattr("fedlowrank.cli.download_command.DOWNLOADS", {"toy": row})
    monkeypatch.chdir(tmp_path)
    assert main(["data", "get"]) == 0
    assert "three words" in capsys.readouterr().out
    for words, folder in ((["toy"], "data/toy"), (["toy", "-o", "x/y"], "x/y"), (["-o", "z", "toy"], "z")):
        assert main(["data", "get", *words]) == 0
        assert capsys.readouterr().out.endswith(f'[data]\npath = "{folder}"\n')
        assert Path(folder, "a.bin").read_bytes() == CONTENT
    assert main(["data", "get", "tay"]) == 1
    assert "Did you mean 'toy'" in capsys.readouterr().err
    Path("get.toml").write_text(
        '[data]\nsource = "iris"\n[model]\nnames = ["mlp"]\n[partition]\nclients = 3\n'
    )
    assert main(["data", "get.toml"]) == 0
    assert "virginica" in capsys.readouterr().out


def test_archives_and_conversions(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "data_batch_1").write_bytes(b"x")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "inside", "cifar")
    downloads._unpack(tmp_path)
    assert (tmp_path / "cifar" / "data_batch_1").read_bytes() == b"x"
    (tmp_path / "b.sqlite.lzma").write_bytes(lzma.compress(CONTENT))
    downloads._decompress(tmp_path)
    assert (tmp_path / "b.sqlite").read_bytes() == CONTENT
    (tmp_path / "b.sqlite.lzma").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot decompress"):
        downloads._decompress(tmp_path)


def test_ag_news_becomes_what_its_source_reads(tmp_path: Path) -> None:
    from fedlowrank.data.text.text_sources import TextClasses

    rows = '"3","Fed ""cuts""","Rates fall"\n"1","Peace","Talks, again"\n'
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text(rows)
    downloads._convert_ag_news(tmp_path)
    texts = TextClasses(str(tmp_path / "train.jsonl"), text=("title", "description")).load()
    assert [(r.text, r.label) for r in texts.train] == [
        ('Fed "cuts"\nRates fall', "Business"),
        ("Peace\nTalks, again", "World"),
    ]


def test_every_row_makes_an_experiment() -> None:
    import tomllib

    from fedlowrank.data.sources import SOURCES
    from fedlowrank.data.text.text_sources import TEXT_SOURCES

    for row in DOWNLOADS.values():
        fields = tomllib.loads(row.settings.format(folder="x"))
        fields.pop("normalize", None)
        source = {**TEXT_SOURCES, **SOURCES}[fields.pop("source")]
        assert source(**fields).path.startswith("x")
        for file in row.files:
            kind, _, digest = file.checksum.partition(":")
            assert (kind, len(digest)) in {("", 0), ("md5", 32), ("sha256", 64)}
