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
_SLOW = 30.0
_ATTEMPTS = 3
_REFUSED = "Exit Code: 305"


def supervise(
    node: SuperNode, stop: threading.Event, pauses: Sequence[float] = PAUSES, patience: float = PATIENCE
) -> None:
    """Keep a client's program running until told to stop, and close it then.

    A server that cannot be reached is no error: the program waits for it by itself. One that refuses is asked again for a
    while, because it refuses a client whose program was killed, for about a minute, in the same words as a stranger.

    Args:
        node: the program; it may run already.
        stop: end when this is set.
        pauses: seconds before each new start, the last one again and again; from the first again after a steady minute.
        patience: seconds for which the server may refuse.

    Raises:
        ProcessError: if the server refuses for longer than that, or the program ends three times before it gets as far as
            to be refused; with the end of its log.
    """
    ended, failed, hope = 0, 0, time.monotonic()
    try:
        while not stop.is_set():
            if not node.alive():
                node.start()
            began = time.monotonic()
            connected = _watch(node, stop)
            if stop.is_set():
                return
            now = time.monotonic()
            if connected:
                failed, hope = 0, now
                ended = 0 if now - began > _STEADY else ended
            else:
                failed += 1
            ended += 1
            said = node.tail()
            if failed >= _ATTEMPTS and (now - hope > patience or _REFUSED not in said):
                raise ProcessError(
                    f"{node.name} ended with code {node.code} {failed} times in a row, and is not started again. Check the "
                    f"server's address, the keys, and whether the server knows this client's. The end of {node.log}:\n{said}"
                )
            pause = pauses[min(ended, len(pauses)) - 1]
            node.say(
                f"{node.name} ended with code {node.code}; it is started again in {pause:g} s. See {node.log}."
            )
            stop.wait(pause)
    finally:
        node.close()


def _watch(node: SuperNode, stop: threading.Event) -> bool:
    """Wait until a program ends or is to end; whether it has connected."""
    began, warned = time.monotonic(), False
    # it may have connected before anybody looked
    number: int | None = None
    while node.alive() and not stop.wait(0.1):
        if number is None:
            number = node.node_id()
            if number is not None:
                node.say(f"connected to {node.address}, which calls this client {number}")
            elif not warned and time.monotonic() - began > _SLOW:
                warned = True
                node.say(
                    f"no connection to {node.address} yet: the server may not run, or the address or a proxy be wrong"
                )
    return number is not None or node.node_id() is not None
