"""Flower's database is as large as what is in it, and no larger after a large message has gone."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy

pytest.importorskip("flwr")
from flwr.app import Message, Metadata
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedlowrank.network.access import database
from fedlowrank.network.flower import to_records

# of Alembic, about Flower's configuration of it
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")


@pytest.fixture
def limited() -> Iterator[None]:
    database.limit_journals()
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", database._limit_journal)


def stored(store: SqlObjectStore, seed: int, size: int) -> Message:
    about = Metadata(
        run_id=1, message_id="", src_node_id=7, dst_node_id=1, message_type="train.order", group_id="", ttl=60.0,
        reply_to_message_id="asked", created_at=float(seed),
    )  # fmt: skip
    message = make_message(metadata=about, content=to_records("{}", random.Random(seed).randbytes(size)))
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        store.preregister(1, get_object_tree(message))
        for name, one in get_all_nested_objects(message).items():
            store.put(name, one.deflate())
    return message


def size(folder: Path) -> int:
    """Bytes of the database and its journals."""
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("prepared", [False, True])
def test_the_disk_is_given_back(tmp_path: Path, limited: None, prepared: bool) -> None:
    path = tmp_path / "superlink.db"
    if prepared:
        database.prepare_database(path)
    store = SqlObjectStore(str(path))
    store.initialize()
    message = stored(store, 0, 12 << 20)
    assert size(tmp_path) > 12 << 20
    store.delete(message.metadata.message_id)
    assert len(store) == 0
    store.query("PRAGMA wal_checkpoint")
    # Flower's own file stays as large as it ever was
    assert (path.stat().st_size < 1 << 20) == prepared
    store._engine.dispose()  # type: ignore[union-attr]


@pytest.mark.full
def test_a_start_removes_what_an_earlier_run_left(tmp_path: Path) -> None:
    path = tmp_path / "superlink.db"
    store = SqlObjectStore(str(path))
    store.initialize()
    stored(store, 0, 12 << 20)
    store._engine.dispose()  # type: ignore[union-attr]
    assert path.stat().st_size > 12 << 20
    database.prepare_database(path)
    assert size(tmp_path) < 1 << 20
    # the tables are still there, and the file shrinks by itself from now on
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM objects").fetchone() == (0,)
    connection.close()
