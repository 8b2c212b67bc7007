"""Started as a script of its own: the SuperLink, with everything but the clients' door open to this machine only.

Flower serves three kinds of callers on one port: clients, who must prove with a registered key who they are; commands, which
register keys and start runs; and the server's own children. Of the last two nothing is asked, so whoever reaches the port
could register a key and be sent the model, or have code of theirs run by every client. Here they are answered only if they
call from this machine.

It imports nothing of this package, whose libraries would stay in memory beside Flower's.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

CLIENTS = "/v1/fleet/"
"""What clients call."""
PROBE = "/fedlowrank-guard"
"""Answered with 204, by which one knows that the guard stands."""

BODY = 16 << 20
"""Bytes of a call by a client; Flower sends what is larger in pieces of 5 MiB."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def guarded(app: App) -> App:
    """The same web application, refusing with 403 what is neither a client's call nor from this machine.

    Args:
        app: in the form of ASGI.
    """

    async def guard(scope: Message, receive: Receive, send: Send) -> None:
        # what begins and ends the application itself is no call
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        elif str(scope["path"]).startswith(CLIENTS):
            await limited(app, scope, receive, send)
        elif not is_local(scope.get("client"), scope.get("server")):
            await _answer(send, 403, b"This is answered on the server's own machine only.\n")
        elif scope["path"] == PROBE:
            await _answer(send, 204, b"")
        else:
            await app(scope, receive, send)

    return guard


def is_local(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bool:
    """Whether a call comes from the machine that it came to.

    Args:
        client: address and port of the caller, if known.
        server: address and port that were called, if known.
    """
    if client is None:
        return False
    try:
        caller = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    if isinstance(caller, ipaddress.IPv6Address) and caller.ipv4_mapped is not None:
        caller = caller.ipv4_mapped
    # a machine that calls an address of its own does so from that address
    return caller.is_loopback or (server is not None and client[0] == server[0])


async def limited(app: App, scope: Message, receive: Receive, send: Send) -> None:
    """Passes a call on, but nothing of a body beyond :data:`BODY` bytes: it would be held in memory before anybody looks at it.

    Args:
        app: in the form of ASGI.
        scope: of the call.
        receive: gives the parts of its body.
        send: takes the answer.
    """
    lengths = [int(v) for n, v in scope.get("headers", ()) if bytes(n).lower() == b"content-length" and v.isdigit()]
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


def main() -> None:
    """Run ``flower-superlink`` with this process's arguments, guarded."""
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    run = uvicorn.run

    def run_guarded(app: App, **settings: Any) -> None:
        # of a proxy on this machine, which alone is believed, the caller is the one that it names in X-Forwarded-For
        run(guarded(app), **{**settings, "forwarded_allow_ips": "127.0.0.1,::1"})

    uvicorn.run = run_guarded  # type: ignore[assignment]
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
