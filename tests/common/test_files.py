"""A file is replaced whole or not at all, whatever stops the write; and in one way everywhere."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common import files
from tests.documents import ROOT

STEPS = ("open", "fdopen", "fsync", "replace")


# What may end a write: a full disk, and also what no `except Exception` sees.
ENDS = (OSError, MemoryError, KeyboardInterrupt, SystemExit)


def broken(step: str, end: type[BaseException] = OSError) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise end(28, f"no space left in {step}")

    return fail


@given(
    st.binary(max_size=200),
    st.one_of(
        st.binary(max_size=200), st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
    ),
    st.booleans(),
    st.sampled_from(["", *STEPS]),
    st.sampled_from(ENDS),
)
def test_a_file_has_the_old_content_or_the_new_one_and_nothing_is_left(
    old: bytes, new: bytes | str, durable: bool, step: str, end: type[BaseException]
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        file = Path(folder) / "x"
        file.write_bytes(old)
        if step == "replace":
            patched.setattr(Path, "replace", broken(step, end))
        elif step:
            patched.setattr(files.os, step, broken(step, end))
        reached = step and (durable or step != "fsync")
        if reached:
            with pytest.raises(end, match=step):
                files.replace_file(file, new, durable=durable)
        else:
            files.replace_file(file, new, durable=durable)
        patched.undo()
        wanted = old if reached else new.encode() if isinstance(new, str) else new
        assert file.read_bytes() == wanted
        assert list(Path(folder).iterdir()) == [file]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("step", ["body", "fsync", "chmod", "replace"])
def test_content_by_a_library_is_whole_or_nothing(
    step: str, end: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"old")
    if step == "fsync":
        monkeypatch.setattr(files.os, "fsync", broken(step, end))
    elif step != "body":
        monkeypatch.setattr(Path, step, broken(step, end))

    def write() -> None:
        with files.replacing(file, mode=0o640) as temporary:
            temporary.write_bytes(b"new")
            if step == "body":
                raise end("body")

    with pytest.raises(end, match=step):
        write()
    monkeypatch.undo()
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])
    with files.replacing(file, mode=0o640) as temporary:
        temporary.write_bytes(b"new")
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode), list(tmp_path.iterdir())) == (
        b"new",
        0o640,
        [file],
    )


@given(st.sampled_from([0o600, 0o644, 0o666]), st.sampled_from([0o000, 0o022, 0o027, 0o077]))
def test_the_mode_is_what_the_umask_leaves_and_never_more_meanwhile(mode: int, umask: int) -> None:
    with TemporaryDirectory() as folder:
        before = os.umask(umask)
        try:
            staged = files.stage_file(Path(folder) / "x", b"1", mode=mode)
            assert stat.S_IMODE(staged.stat().st_mode) == mode & ~umask
            files.put_in_place(staged, Path(folder) / "x")
        finally:
            os.umask(before)
        assert stat.S_IMODE((Path(folder) / "x").stat().st_mode) == mode & ~umask


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    flush, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        flush(descriptor)

    def replace(self: Path, target: Path) -> Path:
        done.append("name")
        return rename(self, target)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    files.replace_file(tmp_path / "x", b"1")
    assert done == ["content", "name", "folder"]
    done.clear()
    files.replace_file(tmp_path / "x", b"1", durable=False)
    assert done == ["name"]


def test_no_other_file_of_the_product_replaces_a_file() -> None:
    """By the calls themselves: a rename of a path, or a flush to the disk."""
    may = {
        "common/files.py": {"replace", "fsync"},
        # Appended lines and records.
        "client_app/governance/ledger.py": {"fsync"},
        "server_app/deployment/audit_log.py": {"fsync"},
        # A folder, whose large files a library has written.
        "client_app/features/extraction.py": {"replace", "fsync"},
        # The list of revoked keys only grows, and two commands may add to it at a time.
        "common/security/registrations.py": {"fsync"},
        # A state of secure aggregation is written once: one that exists is an error.
        "client_app/secure_aggregation.py": {"fsync", "replace"},
        # A folder of a study, which is whole then.
        "client_app/datasets/pacs.py": {"replace"},
        # What is moved aside, and a file that is locked while it is open.
        "server_app/exchange.py": {"replace"},
        "server_app/runs/writer_lock.py": {"replace"},
    }
    wrong = {}
    for floor in ("common", "client_app", "strategies", "server_app", "fedsurrogate"):
        for path in (ROOT / floor).rglob("*.py"):
            name, found = path.relative_to(ROOT).as_posix(), set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    # Path.replace and os.rename take one place; str.replace takes two,
                    # dataclasses.replace is no attribute.
                    if (
                        node.func.attr in ("replace", "rename")
                        and len(node.args) == 1
                        and not node.keywords
                    ):
                        found.add("replace")
                    if node.func.attr in ("fsync", "fdatasync"):
                        found.add("fsync")
            if not found <= may.get(name, set()):
                wrong[name] = found
    assert wrong == {}, "use fedsurrogate.common.files.replace_file"


@given(st.binary(max_size=50), st.booleans())
def test_a_new_file_never_takes_the_place_of_another(content: bytes, there: bool) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "x"
        if there:
            file.write_bytes(b"old")
        assert files.create_file(file, content) is not there
        assert file.read_bytes() == (b"old" if there else content)
        assert list(Path(folder).iterdir()) == [file]


def test_two_processes_agree_on_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    # The other process makes it after this one has looked.
    monkeypatch.setattr(
        files.os, "link", lambda *_: (file.write_bytes(b"theirs"), broken_by_another())[1]
    )
    assert files.kept_secret(file, 6) == b"theirs"
    assert list(tmp_path.iterdir()) == [file]


def broken_by_another() -> None:
    raise FileExistsError


@given(st.integers(0, 3), st.booleans(), st.booleans())
def test_the_names_of_new_folders_are_on_the_disk_too(
    depth: int, durable: bool, there: bool
) -> None:
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        parts = [Path(place).joinpath(*"abc"[: at + 1]) for at in range(depth)]
        folder = parts[-1] if parts else Path(place)
        if there:
            folder.mkdir(parents=True, exist_ok=True)
        flushed: list[Path] = []
        patched.setattr(files, "_flush", flushed.append)
        files.replace_file(folder / "x", "1", durable=durable)
        new = [] if there or not durable else [each.parent for each in parts]
        assert sorted(flushed) == sorted(new)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_a_site_makes_is_for_its_own_account(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with files.owner_only():
            (tmp_path / "folder").mkdir()
            (tmp_path / "file").write_text("")
        assert os.umask(umask) == umask
        with pytest.raises(OSError, match="missing"), files.owner_only():
            (tmp_path / "missing").read_text()
        assert os.umask(umask) == umask
        files.replace_file(tmp_path / "usual", b"1")
        files.create_file(tmp_path / "new", b"1")
        assert len(files.kept_secret(tmp_path / "secret", 9)) == 9
        secret = files.kept_secret(tmp_path / "secret", 5)
        assert (len(secret), secret) == (9, (tmp_path / "secret").read_bytes())
        files.create_file(tmp_path / "shown", b"1", mode=files.READABLE)
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {
        "folder": 0o700, "file": 0o600, "usual": 0o600, "new": 0o600, "secret": 0o600, "shown": 0o666 & ~umask,
    }  # fmt: skip


@given(st.permutations(range(3)))
def test_the_last_thread_that_leaves_restores_the_umask(order: list[int]) -> None:
    before, blocks = os.umask(0o022), [files.owner_only() for _ in order]
    try:
        for block in blocks:
            block.__enter__()
        for left, at in enumerate(order, 1):
            blocks[at].__exit__(None, None, None)
            wanted = 0o022 if left == len(order) else 0o077
            assert os.umask(wanted) == wanted
    finally:
        os.umask(before)


def test_a_file_under_work_is_its_owners_and_a_library_finds_it_empty(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "x", mode=0o644) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        assert temporary.read_bytes() == b""
        assert temporary.parent == tmp_path
        assert not (tmp_path / "x").exists()
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_whoever_says_nothing_gets_a_file_that_outlives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        flush(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    staged = files.stage_file(tmp_path / "x", b"1")
    assert flushed == [False]
    files.put_in_place(staged, tmp_path / "x")
    assert flushed == [False, True]
    with files.replacing(tmp_path / "y", mode=0o600) as temporary:
        temporary.write_bytes(b"1")
    assert flushed == [False, True] * 2
    files.replace_file(tmp_path / "z", b"1")
    assert flushed == [False, True] * 3
    files.create_file(tmp_path / "new", b"1")
    assert flushed == [*[False, True] * 3, False]
