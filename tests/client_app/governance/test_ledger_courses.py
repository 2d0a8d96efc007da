"""Whatever is charged, answered and decided, in any order, a ledger says so, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.entries import events_of
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_noise_multiplier,
)
from tests.client_app.governance.ledger_processes import TOTAL, release

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
        assert ledger.non_private_releases() == account.open
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
