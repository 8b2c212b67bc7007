"""Keeps the file of Flower's database as small as its content.

Flower stores every message in SQLite until it has been fetched, and a SQLite file does not shrink by itself. Here
it does: pages that become free are returned to the disk (``auto_vacuum``) within 4 MiB of further changes. At
every start of the server, messages are removed and the file is rewritten, since a run ends with the process of its
server.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

MAX_JOURNAL_BYTES = 4 << 20
"""Largest number of bytes that the journal of the database keeps between two changes."""


def limit_journals() -> None:
    """Let the journals of all databases of this process shrink after a large change; by default they keep their size."""
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", _limit_journal)


def _limit_journal(connection: Any, record: object) -> None:
    del record
    connection.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}").close()


def prepare_database(path: Path) -> None:
    """Remove messages of earlier runs, and let the file shrink from now on; it is made if missing.

    Args:
        path: path of the database, which no process uses.
    """
    if path.exists():
        store = SqlObjectStore(str(path))
        store.initialize()
        store.clear()
        assert store._engine is not None, "it was initialized"
        store._engine.dispose()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        # this setting takes effect with VACUUM, or with the first table
        database.execute("PRAGMA auto_vacuum = FULL")
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
