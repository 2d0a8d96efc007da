"""The SuperLink's database with concurrent writers."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import flwr
import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedsurrogate.common.flower.v134 import let_writers_wait
from fedsurrogate.server_app.deployment.submit import APP_FOLDER

FLOWERS_PATIENCE = 5.0


@pytest.mark.slow
def test_a_reply_waits_for_a_writer_longer_than_flower_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    let_writers_wait()
    store = SqlObjectStore(str(tmp_path / "state.db"))
    store.initialize()
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    busy = threading.Timer(FLOWERS_PATIENCE + 1.5, other.rollback)
    busy.start()
    name = sha256(b"reply").hexdigest()
    assert store.preregister(1, ObjectTree(object_id=name)) == [name]
    busy.join()
    other.close()


@pytest.mark.parametrize("folder", ["mein projekt ä", "a,b", "100%", "it's $HOME"])
def test_the_tables_are_made_wherever_flower_is_installed(tmp_path: Path, folder: str) -> None:
    """In such a folder Flower alone finds no migration, so that its database has no table."""
    where = tmp_path / folder
    shutil.copytree(
        Path(flwr.__file__).parent, where / "flwr", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = (
        "from flwr.supercore.object_store.sql_object_store import SqlObjectStore\n"
        "import flwr; print(flwr.__file__)\n"
        "from fedsurrogate.common.flower.v134 import find_migrations\n"
        "find_migrations(); SqlObjectStore('state.db').initialize()\n"
    )
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(where), str(APP_FOLDER)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(where)
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        tables = {
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
    assert {"objectstore_locks", "run"} <= tables
