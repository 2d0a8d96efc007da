import json
import shutil
from pathlib import Path

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.monitoring.watch import follow
from fedsurrogate.server_app.runs.reader import LiveRun, find_run
from fedsurrogate.server_app.runs.state import EventFile


def make_run(output: Path, name: str, status: str = "running", *events: dict[str, object]) -> Path:
    folder = output / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(
        json.dumps({"config": {"method": "fedavg", "epsilon": 0.0}})
    )
    (folder / "metrics.json").write_text(json.dumps({"method": "fedavg", "status": status}))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_line_half_written_waits_for_its_end(tmp_path: Path) -> None:
    file, reader = tmp_path / "events.jsonl", EventFile(tmp_path / "events.jsonl")
    assert reader.read() == []
    whole = json.dumps({"event": "rejected", "reason": "käse"}, ensure_ascii=False).encode() + b"\n"
    # Cut at every byte, also within a character.
    for cut in range(len(whole)):
        with file.open("ab") as stream:
            stream.write(whole[:cut])
        assert reader.read() == []
        with file.open("ab") as stream:
            stream.write(whole[cut:])
        assert reader.read() == [{"event": "rejected", "reason": "käse"}]
    assert reader.broken == 0


def test_the_end_of_a_file_can_be_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b"}\n{"event"')
    reader = EventFile(tmp_path / "events.jsonl")
    assert [event["event"] for event in reader.read()] == ["a", "b"]
    assert (reader.read(to_the_end=True), reader.broken) == ([], 1)


def test_lines_that_are_no_events_are_counted_and_left_out(tmp_path: Path) -> None:
    lines = [b'{"event": "a"}', b"", b"[1]", b"{", b"\xff\xfe", b"[" * 5000, b'{"event": "b"}']
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    reader = EventFile(tmp_path / "events.jsonl")
    assert [event["event"] for event in reader.read()] == ["a", "b"]
    assert reader.broken == 4


def test_the_newest_run_is_found_and_a_run_folder_is_itself(tmp_path: Path) -> None:
    assert find_run(tmp_path / "nothing") is None
    assert find_run(tmp_path) is None
    later = make_run(tmp_path, "20260102T000000Z-fedavg-aaaaaa")
    earlier = make_run(tmp_path, "20260101T235959Z-fedpft-bbbbbb")
    (tmp_path / "notes").mkdir()
    assert find_run(tmp_path) == later
    assert find_run(earlier) == earlier
    assert find_run(tmp_path, [later]) == earlier
    assert find_run(tmp_path, [later, earlier]) is None


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="is a file"):
        find_run(tmp_path / "runs")


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "r", "running", {"event": "invited", "sites": 2})
    looks = follow(LiveRun(folder))
    assert [event["event"] for event in next(looks)] == ["invited"]
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "compared", "model": 0.5}\n')
    (folder / "metrics.json").write_text(json.dumps({"status": "ok"}))
    assert [[event["event"] for event in events] for events in looks] == [["compared"]]


def test_a_run_folder_that_is_removed_is_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "r", "running", {"event": "invited", "sites": 2})
    looks = follow(LiveRun(folder))
    next(looks)
    shutil.rmtree(folder)
    with pytest.raises(RunError, match="is gone"):
        next(looks)


def test_a_run_that_has_only_its_folder_yet_is_running(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    assert run.refresh() == []
    assert (run.state.status, run.budget) == ("running", None)
    # Half a file: runs write files atomically, but copies of run folders are not atomic.
    (tmp_path / "metrics.json").write_text('{"status": "o')
    run.refresh()
    assert run.state.status == "running"
