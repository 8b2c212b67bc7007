"""Keeps a client's SuperNode running: it is restarted whenever it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from .flower_process import ProcessError, describe_full_disk
from .server_processes import SuperNode

logger = logging.getLogger(__name__)

RESTART_PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0)
REFUSAL_SECONDS = 100.0
_STEADY_SECONDS = 60.0
_SLOW_SECONDS = 30.0
_MAX_FAILURES = 3
_FULL_DISK_ADVICE = (
    "Free space, and keep `fedlowrank join` running: until then this client takes no part. If the run ends before, ask the "
    "server's operator for `fedlowrank serve ... --resume`: this client then writes its model"
)
_REFUSAL_TEXT = "Exit Code: 305"


def supervise(
    node: SuperNode,
    stop_event: threading.Event,
    pauses: Sequence[float] = RESTART_PAUSES,
    patience: float = REFUSAL_SECONDS,
) -> None:
    """Keep a SuperNode running until an event is set, and then close it.

    A server that cannot be reached is no error: the SuperNode waits for it. If a server refuses, it is asked
    again for a while, because it refuses a client whose SuperNode was killed for about a minute, in the same way as an
    unregistered one.

    Args:
        node: SuperNode, which may be running already.
        stop_event: event that ends the supervision when it is set.
        pauses: seconds before each restart; the last pause is repeated, and the first one is used again after a stable
            minute.
        patience: seconds for which the server may refuse.

    Raises:
        ProcessError: if the server refuses for longer, or the SuperNode ends three times before it reaches
            the server; the message has the end of its log.
    """
    restarts, failures, last_connection = 0, 0, time.monotonic()
    printed_problems: set[str] = set()
    try:
        while not stop_event.is_set():
            if not node.alive():
                node.start()
            start_time = time.monotonic()
            is_connected = _watch(node, stop_event, printed_problems)
            if stop_event.is_set():
                return
            end_time = time.monotonic()
            if is_connected:
                failures, last_connection = 0, end_time
                restarts = 0 if end_time - start_time > _STEADY_SECONDS else restarts
            else:
                failures += 1
            restarts += 1
            log_end = node.tail()
            if failures >= _MAX_FAILURES and (
                end_time - last_connection > patience or _REFUSAL_TEXT not in log_end
            ):
                raise ProcessError(
                    f"{node.name} ended with code {node.code} {failures} times in a row, and is not started "
                    "again. Check the server's address, the keys, and whether the server knows this "
                    f"client's. The end of {node.log}:\n{log_end}"
                )
            pause = pauses[min(restarts, len(pauses)) - 1]
            message = f"{node.name} ended with code {node.code}"
            logger.info("%s; it is started again in %g s. See %s.", message, pause, node.log)
            stop_event.wait(pause)
    finally:
        node.close()


def _watch(node: SuperNode, stop_event: threading.Event, printed_problems: set[str]) -> bool:
    """Wait until a SuperNode ends or should end; return whether it has connected.

    The reason for which it has not, and later problems, are printed as soon as its log has them, and added to
    ``printed_problems``.
    """
    start_time, is_warned = time.monotonic(), False
    node_id: int | None = None
    while node.alive() and not stop_event.wait(0.1):
        for problem in node.read_problems():
            _print_once(problem, printed_problems)
        # a full disk may also take the lines of the node's log
        if full_disk := describe_full_disk(node.process_folder):
            _print_once(f"{full_disk}. {_FULL_DISK_ADVICE}", printed_problems)
        if node_id is None:
            node_id = node.read_node_id()
            if node_id is not None:
                logger.info("connected to %s", node.address)
            else:
                _print_refusal(node, printed_problems)
            if node_id is None and not is_warned and time.monotonic() - start_time > _SLOW_SECONDS:
                is_warned = True
                logger.info(
                    "no connection to %s yet: check that the server runs, the address and the proxy",
                    node.address,
                )
    # the node may have connected or written a reason since the last check
    is_connected = node_id is not None or node.read_node_id() is not None
    if not is_connected:
        _print_refusal(node, printed_problems)
    return is_connected


def _print_refusal(node: SuperNode, printed_problems: set[str]) -> None:
    """Log why a SuperNode has not connected, once for each reason."""
    if refusal := node.read_refusal():
        _print_once(f"no connection to {node.address}: {refusal}", printed_problems)


def _print_once(problem: str, printed_problems: set[str]) -> None:
    """Log a problem, unless it was printed before."""
    if problem not in printed_problems:
        printed_problems.add(problem)
        logger.warning("%s", problem)
