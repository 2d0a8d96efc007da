"""A request by file that was answered stays answered, whatever becomes of the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.budget import Budget
from fedsurrogate.client_app.governance.ledger import CheckLog, Ledger
from tests.client_app.governance.ledger_processes import release

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
