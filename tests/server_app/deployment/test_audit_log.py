"""Every line of the audit log stays as it was written, or the log says where it was not."""

from __future__ import annotations

import json
import os
import pwd
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from datetime import UTC, datetime, timedelta
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.server_app.deployment import audit_log
from fedsurrogate.server_app.deployment.audit_log import OPERATOR, VARIABLE, entries, note
from tests.commands import coordinator

FACTS = st.dictionaries(st.text(max_size=8), st.text(max_size=20) | st.integers() | st.floats())
LINES = st.lists(
    st.tuples(st.sampled_from(["start", "revoke", "accept"]), FACTS), min_size=2, max_size=6
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, OPERATOR):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, lines: list[tuple[str, dict[str, object]]]) -> Path:
    for action, facts in lines:
        note(folder, action, facts)
    return folder / audit_log.NAME


@given(LINES, st.data())
def test_a_line_that_is_changed_removed_or_moved_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[str, dict[str, object]]],
    data: st.DataObject,
) -> None:
    file = written(tmp_path_factory.mktemp("log"), lines)
    honest = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert json.dumps([each for each, _ in entries(file)]) == json.dumps(honest)
    assert [(each["action"], each["number"]) for each in honest] == [
        (action, number) for number, (action, _) in enumerate(lines, 1)
    ]
    before = file.read_bytes().splitlines(keepends=True)
    place = data.draw(st.integers(0, len(before) - 2))
    how = data.draw(st.sampled_from(["removed", "twice", "moved", "changed", "account"]))
    changed = before[:]
    if how == "removed":
        del changed[place]
    elif how == "twice":
        changed.insert(place, before[place])
    elif how == "moved":
        changed[place], changed[place + 1] = before[place + 1], before[place]
    else:
        entry = json.loads(before[place])
        entry["account" if how == "account" else "time"] += "x"
        changed[place] = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    file.write_bytes(b"".join(changed))
    with pytest.raises(RunError, match="line"):
        list(entries(file))


@given(LINES, st.integers(1, 5))
def test_lines_cut_off_at_the_end_are_found_by_a_digest_noted_before(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, dict[str, object]]], cut: int
) -> None:
    file = written(tmp_path_factory.mktemp("log"), lines)
    noted = [digest for _, digest in entries(file)]
    kept = max(0, len(noted) - cut)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:kept]))
    assert [digest for _, digest in entries(file)] == noted[:kept]
    assert noted[-1] not in noted[:kept]


def test_the_command_shows_the_log_and_ends_with_one_for_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fed"
    assert (
        coordinator(
            monkeypatch, "sites", "certs", folder, "--host", "fl.example.org", "--site", "n"
        )
        == 0
    )
    note(folder, "start", {"purpose": "=1+1 \x1b[31m[bold]"})
    capsys.readouterr()
    assert coordinator(monkeypatch, "approval", "log", folder) == 0
    shown = capsys.readouterr().out
    assert "certify" in shown
    assert "\x1b" not in shown
    last = shown.split()[-1]
    assert coordinator(monkeypatch, "approval", "log", folder, "--verify", "--holds", last) == 0
    assert "2 entries, whole" in capsys.readouterr().out
    assert coordinator(monkeypatch, "approval", "log", folder, "--json") == 0
    assert [json.loads(each)["number"] for each in capsys.readouterr().out.splitlines()] == [1, 2]
    file = folder / audit_log.NAME
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert coordinator(monkeypatch, "approval", "log", folder, "--holds", last) == 1
    assert "lines were cut off" in capsys.readouterr().err
    file.write_bytes(file.read_bytes().replace(b"certify", b"approve"))
    note(folder, "start", {})
    assert coordinator(monkeypatch, "approval", "log", folder) == 0, "one line follows any other"
    file.write_bytes(file.read_bytes().replace(b"approve", b"certify"))
    assert coordinator(monkeypatch, "approval", "log", folder) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_lines_that_are_dated_before_the_line_before_are_named(
    tmp_path_factory: pytest.TempPathFactory, hours: list[int]
) -> None:
    """What a clock leaves that is set back; the order stays, because the chain has it."""
    folder, now = tmp_path_factory.mktemp("log"), datetime.now(UTC)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as printed:
        for hour in hours:
            clock = SimpleNamespace(now=lambda _, hour=hour: now + timedelta(hours=hour))
            patch.setattr(audit_log, "datetime", clock)
            note(folder, "start", {})
        assert coordinator(patch, "approval", "log", folder, "--verify") == 0
    back = [str(n + 2) for n, (a, b) in enumerate(pairwise(hours)) if b < a]
    expected = f"dated before the line before them: {', '.join(back)};" if back else ""
    shown = " ".join(printed.getvalue().split())
    assert expected in shown
    assert bool(shown) == bool(back)


def test_without_its_entry_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fed"
    coordinator(monkeypatch, "sites", "certs", folder, "--host", "fl.example.org")
    file = folder / audit_log.NAME
    with file.open("ab") as stream:
        stream.write(b'{"torn')
    for name in ("a", "b"):
        assert coordinator(monkeypatch, "sites", "certs", folder, "--site", name) == 1
        assert "so nothing is done" in capsys.readouterr().err
        assert not (folder / "sites" / name).exists()
    with pytest.raises(RunError, match="line 2: its end is missing"):
        list(entries(file))


def test_an_operators_key_signs_and_a_line_of_another_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ada").write_bytes(b"a" * 32)
    monkeypatch.setenv(OPERATOR, str(tmp_path / "ada"))
    note(tmp_path, "start", {"x": 1})
    file = tmp_path / audit_log.NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ((entry, _),) = entries(file)
    assert entry["key"] == public_key(b"a" * 32).hex()
    other = public_key(b"b" * 32).hex()
    file.write_bytes(file.read_bytes().replace(entry["key"].encode(), other.encode()))
    with pytest.raises(RunError, match="its signature does not fit"):
        list(entries(file))
    (tmp_path / "ada").write_bytes(b"short")
    with pytest.raises(ConfigError, match="no key of `coordinator approval key`"):
        note(tmp_path, "start", {})


def test_commands_at_the_same_time_each_have_their_line(tmp_path: Path) -> None:
    """In processes of their own, as commands are: threads of one process share a lock's file."""
    import subprocess

    code = (
        "import sys; from pathlib import Path\n"
        "from fedsurrogate.server_app.deployment.audit_log import note\n"
        "[note(Path(sys.argv[1]), 'start', {'who': sys.argv[2], 'n': n}) for n in range(10)]"
    )

    def write(who: str) -> int:
        return subprocess.run([sys.executable, "-c", code, tmp_path, who], check=False).returncode

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(write, "abc")) == [0, 0, 0]
    found = [
        (each["facts"]["who"], each["facts"]["n"]) for each, _ in entries(tmp_path / audit_log.NAME)
    ]
    assert sorted(found) == [(who, n) for who in "abc" for n in range(10)]


def test_a_machine_without_keys_has_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    note(None, "start", {})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own" / "log"))
    note(None, "start", {})
    assert len(list(entries(tmp_path / "own" / "log"))) == 1


@pytest.mark.parametrize("variable", ["LOGNAME", "USER", "LNAME", "USERNAME"])
def test_no_variable_of_the_environment_names_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for each in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, "somebody-else")
    note(tmp_path, "start", {})
    ((entry, _),) = entries(tmp_path / audit_log.NAME)
    assert entry["account"].rpartition("@")[0] in (
        pwd.getpwuid(os.getuid()).pw_name,
        str(os.getuid()),
    )
