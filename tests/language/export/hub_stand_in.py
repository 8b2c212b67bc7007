"""A stand-in for the part of the Hugging Face Hub that an upload asks, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import yaml

TOKEN = "hf_of_a_test"


class HubStandIn:
    """Repositories in memory, behind the HTTP interface of the Hub; a context manager.

    Attributes:
        repositories: files by path, of each repository.
        private: repositories that were made private.
        requests: method and path of every request, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubStandIn:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of the answer to a call."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if (actual := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)) and actual[1] in self.repositories:
            return 200, {"id": actual[1], "private": actual[1] in self.private}
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if actual := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            return 200, {"files": [self._preupload(one["path"]) for one in files]}
        if actual := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [self._batch(one) for one in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        if actual := re.fullmatch(r"/blobs/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == actual[1]
            self.blobs[actual[1]] = body
            return 200, {}
        if actual := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            return self._commit(actual[1], [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"the stand-in has no {path}"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        made = {"url": f"{self.endpoint}/{name}"}
        if name in self.repositories:
            return 409, made
        self.repositories[name] = {}
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(name)
        return 200, made

    def _validate(self, card: str) -> tuple[int, Any]:
        """As the Hub: the base model must be a name on it."""
        base = str(yaml.safe_load(card.split("---\n")[1])["base_model"])
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            return 400, {"errors": [{"message": f'"base_model" with value "{base}" is not valid'}]}
        return 200, {}

    def _preupload(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _batch(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self.endpoint}/blobs/{one['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        files = self.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/1", "commitOid": "1" * 40}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _respond(self) -> None:
                body = self._body()
                path = self.path.partition("?")[0]
                hub.requests.append(f"{self.command} {path}")
                status, actual = hub.answer(path, body)
                if not path.startswith("/blobs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    status, actual = 401, {"error": "Invalid credentials"}
                data = json.dumps(actual).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            do_GET = do_POST = do_PUT = _respond  # noqa: N815 - of the base class

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        return Handler
