"""A check log and receipts: which ledgers agree with them, and which do not."""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.ledger import CheckLog, CheckLogEntry, Ledger
from fedsurrogate.common.errors import LedgerError
from fedsurrogate.common.security.registrations import (
    Receipt,
)
from tests.client_app.governance.ledger_processes import TOTAL, release


def ledger_of(home: Path, dataset: str = "data") -> Ledger:
    found = Ledger(home / "state", dataset, CheckLog(home / "check-log", dataset, home / "state"))
    found.open()
    return found


def receipt_of(ledger: Ledger) -> Receipt:
    assert ledger.check_log is not None
    found = ledger.check_log.read()
    assert found is not None
    return found.receipt(found.length, found.last)


@settings(max_examples=8)
@given(left=st.sets(st.integers(0, 2), min_size=1), charged=st.integers(0, 2))
def test_data_of_which_anything_is_left_are_not_opened_again(
    tmp_path_factory: pytest.TempPathFactory, left: set[int], charged: int
) -> None:
    """A second opening would begin the budget again."""
    ledger = ledger_of(tmp_path_factory.mktemp("home"))
    for _ in range(charged):
        ledger.charge(release(), TOTAL)
    assert ledger.check_log is not None
    files = [ledger.path, ledger.head, ledger.check_log.file]
    for at, file in enumerate(files):
        if at not in left:
            file.unlink()
    before = {file: file.read_bytes() for file in files if file.exists()}
    with pytest.raises(LedgerError, match="a ledger was open before"):
        ledger.open()
    assert {file: file.read_bytes() for file in files if file.exists()} == before


def test_every_receipt_of_the_past_agrees_and_none_of_the_future(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    past = [receipt_of(ledger)]
    for _ in range(3):
        ledger.charge(release(), TOTAL)
        past.append(receipt_of(ledger))
    assert [each.length for each in past] == [1, 2, 3, 4]
    ledger.check(past)
    for wrong in (
        replace(past[1], length=3),
        replace(past[3], length=5),
        replace(past[2], tag=past[1].tag),
    ):
        with pytest.raises(LedgerError, match="the coordinator has seen"):
            ledger.check([*past, wrong])


def test_data_sets_of_one_site_do_not_disturb_each_other_and_show_no_relation(
    tmp_path: Path,
) -> None:
    one, other = ledger_of(tmp_path), ledger_of(tmp_path, "other")
    one.charge(release(), TOTAL)
    receipts = [receipt_of(one), receipt_of(other)]
    assert len({each.ledger for each in receipts} | {each.tag for each in receipts}) == 4
    one.check(receipts)
    other.check(receipts)
    assert other.check_log is not None
    other.check_log.file.unlink()
    with pytest.raises(LedgerError, match="it was lost, or it is of other data"):
        one.check(receipts)


def test_every_changed_byte_of_a_check_log_is_refused_or_says_the_same(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    ledger.charge(release(), TOTAL)
    assert ledger.check_log is not None
    receipt, whole = receipt_of(ledger), ledger.check_log.file.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        ledger.check_log.file.write_bytes(bytes(changed))
        try:
            # Only the opening time, which orders the ledgers of one site, is not compared with the
            # ledger itself.
            ledger.check([receipt])
        except LedgerError:
            continue
        opened = len("witness 1 data ")
        assert opened <= position < opened + 10, chr(whole[position])


def test_where_only_the_check_log_finds_no_room_nothing_leaves_and_the_entry_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_of(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedsurrogate.client_app.governance.ledger.replace_file", full)
        for _ in range(3):
            with pytest.raises(LedgerError, match="No space left on device"):
                ledger.charge(release(), TOTAL)
    assert len(ledger.entries()) == 1
    ledger.charge(release(), TOTAL)
    ledger.check([receipt_of(ledger)])


def test_the_check_log_is_written_before_a_charge_returns_and_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_of(tmp_path)
    written: list[str] = []
    real = __import__("os").fsync

    def fsync(descriptor: int) -> None:
        written.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    ledger.charge(release(), TOTAL)
    # A file that is replaced has a name of its own before.
    names = [re.sub(r"^\.(.+)\.[0-9a-f]{8}$", r"new \1", name) for name in written]
    assert names == ["data.jsonl", "new data.head", "state", "new data.witness", "check-log"]


RELEASE: dict[str, object] = {"kind": "release"}
# As earlier versions wrote it, of a ledger begun anew, of one that was kept, and of one that says how
# many entries the lost one had.
DECISIONS: list[dict[str, object]] = [
    {"kind": "decision", **more} for more in ({}, {"kept": False}, {"kept": True}, {"kept": True, "seen": 5})
]  # fmt: skip


@given(
    opened=st.integers(99, 102),
    length=st.integers(1, 7),
    before=st.lists(st.sampled_from([RELEASE, *DECISIONS]), max_size=3),
    decided=st.lists(st.sampled_from(DECISIONS), max_size=2),
    after=st.lists(st.just(RELEASE), max_size=2),
)
def test_a_receipt_of_a_lost_ledger_is_settled_by_the_last_decisions_alone(
    opened: int,
    length: int,
    before: list[dict[str, object]],
    decided: list[dict[str, object]],
    after: list[dict[str, object]],
) -> None:
    """Of later ones, without a release between them; and of a ledger that was kept, if it had as many
    releases, or a person has said how many are missing.
    """
    own, lost = (CheckLogEntry(100, 9, "a" * 64, digit * 64) for digit in "12")
    receipt = replace(lost, opened=opened).receipt(length, "b" * 64)
    header: dict[str, object] = {"kind": "header"}
    chain = [header, *before, RELEASE, *decided, *after] if decided else [header, *after]
    entries = [each | {"sequence": at} for at, each in enumerate(chain)]
    settled = bool(decided) and opened <= 100
    if settled and all(each.get("kept") for each in decided):
        most = max([len(before) + 2] + [5 for each in decided if "seen" in each])
        settled = length <= most
    with TemporaryDirectory() as place:
        seen = CheckLog(Path(place, "check-log"), "d" * 16, Path(place, "state"))
        seen._write(own)
        if settled:
            seen.hold_against(entries, [receipt])
            return
        with pytest.raises(
            LedgerError, match=f"has seen {length} entries of a ledger of this site"
        ):
            seen.hold_against(entries, [receipt])
