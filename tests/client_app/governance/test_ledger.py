"""The ledger records every release before it leaves, never exceeds the budget, and is not trusted
after a change.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance import ledger as module
from fedsurrogate.client_app.governance.budget import (
    Budget,
    Release,
    events_of,
    non_private_releases,
)
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.client_app.governance.release import charge_and_release
from fedsurrogate.common.errors import BudgetError, ConfigError, LedgerError
from fedsurrogate.common.files import stage_file
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_noise_multiplier,
)
from tests.client_app.governance.ledger_processes import TOTAL, release


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger with three releases."""
    found = Ledger(tmp_path, "data")
    for number in range(3):
        found.charge(release(run=str(number)), TOTAL)
    return found


def refused(ledger: Ledger, path: Path | None = None) -> str:
    """The ledger's message when it refuses both reading and charging; it changes nothing then."""
    before = {
        file: file.read_bytes() for file in ledger.path.parent.iterdir() if file.suffix != ".lock"
    }
    with pytest.raises(LedgerError) as reading:
        ledger.entries()
    with pytest.raises(LedgerError):
        ledger.charge(release(), TOTAL)
    assert before == {
        file: file.read_bytes() for file in ledger.path.parent.iterdir() if file.suffix != ".lock"
    }
    return str(reading.value)


def test_what_is_recorded_comes_back_and_an_unused_ledger_has_no_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state", "data")
    assert ledger.entries() == []
    assert ledger.spent(1e-5) == 0
    assert not ledger.path.parent.exists()
    ledger.charge(release(), TOTAL)
    (entry,) = ledger.entries()
    assert {
        "mechanism": "sums",
        "sigmas": {"sums": 2.0},
        "unit": "record",
        "bytes": 10,
        "sha256": "0" * 64,
    }.items() <= entry.items()
    assert entry["events"] == [{"noise_multiplier": 1000.0, "sample_rate": 1.0, "count": 1}]


def test_budgets_compose_over_releases_rounds_and_runs(tmp_path: Path) -> None:
    ledger, noises = Ledger(tmp_path, "data"), [3.0, 3.0, 2.5, 2.5]
    for number, noise in enumerate(noises):
        spent = ledger.charge(release(noise, run=str(number // 2), number=number), TOTAL)
    assert spent == ledger.spent(1e-5) == epsilon_spent(map(GaussianEvent, noises), 1e-5)
    assert ledger.spent(1e-5, "1") == epsilon_spent(map(GaussianEvent, noises[2:]), 1e-5)


def test_a_run_has_its_own_limit_over_its_rounds(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path, "data"), Budget(100.0, 1e-5, epsilon_per_run=1.0)
    noise = gaussian_noise_multiplier(1.0, 1e-5) * 2**0.5
    ledger.charge(release(noise), budget)
    ledger.charge(release(noise, number=2), budget)
    with pytest.raises(BudgetError, match="epsilon-per-run = 1"):
        ledger.charge(release(noise, number=3), budget)
    ledger.charge(release(noise, run="2"), budget)


@pytest.mark.slow
def test_every_changed_byte_is_noticed(ledger: Ledger) -> None:
    content = ledger.path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        ledger.path.write_bytes(bytes(changed))
        refused(ledger)
    ledger.path.write_bytes(content)
    assert len(ledger.entries()) == 3


Damage = Callable[[list[str]], list[str]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:-1],
        lambda lines: lines[:1],
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], lines[3]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines[:2], lines[2].replace("1000.0", "9000.0"), lines[3]],
        lambda lines: [*lines, "not a line\n"],
    ],
)
def test_lines_removed_moved_or_edited_stop_everything(ledger: Ledger, damage: Damage) -> None:
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join(damage(lines)))
    assert "nothing leaves until a person has looked at it" in refused(ledger)


@pytest.mark.slow
def test_cut_anywhere_no_recorded_release_is_ever_forgotten(ledger: Ledger) -> None:
    content = ledger.path.read_bytes()
    for size in range(len(content)):
        ledger.path.write_bytes(content[:size])
        refused(ledger)


@pytest.mark.parametrize("part", ["path", "head"])
def test_one_file_without_the_other_is_refused(ledger: Ledger, part: str) -> None:
    getattr(ledger, part).unlink()
    assert "entries, but" in refused(ledger)


def test_read_only_it_refuses(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: object, **more: object) -> int:
        raise PermissionError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("fedsurrogate.client_app.governance.ledger.os.open", denied)
        with pytest.raises(LedgerError, match="Read-only file system"):
            ledger.charge(release(), TOTAL)
    assert len(ledger.entries()) == 3


def test_where_only_the_head_finds_no_room_the_release_stays_and_counts_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedsurrogate.client_app.governance.ledger.replace_file", full)
        for _ in range(3):
            with pytest.raises(LedgerError, match="No space left on device"):
                ledger.charge(release(run="4"), TOTAL)
    assert len(ledger.entries()) == 4


