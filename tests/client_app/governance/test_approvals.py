"""A site answers a run only if those whom its policy names have allowed it, and its ledger says who."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.approvals import (
    DECISIONS,
    Approvals,
    Decision,
    decide,
)
from fedsurrogate.client_app.governance.gate import open_gate
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.task import MethodOutput
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError, PolicyError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.proposals import Proposal, SignedProposal
from fedsurrogate.common.security.sealing import public_key

RUN = {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}
KEY = b"k" * 32
LINE = f'"Ada" = "{public_key(KEY).hex()}"\n'


def signed(content: Mapping[str, object] = RUN, keys: tuple[bytes, ...] = (KEY,)) -> SignedProposal:
    proposal = SignedProposal(Proposal.fresh("run", content, "a test", 30))  # type: ignore[arg-type]
    for key in keys:
        proposal = proposal.sign(key)
    return proposal


def with_text(proposal: SignedProposal | None, content: Mapping[str, object] = RUN) -> Run:
    return parse_run({**content, **({"approval": proposal.setting()} if proposal else {})})  # type: ignore[arg-type]


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
    decide(home, parse_run(other).full_digest, Decision("refused", "Eve", "", "2026-01-01"))  # type: ignore[arg-type]
    if answer:
        about = own if right_proposal else "another"
        decide(home, run.full_digest, Decision(answer, "Olga", about, "2026-01-01"))  # type: ignore[arg-type]
    policy = Policy(require_approval=int(needs_people), require_officer=needs_officer)
    rules = Approvals(policy, home, home)
    right = has == "signed" or not needs_people
    # An officer approves a proposal; who refuses, refuses the settings.
    approved = answer == "approved" and (right_proposal or has == "none")
    if answer == "refused" or (needs_officer and not approved) or not right:
        with pytest.raises(PolicyError):
            rules.check(run.full_digest, run.settings.approval)
        return
    allowed = rules.check(run.full_digest, run.settings.approval)
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
        "witness-dir": str(tmp_path / "witness"),
        "policy": str(tmp_path / "policy" / "policy.toml"),
    }


def test_the_ledger_says_who_has_allowed_each_release_and_a_proposal_is_for_one_run(
    tmp_path: Path,
) -> None:
    node = parse_node_config(site(tmp_path, "require-approval = 1\n"))
    gate = open_gate(node, "safetensors", "7")
    gate.ledger.open()
    proposal = signed()
    run = with_text(proposal)

    def let_out(flower_run: str, number: int) -> None:
        again = open_gate(node, "safetensors", flower_run)
        again.check_request(run)
        claim = run.mechanism_for("record")
        again.let_out(entry(run, flower_run, MethodOutput(b"x", claim), number))

    let_out("7", 1)
    first = gate.ledger.entries()[0]
    assert (first["proposal"], first["allowed_by"]) == (proposal.proposal.id, "Ada")
    # A coordinator that starts the same run once more, as often as the budget lasts.
    with pytest.raises(PolicyError, match="allows one run, and run 7 has had round 1"):
        let_out("8", 1)
    # A run that is resumed goes on with its later rounds.
    let_out("8", 2)
    with pytest.raises(PolicyError, match="allows one run"):
        let_out("7", 2)
    assert len(gate.ledger.entries()) == 2


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


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"answer": "approved"}}'])
def test_decisions_that_cannot_be_read_allow_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / DECISIONS).write_text(content)
    with pytest.raises(ConfigError, match=DECISIONS):
        Approvals(Policy(), tmp_path, tmp_path).check(with_text(None).full_digest, "")


def test_a_later_decision_replaces_an_earlier_one(tmp_path: Path) -> None:
    run = with_text(None)
    rules = Approvals(Policy(require_officer=True), tmp_path, tmp_path)
    for answer in ("refused", "approved", "refused"):
        decide(tmp_path, run.full_digest, Decision(answer, "Olga", "", "2026-01-01"))  # type: ignore[arg-type]
        if answer == "refused":
            with pytest.raises(PolicyError, match="Olga, an officer of this site, has refused"):
                rules.check(run.full_digest, run.settings.approval)
        else:
            assert rules.check(run.full_digest, run.settings.approval).by == "here Olga"
    assert set(json.loads((tmp_path / DECISIONS).read_text())) == {run.full_digest}
