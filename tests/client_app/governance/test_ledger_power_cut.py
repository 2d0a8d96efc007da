"""After a power cut the disk holds only flushed data; every charge that has returned must be there."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import cast

import pytest

from fedsurrogate.client_app.governance.entries import Release
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.release import charge_and_release
from fedsurrogate.common.files import stage_file
from tests.client_app.governance.ledger_processes import TOTAL, release


class Disk:
    """The state of a folder that would survive a power cut: each file's content at its last flush,
    under the names in the folder at its last flush. This is the strictest reading of POSIX; most
    file systems keep more.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._names = folder, dict[str, int]()
        self._contents: dict[int, bytes] = {}
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self._flush)

    def _flush(self, descriptor: int) -> None:
        self._real(descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            if os.path.samestat(found, self._folder.stat()):
                self._names = {entry.name: entry.inode() for entry in os.scandir(self._folder)}
        else:
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def after_a_power_cut(self, folder: Path) -> Path:
        folder.mkdir()
        for name, inode in self._names.items():
            # A file whose content was never flushed is empty.
            (folder / name).write_bytes(self._contents.get(inode, b""))
        return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see what a descriptor stands for")
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_every_charge_that_has_returned_survives_a_power_cut(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, ledger = Disk(state, monkeypatch), Ledger(state, "data")
    for number in range(1, 5):
        spent = ledger.charge(release(4.0, run=str(number)), TOTAL)
        survivor = Ledger(disk.after_a_power_cut(tmp_path / f"after-{number}"), "data")
        assert len(survivor.entries()) == number
        assert survivor.spent(1e-5) == spent


def test_a_torn_line_that_was_cut_off_stays_cut_off_and_the_next_charge_lasts(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, ledger = Disk(state, monkeypatch), Ledger(state, "data")
    ledger.charge(release(run="0"), TOTAL)
    with ledger.path.open("ab") as file:
        file.write(b'{"half a line')
    assert len(ledger.entries()) == 1
    assert len(Ledger(disk.after_a_power_cut(tmp_path / "cut"), "data").entries()) == 1
    ledger.charge(release(run="1"), TOTAL)
    assert len(Ledger(disk.after_a_power_cut(tmp_path / "after"), "data").entries()) == 2


def test_a_reopened_ledger_and_what_it_replaces_survive_a_power_cut(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, ledger = Disk(state, monkeypatch), Ledger(state, "data")
    ledger.charge(release(run="0"), TOTAL)
    before = ledger.path.read_bytes()
    ledger.reopen("a restored disk", 2.0, 1e-5)
    folder = disk.after_a_power_cut(tmp_path / "after")
    assert Ledger(folder, "data").spent(1e-5) == pytest.approx(2.0)
    assert any(file.read_bytes() == before for file in folder.iterdir())


def test_the_state_kept_with_a_release_survives_a_power_cut(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a site would mask a second vector of secure aggregation with the masks of the first."""

    class Open:
        def let_out(self, release: Release) -> float:
            return 0.0

    (state / "sum.pb").write_bytes(b"shares")
    disk = Disk(state, monkeypatch)
    charge_and_release(
        cast(Gate, Open()),
        release(4.0),
        {state / "sum.pb": stage_file(state / "sum.pb", b"masked")},
    )
    assert (disk.after_a_power_cut(tmp_path / "after") / "sum.pb").read_bytes() == b"masked"