def test_a_person_can_begin_again_and_what_was_spent_stays_spent(ledger: Ledger) -> None:
    ledger.path.write_text("damaged")
    refused(ledger)
    ledger.reopen("disk failure, see ticket 7", 3.0, 1e-5)
    (decision,) = ledger.entries()
    assert decision["reason"] == "disk failure, see ticket 7"
    assert ledger.spent(1e-5) == pytest.approx(3.0)
    kept = {ledger.path.parent / name for name in decision["aside"]}
    assert any(file.read_text() == "damaged" for file in kept)
    with pytest.raises(BudgetError):
        ledger.charge(release(1.5), TOTAL)
    ledger.charge(release(), TOTAL)


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf"), -1.0])
def test_what_a_person_says_was_spent_must_be_a_number(ledger: Ledger, epsilon: float) -> None:
    before = {file: file.read_bytes() for file in ledger.path.parent.iterdir()}
    with pytest.raises(ConfigError, match="must be a positive number"):
        ledger.reopen("mistyped", epsilon, 1e-5)
    assert before == {file: file.read_bytes() for file in ledger.path.parent.iterdir()}


def test_whatever_stands_in_the_files_is_refused_in_words(ledger: Ledger) -> None:
    whole = ledger.path.read_bytes()
    for content in (
        b"\0" * 100 + b"\n",
        b"[" * 100_000 + b"\n",
        b"\xff\n",
        b"null\n",
        b"{}\n",
        b"[1]\n",
        b"\n",
    ):
        ledger.path.write_bytes(content)
        refused(ledger)
    ledger.path.write_bytes(whole)
    for content in (b"", b"4", b"four x", b"-1 x", b"0 x", b"\xff\xfe", b"4 " + b"0" * 64):
        ledger.head.write_bytes(content)
        refused(ledger)
    ledger.path.write_bytes(b"")
    ledger.head.write_bytes(b"-1 x")
    refused(ledger)


def test_lines_are_json_that_other_programs_can_check(ledger: Ledger) -> None:
    import hashlib

    previous = ""
    for line in ledger.path.read_text().splitlines():
        entry = json.loads(line)
        stated = entry.pop("hash")
        assert entry["previous"] == previous
        assert (
            hashlib.sha256(
                json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
            ).hexdigest()
            == stated
        )
        previous = stated


def test_only_the_account_of_the_site_may_read_or_change_a_ledger(ledger: Ledger) -> None:
    for file in (ledger.path, ledger.head):
        assert file.stat().st_mode & 0o777 == 0o600


DELTA = 1e-5
# Releases with and without privacy may follow each other.
AFTER_OPEN = replace(TOTAL, after_open=True)


@dataclass(frozen=True)
class Charge:
    """A release: its noise, zero for none, and its run."""

    noise: float
    run: str


@dataclass(frozen=True)
class Decision:
    """A person reopens the ledger."""

    epsilon: float
    delta: float
    keep: bool


FILES = [f"bundle-{digit * 16}" for digit in "ab"]


def with_fixed_noise(course: list[Charge | Decision]) -> list[Charge | Decision]:
    """The noise of a run is fixed when it begins."""
    first: dict[str, float] = {}
    return [
        replace(each, noise=first.setdefault(each.run, each.noise))
        if isinstance(each, Charge)
        else each
        for each in course
    ]


COURSES = st.lists(
    st.builds(Charge, st.sampled_from([0.0, 500.0, 1000.0]), st.sampled_from(["1", "2", *FILES]))
    | st.builds(Decision, st.sampled_from([0.0, 0.5]), st.sampled_from([1e-5, 1e-6]), st.booleans()),
    max_size=5,
).map(with_fixed_noise)  # fmt: skip


@dataclass
class Account:
    """What the ledger must say, kept as lists."""

    events: list[GaussianEvent] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    open: int = 0
    entries: int = 0
    answered: set[str] = field(default_factory=set)


def opened(folder: Path) -> Ledger:
    """The ledger as a process finds it that has just started."""
    state = folder / "state"
    return Ledger(state, "data", CheckLog(folder / "check-log", "data", state))


