"""A client that stays: its SuperNode is started again whenever it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .processes import SuperNode
from .program import ProcessError

PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0)
PATIENCE = 100.0
_STEADY = 60.0
_ATTEMPTS = 3
_NOT_TAKEN = "Exit Code: 305"


def supervise(
    node: SuperNode, stop: threading.Event, pauses: Sequence[float] = PAUSES, patience: float = PATIENCE
) -> None:
    """Keep a client's program running until told to stop, and close it then.

    A server that cannot be reached is no error: the program waits for it by itself. One that refuses is asked again for a
    while, because it refuses a client whose program was killed, for about a minute, in the same words as a stranger.

    Args:
        node: the program; it need not run yet.
        stop: end when this is set.
        pauses: seconds before each new start, the last one again and again; from the first again after a steady time.
        patience: seconds for which the server may refuse.

    Raises:
        ProcessError: if the server refuses for longer than that, or the program ends three times before it gets as far as
            to ask; with the end of its log.
    """
    ended, hope = 0, time.monotonic()
    try:
        while True:
            began, connected = time.monotonic(), False
            if not node.alive():
                node.start()
            while node.alive() and not stop.wait(0.1):
                if not connected and node.node_id() is not None:
                    connected = True
                    node.say(f"connected to {node.address} as {node.node_id()}")
            if stop.is_set():
                return
            now = time.monotonic()
            if connected:
                hope = now
                ended = 0 if now - began > _STEADY else ended
            ended += 1
            said = node.tail()
            if not connected and ended >= _ATTEMPTS and (now - hope > patience or _NOT_TAKEN not in said):
                raise ProcessError(
                    f"{node.name} ended with code {node.code} {ended} times in a row, and is not started again. Check the "
                    f"server's address, the keys, and whether the server knows this client's. The end of {node.log}:\n{said}"
                )
            pause = pauses[min(ended, len(pauses)) - 1]
            node.say(f"{node.name} ended with code {node.code}; it is started again in {pause:g} s. See {node.log}.")
            stop.wait(pause)
    finally:
        node.close()
