"""Rows that are read, changed and written part by part are those of the whole table."""

from __future__ import annotations

import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features import extraction
from fedsurrogate.client_app.features.extraction import (
    MIB,
    Features,
    clipped_features,
    make_room,
    written,
)
from fedsurrogate.client_app.governance.work_limits import has_room, remove_oldest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.privacy.gaussian_mechanism import clip

TABLES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 99))


def table(shape: tuple[int, int, int]) -> torch.Tensor:
    count, width, seed = shape
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(shape=TABLES, size=st.integers(1, 9), norm=st.sampled_from([0.5, 1.0, 2.0, 100.0]))
def test_clipped_rows_in_a_file_are_those_in_memory(
    shape: tuple[int, int, int], size: int, norm: float
) -> None:
    features = table(shape)
    expected, share = clip(2.0 * features.double(), norm)
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "CHUNK", size)
        for folder in (None, Path(place, "inner")):
            found, shortened = clipped_features(features, norm, folder, lambda rows: 2.0 * rows)
            assert found.dtype == torch.float64
            assert torch.equal(found, expected)
            if len(features):
                assert shortened == pytest.approx(share)


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(TABLES, max_size=4), double=st.booleans())
def test_a_written_table_is_all_parts_of_the_type_that_was_asked_for(
    shapes: list[tuple[int, int, int]], double: bool
) -> None:
    parts = [table((count, 3, seed)) for count, _, seed in shapes]
    kind = torch.float64 if double else torch.float32
    with TemporaryDirectory() as place:
        found = written(iter(parts), 3, Path(place), kind)
        assert not list(Path(place).iterdir())
    assert found.dtype == kind
    assert torch.equal(found, torch.cat([torch.zeros(0, 3), *parts]).to(kind))
    if not double:
        assert written(iter(parts), 3, Path(place)).dtype == torch.float32
        Path(place).rmdir()


@settings(max_examples=60, deadline=None)
@given(
    bags=st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), min_size=1, max_size=4
    ),
    ok=st.lists(st.booleans(), min_size=8, max_size=8),
    odd=st.sets(st.integers(0, 7), max_size=2),
    power=st.sampled_from([1.0, 0.5]),
    piece=st.integers(1, 20),
)
def test_the_feature_of_a_bag_is_the_mean_of_what_can_be_used(
    bags: list[list[int]], ok: list[bool], odd: set[int], power: float, piece: int
) -> None:
    x = table((8, 3, 1)).half()
    for row in odd:
        x[row, 1] = math.inf
    one = Features(x, torch.tensor(ok), "f", 0.0, cached=False)
    plain = one.of(torch.tensor([5, 2]))
    assert torch.equal(plain, x[[5, 2]].float())
    raised = one.of(torch.tensor([5, 2]), power)
    values = x[[5, 2]].float()
    torch.testing.assert_close(raised, values.sign() * values.abs() ** power)
    found = one.pooled([torch.tensor(each) for each in bags])
    assert found.ok.tolist() == [any(ok[image] for image in each) for each in bags]
    assert (found.fingerprint, found.cached) == ("f", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "PIECE", piece)
        means = found.of(torch.arange(len(bags)).flip(0), power)
    for mean, each in zip(means, reversed(bags), strict=True):
        used = [image for image in each if ok[image] and image not in odd]
        if not used:
            assert mean.isnan().all()
            continue
        rows = x[used].double()
        rows = rows.sign() * rows.abs() ** power
        torch.testing.assert_close(mean.double(), rows.mean(0), rtol=1e-4, atol=1e-5)


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
