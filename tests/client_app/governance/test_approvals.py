"""A site answers a run only if those whom its policy names have allowed it, and its ledger says who."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.gate import (
    DECISIONS,
    Decision,
    Gate,
    decide,
    decisions,
    open_gate,
    who_allows,
)
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import entry, planned, prepare
from fedsurrogate.client_app.methods.job import MethodOutput, SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import BudgetError, ConfigError, PolicyError, SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.documents import Proposal, SignedProposal, read_signed
from fedsurrogate.common.security.sealing import public_key

RUN = {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}
ROUNDS = {**RUN, "method": "dp-fedavg", "fedavg.rounds": 3}
KEY = b"k" * 32
LINE = f'"Ada" = "{public_key(KEY).hex()}"\n'


def signed(content: Mapping[str, object] = RUN, keys: tuple[bytes, ...] = (KEY,)) -> SignedProposal:
    proposal = SignedProposal(Proposal.fresh("run", content, "a test", 30))  # type: ignore[arg-type]
    for key in keys:
        proposal = proposal.sign(key)
    return proposal


def with_text(proposal: SignedProposal | None, content: Mapping[str, object] = RUN) -> Run:
    return parse_run({**content, **({"approval": proposal.setting()} if proposal else {})})  # type: ignore[arg-type]


def digest_of(run: Run) -> str:
    return run.full_digest


ANSWERS = st.sampled_from([None, "approved", "refused"])


@given(
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "unsigned", "signed", "other"]),
    ANSWERS,
    st.booleans(),
)
def test_a_run_is_allowed_if_and_only_if_all_who_are_needed_have_allowed_it(
    tmp_path_factory: pytest.TempPathFactory,
    needs_people: bool,
    needs_officer: bool,
    has: str,
    answer: str | None,
    right_proposal: bool,
) -> None:
    home = tmp_path_factory.mktemp("site")
    (home / "approvers.toml").write_text(LINE)
    other = {**RUN, "epsilon": 0.5}
    given_ = {"none": None, "unsigned": signed(keys=()), "signed": signed(), "other": signed(other)}
    run = with_text(given_[has])
    own = given_[has].proposal.id if given_[has] else "any"  # type: ignore[union-attr]
    # A decision about another run changes nothing here.
    decide(home, digest_of(parse_run(other)), Decision("refused", "Eve", "", "2026-01-01"))  # type: ignore[arg-type]
    if answer:
        about = own if right_proposal else "another"
        decide(home, digest_of(run), Decision(answer, "Olga", about, "2026-01-01"))  # type: ignore[arg-type]
    policy = Policy(require_approval=int(needs_people), require_officer=needs_officer)
    rules = partial(who_allows, policy, home, home)
    right = has == "signed" or not needs_people
    # An officer approves a proposal; who refuses, refuses the settings.
    approved = answer == "approved" and (right_proposal or has == "none")
    if answer == "refused" or (needs_officer and not approved) or not right:
        with pytest.raises(PolicyError):
            rules(digest_of(run), run.settings.approval)
        return
    allowed = rules(digest_of(run), run.settings.approval)
    assert ("Ada" in allowed.by) == needs_people
    assert ("here Olga" in allowed.by) == approved


def site(tmp_path: Path, policy: str) -> dict[str, str]:
    (tmp_path / "data").mkdir()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "policy.toml").write_text(policy)
    (tmp_path / "policy" / "approvers.toml").write_text(LINE)
    return {
        "site": "north",
        "data": "safetensors",
        "data-dir": str(tmp_path / "data"),
        "state-dir": str(tmp_path / "state"),
        "check-log-dir": str(tmp_path / "check-log"),
        "policy": str(tmp_path / "policy" / "policy.toml"),
    }


def leave(
    node: NodeConfig, run: Run, flower_run: str, number: int, gate: Gate | None = None
) -> None:
    """What a run that asks this site for a round does."""
    gate = gate or open_gate(node, "safetensors", flower_run)
    gate.check_request(run)
    gate.let_out(entry(run, flower_run, MethodOutput(b"x", run.mechanism_for("record")), number))


def opened(tmp_path: Path) -> NodeConfig:
    node = parse_node_config(site(tmp_path, "require-approval = 1\nepsilon-total = 100.0\n"))
    open_gate(node, "safetensors", "7").ledger.open()
    return node


def test_the_ledger_says_who_has_allowed_each_release_and_a_proposal_is_for_one_run(
    tmp_path: Path,
) -> None:
    node, proposal = opened(tmp_path), signed(ROUNDS)
    run, ledger = with_text(proposal, ROUNDS), open_gate(node, "safetensors", "7").ledger
    leave(node, run, "7", 1)
    first = ledger.entries()[0]
    assert (first["proposal"], first["allowed_by"]) == (proposal.proposal.id, "Ada")
    # A coordinator that starts the same run once more, as often as the budget lasts.
    with pytest.raises(PolicyError, match="allows one run, and run 7 has had round 1"):
        leave(node, run, "8", 1)
    # A run that is resumed goes on with its later rounds.
    leave(node, run, "8", 2)
    with pytest.raises(PolicyError, match="allows one run"):
        leave(node, run, "7", 2)
    assert len(ledger.entries()) == 2


@given(orders=st.lists(st.tuples(st.sampled_from("789"), st.integers(-1, 6)), max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_runs_ask_for_one_proposal_pays_for_the_rounds_that_it_names_once_each(
    tmp_path_factory: pytest.TempPathFactory, orders: list[tuple[str, int]]
) -> None:
    """The number of a round comes from the coordinator: a one-shot run has no second round."""
    node = opened(tmp_path_factory.mktemp("site"))
    run, had = with_text(signed(ROUNDS), ROUNDS), dict[int, str]()
    for flower_run, number in orders:
        with suppress(PolicyError, BudgetError):
            leave(node, run, flower_run, number)
            assert 0 <= number <= run.rounds + 1
            assert number == 0 or had.setdefault(number, flower_run) == flower_run


@given(number=st.integers(max_value=0) | st.just(False), settings_=st.sampled_from([RUN, ROUNDS]))
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_for_a_release_is_for_the_round_that_may_be_reported_again(
    tmp_path: Path, number: int, settings_: dict[str, Any]
) -> None:
    """Round 0 is no round of a proposal, so it would pay for a release in every run."""
    node = parse_node_config({"site": "north", "state-dir": str(tmp_path)})
    run = with_text(signed(settings_), settings_)
    request = SiteRequest(run, node, "north", flower_run="7", info={"round": number})
    with pytest.raises(SurrogateError, match="rounds begin at 1"):
        planned(request)
    with pytest.raises(SurrogateError, match="rounds begin at 1"):
        prepare(request, Gate(Policy(), Ledger(tmp_path, "data")))


@given(st.lists(st.integers(1, 2), min_size=2, max_size=5))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_runs_that_ask_at_the_same_instant_share_no_round_of_a_proposal(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int]
) -> None:
    node = opened(tmp_path_factory.mktemp("site"))
    run, looked = with_text(signed(ROUNDS), ROUNDS), Barrier(len(numbers))
    gates = [open_gate(node, "safetensors", str(each)) for each in range(len(numbers))]
    for gate in gates:
        # The latest instant at which all have looked, and none has charged.
        gate.ledger.charge = partial(at_once, looked, gate.ledger.charge)  # type: ignore[method-assign]

    def ask(index: int) -> None:
        with suppress(PolicyError):
            leave(node, run, str(index), numbers[index], gates[index])

    with ThreadPoolExecutor(len(numbers)) as pool:
        list(pool.map(ask, range(len(numbers))))
    had = [each["round"] for each in gates[0].ledger.entries()]
    assert sorted(had) == sorted(set(numbers))


def at_once(looked: Barrier, charge: Callable[..., float], *words: Any) -> float:
    looked.wait(30)
    return charge(*words)


def test_a_ledger_that_was_reopened_knows_the_proposals_that_were_used(tmp_path: Path) -> None:
    node, run = opened(tmp_path), with_text(signed(ROUNDS), ROUNDS)
    leave(node, run, "7", 1)
    ledger = open_gate(node, "safetensors", "7").ledger
    ledger.reopen("moved to another machine", 1.0, 1e-5)
    ledger.reopen("and once more", 1.0, 1e-5)
    with pytest.raises(PolicyError, match="was used before this ledger was reopened"):
        leave(node, run, "8", 1)
    leave(node, with_text(signed(ROUNDS), ROUNDS), "8", 1)
    ledger.reopen("kept as it is", 0.0, 1e-5, keep=True)
    assert "proposals" not in ledger.entries()[-1]


def test_nothing_leaves_for_a_run_that_was_not_checked(tmp_path: Path) -> None:
    node = parse_node_config(site(tmp_path, "require-approval = 1\n"))
    gate = open_gate(node, "safetensors", "7")
    gate.ledger.open()
    run = with_text(signed())
    with pytest.raises(PolicyError, match="was not checked"):
        gate.let_out(entry(run, "7", MethodOutput(b"x", run.mechanism_for("record"))))
    with pytest.raises(PolicyError, match="no signed proposal"):
        gate.check_request(with_text(None))
    assert gate.ledger.entries() == []


LATE = (
    '{"a": {"answer": "approved", "officer": "O", "proposal": "", "time": "", "expires": "late"}}'
)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"answer": "approved"}}', LATE])
def test_decisions_that_cannot_be_read_allow_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / DECISIONS).write_text(content)
    with pytest.raises(ConfigError, match=DECISIONS):
        who_allows(Policy(), tmp_path, tmp_path, digest_of(with_text(None)), "")


def test_a_later_decision_replaces_an_earlier_one(tmp_path: Path) -> None:
    run = with_text(None)
    rules = partial(who_allows, Policy(require_officer=True), tmp_path, tmp_path)
    for answer in ("refused", "approved", "refused"):
        decide(tmp_path, digest_of(run), Decision(answer, "Olga", "", "2026-01-01"))  # type: ignore[arg-type]
        if answer == "refused":
            with pytest.raises(PolicyError, match="Olga, an officer of this site, has refused"):
                rules(digest_of(run), run.settings.approval)
        else:
            assert rules(digest_of(run), run.settings.approval).by == "here Olga"
    assert set(json.loads((tmp_path / DECISIONS).read_text())) == {digest_of(run)}


def test_an_approval_is_of_the_text_that_was_read_and_ends_with_its_last_day(
    tmp_path: Path,
) -> None:
    """Who writes a proposal chooses its id, and can choose one twice."""
    rules, read_ = partial(who_allows, Policy(require_officer=True), tmp_path, tmp_path), signed()
    run, text = with_text(read_), read_.proposal.text_digest()
    today = datetime.now(UTC).date()
    for last, may in ((today, True), (today - timedelta(1), False)):
        made = Decision("approved", "Olga", read_.proposal.id, "", text, last.isoformat())
        decide(tmp_path, digest_of(run), made)
        for approval in (run.settings.approval, ""):
            if may:
                assert rules(digest_of(run), approval).by == "here Olga"
                continue
            with pytest.raises(PolicyError, match="its last day has passed"):
                rules(digest_of(run), approval)
    decide(tmp_path, digest_of(run), Decision("approved", "Olga", read_.proposal.id, "", text))
    for change in ({"purpose": "something else"}, {"expires": "2999-01-01"}):
        other = SignedProposal(replace(read_.proposal, **change))
        assert other.proposal.digest() == digest_of(run)
        with pytest.raises(PolicyError, match="has approved this proposal"):
            rules(digest_of(run), other.setting())


def test_of_decisions_at_the_same_time_none_is_lost(tmp_path: Path) -> None:
    def refuse(number: int) -> None:
        decide(tmp_path, f"{number}", Decision("refused", "Olga", "", "2026-01-01"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(refuse, range(40)))
    assert set(decisions(tmp_path)) == {f"{number}" for number in range(40)}


def test_a_text_in_which_a_key_stands_twice_is_no_proposal() -> None:
    text = signed().text()
    for key, value in (("purpose", '"a test"'), ("epsilon", "1.0")):
        twice = text.replace(f'"{key}": {value}', f'"{key}": 0, "{key}": {value}')
        assert twice != text
        with pytest.raises(ConfigError, match="no proposal"):
            read_signed(twice)
    for change in ({"purpose": "one\u2028two"}, {"expires": "2026-W10-1"}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            replace(signed().proposal, **change)
