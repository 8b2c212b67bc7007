"""Runs one of Flower's commands on the server's machine behind a secret token; started as a script.

Flower serves three kinds of callers on one port. Clients prove their identity with a registered key. Commands
register keys and start runs. The server's subprocesses run the server's half of a method. Flower does not
authenticate the last two, so anyone who reaches the port could register a key, start an app, or read every
upload. Loopback is no protection: other users of the machine, tunnels and TCP proxies all call from it.

Therefore every call that is not a client's must carry a token in a header. The server makes a new token for
every SuperLink and passes it on by an environment variable, which other users of a machine cannot read.
(Flower's own tokens are on command lines, which they can.) The commands that may call are started by this
script, too, which adds the header to what they send.

This script imports nothing of fedlowrank, whose libraries would stay in memory beside Flower's.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

CLIENTS = "/v1/fleet/"
"""Paths of calls by clients, whose keys Flower checks."""
PROBE = "/fedlowrank-guard"
"""A path that answers 204 to a caller with the token, which shows that the guard is installed."""
TOKEN = "FEDLOWRANK_TOKEN"
"""Name of the environment variable that holds the token."""
HEADER = "x-fedlowrank-token"
"""Name of the header that holds the token."""
CALLERS = ("flower-superexec", "flwr-serverapp")
"""Programs that the SuperLink starts, directly or not, and that call it back."""

BODY = 16 << 20
"""Bytes of a call by a client; Flower sends what is larger in pieces of 5 MiB."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def guarded(app: App, token: str) -> App:
    """Wrap a web application (ASGI): it answers 403 to calls that are not a client's and lack the token."""

    async def guard(scope: Message, receive: Receive, send: Send) -> None:
        # the start and the end of the application itself are no calls
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif str(scope["path"]).startswith(CLIENTS):
            await limited(app, scope, receive, send)
        elif not has_token(scope, token):
            print(
                f"refused without the server's token: {scope['path']!r} from {scope.get('client')}",
                flush=True,
            )
            await _answer(send, 403, b"This is answered to the server's own processes only.\n")
        elif scope["path"] == PROBE:
            await _answer(send, 204, b"")
        else:
            await app(scope, receive, send)

    return guard


def has_token(scope: Message, token: str) -> bool:
    """Whether a call carries the token, compared in constant time."""
    found = [
        bytes(value) for name, value in scope.get("headers", ()) if bytes(name).lower() == HEADER.encode()
    ]
    return any(hmac.compare_digest(value, token.encode()) for value in found)


async def limited(app: App, scope: Message, receive: Receive, send: Send) -> None:
    """Pass a call on, but at most :data:`BODY` bytes of its body, which is read into memory."""
    lengths = [
        int(v) for n, v in scope.get("headers", ()) if bytes(n).lower() == b"content-length" and v.isdigit()
    ]
    if max(lengths, default=0) > BODY:
        await _answer(send, 413, b"A call may have 16 MiB; larger things are sent in pieces.\n")
        return
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        return message if read <= BODY else {"type": "http.disconnect"}

    await app(scope, counted, send)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())] if body else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def command(program: str) -> list[str]:
    """The command line that runs one of Flower's commands by this script."""
    # -P: without the folder of this script on the path, whose modules have common names
    return [sys.executable, "-P", __file__, program]


def _guard_server(token: str) -> None:
    """Make the web server of this process serve the guarded application."""
    import uvicorn

    run = uvicorn.run

    def run_guarded(app: App, **settings: Any) -> None:
        run(guarded(app, token), **settings)

    uvicorn.run = run_guarded  # type: ignore[assignment]  # replaced on purpose


def _send_token(token: str) -> None:
    """Make the clients of Flower's API in this process send the token, and follow no redirects."""
    from flwr.supercore.protobuf.client import ProtobufClient

    make = ProtobufClient.__init__

    def make_with_token(self: ProtobufClient, *arguments: Any, **settings: Any) -> None:
        make(self, *arguments, **settings)
        self._client.headers[HEADER] = token
        self._client.follow_redirects = False

    ProtobufClient.__init__ = make_with_token  # type: ignore[method-assign]  # replaced on purpose


class _Popen(subprocess.Popen[bytes]):
    """Starts the commands that call the SuperLink by this script."""

    def __init__(self, args: Any, **settings: Any) -> None:
        if isinstance(args, list) and args[0] in CALLERS:
            args = [*command(args[0]), *args[1:]]
        super().__init__(args, **settings)


def main() -> None:
    """Run the command of Flower that the first argument names, with the other arguments."""
    program, token = sys.argv[1], os.environ[TOKEN]
    if program == "flower-superlink":
        _guard_server(token)
    else:
        _send_token(token)
    subprocess.Popen = _Popen  # type: ignore[misc, assignment]  # replaced on purpose
    sys.argv[:2] = [program]
    (entry, *_) = importlib.metadata.entry_points(group="console_scripts", name=program)
    sys.exit(entry.load()())


if __name__ == "__main__":
    main()
