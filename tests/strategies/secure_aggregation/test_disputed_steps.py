"""The steps of secure aggregation without a network: which replies are read, who is lost and why, whom disputes
leave out, and when too few sites are left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, SealError, SurrogateError
from fedsurrogate.common.secure_aggregation.protocol import begin
from fedsurrogate.common.secure_aggregation.rules import SumRules
from fedsurrogate.common.security.sealing import new_key
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import DISPUTED
from fedsurrogate.strategies.base.outcome import RefusedError
from fedsurrogate.strategies.secure_aggregation.steps import Dispute, left_out, why
from fedsurrogate.strategies.secure_aggregation.strategy import SecureAggregation
from tests.strategies.base.test_courses_of_a_run import Kept
from tests.strategies.secure_aggregation.test_totals import prepared

NAMES = [f"s{at}" for at in range(5)]
SITES = st.sampled_from(NAMES)
PAIRS = st.tuples(SITES, SITES).filter(lambda pair: pair[0] != pair[1])


def events(strategy: SecureAggregation) -> list[tuple[str, ...]]:
    assert isinstance(strategy.recorder, Kept)
    return [(each["event"], each["site"], each["reason"]) for each in strategy.recorder.events]


def begun(members: int = 5, **more: Any) -> SecureAggregation:
    strategy = prepared(members, dict.fromkeys(NAMES[:members], True), **more)
    strategy._nodes = {f"s{at}": at for at in range(members)}
    strategy._lost, strategy._sum = {}, "0" * 32
    return strategy


@settings(max_examples=80, deadline=None)
@given(
    st.sets(PAIRS, max_size=5),
    st.sets(SITES),
    st.sets(SITES, max_size=3),
    st.integers(2, 4),
    st.integers(1, 5),
)
def test_after_disputes_every_mask_can_be_taken_out_or_the_sum_begins_again(
    pairs: set[tuple[str, str]], silent: set[str], waiting: set[str], threshold: int, least: int
) -> None:
    strategy = begun()
    strategy._rules = SumRules(5, 1, threshold, max(least, threshold))
    strategy._disputes = frozenset(Dispute(by, about, "shares") for by, about in pairs)
    strategy._waiting = frozenset({by for by, _ in pairs} | waiting)
    strategy._lost = dict.fromkeys(strategy._waiting, "waits")
    strategy._dealt = dict.fromkeys(NAMES, object())  # type: ignore[arg-type]
    strategy._masked = {
        name: np.zeros(1, dtype=np.uint32)
        for name in NAMES
        if name not in silent | strategy._waiting
    }
    strategy._delivered = dict.fromkeys(NAMES, frozenset(NAMES))
    calls: list[str] = []

    def prepare() -> None:
        calls.append("prepare")
        # A new sum reads disputes of which none is open.
        assert strategy._waiting == frozenset()
        strategy._dealt = {"s4": object(), "s1": object()}  # type: ignore[dict-item]

    strategy._prepare = prepare  # type: ignore[method-assign]
    waited, masked = strategy._waiting, dict(strategy._masked)
    again = strategy._without_disputes("late")
    if not waited:
        assert (again, calls, events(strategy)) == ([], [], [])
        assert strategy._masked == masked
        return
    out = left_out(strategy._disputes)
    asked = waited - out
    kept = {name for name in masked if name not in out}
    delivered = {
        name: set(NAMES) - {a for by, a in pairs if by == name} if name in asked else set(NAMES)
        for name in NAMES
    }
    summed = kept | asked
    readers = [sum(name in delivered[each] for each in summed) for name in set(NAMES) - summed]
    possible = len(summed) >= strategy._rules.least and all(
        not count or count >= threshold for count in readers
    )
    if not possible and not kept:
        assert calls == ["prepare"]
        assert again == ["s1", "s4"]
        rejected = out
    elif not possible:
        assert (again, calls) == ([], [])
        rejected = set(waited)
        assert set(strategy._masked) == set(masked) - waited
    else:
        assert calls == []
        assert again == sorted(asked)
        rejected = out
        assert set(strategy._masked) == kept
        assert strategy._delivered == delivered
    texts = {name: f"late: {why(name, strategy._disputes, 1)}" for name in rejected}
    assert events(strategy) == [("rejected", name, texts[name]) for name in sorted(rejected)]
    assert {strategy.outcome.sites[int(name[1])].reason for name in rejected} == set(texts.values())
    assert strategy._lost == texts
    assert strategy._waiting == frozenset()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["fine", "empty", "broken", "sealed", "refused", "disputed", ""]), min_size=3, max_size=5),
    st.sampled_from(["keys", "shares", None]),
    st.sampled_from([[0], [1, 2], [0, 1, 2]]),
)  # fmt: skip
def test_replies_are_read_and_what_is_missing_is_lost(
    replies: list[str], what: Any, places: list[int]
) -> None:
    strategy = begun(len(replies))
    names = NAMES[: len(replies)]
    strategy._members = dict.fromkeys(names)  # type: ignore[arg-type]
    strategy._lost = dict.fromkeys(names[:2], "before")
    errors = {
        "sealed": SealError("seal"),
        "refused": RefusedError("no", {}),
        "disputed": RefusedError("no", {DISPUTED: places}),
    }

    def read(reply: Any, site: Any) -> Any:
        assert site is strategy.outcome.sites[reply]
        if (how := replies[reply]) in errors:
            raise errors[how]
        return None if how == "empty" else how.encode(), {"of": reply}

    def content(name: str, payload: bytes, info: Any) -> tuple[str, int]:
        if payload == b"broken":
            raise SurrogateError("not numbers")
        return name, info["of"]

    strategy._node = lambda reply: reply  # type: ignore[assignment,method-assign,return-value]
    strategy._read = read  # type: ignore[method-assign]
    sent: Any = [at for at, how in enumerate(replies) if how]
    found = strategy._collect(sent, names, "late", content, what)
    assert found == {f"s{at}": (f"s{at}", at) for at in sent if replies[at] == "fine"}
    texts = {
        "empty": "a reply without content",
        "broken": "not numbers",
        "sealed": "seal",
        "refused": "no",
        "disputed": "no",
    }
    lost, disputes, seen = dict.fromkeys(names[:2], "before"), set(), []
    for at in sent:
        name, how = names[at], replies[at]
        if how == "fine":
            lost.pop(name, None)
            continue
        lost[name] = f"late: {texts[how]}"
        others = {names[each] for each in places if each < len(names)} - {name}
        if how == "disputed" and what and others and len(places) <= len(names):
            disputes |= {Dispute(name, other, what) for other in others}
        else:
            seen.append(("rejected", name, lost[name]))
    for at, how in enumerate(replies):
        if not how and names[at] not in lost:
            lost[names[at]] = "late"
            seen.append(("dropped", names[at], "late"))
            assert strategy.outcome.sites[at].reason == "late"
    assert strategy._lost == lost
    assert events(strategy) == seen
    assert strategy._disputes == disputes
    assert strategy._waiting == {each.by for each in disputes}


def test_a_site_that_is_rejected_for_the_same_reason_again_is_recorded_once() -> None:
    strategy = begun()
    strategy._disputes = frozenset({Dispute("s1", "s0", "keys"), Dispute("s2", "s0", "shares")})
    strategy._waiting = frozenset({"s1", "s2"})
    strategy._lost = {"s1": "waits", "s2": "waits", "s3": "gone"}
    strategy._decide({"s0"}, "late")
    reason = f"late: {why('s0', strategy._disputes, strategy._rules.colluding)}"
    assert strategy._lost == {"s3": "gone", "s0": reason}
    strategy._decide({"s0"}, "late")
    assert events(strategy) == [("rejected", "s0", reason)]
    assert strategy._untrusted() == {"s2"}


@pytest.mark.parametrize("distributed", [False, True])
def test_the_end_of_a_sum_names_the_lost_sites_and_what_helps(distributed: bool) -> None:
    more = {"epsilon": 8.0, "delta": 1e-5, "method": "fedpft", "fedpft.covariance": "gram"}
    strategy = begun(5, **(more if distributed else {}))
    strategy._lost = {"s3": "late", "s1": "odd"}
    strategy._enough(3, 3, "there")
    text = (
        "the secure aggregation cannot be completed: 2 of 5 sites there, 3 are needed (see dropouts and "
        "colluding); nothing was revealed; s1: odd; s3: late"
    )
    with pytest.raises(RunError) as refusal:
        strategy._enough(2, 3, "there")
    assert str(refusal.value) == text
    strategy._disputes = frozenset({Dispute("s1", "s0", "keys")})
    text += "; run again without the site that is at fault"
    if not distributed:
        text += "; a hospital that has sent its masked vector then needs `site ledger forget`"
    with pytest.raises(RunError) as refusal:
        strategy._enough(2, 3, "there")
    assert str(refusal.value) == text


def test_members_are_the_sites_with_valid_keys_of_their_own_that_no_dispute_excludes() -> None:
    strategy = begun()
    context = strategy._context
    private = {name: new_key() for name in NAMES}
    made = {name: begin(name, private[name], context)[1] for name in NAMES}
    packed = {name: surrogate_proto.pack_member(member).hex() for name, member in made.items()}
    assert strategy._key_list(packed) == made
    assert list(strategy._key_list(dict(reversed(packed.items())))) == NAMES
    strategy._unknown = frozenset({"s1"})
    strategy._disputes = frozenset({Dispute("s2", "s3", "shares"), Dispute("s4", "s0", "keys")})
    assert list(strategy._key_list(packed)) == ["s0", "s3", "s4"]
    assert events(strategy) == []
    strategy._unknown = strategy._disputes = frozenset()
    twice = begin("s4", private["s0"], context)[1]
    other = begin("s3", private["s3"], b"another sum")[1]
    wrong = packed | {
        "s1": "no hex",
        "s2": packed["s3"],
        "s3": surrogate_proto.pack_member(other).hex(),
        "s4": surrogate_proto.pack_member(twice).hex(),
    }
    assert list(strategy._key_list(wrong)) == ["s0"]
    reasons = ["non-hexadecimal", "keys of another site", "does not fit", "the same public:"]
    for (event, site, reason), name, part in zip(events(strategy), NAMES[1:], reasons, strict=True):
        assert (event, site) == ("rejected", name)
        assert reason.startswith("its keys for the secure aggregation cannot be used: ")
        assert part in reason
