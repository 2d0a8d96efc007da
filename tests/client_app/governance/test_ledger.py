"""The ledger records every release before it leaves, never exceeds the budget, and is not trusted
after a change.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsurrogate.client_app.governance.budget import Budget
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.common.errors import BudgetError, ConfigError, LedgerError
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


def test_a_torn_last_line_stands_for_nothing_that_left(ledger: Ledger) -> None:
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + b'{"kind":"release","run"')
    assert len(ledger.entries()) == 3
    assert ledger.path.read_bytes() == whole


def test_killed_between_line_and_head_the_release_counts(ledger: Ledger) -> None:
    head = ledger.head.read_bytes()
    ledger.charge(release(run="4"), TOTAL)
    ledger.head.write_bytes(head)
    assert len(ledger.entries()) == 4
    assert ledger.head.read_bytes() != head
    ledger.charge(release(run="5"), TOTAL)
    assert len(ledger.entries()) == 5


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
