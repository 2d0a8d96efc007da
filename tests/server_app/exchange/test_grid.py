"""The grid of files message by message, without a run: which file is written, which reply is taken, and
what happens to each that is not.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.message_files import (
    LARGEST_FILE,
    MessageReply,
    digest,
    pack_reply,
    unpack_request,
)
from fedsurrogate.common.security.registrations import read_table
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app import exchange as file_grid
from fedsurrogate.server_app import exchange as run
from fedsurrogate.server_app.deployment import local_engine
from fedsurrogate.server_app.deployment.request_key import (
    VARIABLE,
    make_request_key,
)
from fedsurrogate.server_app.exchange import Exchange, FileGrid, run_by_files

COORDINATOR = new_key()
SITES = {"south": new_key(), "north": new_key()}
PUBLIC = {name: public_key(key) for name, key in SITES.items()}


class Place:
    """A grid of two sites, its folder, and what it has shown."""

    def __init__(self, folder: Path, largest: int = LARGEST_FILE) -> None:
        self.folder, self.lines = folder, list[str]()
        exchange = Exchange(folder, PUBLIC, {"seed": 3}, COORDINATOR, 7, 55, largest)
        self.grid = FileGrid(exchange, self.lines.append)
        self.ids: list[str] = []

    def ask(self, *nodes: int, payload: bytes | None = b"abc") -> None:
        messages = [
            self.grid.create_message(
                to_record(payload, {"bytes": len(payload or b""), "a": node}), "query", node, "1"
            )
            for node in nodes
        ]
        self.ids = list(self.grid.push_messages(messages))

    def answer(self, stem: str, own: bytes, **changes: Any) -> Path:
        """A reply file, as after a while."""
        content = (self.folder / f"{stem}.request").read_bytes()
        request = unpack_request(content, public_key(COORDINATOR))
        reply = MessageReply(request.id, digest(content), request.site, {"bytes": 2}, b"ok")
        file = self.folder / f"{stem}.reply"
        file.write_bytes(pack_reply(replace(reply, **changes), own))
        os.utime(file, (0, 0))
        return file

    def pull(self) -> list[Message]:
        return list(self.grid.pull_messages(self.ids))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_message_becomes_a_file_of_its_step_and_site(place: Place) -> None:
    first = datetime.now(UTC).date()
    place.ask(1001, 1002)
    place.ask(1002, payload=None)
    last = datetime.now(UTC).date()
    names = {"01-north.request", "01-south.request", "02-south.request"}
    assert {each.name for each in place.folder.iterdir()} == names
    for name in names:
        request = unpack_request((place.folder / name).read_bytes(), public_key(COORDINATOR))
        assert request.site == name.split("-")[1].removesuffix(".request")
        assert (request.flower_run, request.kind, request.settings) == ("55", "query", {"seed": 3})
        assert request.payload == (None if name.startswith("02") else b"abc")
        assert request.info["a"] == (1001 if request.site == "north" else 1002)
        assert request.expires in {f"{day + timedelta(7):%Y-%m-%d}" for day in (first, last)}
    assert place.lines == [
        f"step 1: carry to their sites, from {place.folder}: 01-north.request, 01-south.request",
        f"step 2: carry to their sites, from {place.folder}: 02-south.request",
    ]
    place.ask()
    assert len(place.lines) == 2


def test_a_reply_is_taken_once_and_a_lost_site_is_an_error(place: Place) -> None:
    place.ask(1001, 1002)
    assert place.pull() == []
    place.answer("01-north", SITES["north"])
    (reply,) = place.pull()
    assert from_record(reply.content, 10) == (b"ok", {"bytes": 2})
    assert reply.metadata.src_node_id == 1001
    assert place.pull() == []
    # A reply that comes as well counts no longer.
    place.answer("01-south", SITES["south"])
    (place.folder / "01-south.lost").touch()
    (lost,) = place.pull()
    assert lost.has_error()
    assert "marked this site as lost" in str(lost.error)
    assert place.pull() == []
    assert len(place.lines) == 1


@pytest.mark.parametrize(
    "wrong",
    ["key", "id", "request", "site", "cut", "empty", "folder", "large", "link"],
)
def test_a_reply_that_cannot_be_used_is_renamed_and_another_takes_its_place(
    tmp_path: Path, wrong: str
) -> None:
    place = Place(tmp_path, 2000)
    place.ask(1001, 1002)
    file = place.folder / "01-north.reply"
    changes = {"id": {"id": "0" * 64}, "request": {"request": "0" * 64}, "site": {"site": "south"}}
    if wrong == "folder":
        file.mkdir()
    elif wrong == "link":
        file.symlink_to(tmp_path / "nowhere")
    elif wrong == "large":
        place.answer("01-north", SITES["north"], payload=bytes(2000))
    else:
        place.answer(
            "01-north", SITES["south" if wrong == "key" else "north"], **changes.get(wrong, {})
        )
        if wrong in ("cut", "empty"):
            file.write_bytes(file.read_bytes()[:-1] if wrong == "cut" else b"")
    if wrong != "link":
        os.utime(file, (0, 0))
    assert place.pull() == []
    if wrong != "link":
        assert place.lines[1].startswith("01-north.reply cannot be used (")
        assert place.lines[1].endswith("it is 01-north.refused now, and this run waits for another")
        assert (place.folder / "01-north.refused").exists()
        assert not file.exists()
        assert place.pull() == []
        assert len(place.lines) == 2
    else:
        # What leads nowhere is as if there was nothing.
        assert len(place.lines) == 1
        file.unlink()
    place.answer("01-north", SITES["north"])
    assert len(place.pull()) == 1


@pytest.mark.parametrize(
    ("age", "waits"), [(0.0, True), (4.0, True), (6.0, False), (-4.0, True), (-9.0, False)]
)
def test_a_file_that_has_just_changed_may_still_be_copied(
    place: Place, age: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock of the stick is ahead."""
    place.ask(1001)
    file = place.answer("01-north", SITES["south"])
    os.utime(file, (1000.0, 1000.0))
    monkeypatch.setattr(file_grid.time, "time", lambda: 1000.0 + age)
    assert place.pull() == []
    assert file.exists() == waits
    assert len(place.lines) == (1 if waits else 2)
    assert file_grid.SETTLED == 5.0


