"""What a relay of a chain must be, and what a site that fails does to it, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base import chain as base
from fedsurrogate.strategies.base.outcome import NO_REPLY, Site
from fedsurrogate.strategies.fedpft import strategy as module
from fedsurrogate.strategies.fedpft.strategy import FedPFTChain
from tests.strategies.base.test_courses_of_a_run import Kept

CHAIN = {"method": "fedpft", "fedpft.topology": "chain", "classes": "a,b"}
PRIVATE = {"epsilon": 4.0, "delta": 1e-5}


def begun(**more: Any) -> FedPFTChain:
    strategy = FedPFTChain(CHAIN | more, Kept())
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "") for at in range(3)}
    return strategy


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("relay", "payload", "fine"),
    [
        (b"", b"x", (True, True)), (b"x", b"xy", (False, True)), (b"x", b"y", (True, False)),
        (b"xy", b"xyz", (False, True)), (b"xy", b"yxz", (False, False)), (b"xy", b"xy", (False, False)),
        (b"xy", b"xyzx", (False, False)), (b"", b"", (False, False)), (b"", b"xy", (False, False)),
    ],
)  # fmt: skip
def test_a_relay_has_one_surrogate_more_or_without_noise_one(
    monkeypatch: pytest.MonkeyPatch, private: bool, relay: bytes, payload: bytes, fine: Any
) -> None:
    strategy, checked = begun(**(PRIVATE if private else {})), list[Any]()
    place: Any = object()
    monkeypatch.setattr(module, "unpack_relay", lambda content: [bytes([each]) for each in content])
    monkeypatch.setattr(
        module,
        "unpack_surrogate",
        lambda each: SimpleNamespace(name=each, counts=[2, 3], dimension=4, claim=b"claim " + each),
    )
    monkeypatch.setattr(
        module, "check_surrogate", lambda each, given: checked.append((each.name, given))
    )
    monkeypatch.setattr(module, "check_stated", lambda claim, own: checked.append((claim, own)))
    group: Any = object()
    if not fine[private]:
        with pytest.raises(
            SurrogateError, match="earlier sites in the chain message are not as they were"
        ):
            strategy.last_reply(payload, relay or None, place, group)
        return
    found: Any = strategy.last_reply(payload, relay or None, place, group)
    assert found.name == payload[-1:]
    claim = strategy.config.mechanism_for("record", strategy.config.plan.subtracted(4))
    each = [bytes([part]) for part in payload]
    assert checked == [pair for one in each for pair in ((one, place), (b"claim " + one, claim))]
    limit = 5 * len(payload)
    for most in (limit, limit - 1):
        own = begun(**{"head.max-samples": most} | (PRIVATE if private else {}))
        if most < limit:
            reason = (
                f"the chain message represents {limit} records, above head.max-samples = {most}"
            )
            with pytest.raises(SurrogateError, match=reason):
                own.last_reply(payload, relay or None, place, group)
        else:
            own.last_reply(payload, relay or None, place, group)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("sender", ["s1", "s2"])
def test_the_next_site_can_use_a_relay_of_its_sender(
    monkeypatch: pytest.MonkeyPatch, private: bool, sender: str
) -> None:
    strategy, checked = begun(**(PRIVATE if private else {})), list[Any]()
    last = SimpleNamespace(header=Header("fedpft", "r", sender, "f", ("a",)))
    group: Any = SimpleNamespace(classes=("c", "d"), fingerprint="f" * 16, dimension=9)
    monkeypatch.setattr(strategy, "last_reply", lambda *given: checked.append(given) or last)
    monkeypatch.setattr(base, "check_reply", lambda *given: checked.append(given))
    if sender == "s1":
        strategy._check(b"new", b"old", "s1", group)
    else:
        with pytest.raises(
            SurrogateError, match="the chain message names another site as its sender: 's2'"
        ):
            strategy._check(b"new", b"old", "s1", group)
    classes = ("a", "b") if private else ("c", "d")
    place = base.Expectation.of(strategy.config, classes, "f" * 16, 9)
    assert checked == [
        (b"new", b"old", place, group),
        (last, strategy.config.plan.messages, place),
    ]


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("answer", ["relay", "silent", "fault"])
@pytest.mark.parametrize("failed", [[], ["s0"]])
@pytest.mark.parametrize("left", [1, 2])
def test_a_site_passes_the_relay_on_or_is_skipped(
    monkeypatch: pytest.MonkeyPatch, seal: bool, answer: str, failed: list[str], left: int
) -> None:
    strategy, calls = begun(**{"fedpft.seal": seal}), list[Any]()
    earlier = (b"older", "s9", "k9", 1)
    strategy._failed, strategy._earlier = list(failed), earlier if seal else None  # type: ignore[assignment]
    strategy._hop_started = 0.0
    walk: Any = SimpleNamespace(
        left=["s1", "s2"][:left], hop=4, skipped=["s5"], sender="s8", sender_key="k8", sent_hop=3
    )
    group = SimpleNamespace(nodes={"s1": 1, "s2": 2})
    way: Any = SimpleNamespace(walk=walk, group=group, relay=b"old")
    fault = SurrogateError("no relay")
    answers: Any = {"relay": (b"new", {"info": 1}), "silent": None, "fault": fault}
    monkeypatch.setattr(
        strategy, "_answer", lambda *given: calls.append(given[1:]) or answers[answer]
    )
    monkeypatch.setattr(strategy, "_without_last", lambda *given: calls.append(given[1:]) or fault)
    monkeypatch.setattr(strategy, "_passed_on", lambda *given: calls.append(given[1:6]))
    strategy._hop(way, [])
    wanted: list[Any] = [(b"old", [])]
    assert isinstance(strategy.recorder, Kept)
    events, site = strategy.recorder.events, strategy.outcome.sites[1]
    if answer == "relay":
        wanted.append((group, "s1", 4, b"new", {"info": 1}))
        assert (way.relay, strategy._failed, walk.skipped, events) == (b"new", [], ["s5"], [])
        assert strategy._earlier == ((b"old", "s8", "k8", 3) if seal else None)
    elif answer == "silent":
        reason = f"skipped in the chain: {NO_REPLY}"
        assert events == [{"event": "dropped", "site": "s1", "reason": reason}]
        assert (walk.skipped, strategy._failed, site.fate) == (["s5", "s1"], failed, "used")
    else:
        # Where a second site fails, or none is left to try, the last relay may be at fault.
        if seal and (failed or left == 1):
            wanted.append((fault, 4))
        assert (walk.skipped, strategy._failed) == (["s5", "s1"], [*failed, "s1"])
        assert (site.fate, site.reason, events[0]["round"]) == ("rejected", "no relay", 4)
    assert calls == wanted
    if answer != "relay":
        assert way.relay == b"old"
        assert strategy._earlier == (earlier if seal else None)


@pytest.mark.parametrize("accuracy", [None, 0.75])
@pytest.mark.parametrize("simulated", [False, True])
def test_a_site_that_passed_the_relay_on_is_the_next_sender(
    accuracy: float | None, simulated: bool
) -> None:
    strategy = begun()
    site = strategy.outcome.sites[1]
    site.fate, site.reason, site.bytes_up = "dropped", "late", 70
    walk: Any = SimpleNamespace(done=["s0"], hops=[], sender="s0", sender_key="k0", sent_hop=1)
    group: Any = SimpleNamespace(nodes={"s1": 1}, keys={"s1": "k1"})
    info: Any = {"simulated": simulated, "fit-seconds": 2.5}
    info |= {} if accuracy is None else {"accuracy.model": accuracy}
    strategy._passed_on(walk, group, "s1", 2, b"relay", info, 1.23456)
    assert (site.fate, site.reason, site.simulated) == ("used", "", simulated)
    assert walk.done == ["s0", "s1"]
    assert (walk.sender, walk.sender_key, walk.sent_hop) == ("s1", "k1", 2)
    step = {"site": "s1", "bytes": 5, "seconds": 1.235}
    assert walk.hops == [step | ({} if accuracy is None else {"accuracy": accuracy})]
    assert isinstance(strategy.recorder, Kept)
    event = {"event": "replied", "site": "s1", "hop": 2, "accuracy": accuracy}
    facts = {"bytes": 70, "payload": 5, "seconds": 2.5}
    assert strategy.recorder.events == [event | facts]
