"""A coordinator that asks for more rounds than a run plans, leaves out the first one, or repeats
one.

Each round that it asks for has the noise of the plan, so a site that counts only its budget lets
them out until `epsilon-per-run`, and the claim of the run (its epsilon) no longer holds.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.common.errors import BudgetError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import INFO, to_record
from tests.attacks.privacy.neighbours import Data, Record
from tests.attacks.privacy.visits import METHODS, PRIVATE, Hospital

# What a site would allow a run: much more than what it claims.
GENEROUS = Policy(
    epsilon_total=1e3, epsilon_per_run=1e3, delta=1e-4, delta_total=1e-3, mechanisms=("*",)
)
SUMMED: dict[str, dict[str, Any]] = {
    "counts in a sum": METHODS["survey"] | {"secure-aggregation": True, "sites": 9},
    "steps in a sum": {
        "method": "dp-fedavg",
        "secure-aggregation": True,
        "sites": 9,
        "fedavg.rounds": 3,
    },
}
PLANS: dict[str, dict[str, Any]] = METHODS | SUMMED


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=8, deadline=None)
@given(rounds=st.integers(1, 4), asked=st.lists(st.integers(0, 6), min_size=3, max_size=9))
def test_all_releases_of_a_run_together_cost_at_most_what_it_claims(
    tmp_path_factory: pytest.TempPathFactory, name: str, rounds: int, asked: list[int]
) -> None:
    flat: dict[str, Any] = PRIVATE | PLANS[name]
    for section in ("fedavg", "fedlap", "dpcvae"):
        if f"{section}.rounds" in flat:
            flat |= {f"{section}.rounds": max(rounds, 2 if section == "dpcvae" else 1)}
    run = parse_run(flat)
    assert run.mechanism is not None
    gate = Gate(GENEROUS, Ledger(tmp_path_factory.mktemp("ledger"), "data"))
    for number in asked:
        made = MethodOutput(b"release", run.mechanism)
        with contextlib.suppress(BudgetError):
            gate.let_out(entry(run, "1", made, number))
    spent = gate.ledger.spent(run.mechanism.delta, "1")
    assert 0 < spent <= run.mechanism.epsilon * (1 + 1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_all_rounds_that_a_run_plans_are_let_out(tmp_path: Path, name: str) -> None:
    run = parse_run(PRIVATE | PLANS[name])
    assert run.mechanism is not None
    gate = Gate(GENEROUS, Ledger(tmp_path, "data"))
    for number in range(1, run.mechanism.rounds + 1):
        gate.let_out(entry(run, "1", MethodOutput(b"release", run.mechanism), number))
    assert len(gate.ledger.entries()) == run.mechanism.rounds


def test_a_second_release_of_one_run_is_refused_by_a_hospital(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, "features", Data((Record("a"), Record("b"))))
    hospital.run_id, run = 5, PRIVATE | METHODS["sums diag"]
    question = to_record(None, {"run": parse_run(run).digest})
    replies = [hospital.ask("train", run, question).config_records[INFO] for _ in range(3)]
    assert [reply["status"] for reply in replies] == ["ok", "budget", "budget"]
    assert len(hospital.entries()) == 1


def test_of_requests_at_the_same_time_no_more_are_let_out_than_planned(tmp_path: Path) -> None:
    """All pass the check before the work, so the charge checks again, in the ledger's lock."""
    run = parse_run(PRIVATE | METHODS["sums diag"])
    together = Barrier(4)

    def ask(_: int) -> str:
        gate = Gate(GENEROUS, Ledger(tmp_path, "data"))
        release = entry(run, "1", MethodOutput(b"release", run.mechanism))
        gate.check_planned(release)
        together.wait()
        try:
            gate.let_out(release)
        except BudgetError as error:
            return error.code
        return "out"

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(ask, range(4))) == ["budget", "budget", "budget", "out"]
