"""Runs one of Flower's commands on the server's machine behind a secret token and behind rules for clients.

Flower serves three kinds of callers on one port. Clients prove their identity with a registered key. Commands
register keys and start runs. The server's subprocesses run the server's half of a method. Flower does not
authenticate the last two, so anyone who reaches the port could register a key, start an app, or read every
upload. Loopback is no protection: other users of the machine, tunnels and TCP proxies all call from it.

Therefore every call that is not a client's must carry a token in a header. The server makes a new token for
every SuperLink and passes it on in an environment variable, which other users of a machine cannot read.
(Flower's own tokens are on command lines, which other users can read.) This module also starts the commands that may
call, and adds the header to their calls.

For a client, Flower checks the key after it has read the whole call, and does not compare the sender of a message
with the key. :mod:`..access` checks both, and limits connections, calls and replies.

The imports of this module stay in memory beside Flower's, so they include little of fedlowrank.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..access.gate import App, AsgiMessage, Gate, Receive, Send

PROBE_PATH = "/fedlowrank-guard"
"""Path that answers 204 to a caller with the token, which shows that the guard is installed."""
REPLIES_PATH = "/fedlowrank-guard/replies"
"""Path at which the server's half limits replies, and gets the list of refused ones."""
TOKEN_VARIABLE = "FEDLOWRANK_TOKEN"
"""Name of the environment variable that holds the token."""
CLIENT_KEYS, CLIENT_NODES, AUDIT = "FEDLOWRANK_CLIENT_KEYS", "FEDLOWRANK_CLIENT_NODES", "FEDLOWRANK_AUDIT"
"""Names of environment variables: folder of the public keys, file of Flower's numbers, file of the audit log."""
TOKEN_HEADER = "x-fedlowrank-token"
"""Name of the header that holds the token."""
MODULE = "fedlowrank.network.deploy.guard"
"""Name of this module, whose ``__name__`` differs if it runs as a script."""
CALLBACK_PROGRAMS = ("flower-superexec", "flwr-serverapp")
"""Names of the programs that the SuperLink starts, directly or not, and that call it back."""


def guard_app(gate: Gate, token: str) -> App:
    """Wrap the web application (ASGI) of a gate: it answers 403 to calls without the token that are not a client's."""
    from ..access.connections import SERVER_OWNER
    from ..access.gate import CLIENT_PATHS, send_answer

    async def guard(scope: AsgiMessage, receive: Receive, send: Send) -> None:
        # the start and the end of the application are not calls
        if scope["type"] == "lifespan":
            await gate.app(scope, receive, send)
        elif str(scope["path"]).startswith(CLIENT_PATHS):
            await gate.answer_client(scope, receive, send)
        elif not has_token(scope, token):
            address = (scope.get("client") or ("nowhere",))[0]
            gate.log(f"refused without the server's token: {scope['path']!r} from {address}", address)
            await send_answer(send, 403, "This is answered to the server's own processes only.\n")
        else:
            gate.prove(scope, SERVER_OWNER)
            if scope["path"] == PROBE_PATH:
                await send_answer(send, 204, "")
            elif scope["path"] == REPLIES_PATH:
                await gate.answer_replies(scope, receive, send)
            else:
                await gate.answer_server(scope, receive, send)

    return guard


def has_token(scope: AsgiMessage, token: str) -> bool:
    """Whether a call carries the token, compared in constant time."""
    tokens = [
        bytes(value)
        for name, value in scope.get("headers", ())
        if bytes(name).lower() == TOKEN_HEADER.encode()
    ]
    return any(hmac.compare_digest(value, token.encode()) for value in tokens)


def make_command(program: str) -> list[str]:
    """Make the command line that runs one of Flower's commands through this module."""
    return [sys.executable, "-P", "-m", MODULE, program]


def _guard_server(token: str) -> None:
    """Make the web server of this process serve the guarded application."""
    import uvicorn

    from ..access.connections import Connections, Listener
    from ..access.database import limit_journals, prepare_database
    from ..access.gate import Gate
    from ..access.identity import Roster, allow_clocks

    keys_folder = os.environ.get(CLIENT_KEYS)
    roster = None if keys_folder is None else Roster(Path(keys_folder), Path(os.environ[CLIENT_NODES]))
    audit_path = os.environ.get(AUDIT)
    allow_clocks()
    limit_journals()
    if "--database" in sys.argv:
        prepare_database(Path(sys.argv[sys.argv.index("--database") + 1]))

    def run_guarded(app: App, **settings: Any) -> None:
        connections = Connections()
        gate = Gate(app, roster, connections, None if audit_path is None else Path(audit_path))
        # h11 limits the headers of a call; connections cannot be counted with the other event loop; a caller's headers
        # must not override its address; log lines for every call would fill the disk
        fixed_settings = {
            "http": "h11",
            "loop": "asyncio",
            "ws": "none",
            "proxy_headers": False,
            "access_log": False,
        }
        server = uvicorn.Server(uvicorn.Config(guard_app(gate, token), **{**settings, **fixed_settings}))
        with Listener.open(settings["host"], settings["port"], connections) as listener:
            server.run([listener])

    uvicorn.run = run_guarded  # type: ignore[assignment]  # replaced on purpose


def _send_token(token: str) -> None:
    """Make the clients of Flower's API in this process send the token, and follow no redirects."""
    from flwr.supercore.protobuf.client import ProtobufClient

    original_init = ProtobufClient.__init__

    def make_with_token(self: ProtobufClient, *arguments: Any, **settings: Any) -> None:
        original_init(self, *arguments, **settings)
        self._client.headers[TOKEN_HEADER] = token
        self._client.follow_redirects = False

    ProtobufClient.__init__ = make_with_token  # type: ignore[method-assign]  # replaced on purpose


class _Popen(subprocess.Popen[bytes]):
    """Starts the commands that call the SuperLink through this script."""

    def __init__(self, args: Any, **settings: Any) -> None:
        if isinstance(args, list) and args[0] in CALLBACK_PROGRAMS:
            args = [*make_command(args[0]), *args[1:]]
        super().__init__(args, **settings)


def main() -> None:
    """Run the command of Flower that the first argument names, with the remaining arguments."""
    program, token = sys.argv[1], os.environ[TOKEN_VARIABLE]
    if program == "flower-superlink":
        _guard_server(token)
    else:
        _send_token(token)
    subprocess.Popen = _Popen  # type: ignore[misc, assignment]  # replaced on purpose
    sys.argv[:2] = [program]
    (entry_point, *_) = importlib.metadata.entry_points(group="console_scripts", name=program)
    sys.exit(entry_point.load()())


if __name__ == "__main__":
    main()