def test_a_reply_of_the_largest_size_is_read_whole(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.ask(1001, 1002)
    size = place.answer("01-north", SITES["north"]).stat().st_size
    for largest, fine in ((size, True), (size - 1, False)):
        (tmp_path / f"{largest}").mkdir()
        place = Place(tmp_path / f"{largest}", largest)
        place.ask(1001)
        place.answer("01-north", SITES["north"])
        assert len(place.pull()) == fine


# Before a run by files begins.


@pytest.fixture
def signing(tmp_path: Path) -> Path:
    make_request_key(tmp_path / "keys")
    return tmp_path / "keys"


def keys_in(file: Path, *names: str) -> Path:
    file.write_text("\n".join(f'"{name}" = "{public_key(new_key()).hex()}"' for name in names))
    return file


@pytest.mark.parametrize("names", [(), ("a", "A"), ("../a", "b"), ("a", "b" * 65), ("a b",)])
def test_sites_have_names_that_every_file_system_tells_apart(
    tmp_path: Path, signing: Path, names: tuple[str, ...]
) -> None:
    keys = keys_in(tmp_path / "keys.toml", *names)
    with pytest.raises(ConfigError, match="needs a line of `site offline key` for each site"):
        run_by_files({}, signing, keys, tmp_path / "out", 3, print)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def federated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would run: settings, grid and names of nodes, and the environment of it."""
    calls: list[Any] = []

    def federate(config: Any, grid: FileGrid, run_id: int, registered: Any) -> None:
        table = read_table(registered.file)
        calls.append((config, grid, run_id, table, os.environ.get(VARIABLE)))

    monkeypatch.setattr(run, "federate", federate)
    monkeypatch.setattr(local_engine, "find_folder", lambda output, run_id: Path(output) / run_id)
    return calls


@pytest.mark.parametrize("kind", ["file", "full folder"])
def test_messages_have_a_folder_of_their_own(
    tmp_path: Path, signing: Path, federated: list[Any], kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("")
    else:
        out.mkdir()
        (out / "x").touch()
    with pytest.raises(ConfigError, match="is not empty; each run needs"):
        run_by_files({}, signing, keys_in(tmp_path / "k", "a"), out, 3, print)
    assert federated == []


def test_a_run_waits_for_days_or_as_long_as_a_person_has_chosen(
    tmp_path: Path, signing: Path, federated: list[Any]
) -> None:
    keys, flat = keys_in(tmp_path / "k", "b", "a"), {"output-dir": str(tmp_path), "data-dir": "x"}
    run_by_files(flat, signing, keys, tmp_path / "out", 3, print)
    run_by_files(flat | {"deadline": 5.0}, signing, keys, tmp_path / "out", 3, print)
    assert [each[0].settings.deadline for each in federated] == [3 * 86_400, 5.0]
    exchange = federated[0][1]._exchange
    assert exchange.nodes() == {1001: "a", 1002: "b"}
    # No path of the coordinator leaves it.
    assert exchange.settings == {"sites": 2}


def test_a_refused_file_is_replaced_and_refused_folders_stay(place: Place) -> None:
    place.ask(1001)
    refused = place.folder / "01-north.refused"
    for _ in range(2):
        place.answer("01-north", SITES["south"])
        place.pull()
    assert refused.is_file()
    for count in (1, 2):
        folder = place.folder / "01-north.reply"
        folder.mkdir()
        os.utime(folder, (0, 0))
        place.pull()
        assert len(list(place.folder.glob("01-north.refused.*"))) == count
    assert refused.is_file()