@settings(max_examples=8)
@given(COURSES)
def test_a_ledger_says_what_was_charged_answered_and_decided(
    tmp_path_factory: pytest.TempPathFactory, course: list[Charge | Decision]
) -> None:
    folder, account = tmp_path_factory.mktemp("site"), Account()
    opened(folder).open()
    for event in course:
        ledger = opened(folder)
        before = ledger.path.read_bytes()
        if isinstance(event, Charge):
            ledger.charge(release(event.noise, event.run), AFTER_OPEN)
            account.events += [GaussianEvent(event.noise)] if event.noise else []
            account.runs += [event.run] if event.noise else []
            account.open += not event.noise
            account.entries += 1
            account.answered |= {event.run} & set(FILES)
            stated = asdict(release(event.noise, event.run)) | {"kind": "release"}
        else:
            ledger.reopen("moved", event.epsilon, event.delta, event.keep)
            if not event.keep:
                account = Account(answered=account.answered)
            if event.epsilon:
                noise = gaussian_noise_multiplier(event.epsilon, event.delta)
                account.events.append(GaussianEvent(noise))
                account.runs.append("")
            account.entries += 1
            stated = {"kind": "decision", "reason": "moved", "flower_run": ""}
            stated |= {"epsilon": event.epsilon, "delta": event.delta, "kept": event.keep}
            stated["answered"] = sorted(account.answered)
        ledger = opened(folder)
        entries = ledger.entries()
        last = entries[-1]
        stated = {key: last[key] if key == "events" else value for key, value in stated.items()}
        assert stated.items() <= last.items()
        if isinstance(event, Decision):
            kept = {name: (ledger.path.parent / name).read_bytes() for name in last["aside"]}
            assert before in kept.values()
            assert last["aside"] == {n: hashlib.sha256(c).hexdigest() for n, c in kept.items()}
        assert events_of(entries) == account.events
        assert len(entries) == account.entries
        assert [entry["sequence"] for entry in entries] == list(range(1, len(entries) + 1))
        assert non_private_releases(ledger.entries()) == account.open
        assert ledger.answered() & set(FILES) == account.answered
        for run in ("", "1", FILES[0]):
            own = [
                e for e, name in zip(account.events, account.runs, strict=True) if run in ("", name)
            ]
            assert ledger.spent(DELTA, run) == epsilon_spent(own, DELTA)
        check_log = ledger.check_log
        assert check_log is not None
        seen = check_log.read()
        assert seen is not None
        assert (seen.length, seen.last) == (len(entries) + 1, last["hash"])
        ledger.check([seen.receipt(seen.length, seen.last)])


RUNS = [f"bundle-{digit * 16}" for digit in "ab"] + ["77", "bundle-x"]
STEPS = st.lists(st.sampled_from(RUNS) | st.sampled_from(["reopened", "kept", "lost"]), max_size=6)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, logged=st.booleans())
def test_answers_are_known_after_any_course_of_a_ledger(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], logged: bool
) -> None:
    folder = tmp_path_factory.mktemp("site")
    state = folder / "state"
    check_log = CheckLog(folder / "seen", "data", state) if logged else None
    ledger = Ledger(state, "data", check_log)
    ledger.open()
    answered: set[str] = set()
    charged: set[str] = set()
    budget = Budget(100.0, 1e-5, 100.0, True)
    for step in steps:
        if step in RUNS:
            ledger.charge(release(50.0, run=step), budget)
            charged.add(step)
            answered |= {step} & set(RUNS[:2])
            if check_log is not None:
                assert check_log.answered() == answered, "written before the reply leaves"
        elif step == "lost" and logged:
            for file in state.glob("data.*"):
                file.unlink()
            ledger.reopen("the disk was lost", 1.0, 1e-5)
            charged = set()
        elif step in ("reopened", "kept"):
            ledger.reopen("a person decided", 1.0, 1e-5, keep=step == "kept")
            charged = charged if step == "kept" else set()
        assert ledger.answered() - {"", *RUNS[2:]} == answered
        assert charged <= ledger.answered()


def opened_lock(tmp_path: Path) -> Callable[[], Ledger]:
    """A function that gives the ledger to one more process."""

    def another() -> Ledger:
        return Ledger(
            tmp_path / "ledgers",
            "data",
            CheckLog(tmp_path / "check-log", "data", tmp_path / "ledgers"),
        )

    another().open()
    return another


OPERATIONS: dict[str, Callable[[Ledger], Any]] = {
    "entries": lambda ledger: ledger.entries(),
    "check": lambda ledger: ledger.check(),
    "open": lambda ledger: ledger.open(),
    "charge": lambda ledger: ledger.charge(release(), TOTAL),
    "answered": lambda ledger: ledger.answered(),
    "reopen": lambda ledger: ledger.reopen("a test", 0.0, 1e-5),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_while_another_process_holds_the_lock_a_ledger_waits_and_then_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = opened_lock(tmp_path)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with another()._locked(), pytest.raises(LedgerError, match="cannot be locked"):
        OPERATIONS[name](another())
    another().charge(release(), TOTAL)
    assert len(another().entries()) == 1


@pytest.mark.parametrize("step", ["_read", "_append", "_write_head", "check_budget"])
def test_a_charge_holds_the_lock_from_its_first_look_to_its_last_byte(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes could both find enough budget and both spend it."""
    another, held = opened_lock(tmp_path), []
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    where: Any = module if step == "check_budget" else Ledger
    real = getattr(where, step)

    def inside(*given: Any) -> Any:
        if not held:
            held.append(False)
            with pytest.raises(LedgerError, match="cannot be locked"):
                another().entries()
            held[0] = True
        return real(*given)

    monkeypatch.setattr(where, step, inside)
    another().charge(release(), TOTAL)
    assert held == [True]


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
