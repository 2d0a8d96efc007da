"""A signature allows exactly what was signed: these releases, by these people, until that day."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import (
    Proposal,
    SignedProposal,
    check_signed,
    read_setting,
    read_signed,
)
from fedsurrogate.common.security.sealing import public_key

RUN = {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}
DIGEST = parse_run(RUN).full_digest
PRIVATE = {name: bytes([number]) * 32 for number, name in enumerate(("Ada", "Ben", "Cy", "Dee"))}
PUBLIC = {name: public_key(key) for name, key in PRIVATE.items()}
TODAY = datetime.now(UTC).date()
PEOPLE = st.lists(st.sampled_from(sorted(PRIVATE)), unique=True)


def proposed(content: dict[str, object] | None = None, days: int = 30) -> SignedProposal:
    return SignedProposal(Proposal.fresh("run", content or RUN, "a test", days))  # type: ignore[arg-type]


@given(PEOPLE, PEOPLE, st.integers(0, 4))
def test_enough_of_the_people_who_may_must_have_signed(
    signers: list[str], may: list[str], fewest: int
) -> None:
    signed = proposed()
    for name in signers:
        signed = signed.sign(PRIVATE[name])
    known = {name: PUBLIC[name] for name in may}
    allowed = sorted(set(signers) & set(may))
    if len(allowed) < fewest:
        with pytest.raises(ConfigError, match=f"has {len(allowed)} signatures of the {len(may)}"):
            check_signed(signed, DIGEST, known, fewest, TODAY)
    else:
        assert sorted(check_signed(signed, DIGEST, known, fewest, TODAY)) == allowed
    # One person who signs twice is one.
    again = signed
    for name in signers:
        again = again.sign(PRIVATE[name])
    assert sorted(again.signers(known)) == allowed
    assert read_signed(signed.text()) == signed
    assert read_setting(signed.setting()) == signed
    assert not set(signed.setting()) & set("\"'\\ ")


CHANGES = st.sampled_from(
    [
        {"epsilon": 2.0},
        {"delta": 1e-4},
        {"classes": "a,b,c"},
        {"method": "average", "epsilon": 0.0, "delta": 0.0},
        {"secure-aggregation": True},
        {"seed": 1},
        {"fedpft.components": 3},
    ]
)


@given(CHANGES)
def test_other_releases_than_those_signed_are_not_allowed(change: dict[str, object]) -> None:
    signed = proposed().sign(PRIVATE["Ada"])
    other = parse_run({**RUN, **change})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allows something else"):
        check_signed(signed, other.full_digest, PUBLIC, 1, TODAY)
    # Nor does a signature move to another content.
    moved = replace(signed, proposal=replace(signed.proposal, content={**RUN, **change}))
    with pytest.raises(ConfigError, match="has 0 signatures"):
        check_signed(moved, other.full_digest, PUBLIC, 1, TODAY)


@given(st.sampled_from(["id", "purpose", "expires", "action"]))
def test_no_field_can_be_changed_after_it_was_signed(name: str) -> None:
    signed = proposed().sign(PRIVATE["Ada"])
    other = {"id": "0" * 32, "purpose": "else", "expires": "2999-01-01", "action": "register"}
    moved = replace(signed, proposal=replace(signed.proposal, **{name: other[name]}))
    assert signed.signers(PUBLIC) == ["Ada"]
    assert moved.signers(PUBLIC) == []


@given(st.integers(-400, 400), st.integers(1, 400))
def test_a_proposal_may_be_started_until_its_last_day(later: int, days: int) -> None:
    signed = proposed(days=days).sign(PRIVATE["Ada"])
    on = TODAY + timedelta(later)
    if later <= days:
        assert check_signed(signed, DIGEST, PUBLIC, 1, on) == ["Ada"]
    else:
        with pytest.raises(ConfigError, match="expired on"):
            check_signed(signed, DIGEST, PUBLIC, 1, on)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(json.loads(proposed().text()))), JSON)
def test_any_other_text_is_refused_with_one_kind_of_error(name: str, value: object) -> None:
    content = json.loads(proposed().text()) | {name: value}
    for text in (json.dumps(content), json.dumps(value), str(value)):
        for read in (read_signed, read_setting):
            try:
                read(text).proposal.digest()
            except ConfigError:
                continue
