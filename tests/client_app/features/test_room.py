"""What stays on a site's disk, file by file."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.cache import MIB, make_room
from fedsurrogate.client_app.governance.work_limits import has_room, remove_oldest
from fedsurrogate.client_app.node_config import NodeConfig

ENTRIES = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from(["", "", "", "locked"])),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    entries=ENTRIES,
    own=st.integers(0, 9),
    most=st.one_of(st.integers(1, 20).map(float), st.just(float("inf"))),
)
def test_entries_used_longest_ago_go_until_the_others_fit(
    entries: list[tuple[int, bool, str]], own: int, most: float
) -> None:
    """Those in use stay, and so does the one that was asked for."""
    with TemporaryDirectory() as place:
        folder = Path(place)

        def write(name: str, size: int, at: int) -> Path:
            entry = folder / name
            entry.mkdir()
            (entry / "x.npy").write_bytes(bytes(size))
            (entry / "inner").mkdir()
            os.utime(entry, ns=(10**18 + at, 10**18 + at * 10**9))
            return entry

        names = [f"e{at}{'.partial' * half}" for at, (_, half, _) in enumerate(entries)]
        for at, (name, (size, *_)) in enumerate(zip(names, entries, strict=True)):
            write(name, size, at)
        asked = write("asked", own, 0)
        (folder / "file").write_bytes(bytes(99))
        write("other.kind", 99, 0)
        locks = [
            FileLock(folder / f"{name.removesuffix('.partial')}.lock")
            for name, (*_, held) in zip(names, entries, strict=True)
            if held
        ]
        for lock in locks:
            lock.acquire()
        before = asked.stat().st_mtime
        make_room(asked, most / MIB)
        for lock in locks:
            lock.release()
        assert asked.stat().st_mtime > before
        total, left = own + sum(size for size, *_ in entries), set(names)
        for name, (size, _, held) in zip(names, entries, strict=True):
            if total <= most:
                break
            if not held:
                left.remove(name)
                total -= size
        kept = {each.name for each in folder.iterdir() if not each.name.endswith(".lock")}
        assert kept == {*left, "asked", "file", "other.kind"}


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from(["runs/a", "runs/a/deep", "models", "generators", "other"]),
            st.integers(0, 9),
        ),
        max_size=9,
    ),
    most=st.integers(1, 30),
    more=st.integers(0, 9),
)
def test_files_between_rounds_stay_from_the_newest_on(
    files: list[tuple[str, int]], most: int, more: int
) -> None:
    with TemporaryDirectory() as place:
        node = NodeConfig(site="s", state_dir=place)
        written = []
        for number, (folder, size) in enumerate(files):
            file = Path(place, folder, f"{number}.x")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(size))
            os.utime(file, ns=(10**18 + number, 10**18 + number))
            written.append((file, folder, size))
        received = sum(size for _, folder, size in written if folder in ("models", "generators"))
        assert has_room(node, most / MIB, more) == (received + more <= most)
        remove_oldest(node, most / MIB)
        total, first = 0, True
        for file, folder, size in reversed(written):
            if not folder.startswith("runs"):
                assert file.exists()
                continue
            total += size
            assert file.exists() == (first or total <= most)
            first = False
