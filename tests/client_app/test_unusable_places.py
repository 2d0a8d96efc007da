"""A place that cannot be read or written, other than one that is missing: each file of a site's own
state is then refused by one kind of error that names it, and nothing else happens.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app import requests, secure_aggregation
from fedsurrogate.client_app.audit import output
from fedsurrogate.client_app.features.extraction import read_entry
from fedsurrogate.client_app.governance.gate import Decision, Gate, decide, decisions
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import (
    charge_and_release,
    check_room,
    hold,
    why_held,
)
from fedsurrogate.client_app.methods.local_training import _classes
from fedsurrogate.client_app.model_use import store
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline import answers as replies
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import (
    ConfigError,
    FedSurrogateError,
    LedgerError,
    PolicyError,
    SealError,
    StateError,
    StorageError,
    SurrogateError,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import SumState, begin
from fedsurrogate.common.security.sealing import new_key
from tests.attacks.test_damaged_files import KEPT, Kept
from tests.client_app.governance.ledger_processes import release
from tests.common.signed_models.test_signed_model import model

# Of a kept file these are not used, and no error: there is none, or another one takes their place.
SILENT = ("own Gaussians", "name of Gaussians", "adapted model")


@pytest.mark.parametrize("name", [name for name in KEPT if name not in SILENT])
def test_a_folder_in_the_place_of_a_file_is_refused_as_a_damaged_file(
    tmp_path: Path, name: str
) -> None:
    kept: Kept = KEPT[name](tmp_path)
    kept.file.unlink()
    kept.file.mkdir()
    with pytest.raises(kept.refuses):
        kept.read()


def blocked(folder: Path) -> NodeConfig:
    """A site whose state folder is a file."""
    (folder / "state").write_text("")
    return NodeConfig(site="north", state_dir=str(folder / "state"))


def sum_state() -> SumState:
    return begin("north", new_key(), b"c" * 32)[0]


WRITES: dict[str, tuple[Callable[[NodeConfig], object], type[FedSurrogateError], str]] = {
    "decision": (
        lambda node: decide(node.state, "a" * 64, Decision("refused", "Eve", "", "2026-01-01")),
        ConfigError,
        "decisions.json cannot be written",
    ),
    "decisions": (lambda node: decisions(node.state), ConfigError, "decisions.json cannot be read"),
    "room": (check_room, LedgerError, "could not be written"),
    "ledger": (lambda node: Ledger(node.state, "a" * 16).open(), LedgerError, "cannot be locked"),
    "key": (lambda node: private_key(node, "north"), SealError, "north.key' cannot be used"),
    "sites of a sum": (
        lambda node: secure_aggregation.why_changed(node, {}, {}),
        StateError,
        "cannot be read or written",
    ),
    "read a sum": (
        lambda node: secure_aggregation.read_state(parse_run({}), node, "0" * 32, "north"),
        StateError,
        "has no state of the secure aggregation",
    ),
    "log": (requests._open_log, StorageError, "state-dir"),
    "seed of an audit": (output._seed, PolicyError, "cannot be used"),
    "reply": (lambda node: replies._put(node.state / "reply", b""), StateError, "reply' cannot be written"),
    "request": (lambda node: replies.is_message(node.state / "request"), ConfigError, "request cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    work, kind, words = WRITES[name]
    with pytest.raises(kind, match=words):
        work(blocked(tmp_path))


def test_a_failure_that_cannot_be_held_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = blocked(tmp_path)
    with caplog.at_level("DEBUG", "fedsurrogate.site"):
        hold(node, "a defect")
    assert "THE RECORDS STAY IN USE" in caplog.text
    caplog.clear()
    node = NodeConfig(site="north", state_dir=str(tmp_path / "other"))
    with caplog.at_level("DEBUG", "fedsurrogate.site"):
        hold(node, "a defect")
    assert "Private runs use no record from now on" in caplog.text
    assert "UTC: a defect; nothing explains this failure" in why_held(node)


@pytest.mark.parametrize("text", [None, "", "{", "3", "{}", "[1]", '[""]', '["a", 2]', "[" * 10**5])
def test_classes_in_a_request_that_are_none(text: str | None) -> None:
    with pytest.raises(SurrogateError, match=r"without (the classes of the run|a name)"):
        _classes({} if text is None else {"classes": text})
    assert _classes({"classes": '["a", "b"]'}) == ("a", "b")


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_file_of_the_next_round_that_cannot_be_written(
    tmp_path: Path, must: bool, first: bool
) -> None:
    """Nothing is charged where it is needed; otherwise the other files are there."""
    (tmp_path / "file").write_text("")
    good, bad = tmp_path / "kept" / "good", tmp_path / "file" / "bad"
    other = tmp_path / "kept" / "other"
    own = {good: b"g", other: b"o"}
    keep = {bad: b"b"} | own if first else own | {bad: b"b"}
    if must:
        with pytest.raises(LedgerError, match=r"bad cannot be written .*the next round needs it"):
            requests._staged(keep, must)
        assert not [each for each in tmp_path.rglob("*") if each.is_file() and each.name != "file"]
        return
    staged = requests._staged(keep, must)
    assert {file: temporary.read_bytes() for file, temporary in staged.items()} == own


def test_a_charged_file_that_cannot_be_put_in_place_is_named(tmp_path: Path) -> None:
    temporary, file = tmp_path / "temporary", tmp_path / "file"
    temporary.write_text("new")
    (file / "full").mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"file cannot be written .*does not leave"):
        charge_and_release(
            Gate(Policy(), Ledger(tmp_path / "ledger", "data")), release(), {file: temporary}
        )


def test_a_check_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = CheckLog(tmp_path / "file", "a" * 16, tmp_path / "state")
    for work in (lambda: seen.begin(1, "b" * 64), lambda: seen.record_answer("c" * 16)):
        with pytest.raises(LedgerError, match=r"(cannot be written|cannot be read)"):
            work()
    (tmp_path / "folder").mkdir()
    seen = CheckLog(tmp_path / "folder", "a" * 16, tmp_path / "state")
    seen.begin(1, "b" * 64)
    seen._answers.mkdir()
    with pytest.raises(LedgerError, match="the answered requests, cannot be read"):
        seen.answered()
    seen._answers.rmdir()
    seen._answers.write_bytes(b"\xff")
    with pytest.raises(LedgerError, match="the answered requests, cannot be read"):
        seen.answered()
    # One file that cannot be read hides no other.
    (tmp_path / "folder" / f"{'d' * 16}.witness").mkdir()
    other = CheckLog(tmp_path / "folder", "e" * 16, tmp_path / "state")
    other.begin(1, "b" * 64)
    assert [each.secret for each in seen._others()] == [other.read().secret]  # type: ignore[union-attr]


def test_a_model_that_cannot_be_read_is_named_and_a_received_one_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = NodeConfig(site="north", state_dir=str(tmp_path))
    name = store.keep_model(node, model(), "run")
    file = store.models_folder(node) / f"{name}{store.SUFFIX}"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    with pytest.raises(StateError, match=r"cannot be read .*add it again"):
        store.read_kept(node, name)
    assert store._manifest_of(node, name) == b""
    file.rmdir()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SealError, match="was changed after it was kept"):
        store.read_kept(node, name)
    assert store._manifest_of(node, name) == b""
    error: Exception
    for error in (
        OSError(errno.ENOSPC, "full"),
        SealError("s"),
        StateError("s"),
        ConfigError("c"),
        SurrogateError("d"),
    ):

        def fails(*_: Any, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(store, "keep_model", fails)
        caplog.clear()
        store.keep_received(node, model(), True, 1000.0)
        assert "is not kept" in caplog.text
        assert str(error) in caplog.text
        monkeypatch.setattr(store, "read_kept", fails)
        if not isinstance(error, OSError | ConfigError):
            assert store._manifest_of(node, name) == b""


@pytest.mark.parametrize("content", ["[]", "{}", "3", '{"x.npy": "0"}', "{", "folder", "gone"])
def test_an_entry_of_the_cache_that_is_damaged_is_computed_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("x.npy", "ok.npy"):
        (tmp_path / name).write_bytes(b"")
    file = tmp_path / "digests.json"
    if content == "folder":
        file.mkdir()
    elif content != "gone":
        file.write_text(content)
    assert read_entry(tmp_path, 3) is None
    assert ("are damaged" in caplog.text) == (content != "gone")


def test_a_sum_whose_state_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file in the place of a folder does not mean that a sum has begun."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sums").write_text("")
    other = NodeConfig(site="north", state_dir=str(tmp_path / "other"))
    for node in (blocked(tmp_path), other):
        with pytest.raises(StateError, match=r"cannot be written .*see state-dir"):
            secure_aggregation.create_state(node, Policy(), "0" * 32, sum_state())
        with pytest.raises(StateError, match="state of secure aggregation cannot be written"):
            secure_aggregation.write_state(node, "0" * 32, sum_state())
    node = NodeConfig(site="north", state_dir=str(tmp_path / "third"))
    secure_aggregation.create_state(node, Policy(), "0" * 32, sum_state())
    with pytest.raises(StateError, match="it does not begin a second time"):
        secure_aggregation.create_state(node, Policy(), "0" * 32, sum_state())
